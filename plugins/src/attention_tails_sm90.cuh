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
#pragma unroll 1
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

    // By all warps, each with rows of its own; or where they are few, with columns of one. All in one loop, and loops
    // in it: code that is executed but once comes from memory, which takes longer than the turns.
    __device__ __forceinline__ void compute() const
    {
        int const rows = range.at.segment.rows;
        int const most_heads = min(head_of(w, kRows + w.p.rows - 1), w.group); // of a row, in this block
        int const shares = rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 || kPairs < 8 ? 4 : 8;
#pragma unroll 1
        for (int first_head = 0; first_head < most_heads; first_head += 16)
        {
#pragma unroll 1
            for (int job = threadIdx.x / 32; job < rows * shares; job += kConsumers / 32)
            {
                attend(item(job / shares, first_head), job % shares, shares);
            }
        }
    }

    // A row, and at most 16 of its heads that the block has.
    struct Item
    {
        int first; // packed row
        int heads;
        int count; // keys
        int key_at; // of half a warp's lanes: where the tile and row of a key of theirs lie, in the order of the text
    };

    // skipped_heads: of the row's in the block.
    __device__ __forceinline__ Item item(int row, int skipped_heads) const
    {
        Segment const& s = range.at.segment;
        int const rows = w.p.rows; // packed rows of one head
        int const first_head = head_of(w, max(first_packed - row, 0) + rows - 1) + skipped_heads;
        int const past_head = min(head_of(w, first_packed + kRows - 1 - row) + 1, w.group);
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
            tile_at + key_row % kTile * (kAtom * 2)};
    }

    // Logits of 16 keys: even and odd steps apart, so that more products are on their way.
    __device__ __forceinline__ void multiply_keys(Item const& item, float (&x)[2][4]) const
    {
        int const lane = threadIdx.x % 32;
        int const keys_at = __shfl_sync(0xffffffffu, item.key_at, lane / 16 * 8 + lane % 8); // whose key this one loads
        int const packed_row = min(item.first + max(min(lane % 16, item.heads - 1), 0) * w.p.rows, kRows - 1);
        int const queries_at = static_cast<int>(inputs.at) + S::kQueriesAt + packed_row * (kAtom * 2);
        float odd[2][4] = {};
#pragma unroll
        for (auto& four : x)
        {
            four[0] = four[1] = four[2] = four[3] = 0.f;
        }
#pragma unroll 1
        for (int first = 0; first < D / 16; first += 2)
        {
#pragma unroll
            for (int k = 0; k < 2; ++k)
            {
                auto& sums = k == 0 ? x : odd;
                uint32_t queries[4];
                uint32_t keys[4];
                load_matrices(queries, chunk_of(queries_at, 2 * (first + k) + lane / 16));
                load_matrices(keys, chunk_of(keys_at, 2 * (first + k) + lane / 8 % 2));
                dflash::multiply_add<T>(sums[0], queries, keys[0], keys[1]);
                dflash::multiply_add<T>(sums[1], queries, keys[2], keys[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
        {
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                bool const is_seen = n * 8 + lane % 4 * 2 + c % 2 < item.count;
                x[n][c] = is_seen ? x[n][c] + odd[n][c] : -INFINITY;
            }
        }
    }

    // The attention of a row to its tail; of columns, the share-th of so many parts.
    __device__ __forceinline__ void attend(Item const& item, int share, int shares) const
    {
        float x[2][4];
        multiply_keys(item, x);
        OnlineSoftmax<FlushingExp2> softmax;
        softmax.begin();
        float decay[2];
        softmax.advance(x, scale, decay);
        softmax.weigh(x[0], scale);
        softmax.weigh(x[1], scale);
        softmax.finish(scale);
        uint32_t weights[4];
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            int const head = threadIdx.x % 32 / 4 + r * 8;
            if (share == 0 && threadIdx.x % 4 == 0 && head < item.heads)
            {
                sums()[item.first + head * w.p.rows] = {softmax.maximum[r], softmax.sum[r]};
            }
            weights[r] = packed<T>(x[0][2 * r], x[0][2 * r + 1]);
            weights[2 + r] = packed<T>(x[1][2 * r], x[1][2 * r + 1]);
        }
        int const pairs = kPairs / shares;
#pragma unroll 1
        for (int pair = share * pairs; pair < (share + 1) * pairs; pair += kTogether)
        {
            multiply_values(item, weights, pair, (share + 1) * pairs - 1);
        }
    }

    static constexpr int kTogether = 2; // pairs of fragments

    // Results of the columns of some pairs of fragments; of those past the last, the last once more.
    __device__ __forceinline__ void multiply_values(
        Item const& item, uint32_t const (&weights)[4], int first_pair, int last_pair) const
    {
        int const lane = threadIdx.x % 32;
        uint32_t values[kTogether][4];
        float out[kTogether][2][4] = {};
#pragma unroll
        for (int n = 0; n < kTogether; ++n)
        {
            int const chunk = 2 * min(first_pair + n, last_pair) + lane / 16;
            load_matrices_transposed(values[n], chunk_of(item.key_at + S::kTileBytes, chunk));
        }
#pragma unroll
        for (int n = 0; n < kTogether; ++n)
        {
            dflash::multiply_add<T>(out[n][0], weights, values[n][0], values[n][1]);
            dflash::multiply_add<T>(out[n][1], weights, values[n][2], values[n][3]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            int const head = lane / 4 + r * 8;
            if (head < item.heads)
            {
                float* const to = results() + place_of(item.first + head * w.p.rows) + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 2 * kTogether; ++n)
                {
                    float const(&y)[4] = out[n / 2][n % 2];
                    float* const at = to + (2 * min(first_pair + n / 2, last_pair) + n % 2) * 8;
                    *reinterpret_cast<float2*>(at) = {y[2 * r], y[2 * r + 1]};
                }
            }
        }
    }

    // Where a 16-byte chunk of a row of a tile, or of queries, lies. row_at: its first 128 bytes, whose place in their
    // tile swizzles them.
    static __device__ __forceinline__ uint32_t chunk_of(int row_at, int chunk)
    {
        return static_cast<uint32_t>(row_at + chunk / 8 * S::kHalfBytes + (chunk % 8 ^ row_at / (kAtom * 2) % 8) * 16);
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
