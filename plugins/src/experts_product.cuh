// The products of a mixture of experts: gate and up with the activation, and down, of the groups that the routing made.
//
// A warp takes 16 rows of a weight, a granule, and all of their inputs, so that no sum leaves it.
#pragma once

#include "experts_loading.cuh"
#include "experts_tiles.cuh"
#include "fp8.cuh"
#include "instructions.cuh"
#include "int4.cuh"
#include "launch.cuh"

namespace dflash
{
namespace moe
{

// -- multiplying ------------------------------------------------------------------------------------------------------

// Multiplies granules by a group's inputs. Lane l has parts of the rows l / 4 and l / 4 + 8 of a granule, and of the
// inputs of token l / 4.
template <typename T, Weight kWeight, int kTiles>
struct Mainloop
{
    static constexpr int kStepBytes = Order<kWeight>::kStepBytes;

    // A lane's part of half a unit of rows.
    struct RowPart
    {
        uint4 upper;
        uint4 lower;
        uint32_t upper_scale = 0; // INT4's
        uint32_t lower_scale = 0;
    };

    using Fragment = std::conditional_t<is_tiled(kWeight), TilePart<T, kWeight>, RowPart>;

    Layout const& layout;
    unsigned char const* const ring;
    int const quad;
    int const part;
    unsigned char const* inputs; // this lane's first; of a token that is not there, the last one's
    uint32_t const at; // this lane's of a unit
    int place = 0; // bytes of the ring before the unit that is next
    Fragment first; // of that one

    __device__ __forceinline__ Mainloop(
        Product const& p, Layout const& layout_, int lane, unsigned char const* ring_, unsigned char const* inputs_)
        : layout(layout_)
        , ring(ring_)
        , quad(lane / 4)
        , part(lane % 4)
        , inputs(inputs_ + min(quad, p.tokens - 1) * layout_.pitch + part * 16)
        , at(is_tiled(kWeight) ? shared_address(ring_) + part * part_bytes(kWeight)
                               : quad * kLine + (part ^ (quad % 2 * 4)) * 16)
    {
    }

    // Waits for the unit that is next, and reads its first half: before a granule, and once before the first.
    __device__ __forceinline__ void begin_unit()
    {
        wait_for_copies<kUnits - 1>();
        __syncwarp();
        first = load(0);
    }

    // Adds to c the products of a granule and the first `tiles` tiles of tokens. The place of each unit that was read
    // goes to the unit after those on their way. Each half is read while the one before it is multiplied.
    template <bool kGateUp, typename Walk>
    __device__ __forceinline__ void multiply(float (&c)[kTiles][4], int tiles, Weights<kWeight, kGateUp, Walk>& weights,
        [[maybe_unused]] Fp8Scales* fp8_scales)
    {
        float sums[kTiles][4] = {};
        for (int unit = 0; unit < layout.units; ++unit)
        {
            Fragment const second = load(1); // of a row's last unit, what was there before, perhaps
            __syncwarp();
            weights.load_next(place);
            constexpr int kUnitBytes = unit_bytes(kWeight);
            place = place == (kUnits - 1) * kUnitBytes ? 0 : place + kUnitBytes;
            multiply_half(c, sums, tiles, first, unit * 2);
            begin_unit();
            if (unit * 2 + 1 < layout.steps)
            {
                multiply_half(c, sums, tiles, second, unit * 2 + 1);
            }
            if constexpr (kWeight == Weight::kFp8)
            {
                fp8_scales->add(c, sums, unit);
            }
        }
    }

    __device__ __forceinline__ Fragment load(int half) const
    {
        Fragment a;
        if constexpr (is_tiled(kWeight))
        {
            a.read(at + place + half * tile_bytes(kWeight), place_in_part<kWeight>(quad));
            return a;
        }
        unsigned char const* const loaded = ring + place;
        if constexpr (kWeight == Weight::kInt4)
        {
            uint16_t const* const own
                = reinterpret_cast<uint16_t const*>(loaded + kUnit + quad * kInt4ScaleLine) + half * 4 + part;
            a.upper_scale = own[0];
            a.lower_scale = own[8 * kInt4ScaleLine / 2];
        }
        a.upper = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64));
        a.lower = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64) + 8 * kLine);
        return a;
    }

    // `sums`: of a unit of FP8, whose scales are not in them yet.
    __device__ __forceinline__ void multiply_half(
        float (&c)[kTiles][4], [[maybe_unused]] float (&sums)[kTiles][4], int tiles, Fragment const& a, int step) const
    {
        unsigned char const* const b = inputs + step * kStepBytes;
        if constexpr (is_tiled(kWeight))
        {
            multiply_tile(c, tiles, a, b);
        }
        else if constexpr (kWeight == Weight::kInt4)
        {
            multiply_int4(c, tiles, a, b);
        }
        else if constexpr (kWeight == Weight::kFp8)
        {
            multiply_fp8(sums, tiles, a, b);
        }
        else
        {
            multiply_numbers(c, tiles, a, b);
        }
    }

    __device__ __forceinline__ void multiply_numbers(
        float (&c)[kTiles][4], int tiles, Fragment const& a, unsigned char const* b_from) const
    {
        uint4 const u = a.upper, l = a.lower;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
            if (tile < tiles)
            {
                uint4 const b = *reinterpret_cast<uint4 const*>(b_from + tile * 8 * layout.pitch);
                multiply_add<T>(c[tile], {u.x, l.x, u.y, l.y}, b.x, b.y);
                multiply_add<T>(c[tile], {u.z, l.z, u.w, l.w}, b.z, b.w);
            }
        }
    }

    __device__ __forceinline__ void multiply_fp8(
        float (&c)[kTiles][4], int tiles, Fragment const& a, unsigned char const* b_from) const
    {
        uint32_t const upper[4] = {a.upper.x, a.upper.y, a.upper.z, a.upper.w};
        uint32_t const lower[4] = {a.lower.x, a.lower.y, a.lower.z, a.lower.w};
#pragma unroll
        for (int word = 0; word < 4; word += 2)
        {
            uint32_t u[2][2], l[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                Fp8<T>::spread(upper[word + i], u[i]);
                Fp8<T>::spread(lower[word + i], l[i]);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                if (tile < tiles)
                {
                    uint4 const b = *reinterpret_cast<uint4 const*>(b_from + tile * 8 * layout.pitch + word * 32);
                    multiply_add<T>(c[tile], {u[0][0], l[0][0], u[0][1], l[0][1]}, b.x, b.y);
                    multiply_add<T>(c[tile], {u[1][0], l[1][0], u[1][1], l[1][1]}, b.z, b.w);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_int4(
        float (&c)[kTiles][4], int tiles, Fragment const& a, unsigned char const* b_from) const
    {
        uint32_t const upper[4] = {a.upper.x, a.upper.y, a.upper.z, a.upper.w};
        uint32_t const lower[4] = {a.lower.x, a.lower.y, a.lower.z, a.lower.w};
        uint32_t const upper_factor = Int4<T>::factor(a.upper_scale);
        uint32_t const lower_factor = Int4<T>::factor(a.lower_scale);
#pragma unroll
        for (int word = 0; word < 4; ++word)
        {
            uint32_t u[4], l[4];
            Int4<T>::spread(upper[word], upper_factor, u);
            Int4<T>::spread(lower[word], lower_factor, l);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                if (tile < tiles)
                {
                    uint4 const b = *reinterpret_cast<uint4 const*>(b_from + tile * 8 * layout.pitch + word * 64);
                    multiply_add<T>(c[tile], {u[0], l[0], u[1], l[1]}, b.x, b.y);
                    multiply_add<T>(c[tile], {u[2], l[2], u[3], l[3]}, b.z, b.w);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_tile(
        float (&c)[kTiles][4], int tiles, Fragment const& a, unsigned char const* b_from) const
    {
#pragma unroll
        for (int word = 0; word < 4; ++word)
        {
            uint32_t u[4], l[4];
            a.unpack(0, word, u);
            a.unpack(1, word, l);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                if (tile < tiles)
                {
                    uint4 const b = *reinterpret_cast<uint4 const*>(b_from + tile * 8 * layout.pitch + word * 64);
                    multiply_add<T>(c[tile], {u[0], l[0], u[1], l[1]}, b.x, b.y);
                    multiply_add<T>(c[tile], {u[2], l[2], u[3], l[3]}, b.z, b.w);
                }
            }
        }
    }
};

// -- what becomes of the sums -----------------------------------------------------------------------------------------

// Finishes and stores a granule's sums. A lane has two tokens' sums of two rows: a gate and its up, or two outputs.
template <typename T, Weight kWeight, bool kGateUp>
struct Epilogue
{
    Product const& p;
    Group const& group;
    int const lane;
    int const row;
    int const second_row;
    float bias[2] = {};
    [[maybe_unused]] float scale[2] = {}; // NVFP4's

    __device__ __forceinline__ Epilogue(Product const& p_, Group const& group_, int granule, int lane_)
        : p(p_)
        , group(group_)
        , lane(lane_)
        , row(granule * Rows<kGateUp>::kFirst + lane / 4)
        , second_row(row + 8 + static_cast<int>(Rows<kGateUp>::gap(p_)))
    {
        if (p.bias)
        {
            T const* const biases = static_cast<T const*>(p.bias) + static_cast<int64_t>(group.expert) * p.outputs;
            bias[0] = to_float(biases[row]);
            bias[1] = to_float(biases[second_row]);
        }
        if constexpr (kWeight == Weight::kNvfp4)
        {
            float const* const scales = p.row_scales + static_cast<int64_t>(group.expert) * p.outputs;
            scale[0] = scales[row];
            scale[1] = scales[second_row];
        }
    }

    // What the products' sum is. half: 0, of the first row; 1, of the second.
    __device__ __forceinline__ float scaled(float sum, int half) const
    {
        return kWeight == Weight::kNvfp4 ? sum * Nvfp4<T>::kRest * scale[half] : sum;
    }

    template <int kTiles>
    __device__ __forceinline__ void store(float const (&c)[kTiles][4]) const
    {
        constexpr int kOwn = 2 * kTiles; // tokens of a lane
        T* const out = static_cast<T*>(p.out);
        float sums[2][kOwn]; // of both rows; those of tokens that are done leave the front
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            sums[0][i] = c[i / 2][i % 2];
            sums[1][i] = c[i / 2][i % 2 + 2];
        }
#pragma unroll 1 // its instructions come from memory, too
        for (int i = 0; i < kOwn; ++i)
        {
            int const token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (token < group.tokens)
            {
                float const upper = rounded<T>(scaled(sums[0][0], 0) + bias[0]);
                float const lower = rounded<T>(scaled(sums[1][0], 1) + bias[1]);
                int64_t const pair = group.first + token;
                if constexpr (kGateUp)
                {
                    store_kept(out + pair * (p.outputs / 2) + row, from_float<T>(p.activated(upper, lower)));
                }
                else
                {
                    store_kept(out + pair * p.outputs + row, from_float<T>(upper));
                    store_kept(out + pair * p.outputs + second_row, from_float<T>(lower));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
#pragma unroll
                for (int j = 0; j + 1 < kOwn; ++j)
                {
                    sums[half][j] = sums[half][j + 1];
                }
            }
        }
    }
};

// -- the kernel -------------------------------------------------------------------------------------------------------

struct NoChooser
{
};

// What a product is given that may find the routing, the first one.
template <bool kGateUp>
using Chooser = std::conditional_t<kGateUp, dflash_moe_params, NoChooser>;

// Waits for the routing, or finds it where blocks do, with the inputs of a row that is alone: once before there are
// logits, for its code.
template <typename T, Weight kWeight>
__device__ __forceinline__ void find_routing(Product const& p, Layout const& layout, dflash_moe_params const& chooser,
    OwnRoute* own, unsigned char* inputs, int tile)
{
    if (!own)
    {
        wait();
        trigger();
        return;
    }
#pragma unroll 1
    for (bool is_real : {false, true})
    {
        own->clear(chooser);
        if (is_real)
        {
            wait();
            if (blockIdx.x > 0) // the first one stores the routing before others may begin
            {
                trigger();
            }
        }
        own->find<T>(chooser, p.route, tile, is_real,
            [&] { load_alone<kWeight>(p, layout, inputs, threadIdx.x - 32, blockDim.x - 32); });
    }
}

// Of a row's last tile, parts that are not there meet inputs of zeros: what lies in their place must be numbers, these
// zeros or an earlier tile's same part.
template <Weight kWeight>
__device__ __forceinline__ void clear_ring(Product const& p, unsigned char* ring)
{
    if (is_tiled(kWeight) && p.inputs / 32 % kTileParts != 0)
    {
#pragma unroll 1
        for (int i = threadIdx.x % 32 * 16; i < kUnits * unit_bytes(kWeight); i += 32 * 16)
        {
            *reinterpret_cast<uint4*>(ring + i) = {};
        }
        __syncwarp();
    }
}

// kGateUp: the first product, which ends with the activation.
template <typename T, Weight kWeight, int kTokens, bool kGateUp>
__global__ void __launch_bounds__(kMostWarps * 32, 1) product_kernel(Product const p, Chooser<kGateUp> const chooser)
{
    constexpr int kTiles = kTokens / 8;
    extern __shared__ __align__(128) unsigned char shared[];

    // The routing must be known. For the second product it is: the first one waited for it, or stored it, before
    // letting this begin. Reads of it before this kernel's own wait come from the L2 cache, which has it then.
    Layout const layout(p.inputs, kWeight);
    int const warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const ring = shared + warp * layout.warp_bytes;
    unsigned char* const inputs = shared + warps * layout.warp_bytes;
    OwnRoute* const own = kGateUp && p.routes ? reinterpret_cast<OwnRoute*>(inputs + p.tokens * layout.pitch) : nullptr;
    bool has_inputs = false;
    clear_ring<kWeight>(p, ring);
    if constexpr (kGateUp)
    {
        p.ask_ahead();
        find_routing<T, kWeight>(p, layout, chooser, own, inputs, kTokens);
        has_inputs = own && chooser.rows == 1;
    }
    else if (!p.reads_first)
    {
        trigger();
    }
    Groups const groups(p.route, own);
    Share const share(p, groups);
    Weights<kWeight, kGateUp> weights(p, layout, Cursor(groups, share), lane, ring);
    // Units asked for ahead of the inputs. Those of a first product, which are there already, would come behind a whole
    // ring. Of INT4 a ring is small beside them, and the second product asks before it waits for its inputs.
    int const ahead = kGateUp && kWeight != Weight::kInt4 && !has_inputs ? kUnits / 2 : kUnits;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i)
    {
        weights.load_next(i * unit_bytes(kWeight));
    }
    if constexpr (!kGateUp)
    {
        wait();
    }
    else if (own && blockIdx.x == 0 && warp == warps - 1) // which has no more granules than others
    {
        own->store(chooser, p.route);
    }
    Mainloop<T, kWeight, kTiles> mainloop(p, layout, lane, ring, inputs);
    int index = share.begin / share.stride; // of a group
    int first = share.begin - index * share.stride; // of the block's share of it
    for (int from = share.begin; from < share.end; from = ++index * share.stride, first = 0)
    {
        Group const group = groups.groups[index];
        if (!has_inputs)
        {
            __syncthreads();
            load_inputs<T, kWeight, kTokens, kGateUp>(p, layout, groups, group, inputs);
            __syncthreads();
        }
        if (from == share.begin)
        {
#pragma unroll 1
            for (int i = ahead; i < kUnits; ++i)
            {
                weights.load_next(i * unit_bytes(kWeight));
            }
            mainloop.begin_unit();
        }
        int const tiles = kTiles == 1 ? 1 : (group.tokens + 7) / 8;
        int const last = min(share.granules, share.end - index * share.stride);
        for (int granule = first + warp; granule < last; granule += warps)
        {
            Epilogue<T, kWeight, kGateUp> const epilogue(p, group, granule, lane);
            float c[kTiles][4] = {};
            if constexpr (kWeight == Weight::kFp8)
            {
                Fp8Scales scales(p, group.expert, epilogue.row, epilogue.second_row, lane);
                mainloop.multiply(c, tiles, weights, &scales);
            }
            else
            {
                mainloop.multiply(c, tiles, weights, nullptr);
            }
            epilogue.store(c);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace moe
} // namespace dflash
