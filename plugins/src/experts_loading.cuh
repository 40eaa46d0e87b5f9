// Loading for the products of a mixture of experts: a warp's units of a weight with their scales, and a group's inputs.
#pragma once

#include "experts_fp8_scales.cuh"
#include "experts_work.cuh"
#include "fp8.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "mxfp4.cuh"

namespace dflash
{
namespace moe
{

__device__ __forceinline__ void copy_async_16(uint32_t to, void const* from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
        "r"(is_there ? 16 : 0), "l"(read_once_policy()));
}

// Likewise kFrom bytes behind both places, or nothing if there are no more than kFrom bytes. One address serves all
// copies, as the condition is the copy's: a branch around it has the compiler add kFrom again in each.
template <int kFrom>
__device__ __forceinline__ void copy_async_16_behind(uint32_t to, char const* from, int bytes)
{
    asm volatile("{\n"
                 ".reg .pred is_there;\n"
                 "setp.gt.s32 is_there, %0, %1;\n"
                 "@is_there cp.async.cg.shared.global.L2::cache_hint.L2::256B [%2 + %1], [%3 + %1], 16, %4;\n"
                 "}" ::"r"(bytes),
        "n"(kFrom), "r"(to), "l"(from), "l"(read_once_policy()));
}

// Loads a warp's granules into its ring: units of two tiles as they lie, or of 16 rows of 128 bytes, each second row's
// halves swapped, and of INT4 their scales behind them. Of those a lane copies 16 bytes of every fourth row.
//
// Walk: says which granules these are, as `Cursor` does.
template <Weight kWeight, bool kGateUp, typename Walk = Cursor>
struct Weights
{
    static constexpr int kTileBytes = tile_bytes(kWeight);

    Product const& p;
    Layout const& layout;
    int const lane;
    int const blocks; // of 32 in a row
    int64_t const gap;
    uint32_t const ring;
    uint32_t const at; // this lane's of a unit
    Walk cursor;
    int unit = 0;
    char const* from = nullptr; // this lane's first of the granule, of tiles of the next unit
    int left = 0; // of tiles, bytes of the granule from there on; less than none where the lane has none
    int tile_stride = 0; // from a granule's tile to its next
    int in_slab = 0; // granules before it in its slab
    char const* scales_from = nullptr; // INT4's; of the first 16 lanes a row each

    __device__ __forceinline__ Weights(
        Product const& p_, Layout const& layout_, Walk const& walk, int lane_, unsigned char const* ring_)
        : p(p_)
        , layout(layout_)
        , lane(lane_)
        , blocks(p_.inputs / 32)
        , gap(Rows<kGateUp>::gap(p_))
        , ring(shared_address(ring_))
        , at(ring + (is_tiled(kWeight) ? lane * 16 : lane / 8 * kLine + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16))
        , cursor(walk)
    {
        begin_granule();
    }

    // Starts loading the unit after those that are on their way, if there is one. place: bytes of the ring before it.
    __device__ __forceinline__ void load_next(int place)
    {
        if (!cursor.is_at_end())
        {
            if constexpr (is_tiled(kWeight))
            {
                load_tiles(place);
            }
            else
            {
                load_rows(place);
            }
            if (++unit == layout.units)
            {
                unit = 0;
                cursor.advance();
                begin_granule();
                if (!kGateUp && p.reads_first && cursor.is_at_end())
                {
                    trigger(); // the next kernel asks for its weights as soon as it begins
                }
            }
        }
        commit_copies(); // empty ones at the end, so that the count of pending ones stays right
    }

    // A row's last tile may have fewer parts, and with it the slab's before it: of lanes that copy, `whole - own` is
    // what each of them lacks.
    __device__ __forceinline__ void load_tiles(int place)
    {
        static_assert(kTileBytes > 2 * 512 && kTileBytes <= 3 * 512); // a warp's copies
        int const whole = kTileBytes - lane * 16; // bytes from this lane's first on
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            int const own = min(left - half * kTileBytes, whole);
            char const* const tile = from + half * tile_stride - in_slab * (whole - own);
            uint32_t const to = at + place + half * kTileBytes;
            copy_async_16_behind<0>(to, tile, own);
            copy_async_16_behind<512>(to, tile, own);
            copy_async_16_behind<1024>(to, tile, own);
        }
        from += 2 * tile_stride;
        left -= 2 * kTileBytes;
    }

    __device__ __forceinline__ void load_rows(int place) const
    {
        bool const is_there = unit * kLine + lane % 8 * 16 < layout.row_bytes;
        char const* const unit_from = from + (is_there ? unit * kLine : 0);
#pragma unroll
        for (int i = 0; i < kGranule / 4; ++i)
        {
            copy_async_16(
                at + place + i * 4 * kLine, unit_from + (i * 4 + (i < 2 ? 0 : gap)) * layout.row_bytes, is_there);
        }
        if (kWeight == Weight::kInt4 && lane < kGranule)
        {
            copy_async_16(ring + place + kUnit + lane * kInt4ScaleLine, scales_from + unit * kInt4ScaleLine, true);
        }
    }

    __device__ __forceinline__ void begin_granule()
    {
        if (cursor.is_at_end())
        {
            return;
        }
        if constexpr (is_tiled(kWeight))
        {
            int const granules = p.outputs / kGranule, bytes = granule_bytes(kWeight, p.inputs);
            in_slab = cursor.granule % kSlabGranules;
            int const first = cursor.granule - in_slab;
            int64_t const before = static_cast<int64_t>(cursor.expert) * granules + first;
            from = static_cast<char const*>(p.weight) + before * bytes + in_slab * kTileBytes + lane * 16;
            left = bytes - lane * 16;
            tile_stride = min(kSlabGranules, granules - first) * kTileBytes;
            return;
        }
        int64_t const row = static_cast<int64_t>(cursor.expert) * p.outputs + cursor.granule * Rows<kGateUp>::kFirst;
        from = static_cast<char const*>(p.weight) + (row + lane / 8) * layout.row_bytes + lane % 8 * 16;
        if constexpr (kWeight == Weight::kInt4)
        {
            int64_t const own = row + lane + (lane < 8 ? 0 : gap);
            scales_from = static_cast<char const*>(p.scales) + own * blocks * 2;
        }
    }
};

// Where a lane finds eight inputs, and in which order it takes them.
template <Weight kWeight>
struct Order
{
    static constexpr int kWords = is_packed(kWeight) ? 4 : kWeight == Weight::kFp8 ? 2 : 1; // of a part of a step
    static constexpr int kStepBytes = 64 * kWords; // of a token's inputs, that half of a unit meets

    static __device__ __forceinline__ int place(int chunk)
    {
        int const in_step = chunk % (4 * kWords);
        return chunk / (4 * kWords) * kStepBytes + in_step % kWords * 64 + in_step / kWords * 16;
    }

    static __device__ __forceinline__ uint4 ordered(uint4 const& x)
    {
        if constexpr (is_packed(kWeight))
        {
            return paired(x);
        }
        else if constexpr (kWeight == Weight::kFp8)
        {
            return paired_in_words(x);
        }
        return x;
    }
};

// Copies the inputs of a row that is alone into shared memory, as `load_inputs` does, by some of a block's threads:
// before its experts are known.
template <Weight kWeight>
__device__ __forceinline__ void load_alone(
    Product const& p, Layout const& layout, unsigned char* inputs, int thread, int threads)
{
#pragma unroll 1
    for (int chunk = thread; chunk < layout.token_bytes / 16; chunk += threads)
    {
        uint4 const* const from = static_cast<uint4 const*>(p.x) + chunk;
        uint4 const taken = chunk < p.inputs / 8 ? load_new(from) : uint4{};
        *reinterpret_cast<uint4*>(inputs + Order<kWeight>::place(chunk)) = Order<kWeight>::ordered(taken);
    }
}

// Copies a group's inputs into shared memory, in the order in which lanes take them: of a step the parts' first 16
// bytes, then their second ones.
template <typename T, Weight kWeight, int kTokens, bool kGateUp>
__device__ __forceinline__ void load_inputs(
    Product const& p, Layout const& layout, Groups const& groups, Group const& group, unsigned char* inputs)
{
    int const chunks = p.inputs / 8;
    for (int chunk = threadIdx.x; chunk < layout.token_bytes / 16; chunk += blockDim.x)
    {
        int const place = Order<kWeight>::place(chunk);
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
                    int64_t const row = kGateUp ? groups.rows[pair] : pair;
                    taken[i] = reinterpret_cast<uint4 const*>(static_cast<T const*>(p.x) + row * p.inputs)[chunk];
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
            {
                if (first + i < group.tokens)
                {
                    *reinterpret_cast<uint4*>(inputs + (first + i) * layout.pitch + place)
                        = Order<kWeight>::ordered(taken[i]);
                }
            }
        }
    }
}

} // namespace moe
} // namespace dflash
