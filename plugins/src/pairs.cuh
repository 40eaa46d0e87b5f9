// Pairs of 16-bit numbers, as products' results lie in registers and in memory.
#pragma once

#include "element.cuh"

namespace dflash
{

template <typename T>
using Two = typename Pair<T>::type;

__device__ __forceinline__ float2 to_floats(__half2 x)
{
    return __half22float2(x);
}

// Takes an instruction for each, which conversions one by one do not.
__device__ __forceinline__ float2 to_floats(__nv_bfloat162 x)
{
    auto const bits = reinterpret_cast<uint32_t const&>(x);
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

template <typename T, int N>
__device__ __forceinline__ void add_pairs(Two<T> const (&x)[N], Two<T> (&y)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        float2 const here = to_floats(y[i]), there = to_floats(x[i]);
        y[i] = pair_of<T>(here.x + there.x, here.y + there.y);
    }
}

template <typename T, int N, typename Activation>
__device__ __forceinline__ void activate_pairs(Activation const& activation, Two<T> (&x)[N])
{
#pragma unroll
    for (Two<T>& two : x)
    {
        float2 const y = to_floats(two);
        two = pair_of<T>(activation(y.x), activation(y.y));
    }
}

// Gates, activated and rounded, times what they gate.
template <typename T, int N>
__device__ __forceinline__ void gate_pairs(bool is_gelu, Two<T> (&gates)[N], Two<T> const (&ups)[N])
{
    if (is_gelu)
    {
        activate_pairs<T>([](float x) { return gelu(x); }, gates);
    }
    else
    {
        activate_pairs<T>([](float x) { return silu(x); }, gates);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        float2 const gate = to_floats(gates[i]), up = to_floats(ups[i]);
        gates[i] = pair_of<T>(gate.x * up.x, gate.y * up.y);
    }
}

} // namespace dflash
