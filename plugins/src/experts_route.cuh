// The routing of a mixture of experts: each row's experts and their shares, and each expert's rows in groups.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace moe
{

constexpr int kMostRows = DFLASH_MOE_MOST_ROWS;
constexpr int kMostExperts = 512;
constexpr int kMostTopK = 32; // a lane each
constexpr unsigned kAll = 0xffffffffu;

// Experts that a row goes through, and experts that this rank has, with the one that all rows go through.
__host__ __device__ inline int experts_of_row(dflash_moe_params const& p)
{
    return p.top_k + p.has_shared;
}

__host__ __device__ inline int own_experts(dflash_moe_params const& p)
{
    return p.count + p.has_shared;
}

// Rows that chose one expert: places first..first + tokens - 1 of the pairs of row and expert, sorted by expert.
struct Group
{
    int32_t expert; // of this rank's
    int32_t first;
    int32_t tokens;
    int32_t unused;
};

// The routing's results, read by the kernels after it.
struct Route
{
    int32_t* group_count;
    Group* groups;
    int32_t* rows; // [pairs] of each place
    int32_t* experts; // [N, experts_of_row], of this rank's; -1: of another rank. It may be `places`
    int32_t* places; // likewise; -1: an expert of another rank
    float* shares; // likewise
};

constexpr int kRouteThreads = 1024;

// Of so few rows, whose numbers come from kernels that let others begin beside them, blocks compute everything once
// before they wait, from whatever lies there, and store nothing: their code is at hand when the numbers are. What they
// saw there is old: they read it anew, by `load_new`.
constexpr int kRehearsedRows = 16;

// Floats as integers of the same order. Both zeros are one number.
__device__ __forceinline__ uint32_t ordered(float x)
{
    uint32_t const bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t x)
{
    return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x);
}

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

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.f / (1.f + expf(-x));
}

// Finds the largest of a row's logits, or of its corrected scores, one after the other. They are spread over a warp,
// whose lanes call together.
//
// kOwn: of a lane.
template <int kOwn>
struct Logits
{
    int const lane;
    uint32_t keys[kOwn]; // the logits, ordered; 0: chosen already, or none
    float largest = -INFINITY;

    // correction: of sigmoids; null: logits are compared themselves.
    template <typename L>
    __device__ __forceinline__ Logits(L const* logits, int experts, float const* correction)
        : lane(threadIdx.x % 32)
    {
        float scores[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const expert = lane + i * 32;
            scores[i] = expert < experts ? to_float(load_new(logits + expert)) : -INFINITY;
        }
        if (correction)
        {
            correct(scores, experts, correction);
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            keys[i] = lane + i * 32 < experts ? ordered(scores[i]) : 0;
            largest = fmaxf(largest, scores[i]);
        }
        largest = warp_max(largest);
    }

    // Makes sigmoids of logits and adds what corrects them: a loop, in which each goes to the end of the others.
    __device__ __forceinline__ void correct(float (&scores)[kOwn], int experts, float const* correction) const
    {
        float added[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            added[i] = lane + i * 32 < experts ? correction[lane + i * 32] : 0.f;
        }
#pragma unroll 1
        for (int turn = 0; turn < kOwn; ++turn)
        {
            float const score = sigmoid(scores[0]) + added[0];
#pragma unroll
            for (int i = 0; i + 1 < kOwn; ++i)
            {
                scores[i] = scores[i + 1];
                added[i] = added[i + 1];
            }
            scores[kOwn - 1] = lane + turn * 32 < experts ? score : -INFINITY;
        }
    }

    // An expert's part of the softmax, not yet divided by the sum.
    __device__ __forceinline__ float share(uint32_t key) const
    {
        return expf(from_ordered(key) - largest);
    }

    __device__ __forceinline__ float sum_of_shares() const
    {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            sum += keys[i] ? share(keys[i]) : 0.f;
        }
        return warp_sum(sum);
    }

    // Takes the expert of the largest logit, of equals the lowest, away from those that may still be chosen.
    __device__ __forceinline__ int take_best(float& its_share)
    {
        uint32_t best = keys[0];
#pragma unroll
        for (int i = 1; i < kOwn; ++i)
        {
            best = max(best, keys[i]);
        }
        best = __reduce_max_sync(kAll, best);
        unsigned expert = kOwn * 32 - 1;
#pragma unroll
        for (int i = kOwn - 1; i >= 0; --i)
        {
            expert = keys[i] == best ? lane + i * 32 : expert;
        }
        expert = __reduce_min_sync(kAll, expert);
        its_share = share(best);
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            keys[i] = lane + i * 32 == static_cast<int>(expert) ? 0 : keys[i];
        }
        return static_cast<int>(expert);
    }
};

// What the share of one of all ranks' experts is multiplied by.
__device__ __forceinline__ float scale_of(dflash_moe_params const& p, int expert)
{
    return p.dtype == DFLASH_FP16 ? to_float(static_cast<__half const*>(p.expert_scale)[expert])
                                  : to_float(static_cast<__nv_bfloat16 const*>(p.expert_scale)[expert]);
}

// Chooses a row's experts, by a warp, and stores them if told: the index of a lane's among this rank's, or -1. kOwn:
// logits of a lane.
template <typename L, int kOwn>
__device__ __forceinline__ int choose_experts(dflash_moe_params const& p, Route const& route, int row, bool stores)
{
    L const* const of_row = static_cast<L const*>(p.logits) + static_cast<int64_t>(row) * p.logits_row_stride;
    L const* const gates = static_cast<L const*>(p.shared_gate);
    float const shared_share
        = gates ? sigmoid(to_float(load_new(gates + static_cast<int64_t>(row) * p.shared_gate_row_stride))) : 1.f;
    Logits<kOwn> logits(of_row, p.experts, p.correction);
    // That shares are divided by.
    float sum = p.normalized ? (p.correction ? 1e-20f : 0.f) : p.correction ? 1.f : logits.sum_of_shares();
    int const lane = threadIdx.x % 32;
    int own_expert = 0; // the lane-th of those chosen
    float own_share = 0.f;
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k)
    {
        float share;
        int const expert = logits.take_best(share);
        share = p.correction ? sigmoid(to_float(load_new(of_row + expert))) : share;
        sum += p.normalized ? share : 0.f;
        if (lane == k)
        {
            own_expert = expert;
            own_share = share;
        }
    }
    int const chosen = experts_of_row(p), expert = lane < p.top_k ? own_expert - p.first : p.count;
    bool const is_own = lane < chosen && expert >= 0 && (expert < p.count || lane == p.top_k);
    if (lane < chosen && stores)
    {
        float share = shared_share;
        if (lane < p.top_k)
        {
            share = own_share / sum * p.share_scale;
            share = p.expert_scale ? share * scale_of(p, own_expert) : share;
        }
        route.shares[row * chosen + lane] = share;
        route.experts[row * chosen + lane] = is_own ? expert : -1;
    }
    return is_own ? expert : -1;
}

template <typename L>
__device__ __forceinline__ int choose_experts(
    dflash_moe_params const& p, Route const& route, int row, bool stores = true)
{
    return p.experts <= 32 ? choose_experts<L, 1>(p, route, row, stores)
        : p.experts <= 128 ? choose_experts<L, 4>(p, route, row, stores)
        : p.experts <= 256 ? choose_experts<L, 8>(p, route, row, stores)
        : p.experts <= 384 ? choose_experts<L, 12>(p, route, row, stores)
                           : choose_experts<L, kMostExperts / 32>(p, route, row, stores);
}

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
    for (int turn = p.rows <= kRehearsedRows ? 0 : 1; turn < 2; ++turn)
    {
        bool const stores = turn == 1;
        members.clear(own_experts(p));
        if (stores)
        {
            wait();
        }
        __syncthreads();
        int expert = -1;
#pragma unroll 1
        for (int row = first_row; row < p.rows; row += kRouteThreads / 32)
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
        for (int row = first_row; row < p.rows; row += kRouteThreads / 32)
        {
            int const pair = row * chosen + lane;
            if (p.rows > kRouteThreads / 32) // a warp has had several
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
