// Products of a mixture of experts for many rows, for Hopper: what becomes of a unit's sums.
#pragma once

#include "experts_many_layout.cuh"
#include "nvfp4.cuh"

namespace dflash
{
namespace moe
{
namespace many
{

// Finishes and stores a unit's sums. A lane has two tokens' sums of two rows: a gate and its up, or two outputs. Biases
// are on their way while the sums are made.
template <typename T, Weight kWeight, bool kGateUp>
struct Epilogue
{
    Launch const& launch;
    Product const& p;
    Item const& item;
    int const unit;
    int const of_half; // the lane's row of a half
    float bias[2] = {};
    [[maybe_unused]] float scale[2] = {}; // NVFP4's

    __device__ __forceinline__ Epilogue(Launch const& launch_, Item const& item_, int unit_, int row)
        : launch(launch_)
        , p(launch_.p)
        , item(item_)
        , unit(unit_)
        , of_half(row)
    {
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            if (is_there(half))
            {
                int64_t const at = static_cast<int64_t>(item.group.expert) * p.outputs + this->row(half);
                bias[half] = p.bias ? to_float(static_cast<T const*>(p.bias)[at]) : 0.f;
                scale[half] = kWeight == Weight::kNvfp4 ? p.row_scales[at] : 0.f;
            }
        }
    }

    // The lane's row of the first or the second halves.
    __device__ __forceinline__ int row(int half) const
    {
        return row_of<lines_of(kWeight), kGateUp>(p, item, unit, half, of_half);
    }

    __device__ __forceinline__ bool is_there(int half) const
    {
        return row(half) < (kGateUp && half == 0 ? p.outputs / 2 : p.outputs);
    }

    // What the products' sum is.
    __device__ __forceinline__ static float scaled(float sum, [[maybe_unused]] float scale)
    {
        return kWeight == Weight::kNvfp4 ? sum * Nvfp4<T>::kRest * scale : sum;
    }

    // Takes the sums: a tile that is done leaves the front.
    template <int kTiles>
    __device__ __forceinline__ void store(float (&c)[kTiles][4]) const
    {
        int const rows[2] = {row(0), row(1)};
        bool const are_there[2] = {is_there(0), is_there(1)};
        T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(item.group.first) * launch.pitch;
        int const places[2] = {kGateUp ? place_of<lines_of(kWeight)>(rows[0]) : rows[0], rows[1]};
#pragma unroll 1 // its instructions come from memory, too
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                int const token = tile * 8 + threadIdx.x % 4 * 2 + i;
                float const upper = rounded<T>(scaled(c[0][i], scale[0]) + bias[0]);
                float const lower = rounded<T>(scaled(c[0][2 + i], scale[1]) + bias[1]);
                T* const to = out + token * launch.pitch;
                if (token < item.group.tokens && are_there[0])
                {
                    store_kept(to + places[0], from_float<T>(kGateUp ? p.activated(upper, lower) : upper));
                }
                if (!kGateUp && token < item.group.tokens && are_there[1])
                {
                    store_kept(to + places[1], from_float<T>(lower));
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * (kTiles - 1); ++i)
            {
                c[i / 4][i % 4] = c[i / 4 + 1][i % 4];
            }
        }
    }
};

} // namespace many
} // namespace moe
} // namespace dflash
