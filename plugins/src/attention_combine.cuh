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

// Where the partial results of 16 packed rows of a (slot, head) lie, those of its `count` ranges. kPartials: of a
// range.
template <int D, int kPartials>
struct Parts
{
    float4 const* out; // from a fragment on
    float2 const* sums;
    int between; // of one of a range's and the next
    int count;

    // tile: of 16 packed rows.
    __device__ __forceinline__ Parts(Work const& w, Divided const& divided, int tile, int first_fragment)
    {
        Partial const partial(w, D, kPartials * divided.first_range, tile);
        count = divided.count;
        between = w.row_tiles;
        out = partial.out + first_fragment * 32;
        sums = partial.sums;
    }
};

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
    // the last, the last again, with no weight.
    template <int kBatch, int kStep>
    __device__ __forceinline__ void add(Parts<D, kPartials> const& parts, int first)
    {
        float4 x[kBatch][kFragments];
        float2 sums[kBatch][2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            // Of the first range what begins in it, of the others what began before. There are two at least.
            int const nth = min(first + i * kStep, parts.count - 1);
            int const at = (kPartials * nth + (i == 0 && nth == 0 ? kPartials - 1 : 0)) * parts.between;
            sums[i][0] = parts.sums[at * 16];
            sums[i][1] = parts.sums[at * 16 + 8];
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                x[i][n] = parts.out[at * (D / 8 * 32) + n * 32];
            }
        }
        if constexpr (kPartials == 1)
        {
            // One after the other, as a block does that has several cuts.
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
            add_together<kBatch, kStep>(parts, first, x, sums);
        }
    }

    template <int kBatch, int kStep>
    __device__ __forceinline__ void add_together(Parts<D, kPartials> const& parts, int first,
        float4 const (&x)[kBatch][kFragments], float2 const (&sums)[kBatch][2])
    {
        float decay[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float top = softmax.maximum[r];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                top = fmaxf(top, sums[i][r].x);
            }
            decay[r] = softmax.raise(r, top, 1.f);
        }
#pragma unroll
        for (auto& y : total)
        {
            y[0] *= decay[0];
            y[1] *= decay[0];
            y[2] *= decay[1];
            y[3] *= decay[1];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            float weights[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                weights[r] = first + i * kStep < parts.count ? exp2f(sums[i][r].x - softmax.base[r]) : 0.f;
                softmax.sum[r] += sums[i][r].y * weights[r];
            }
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                total[n][0] += x[i][n].x * weights[0];
                total[n][1] += x[i][n].y * weights[0];
                total[n][2] += x[i][n].z * weights[1];
                total[n][3] += x[i][n].w * weights[1];
            }
        }
    }

    // Gives what a warp has to the first of those that share, or joins what it was given. By all threads of the block;
    // share by warp.
    template <int kSharing>
    __device__ __forceinline__ void merge(float4 (&boxes)[kSharing - 1][2][32], int share)
    {
        static_assert(kFragments == 1);
        int const lane = threadIdx.x % 32;
        if constexpr (kSharing > 2)
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

constexpr int kCombineWarps = 8;

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
    // Beside the blocks of exact cuts, which take all registers, none is in place early.
    int const beside = kPartials == 1 ? 4 : 1;
    int const parts = std::min((warps + kCombineWarps - 1) / kCombineWarps, std::max(beside * sms / w.owners, 1));
    auto const kernel = combine_kernel<T, D, kSharing, kFragments, kPartials>;
    return launch_kernel(kernel, dim3(w.owners, parts), kCombineWarps * 32, 0, stream, w);
}

template <typename T, int D>
cudaError_t launch_combine(Work const& w, int sms, cudaStream_t stream)
{
    // As many warps as can load at once, one block an SM. Two share a job only where each has no other.
    int const fragments = w.owners * ((w.packed_rows + 15) / 16) * (D / 8);
    if constexpr (D <= 128)
    {
        if (w.p.is_exact)
        {
            return launch_combine<T, D, 1, 1, 1>(w, sms, stream); // of sums in one order
        }
    }
    return fragments <= 4 * sms ? launch_combine<T, D, 2, 1>(w, sms, stream)
        : fragments <= 8 * sms  ? launch_combine<T, D, 1, 1>(w, sms, stream)
                                : launch_combine<T, D, 1, 4>(w, sms, stream);
}

} // namespace dflash
