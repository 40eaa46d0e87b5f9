// Numbers of a row, normed: as every kernel rounds them that stores them.
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

constexpr int kMostNormThreads = 1024; // of a block, which has a row

// The sum of x over the block's threads, which are whole warps.
__device__ __forceinline__ float block_sum(float x)
{
    __shared__ float sums[kMostNormThreads / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0)
    {
        sums[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f);
}

// A vector of a norm's weights, by accesses of at most 16 bytes.
template <typename W, int N = 8>
__device__ __forceinline__ Vector<W, N> load_weights(W const* from)
{
    constexpr int kPart = sizeof(W) == 4 ? N / 2 : N;
    Vector<W, N> weights;
#pragma unroll
    for (int first = 0; first < N; first += kPart)
    {
        auto const part = load_vector<W, kPart>(from + first);
#pragma unroll
        for (int i = 0; i < kPart; ++i)
        {
            weights.at[first + i] = part.at[i];
        }
    }
    return weights;
}

// With weights of 16 bits numbers are rounded before them too. root: the row's inverse root mean square.
template <typename T, typename W, int N>
__device__ __forceinline__ Vector<T, N> normed(Vector<T, N> const& x, float root, Vector<W, N> const& by)
{
    Vector<T, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        float const value = to_float(x.at[i]) * root;
        float const once = std::is_same_v<W, float> ? value : rounded<T>(value);
        y.at[i] = from_float<T>(once * to_float(by.at[i]));
    }
    return y;
}

} // namespace dflash
