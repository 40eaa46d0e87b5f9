// Choosing tokens: argmax over the vocabulary, and acceptance.
#include "cluster.cuh"
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"
#include "ranked.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 512;

// The best of a thread's share of a row: every kCluster-th run of vectors is a block's.
template <typename T, int kVector>
__device__ __forceinline__ uint64_t best_of_share(T const* logits, int size)
{
    uint64_t best = ranked(-INFINITY, 0); // what a row of nothing but NaN gives: id 0
    int const step = kCluster * kThreads * kVector;
#pragma unroll 4
    for (int first = (blockIdx.x * kThreads + threadIdx.x) * kVector; first < size; first += step)
    {
        auto const x = load_vector<T, kVector>(logits + first);
        float value = -INFINITY;
        int id = first;
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            float const each = to_float(x.at[i]);
            id = each > value ? first + i : id;
            value = each > value ? each : value;
        }
        best = max(best, ranked(value, id));
    }
    return best;
}

// A cluster a row. The first block compares the blocks' winners, which it reads from the others' shared memory. No
// scratch, no counter, one launch.
template <typename T, int kVector>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads) argmax_kernel(dflash_argmax_params const p)
{
    begin();
    int64_t const row = blockIdx.y;
    constexpr int kShapedVector = kVector > 1 ? 16 / sizeof(float) : 1;
    uint64_t best = p.is_shaped && p.is_shaped[row]
        ? best_of_share<float, kShapedVector>(p.shaped + row * p.size, p.size)
        : best_of_share<T, kVector>(static_cast<T const*>(p.logits) + row * p.row_stride, p.size);

    __shared__ uint64_t winners[kThreads / 32];
    __shared__ uint64_t winner;
    best = warp_best(best);
    if (threadIdx.x % 32 == 0)
    {
        winners[threadIdx.x / 32] = best;
    }
    __syncthreads();
    if (threadIdx.x < 32)
    {
        best = warp_best(threadIdx.x < kThreads / 32 ? winners[threadIdx.x] : 0);
        if (threadIdx.x == 0)
        {
            winner = best;
        }
    }
    meet_cluster();
    if (blockIdx.x == 0 && threadIdx.x < 32)
    {
        best = warp_best(threadIdx.x < kCluster ? *of_block(&winner, threadIdx.x) : 0);
        if (threadIdx.x == 0)
        {
            p.ids[row] = static_cast<int32_t>(~static_cast<uint32_t>(best));
            if (p.best)
            {
                p.best[row] = value_of(best);
            }
        }
    }
    meet_cluster(); // no block may leave while its shared memory is read
}

template <typename T>
cudaError_t launch_argmax(dflash_argmax_params const& p, cudaStream_t stream)
{
    constexpr int kVector = 16 / sizeof(T);
    dim3 const grid(kCluster, p.rows);
    bool const is_aligned
        = p.size % kVector == 0 && p.row_stride % kVector == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
    return launch_kernel(is_aligned ? argmax_kernel<T, kVector> : argmax_kernel<T, 1>, grid, kThreads, 0, stream, p);
}

// Counts the first of so many that are equal. is_equal(i) is asked by one lane each, and called by all of a warp.
template <typename IsEqual>
__device__ __forceinline__ int count_equal(int count, IsEqual is_equal)
{
    for (int first = 0;; first += 32)
    {
        int const i = first + threadIdx.x % 32;
        unsigned const misses = ~__ballot_sync(0xffffffffu, i < count && is_equal(i));
        if (misses)
        {
            return first + __ffs(misses) - 1;
        }
    }
}

// One warp a segment.
__global__ void accept_kernel(dflash_accept_params const p)
{
    begin();
    int const index = blockIdx.x;
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
    int const logits = p.logit_first[index + 1] - p.logit_first[index];
    int32_t const* targets = p.target_ids + p.logit_first[index];
    int const first = segment.w - logits; // of the segment's rows, the first that has a logit
    int32_t const* drafts = p.token_ids + segment.z + first + 1;
    int const accepted = count_equal(logits - 1, [&](int i) { return drafts[i] == targets[i]; });
    if (threadIdx.x == 0)
    {
        bool const is_idle = segment.w <= 0 || logits <= 0;
        int const committed = is_idle ? 0 : first + accepted + 1;
        p.accepted[index] = is_idle ? 0 : accepted;
        p.committed[index] = committed;
        p.bonus[index] = is_idle ? 0 : targets[accepted];
        p.next_start[index] = is_idle ? 0 : segment.y + committed;
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_argmax(dflash_argmax_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < 1 || p->rows > 65535)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_argmax<__half>(*p, stream);
    case DFLASH_BF16: return launch_argmax<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_argmax<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t dflash_accept(dflash_accept_params const* p, cudaStream_t stream)
{
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    return dflash::launch_kernel(dflash::accept_kernel, dim3(p->segment_count), 32, 0, stream, *p);
}
