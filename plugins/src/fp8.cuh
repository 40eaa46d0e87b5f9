// FP8's numbers (E4M3) as 16-bit ones: a weight's words, spread over registers for tensor cores.
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

// E4M3 has 4 bits of exponent with bias 7 and 3 of fraction. Put where the wider type has its exponent's low bits, they
// are the number times a power of two, subnormal ones too; a product takes that away. Every number stays what it is.
template <typename T>
struct Fp8
{
    static constexpr bool kIsHalf = std::is_same_v<T, __half>;
    static constexpr int kShift = kIsHalf ? 7 : 4; // of exponent and fraction in the lower byte of a half
    static constexpr uint32_t kPlaces = kIsHalf ? 0x3f803f80u : 0x07f007f0u; // of exponent and fraction
    static constexpr uint32_t kSigns = 0x80008000u;
    static constexpr uint32_t kFactor = kIsHalf ? 0x5c005c00u : 0x7b807b80u; // 2^8 and 2^120, twice

    // The four numbers of a word as pairs (0, 2), (1, 3).
    static __device__ __forceinline__ void spread(uint32_t word, uint32_t (&pairs)[2])
    {
        pairs[0] = multiplied((word << 8 & kSigns) | (word << kShift & kPlaces));
        pairs[1] = multiplied((word & kSigns) | (word >> (8 - kShift) & kPlaces));
    }

    static __device__ __forceinline__ uint32_t multiplied(uint32_t pair)
    {
        using Two = typename Pair<T>::type;
        uint32_t const factor = kFactor;
        Two const product = __hmul2(reinterpret_cast<Two const&>(pair), reinterpret_cast<Two const&>(factor));
        return reinterpret_cast<uint32_t const&>(product);
    }
};

// Orders eight inputs as FP8's numbers are once their words are spread: pairs (0, 2), (1, 3), (4, 6), (5, 7).
__device__ __forceinline__ uint4 paired_in_words(uint4 const& x)
{
    return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
        __byte_perm(x.z, x.w, 0x7632)};
}

} // namespace dflash
