// The tails of exact rows on Hopper: see attention_exact_work.cuh.
//
// A tail is one warp's, of one row and its query heads in the block: it takes the row's keys and values out of tiles in
// shared memory, in the order of the text, for products of 16 keys (mma.sync).
#pragma once

#include "attention_exact_work.cuh"
#include "attention_sm90.cuh"
#include "instructions.cuh"

namespace dflash
{
namespace sm90
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The place of the nth bit of x that is set, from 0 on; there must be one.
__device__ __forceinline__ int nth_bit(uint64_t x, int n)
{
    int at = 0;
#pragma unroll
    for (int width = 32; width > 0; width /= 2)
    {
        int const below = __popcll(x >> at & (uint64_t{1} << width) - 1);
        at += n >= below ? width : 0;
        n -= n >= below ? below : 0;
    }
    return at;
}

// The tails of a range's rows. Their results go where warpgroups merge theirs.
template <typename T, int D>
struct Tails
{
    using S = Shared<D, false>;
    static constexpr int kPairs = D / 16; // of fragments of 8 columns

    // Of results, in floats: so far apart, and every 16th by more, that neither neighbours nor heads of one row share
    // banks.
    static constexpr int kBetweenRows = D + 8;
    static constexpr int kSumsAt = kRows * kBetweenRows + kRows / 16 * 8;
    static_assert((kSumsAt + 2 * kRows) * 4 <= 2 * S::kBoxRows * 128 * 16);

    Work const& w;
    char* shared;
    Inputs<S> inputs;
    ExactRange const& range;
    int first_packed; // of the block
    int seen; // tiles of the block before those of tails
    float scale; // of the logits, base 2

    __device__ __forceinline__ float* results() const
    {
        return reinterpret_cast<float*>(shared + S::kMergeAt);
    }

    static __device__ __forceinline__ int place_of(int row)
    {
        return row * kBetweenRows + row / 16 * 8;
    }

    // A row's maximum (of scaled logits, base 2) and sum.
    __device__ __forceinline__ float2* sums() const
    {
        return reinterpret_cast<float2*>(results() + kSumsAt);
    }

    __device__ __forceinline__ uint64_t* paths() const
    {
        return reinterpret_cast<uint64_t*>(shared + S::kBytes);
    }

    // By all threads, before they meet.
    __device__ __forceinline__ void load_paths() const
    {
        Segment const& s = range.at.segment;
        if (w.p.row_path && static_cast<int>(threadIdx.x) < s.rows)
        {
            paths()[threadIdx.x] = w.p.row_path[s.first_row + threadIdx.x];
        }
    }

    __device__ __forceinline__ int stage_of(int tile) const
    {
        return (seen + tile - range.first_tail()) % S::kStages;
    }

    __device__ __forceinline__ void wait_for_tiles() const
    {
        for (int tile = range.first_tail(); tile < range.past_tail(); ++tile)
        {
            int const nth = seen + tile - range.first_tail();
            wait_for_phase(inputs.full(nth % S::kStages), nth / S::kStages % 2);
        }
    }

    // By one thread of each of as many warps as a tile has readers.
    __device__ __forceinline__ void release_tiles() const
    {
        for (int tile = range.first_tail(); tile < range.past_tail(); ++tile)
        {
            arrive(inputs.empty(stage_of(tile)));
        }
    }

    // By all warps, each with rows of its own, two at once; or where they are few, with columns of one.
    __device__ __forceinline__ void compute() const
    {
        int const rows = w.p.rows; // packed rows of one head
        int const most_heads = min((kRows + rows - 1) / rows, w.group); // of a row, in this block
        int const chunks = (most_heads + 15) / 16;
        int const count = range.at.segment.rows * chunks;
        int const warp = threadIdx.x / 32;
        constexpr int kWarps = kConsumers / 32;
        if (count > kWarps)
        {
            int job = warp;
            for (; job + kWarps < count; job += 2 * kWarps)
            {
                Item const items[2] = {item(job, chunks), item(job + kWarps, chunks)};
                attend<2>(items, 0, 1);
            }
            if (job < count)
            {
                Item const items[1] = {item(job, chunks)};
                attend<1>(items, 0, 1);
            }
            return;
        }
        int const shares = count > 4 ? 1 : count > 2 ? 2 : count > 1 || kPairs < 8 ? 4 : 8;
        for (int job = warp; job < count * shares; job += kWarps)
        {
            Item const items[1] = {item(job / shares, chunks)};
            attend<1>(items, job % shares, shares);
        }
    }

    // A row, and at most 16 of its heads that the block has.
    struct Item
    {
        int first; // packed row
        int heads;
        int count; // keys
        int key_at; // of half a warp's lanes: where the tile and row of a key of theirs lie, in the order of the text
        int swizzle; // of its chunks
    };

    __device__ __forceinline__ Item item(int index, int chunks) const
    {
        Segment const& s = range.at.segment;
        int const rows = w.p.rows;
        int const row = index / chunks;
        int const first_head = (max(first_packed - row, 0) + rows - 1) / rows + index % chunks * 16;
        int const past_head = min((first_packed + kRows - 1 - row) / rows + 1, w.group);
        int const base = s.length - s.rows;
        uint64_t const path = w.p.row_path ? paths()[row] : 0;
        int const position = max(position_of(w.p, s, row, path), 0);
        int const first = max(position - (kTail - 1), 0);
        int const count = position - first + 1;
        // Those behind the last have no weight, and are the last again.
        int const place = first + min(static_cast<int>(threadIdx.x) % 16, count - 1);
        int const key = w.p.row_path && place >= base ? base + nth_bit(path, place - base) : place;
        int const key_row = min(key, s.length - 1);
        int const tile_at = static_cast<int>(inputs.keys(stage_of(key_row / kTile)));
        return {first_head * rows + row - first_packed, min(max(past_head - first_head, 0), 16), count,
            tile_at + key_row % kTile * (kAtom * 2), key_row % 8};
    }

    // Logits of 16 keys: even and odd steps apart, so that more products are on their way.
    template <int kItems>
    __device__ __forceinline__ void multiply_keys(Item const (&items)[kItems], float (&x)[kItems][2][4]) const
    {
        int const lane = threadIdx.x % 32;
        int const other = lane / 16 * 8 + lane % 8; // the lane whose key this one loads of keys
        float odd[kItems][2][4] = {};
        int keys_at[kItems];
        int swizzle[kItems];
        int packed_row[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i)
        {
            keys_at[i] = __shfl_sync(0xffffffffu, items[i].key_at, other);
            swizzle[i] = __shfl_sync(0xffffffffu, items[i].swizzle, other);
            packed_row[i] = min(items[i].first + max(min(lane % 16, items[i].heads - 1), 0) * w.p.rows, kRows - 1);
#pragma unroll
            for (int n = 0; n < 2; ++n)
            {
                x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.f;
            }
        }
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
        {
            auto& sums = k % 2 == 0 ? x : odd;
#pragma unroll
            for (int i = 0; i < kItems; ++i)
            {
                uint32_t queries[4];
                uint32_t keys[4];
                load_matrices(queries, inputs.at + S::kQueriesAt + S::chunk_at(packed_row[i], 2 * k + lane / 16));
                load_matrices(keys, chunk_of(keys_at[i], swizzle[i], 2 * k + lane / 8 % 2));
                dflash::multiply_add<T>(sums[i][0], queries, keys[0], keys[1]);
                dflash::multiply_add<T>(sums[i][1], queries, keys[2], keys[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i)
        {
#pragma unroll
            for (int n = 0; n < 2; ++n)
            {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                {
                    bool const is_seen = n * 8 + lane % 4 * 2 + c % 2 < items[i].count;
                    x[i][n][c] = is_seen ? x[i][n][c] + odd[i][n][c] : -INFINITY;
                }
            }
        }
    }

    // The attention of rows to their tails; of columns, the share-th of so many parts.
    template <int kItems>
    __device__ __forceinline__ void attend(Item const (&items)[kItems], int share, int shares) const
    {
        float x[kItems][2][4];
        multiply_keys(items, x);
        uint32_t weights[kItems][4];
#pragma unroll
        for (int i = 0; i < kItems; ++i)
        {
            OnlineSoftmax<FlushingExp2> softmax;
            softmax.begin();
            float decay[2];
            softmax.advance(x[i], scale, decay);
            softmax.weigh(x[i][0], scale);
            softmax.weigh(x[i][1], scale);
            softmax.finish(scale);
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                int const head = threadIdx.x % 32 / 4 + r * 8;
                if (share == 0 && threadIdx.x % 4 == 0 && head < items[i].heads)
                {
                    sums()[items[i].first + head * w.p.rows] = {softmax.maximum[r], softmax.sum[r]};
                }
                weights[i][r] = packed<T>(x[i][0][2 * r], x[i][0][2 * r + 1]);
                weights[i][2 + r] = packed<T>(x[i][1][2 * r], x[i][1][2 * r + 1]);
            }
        }
        if constexpr (kItems > 1)
        {
            multiply_values<kPairs / 2, 2>(items, weights, 0);
        }
        else
        {
            switch (shares)
            {
            case 1: multiply_values<kPairs / 4, 4>(items, weights, 0); break;
            case 2: multiply_values<1, kPairs / 2>(items, weights, share); break;
            case 4: multiply_values<1, kPairs / 4>(items, weights, share); break;
            default: multiply_values<1, kPairs / 8 + (kPairs < 8)>(items, weights, share);
            }
        }
    }

    // Results of a share of pairs of fragments, kTogether of them at once.
    template <int kTimes, int kTogether, int kItems>
    __device__ __forceinline__ void multiply_values(
        Item const (&items)[kItems], uint32_t const (&weights)[kItems][4], int share) const
    {
        int const lane = threadIdx.x % 32;
#pragma unroll
        for (int time = 0; time < kTimes; ++time)
        {
            int const first_pair = (share * kTimes + time) * kTogether;
            uint32_t values[kTogether][kItems][4];
            float out[kTogether][kItems][2][4] = {};
#pragma unroll
            for (int pair = 0; pair < kTogether; ++pair)
            {
#pragma unroll
                for (int i = 0; i < kItems; ++i)
                {
                    load_matrices_transposed(values[pair][i],
                        chunk_of(items[i].key_at + S::kTileBytes, items[i].swizzle,
                            2 * (first_pair + pair) + lane / 16));
                }
            }
#pragma unroll
            for (int pair = 0; pair < kTogether; ++pair)
            {
#pragma unroll
                for (int i = 0; i < kItems; ++i)
                {
                    uint32_t const(&v)[4] = values[pair][i];
                    dflash::multiply_add<T>(out[pair][i][0], weights[i], v[0], v[1]);
                    dflash::multiply_add<T>(out[pair][i][1], weights[i], v[2], v[3]);
                }
            }
#pragma unroll
            for (int i = 0; i < kItems; ++i)
            {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                {
                    int const head = lane / 4 + r * 8;
                    if (head < items[i].heads)
                    {
                        float* const to = results() + place_of(items[i].first + head * w.p.rows) + first_pair * 16
                            + lane % 4 * 2;
#pragma unroll
                        for (int n = 0; n < 2 * kTogether; ++n)
                        {
                            float const(&y)[4] = out[n / 2][i][n % 2];
                            *reinterpret_cast<float2*>(to + n * 8) = {y[2 * r], y[2 * r + 1]};
                        }
                    }
                }
            }
        }
    }

    // Where a 16-byte chunk of a cache row lies. row_at: its tile and row.
    static __device__ __forceinline__ uint32_t chunk_of(int row_at, int swizzle, int chunk)
    {
        return static_cast<uint32_t>(row_at + chunk / 8 * S::kHalfBytes + (chunk % 8 ^ swizzle) * 16);
    }

    // A thread's two rows' results: of columns from the first fragment on.
    template <int N>
    __device__ __forceinline__ void read(
        int warp_row, int first_fragment, float (&x)[N][4], float (&maxima)[2], float (&sum)[2]) const
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            int const row = warp_row + threadIdx.x % 32 / 4 + r * 8;
            float2 const both = sums()[row];
            maxima[r] = both.x;
            sum[r] = both.y;
            float const* from = results() + place_of(row) + first_fragment * 8 + threadIdx.x % 4 * 2;
#pragma unroll
            for (int n = 0; n < N; ++n)
            {
                float2 const two = *reinterpret_cast<float2 const*>(from + n * 8);
                x[n][2 * r] = two.x;
                x[n][2 * r + 1] = two.y;
            }
        }
    }
};

#endif

} // namespace sm90
} // namespace dflash
