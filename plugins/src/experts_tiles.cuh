// How experts in MXFP4 and NVFP4 lie in memory: in tiles, each of a granule's 16 rows by 128 columns with their scales,
// so that a lane finds its part by its number. Four granules are a slab, an expert's last ones may be fewer: their
// tiles of the first columns lie together, then those of the next.
//
// Of a tile the first 8 rows' numbers come first, [8, parts, 16 bytes], then those of the others, then all scales, [8,
// parts, 2 halves of the rows], a byte of MXFP4, two of NVFP4. A part is 32 columns; the last tile of a row has those
// that are left.
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

// A lane's part of a tile: of rows l / 4 and l / 4 + 8 the l % 4-th 32 columns.
template <typename T, Weight kWeight>
struct TilePart
{
    using Format = Mxfp4<T>;

    uint4 upper;
    uint4 lower;
    uint32_t factors[2]; // of upper and lower; of NVFP4 each two, of 16 columns

    // From shared memory. parts: that the tile has; behind them are the last one's numbers, which meet inputs of zeros.
    __device__ __forceinline__ void read(uint32_t tile, int parts, int quad, int part)
    {
        int const place = quad * parts + min(part, parts - 1);
        upper = read_16(tile + place * 16);
        lower = read_16(tile + (8 * parts + place) * 16);
        uint32_t const scales = tile + 16 * parts * 16 + place * 2 * scale_bytes_of(kWeight);
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
