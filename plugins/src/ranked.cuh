// Logits with their tokens as single numbers, in the order in which tokens are preferred.
#pragma once

#include <cstdint>

namespace dflash
{

// Orders first by value, then by the lower id; larger is better.
__device__ __forceinline__ uint64_t ranked(float value, int32_t id)
{
    uint32_t const bits = __float_as_uint(value + 0.f); // -0 equals +0
    uint32_t const ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ float value_of(uint64_t key)
{
    uint32_t const ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ uint64_t warp_best(uint64_t key)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        key = max(key, __shfl_xor_sync(0xffffffffu, key, step));
    }
    return key;
}

} // namespace dflash
