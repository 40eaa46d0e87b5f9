// Pairs of 16-bit numbers, as products' results lie in registers and in memory.
#pragma once

#include "element.cuh"

namespace dflash
{

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

} // namespace dflash
