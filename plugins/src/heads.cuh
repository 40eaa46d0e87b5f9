// A head of a projected row: its norm, RoPE, and how it is stored.
#pragma once

#include "element.cuh"

#include <cstdint>
#include <cuda_fp8.h>

namespace dflash
{

// Neighbours that a lane has: of heads of 512 twice as many, that a warp has one.
template <int D>
constexpr int kNeighbours = D > 256 ? 16 : 8;

// A head of a row by D / 8 neighbouring lanes, each with 8 neighbours, or fewer with 16; what RoPE pairs them with,
// half a head away, is half of the lanes away. Rounds where the separate operations would: after the norm, its weight,
// each product and their sum. Products and sums of two numbers of 16 bits are computed as such, two at a time: to
// compute them in FP32 and round them then gives the same.
//
// kWhole: whole warps compute heads, no lane goes another way.
template <typename T, int D, bool kWhole = false, int kNumbers = kNeighbours<D>>
struct Head
{
    static constexpr int kVector = kNumbers; // of a lane
    static constexpr int kLanes = D / kVector;
    static constexpr int kPairs = kVector / 2;
    using P = typename Pair<T>::type;
    using Numbers = Vector<uint32_t, kPairs>; // as they are loaded: pairs are copied one by one
    Numbers x;

    static __device__ __forceinline__ P& pair(uint32_t& of)
    {
        return reinterpret_cast<P&>(of);
    }

    static __device__ __forceinline__ P const& pair(uint32_t const& of)
    {
        return reinterpret_cast<P const&>(of);
    }

    static __device__ __forceinline__ int lane()
    {
        return threadIdx.x % kLanes;
    }

    // The lanes of this head: those of a warp's other heads may have gone another way.
    static __device__ __forceinline__ unsigned lanes()
    {
        if constexpr (kWhole)
        {
            return 0xffffffffu;
        }
        return static_cast<unsigned>((uint64_t{1} << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    }

    // A lane's numbers, from its own on: in accesses of 16 bytes. kAnew: by `load_new`.
    template <bool kAnew = false>
    static __device__ __forceinline__ Numbers load_own(T const* from)
    {
        using Part = Vector<uint32_t, 4>;
        Numbers numbers;
#pragma unroll
        for (int first = 0; first < kPairs; first += 4)
        {
            auto const* const at = reinterpret_cast<uint4 const*>(from + 2 * first);
            uint4 const four = kAnew ? load_new(at) : *at;
            auto const& part = reinterpret_cast<Part const&>(four);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                numbers.at[first + i] = part.at[i];
            }
        }
        return numbers;
    }

    static __device__ __forceinline__ Numbers load(T const* head)
    {
        return load_own(head + lane() * kVector);
    }

    // What a rehearsal saw there is old.
    static __device__ __forceinline__ Numbers load_anew(T const* head)
    {
        return load_own<true>(head + lane() * kVector);
    }

    // A row of a RoPE table, for both halves of what is rotated; other lanes get what they do not use.
    static __device__ __forceinline__ Numbers load_half(T const* half, int rotary_lanes)
    {
        int const own = lane() < rotary_lanes / 2 ? lane() : lane() < rotary_lanes ? lane() - rotary_lanes / 2 : 0;
        return load_own(half + own * kVector);
    }

    static __device__ __forceinline__ void store_zeros(T* head)
    {
        Head{}.store(head);
    }

    // The sum of squares, in an order that does not depend on the number of lanes: that of 32 lanes with D / 32
    // neighbours each, which are added up by the nearest last.
    __device__ __forceinline__ float squares() const
    {
        constexpr int kParts = 32 / kLanes;
        float sums[kParts] = {};
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
        {
            float& sum = sums[i / (kPairs / kParts)];
            float const first = to_float(pair(x.at[i]).x);
            float const second = to_float(pair(x.at[i]).y);
            sum += first * first;
            sum += second * second;
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2)
        {
#pragma unroll
            for (float& sum : sums)
            {
                sum += __shfl_xor_sync(lanes(), sum, step);
            }
        }
#pragma unroll
        for (int step = kParts / 2; step > 0; step /= 2)
        {
#pragma unroll
            for (int i = 0; i < step; ++i)
            {
                sums[i] += sums[i + step];
            }
        }
        return sums[0];
    }

    __device__ __forceinline__ void norm(T const* weight, float eps)
    {
        norm(load(weight), eps);
    }

    // By these lanes' weights.
    __device__ __forceinline__ void norm(Numbers const& scale, float eps)
    {
        float const root = rsqrtf(squares() / D + eps);
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
        {
            P& two = pair(x.at[i]);
            two = __hmul2_rn(pair_of<T>(to_float(two.x) * root, to_float(two.y) * root), pair(scale.at[i]));
        }
    }

    // By weights in FP32: rounds once, behind them.
    __device__ __forceinline__ void norm(float const* weight, float eps)
    {
        float const root = rsqrtf(squares() / D + eps);
        weight += lane() * kVector;
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
        {
            auto const scale = load_vector<float, 2>(weight + 2 * i);
            P& two = pair(x.at[i]);
            two = pair_of<T>(to_float(two.x) * root * scale.at[0], to_float(two.y) * root * scale.at[1]);
        }
    }

    // Without weights.
    __device__ __forceinline__ void norm(float eps)
    {
        float const root = rsqrtf(squares() / D + eps);
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
        {
            P& two = pair(x.at[i]);
            two = pair_of<T>(to_float(two.x) * root, to_float(two.y) * root);
        }
    }

    // cos, sin: the position's, of these lanes' numbers. The first rotary_lanes of the head's lanes are rotated.
    __device__ __forceinline__ void rotate(Numbers const& cos, Numbers const& sin, int rotary_lanes)
    {
        int const half = rotary_lanes / 2;
        bool const is_first_half = lane() < half;
        int const partner = is_first_half ? lane() + half : lane() < rotary_lanes ? lane() - half : lane();
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
        {
            uint32_t const other = __shfl_sync(lanes(), x.at[i], partner, kLanes);
            P const mine = __hmul2_rn(pair(x.at[i]), pair(cos.at[i]));
            P const crossed = __hmul2_rn(pair(other), pair(sin.at[i]));
            P const turned = __hadd2_rn(mine, is_first_half ? __hneg2(crossed) : crossed);
            pair(x.at[i]) = lane() < rotary_lanes ? turned : pair(x.at[i]);
        }
    }

    __device__ __forceinline__ void store(T* head) const
    {
#pragma unroll
        for (int first = 0; first < kPairs; first += 4)
        {
            Vector<uint32_t, 4> const part{x.at[first], x.at[first + 1], x.at[first + 2], x.at[first + 3]};
            store_vector(reinterpret_cast<uint32_t*>(head) + lane() * kPairs + first, part);
        }
    }

    // Divides numbers that were rounded to T, as a composition of operations would.
    __device__ __forceinline__ void store(E4M3* head, float scale) const
    {
        Vector<E4M3, kVector> out;
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            P const& two = pair(x.at[i / 2]);
            float const number = to_float(i % 2 ? two.y : two.x);
            out.at[i] = __nv_cvt_float_to_fp8(number / scale, __NV_SATFINITE, __NV_E4M3);
        }
        store_vector(head + lane() * kVector, out);
    }
};

} // namespace dflash
