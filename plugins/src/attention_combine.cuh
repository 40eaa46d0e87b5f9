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

// What a block has to combine: a (slot, head) that was divided among ranges. Where the ranges are fewer than the (slot,
// head)s, of each range the one that begins in it and goes on, so that most blocks have something to do.
struct Divided
{
    Segment segment = {};
    int head = 0;
    int first_range = 0;
    int count = 0; // ranges; of fewer than two nothing is combined

    // By all lanes of a warp.
    __device__ __forceinline__ Divided(Work const& w, Segments const& segments, Division const& division)
    {
        int const owner = blockIdx.x;
        bool const is_of_range = static_cast<int>(gridDim.x) < w.p.slots * w.p.kv_heads;
        int first_unit = 0;
        int tiles = 0;
        if (is_of_range)
        {
            int const last_unit = min((owner + 1) * division.each, division.units) - 1;
            if (last_unit < owner * division.each)
            {
                return;
            }
            Cursor const last(w.p, segments, division, last_unit);
            segment = last.segment;
            head = last.head;
            tiles = last.tiles;
            first_unit = last_unit - last.tile;
        }
        else
        {
            int const index = owner / w.p.kv_heads;
            segment = segments.of(index);
            head = owner % w.p.kv_heads;
            tiles = tiles_of(w.p, segment);
            first_unit = division.before(w, segments, index) + head * division.of(tiles);
        }
        first_range = first_unit / division.each;
        if (tiles > 0 && (!is_of_range || first_range == owner))
        {
            count = (first_unit + tiles - 1) / division.each - first_range + 1;
        }
    }

    // Of exact cuts: a (slot, head)'s tails, and its cuts.
    __device__ __forceinline__ Divided(Work const& w, Segments const& segments, ExactDivision const& division)
    {
        int const owner = blockIdx.x;
        segment = segments.of(owner / w.p.kv_heads);
        head = owner % w.p.kv_heads;
        if (division.of(w.p, segment) > 1)
        {
            first_range = owner * (w.most_cuts + 1);
            count = 1 + CutTiles(w.p, segment).cuts();
        }
    }
};

// Where the partial results of 16 packed rows of a (slot, head) lie, those of its `count` ranges.
template <int D, int kPartials>
struct Parts
{
    float4 const* out; // from a fragment on
    float2 const* sums;
    int between; // of one of a range's and the next
    int count;

    // m: packed rows of a row block.
    __device__ __forceinline__ Parts(Work const& w, int m, Divided const& divided, int first_row, int first_fragment)
    {
        Partial const partial(w, kPartials, D, divided.first_range, false, first_row / m, m / 16, first_row % m / 16);
        count = divided.count;
        between = w.row_blocks * (m / 16);
        out = partial.out + first_fragment * 32;
        sums = partial.sums;
    }
};

// Fragments of the output, and their rows' softmax. kPartials: of a range.
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
            // Of the first range what begins in it, of the others what began before.
            int const nth = min(first + i * kStep, parts.count - 1);
            int const at = (kPartials * nth + (nth == 0 ? kPartials - 1 : 0)) * parts.between;
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
__device__ __forceinline__ void combine(Work const& w, int m, Divided const& divided, int job)
{
    constexpr int kBatch = kPartials == 1 ? 4 : 8 / kFragments; // one after the other they need more registers
    int const warp = threadIdx.x / 32;
    int const share = warp % kSharing;
    int const first_fragment = job * kFragments % (D / 8);
    int const first_row = job * kFragments / (D / 8) * 16;
    Parts<D, kPartials> const parts(w, m, divided, first_row, first_fragment);

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
    int const lane = threadIdx.x % 32;
    int const packed_rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
    write_rows<T, D>(w, divided.segment, divided.head, packed_rows, combination.softmax.maximum,
        combination.softmax.sum, combination.total, first_fragment);
}

// Writes the zeros of slots that have no keys.
template <typename T, int D>
__device__ __forceinline__ void write_zeros(Work const& w, Segments const& segments)
{
    dflash_attention_params const& p = w.p;
    int const chunks = w.group * (D / 8); // of a row: heads of one KV head are neighbours
    for (int i = blockIdx.x; i < p.slots * p.kv_heads; i += gridDim.x)
    {
        Segment const segment = segments.of(i / p.kv_heads);
        if (tiles_of(p, segment) > 0)
        {
            continue;
        }
        T* const to = static_cast<T*>(p.out) + int64_t{i % p.kv_heads} * w.group * D;
        for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < segment.rows * chunks; at += gridDim.y * blockDim.x)
        {
            int const row = at / chunks;
            store_vector<T, 8>(
                to + (int64_t{segment.first_row} + row) * p.heads * D + (at - row * chunks) * 8, Vector<T, 8>{});
        }
    }
}

// kSharing warps share the partial results of kFragments fragments: two, or eight, have one where a (slot, head) is
// divided among many ranges; one has several where many (slot, head)s are divided. Blocks are few, that they may be in
// place when the last range ends: what precedes the wait then costs nothing. kPartials: of a range.
template <typename T, int D, int kSharing, int kFragments, int kPartials>
__global__ void __launch_bounds__(kCombineWarps * 32, combine_blocks_per_sm(kFragments))
    combine_kernel(Work const w, int const m)
{
    static_assert(kSharing == 1 || kSharing == 2 || kSharing == 8);
    Segments const segments(w.p);
    std::conditional_t<kPartials == 1, ExactDivision, Division> const division(w, segments);
    Divided const divided(w, segments, division);
    // Only here: the other kernel has begun when this one may, so that segments, which came before both, can be read.
    // What is computed of them is so before the wait.
    asm volatile("" ::"r"(divided.first_range), "r"(divided.count));
    begin();
    if constexpr (kPartials > 1) // exact rows are none of a block's
    {
        if (division.has_idle && (!w.p.segments || w.p.block > 0))
        {
            write_zeros<T, D>(w, segments);
        }
    }
    if (divided.count < 2)
    {
        return;
    }
    constexpr int kAtOnce = kCombineWarps / kSharing;
    int const jobs = (w.packed_rows + 15) / 16 * (D / 8 / kFragments);
    for (int job = blockIdx.y * kAtOnce + threadIdx.x / 32 / kSharing; job < jobs; job += gridDim.y * kAtOnce)
    {
        combine<T, D, kSharing, kFragments, kPartials>(w, m, divided, job);
    }
}

// -- the launch -------------------------------------------------------------------------------------------------------

// owners: blocks' first dimension, each with a (slot, head) or a range of its own. sms: of the device.
template <typename T, int D, int kSharing, int kFragments, int kPartials = 2>
cudaError_t launch_combine(Work const& w, int m, int sms, int owners, cudaStream_t stream)
{
    int const warps = (w.packed_rows + 15) / 16 * (D / 8) / kFragments * kSharing;
    // Beside the blocks of exact cuts, which take all registers, none is in place early.
    int const beside = kPartials == 1 ? 4 : 1;
    int const parts = std::min((warps + kCombineWarps - 1) / kCombineWarps, std::max(beside * sms / owners, 1));
    auto const kernel = combine_kernel<T, D, kSharing, kFragments, kPartials>;
    return launch_kernel(kernel, dim3(owners, parts), kCombineWarps * 32, 0, stream, w, m);
}

// m: packed rows of a row block.
template <typename T, int D>
cudaError_t launch_combine(Work const& w, int m, int sms, cudaStream_t stream)
{
    // As many warps as can load at once, one block an SM. Two share a job only where each has no other.
    int const owners = std::min(w.ranges, w.p.slots * w.p.kv_heads);
    int const fragments = owners * ((w.packed_rows + 15) / 16) * (D / 8);
    if constexpr (D <= 128)
    {
        if (w.p.is_exact)
        {
            return launch_combine<T, D, 1, 1, 1>(w, m, sms, owners, stream); // of sums in one order
        }
    }
    return fragments <= 4 * sms ? launch_combine<T, D, 2, 1>(w, m, sms, owners, stream)
        : fragments <= 8 * sms  ? launch_combine<T, D, 1, 1>(w, m, sms, owners, stream)
                                : launch_combine<T, D, 1, 4>(w, m, sms, owners, stream);
}

} // namespace dflash
