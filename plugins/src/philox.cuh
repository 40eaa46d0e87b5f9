// Philox4x32-10 (Salmon et al., SC 2011): random numbers that are a pure function of a key and a counter.
#pragma once

#include <cstdint>

namespace dflash
{

// The first of the four words of a counter (its other words are 0) and a key.
__device__ __forceinline__ uint32_t philox(uint32_t counter, uint64_t key)
{
    constexpr uint32_t kFirst = 0xD2511F53; // multipliers
    constexpr uint32_t kSecond = 0xCD9E8D57;
    uint4 words = {counter, 0, 0, 0};
    auto low_key = static_cast<uint32_t>(key);
    auto high_key = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round)
    {
        uint32_t const high0 = __umulhi(words.x, kFirst);
        uint32_t const low0 = words.x * kFirst;
        uint32_t const high1 = __umulhi(words.z, kSecond);
        uint32_t const low1 = words.z * kSecond;
        words = {high1 ^ words.y ^ low_key, low1, high0 ^ words.w ^ high_key, low0};
        low_key += 0x9E3779B9;
        high_key += 0xBB67AE85;
    }
    return words.x;
}

// The number in [0, 1) of a position by its request's seed, on a grid of 2^-24.
__device__ __forceinline__ float uniform_number(int64_t seed, int position)
{
    return static_cast<float>(philox(static_cast<uint32_t>(position), static_cast<uint64_t>(seed)) >> 8) * 0x1p-24f;
}

} // namespace dflash
