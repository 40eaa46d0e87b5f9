// The products of a mixture of experts: gate and up with the activation, and down, of the groups that the routing made.
//
// A warp takes 16 rows of a weight, a granule, and all of their inputs, so that no sum leaves it.
#pragma once

#include "experts_route.cuh"
#include "instructions.cuh"
#include "mxfp4.cuh"

namespace dflash
{
namespace moe
{

constexpr int kMostWarps = 16;
constexpr int kLeastWarps = 4;
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit
constexpr int kUnit = kGranule * kLine; // bytes that a warp loads at a time
constexpr int kUnits = 4; // of a warp's ring

struct Product
{
    Route route;
    void const* weight; // [E, outputs, inputs]: numbers, or MXFP4's blocks
    uint8_t const* scales; // [E, outputs, inputs / 32], or null
    void const* bias; // [E, outputs], or null
    void const* x; // of gate and up [N, inputs]; of down [pairs, inputs]
    void* out; // of gate and up [pairs, outputs / 2]; of down [pairs, outputs]
    int inputs;
    int outputs;
    bool is_clamped;
    float alpha;
    float limit;
};

// Where things lie in shared memory: each warp's ring and scales, then the tokens' inputs.
struct Layout
{
    int row_bytes; // of the weight
    int units; // of a row, the last one's end past the row's perhaps
    int steps; // halves of units that have inputs
    int scale_bytes; // of a granule
    int scale_buffers; // granules that a warp's ring can reach into, and the one that it is at
    int warp_bytes;
    int token_bytes; // inputs, zeros up to the last step's end
    int pitch; // from one token's inputs to the next one's: no two meet in one bank

    __host__ __device__ Layout(int inputs, bool is_packed)
        : row_bytes(is_packed ? inputs / 2 : inputs * 2)
        , units((row_bytes + kLine - 1) / kLine)
        , steps((row_bytes + kLine / 2 - 1) / (kLine / 2))
        , scale_bytes(is_packed ? kGranule * (inputs / 32) : 0)
        , scale_buffers((kUnits + units - 1) / units + 1)
        , warp_bytes(kUnits * kUnit + scale_buffers * scale_bytes)
        , token_bytes(steps * (kLine / 2) * (is_packed ? 4 : 1))
        , pitch((token_bytes + 127) / 128 * 128 + 64)
    {
    }
};

__device__ __forceinline__ void copy_async_16(uint32_t to, void const* from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0));
}

__device__ __forceinline__ void copy_async_8(uint32_t to, void const* from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}

// Walks the granules of a warp: in each group that its block has a share of, every warps-th one.
struct Cursor
{
    Route const& route;
    int const granules; // of a group
    int const end; // of the block's share, counted over all groups
    int group;
    int granule;
    int last; // + 1, of the block's share of the group
    int expert;

    __device__ __forceinline__ Cursor(Route const& route_, int granules_, int begin, int end_)
        : route(route_)
        , granules(granules_)
        , end(end_)
        , group(begin / granules_)
        , granule(begin % granules_ + static_cast<int>(threadIdx.x) / 32)
        , last(min(granules_, end_ - group * granules_))
        , expert(begin < end_ ? __ldcg(&route_.groups[group].expert) : 0)
    {
        settle();
    }

    __device__ __forceinline__ bool is_at_end() const
    {
        return granule >= last;
    }

    __device__ __forceinline__ void advance()
    {
        granule += blockDim.x / 32;
        settle();
    }

    __device__ __forceinline__ void settle()
    {
        while (granule >= last && (group + 1) * granules < end)
        {
            ++group;
            granule = threadIdx.x / 32;
            last = min(granules, end - group * granules);
            expert = __ldcg(&route.groups[group].expert);
        }
    }
};

// kPacked: the weight is MXFP4. kGateUp: the first product, whose granules are 8 rows of the gate and the 8 rows of up
// that belong to them, and which ends with the activation.
template <typename T, bool kPacked, int kTokens, bool kGateUp>
__global__ void __launch_bounds__(kMostWarps * 32, 1) product_kernel(Product const p)
{
    using Format = Mxfp4<T>;
    constexpr int kTiles = kTokens / 8;
    constexpr int kStepBytes = kPacked ? 256 : 64; // of a token's inputs, that half of a unit meets
    constexpr int kFirstRows = kGateUp ? kGranule / 2 : kGranule; // of a granule that lie together

    extern __shared__ __align__(128) unsigned char shared[];

    // The routing has to be known. To the second product it is: the first one waited for it before letting this begin.
    // What this one reads of it before its own wait comes from the L2 cache, where it surely is.
    if constexpr (kGateUp)
    {
        wait();
    }
    trigger();
    Layout const layout(p.inputs, kPacked);
    int const warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const granules = p.outputs / kGranule;
    int const total = __ldcg(p.route.group_count) * granules;
    int const begin = share_begin(total, blockIdx.x, gridDim.x), end = share_begin(total, blockIdx.x + 1, gridDim.x);

    // -- loading: four rows of 128 bytes at a time, each second row's halves swapped
    unsigned char* const own = shared + warp * layout.warp_bytes;
    unsigned char* const own_scales = own + kUnits * kUnit;
    uint32_t const ring = shared_address(own);
    uint32_t const ring_at = ring + lane / 8 * kLine + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
    uint32_t const scales_at = ring + kUnits * kUnit;
    int const blocks = p.inputs / 32;
    int const row_bytes = layout.row_bytes;
    int64_t const second = kGateUp ? p.outputs / 2 - kGranule / 2 : 0; // rows to up's from where it were
    Cursor load(p.route, granules, begin, end);
    int load_unit = 0, load_slot = 0, load_buffer = 0;
    char const* load_from = nullptr;
    auto const load_next = [&]
    {
        if (!load.is_at_end())
        {
            if (load_unit == 0)
            {
                int64_t const row = static_cast<int64_t>(load.expert) * p.outputs + load.granule * kFirstRows;
                load_from = static_cast<char const*>(p.weight) + (row + lane / 8) * row_bytes + lane % 8 * 16;
                if constexpr (kPacked)
                {
                    uint8_t const* const from = p.scales + row * blocks;
                    uint32_t const to = scales_at + load_buffer * layout.scale_bytes;
#pragma unroll 2
                    for (int i = lane; i < 2 * blocks; i += 32)
                    {
                        copy_async_8(to + i * 8, from + i * 8 + (i < blocks ? 0 : second * blocks));
                    }
                    load_buffer = load_buffer + 1 == layout.scale_buffers ? 0 : load_buffer + 1;
                }
            }
            bool const is_there = load_unit * kLine + lane % 8 * 16 < row_bytes;
            char const* const from = load_from + (is_there ? load_unit * kLine : 0);
#pragma unroll
            for (int i = 0; i < kGranule / 4; ++i)
            {
                copy_async_16(ring_at + load_slot * kUnit + i * 4 * kLine,
                    from + (i * 4 + (i < 2 ? 0 : second)) * row_bytes, is_there);
            }
            load_slot = load_slot + 1 == kUnits ? 0 : load_slot + 1;
            if (++load_unit == layout.units)
            {
                load_unit = 0;
                load.advance();
            }
        }
        commit_copies(); // empty ones at the end, so that the count of pending ones stays right
    };
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i)
    {
        load_next();
    }
    if constexpr (!kGateUp)
    {
        wait();
    }

    // -- multiplying: lane l has parts of the rows l / 4 and l / 4 + 8 of a granule, and of the inputs of token l / 4
    unsigned char* const inputs = shared + warps * layout.warp_bytes;
    int const quad = lane / 4, part = lane % 4;
    uint32_t const at = quad * kLine + (part ^ (quad % 2 * 4)) * 16;
    int slot = 0, buffer = 0;
    for (int from = begin; from < end;)
    {
        int const group_index = from / granules;
        Group const group = p.route.groups[group_index];
        int const to = min(end, (group_index + 1) * granules);

        // In the order in which lanes take them: of a step the parts' first 16 bytes, then their second ones. Where a
        // pair is numbers 0 and 4 of a word of the weight, it is so here.
        __syncthreads();
        int const chunks = p.inputs / 8;
        for (int chunk = threadIdx.x; chunk < layout.token_bytes / 16; chunk += blockDim.x)
        {
            int const place = kPacked ? chunk / 16 * 256 + chunk % 4 * 64 + chunk / 4 % 4 * 16 : chunk * 16;
#pragma unroll
            for (int first = 0; first < kTokens; first += 8)
            {
                uint4 taken[8];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                {
                    taken[i] = {};
                    if (first + i < group.tokens && chunk < chunks)
                    {
                        int const pair = group.first + first + i;
                        int64_t const row = kGateUp ? p.route.rows[pair] : pair;
                        taken[i] = reinterpret_cast<uint4 const*>(static_cast<T const*>(p.x) + row * p.inputs)[chunk];
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; ++i)
                {
                    uint4 const v = taken[i];
                    if (first + i < group.tokens)
                    {
                        *reinterpret_cast<uint4*>(inputs + (first + i) * layout.pitch + place) = !kPacked
                            ? v
                            : uint4{__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                  __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
                    }
                }
            }
        }
        __syncthreads();

        int const tiles = kTiles == 1 ? 1 : (group.tokens + 7) / 8;
        for (int granule = from % granules + warp; granule < to - group_index * granules; granule += warps)
        {
            int const row = granule * kFirstRows + quad, second_row = row + 8 + static_cast<int>(second);
            float bias[2] = {};
            if (p.bias)
            {
                T const* const biases = static_cast<T const*>(p.bias) + static_cast<int64_t>(group.expert) * p.outputs;
                bias[0] = to_float(biases[row]);
                bias[1] = to_float(biases[second_row]);
            }
            uint8_t const* const scales = own_scales + buffer * layout.scale_bytes + quad * blocks;
            float c[kTiles][4] = {};
            for (int unit = 0; unit < layout.units; ++unit)
            {
                wait_for_copies<kUnits - 1>();
                __syncwarp();
                unsigned char const* const loaded = own + slot * kUnit;
                uint4 upper[2], lower[2];
                uint32_t scale[2][2] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    if constexpr (kPacked)
                    {
                        // Past a row's end its numbers are zeros; any scale of its own will do.
                        int const block = min((unit * 2 + half) * 4 + part, blocks - 1);
                        scale[half][0] = scales[block];
                        scale[half][1] = scales[block + 8 * blocks];
                    }
                    upper[half] = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64));
                    lower[half] = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64) + 8 * kLine);
                }
                slot = slot + 1 == kUnits ? 0 : slot + 1;
                __syncwarp();
                load_next();
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    int const step = unit * 2 + half;
                    if (step >= layout.steps)
                    {
                        break;
                    }
                    unsigned char const* const b_from = inputs + quad * layout.pitch + part * 16 + step * kStepBytes;
                    if constexpr (kPacked)
                    {
                        uint32_t const scale_u = scale[half][0], scale_l = scale[half][1];
                        uint32_t const u_words[4] = {upper[half].x, upper[half].y, upper[half].z, upper[half].w};
                        uint32_t const l_words[4] = {lower[half].x, lower[half].y, lower[half].z, lower[half].w};
                        auto const multiply_step = [&](auto are_large)
                        {
                            constexpr bool kAreLarge = decltype(are_large)::value;
                            constexpr uint32_t kMost = kAreLarge ? Format::kMostScale : 255;
                            uint32_t const factor_u = Format::factor(min(scale_u, kMost));
                            uint32_t const factor_l = Format::factor(min(scale_l, kMost));
#pragma unroll
                            for (int word = 0; word < 4; ++word)
                            {
                                uint32_t u[4], l[4];
                                Format::spread(u_words[word], u);
                                Format::spread(l_words[word], l);
                                Format::multiply(u, factor_u);
                                Format::multiply(l, factor_l);
                                if constexpr (kAreLarge)
                                {
                                    Format::multiply_excess(u, scale_u);
                                    Format::multiply_excess(l, scale_l);
                                }
#pragma unroll
                                for (int tile = 0; tile < kTiles; ++tile)
                                {
                                    if (tile < tiles)
                                    {
                                        uint4 const b = *reinterpret_cast<uint4 const*>(
                                            b_from + tile * 8 * layout.pitch + word * 64);
                                        multiply_add<T>(c[tile], {u[0], l[0], u[1], l[1]}, b.x, b.y);
                                        multiply_add<T>(c[tile], {u[2], l[2], u[3], l[3]}, b.z, b.w);
                                    }
                                }
                            }
                        };
                        if (__any_sync(kAll, max(scale_u, scale_l) > Format::kMostScale))
                        {
                            multiply_step(std::true_type());
                        }
                        else
                        {
                            multiply_step(std::false_type());
                        }
                    }
                    else
                    {
                        uint4 const u = upper[half], l = lower[half];
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
                }
            }
            buffer = buffer + 1 == layout.scale_buffers ? 0 : buffer + 1;

            // A lane has two tokens' results of its two rows: a gate and its up, or two outputs.
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                {
                    int const token = tile * 8 + part * 2 + i;
                    if (token >= group.tokens)
                    {
                        continue;
                    }
                    float const upper = rounded<T>(c[tile][i] + bias[0]), lower = rounded<T>(c[tile][2 + i] + bias[1]);
                    int64_t const pair = group.first + token;
                    T* const out = static_cast<T*>(p.out);
                    if constexpr (kGateUp)
                    {
                        float const gate = p.is_clamped ? fminf(upper, p.limit) : upper;
                        float const up = p.is_clamped ? fminf(fmaxf(lower, -p.limit), p.limit) + 1.f : lower;
                        float const slope = p.is_clamped ? p.alpha : 1.f;
                        out[pair * (p.outputs / 2) + row] = from_float<T>(gate / (1.f + expf(-slope * gate)) * up);
                    }
                    else
                    {
                        out[pair * p.outputs + row] = from_float<T>(upper);
                        out[pair * p.outputs + second_row] = from_float<T>(lower);
                    }
                }
            }
        }
        from = to;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace moe
} // namespace dflash
