// NVFP4's scales as 16-bit factors of its numbers, which are MXFP4's (mxfp4.cuh).
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

// A number of E2M1 has 2 significant bits and its scale in E4M3 has 4, so that their product has 6 at most, and is
// exact in BF16 and FP16: it is a multiple of 2^-10, and 2688 at most. Numbers as Mxfp4's `spread` leaves them, times
// the factor, are such products / kRest, exact too: of FP16 (subnormal below 2^-14) they are multiples of 2^-17. What
// is left, and the FP32 scale of a row, are for the sums.
template <typename T>
struct Nvfp4
{
    static constexpr bool kIsHalf = std::is_same_v<T, __half>;
    static constexpr float kRest = 128.f; // the largest scale times more is beyond either type

    // The factors of two scales, a byte each, as a pair. Put where the type has its exponent's low bits, a scale is
    // itself times a power of two, subnormal ones too (as in fp8.cuh); its sign, which no scale has, is not looked at.
    // half: 0, of the low two bytes; 1, of the high ones.
    static __device__ __forceinline__ uint32_t factors(uint32_t scales, int half)
    {
        uint32_t const apart = __byte_perm(scales, 0, half == 0 ? 0x4140 : 0x4342);
        if constexpr (kIsHalf)
        {
            return multiplied(apart << 7, 0x78007800u); // by 2^15
        }
        return multiplied(multiplied(apart << 4, 0x7b007b00u), 0x7b807b80u); // by 2^119 and by 2^120
    }

    // Multiplies pairs of numbers by the first or the second of two factors.
    static __device__ __forceinline__ void multiply(uint32_t (&pairs)[4], uint32_t factors, int which)
    {
        uint32_t const factor = __byte_perm(factors, 0, which == 0 ? 0x1010 : 0x3232);
#pragma unroll
        for (uint32_t& pair : pairs)
        {
            pair = multiplied(pair, factor);
        }
    }

    static __device__ __forceinline__ uint32_t multiplied(uint32_t pair, uint32_t by)
    {
        using Two = typename Pair<T>::type;
        Two const product = __hmul2(reinterpret_cast<Two const&>(pair), reinterpret_cast<Two const&>(by));
        return reinterpret_cast<uint32_t const&>(product);
    }
};

} // namespace dflash
