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

    // nth: result. tile: of 16 packed rows, of all row blocks'.
    __device__ __forceinline__ Partial(Work const& w, int head_size, int nth, int tile)
    {
        int const at = nth * w.row_tiles + tile;
        out = w.partial_out + int64_t{at} * (head_size / 8 * 32) + threadIdx.x % 32;
        sums = w.partial_sums + int64_t{at} * 16 + threadIdx.x % 32 / 4;
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

// The sink of one of a thread's two rows: of the first in even lanes, of the second in odd ones. One loads it for all
// lanes of a row.
__device__ __forceinline__ float load_sink(Work const& w, int kv_head, int const (&packed_rows)[2])
{
    int const packed_row = min(threadIdx.x % 2 == 0 ? packed_rows[0] : packed_rows[1], w.packed_rows - 1);
    return w.p.sinks ? sink_of(w.p, kv_head * w.group + head_of(w, packed_row)) : 0.f;
}

// Fragments of attention's output, from the first of a head's on. By all lanes of a warp.
template <typename T, int D, int N>
__device__ __forceinline__ void write_rows(Work const& w, Segment const& segment, int kv_head,
    int const (&packed_rows)[2], float sink, float const (&maximum)[2], float const (&sum)[2], float const (&x)[N][4],
    int first)
{
    dflash_attention_params const& p = w.p;
    bool const is_even = threadIdx.x % 2 == 0;
    float const own = normalizer(p, sink, is_even ? maximum[0] : maximum[1], is_even ? sum[0] : sum[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
    {
        float const factor = __shfl_sync(0xffffffffu, own, r, 2);
        int const group_head = head_of(w, packed_rows[r]);
        int const row = packed_rows[r] - group_head * p.rows;
        if (packed_rows[r] >= w.packed_rows || row >= segment.rows)
        {
            continue;
        }
        int const nth = (segment.first_row + row) * p.heads + kv_head * w.group + group_head;
        T* const to = static_cast<T*>(p.out) + int64_t{nth} * D + first * 8 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; ++n)
        {
            *reinterpret_cast<uint32_t*>(to + n * 8) = packed<T>(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
        }
    }
}

// Writes what a warp has of a (slot, head): rows of the output where the range holds all keys, else a partial result.
template <typename T, int D>
struct Epilogue
{
    Work const& w;
    int range;
    int tile; // the warp's 16 packed rows, of all row blocks'

    // Fragments from the first of a head's on. begins, ends: whether the range holds the first and the last keys.
    template <typename Exponential, int N>
    __device__ __forceinline__ void write(Cursor const& at, bool begins, bool ends, Rows const& rows,
        OnlineSoftmax<Exponential> const& softmax, float const (&x)[N][4], int first) const
    {
        if (begins && ends)
        {
            float const sink = load_sink(w, at.head, rows.packed);
            write_rows<T, D>(w, at.segment, at.head, rows.packed, sink, softmax.maximum, softmax.sum, x, first);
            return;
        }
        Partial const partial(w, D, 2 * range + (begins ? 1 : 0), tile);
        partial.write(x, first);
        if (first == 0)
        {
            partial.write_sums(softmax.maximum, softmax.sum);
        }
    }
};

} // namespace dflash
