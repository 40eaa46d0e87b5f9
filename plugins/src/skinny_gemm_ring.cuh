// The ring of stages through which a weight comes into shared memory: one thread loads, eight warps read.
#pragma once

#include "skinny_gemm_layout.cuh"
#include "tensor_copy.cuh"

namespace dflash
{
namespace skinny
{

// Copies a unit for each warp, from a column, a row and a chain of a weight on: see `map_weight`.
__device__ __forceinline__ void copy_stage(
    uint32_t to, CUtensorMap const& map, int column, int row, int chain, uint32_t barrier)
{
    copy_box_4d(to, map, column, row, 0, chain, barrier, read_once_policy());
}

// Sixteen rows of a weight, 128 bytes each, in a warp's registers. Lane l has parts of the rows l / 4 and l / 4 + 8: in
// order those that an instruction takes of 16 numbers that lie together, else two of a row's eight parts that do.
struct Unit
{
    uint4 upper[2], lower[2];

    // Something that is there once all four reads of it have come.
    template <typename L>
    __device__ __forceinline__ uint32_t of_each_read() const
    {
        return L::kOrdered ? upper[0].x ^ upper[0].z ^ upper[1].x ^ upper[1].z
                           : upper[0].x ^ upper[1].x ^ lower[0].x ^ lower[1].x;
    }
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
        if (++stage == launch.stages)
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
        Share const share(launch, place, L::kGranules);
        int const runs_at_once = L::kMostRuns == 1 ? 1 : launch.runs_at_once;
        int count = 0;
        for (int first = 0; first < share.count; first += share.of_pass)
        {
            for (int first_run = 0; first_run < share.runs; first_run += runs_at_once)
            {
                for (int granule = first; granule < min(first + share.of_pass, share.count); ++granule)
                {
                    for (int run = first_run; run < min(first_run + runs_at_once, share.runs); ++run)
                    {
                        load_stage(share.first + granule, run, count++);
                    }
                }
            }
        }
    }

    // Asks for a granule's lines of a run; count: stages that have been asked for.
    __device__ __forceinline__ void load_stage(int granule, int run, int count)
    {
        if (count >= kInFlight)
        {
            int const other = stage - kInFlight;
            int const at = other < 0 ? other + launch.stages : other;
            wait_for_phase(shared.full + at * kBarrier, phase ^ (other < 0));
        }
        wait_for_phase(shared.empty + stage * kBarrier, phase ^ 1);
        expect_bytes(shared.full + stage * kBarrier, kStage);
        copy_stage(shared_address(shared.ring) + stage * kStage, launch.weight, run * launch.run_bytes,
            granule * (launch.p.swiglu ? kGranule / 2 : kGranule), place.first_chain + run * launch.run_chains,
            shared.full + stage * kBarrier);
        next_stage();
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
            if constexpr (!L::kOrdered)
            {
                int const part = place.part * 2 + half;
                unit.upper[half] = *reinterpret_cast<uint4 const*>(from + swizzled(place.quad, part));
                unit.lower[half] = *reinterpret_cast<uint4 const*>(from + swizzled(place.quad + 8, part));
            }
            else
            {
                // Sixteen numbers of a row that lie together go into one instruction, as they do for more rows.
                uint32_t const at = shared_address(from) + swizzled(place.lane % 16, place.lane / 16);
                uint32_t first[4], second[4];
                load_matrices(first, at ^ (half * 4 * 16));
                load_matrices(second, at ^ ((half * 4 + 2) * 16));
                unit.upper[half] = make_uint4(first[0], first[2], second[0], second[2]);
                unit.lower[half] = make_uint4(first[1], first[3], second[1], second[3]);
            }
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
        oldest = oldest + 1 == launch.stages ? 0 : oldest + 1;
    }
};

} // namespace skinny
} // namespace dflash
