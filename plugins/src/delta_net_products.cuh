// Products of gated delta nets on tensor cores, as exact as FP32's: each number is two of TF32, of 11 bits each, and of
// their four products the three that matter are taken.
//
// A warp holds the state of 16 values and some keys, transposed, as the accumulators of its products have it. So it is
// both what rows are added to and, without another word moved, the left operand of what rows read: only the order of
// the keys within 16 of them is another, and that of the right operand is made the same.
#pragma once

#include "delta_net_work.cuh"

namespace dflash
{

// Of lane l: row l / 4 of the left operand and of the accumulators, and the column of the right operand; and which of
// four the other index begins with.
struct DeltaLane
{
    int row;
    int column;

    __device__ __forceinline__ DeltaLane()
        : row(threadIdx.x % 32 / 4)
        , column(threadIdx.x % 4)
    {
    }
};

// A number as two of TF32, the first rounded to the nearest. Of the second the products leave out what TF32 has not.
struct TwoParts
{
    uint32_t high;
    uint32_t low;

    __device__ __forceinline__ explicit TwoParts(float x)
    {
        // Of 8193 x what a number has no room for is rounded off; the difference is exact, below 2^114. Integers'
        // instructions would take twice as long.
        float const rounded = fmaf(x, -8192.f, fmaf(x, 8192.f, x));
        high = __float_as_uint(rounded);
        low = __float_as_uint(x - rounded);
    }
};

// Of 16 values and 16 rows, as accumulators have them: [8 rows each][value g: rows 2 t, 2 t + 1; value g + 8: these].
using TileNumbers = float[2][4];

// 16 x 8 numbers as the left operand. Columns 2 t and 2 t + 1 stand where the instruction has t and t + 4.
struct LeftParts
{
    uint32_t high[4];
    uint32_t low[4];

    // Of the accumulators of a product: rows g and g + 8, of each the columns 2 t and 2 t + 1.
    __device__ __forceinline__ LeftParts(float first, float second, float first_below, float second_below)
    {
        float const in_order[4] = {first, first_below, second, second_below};
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            TwoParts const parts(in_order[i]);
            high[i] = parts.high;
            low[i] = parts.low;
        }
    }
};

__device__ __forceinline__ void multiply_tf32(float (&sum)[4], uint32_t const (&left)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(b0), "r"(b1));
}

// Two numbers of the right operand, at rows 2 t and 2 t + 1.
struct RightParts
{
    uint32_t high[2];
    uint32_t low[2];

    __device__ __forceinline__ explicit RightParts(uint4 x)
        : high{x.x, x.y}
        , low{x.z, x.w}
    {
    }

    __device__ __forceinline__ explicit RightParts(float2 x)
    {
        TwoParts const first(x.x);
        TwoParts const second(x.y);
        high[0] = first.high;
        high[1] = second.high;
        low[0] = first.low;
        low[1] = second.low;
    }
};

// sums[i] += left * right[i]. The three products of one sum stand apart: each waits for the one before it.
template <int kSums>
__device__ __forceinline__ void add_products(
    float (*const (&sums)[kSums])[4], LeftParts const& left, RightParts const (&right)[kSums])
{
#pragma unroll
    for (int i = 0; i < kSums; ++i)
    {
        multiply_tf32(*sums[i], left.low, right[i].high[0], right[i].high[1]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
    {
        multiply_tf32(*sums[i], left.high, right[i].low[0], right[i].low[1]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
    {
        multiply_tf32(*sums[i], left.high, right[i].high[0], right[i].high[1]);
    }
}

// Four numbers of a row, in parts.
struct FourParts
{
    TwoParts at[4];

    __device__ __forceinline__ explicit FourParts(float4 x)
        : at{TwoParts(x.x), TwoParts(x.y), TwoParts(x.z), TwoParts(x.w)}
    {
    }
};

// Heads of 16 rows, in shared memory or laid out so, two numbers side by side in parts: both high ones, then both low
// ones.
template <int kSize>
struct SplitRows
{
    static constexpr int kStride = 2 * kSize + 4; // of a row: rows apart begin in other banks
    static constexpr int kWords = kDeltaRows * kStride;

    uint32_t* words;

    __device__ __forceinline__ void store(int row, int first, FourParts const& x) const
    {
        uint4* const to = reinterpret_cast<uint4*>(words + row * kStride + 2 * first);
        to[0] = {x.at[0].high, x.at[1].high, x.at[0].low, x.at[1].low};
        to[1] = {x.at[2].high, x.at[3].high, x.at[2].low, x.at[3].low};
    }

    // Four numbers whole, where their parts will be: for the lane that stores those.
    __device__ __forceinline__ void keep(int row, int first, float4 const& x) const
    {
        *reinterpret_cast<float4*>(words + row * kStride + 2 * first) = x;
    }

    __device__ __forceinline__ float4 kept(int row, int first) const
    {
        return *reinterpret_cast<float4 const*>(words + row * kStride + 2 * first);
    }

    __device__ __forceinline__ float4 load(int row, int first) const
    {
        uint4 const* const from = reinterpret_cast<uint4 const*>(words + row * kStride + 2 * first);
        return {joined(from[0].x, from[0].z), joined(from[0].y, from[0].w), joined(from[1].x, from[1].z),
            joined(from[1].y, from[1].w)};
    }

    // Two numbers side by side, of a row: those that lane t has of a half of a group's 16 keys.
    __device__ __forceinline__ uint4 pair(int row, int group, int half, int t) const
    {
        return *reinterpret_cast<uint4 const*>(words + row * kStride + 32 * group + 8 * t + 4 * half);
    }

private:
    __device__ __forceinline__ static float joined(uint32_t high, uint32_t low)
    {
        return __uint_as_float(high) + __uint_as_float(low);
    }
};

// Multiplies 16 rows by 8 keys, over the groups of 16 numbers from `first` on, every other one: to [16, 8].
template <int kSize, int kUnrolled>
__device__ __forceinline__ void multiply_rows(
    SplitRows<kSize> const& left, SplitRows<kSize> const& keys, int first_key, int first, float* to, int stride)
{
    DeltaLane const at;
    float sums[3][4] = {}; // each of one of the three products
#pragma unroll kUnrolled
    for (int group = first; group < kSize / 16; group += 2)
    {
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            uint4 const above = left.pair(at.row, group, half, at.column);
            uint4 const below = left.pair(at.row + 8, group, half, at.column);
            uint4 const right = keys.pair(first_key + at.row, group, half, at.column);
            uint32_t const high[4] = {above.x, below.x, above.y, below.y};
            uint32_t const low[4] = {above.z, below.z, above.w, below.w};
            multiply_tf32(sums[0], low, right.x, right.y);
            multiply_tf32(sums[1], high, right.z, right.w);
            multiply_tf32(sums[2], high, right.x, right.y);
        }
    }
#pragma unroll
    for (int below = 0; below < 2; ++below)
    {
        float const one = sums[0][2 * below] + sums[1][2 * below] + sums[2][2 * below];
        float const other = sums[0][2 * below + 1] + sums[1][2 * below + 1] + sums[2][2 * below + 1];
        *reinterpret_cast<float2*>(to + (at.row + 8 * below) * stride + 2 * at.column) = {one, other};
    }
}

// The state of 16 values and kKeys keys, transposed, of which lane (g, t) has rows g and g + 8: of each group of 16
// keys numbers 4 t to 4 t + 3.
template <int kSize, int kKeys>
struct StateTile
{
    static constexpr int kGroups = kKeys / 16;

    float at[kGroups][2][4]; // [][0: row g, 1: row g + 8][]

    __device__ __forceinline__ void load(float const* from)
    {
        load(from, [](float4 const* at) { return *at; });
    }

    template <typename LoadFour>
    __device__ __forceinline__ void load(float const* from, LoadFour const& load_four)
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                float const* const row = from + (lane.row + 8 * below) * kSize + 16 * group + 4 * lane.column;
                *reinterpret_cast<float4*>(at[group][below]) = load_four(reinterpret_cast<float4 const*>(row));
            }
        }
    }

    __device__ __forceinline__ void store(float* to) const
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                float* const row = to + (lane.row + 8 * below) * kSize + 16 * group + 4 * lane.column;
                *reinterpret_cast<float4*>(row) = *reinterpret_cast<float4 const*>(at[group][below]);
            }
        }
    }

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < kGroups * 8; ++i)
        {
            (&at[0][0][0])[i] = 0.f;
        }
    }

    __device__ __forceinline__ LeftParts left(int group, int half) const
    {
        auto const& x = at[group];
        return {x[0][2 * half], x[0][2 * half + 1], x[1][2 * half], x[1][2 * half + 1]};
    }

    // Reads 16 rows' numbers out of it, whose keys it has from group `first` on, [16 values, 16 rows]: those that keys
    // read, and queries.
    __device__ __forceinline__ void read(SplitRows<kSize> const& keys, SplitRows<kSize> const& queries,
        TileNumbers& of_keys, TileNumbers& of_queries, int first = 0) const
    {
        DeltaLane const lane;
        float (*const all[4])[4] = {&of_keys[0], &of_keys[1], &of_queries[0], &of_queries[1]};
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                RightParts const right[4] = {RightParts(keys.pair(lane.row, first + group, half, lane.column)),
                    RightParts(keys.pair(lane.row + 8, first + group, half, lane.column)),
                    RightParts(queries.pair(lane.row, first + group, half, lane.column)),
                    RightParts(queries.pair(lane.row + 8, first + group, half, lane.column))};
                add_products(all, left(group, half), right);
            }
        }
    }

    // Forgets, and writes 16 rows, or the first 8 of them: state <- kept * state + writes * keys. left holds the writes
    // of 8 rows each, and right_of(tile, key) gives the lane's two rows' keys. Added to the state by FP32 additions:
    // those of the products round down.
    template <typename RightOf>
    __device__ __forceinline__ void absorb(
        float kept, bool has_more, LeftParts const (&left)[2], RightOf const& right_of)
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
            // The g-th of 8 keys, as accumulators have a half of a group's 16.
            int const key = 16 * group + 4 * (lane.row / 2) + lane.row % 2;
            float sums[2][4] = {}; // of both halves of the group's keys
            float (*const both[2])[4] = {&sums[0], &sums[1]};
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
            {
                if (tile == 0 || has_more)
                {
                    RightParts const right[2] = {right_of(tile, key), right_of(tile, key + 2)};
                    add_products(both, left[tile], right);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
            {
                float& x = at[group][i % 4 / 2][i / 4 * 2 + i % 2];
                x = fmaf(x, kept, sums[i / 4][i % 4]);
            }
        }
    }
};

} // namespace dflash
