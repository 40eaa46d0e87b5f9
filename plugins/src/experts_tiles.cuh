// How experts in MXFP4 and NVFP4 lie in memory: in tiles, each of a granule's 16 rows by 128 columns with their scales,
// so that a lane finds its part by its number. Four granules are a slab, an expert's last ones may be fewer: their
// tiles of the first columns lie together, then those of the next.
//
// A tile is parts of 32 columns, the last one of a row those that are left. Of a part the first 8 rows' numbers come
// first, [8, 16 bytes], then those of the others, then all scales, [8, 2 halves of the rows], a byte of MXFP4, two of
// NVFP4. In which order the 8 are says `place_in_part`.
#pragma once

#include "experts_work.cuh"
#include "mxfp4.cuh"
#include "nvfp4.cuh"

namespace dflash
{
namespace moe
{

// Sixteen bytes of shared memory.
__device__ __forceinline__ uint4 read_16(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
}

// The place of a row among its eight: lanes that read at once, two rows of four parts, meet in no bank.
template <Weight kWeight>
__device__ __forceinline__ int place_in_part(int row)
{
    return kWeight == Weight::kNvfp4 ? row : row / 2 + row % 2 * 4;
}

// A lane's part of a tile: of rows l / 4 and l / 4 + 8 the l % 4-th 32 columns.
template <typename T, Weight kWeight>
struct TilePart
{
    using Format = Mxfp4<T>;

    uint4 upper;
    uint4 lower;
    uint32_t factors[2]; // of upper and lower; of NVFP4 each two, of 16 columns

    // From shared memory, a part's place and the row's in it.
    __device__ __forceinline__ void read(uint32_t at, int place)
    {
        upper = read_16(at + place * 16);
        lower = read_16(at + place * 16 + 8 * 16);
        uint32_t const scales = at + place * 2 * scale_bytes_of(kWeight) + 16 * 16;
        if constexpr (kWeight == Weight::kNvfp4)
        {
            uint32_t const both = read_word(scales);
            factors[0] = Nvfp4<T>::factors(both, 0);
            factors[1] = Nvfp4<T>::factors(both, 1);
        }
        else
        {
            uint32_t const both = read_half_word(scales);
            factors[0] = Format::factor(both & 0xff);
            factors[1] = Format::factor(both >> 8);
        }
    }

    // Unpacks one of the four words of an upper (0) or a lower row (1), as pairs (0, 4), (1, 5), (2, 6), (3, 7).
    __device__ __forceinline__ void unpack(int half, int word, uint32_t (&pairs)[4]) const
    {
        uint4 const& row = half == 0 ? upper : lower;
        Format::spread(word == 0 ? row.x : word == 1 ? row.y : word == 2 ? row.z : row.w, pairs);
        if constexpr (kWeight == Weight::kNvfp4)
        {
            Nvfp4<T>::multiply(pairs, factors[half], word / 2);
        }
        else
        {
            Format::multiply(pairs, factors[half]);
        }
    }

private:
    static __device__ __forceinline__ uint32_t read_word(uint32_t from)
    {
        uint32_t x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
        return x;
    }

    static __device__ __forceinline__ uint32_t read_half_word(uint32_t from)
    {
        uint16_t x;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from));
        return x;
    }
};

} // namespace moe
} // namespace dflash
