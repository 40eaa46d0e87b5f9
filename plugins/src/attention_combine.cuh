// Combines attention's partial results, where a (slot, head) was divided among blocks.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_exact_work.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "launch.cuh"

#include <algorithm>
#include <type_traits>

namespace dflash
{

// Of exact cuts: a (slot, head)'s tails, and its cuts. By all lanes of a warp.
__device__ __forceinline__ Divided divided_exactly(Work const& w)
{
    Segments const segments(w.p);
    ExactDivision const division(w, segments);
    int const owner = blockIdx.x;
    int const index = Quotient(w.p.kv_heads).down(owner);
    Segment const segment = segments.of(index);
    if (division.of(w.p, segment) < 2)
    {
        return {};
    }
    int const count = 1 + CutTiles(w.p, segment).cuts();
    return {owner * (w.most_cuts + 1), count, owner - index * w.p.kv_heads, segment.first_row, segment.rows};
}

// Where the partial results of 16 packed rows of a (slot, head) lie, those of its ranges. kPartials: of a range.
template <int D, int kPartials>
struct Parts
{
    char const* first_out; // from a fragment on
    char const* first_sums;
    int out_bytes; // from one result to the next
    int sums_bytes;
    int count;

    // tile: of 16 packed rows.
    __device__ __forceinline__ Parts(Work const& w, Divided const& divided, int tile, int first_fragment)
        : out_bytes(w.row_tiles * D * 16 * static_cast<int>(sizeof(float)))
        , sums_bytes(w.row_tiles * 16 * static_cast<int>(sizeof(float2)))
        , count(divided.count)
    {
        Partial const partial(w, D, kPartials * divided.first_range, tile);
        first_out = reinterpret_cast<char const*>(partial.out + first_fragment * 32);
        first_sums = reinterpret_cast<char const*>(partial.sums);
    }

    // How far a range's result is from the first, or the last one's: of the first range it is what begins in it, of the
    // others what began before.
    __device__ __forceinline__ int64_t offset(int range, bool may_be_first, int bytes) const
    {
        int const real = min(range, count - 1);
        return kPartials == 2 && may_be_first ? int64_t{2 * real + (real == 0 ? 1 : 0)} * bytes
                                              : int64_t{real} * (kPartials * bytes);
    }

    __device__ __forceinline__ float4 const* out(int range, bool may_be_first) const
    {
        return reinterpret_cast<float4 const*>(first_out + offset(range, may_be_first, out_bytes));
    }

    __device__ __forceinline__ void load_sums(int range, bool may_be_first, float2 (&to)[2]) const
    {
        auto const* const from = reinterpret_cast<float2 const*>(first_sums + offset(range, may_be_first, sums_bytes));
        to[0] = from[0];
        to[1] = from[8];
    }
};

constexpr int kCombineWarps = 8;

// Fragments of the output, and their rows' softmax.
template <int D, int kFragments, int kPartials>
struct Combination
{
    float total[kFragments][4];
    OnlineSoftmax<Exp2> softmax; // its logits have their scale already

    __device__ __forceinline__ void begin()
    {
        softmax.begin();
#pragma unroll
        for (auto& x : total)
        {
            x[0] = x[1] = x[2] = x[3] = 0.f;
        }
    }

    // Takes in partial results, kBatch of every kStep-th from `first` on, which are on their way at once; of those past
    // the last, the last again, with no weight. There are two at least.
    template <int kBatch, int kStep>
    __device__ __forceinline__ void add(Parts<D, kPartials> const& parts, int first)
    {
        float4 x[kBatch][kFragments];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            auto const* const from = parts.out(first + i * kStep, i == 0);
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                x[i][n] = from[n * 32];
            }
        }
        if constexpr (kPartials == 1)
        {
            // One after the other, as a block does that has several cuts.
            float2 sums[kBatch][2];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                parts.load_sums(first + i * kStep, i == 0, sums[i]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                if (first + i * kStep < parts.count)
                {
                    Fold const fold(softmax, {sums[i][0].x, sums[i][1].x}, {sums[i][0].y, sums[i][1].y});
#pragma unroll
                    for (int n = 0; n < kFragments; ++n)
                    {
                        fold.add(total[n], x[i][n]);
                    }
                }
            }
        }
        else
        {
            add_together<kBatch, kStep>(parts, first, x);
        }
    }

    // Rounded alike whatever the compiler makes of it.
    template <int kBatch, int kStep>
    __device__ __forceinline__ void add_together(
        Parts<D, kPartials> const& parts, int first, float4 const (&x)[kBatch][kFragments])
    {
        // Each of the four lanes that have the same two rows makes the weights of some parts, and gives them to the
        // others.
        constexpr int kLanes = kBatch < 4 ? 1 : 4;
        constexpr int kOwn = kBatch / kLanes;
        int const lane = threadIdx.x % 32;
        int const own = lane % kLanes;
        float2 sums[kOwn][2];
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            parts.load_sums(first + (own + i * kLanes) * kStep, i == 0, sums[i]);
        }
        float decay[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float top = softmax.maximum[r];
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
            {
                top = fmaxf(top, sums[i][r].x);
            }
#pragma unroll
            for (int step = 1; step < kLanes; step *= 2)
            {
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            }
            float const before = softmax.sum[r];
            decay[r] = softmax.raise(r, top, 1.f);
            softmax.sum[r] = __fmul_rn(before, decay[r]);
        }
        float4 weighed[kOwn]; // two rows' weights and sums
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            bool const is_real = first + (own + i * kLanes) * kStep < parts.count;
            float const weight = exp2f((is_real ? sums[i][0].x : -INFINITY) - softmax.base[0]);
            float const other = exp2f((is_real ? sums[i][1].x : -INFINITY) - softmax.base[1]);
            weighed[i] = {weight, sums[i][0].y, other, sums[i][1].y};
        }
#pragma unroll
        for (auto& y : total)
        {
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                y[c] = __fmul_rn(y[c], decay[c / 2]);
            }
        }
        if constexpr (kLanes == 1)
        {
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                add(x[i], weighed[i]);
            }
        }
        else
        {
            __shared__ float4 boxes[kCombineWarps][kBatch][8];
            auto& box = boxes[threadIdx.x / 32];
            __syncwarp(); // the boxes of the batch before have been read
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
            {
                box[own + i * kLanes][lane / 4] = weighed[i];
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                add(x[i], box[i][lane / 4]);
            }
        }
    }

    // weighed: two rows' weights and sums.
    __device__ __forceinline__ void add(float4 const (&x)[kFragments], float4 const& weighed)
    {
        softmax.sum[0] = fmaf(weighed.y, weighed.x, softmax.sum[0]);
        softmax.sum[1] = fmaf(weighed.w, weighed.z, softmax.sum[1]);
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
        {
            total[n][0] = fmaf(x[n].x, weighed.x, total[n][0]);
            total[n][1] = fmaf(x[n].y, weighed.x, total[n][1]);
            total[n][2] = fmaf(x[n].z, weighed.z, total[n][2]);
            total[n][3] = fmaf(x[n].w, weighed.z, total[n][3]);
        }
    }

    // Gives what a warp has to the first of those that share, or joins what it was given. By all threads of the block;
    // share by warp.
    template <int kSharing>
    __device__ __forceinline__ void merge(float4 (&boxes)[kSharing - 1][2][32], int share)
    {
        static_assert(kFragments == 1);
        int const lane = threadIdx.x % 32;
        if constexpr (kSharing > 2) // of two that share, none has a second job: see `launch_combine`
        {
            __syncthreads(); // the boxes of the job before have been read
        }
        if (share > 0)
        {
            boxes[share - 1][0][lane] = {total[0][0], total[0][1], total[0][2], total[0][3]};
            boxes[share - 1][1][lane] = {softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]};
        }
        __syncthreads();
        if (share > 0)
        {
            return;
        }
#pragma unroll
        for (auto const& box : boxes)
        {
            float4 const x = box[0][lane];
            float4 const y = box[1][lane];
            float const maxima[2] = {y.x, y.y};
            float const sums[2] = {y.z, y.w};
            float mine[2];
            float theirs[2];
            softmax.merge(maxima, sums, mine, theirs);
            merge_rows(total[0], x, mine, theirs);
        }
    }
};

// Blocks that an SM has registers for: on Hopper so few a thread that one fits beside a block of attention. In device
// code alone: the host's pass does not know for which GPU it launches.
constexpr int combine_blocks_per_sm([[maybe_unused]] int fragments)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return fragments > 1 ? 4 : 3;
#else
    return 2;
#endif
}

// Combines kFragments fragments of 16 rows, which kSharing warps share. By all threads of the block where they are more
// than one.
template <typename T, int D, int kSharing, int kFragments, int kPartials>
__device__ __forceinline__ void combine(Work const& w, Divided const& divided, int job)
{
    constexpr int kBatch = kPartials == 1 ? 4 : 8 / kFragments; // one after the other they need more registers
    int const warp = threadIdx.x / 32;
    int const share = warp % kSharing;
    int const first_fragment = job * kFragments % (D / 8);
    int const tile = job * kFragments / (D / 8);
    int const row = tile * 16 + threadIdx.x % 32 / 4;
    int const packed_rows[2] = {row, row + 8};
    float const sink = load_sink(w, divided.head, packed_rows); // on its way beside the parts
    Parts<D, kPartials> const parts(w, divided, tile, first_fragment);

    Combination<D, kFragments, kPartials> combination;
    combination.begin();
    for (int first = share; first < parts.count; first += kBatch * kSharing)
    {
        combination.template add<kBatch, kSharing>(parts, first);
    }
    if constexpr (kSharing > 1)
    {
        __shared__ float4 boxes[kCombineWarps / kSharing][kSharing - 1][2][32];
        combination.template merge<kSharing>(boxes[warp / kSharing], share);
        if (share > 0)
        {
            return;
        }
    }
    Segment const segment{0, divided.first_row, divided.rows, 0};
    write_rows<T, D>(w, segment, divided.head, packed_rows, sink, combination.softmax.maximum, combination.softmax.sum,
        combination.total, first_fragment);
}

// Writes the zeros of slots that have no keys.
template <typename T, int D>
__device__ __forceinline__ void write_zeros(Work const& w)
{
    dflash_attention_params const& p = w.p;
    int const chunks = w.group * (D / 8); // of a row: heads of one KV head are neighbours
    Quotient const by_heads(p.kv_heads);
    Quotient const by_chunks(chunks);
#pragma unroll 1
    for (int i = blockIdx.x; i < p.slots * p.kv_heads; i += gridDim.x)
    {
        int const index = by_heads.down(i);
        Segment const segment = segment_of(p, index);
        if (segment.length > 0)
        {
            continue;
        }
        T* const to = static_cast<T*>(p.out) + int64_t{i - index * p.kv_heads} * w.group * D;
#pragma unroll 1
        for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < segment.rows * chunks; at += gridDim.y * blockDim.x)
        {
            int const row = by_chunks.down(at);
            store_vector<T, 8>(
                to + (int64_t{segment.first_row} + row) * p.heads * D + (at - row * chunks) * 8, Vector<T, 8>{});
        }
    }
}

// What a block has to combine. Waits for the parts: only here the next kernel may begin, and what precedes it begins
// after all that came before attention, so that segments can be read and zeros written.
template <typename T, int D, int kPartials>
__device__ __forceinline__ Divided wait_for_parts(Work const& w)
{
    if constexpr (kPartials == 1)
    {
        Divided const divided = divided_exactly(w);
        asm volatile("" ::"r"(divided.first_range), "r"(divided.count)); // worked out by now
        begin();
        return divided;
    }
    else
    {
        if (!w.p.segments || w.p.block > 0) // else idle segments have no rows
        {
            write_zeros<T, D>(w);
        }
        begin();
        return w.divided[blockIdx.x];
    }
}

// kSharing warps share the partial results of kFragments fragments: two, or eight, have one where a (slot, head) is
// divided among many ranges; one has several where many (slot, head)s are divided. Blocks are few, that they may be in
// place when the last range ends: what precedes the wait then costs nothing. kPartials: of a range.
template <typename T, int D, int kSharing, int kFragments, int kPartials>
__global__ void __launch_bounds__(kCombineWarps * 32, combine_blocks_per_sm(kFragments)) combine_kernel(Work const w)
{
    static_assert(kSharing == 1 || kSharing == 2 || kSharing == 8);
    Divided const divided = wait_for_parts<T, D, kPartials>(w);
    if (divided.count < 2)
    {
        return;
    }
    constexpr int kAtOnce = kCombineWarps / kSharing;
    int const jobs = (w.packed_rows + 15) / 16 * (D / 8 / kFragments);
    for (int job = blockIdx.y * kAtOnce + threadIdx.x / 32 / kSharing; job < jobs; job += gridDim.y * kAtOnce)
    {
        combine<T, D, kSharing, kFragments, kPartials>(w, divided, job);
    }
}

// -- the launch -------------------------------------------------------------------------------------------------------

// sms: of the device.
template <typename T, int D, int kSharing, int kFragments, int kPartials = 2>
cudaError_t launch_combine(Work const& w, int sms, cudaStream_t stream)
{
    int const warps = (w.packed_rows + 15) / 16 * (D / 8) / kFragments * kSharing;
    // One of an SM's blocks is in place when attention ends; a second one begins sooner than a second round. Beside the
    // blocks of exact cuts, which take all registers, none is in place early.
    int const of_sm = kPartials == 1 ? 4 : 2;
    int const parts = std::min((warps + kCombineWarps - 1) / kCombineWarps, std::max(of_sm * sms / w.owners, 1));
    auto const kernel = combine_kernel<T, D, kSharing, kFragments, kPartials>;
    return launch_kernel(kernel, dim3(w.owners, parts), kCombineWarps * 32, 0, stream, w);
}

template <typename T, int D>
cudaError_t launch_combine(Work const& w, int sms, cudaStream_t stream)
{
    // As many warps as can load at once. Two share a job where all jobs are taken at once.
    int const fragments = w.owners * ((w.packed_rows + 15) / 16) * (D / 8);
    if constexpr (D <= 128)
    {
        if (w.p.is_exact)
        {
            return launch_combine<T, D, 1, 1, 1>(w, sms, stream); // of sums in one order
        }
    }
    return fragments <= 8 * sms ? launch_combine<T, D, 2, 1>(w, sms, stream)
                                : launch_combine<T, D, 1, 4>(w, sms, stream);
}

} // namespace dflash
