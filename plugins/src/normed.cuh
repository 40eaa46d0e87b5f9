// Numbers of a row, normed: as every kernel rounds them that stores them.
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

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

// Loads the thread's vectors of a norm's weights, of a block that has a row. They are constants: read while the kernel
// before still runs.
template <typename W, int kVectors, int N>
__device__ __forceinline__ void load_own_weights(Vector<W, N> (&own)[kVectors], void const* weight, int size)
{
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        if (int const at = (threadIdx.x + i * blockDim.x) * N; at < size)
        {
            own[i] = load_weights<W, N>(static_cast<W const*>(weight) + at);
        }
    }
}

// Adds the squares of x.
template <typename T, int N>
__device__ __forceinline__ void add_squares(float& squares, Vector<T, N> const& x)
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        float const value = to_float(x.at[i]);
        squares += value * value;
    }
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
