// What a gated delta net's rows absorb at once, 16 at a time: where chunks lie, and what is known of them before the
// state has come to them.
//
// With the numbers of delta_net.cu, and W = (I + A)^-1 b E k, a chunk's writes and outputs are
//
//     U = (I + A)^-1 b v - W S;  o = E (q S) + (D (q k)) U,
//
// so that all but what is multiplied by S or U is made of all chunks at the same time. Only the state goes from chunk
// to chunk.
#pragma once

#include "delta_net_products.cuh"
#include "delta_net_rows.cuh"

namespace dflash
{
namespace delta
{

constexpr int kPromptThreads = 256;

// The place of a segment's first chunk. Segments have no place in common: of n rows one has at most n / 16 + 1 chunks.
__device__ __forceinline__ int first_place(int4 const& segment, int index)
{
    return segment.z / kDeltaRows + index;
}

// Likewise, places of all segments' chunks.
inline int count_places(dflash_delta_net_params const& p)
{
    return p.rows / kDeltaRows + p.segment_count;
}

// Numbers in scratch memory of a chunk and a key head, or a value head beside its values; see `PromptRange`.
constexpr int numbers_of_keys(int size)
{
    return 2 * kDeltaRows * size;
}

constexpr int numbers_of_values(int size)
{
    return kDeltaRows * size + kMixNumbers + 2 * kDeltaRows;
}

// Places whose chunks are taken together, and their numbers in scratch memory. Of a chunk these are, for each key head,
// its queries [D / 16, 16 rows, 16], in parts, and its keys as products take them; for each value head W, as queries
// are, a row of it by `1 / power_of_two(E)`, D (q k) [16, 16], E and what is left of each row behind the last; and,
// transposed, [D, 16 rows], at first what rows would write to a state of zeros, and then their outputs.
template <int kSize>
struct PromptRange
{
    static constexpr int kRowNumbers = kDeltaRows * kSize;
    static constexpr int kOfKeys = numbers_of_keys(kSize);
    static constexpr int kOfValues = numbers_of_values(kSize);

    float* memory;
    int first; // place
    int count;
    int key_heads;
    int value_heads;

    __device__ __forceinline__ float* of_keys(int place, int key_head) const
    {
        return memory + (int64_t{place - first} * key_heads + key_head) * kOfKeys;
    }

    __device__ __forceinline__ float* of_values(int place, int head) const
    {
        return memory + int64_t{count} * key_heads * kOfKeys
            + (int64_t{place - first} * value_heads + head) * kOfValues;
    }

    __device__ __forceinline__ float* values(int place, int head) const
    {
        int64_t const before = int64_t{count} * (int64_t{key_heads} * kOfKeys + int64_t{value_heads} * kOfValues);
        return memory + before + (int64_t{place - first} * value_heads + head) * kRowNumbers;
    }
};

// The chunk of a place: 16 rows or the last few that a segment's state absorbs at once.
struct PromptChunk
{
    int4 segment; // slot, start, first row, count
    int row; // of the segment
    int count; // of rows; 0: the place has none

    // By a whole warp.
    __device__ __forceinline__ PromptChunk(dflash_delta_net_params const& p, int place)
    {
        int4 const* const segments = reinterpret_cast<int4 const*>(p.segments);
        int const lane = threadIdx.x % 32;
        int found = 0; // segments that begin there or before
        for (int index = lane; index - lane < p.segment_count; index += 32)
        {
            bool const begins = index < p.segment_count && first_place(segments[index], index) <= place;
            found += __popc(__ballot_sync(0xffffffffu, begins));
        }
        segment = segments[found - 1];
        row = (place - first_place(segment, found - 1)) * kDeltaRows;
        count = min(max(count_absorbed(p, segment) - row, 0), kDeltaRows);
    }
};

// A block makes what is known of a chunk of one key head and its value heads, three of these at a time: a warp each
// finds what lies between rows, while the others keep what heads share.
template <typename T, int kSize>
struct PromptRows
{
    using Range = PromptRange<kSize>;

    static constexpr int kWarps = kPromptThreads / 32;
    static constexpr int kHeads = 3; // of which a block's numbers leave room for three others
    static constexpr int kOthers = kPromptThreads - 32 * kHeads; // threads
    static constexpr int kValueStride = kHeads * kSize;

    static constexpr int kStride = 2 * kSize + 4; // of a row: rows apart begin in other banks
    using Chunk = ChunkRows<T, kSize>;

    struct Shared
    {
        float rows[kDeltaRows * kStride]; // queries and keys
        float values[kDeltaRows * kValueStride];
        float products[2][kMix]; // k k, then q k
        float lower[kHeads][kMix]; // A transposed
        float solved[kHeads][2][kMixNumbers]; // (I + A)^-1 b, and that with E, scaled
    };

    dflash_delta_net_params const& p;
    Range const& range;
    Shared& shared;
    int const place;
    Chunk const chunk;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    // The values of heads from `head` on of the key head's, and, where they are the first ones, queries and keys.
    __device__ __forceinline__ void convolve(int head, int heads) const
    {
        int const end = (2 + head + heads) * Chunk::kItems;
#pragma unroll 1
        for (int index = (head == 0 ? 0 : 2 + head) * Chunk::kItems + threadIdx.x; index - lane < end;
            index += kPromptThreads)
        {
            auto const item = Chunk::item_of(p, chunk.key_head, p.value_heads / p.key_heads, min(index, end - 1));
            auto const taps = Chunk::load_taps(p, item);
            auto const inputs = chunk.load(item);
            bool const is_key = item.head < 2;
            int const stride = is_key ? kStride : kValueStride;
            float* const to = is_key ? shared.rows + item.head * kSize : shared.values + (item.head - 2 - head) * kSize;
#pragma unroll
            for (int i = 0; i < Chunk::kRows; ++i)
            {
                float4 const y = chunk.convolve(item, taps, inputs, i);
                float4 const by_length = Chunk::normed(item, y);
                if (index < end)
                {
                    *reinterpret_cast<float4*>(to + (item.row + i) * stride + item.number) = is_key ? by_length : y;
                }
            }
        }
    }

    // A thread two rows' products.
    __device__ __forceinline__ void multiply_keys() const
    {
        static_assert(kPromptThreads == kMixNumbers);
        int const row = threadIdx.x / kDeltaRows;
        float4 const* const queries = reinterpret_cast<float4 const*>(shared.rows + row * kStride);
        float4 const* const keys = queries + kSize / 4;
        float4 const* const others = reinterpret_cast<float4 const*>(shared.rows + chunk.column * kStride + kSize);
        float sums[2][4] = {};
#pragma unroll 4
        for (int i = 0; i < kSize / 4; ++i)
        {
            float4 const y = others[i];
            float4 const both[2] = {keys[i], queries[i]};
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                sums[j][0] = fmaf(both[j].x, y.x, sums[j][0]);
                sums[j][1] = fmaf(both[j].y, y.y, sums[j][1]);
                sums[j][2] = fmaf(both[j].z, y.z, sums[j][2]);
                sums[j][3] = fmaf(both[j].w, y.w, sums[j][3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
        {
            shared.products[j][row * kMixStride + chunk.column] = (sums[j][0] + sums[j][1]) + (sums[j][2] + sums[j][3]);
        }
    }

    __device__ __forceinline__ float key(int row, int number) const
    {
        return shared.rows[row * kStride + kSize + number];
    }

    // Keeps queries and keys for all value heads of the key head. By the warps that do not solve.
    __device__ __forceinline__ void keep_keys(int key_head) const
    {
        float* const to = range.of_keys(place, key_head);
        uint4* const queries = reinterpret_cast<uint4*>(to);
        float4* const keys = reinterpret_cast<float4*>(to + Range::kRowNumbers);
#pragma unroll
        for (int item = threadIdx.x - 32 * kHeads; item < Range::kRowNumbers / 4; item += kOthers)
        {
            int const row = item / 4 % kDeltaRows;
            int const number = item / (4 * kDeltaRows) * 16 + item % 4 * 4;
            float4 const* const from = reinterpret_cast<float4 const*>(shared.rows + row * kStride + number);
            queries[item] = FourParts::scaled(*from).words;
        }
#pragma unroll
        for (int item = threadIdx.x - 32 * kHeads; item < Range::kRowNumbers / 4; item += kOthers)
        {
            // Of a group's 16 keys, eight of the rows, and a lane: as `PromptStates::absorb` takes them.
            int const row = item / 32 % 2 * 8 + item % 4 * 2;
            int const number = item / 64 * 16 + item % 32 / 8 * 4 + item / 4 % 2;
            keys[item] = {key(row, number), key(row, number + 2), key(row + 1, number), key(row + 1, number + 2)};
        }
    }

    // By a warp: what lies between a value head's rows, and the inverse, of which each half of the warp makes one.
    __device__ __forceinline__ void solve(int head, typename Chunk::Gates const& gates) const
    {
        float const kept = product_to(gates.decay);
        float const behind = product_behind(gates.decay);
        float* const mix = range.of_values(place, head) + Range::kRowNumbers;
        if (lane < kDeltaRows)
        {
            mix[kMixNumbers + lane] = kept;
            mix[kMixNumbers + kDeltaRows + lane] = behind;
        }
        float* const lower = shared.lower[warp];
        auto const weights = chunk.weigh(gates, lower);
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            int const row = chunk.first_weighed() + i;
            int const at = row * kMixStride + chunk.column;
            lower[chunk.column * kMixStride + row] = weights.shared[i] * shared.products[0][at];
            mix[row * kDeltaRows + chunk.column] = weights.left[i] * shared.products[1][at];
        }
        __syncwarp();
        float inverse[kDeltaRows];
        chunk.invert(lower, inverse);
        bool const has_kept = lane >= kDeltaRows;
        float const by = gates.share * (has_kept ? kept : 1.f);
        float* const to = shared.solved[warp][lane / kDeltaRows] + lane % kDeltaRows;
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i)
        {
            float const of_row = 1.f / power_of_two(__shfl_sync(0xffffffffu, kept, i));
            to[i * kDeltaRows] = inverse[i] * by * (has_kept ? of_row : 1.f);
        }
    }

    // What the rows of value heads from `first` on write: a thread a key of W, or a value.
    __device__ __forceinline__ void write(int first, int heads) const
    {
#pragma unroll 1
        for (int item = threadIdx.x; item < heads * 2 * kSize; item += kPromptThreads)
        {
            int const head = item / (2 * kSize);
            int const number = item % kSize;
            bool const is_value = item % (2 * kSize) >= kSize;
            float const* const from = is_value ? shared.values + head * kSize + number : shared.rows + kSize + number;
            int const stride = is_value ? kValueStride : kStride;
            float x[kDeltaRows];
#pragma unroll
            for (int i = 0; i < kDeltaRows; ++i)
            {
                x[i] = from[i * stride];
            }
            float const* const mix = shared.solved[head][is_value ? 0 : 1];
            float* const values = range.values(place, first + head) + number * kDeltaRows;
            // Of two numbers side by side a thread has the high parts, the next one the low ones.
            uint32_t* const parts = reinterpret_cast<uint32_t*>(range.of_values(place, first + head))
                + number / 16 * 256 + number % 16 / 4 * 4 + number % 2 * 2 + number % 4 / 2;
#pragma unroll
            for (int begin = 0; begin < kDeltaRows; begin += 4)
            {
                float sums[4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
#pragma unroll
                    for (int j = 0; j <= begin; j += 4) // there is nothing above the diagonal
                    {
                        float4 const by = *reinterpret_cast<float4 const*>(mix + (begin + i) * kDeltaRows + j);
                        sums[i] = fmaf(by.x, x[j], sums[i]);
                        sums[i] = fmaf(by.y, x[j + 1], sums[i]);
                        sums[i] = fmaf(by.z, x[j + 2], sums[i]);
                        sums[i] = fmaf(by.w, x[j + 3], sums[i]);
                    }
                }
                if (is_value)
                {
                    *reinterpret_cast<float4*>(values + begin) = {sums[0], sums[1], sums[2], sums[3]};
                }
                if (kSize < 32 || !is_value) // whole warps
                {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                    {
                        float const own = sums[i] * kRowScale;
                        float const others = __shfl_xor_sync(0xffffffffu, own, 1);
                        bool const is_second = number % 2 != 0;
                        HalfParts const both(is_second ? others : own, is_second ? own : others);
                        if (!is_value)
                        {
                            parts[16 * (begin + i)] = is_second ? both.low : both.high;
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run(int key_head) const
    {
        int const begin = key_head * (p.value_heads / p.key_heads);
        int const end = begin + p.value_heads / p.key_heads;
        int first = begin;
        bool begins = true;
        do
        {
            int const heads = min(kHeads, end - first);
            bool const solves = warp < heads;
            typename Chunk::Gates gates = {};
            if (solves)
            {
                gates = chunk.gates_of(Chunk::load_rate(p, first + warp), chunk.load_projected(first + warp));
            }
            convolve(first - begin, heads);
            __syncthreads();
            if (begins)
            {
                multiply_keys();
                __syncthreads();
            }
            if (solves)
            {
                solve(first + warp, gates);
            }
            else if (begins && warp >= kHeads)
            {
                keep_keys(key_head);
            }
            __syncthreads();
            write(first, heads);
            __syncthreads();
            first += heads;
            begins = false;
        } while (first < end);
    }
};

} // namespace delta
} // namespace dflash
