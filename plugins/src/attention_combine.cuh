// Combines attention's partial results, where a (slot, head) was divided among blocks.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_work.cuh"
#include "launch.cuh"

namespace dflash
{

// kSharing warps share the partial results of kFragments fragments: two have one where a (slot, head) is divided among
// many ranges; one has several where there are so many (slot, head)s that most have little to combine. Also writes the
// zeros of slots that have no rows.
constexpr int kCombineWarps = 4;

template <typename T, int D, int kSharing, int kFragments>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(Work const w, int const m)
{
    dflash_attention_params const& p = w.p;
    int const lane = threadIdx.x % 32;
    int const share = threadIdx.x / 32 % kSharing;
    int const slot = blockIdx.x / p.kv_heads;
    int const kv_head = blockIdx.x % p.kv_heads;
    int const job = (blockIdx.y * kCombineWarps + threadIdx.x / 32) / kSharing;
    int const first_fragment = job * kFragments % (D / 8);
    int const first_row = job * kFragments / (D / 8) * 16;

    Lengths const lengths(p);
    Division const division(w, lengths);
    int const tiles = tiles_of(p, lengths.of(slot));
    int const per_range = division.each;
    int const first_unit = division.before(w, lengths, slot) + kv_head * division.of(tiles);
    int const first_range = first_unit / per_range;
    int const count = tiles == 0 ? 0 : (first_unit + tiles - 1) / per_range - first_range + 1;
    Partial const partial(w, D, first_range, false, first_row / m, m / 16, first_row % m / 16);
    int const between = w.row_blocks * (m / 16); // of one of a range's two and the other
    float4 const* parts_at = partial.out + first_fragment * 32;
    float2 const* sums_at = partial.sums;
    int const last = count - 1;
    // Only here: the other kernel has begun when this one may, so that lengths, which came before both, can be read.
    // The results that depend on them alone are computed before the wait.
    asm volatile("" ::"l"(parts_at), "l"(sums_at), "r"(between), "r"(last));
    begin();
    if (count == 1 || first_row >= w.packed_rows)
    {
        return;
    }

    // Several partial results are on their way at once; of those past the last, the last again, with no weight.
    constexpr int kBatch = kFragments > 8 ? 1 : 8 / kFragments;
    float total[kFragments][4] = {};
    float maximum[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};
    for (int first = share; first < count; first += kBatch * kSharing)
    {
        float4 parts[kBatch][kFragments];
        float2 sums[kBatch][2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            // The first range's part began in it, the others' parts began before.
            int const nth = min(first + i * kSharing, last);
            int const at = (2 * nth + (nth == 0 ? 1 : 0)) * between;
            sums[i][0] = sums_at[at * 16];
            sums[i][1] = sums_at[at * 16 + 8];
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                parts[i][n] = parts_at[at * (D / 8 * 32) + n * 32];
            }
        }
        float decay[2];
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float top = maximum[r];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                top = fmaxf(top, sums[i][r].x);
            }
            base[r] = top == -INFINITY ? 0.f : top;
            decay[r] = exp2f(maximum[r] - base[r]);
            maximum[r] = top;
            sum[r] *= decay[r];
        }
#pragma unroll
        for (auto& x : total)
        {
            x[0] *= decay[0];
            x[1] *= decay[0];
            x[2] *= decay[1];
            x[3] *= decay[1];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
        {
            float weights[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                weights[r] = first + i * kSharing < count ? exp2f(sums[i][r].x - base[r]) : 0.f;
                sum[r] += sums[i][r].y * weights[r];
            }
#pragma unroll
            for (int n = 0; n < kFragments; ++n)
            {
                total[n][0] += parts[i][n].x * weights[0];
                total[n][1] += parts[i][n].y * weights[0];
                total[n][2] += parts[i][n].z * weights[1];
                total[n][3] += parts[i][n].w * weights[1];
            }
        }
    }
    if constexpr (kSharing > 1)
    {
        static_assert(kSharing == 2 && kFragments == 1);
        __shared__ float4 others[kCombineWarps / 2][2][32];
        auto& box = others[threadIdx.x / 64];
        if (share == 1)
        {
            box[0][lane] = {total[0][0], total[0][1], total[0][2], total[0][3]};
            box[1][lane] = {maximum[0], maximum[1], sum[0], sum[1]};
        }
        __syncthreads();
        if (share == 1)
        {
            return;
        }
        float4 const x = box[0][lane];
        float4 const y = box[1][lane];
        float const parts[4] = {x.x, x.y, x.z, x.w};
        float const maxima[2] = {y.x, y.y};
        float const sums[2] = {y.z, y.w};
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float const top = fmaxf(maximum[r], maxima[r]);
            float const base = top == -INFINITY ? 0.f : top;
            float const mine = exp2f(maximum[r] - base);
            float const theirs = exp2f(maxima[r] - base);
            maximum[r] = top;
            sum[r] = sum[r] * mine + sums[r] * theirs;
            total[0][2 * r] = total[0][2 * r] * mine + parts[2 * r] * theirs;
            total[0][2 * r + 1] = total[0][2 * r + 1] * mine + parts[2 * r + 1] * theirs;
        }
    }
    int const packed_rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
    write_rows<T, D>(w, slot, kv_head, packed_rows, maximum, sum, total, first_fragment);
}

} // namespace dflash
