// The routing of a mixture of experts: each row's experts and their shares, and each expert's rows in groups.
#pragma once

#include "experts_choice.cuh"
#include "launch.cuh"

namespace dflash
{
namespace moe
{

constexpr int kRouteThreads = 1024;

// Where numbers come from kernels that let others begin beside them, blocks compute everything once before they wait,
// from whatever lies there, and store nothing: their code is at hand when the numbers are. What they saw there is old:
// they read it anew, by `load_new`.
constexpr int kRehearsedRows = 16; // of the sum, at most
constexpr int kRouteRehearses = 8; // of any number of rows

// The sum of x over the lanes up to this one.
__device__ __forceinline__ uint32_t scan_warp(uint32_t x)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
    {
        uint32_t const other = __shfl_up_sync(kAll, x, step);
        x += threadIdx.x % 32 >= step ? other : 0;
    }
    return x;
}

// The sum of x over the threads before this one, and over all; each warp has a place in `sums`. All warps call
// together.
__device__ __forceinline__ uint32_t scan(uint32_t x, uint32_t* sums, uint32_t& total)
{
    static_assert(kRouteThreads == 32 * 32);
    int const warp = threadIdx.x / 32;
    uint32_t const sum = scan_warp(x);
    if (threadIdx.x % 32 == 31)
    {
        sums[warp] = sum;
    }
    __syncthreads();
    uint32_t const up_to = scan_warp(sums[threadIdx.x % 32]);
    total = __shfl_sync(kAll, up_to, 31);
    return __shfl_sync(kAll, up_to, max(warp - 1, 0)) * (warp > 0) + sum - x;
}

// The rows that chose each of this rank's experts, and each expert's first place.
struct Members
{
    static constexpr int kWords = kMostRows / 32;

    uint32_t rows[kMostExperts + 1][kWords + 1]; // a bit for each
    int32_t first_place[kMostExperts + 1];

    // Loops that stay loops, here and in what follows: a step runs them once, and their instructions come from memory,
    // too.
    __device__ __forceinline__ void clear(int experts)
    {
#pragma unroll 1
        for (int i = threadIdx.x; i < experts * (kWords + 1); i += kRouteThreads)
        {
            (&rows[0][0])[i] = 0;
        }
    }

    __device__ __forceinline__ void add(int expert, int row)
    {
        atomicOr(&rows[expert][row / 32], 1u << row % 32);
    }

    // Of so many rows in all.
    __device__ __forceinline__ int count(int expert, int all_rows) const
    {
        int sum = 0;
#pragma unroll 1
        for (int word = 0; word * 32 < all_rows; ++word)
        {
            sum += __popc(rows[expert][word]);
        }
        return sum;
    }

    // The place of a row among the pairs: an expert's rows lie in order.
    __device__ __forceinline__ int place(int expert, int row) const
    {
        int place = first_place[expert] + __popc(rows[expert][row / 32] & ((1u << row % 32) - 1));
#pragma unroll 1
        for (int word = 0; word < row / 32; ++word)
        {
            place += __popc(rows[expert][word]);
        }
        return place;
    }
};

// An expert's rows and the first of its groups: a thread's.
struct OwnGroups
{
    int rows;
    int first;
};

// Divides each expert's rows into groups, by a thread for each expert; a block that writes keeps them. Rows lie behind
// those of the experts before.
__device__ __forceinline__ OwnGroups make_groups(
    dflash_moe_params const& p, Route const& route, int tile, Members& members, uint32_t* sums, bool writes = true)
{
    int const expert = threadIdx.x;
    int const rows = expert < own_experts(p) ? members.count(expert, p.rows) : 0;
    // Pairs in the low half, groups in the high one: neither is more than the pairs.
    static_assert(kMostRows * kMostTopK < 1 << 16);
    uint32_t total = 0;
    uint32_t const before = scan(rows | (rows + tile - 1) / tile << 16, sums, total);
    int const first = before & 0xffff, first_group = before >> 16;
    if (expert < own_experts(p))
    {
        members.first_place[expert] = first;
#pragma unroll 1
        for (int i = 0; writes && i * tile < rows; ++i)
        {
            route.groups[first_group + i] = {expert, first + i * tile, min(tile, rows - i * tile), 0};
        }
    }
    if (writes && threadIdx.x == 0)
    {
        *route.group_count = total >> 16;
    }
    return {rows, first_group};
}

template <typename L>
__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(dflash_moe_params const p, Route const route, int const tile)
{
    __shared__ Members members;
    __shared__ uint32_t sums[kRouteThreads / 32];
    int const first_row = threadIdx.x / 32, lane = threadIdx.x % 32, chosen = experts_of_row(p);

    trigger();
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn)
    {
        bool const stores = turn == 1;
        int const rows = stores ? p.rows : min(p.rows, kRouteRehearses);
        members.clear(own_experts(p));
        if (stores)
        {
            wait();
        }
        __syncthreads();
        int expert = -1;
#pragma unroll 1
        for (int row = first_row; row < rows; row += kRouteThreads / 32)
        {
            expert = choose_experts<L>(p, route, row, stores);
            if (expert >= 0)
            {
                members.add(expert, row);
            }
        }
        __syncthreads();
        make_groups(p, route, tile, members, sums, stores);
        __syncthreads();
#pragma unroll 1
        for (int row = first_row; row < rows; row += kRouteThreads / 32)
        {
            int const pair = row * chosen + lane;
            if (rows > kRouteThreads / 32) // a warp has had several
            {
                expert = lane < chosen ? route.experts[pair] : -1;
            }
            if (expert >= 0)
            {
                int const place = members.place(expert, row);
                if (stores)
                {
                    route.places[pair] = place;
                    route.rows[place] = row;
                }
            }
        }
        __syncthreads();
    }
}

} // namespace moe
} // namespace dflash
