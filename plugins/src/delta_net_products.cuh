// Products of gated delta nets on tensor cores, as exact as FP32's: each number is two of 11 bits each, and of their
// four products the three that matter are taken. What rows read of the state, and each other, is multiplied in FP16,
// whose products take half as long as TF32's: bits are then kept of a row as a whole, not of each number. What is added
// to the state is multiplied in TF32.
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

// Stores the first `count` rows of such numbers, so many numbers apart; to: where the lane's first one goes.
__device__ __forceinline__ void store_rows(TileNumbers const& x, int count, float* to, int stride)
{
    DeltaLane const lane;
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            if (8 * i + 2 * lane.column + j % 2 < count)
            {
                to[(8 * i + j % 2) * stride + j / 2 * 8] = x[i][j];
            }
        }
    }
}

// Adds up what several have of rows' squares, of the lane's rows.
template <int kCount>
__device__ __forceinline__ void add_squares(float const (&of_all)[kCount][kDeltaRows], float (&sums)[2][2])
{
    DeltaLane const lane;
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
        sums[i][0] = sums[i][1] = 0.f;
    }
#pragma unroll
    for (int from = 0; from < kCount; ++from)
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float2 const x = *reinterpret_cast<float2 const*>(&of_all[from][8 * i + 2 * lane.column]);
            sums[i][0] += x.x;
            sums[i][1] += x.y;
        }
    }
}

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

// Of a matrix [16 rows, 16 rows] with nothing above its diagonal, as the right operand of rows that are mixed by it.
struct MixParts
{
    RightParts of_first[2]; // the first 8 of what all rows see
    RightParts of_last[1]; // the others

    // load: two numbers at a row and a column.
    template <typename Load>
    __device__ __forceinline__ explicit MixParts(Load const& load, DeltaLane const& at = {})
        : of_first{part(load, at, 0, 0), part(load, at, 8, 0)}
        , of_last{part(load, at, 8, 8)}
    {
    }

private:
    template <typename Load>
    __device__ __forceinline__ static RightParts part(Load const& load, DeltaLane const& at, int row, int column)
    {
        return RightParts(load(row + at.row, column + 2 * at.column));
    }
};

// sums += x * mix^T
__device__ __forceinline__ void add_mixed(TileNumbers const& x, MixParts const& mix, TileNumbers& sums)
{
    auto const left = [&](int tile) { return LeftParts(x[tile][0], x[tile][1], x[tile][2], x[tile][3]); };
    float (*const both[2])[4] = {&sums[0], &sums[1]};
    add_products(both, left(0), mix.of_first);
    float (*const last[1])[4] = {&sums[1]};
    add_products(last, left(1), mix.of_last);
}

// Likewise, of a matrix in memory.
template <int kStride>
__device__ __forceinline__ void add_mixed(TileNumbers const& x, float const* mix, TileNumbers& sums)
{
    auto const load
        = [&](int row, int column) { return *reinterpret_cast<float2 const*>(mix + row * kStride + column); };
    add_mixed(x, MixParts(load), sums);
}

// Two numbers as two of FP16 each, which products take at twice the rate of TF32's and of as many bits. What is below
// 2^-25 is lost, and what is above 65,504: numbers are scaled first.
struct HalfParts
{
    uint32_t high;
    uint32_t low;

    __device__ __forceinline__ HalfParts(float x, float y)
    {
        __half2 const rounded = __floats2half2_rn(x, y);
        float2 const whole = __half22float2(rounded);
        __half2 const left = __floats2half2_rn(x - whole.x, y - whole.y);
        high = reinterpret_cast<uint32_t const&>(rounded);
        low = reinterpret_cast<uint32_t const&>(left);
    }
};

// What rows' numbers, at most 1, are multiplied by before they are parted.
constexpr float kRowScale = 4096.f;

// The power of two at or below a number of at most 1; 2^-100 of a smaller one. Rows that are as small as it are divided
// by it before they are parted.
__device__ __forceinline__ float power_of_two(float x)
{
    return __uint_as_float(max(__float_as_uint(x) & 0x7f800000u, 27u << 23));
}

// Four numbers of a row, in parts: both pairs' high ones, then both low ones.
struct FourParts
{
    uint4 words;

    // Of numbers that are scaled already.
    __device__ __forceinline__ explicit FourParts(float4 const& x)
    {
        HalfParts const first(x.x, x.y);
        HalfParts const second(x.z, x.w);
        words = {first.high, second.high, first.low, second.low};
    }

    __device__ __forceinline__ static FourParts scaled(float4 const& x)
    {
        return FourParts(float4{x.x * kRowScale, x.y * kRowScale, x.z * kRowScale, x.w * kRowScale});
    }
};

// Heads of 16 rows, in shared memory or laid out so, four numbers side by side in parts.
template <int kSize>
struct SplitRows
{
    static constexpr int kStride = kSize + (kSize % 32 == 0 ? 16 : 0); // of a row: two side by side have all banks
    static constexpr int kWords = kDeltaRows * kStride;

    uint32_t* words;

    __device__ __forceinline__ uint32_t* at(int row, int first) const
    {
        return words + row * kStride + first;
    }

    __device__ __forceinline__ void store(int row, int first, FourParts const& x) const
    {
        *reinterpret_cast<uint4*>(at(row, first)) = x.words;
    }

    __device__ __forceinline__ float4 load(int row, int first) const
    {
        uint4 const x = *reinterpret_cast<uint4 const*>(words + row * kStride + first);
        float2 const low = joined(x.x, x.z);
        float2 const high = joined(x.y, x.w);
        return {low.x, low.y, high.x, high.y};
    }

    // Four numbers of a row: those that lane t has of a group's 16 keys.
    __device__ __forceinline__ uint4 four(int row, int group, int t) const
    {
        return *reinterpret_cast<uint4 const*>(words + row * kStride + 16 * group + 4 * t);
    }

private:
    __device__ __forceinline__ static float2 joined(uint32_t high, uint32_t low)
    {
        float2 const x = __half22float2(reinterpret_cast<__half2 const&>(high));
        float2 const y = __half22float2(reinterpret_cast<__half2 const&>(low));
        return {(x.x + y.x) * (1.f / kRowScale), (x.y + y.y) * (1.f / kRowScale)};
    }
};

// Multiplies 16 rows by 8 keys, over the groups of 16 numbers from `first` on, every other one: to [16, 8].
template <int kSize, int kUnrolled>
__device__ __forceinline__ void multiply_rows(
    SplitRows<kSize> const& left, SplitRows<kSize> const& keys, int first_key, int first, float* to, int stride)
{
    DeltaLane const at;
    constexpr int kGroups = kSize / 16;
    float sums[3][4] = {}; // each of one of the three products
#pragma unroll kUnrolled
    for (int i = 0; i < (kGroups + 1) / 2; ++i)
    {
        int const group = first + 2 * i;
        if (kGroups % 2 != 0 && group >= kGroups)
        {
            break;
        }
        uint4 const above = left.four(at.row, group, at.column);
        uint4 const below = left.four(at.row + 8, group, at.column);
        uint4 const right = keys.four(first_key + at.row, group, at.column);
        uint32_t const high[4] = {above.x, below.x, above.y, below.y};
        uint32_t const low[4] = {above.z, below.z, above.w, below.w};
        multiply_add<__half>(sums[0], low, right.x, right.y);
        multiply_add<__half>(sums[1], high, right.z, right.w);
        multiply_add<__half>(sums[2], high, right.x, right.y);
    }
    constexpr float kBack = 1.f / (kRowScale * kRowScale);
#pragma unroll
    for (int below = 0; below < 2; ++below)
    {
        float const one = sums[0][2 * below] + sums[1][2 * below] + sums[2][2 * below];
        float const other = sums[0][2 * below + 1] + sums[1][2 * below + 1] + sums[2][2 * below + 1];
        *reinterpret_cast<float2*>(to + (at.row + 8 * below) * stride + 2 * at.column) = {one * kBack, other * kBack};
    }
}

// A power of two, by which numbers become at most 2^14, and what takes it back: FP16 has more, and so what is 2^-28 of
// the largest number still has all its bits. Of numbers below 2^-99 it is not as large, or what takes it back were none
// that FP32 has with all its bits.
struct HalfScale
{
    float by;
    float back;

    // most: of the numbers without their signs.
    __device__ __forceinline__ explicit HalfScale(float most)
    {
        constexpr int kOne = 127; // the exponent of 1, as it is stored
        int const exponent = static_cast<int>(__float_as_uint(most) >> 23);
        int const scale = min(13 + 2 * kOne - exponent, 240);
        by = __int_as_float(scale << 23);
        back = __int_as_float((2 * kOne - scale) << 23);
    }
};

// How a state comes from memory, past the L1 cache, for what was before may lie there; and how it goes back.
struct StateAccess
{
    __device__ __forceinline__ float4 load(float const* from) const
    {
        return load_new(reinterpret_cast<float4 const*>(from));
    }

    __device__ __forceinline__ void store(float* to, float4 const& x) const
    {
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w));
    }
};

// Likewise, by a policy of the L2 cache.
struct StateAccessByPolicy
{
    uint64_t policy;

    __device__ __forceinline__ float4 load(float const* from) const
    {
        float4 x;
        asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
            : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
            : "l"(from), "l"(policy)
            : "memory");
        return x;
    }

    __device__ __forceinline__ void store(float* to, float4 const& x) const
    {
        store_by(policy, reinterpret_cast<float4*>(to), x);
    }
};

// The state of 16 values and kKeys keys, transposed, of which lane (g, t) has rows g and g + 8: of each group of 16
// keys numbers 4 t to 4 t + 3.
template <int kSize, int kKeys>
struct StateTile
{
    static constexpr int kGroups = kKeys / 16;

    float at[kGroups][2][4]; // [][0: row g, 1: row g + 8][]

    // Where the lane's first number lies of those that begin at `tile`.
    template <typename Number>
    __device__ __forceinline__ static Number* of_lane(Number* tile)
    {
        DeltaLane const lane;
        return tile + lane.row * kSize + 4 * lane.column;
    }

    // from: the lane's first number, as in what follows.
    template <typename Access = StateAccess>
    __device__ __forceinline__ void load(float const* from, Access const& access = {})
    {
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                *reinterpret_cast<float4*>(at[group][below]) = access.load(from + 8 * below * kSize + 16 * group);
            }
        }
    }

    __device__ __forceinline__ void store(float* to) const
    {
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
            store(to, group);
        }
    }

    template <typename Access = StateAccess>
    __device__ __forceinline__ void store(float* to, int group, Access const& access = {}) const
    {
#pragma unroll
        for (int below = 0; below < 2; ++below)
        {
            access.store(to + 8 * below * kSize + 16 * group, *reinterpret_cast<float4 const*>(at[group][below]));
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

    // By what the lane's row, or that 8 below, is scaled before it is parted.
    __device__ __forceinline__ HalfScale scale(int below) const
    {
        float of_column[4]; // none waits for the others
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            of_column[i] = fabsf(at[0][below][i]);
#pragma unroll
            for (int group = 1; group < kGroups; ++group)
            {
                of_column[i] = fmaxf(of_column[i], fabsf(at[group][below][i]));
            }
        }
        float most = fmaxf(fmaxf(of_column[0], of_column[1]), fmaxf(of_column[2], of_column[3]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        return HalfScale(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
    }

    // A group's numbers in parts, as the left operand of what rows read; scales: of the lane's row, and that 8 below.
    __device__ __forceinline__ void split(
        int group, HalfScale const (&scales)[2], uint32_t (&high)[4], uint32_t (&low)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            float const* const x = at[group][i % 2] + i / 2 * 2;
            HalfParts const both(x[0] * scales[i % 2].by, x[1] * scales[i % 2].by);
            high[i] = both.high;
            low[i] = both.low;
        }
    }

    // Likewise all of the state.
    struct Parts
    {
        uint32_t high[kGroups][4];
        uint32_t low[kGroups][4];
        float back[2]; // what takes back the scale of the lane's row, and of that 8 below
    };

    __device__ __forceinline__ void split(Parts& parts) const
    {
        HalfScale const scales[2] = {scale(0), scale(1)};
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
            split(group, scales, parts.high[group], parts.low[group]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            parts.back[i] = scales[i].back * (1.f / kRowScale);
        }
    }

    // Reads 16 rows' numbers out of it, whose keys it has from group `first` on, [16 values, 16 rows]: those that keys
    // read, and queries.
    __device__ __forceinline__ static void read(Parts const& parts, SplitRows<kSize> const& keys,
        SplitRows<kSize> const& queries, TileNumbers& of_keys, TileNumbers& of_queries, int first = 0)
    {
        DeltaLane const lane;
        float (*const all[4])[4] = {&of_keys[0], &of_keys[1], &of_queries[0], &of_queries[1]};
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
            uint4 const right[4] = {keys.four(lane.row, first + group, lane.column),
                keys.four(lane.row + 8, first + group, lane.column), queries.four(lane.row, first + group, lane.column),
                queries.four(lane.row + 8, first + group, lane.column)};
            // The three products of one sum stand apart: each waits for the one before it.
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                multiply_add<__half>(*all[i], parts.low[group], right[i].x, right[i].y);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                multiply_add<__half>(*all[i], parts.high[group], right[i].z, right[i].w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                multiply_add<__half>(*all[i], parts.high[group], right[i].x, right[i].y);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                (*all[i])[j] *= parts.back[j / 2];
            }
        }
    }

    // Forgets, and writes 16 rows, or the first 8 of them: state <- kept * state + writes * keys. left holds the writes
    // of 8 rows each, and keys_of(tile, key) gives the lane's two rows' keys, two of each. Added to the state by FP32
    // additions: those of the products round down. Stores it, too, group by group: all at once would wait for each
    // other.
    template <typename KeysOf, typename Access = StateAccess>
    __device__ __forceinline__ void absorb(float kept, bool has_more, LeftParts const (&left)[2], float* to,
        KeysOf const& keys_of, Access const& access = {})
    {
        DeltaLane const lane;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
        {
            // Column g of two products, of whose columns 2 t and 2 t + 1 the lane has the keys 4 t to 4 t + 3: those
            // side by side are of one each, so that both come at once.
            int const key = 16 * group + 2 * lane.row;
            float sums[2][4] = {}; // of keys 4 t and 4 t + 2, and of those behind them
            float (*const both[2])[4] = {&sums[0], &sums[1]};
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
            {
                if (tile == 0 || has_more)
                {
                    float2 const keys[2] = {keys_of(tile, 0, key), keys_of(tile, 1, key)};
                    RightParts const right[2]
                        = {RightParts({keys[0].x, keys[1].x}), RightParts({keys[0].y, keys[1].y})};
                    add_products(both, left[tile], right);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
            {
                float& x = at[group][i % 4 / 2][i / 4 + i % 2 * 2];
                x = fmaf(x, kept, sums[i / 4][i % 4]);
            }
            store(to, group, access);
            if (group % 2 != 0)
            {
                __syncwarp(); // the compiler would put stores off to the last
            }
        }
    }
};

} // namespace dflash
