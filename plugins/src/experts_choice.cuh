// The choice of a row's experts, and their shares.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"

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

// As `Logits`, of 16-bit ones that are compared themselves. A key has the expert behind the logit: no two are equal,
// and those that were chosen are the ones that are not below the last choice.
template <typename L, int kOwn>
struct Keys
{
    static_assert(sizeof(L) == 2);
    int const lane;
    uint32_t keys[kOwn]; // 0: none
    uint32_t largest; // of a lane's that are left

    __device__ __forceinline__ Keys(L const* logits, int experts)
        : lane(threadIdx.x % 32)
    {
        uint32_t bits[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const expert = min(lane + i * 32, experts - 1); // no branches: they would be in all lanes' way
            bits[i] = load_new(reinterpret_cast<uint16_t const*>(logits) + expert);
        }
        largest = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const expert = lane + i * 32;
            keys[i] = key_of(bits[i], expert) & (expert < experts ? kAll : 0u);
            largest = max(largest, keys[i]);
        }
    }

    // Both zeros are one number.
    static __device__ __forceinline__ uint32_t key_of(uint32_t bits, int expert)
    {
        uint32_t const one_zero = bits == 0x8000u ? 0u : bits;
        uint32_t const order = one_zero ^ (0x8000u | (one_zero >> 15) * 0x7fffu);
        return order << 16 | (0xffffu - expert);
    }

    static __device__ __forceinline__ int expert_of(uint32_t key)
    {
        return 0xffff - static_cast<int>(key & 0xffffu);
    }

    static __device__ __forceinline__ float logit_of(uint32_t key)
    {
        uint32_t const order = key >> 16;
        auto const bits = static_cast<uint16_t>(order ^ (order & 0x8000u ? 0x8000u : 0xffffu));
        return to_float(reinterpret_cast<L const&>(bits));
    }

    __device__ __forceinline__ float sum_of_shares(float largest_logit) const
    {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            sum += keys[i] ? expf(logit_of(keys[i]) - largest_logit) : 0.f;
        }
        return warp_sum(sum);
    }

    // Chooses the best of those that are left.
    __device__ __forceinline__ uint32_t take_best()
    {
        uint32_t const best = __reduce_max_sync(kAll, largest);
        // Below the best are the numbers that get less than 0 without it, which as unsigned ones are the large ones.
        uint32_t below = 0u - best;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            below = __viaddmax_u32(keys[i], 0u - best, below);
        }
        largest = below + best;
        return best;
    }
};

// A lane's of the experts that a row goes through.
struct Chosen
{
    int expert; // the lane-th
    float share;
    float sum; // that shares are divided by
};

// What the share of one of all ranks' experts is multiplied by.
__device__ __forceinline__ float scale_of(dflash_moe_params const& p, int expert)
{
    return p.dtype == DFLASH_FP16 ? to_float(static_cast<__half const*>(p.expert_scale)[expert])
                                  : to_float(static_cast<__nv_bfloat16 const*>(p.expert_scale)[expert]);
}

// The experts of the largest logits, by a warp. kOwn: logits of a lane. Without shares where nobody needs them.
template <typename L, int kOwn, bool kNormalized = false>
__device__ __forceinline__ Chosen choose_largest(dflash_moe_params const& p, L const* of_row, bool has_shares)
{
    Keys<L, kOwn> logits(of_row, p.experts);
    uint32_t own = 0;
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k)
    {
        uint32_t const best = logits.take_best();
        own = logits.lane == k ? best : own;
    }
    Chosen chosen = {logits.expert_of(own), 0.f, 0.f};
    if (!has_shares)
    {
        return chosen;
    }
    float const largest = logits.logit_of(__shfl_sync(kAll, own, 0));
    chosen.share = expf(logits.logit_of(own) - largest);
    bool const is_normalized = kNormalized || p.normalized;
    chosen.sum = is_normalized ? 0.f : logits.sum_of_shares(largest);
#pragma unroll 1
    for (int k = 0; is_normalized && k < p.top_k; ++k)
    {
        chosen.sum += __shfl_sync(kAll, chosen.share, k);
    }
    return chosen;
}

// Likewise, of any logits, or of their sigmoids with what corrects these.
template <typename L, int kOwn>
__device__ __forceinline__ Chosen choose_corrected(dflash_moe_params const& p, L const* of_row)
{
    Logits<kOwn> logits(of_row, p.experts, p.correction);
    Chosen chosen = {};
    chosen.sum = p.normalized ? (p.correction ? 1e-20f : 0.f) : p.correction ? 1.f : logits.sum_of_shares();
#pragma unroll 1
    for (int k = 0; k < p.top_k; ++k)
    {
        float share;
        int const expert = logits.take_best(share);
        share = p.correction ? sigmoid(to_float(load_new(of_row + expert))) : share;
        chosen.sum += p.normalized ? share : 0.f;
        if (logits.lane == k)
        {
            chosen.expert = expert;
            chosen.share = share;
        }
    }
    return chosen;
}

template <int kOwn, typename L>
__device__ __forceinline__ Chosen choose(dflash_moe_params const& p, L const* of_row)
{
    if constexpr (sizeof(L) == 2)
    {
        if (!p.correction)
        {
            return choose_largest<L, kOwn>(p, of_row, true);
        }
    }
    return choose_corrected<L, kOwn>(p, of_row);
}

// The logits of a row.
template <typename L>
__device__ __forceinline__ L const* logits_of(dflash_moe_params const& p, int row)
{
    return static_cast<L const*>(p.logits) + static_cast<int64_t>(row) * p.logits_row_stride;
}

// What the expert gives that a row goes through whatever it chose.
template <typename L>
__device__ __forceinline__ float shared_share_of(dflash_moe_params const& p, int row)
{
    L const* const gates = static_cast<L const*>(p.shared_gate);
    return gates ? sigmoid(to_float(load_new(gates + static_cast<int64_t>(row) * p.shared_gate_row_stride))) : 1.f;
}

// Whether a row is somebody's: the others lie behind a step's rows where these are fewer than were captured.
__device__ __forceinline__ bool is_somebodys(dflash_moe_params const& p, int row)
{
    return !p.row_segment || load_new(p.row_segment + row) >= 0;
}

// The index of a lane's expert among this rank's, or -1. Stores the row's experts and shares if told.
__device__ __forceinline__ int take_choice(
    dflash_moe_params const& p, Route const& route, int row, Chosen const& own, float shared_share, bool stores)
{
    int const lane = threadIdx.x % 32, chosen = experts_of_row(p);
    int const expert = lane < p.top_k ? own.expert - p.first : p.count;
    bool const is_own = lane < chosen && expert >= 0 && (expert < p.count || lane == p.top_k) && is_somebodys(p, row);
    if (lane < chosen && stores)
    {
        float share = shared_share;
        if (lane < p.top_k)
        {
            share = own.share / own.sum * p.share_scale;
            share = p.expert_scale ? share * scale_of(p, own.expert) : share;
        }
        route.shares[row * chosen + lane] = share;
        route.experts[row * chosen + lane] = is_own ? expert : -1;
    }
    return is_own ? expert : -1;
}

// Whether `choose_shortly` can.
inline bool are_chosen_shortly(dflash_moe_params const& p)
{
    return p.logits_dtype == p.dtype && p.normalized && !p.correction;
}

// As `choose`, in code of two lengths, for kernels that have more to do.
template <typename L>
__device__ __forceinline__ Chosen choose_shortly(dflash_moe_params const& p, int row, bool has_shares)
{
    L const* const of_row = logits_of<L>(p, row);
    return p.experts <= 128 ? choose_largest<L, 4, true>(p, of_row, has_shares)
                            : choose_largest<L, kMostExperts / 32, true>(p, of_row, has_shares);
}

// Chooses a row's experts, by a warp, and stores them if told: the index of a lane's among this rank's, or -1.
template <typename L>
__device__ __forceinline__ int choose_experts(
    dflash_moe_params const& p, Route const& route, int row, bool stores = true)
{
    L const* const of_row = logits_of<L>(p, row);
    float const shared_share = shared_share_of<L>(p, row);
    Chosen const own = p.experts <= 32 ? choose<1>(p, of_row)
        : p.experts <= 128             ? choose<4>(p, of_row)
        : p.experts <= 256             ? choose<8>(p, of_row)
        : p.experts <= 384             ? choose<12>(p, of_row)
                                       : choose<kMostExperts / 32>(p, of_row);
    return take_choice(p, route, row, own, shared_share, stores);
}

} // namespace moe
} // namespace dflash
