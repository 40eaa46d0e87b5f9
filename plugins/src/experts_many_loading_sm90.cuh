// Products of a mixture of experts for many rows, for Hopper: a block's shared memory, and the warp that has it filled.
#pragma once

#include "experts_many_layout.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "tensor_copy.cuh"

namespace dflash
{
namespace moe
{
namespace many
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- copies -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_bytes_once(
    uint32_t to, void const* from, int bytes, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
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
        : layout(kWeight, launch.stages)
        , start(memory)
        , barriers(memory + layout.barriers_at)
    {
    }

    __device__ __forceinline__ uint32_t inputs(int stage) const
    {
        return start + stage * S::kBytes;
    }

    // Behind the inputs of as many tokens as there may be.
    __device__ __forceinline__ uint32_t weight(int stage, int tokens) const
    {
        return inputs(stage) + (S::kIsTiled && tokens <= kAloneTokens ? kAloneTokens * S::kTokenBytes : S::kInputBytes);
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return barriers + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return barriers + (kMostStages + stage) * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < kMostStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), Crew<kLines>::kWarps);
        }
        fence_barrier_inits();
    }
};

// -- loading ----------------------------------------------------------------------------------------------------------

// Has the stages of a block's items brought: a warp's work. Its first lane asks for all, but for slabs of tiles, which
// are a lane's each.
template <Weight kWeight, bool kGateUp>
struct Loader
{
    static constexpr Lines kLines = lines_of(kWeight);
    using S = Stage<kLines>;

    Launch const& launch;
    Shared<kWeight> const& shared;
    uint64_t const policy;
    int const lane;
    Place next; // stage

    __device__ __forceinline__ Loader(Launch const& launch_, Shared<kWeight> const& shared_)
        : launch(launch_)
        , shared(shared_)
        , policy(read_once_policy())
        , lane(threadIdx.x % 32)
    {
    }

    // Weights of the first stages are asked for before the kernel waits for the one before it, which makes the inputs:
    // of the second product those of a whole ring.
    __device__ __forceinline__ void load(Items<kLines> items)
    {
        int ahead = min(kGateUp ? kStagesAhead : launch.stages, launch.steps);
        if (!items.are_left())
        {
            wait();
        }
        for (bool is_first = true; items.are_left(); is_first = false)
        {
            Item const item = items.next();
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
        uint32_t const barrier = shared.full(stage), to = shared.weight(stage, item.group.tokens);
        int const input_bytes = boxes_of(item) * kBoxTokens * S::kTokenBytes;
        wait_for_phase(shared.empty(stage), phase ^ 1);
        if constexpr (S::kIsTiled)
        {
            load_tiles(item, step, to, barrier, input_bytes);
        }
        else if (lane == 0)
        {
            expect_bytes(barrier, item.count * kUnitRows * S::kLineBytes + input_bytes);
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                int const row = first_row<kGateUp>(launch.p, item, half);
                copy_box_3d(to + half * S::kHalfBytes, launch.weight[item.count - 1], step * S::kLineBytes, row,
                    item.group.expert, barrier, policy);
            }
        }
    }

    // Behind a weight's last rows there are no tiles: what lies there may be any.
    __device__ __forceinline__ void load_tiles(
        Item const& item, int step, uint32_t to, uint32_t barrier, int input_bytes) const
    {
        static_assert(kUnitGranules == kSlabGranules);
        int const granules = launch.p.outputs / kGranule, unit = item.unit * kUnitGranules;
        int const bytes = min(kTileParts, launch.p.inputs / 32 - step * kTileParts) * part_bytes(kWeight);
        if (lane == 0)
        {
            expect_bytes(barrier, min(item.count * kUnitGranules, granules - unit) * bytes + input_bytes);
        }
        __syncwarp();
        if (lane < item.count)
        {
            int const first = unit + lane * kUnitGranules, count = min(kUnitGranules, granules - first);
            int64_t const before = static_cast<int64_t>(item.group.expert) * granules + first;
            char const* const from = static_cast<char const*>(launch.p.weight)
                + before * granule_bytes(kWeight, launch.p.inputs) + step * count * tile_bytes(kWeight);
            copy_bytes_once(to + lane * S::kSlabBytes, from, count * bytes, barrier, policy);
        }
    }

    __device__ __forceinline__ void load_inputs(Item const& item, int step) const
    {
        if (lane == 0)
        {
            copy_box_3d(shared.inputs(next.at), launch.inputs[boxes_of(item) - 1], 0, item.group.first,
                step * S::kAtoms, shared.full(next.at));
        }
    }
};

#endif

} // namespace many
} // namespace moe
} // namespace dflash
