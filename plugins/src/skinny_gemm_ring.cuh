// The ring of stages through which a weight comes into shared memory: one thread loads, eight warps read.
#pragma once

#include "skinny_gemm_layout.cuh"

namespace dflash
{
namespace skinny
{

// Copies a unit for each warp, from a row and a line of a weight on: see `map_weight`.
__device__ __forceinline__ void copy_stage(uint32_t to, CUtensorMap const& map, int row, int line, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(0), "r"(row), "r"(0), "r"(line), "r"(barrier)
        : "memory");
}

// Sixteen rows of a weight, 128 bytes each, in a warp's registers. Lane l has parts of the rows l / 4 and l / 4 + 8: of
// a row's eight parts two that lie together.
struct Unit
{
    uint4 upper[2], lower[2];
};

// Stages in the order in which they are loaded and read. Each thread has its own count of them.
template <typename L>
struct Ring
{
    Launch const& launch;
    Place const& place;
    Shared<L> const& shared;
    int stage = 0; // the next one
    uint32_t phase = 0; // of its barriers
    int oldest = 0; // stage that has not been given back

    __device__ __forceinline__ void next_stage()
    {
        if (++stage == L::kStages)
        {
            stage = 0;
            phase ^= 1;
        }
    }

    // Asks for the block's stages as the ring has room: one thread's work. A stage is not asked for before all but the
    // last few have come: more than fills the way to the memory only makes everything wait, first of all the inputs,
    // for what is asked for at once comes in no order.
    __device__ __forceinline__ void load()
    {
        Share const share(launch, place.rank);
        int const granule_rows = launch.p.swiglu ? kGranule / 2 : kGranule;
        int count = 0;
        for (int first = 0; first < share.count; first += L::kGranules)
        {
            for (int run = 0; run < share.runs; ++run)
            {
                for (int granule = first; granule < min(first + L::kGranules, share.count); ++granule)
                {
                    if (count >= kInFlight)
                    {
                        int const other = stage - kInFlight;
                        int const at = other < 0 ? other + L::kStages : other;
                        wait_for_phase(shared.full + at * kBarrier, phase ^ (other < 0));
                    }
                    wait_for_phase(shared.empty + stage * kBarrier, phase ^ 1);
                    expect_bytes(shared.full + stage * kBarrier, kStage);
                    copy_stage(shared_address(shared.ring) + stage * kStage, launch.weight,
                        (share.first + granule) * granule_rows, place.rank * kWarps + run * kRunWarps,
                        shared.full + stage * kBarrier);
                    next_stage();
                    ++count;
                }
            }
        }
    }

    // Reads the warp's unit of the next stage, once it has come.
    __device__ __forceinline__ Unit read()
    {
        wait_for_phase(shared.full + stage * kBarrier, phase);
        unsigned char const* const from = shared.ring + stage * kStage + place.warp * kUnit;
        Unit unit;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            unit.upper[half] = *reinterpret_cast<uint4 const*>(from + swizzled(place.quad, place.part * 2 + half));
            unit.lower[half] = *reinterpret_cast<uint4 const*>(from + swizzled(place.quad + 8, place.part * 2 + half));
        }
        next_stage();
        return unit;
    }

    // Gives the oldest unit's stage back. Its numbers must have come, not only been asked for: a copy into the stage
    // passes reads that wait in line, behind those of a residual, say. So the address is made to need what came of
    // them.
    __device__ __forceinline__ void release(uint32_t seen)
    {
        __syncwarp();
        if (place.lane == 0)
        {
            arrive(shared.empty + oldest * kBarrier + (seen & launch.zero));
        }
        oldest = oldest + 1 == L::kStages ? 0 : oldest + 1;
    }
};

} // namespace skinny
} // namespace dflash
