// Numbers with their places as single numbers, in the order in which they are preferred: logits of tokens, scores of
// nodes.
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

constexpr int kKeysTogether = 8;

__device__ __forceinline__ int whole_keys(int count)
{
    return (count + kKeysTogether - 1) / kKeysTogether * kKeysTogether;
}

// How many of the keys are larger. They begin at a multiple of 16 bytes, and are zeros up to whole_keys(count), or what
// is to be counted too.
__device__ __forceinline__ int count_larger(uint64_t const* keys, int count, uint64_t key)
{
    int larger = 0;
    for (int first = 0; first < count; first += kKeysTogether)
    {
#pragma unroll
        for (int i = 0; i < kKeysTogether; ++i)
        {
            larger += keys[first + i] > key ? 1 : 0;
        }
    }
    return larger;
}

} // namespace dflash
