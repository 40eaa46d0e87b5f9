// The 16-bit element types: conversions, and vectors of them.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace dflash
{

// The numbers of FP8 caches.
using E4M3 = uint8_t;

template <typename T>
struct Pair;

template <>
struct Pair<__half>
{
    using type = __half2;
};

template <>
struct Pair<__nv_bfloat16>
{
    using type = __nv_bfloat162;
};

__device__ __forceinline__ float to_float(float x)
{
    return x;
}

__device__ __forceinline__ float to_float(__half x)
{
    return __half2float(x);
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}

template <>
__device__ __forceinline__ __half from_float<__half>(float x)
{
    return __float2half_rn(x);
}

template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ typename Pair<T>::type pair_of(float low, float high);

template <>
__device__ __forceinline__ __half2 pair_of<__half>(float low, float high)
{
    return __floats2half2_rn(low, high);
}

template <>
__device__ __forceinline__ __nv_bfloat162 pair_of<__nv_bfloat16>(float low, float high)
{
    return __floats2bfloat162_rn(low, high);
}

// Rounds a value as storing it as T does: the rounding points of the composed operations.
template <typename T>
__device__ __forceinline__ float rounded(float x)
{
    return to_float(from_float<T>(x));
}

// Uses the GPU's fast instructions: their errors of some 2^-22 are below the rounding of the result.
__device__ __forceinline__ float silu(float x)
{
    return __fdividef(x, 1.f + __expf(-x));
}

// By its form with tanh: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
__device__ __forceinline__ float gelu(float x)
{
    constexpr float kTwice = 2.f * 0.7978845608028654f; // sqrt(2 / pi)
    float const inner = kTwice * x * fmaf(0.044715f * x, x, 1.f);
    return __fdividef(x, 1.f + __expf(-inner));
}

// Two floats as one register of two T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t packed(float low, float high)
{
    T pair[2] = {from_float<T>(low), from_float<T>(high)};
    return static_cast<uint32_t>(reinterpret_cast<uint16_t const&>(pair[0]))
        | static_cast<uint32_t>(reinterpret_cast<uint16_t const&>(pair[1])) << 16;
}

// N elements that are loaded and stored in one access of at most 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector
{
    T at[N];
};

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load_vector(T const* from)
{
    return *reinterpret_cast<Vector<T, N> const*>(from);
}

// Reads past the L1 cache, which may have what was there before: a kernel that begins early does not empty it.
template <typename T>
__device__ __forceinline__ T load_new(T const* from)
{
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    using OfFew = std::conditional_t<sizeof(T) == 2, unsigned short, unsigned>;
    using OfMore = std::conditional_t<sizeof(T) == 8, uint2, uint4>;
    using Bits = std::conditional_t<sizeof(T) <= 4, OfFew, OfMore>;
    Bits const bits = __ldcg(reinterpret_cast<Bits const*>(from));
    return reinterpret_cast<T const&>(bits);
}

template <typename T, int N>
__device__ __forceinline__ void store_vector(T* to, Vector<T, N> const& x)
{
    *reinterpret_cast<Vector<T, N>*>(to) = x;
}

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

constexpr int kMostBlockThreads = 1024; // of a block

// Whole warps of a block, with a thread for each of so many items where there are as many threads.
constexpr int count_block_threads(int items)
{
    return items >= kMostBlockThreads ? kMostBlockThreads : (items + 31) / 32 * 32;
}

// What kOverWarp gives of a warp, of a block's threads, which are whole warps. A zero more changes nothing of it.
template <float (*kOverWarp)(float)>
__device__ __forceinline__ float over_block(float x)
{
    __shared__ float warps[kMostBlockThreads / 32];
    x = kOverWarp(x);
    if (threadIdx.x % 32 == 0)
    {
        warps[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return kOverWarp(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.f);
}

} // namespace dflash
