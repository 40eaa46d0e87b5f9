// The scales of experts in FP8, as products of few rows and of many add them.
#pragma once

#include "experts_work.cuh"

namespace dflash
{
namespace moe
{

// FP8's scales of a lane's two rows of a granule. Of rows in blocks each lane has one of 32 of them, for its warp.
struct Fp8Scales
{
    float const* upper;
    float const* lower;
    int const blocks; // of a row; 0: it has one scale
    int const lane;
    float own[2];

    __device__ __forceinline__ Fp8Scales(Product const& p, int expert, int row, int second_row, int lane_)
        : blocks(p.is_by_block ? (p.inputs + kFp8Block - 1) / kFp8Block : 0)
        , lane(lane_)
    {
        int64_t const scaled = p.is_by_block ? (p.outputs + kFp8Block - 1) / kFp8Block * blocks : p.outputs;
        float const* const scales = static_cast<float const*>(p.scales) + expert * scaled;
        upper = scales + (p.is_by_block ? row / kFp8Block * blocks : row);
        lower = scales + (p.is_by_block ? second_row / kFp8Block * blocks : second_row);
        load(0);
    }

    __device__ __forceinline__ void load(int first)
    {
        int const at = blocks ? min(first + lane, blocks - 1) : 0;
        own[0] = upper[at];
        own[1] = lower[at];
    }

    // Adds a unit's sums, scaled, to c, and clears them. A unit's inputs are one block. All lanes call together.
    template <int kTiles>
    __device__ __forceinline__ void add(float (&c)[kTiles][4], float (&sums)[kTiles][4], int unit)
    {
        static_assert(kLine == kFp8Block);
        if (blocks && unit && unit % 32 == 0)
        {
            load(unit);
        }
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            scale[i] = __shfl_sync(kAll, own[i], blocks ? unit % 32 : lane);
        }
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i)
        {
            c[i / 4][i % 4] = fmaf(scale[i % 4 / 2], sums[i / 4][i % 4], c[i / 4][i % 4]);
            sums[i / 4][i % 4] = 0.f;
        }
    }
};

} // namespace moe
} // namespace dflash
