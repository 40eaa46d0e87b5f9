// INT4's numbers as 16-bit ones: a weight's words, spread over registers for tensor cores, times their scales.
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

// A number is stored as itself and 8. Put into the fraction's lowest bits of 128 (BF16) or 1024 (FP16) it is added to
// that, and a difference gives it back, both exactly; times its scale it is rounded once.
template <typename T>
struct Int4
{
    static constexpr bool kIsHalf = std::is_same_v<T, __half>;
    static constexpr uint32_t kPlace = kIsHalf ? 0x64006400u : 0x43004300u; // 1024 or 128, twice
    static constexpr uint32_t kZero = kIsHalf ? 0x64086408u : 0x43084308u; // and 8

    // The eight numbers of a word times a factor, as pairs (0, 4), (1, 5), (2, 6), (3, 7).
    static __device__ __forceinline__ void spread(uint32_t word, uint32_t factor, uint32_t (&pairs)[4])
    {
        using Two = typename Pair<T>::type;
        uint32_t const zero = kZero;
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            uint32_t const placed = (word >> 4 * i & 0x000f000fu) | kPlace;
            Two const number = __hsub2(reinterpret_cast<Two const&>(placed), reinterpret_cast<Two const&>(zero));
            Two const scaled = __hmul2(number, reinterpret_cast<Two const&>(factor));
            pairs[i] = reinterpret_cast<uint32_t const&>(scaled);
        }
    }

    // A BF16 scale, twice, as the type has it.
    static __device__ __forceinline__ uint32_t factor(uint32_t scale)
    {
        if constexpr (kIsHalf)
        {
            float const wide = __uint_as_float(scale << 16);
            return packed<T>(wide, wide);
        }
        return scale * 0x00010001u;
    }
};

} // namespace dflash
