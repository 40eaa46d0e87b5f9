// Combines attention's partial results, where a (slot, head) was divided among blocks.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "launch.cuh"

namespace dflash
{

// Where the partial results of 16 packed rows of a (slot, head) lie, those of its `count` ranges.
template <int D>
struct Parts
{
    float4 const* out; // from a fragment on
    float2 const* sums;
    int between; // of one of a range's two and the other
    int count;
    Segment segment;

    // By all lanes of a warp. m: packed rows of a row block.
    __device__ __forceinline__ Parts(Work const& w, int m, int index, int kv_head, int first_row, int first_fragment)
    {
        Segments const segments(w.p);
        Division const division(w, segments);
        segment = segments.of(index);
        int const tiles = tiles_of(w.p, segment);
        int const first_unit = division.before(w, segments, index) + kv_head * division.of(tiles);
        int const first_range = first_unit / division.each;
        count = tiles == 0 ? 0 : (first_unit + tiles - 1) / division.each - first_range + 1;
        Partial const partial(w, D, first_range, false, first_row / m, m / 16, first_row % m / 16);
        between = w.row_blocks * (m / 16);
        out = partial.out + first_fragment * 32;
        sums = partial.sums;
    }
};

// Fragments of the output, and their rows' softmax.
template <int D, int kFragments>
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
    __device__ __forceinline__ void add(Parts<D> const& parts, int first)
    {
        float4 x[kBatch][kFragments];
        float2 sums[kBatch][2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            // Of the first range what begins in it, of the others what began before.
            int const nth = min(first + i * kStep, parts.count - 1);
            int const at = (2 * nth + (nth == 0 ? 1 : 0)) * parts.between;
            sums[i][0] = parts.sums[at * 16];
            sums[i][1] = parts.sums[at * 16 + 8];
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                x[i][n] = parts.out[at * (D / 8 * 32) + n * 32];
            }
        }
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

    // Gives what a warp has to another, or joins what it was given. By all threads of the block; is_giver by warp.
    __device__ __forceinline__ void merge(float4 (&box)[2][32], bool is_giver)
    {
        static_assert(kFragments == 1);
        int const lane = threadIdx.x % 32;
        if (is_giver)
        {
            box[0][lane] = {total[0][0], total[0][1], total[0][2], total[0][3]};
            box[1][lane] = {softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]};
        }
        __syncthreads();
        if (is_giver)
        {
            return;
        }
        float4 const x = box[0][lane];
        float4 const y = box[1][lane];
        float const maxima[2] = {y.x, y.y};
        float const sums[2] = {y.z, y.w};
        float mine[2];
        float theirs[2];
        softmax.merge(maxima, sums, mine, theirs);
        merge_rows(total[0], x, mine, theirs);
    }
};

// kSharing warps share the partial results of kFragments fragments: two have one where a (slot, head) is divided among
// many ranges; one has several where there are so many (slot, head)s that most have little to combine. Also writes the
// zeros of slots that have no keys.
constexpr int kCombineWarps = 4;

template <typename T, int D, int kSharing, int kFragments>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(Work const w, int const m)
{
    static_assert(kSharing == 1 || kSharing == 2);
    int const warp = threadIdx.x / 32;
    int const share = warp % kSharing;
    int const index = blockIdx.x / w.p.kv_heads;
    int const kv_head = blockIdx.x % w.p.kv_heads;
    int const job = (blockIdx.y * kCombineWarps + warp) / kSharing;
    int const first_fragment = job * kFragments % (D / 8);
    int const first_row = job * kFragments / (D / 8) * 16;

    Parts<D> const parts(w, m, index, kv_head, first_row, first_fragment);
    // Only here: the other kernel has begun when this one may, so that segments, which came before both, can be read.
    // What is computed of them is so before the wait.
    asm volatile("" ::"l"(parts.out), "l"(parts.sums), "r"(parts.between), "r"(parts.count));
    begin();
    if (parts.count == 1 || first_row >= w.packed_rows)
    {
        return;
    }

    constexpr int kBatch = kFragments > 8 ? 1 : 8 / kFragments;
    Combination<D, kFragments> combination;
    combination.begin();
    for (int first = share; first < parts.count; first += kBatch * kSharing)
    {
        combination.template add<kBatch, kSharing>(parts, first);
    }
    if constexpr (kSharing > 1)
    {
        __shared__ float4 boxes[kCombineWarps / 2][2][32];
        combination.merge(boxes[warp / 2], share == 1);
        if (share == 1)
        {
            return;
        }
    }
    int const lane = threadIdx.x % 32;
    int const packed_rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
    write_rows<T, D>(w, parts.segment, kv_head, packed_rows, combination.softmax.maximum, combination.softmax.sum,
        combination.total, first_fragment);
}

} // namespace dflash
