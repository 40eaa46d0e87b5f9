// Log-probabilities of a row's token, and of its likeliest tokens.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"
#include "ranked.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostTop = 32;
constexpr int kMostCandidates = 1024;

// What a block, which has a row, shares.
struct Shared
{
    uint64_t best[kThreads]; // each thread's largest logit
    uint64_t candidates[kMostCandidates];
    uint64_t warps[kWarps];
    uint64_t bound;
    float sums[kWarps];
    int count; // of candidates; more than there is place for are counted too
};

// A row's logits, read by all threads of the block: each has every kThreads-th vector.
template <typename T, int kVector>
struct Row
{
    T const* logits;
    int size;

    template <typename Function>
    __device__ __forceinline__ void each(Function function) const
    {
#pragma unroll 4
        for (int first = threadIdx.x * kVector; first < size; first += kThreads * kVector)
        {
            auto const x = load_vector<T, kVector>(logits + first);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                function(to_float(x.at[i]), first + i);
            }
        }
    }
};

// The number of keys that are larger than one.
__device__ __forceinline__ int rank_of(uint64_t key, uint64_t const* keys, int count)
{
    int larger = 0;
    for (int i = 0; i < count; ++i)
    {
        larger += keys[i] > key;
    }
    return larger;
}

// The largest of all threads' keys.
__device__ __forceinline__ uint64_t block_best(uint64_t key, Shared& shared)
{
    key = warp_best(key);
    if (threadIdx.x % 32 == 0)
    {
        shared.warps[threadIdx.x / 32] = key;
    }
    __syncthreads();
    key = warp_best(threadIdx.x % 32 < kWarps ? shared.warps[threadIdx.x % 32] : 0);
    __syncthreads();
    return key;
}

// Finds a bound that at least `top` logits of the row reach, and few more: the top-th largest of the threads' best
// ones. Returns the largest logit.
template <typename T, int kVector>
__device__ __forceinline__ float find_bound(Row<T, kVector> row, int top, Shared& shared)
{
    uint64_t best = 0; // below every logit's
    row.each([&](float x, int id) { best = max(best, ranked(x, id)); });
    shared.best[threadIdx.x] = best;
    if (threadIdx.x == 0)
    {
        shared.bound = 0;
        shared.count = 0;
    }
    __syncthreads();
    // Threads without a logit, of small vocabularies, are equals: then the bound stays below all.
    if (best > 0 && rank_of(best, shared.best, kThreads) == top - 1)
    {
        shared.bound = best;
    }
    return value_of(block_best(best, shared));
}

// Writes the likeliest tokens out of candidates, of which there are at least `top`.
__device__ __forceinline__ void write_top(dflash_log_probabilities_params const& p, float log_sum, Shared& shared)
{
    int64_t const first = int64_t{blockIdx.x} * p.top_count;
    for (int i = threadIdx.x; i < shared.count; i += kThreads)
    {
        uint64_t const key = shared.candidates[i];
        int const rank = rank_of(key, shared.candidates, shared.count);
        if (rank < p.top_count)
        {
            p.top_ids[first + rank] = static_cast<int32_t>(~static_cast<uint32_t>(key));
            p.top[first + rank] = value_of(key) - log_sum;
        }
    }
}

// Likewise by looking at the whole row once for each: where too many are equal to be candidates.
template <typename T, int kVector>
__device__ __forceinline__ void write_top_slowly(
    dflash_log_probabilities_params const& p, Row<T, kVector> row, float log_sum, Shared& shared)
{
    uint64_t last = ~uint64_t{0};
    for (int rank = 0; rank < p.top_count; ++rank)
    {
        uint64_t best = 0;
        row.each(
            [&](float x, int id)
            {
                uint64_t const key = ranked(x, id);
                best = key < last && key > best ? key : best;
            });
        last = block_best(best, shared);
        if (threadIdx.x == 0)
        {
            p.top_ids[int64_t{blockIdx.x} * p.top_count + rank] = static_cast<int32_t>(~static_cast<uint32_t>(last));
            p.top[int64_t{blockIdx.x} * p.top_count + rank] = value_of(last) - log_sum;
        }
    }
}

// A block a row, which it reads twice: the second time from the cache.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) log_probabilities_kernel(dflash_log_probabilities_params const p)
{
    begin();
    if (p.wanted && !*p.wanted)
    {
        return;
    }
    __shared__ Shared shared;
    Row<T, kVector> const row{static_cast<T const*>(p.logits) + int64_t{blockIdx.x} * p.size, p.size};
    float const largest = find_bound(row, p.top_count, shared);
    uint64_t const bound = shared.bound;
    float sum = 0;
    row.each(
        [&](float x, int id)
        {
            sum += expf(x - largest);
            uint64_t const key = ranked(x, id);
            if (key >= bound)
            {
                int const place = atomicAdd(&shared.count, 1);
                if (place < kMostCandidates)
                {
                    shared.candidates[place] = key;
                }
            }
        });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
    {
        shared.sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < kWarps ? shared.sums[threadIdx.x % 32] : 0);
    float const log_sum = largest + logf(sum);
    if (threadIdx.x == 0)
    {
        p.chosen[blockIdx.x] = to_float(row.logits[p.ids[blockIdx.x]]) - log_sum;
    }
    if (shared.count <= kMostCandidates)
    {
        write_top(p, log_sum, shared);
    }
    else
    {
        write_top_slowly(p, row, log_sum, shared);
    }
}

template <typename T>
cudaError_t launch_log_probabilities(dflash_log_probabilities_params const& p, cudaStream_t stream)
{
    constexpr int kVector = 16 / sizeof(T);
    bool const is_aligned = p.size % kVector == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
    auto* const kernel = is_aligned ? log_probabilities_kernel<T, kVector> : log_probabilities_kernel<T, 1>;
    return launch_kernel(kernel, dim3(p.rows), kThreads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_log_probabilities(dflash_log_probabilities_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < 1 || p->rows < 0 || p->top_count < 1 || p->top_count > kMostTop || p->top_count > p->size)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_log_probabilities<__half>(*p, stream);
    case DFLASH_BF16: return launch_log_probabilities<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_log_probabilities<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
