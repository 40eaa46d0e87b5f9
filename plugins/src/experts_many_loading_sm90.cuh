// Products of a mixture of experts for many rows, for Hopper: a block's shared memory, and the warp that has it filled.
#pragma once

#include "experts_many_layout.cuh"
#include "instructions.cuh"
#include "launch.cuh"

namespace dflash
{
namespace moe
{
namespace many
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- copies -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_weight(
    uint32_t to, CUtensorMap const& map, int byte, int row, int expert, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(byte), "r"(row), "r"(expert), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_inputs(uint32_t to, CUtensorMap const& map, int pair, int atom, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(0), "r"(pair), "r"(atom), "r"(barrier)
        : "memory");
}

// -- shared memory ----------------------------------------------------------------------------------------------------

// A place in a ring, and the phase of its barriers.
struct Place
{
    int at = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int places)
    {
        if (++at == places)
        {
            at = 0;
            phase ^= 1;
        }
    }
};

template <Weight kWeight>
struct Shared
{
    static constexpr Lines kLines = lines_of(kWeight);
    using S = Stage<kLines>;

    SharedLayout const layout;
    uint32_t const start;
    uint32_t const barriers;

    __device__ __forceinline__ Shared(Launch const& launch, uint32_t memory)
        : layout(launch.p.inputs, kWeight, launch.stages)
        , start(memory)
        , barriers(memory + layout.barriers_at)
    {
    }

    __device__ __forceinline__ uint32_t weight(int stage) const
    {
        return start + stage * S::kBytes;
    }

    __device__ __forceinline__ uint32_t inputs(int stage) const
    {
        return start + stage * S::kBytes + S::kWeightBytes;
    }

    __device__ __forceinline__ uint32_t scales(int buffer) const
    {
        return start + layout.scales_at + buffer * layout.scale_bytes;
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return barriers + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return barriers + (kMostStages + stage) * 8;
    }

    __device__ __forceinline__ uint32_t scales_full(int buffer) const
    {
        return barriers + (2 * kMostStages + buffer) * 8;
    }

    __device__ __forceinline__ uint32_t scales_empty(int buffer) const
    {
        return barriers + (2 * kMostStages + kScaleBuffers + buffer) * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < kMostStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), Crew<kLines>::kWarps);
        }
        for (int i = 0; i < kScaleBuffers; ++i)
        {
            init_barrier(scales_full(i), 1);
            init_barrier(scales_empty(i), Crew<kLines>::kWarps);
        }
        fence_barrier_inits();
    }
};

// -- loading ----------------------------------------------------------------------------------------------------------

// Has the stages of a block's items brought: one thread's work.
template <Weight kWeight, bool kGateUp>
struct Loader
{
    using S = Stage<lines_of(kWeight)>;

    Launch const& launch;
    Shared<kWeight> const& shared;
    uint64_t const policy;
    Place next; // stage
    Place next_scales;

    __device__ __forceinline__ Loader(Launch const& launch_, Shared<kWeight> const& shared_)
        : launch(launch_)
        , shared(shared_)
        , policy(read_once_policy())
    {
    }

    // Weights of the first stages come before the kernel waits for the one before it: that one makes the inputs.
    __device__ __forceinline__ void load(Items items)
    {
        int ahead = min(launch.stages, launch.steps);
        if (!items.are_left())
        {
            wait();
        }
        for (bool is_first = true; items.are_left(); is_first = false)
        {
            Item const item = items.next();
            load_scales(item);
            for (int step = 0; is_first && step < ahead; ++step)
            {
                load_weights(item, step, step, 0);
            }
            if (is_first)
            {
                wait();
            }
            for (int step = 0; step < launch.steps; ++step)
            {
                if (step >= ahead)
                {
                    load_weights(item, step, next.at, next.phase);
                }
                load_inputs(item, step);
                next.advance(launch.stages);
            }
            ahead = 0;
        }
    }

    __device__ __forceinline__ static int boxes_of(Item const& item)
    {
        return (item.group.tokens + kBoxTokens - 1) / kBoxTokens;
    }

    __device__ __forceinline__ void load_weights(Item const& item, int step, int stage, uint32_t phase) const
    {
        uint32_t const barrier = shared.full(stage), to = shared.weight(stage);
        wait_for_phase(shared.empty(stage), phase ^ 1);
        expect_bytes(barrier, item.count * kUnitRows * S::kLineBytes + boxes_of(item) * kBoxTokens * S::kTokenBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            copy_weight(to + half * S::kHalfBytes, launch.weight[item.count - 1], step * S::kLineBytes,
                first_row<kGateUp>(launch.p, item, half), item.group.expert, barrier, policy);
        }
    }

    __device__ __forceinline__ void load_inputs(Item const& item, int step) const
    {
        copy_inputs(shared.inputs(next.at), launch.inputs[boxes_of(item) - 1], item.group.first, step * S::kAtoms,
            shared.full(next.at));
    }

    // Rows behind the weight's last have no scales: theirs may be any.
    __device__ __forceinline__ void load_scales(Item const& item)
    {
        if constexpr (lines_of(kWeight) == Lines::kE2m1)
        {
            Product const& p = launch.p;
            int const row_bytes = shared.layout.row_scale_bytes;
            uint32_t const barrier = shared.scales_full(next_scales.at), to = shared.scales(next_scales.at);
            int first[2], bytes[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                first[half] = first_row<kGateUp>(p, item, half);
                bytes[half] = max(0, min(item.count * kHalfRows, p.outputs - first[half])) * row_bytes;
            }
            wait_for_phase(shared.scales_empty(next_scales.at), next_scales.phase ^ 1);
            expect_bytes(barrier, bytes[0] + bytes[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                int64_t const row = static_cast<int64_t>(item.group.expert) * p.outputs + first[half];
                if (bytes[half] > 0)
                {
                    int const at = half * Crew<Lines::kE2m1>::kItemUnits * kHalfRows * row_bytes;
                    copy_bytes(to + at, static_cast<uint8_t const*>(p.scales) + row * row_bytes, bytes[half], barrier);
                }
            }
            next_scales.advance(kScaleBuffers);
        }
    }
};

#endif

} // namespace many
} // namespace moe
} // namespace dflash
