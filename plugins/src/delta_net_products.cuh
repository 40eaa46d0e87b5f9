// Products of gated delta nets on tensor cores, as exact as FP32's: each number is two of TF32, of 11 bits each, and of
// their four products the three that matter are taken.
//
// A warp holds the state of 16 values, transposed, as the accumulators of its products have it. So it is both what rows
// are added to and, without another word moved, the left operand of what rows read: only the order of the keys within
// 16 of them is another, and that of the right operand is made the same.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace dflash
{

constexpr int kDeltaRows = 16; // whose products are taken together

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

// A number as two of TF32, each rounded to the nearest.
struct TwoParts
{
    uint32_t high;
    uint32_t low;

    __device__ __forceinline__ explicit TwoParts(float x)
    {
        high = rounded(x);
        low = rounded(x - __uint_as_float(high));
    }

    __device__ __forceinline__ static uint32_t rounded(float x)
    {
        return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    }
};

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
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(b0), "r"(b1));
}

// sum += left * right, whose numbers at rows 2 t and 2 t + 1 are given as two parts each.
__device__ __forceinline__ void add_product(
    float (&sum)[4], LeftParts const& left, uint32_t high0, uint32_t low0, uint32_t high1, uint32_t low1)
{
    multiply_tf32(sum, left.low, high0, high1);
    multiply_tf32(sum, left.high, low0, low1);
    multiply_tf32(sum, left.high, high0, high1);
}

__device__ __forceinline__ void add_product(float (&sum)[4], LeftParts const& left, float2 right)
{
    TwoParts const first(right.x);
    TwoParts const second(right.y);
    add_product(sum, left, first.high, first.low, second.high, second.low);
}

// Heads of 16 rows in shared memory, each number as its two parts, one behind the other.
template <int kSize>
struct SplitRows
{
    static constexpr int kStride = 2 * kSize + 4; // of a row: rows apart begin in other banks
    static constexpr int kWords = kDeltaRows * kStride;

    uint32_t* words;

    __device__ __forceinline__ void store(int row, int first, float4 x) const
    {
        uint4* const to = reinterpret_cast<uint4*>(words + row * kStride + 2 * first);
        TwoParts const parts[4] = {TwoParts(x.x), TwoParts(x.y), TwoParts(x.z), TwoParts(x.w)};
        to[0] = {parts[0].high, parts[0].low, parts[1].high, parts[1].low};
        to[1] = {parts[2].high, parts[2].low, parts[3].high, parts[3].low};
    }

    __device__ __forceinline__ float4 load(int row, int first) const
    {
        uint4 const* const from = reinterpret_cast<uint4 const*>(words + row * kStride + 2 * first);
        return {joined(from[0].x, from[0].y), joined(from[0].z, from[0].w), joined(from[1].x, from[1].y),
            joined(from[1].z, from[1].w)};
    }

    // Two numbers side by side, of a row: the 4 t + 2 half-th and the next of the 16 keys of a group.
    __device__ __forceinline__ uint4 pair(int row, int group, int half, int t) const
    {
        return *reinterpret_cast<uint4 const*>(words + row * kStride + 32 * group + 8 * t + 4 * half);
    }

    // The number of a row that is the g-th of 8, as accumulators have a half of a group's 16 keys.
    __device__ __forceinline__ uint2 one(int row, int group, int half, int g) const
    {
        return *reinterpret_cast<uint2 const*>(words + row * kStride + 32 * group + 8 * (g / 2) + 4 * half + 2 * (g % 2));
    }

private:
    __device__ __forceinline__ static float joined(uint32_t high, uint32_t low)
    {
        return __uint_as_float(high) + __uint_as_float(low);
    }
};

// The state of 16 values, [16, kSize] transposed, of which lane (g, t) has rows g and g + 8: of each group of 16 keys
// numbers 4 t to 4 t + 3.
template <int kSize>
struct StateTile
{
    static constexpr int kGroups = kSize / 16;

    float at[kGroups][2][4]; // [][0: row g, 1: row g + 8][]

    __device__ __forceinline__ void load(float const* from)
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                float const* const row = from + (lane.row + 8 * below) * kSize + 16 * group + 4 * lane.column;
                *reinterpret_cast<float4*>(at[group][below]) = *reinterpret_cast<float4 const*>(row);
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

    // Reads rows' numbers out of it: sums[i] of rows 8 i and on, [16 values, 8 rows]. With one tile the others are not.
    __device__ __forceinline__ void read(
        SplitRows<kSize> const& keys, SplitRows<kSize> const& queries, int tiles, float (&of_keys)[2][4],
        float (&of_queries)[2][4]) const
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                LeftParts const state = left(group, half);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                {
                    if (tile < tiles)
                    {
                        int const row = 8 * tile + lane.row;
                        uint4 const key = keys.pair(row, group, half, lane.column);
                        uint4 const query = queries.pair(row, group, half, lane.column);
                        add_product(of_keys[tile], state, key.x, key.y, key.z, key.w);
                        add_product(of_queries[tile], state, query.x, query.y, query.z, query.w);
                    }
                }
            }
        }
    }

    // Forgets, and writes rows: state <- kept * state + writes * keys. writes[i]: of rows 8 i and on, [16 values, 8].
    // Added to the state by FP32 additions: those of the products round down.
    __device__ __forceinline__ void absorb(
        float kept, float const (&writes)[2][4], SplitRows<kSize> const& keys, int tiles)
    {
        DeltaLane const lane;
        LeftParts const left[2] = {{writes[0][0], writes[0][1], writes[0][2], writes[0][3]},
            {writes[1][0], writes[1][1], writes[1][2], writes[1][3]}};
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                float sum[4] = {};
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                {
                    if (tile < tiles)
                    {
                        int const row = 8 * tile + 2 * lane.column;
                        uint2 const first = keys.one(row, group, half, lane.row);
                        uint2 const second = keys.one(row + 1, group, half, lane.row);
                        add_product(sum, left[tile], first.x, first.y, second.x, second.y);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
                    float& x = at[group][i / 2][2 * half + i % 2];
                    x = fmaf(x, kept, sum[i]);
                }
            }
        }
    }
};

} // namespace dflash
