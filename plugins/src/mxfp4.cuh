// MXFP4's numbers as 16-bit ones: a weight's words, spread over registers for tensor cores, and their scales.
#pragma once

#include "element.cuh"

#include <type_traits>

namespace dflash
{

// E2M1 has 2 bits of exponent with bias 1 and 1 of fraction. Put where the wider type has its exponent's low bits, they
// are the number times a power of two, subnormal ones too; a product takes that away and brings the scale.
//
// FP16's words are as they are stored. BF16's are interleaved, each for itself (`interleave` of `ops/mxfp4.py`): three
// of its four pairs are a rotation away from where BF16 has them, and no bits of the others' lie between.
template <typename T>
struct Mxfp4
{
    static constexpr bool kIsHalf = std::is_same_v<T, __half>;

    // The eight numbers of a word as pairs (0, 4), (1, 5), (2, 6), (3, 7).
    static __device__ __forceinline__ void spread(uint32_t word, uint32_t (&pairs)[4])
    {
        if constexpr (kIsHalf)
        {
            uint32_t const high = word >> 8;
            pairs[0] = place<0>(word);
            pairs[1] = place<4>(word);
            pairs[2] = place<0>(high);
            pairs[3] = place<4>(high);
        }
        else
        {
            constexpr uint32_t kPair = 0x81c081c0u;
            pairs[0] = word & kPair;
            pairs[1] = __funnelshift_l(word, word, 10) & kPair;
            pairs[2] = __funnelshift_l(word, word, 13) & kPair;
            // The last one's sign, exponent and fraction: three shifts are one product.
            pairs[3] = (word & 0x001b001bu) * ((1u << 12) + (1u << 7) + (1u << 2)) & kPair;
        }
    }

    // Takes the four bits from kFrom on of each half of a word, for FP16.
    template <int kFrom>
    static __device__ __forceinline__ uint32_t place(uint32_t word)
    {
        return (word << (12 - kFrom) & 0x80008000u) | (word << (9 - kFrom) & 0x0e000e00u);
    }

    // The factor that turns such pairs into the numbers times 2^(scale - 127), of a scale up to 128.
    static __device__ __forceinline__ uint32_t factor(uint32_t scale)
    {
        if constexpr (kIsHalf)
        {
            float const power = __uint_as_float((scale + 14) << 23);
            return packed<T>(power, power);
        }
        return (scale + 126) * 0x00800080u;
    }

    static __device__ __forceinline__ void multiply(uint32_t (&pairs)[4], uint32_t by)
    {
        using Two = typename Pair<T>::type;
#pragma unroll
        for (uint32_t& pair : pairs)
        {
            Two const product = __hmul2(reinterpret_cast<Two const&>(pair), reinterpret_cast<Two const&>(by));
            pair = reinterpret_cast<uint32_t const&>(product);
        }
    }
};

// Orders eight inputs as MXFP4's numbers are once their word is spread: pairs (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ uint4 paired(uint4 const& x)
{
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
        __byte_perm(x.y, x.w, 0x7632)};
}

} // namespace dflash
