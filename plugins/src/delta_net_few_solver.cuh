// What one warp does beside the others: decays, shares, and how rows see each other's writes. Loops stay loops: a step
// runs them once, and their instructions come from memory, too.
#pragma once

#include "delta_net_few_work.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

template <typename T>
struct Solver
{
    using D = Division<T>;
    using S = Shared<T>;
    static constexpr int kPairs = kDeltaRows / 2; // of rows and columns, of a lane: a column's first or last rows

    Place<T> const& place;
    S const& shared;
    int const lane = threadIdx.x % 32;
    int const column = threadIdx.x % kDeltaRows;
    int const first = lane / kDeltaRows * kPairs;

    // The head's, of all rows.
    struct Rate
    {
        float log;
        float bias;
    };

    __device__ __forceinline__ Rate load_rate() const
    {
        return {static_cast<float const*>(place.p.a_log)[place.head],
            static_cast<float const*>(place.p.dt_bias)[place.head]};
    }

    // A lane's row.
    struct Gates
    {
        float share; // at first as projected
        float decay;
        float pending_decay;
    };

    // Loads what rows are weighed by, and the pending ones before them.
    __device__ __forceinline__ Gates load(Segment const& segment) const
    {
        T const* const from = static_cast<T const*>(place.p.gates)
            + int64_t{segment.first_row + min(column, segment.count - 1)} * place.p.gates_row_stride + place.head;
        Gates gates;
        gates.pending_decay = column < segment.accepted ? *place.decay(segment.slot, column) : 1.f;
        gates.share = to_float(from[0]);
        gates.decay = to_float(from[place.p.value_heads]);
        return gates;
    }

    // Fills in the decays of the pending rows, and those of `count` rows. Loops that stay loops, here and in what
    // follows: a step runs them once, and their instructions come from memory, too.
    __device__ __forceinline__ void fill(Gates& gates, Rate const& rate, int count) const
    {
        float const a = gates.decay + rate.bias;
        float const softplus = fmaxf(a, 0.f) + log1pf(expf(-fabsf(a)));
        gates.decay = column < count ? expf(-expf(rate.log) * softplus) : 1.f;
        gates.share = column < count ? 1.f / (1.f + expf(-gates.share)) : 0.f;
        shared.decays[column] = gates.decay;
        shared.kept[column] = product_to(gates.decay);
        multiply_pending(gates.pending_decay, shared.pending_behind, *shared.pending_kept);
        weigh(gates);
    }

    // Leaves b D below the diagonal where the solution will be, and D beside it: a lane has a column's first or last
    // rows.
    __device__ __forceinline__ void weigh(Gates const& gates) const
    {
        float left = 1.f;
#pragma unroll 4
        for (int i = 0; i < kDeltaRows; ++i)
        {
            float const decay = __shfl_sync(0xffffffffu, gates.decay, i);
            float const share = __shfl_sync(0xffffffffu, gates.share, i);
            left *= i > column ? decay : 1.f;
            if (i / kPairs == first / kPairs)
            {
                shared.solved[i * kMixStride + column] = i > column ? left * share : 0.f;
                shared.weights[i * kMixStride + column] = i >= column ? left : 0.f;
            }
        }
    }

    // Weighs the products of keys, and inverts I + A.
    __device__ __forceinline__ void solve(float share) const
    {
        float lower[kPairs] = {};
#pragma unroll 1
        for (int turn = 0; turn < kPairs; turn += 4)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const own = (first + turn + i) * kMixStride + column;
                float const* const product = shared.products + own;
                lower[i] = lower[4 + i]; // of the turn before
                lower[4 + i] = shared.solved[own] * (product[0] + product[2 * S::kMix]);
                // Where one of the two lay, which nobody else reads.
                shared.reads[own] = shared.weights[own] * (product[S::kMix] + product[3 * S::kMix]);
            }
        }
        __syncwarp(); // they have been read
        float4* const to = reinterpret_cast<float4*>(shared.lower + column * kMixStride + first);
        to[0] = {lower[0], lower[1], lower[2], lower[3]};
        to[1] = {lower[4], lower[5], lower[6], lower[7]};
        __syncwarp();
        invert(share);
    }

    // Each lane has a column, and each row that is known is taken from all behind it. Four rows a turn, which then
    // leave the front of what a lane has; nothing is made of what stands behind its last row.
    __device__ __forceinline__ void invert(float share) const
    {
        float inverse[kDeltaRows];
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i)
        {
            inverse[i] = i == column ? 1.f : 0.f;
        }
#pragma unroll 1
        for (int row = 0; row < kDeltaRows; row += 4)
        {
#pragma unroll
            for (int known = 0; known < 4; ++known)
            {
                float const* const from = shared.lower + (row + known) * kMixStride + row;
                float4 const* const below = reinterpret_cast<float4 const*>(from);
#pragma unroll
                for (int part = (known + 1) / 4; part < kDeltaRows / 4; ++part)
                {
                    float4 const x = below[part];
                    float const numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                    {
                        if (4 * part + i > known)
                        {
                            inverse[4 * part + i] = fmaf(-numbers[i], inverse[known], inverse[4 * part + i]);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                if (lane < kDeltaRows)
                {
                    shared.solved[(row + i) * kMixStride + column] = inverse[i] * share;
                }
            }
#pragma unroll
            for (int i = 0; i < kDeltaRows - 4; ++i)
            {
                inverse[i] = inverse[i + 4];
            }
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
