// The likeliest tokens of the vocabulary, and the sum of all their exponentials.
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

// Joins sums of exponentials, each relative to a number of its own: the largest of these, and all relative to it. By
// all lanes of a warp.
__device__ __forceinline__ float2 join_sums(float2 part)
{
    float top = part.x;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    }
    float sum = part.y > 0.f ? part.y * __expf(part.x - top) : 0.f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    return {top, sum};
}

// A thread's share of a row, of which so many blocks have a part: the vectors that are so many apart, from its own
// first on. NaN counts as -inf.
template <typename T, int kVector, int kBlocks>
struct RowShare
{
    T const* logits;
    int size;

    // Calls visit(numbers, id of the first) for each vector.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const
    {
        constexpr int kStep = kBlocks * kThreads * kVector;
#pragma unroll 4
        for (int at = (blockIdx.x * kThreads + threadIdx.x) * kVector; at < size; at += kStep)
        {
            auto const vector = load_vector<T, kVector>(logits + at);
            float x[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                x[i] = fmaxf(to_float(vector.at[i]), -INFINITY);
            }
            visit(x, at);
        }
    }

    // The best of those that are ranked below a bound; 0: there is none.
    __device__ uint64_t best_below(uint64_t bound) const
    {
        uint64_t best = 0;
        each(
            [&](float const(&x)[kVector], int first)
            {
#pragma unroll
                for (int i = 0; i < kVector; ++i)
                {
                    uint64_t const key = ranked(x[i], first + i);
                    best = key < bound ? max(best, key) : best;
                }
            });
        return best;
    }
};

// Takes the best of what the lanes hold, so many times, best first: lane n returns the nth. next(key) is what a lane
// holds after the key that it gave. By all lanes of a warp.
template <typename Next>
__device__ __forceinline__ uint64_t take_best(uint64_t held, Next next)
{
    uint64_t taken = 0;
    for (int n = 0; n < DFLASH_TOP_COUNT; ++n)
    {
        uint64_t const best = warp_best(held);
        taken = threadIdx.x % 32 == n ? best : taken;
        held = held == best && best ? next(best) : held;
    }
    return taken;
}

// What a block finds of its part of a row.
struct TopOfBlock
{
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kMost = 512; // keys that are looked through at once

    float maxima[kWarps];
    float sums[kWarps]; // of exponentials relative to the largest maximum
    int count;
    alignas(16) uint64_t keys[kMost]; // no two the same but zeros, as for the next
    alignas(16) uint64_t best[DFLASH_TOP_COUNT]; // in their order
    float2 sum; // what it is relative to, sum

    // A thread's share of it before anything is found. By all threads of the block.
    __device__ __forceinline__ void clear()
    {
        static_assert(kMost == kThreads);
        keys[threadIdx.x] = 0;
        if (threadIdx.x < DFLASH_TOP_COUNT)
        {
            best[threadIdx.x] = 0;
        }
        if (threadIdx.x == 0)
        {
            count = 0;
        }
    }

    // Keeps those of a vector that reach a bound, from a place on, as far as there is room.
    template <int kVector>
    __device__ __forceinline__ void keep(float const (&x)[kVector], int first, float bound, int at)
    {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            bool const is_kept = x[i] >= bound;
            if (is_kept && at < kMost)
            {
                keys[at] = ranked(x[i], first + i);
            }
            at += is_kept ? 1 : 0;
        }
    }

    // Puts the best of so many keys in their places: each counts those before it. By all threads of the block.
    __device__ __forceinline__ void take_best(int of_keys)
    {
        int const own = threadIdx.x;
        if (own < of_keys && keys[own])
        {
            uint64_t const key = keys[own];
            int const place = count_larger(keys, of_keys, key);
            if (place < DFLASH_TOP_COUNT)
            {
                best[place] = key;
            }
        }
    }

    // A number which as many of the block's reach as are asked for, and few more: of its warps' maxima that one. By all
    // lanes of a warp.
    __device__ __forceinline__ float bound() const
    {
        int const lane = threadIdx.x % 32;
        float const own = lane < kWarps ? maxima[lane] : -INFINITY;
        int better = 0;
        for (int i = 0; i < kWarps; ++i)
        {
            better += maxima[i] > own || (maxima[i] == own && i < lane) ? 1 : 0;
        }
        unsigned const who = __ballot_sync(0xffffffffu, better == DFLASH_TOP_COUNT - 1);
        return __shfl_sync(0xffffffffu, own, __ffs(who) - 1);
    }

    __device__ __forceinline__ float largest() const
    {
        float top = maxima[0];
        for (int i = 1; i < kWarps; ++i)
        {
            top = fmaxf(top, maxima[i]);
        }
        return top;
    }
};

// A cluster a row, as for argmax, or one block. A block looks twice: for its warps' maxima, then for the few numbers
// that reach the eighth of those, each of which counts those before it. Where more do than are kept, for many are
// equal, each warp takes its best one by one. The first block takes the best of all blocks'.
template <typename T, int kVector, int kBlocks>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    top_ids_kernel(dflash_top_ids_params const p)
{
    constexpr int kCount = DFLASH_TOP_COUNT;
    constexpr int kFound = kBlocks * kCount;
    __shared__ TopOfBlock found;
    __shared__ alignas(16) uint64_t of_blocks[kFound]; // in the first block
    trigger();
    found.clear();
    wait();
    int64_t const row = blockIdx.y;
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    RowShare<T, kVector, kBlocks> const share{static_cast<T const*>(p.logits) + row * p.row_stride, p.size};

    float top = -INFINITY;
    share.each(
        [&](float const(&x)[kVector], int)
        {
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                top = fmaxf(top, x[i]);
            }
        });
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    }
    if (lane == 0)
    {
        found.maxima[warp] = top;
    }
    __syncthreads();
    float const bound = found.bound();
    top = found.largest();
    float const base = top == -INFINITY ? 0.f : top;
    float sum = 0.f;
    share.each(
        [&](float const(&x)[kVector], int first)
        {
            int reach = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                sum += __expf(x[i] - base);
                reach += x[i] >= bound ? 1 : 0;
            }
            if (reach)
            {
                found.keep(x, first, bound, atomicAdd(&found.count, reach));
            }
        });
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (lane == 0)
    {
        found.sums[warp] = sum;
    }
    __syncthreads();
    int count = found.count;
    if (count > TopOfBlock::kMost)
    {
        __syncthreads(); // all know the count
        uint64_t const taken
            = take_best(share.best_below(~uint64_t{0}), [&](uint64_t below) { return share.best_below(below); });
        if (lane < kCount)
        {
            found.keys[warp * kCount + lane] = taken;
        }
        count = TopOfBlock::kWarps * kCount;
        __syncthreads();
    }
    found.take_best(count);
    if (warp == TopOfBlock::kWarps - 1) // whose threads mostly have no key
    {
        sum = lane < TopOfBlock::kWarps ? found.sums[lane] : 0.f;
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
        {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (lane == 0)
        {
            found.sum = {top, sum};
        }
    }
    meet_blocks<kBlocks>();
    if (blockIdx.x == 0)
    {
        int const nth = threadIdx.x;
        if constexpr (kBlocks > 1)
        {
            if (nth < kFound)
            {
                of_blocks[nth] = of_block(&found, nth / kCount)->best[nth % kCount];
            }
            __syncthreads();
        }
        if (warp * 32 < kFound)
        {
            float2 const all = kBlocks == 1
                ? found.sum
                : join_sums(lane < kBlocks ? of_block(&found, lane)->sum : float2{-INFINITY, 0.f});
            float const total = all.x + logf(all.y);
            uint64_t const key = nth < kFound ? (kBlocks == 1 ? found.best : of_blocks)[nth] : 0;
            int const place = kBlocks == 1 ? nth : count_larger(of_blocks, kFound, key);
            if (place < kCount)
            {
                p.ids[row * kCount + place] = static_cast<int32_t>(~static_cast<uint32_t>(key));
                p.best[row * kCount + place] = value_of(key) - (p.normalized ? total : 0.f);
            }
            if (nth == 0)
            {
                p.total[row] = total;
            }
        }
    }
    meet_blocks<kBlocks>(); // no block may leave while its shared memory is read
}

// Of so many numbers a block, more than seven warps have some: else their maxima bound nothing.
template <int kVector>
constexpr int kFewestOfBlock = DFLASH_TOP_COUNT * 32 * kVector;

template <typename T, int kVector>
cudaError_t launch_top_ids_by(dflash_top_ids_params const& p, cudaStream_t stream)
{
    if (p.size < kCluster * kFewestOfBlock<kVector>)
    {
        return launch_kernel(top_ids_kernel<T, kVector, 1>, dim3(1, p.rows), kThreads, 0, stream, p);
    }
    return launch_kernel(top_ids_kernel<T, kVector, kCluster>, dim3(kCluster, p.rows), kThreads, 0, stream, p);
}

template <typename T>
cudaError_t launch_top_ids(dflash_top_ids_params const& p, cudaStream_t stream)
{
    constexpr int kVector = 16 / sizeof(T);
    bool const is_aligned
        = p.size % kVector == 0 && p.row_stride % kVector == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
    return is_aligned && p.size >= kFewestOfBlock<kVector> ? launch_top_ids_by<T, kVector>(p, stream)
                                                           : launch_top_ids_by<T, 1>(p, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_top_ids(dflash_top_ids_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < DFLASH_TOP_COUNT || p->rows > 65535)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_top_ids<__half>(*p, stream);
    case DFLASH_BF16: return launch_top_ids<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_top_ids<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
