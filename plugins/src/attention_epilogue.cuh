// The outputs of attention's kernels: rows of the result, or partial results to be combined.
#pragma once

#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "element.cuh"

namespace dflash
{

// A partial result of 16 packed rows. A range has two: of the (slot, head) that began before it, and of the one that
// begins in it and goes on; where a (slot, head) is cut exactly, each cut has one, and its tails have.
struct Partial
{
    float4* out;
    float2* sums;

    // partials: of a range.
    __device__ Partial(
        Work const& w, int partials, int head_size, int range, bool begins, int row_block, int tiles, int tile)
    {
        int64_t const nth
            = ((int64_t{range} * partials + (begins ? partials - 1 : 0)) * w.row_blocks + row_block) * tiles + tile;
        out = w.partial_out + nth * (head_size / 8 * 32) + threadIdx.x % 32;
        sums = w.partial_sums + nth * 16 + threadIdx.x % 32 / 4;
    }

    template <int N>
    __device__ void write(float const (&x)[N][4], int first) const
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
        {
            out[(first + n) * 32] = {x[n][0], x[n][1], x[n][2], x[n][3]};
        }
    }

    __device__ void write_sums(float const (&maximum)[2], float const (&sum)[2]) const
    {
        if (threadIdx.x % 4 == 0)
        {
            sums[0] = {maximum[0], sum[0]};
            sums[8] = {maximum[1], sum[1]};
        }
    }
};

// Fragments of attention's output, from the first of a head's on.
template <typename T, int D, int N>
__device__ __forceinline__ void write_rows(Work const& w, Segment const& segment, int kv_head,
    int const (&packed_rows)[2], float const (&maximum)[2], float const (&sum)[2], float const (&x)[N][4], int first)
{
    dflash_attention_params const& p = w.p;
#pragma unroll
    for (int r = 0; r < 2; ++r)
    {
        int const group_head = head_of(w, packed_rows[r]);
        int const row = packed_rows[r] - group_head * p.rows;
        if (packed_rows[r] >= w.packed_rows || row >= segment.rows)
        {
            continue;
        }
        int const head = kv_head * w.group + group_head;
        float const factor = normalizer(p, head, maximum[r], sum[r]);
        T* to = static_cast<T*>(p.out) + ((int64_t{segment.first_row} + row) * p.heads + head) * D + first * 8
            + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; ++n)
        {
            *reinterpret_cast<uint32_t*>(to + n * 8) = packed<T>(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
        }
    }
}

// Writes what a warp has of a (slot, head): rows of the output where the range holds all keys, else a partial result.
// kPartials: results of a range.
template <typename T, int D, int kPartials = 2>
struct Epilogue
{
    Work const& w;
    int range;
    int row_block;
    int tiles; // of 16 packed rows, in a row block
    int tile; // the warp's

    // Fragments from the first of a head's on. begins, ends: whether the range holds the first and the last keys.
    template <typename Exponential, int N>
    __device__ __forceinline__ void write(Cursor const& at, bool begins, bool ends, Rows const& rows,
        OnlineSoftmax<Exponential> const& softmax, float const (&x)[N][4], int first) const
    {
        if (begins && ends)
        {
            write_rows<T, D>(w, at.segment, at.head, rows.packed, softmax.maximum, softmax.sum, x, first);
            return;
        }
        Partial const partial(w, kPartials, D, range, begins, row_block, tiles, tile);
        partial.write(x, first);
        if (first == 0)
        {
            partial.write_sums(softmax.maximum, softmax.sum);
        }
    }
};

} // namespace dflash
