// Joins what warps, blocks and clusters have of one row's attention.
#pragma once

#include "attention_softmax.cuh"
#include "instructions.cuh"
#include "row_attention_inputs_sm90.cuh"

namespace dflash
{
namespace row
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A head's softmax over several sources of keys, and some numbers of its output.
template <int kCount>
struct Joined
{
    float maximum;
    float total = 0.f;
    float results[kCount] = {};

    __device__ __forceinline__ float weigh(float top, float sum)
    {
        float const weight = top == -INFINITY ? 0.f : FlushingExp2::of(top - maximum);
        total = fmaf(sum, weight, total);
        return weight;
    }
};

// Joins what the block's warps have, and sends it to the blocks of the cluster: to each the dimensions that it joins,
// and all sums.
template <typename T, int D, int kCluster>
__device__ __forceinline__ void send_all(int rank, bool is_real, Shared<T, D>& shared)
{
    using S = Shape<T, D>;
    int const head = threadIdx.x / S::kLanes;
    int const lane = threadIdx.x % S::kLanes;
    constexpr int kShareLog = kLog<D / kCluster>; // of dimensions
    int const dim = lane * S::kDims;
    int const owner = dim >> kShareLog;
    Joined<S::kDims> joined;
    joined.maximum = -INFINITY;
    float2 sums[kWarps];
#pragma unroll
    for (int n = 0; n < kWarps; ++n)
    {
        sums[n] = shared.warp_sums[n][head];
        joined.maximum = fmaxf(joined.maximum, sums[n].x);
    }
#pragma unroll
    for (int n = 0; n < kWarps; ++n)
    {
        float const weight = joined.weigh(sums[n].x, sums[n].y);
        auto const* const box = reinterpret_cast<float const*>(shared.tiles[n]) + head * S::kBoxRow + dim;
#pragma unroll
        for (int i = 0; i < S::kDims; i += 4)
        {
            float4 const x = *reinterpret_cast<float4 const*>(box + i);
            joined.results[i] = fmaf(x.x, weight, joined.results[i]);
            joined.results[i + 1] = fmaf(x.y, weight, joined.results[i + 1]);
            joined.results[i + 2] = fmaf(x.z, weight, joined.results[i + 2]);
            joined.results[i + 3] = fmaf(x.w, weight, joined.results[i + 3]);
        }
    }
    uint32_t const barrier = shared_address(&shared.joined);
    uint32_t const there = address_at(barrier, owner);
    int const at = ((rank * kHeads + head) << kShareLog) + dim - (owner << kShareLog);
    uint32_t const to = address_at(shared_address(shared.results) + at * 4, owner);
#pragma unroll
    for (int i = 0; i < S::kDims; i += 4)
    {
        float const four[4] = {joined.results[i], joined.results[i + 1], joined.results[i + 2], joined.results[i + 3]};
        if (is_real)
        {
            send(to + i * 4, four, there);
        }
    }
    if (lane < kCluster && is_real)
    {
        float const both[2] = {joined.maximum, joined.total};
        send(address_at(shared_address(&shared.sums[rank][head]), lane), both, address_at(barrier, lane));
    }
}

// Joins what all blocks of the cluster sent, of the block's dimensions, and the row's own key; writes the output, or
// where other clusters have parts a part. A rehearsal writes nothing.
template <typename T, int D, int kCluster>
__device__ __forceinline__ void join(dflash_attention_params const& p, RowWork const& w, Part const& part, int group,
    int cluster, int rank, bool is_real, Shared<T, D> const& shared)
{
    using S = Shape<T, D>;
    constexpr int kShareLog = kLog<D / kCluster>;
    bool const is_all = part.count == 1;
    bool const has_own = part.nth == 0;
    auto const* const results = reinterpret_cast<float const*>(shared.results);
    T* const out = static_cast<T*>(p.out) + int64_t{part.row * p.heads + part.head * group} * D + (rank << kShareLog);
#pragma unroll 1
    for (int i = threadIdx.x; i < group << kShareLog; i += kThreads)
    {
        int const head = i >> kShareLog;
        int const of_block = i - (head << kShareLog); // dimension
        float const own = has_own ? shared.own[head] : -INFINITY;
        float const sink = is_all ? shared.sinks[head] : -INFINITY;
        float2 const* const sums_of = &shared.sums[0][head];
        float const* const results_of = results + i;
        Joined<1> joined;
        joined.maximum = fmaxf(own, sink);
#pragma unroll
        for (int n = 0; n < kCluster; ++n)
        {
            joined.maximum = fmaxf(joined.maximum, sums_of[n * kHeads].x);
        }
        joined.weigh(sink, 1.f);
        T const value
            = reinterpret_cast<T const*>(shared.rows)[(kHeads + 1) * S::kRow + (rank << kShareLog) + of_block];
        float result = joined.weigh(own, 1.f) * to_float(value);
#pragma unroll
        for (int n = 0; n < kCluster; ++n)
        {
            float2 const sums = sums_of[n * kHeads];
            float const weight = joined.weigh(sums.x, sums.y);
            result = fmaf(results_of[n * kHeads << kShareLog], weight, result);
        }
        if (!is_real)
        {
            continue;
        }
        if (is_all)
        {
            out[head * D + of_block] = from_float<T>(__fdividef(result, joined.total));
            continue;
        }
        w.partial_out[(int64_t{cluster} * kHeads + head) * D + (rank << kShareLog) + of_block] = result;
        if (of_block == 0)
        {
            w.partial_sums[(cluster * kCluster + rank) * kHeads + head] = {joined.maximum, joined.total};
        }
    }
}

// Joins the parts of all clusters, of the block's dimensions: by the block that comes last.
template <typename T, int D, int kCluster>
__device__ __forceinline__ void join_parts(
    dflash_attention_params const& p, RowWork const& w, Part const& part, int cluster, int rank, Shared<T, D>& shared)
{
    __threadfence();
    __syncthreads();
    uint32_t* const arrivals = w.arrivals + (part.index * p.kv_heads + part.head) * kMostCluster + rank;
    if (threadIdx.x == 0)
    {
        shared.is_last = atomicAdd(arrivals, 1) + 1 == static_cast<uint32_t>(part.count);
        __threadfence();
    }
    __syncthreads();
    if (!shared.is_last)
    {
        return;
    }
    if (threadIdx.x == 0)
    {
        *arrivals = 0;
    }
    int const group = w.group;
    constexpr int kShareLog = kLog<D / kCluster>;
    int const first = cluster - part.nth;
#pragma unroll 1
    for (int i = threadIdx.x; i < group << kShareLog; i += kThreads)
    {
        int const head = i >> kShareLog;
        int const dim = (rank << kShareLog) + i - (head << kShareLog);
        float2 const* const sums_of = w.partial_sums + (first * kCluster + rank) * kHeads + head;
        Joined<1> joined;
        float const sink = p.sinks ? sink_of(p, part.head * group + head) : -INFINITY;
        joined.maximum = sink;
#pragma unroll 4
        for (int n = 0; n < part.count; ++n)
        {
            joined.maximum = fmaxf(joined.maximum, __ldcg(sums_of + n * kCluster * kHeads).x);
        }
        joined.weigh(sink, 1.f);
        float result = 0.f;
#pragma unroll 4
        for (int n = 0; n < part.count; ++n)
        {
            float2 const sums = __ldcg(sums_of + n * kCluster * kHeads);
            float const weight = joined.weigh(sums.x, sums.y);
            result = fmaf(__ldcg(w.partial_out + (int64_t{first + n} * kHeads + head) * D + dim), weight, result);
        }
        T* const to = static_cast<T*>(p.out) + (int64_t{part.row} * p.heads + part.head * group + head) * D + dim;
        *to = from_float<T>(__fdividef(result, joined.total));
    }
}

#endif

} // namespace row
} // namespace dflash
