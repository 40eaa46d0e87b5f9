// The routing of few rows, as each block of the first product finds it for itself: the router's logits are all that it
// waits for.
#pragma once

#include "experts_route.cuh"

namespace dflash
{
namespace moe
{

constexpr int kOwnRows = 16; // at most, a bit each
constexpr int kOwnPairs = 128; // of a row and an expert

// In a block's shared memory. All of its warps call together, but for `store`.
struct OwnRoute
{
    static constexpr int kChunks = kMostExperts / 32 + 1; // of 32 experts; the last one is the shared expert's
    static_assert(kChunks <= 32);

    uint32_t members[kChunks * 32]; // of each expert the rows that chose it, a bit each
    uint32_t sums[32]; // of each chunk: pairs in the low half, groups in the high one
    int32_t group_count;
    Group groups[kOwnPairs];
    int32_t rows[kOwnPairs]; // of each place
    int16_t experts[kOwnPairs]; // of each row's choices; -1: of another rank
    int16_t first_place[kChunks * 32]; // of each expert

    // Before `find`. A row that is alone needs neither members nor sums.
    __device__ __forceinline__ void clear(dflash_moe_params const& p)
    {
#pragma unroll 1
        for (int i = threadIdx.x; p.rows > 1 && i < kChunks * 32; i += blockDim.x)
        {
            members[i] = 0;
        }
        if (threadIdx.x < 32)
        {
            sums[threadIdx.x] = 0;
        }
    }

    // Finds groups of up to `tile` rows, of whatever logits there are. What is real has its shares stored, by the first
    // block.
    //
    // beside: what the warps do that have nothing to choose where a row is alone.
    template <typename L, typename Beside>
    __device__ __forceinline__ void find(
        dflash_moe_params const& p, Route const& route, int tile, bool is_real, Beside const& beside)
    {
        int const warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int const chosen = experts_of_row(p), chunks = (own_experts(p) + 31) / 32;
        bool const is_first_block = blockIdx.x == 0, is_alone = p.rows == 1;
        if (!is_alone)
        {
            __syncthreads();
        }
        else if (warp > 0)
        {
            beside();
        }
#pragma unroll 1
        for (int row = warp; row < p.rows; row += warps)
        {
            float const shared_share = is_first_block ? shared_share_of<L>(p, row) : 0.f;
            Chosen const choice = choose_shortly<L>(p, row, is_first_block);
            int const expert = take_choice(p, route, row, choice, shared_share, is_real && is_first_block);
            if (lane < chosen)
            {
                experts[row * chosen + lane] = static_cast<int16_t>(expert);
            }
            if (is_alone)
            {
                place_alone(expert);
            }
            else if (expert >= 0)
            {
                atomicOr(&members[expert], 1u << row);
            }
        }
        __syncthreads();
        if (is_alone)
        {
            return;
        }
#pragma unroll 1
        for (int chunk = warp; chunk < chunks; chunk += warps)
        {
            uint32_t const sum = __reduce_add_sync(kAll, numbers_of(chunk * 32 + lane, tile));
            if (lane == 0)
            {
                sums[chunk] = sum;
            }
        }
        __syncthreads();
        uint32_t const up_to = scan_warp(sums[lane]);
#pragma unroll 1
        for (int chunk = warp; chunk < chunks; chunk += warps)
        {
            uint32_t const own = numbers_of(chunk * 32 + lane, tile);
            uint32_t const before = __shfl_sync(kAll, up_to, max(chunk - 1, 0)) * (chunk > 0) + scan_warp(own) - own;
            place(chunk * 32 + lane, before & 0xffff, before >> 16, tile);
        }
        if (threadIdx.x == 31)
        {
            group_count = static_cast<int32_t>(up_to >> 16);
        }
        __syncthreads();
    }

    // Stores what the kernels after this one read, by a warp; these may begin then.
    __device__ __forceinline__ void store(dflash_moe_params const& p, Route const& route) const
    {
        int const lane = threadIdx.x % 32, chosen = experts_of_row(p);
#pragma unroll 1
        for (int pair = lane; pair < p.rows * chosen; pair += 32)
        {
            int const expert = experts[pair], row = pair / chosen;
            uint32_t const before = expert < 0 ? 0 : members[expert] & ((1u << row) - 1);
            route.places[pair] = expert < 0 ? -1 : first_place[expert] + __popc(before);
            if (pair < group_count)
            {
                route.groups[pair] = groups[pair];
            }
        }
        if (lane == 0)
        {
            *route.group_count = group_count;
        }
        trigger_behind_writes();
    }

private:
    // Of an expert: its pairs, and its groups in the high half.
    __device__ __forceinline__ uint32_t numbers_of(int expert, int tile) const
    {
        uint32_t const pairs = __popc(members[expert]);
        return pairs | (pairs + tile - 1) / tile << 16;
    }

    // By a lane for each expert.
    __device__ __forceinline__ void place(int expert, int first, int first_group, int tile)
    {
        uint32_t left = members[expert];
        int const pairs = __popc(left);
        first_place[expert] = static_cast<int16_t>(first);
#pragma unroll 1
        for (int i = 0; i * tile < pairs; ++i)
        {
            groups[first_group + i] = {expert, first + i * tile, min(tile, pairs - i * tile), 0};
        }
#pragma unroll 1
        for (int at = first; left; ++at, left &= left - 1)
        {
            rows[at] = __ffs(static_cast<int>(left)) - 1;
        }
    }

    // Of a row that is alone, by its warp: groups in the order of its choices.
    __device__ __forceinline__ void place_alone(int expert)
    {
        uint32_t const is_own = __ballot_sync(kAll, expert >= 0);
        int const at = __popc(is_own & ((1u << threadIdx.x % 32) - 1));
        if (expert >= 0)
        {
            groups[at] = {expert, at, 1, 0};
            rows[at] = 0;
            first_place[expert] = static_cast<int16_t>(at);
        }
        group_count = __popc(is_own);
    }
};

// The groups of a routing and the rows of its places, in memory or in the block's shared memory.
struct Groups
{
    int32_t const* count_at;
    Group const* groups;
    int32_t const* rows;

    __device__ __forceinline__ Groups(Route const& route, OwnRoute const* own)
        : count_at(own ? &own->group_count : route.group_count)
        , groups(own ? own->groups : route.groups)
        , rows(own ? own->rows : route.rows)
    {
    }

    __device__ __forceinline__ int count() const
    {
        return load(count_at);
    }

    __device__ __forceinline__ int expert(int group) const
    {
        return load(&groups[group].expert);
    }

    // Past the L1 cache, of what lies in memory.
    static __device__ __forceinline__ int load(int32_t const* from)
    {
        int x;
        asm volatile("ld.cg.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        return x;
    }
};

} // namespace moe
} // namespace dflash
