// A gated delta net's rows that stay pending, as far as they can be prepared without the state.
#pragma once

#include "delta_net_products.cuh"
#include "delta_net_rows.cuh"

namespace dflash
{
namespace delta
{

// Scratch memory, laid out as the shared memory that it is copied into: of each segment and key head its rows' keys and
// queries, normed, in parts; of each value head what lies between its rows, and their decays.
template <int kSize>
struct PreparedRows
{

    struct alignas(16) Keys // as bulk copies take it
    {
        uint32_t keys[SplitRows<kSize>::kWords];
        uint32_t queries[SplitRows<kSize>::kWords];
    };

    struct alignas(16) Weights
    {
        float solved[kMix]; // (I + A)^-1 b
        float reads[kMix]; // D (q k)
        float kept[kDeltaRows]; // E
        float decays[kDeltaRows];
    };

    void* memory;
    int segments;
    int key_heads;
    int value_heads;

    __device__ __forceinline__ Keys& of_keys(int segment, int key_head) const
    {
        return static_cast<Keys*>(memory)[int64_t{segment} * key_heads + key_head];
    }

    __device__ __forceinline__ Weights& of_values(int segment, int head) const
    {
        auto* const behind = static_cast<Keys*>(memory) + int64_t{segments} * key_heads;
        return reinterpret_cast<Weights*>(behind)[int64_t{segment} * value_heads + head];
    }

    size_t bytes() const
    {
        return size_t(segments) * (key_heads * sizeof(Keys) + value_heads * sizeof(Weights));
    }
};

// A block prepares a segment's rows of one key head.
template <typename T, int kSize>
struct Preparation
{
    using Chunk = ChunkRows<T, kSize>;
    using Prepared = PreparedRows<kSize>;
    static constexpr int kThreads = 256;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kMostSolving = 4; // warps
    static constexpr int kProducts = 8; // of keys and queries by keys
    static_assert(2 * Chunk::kItems <= kThreads);

    struct alignas(16) Shared
    {
        uint32_t keys[SplitRows<kSize>::kWords];
        uint32_t queries[SplitRows<kSize>::kWords];
        typename Chunk::Products products;
        alignas(16) float lower[kMostSolving][kMix]; // A transposed
    };

    // What does not wait for the kernels before this one: which numbers a thread convolves, and by which weights.
    struct Ahead
    {
        typename Chunk::Item item;
        typename Chunk::Taps taps;
    };

    Prepared const& prepared;
    Shared& shared;
    int const index; // of the segment
    int const heads; // of a key head
    Chunk const chunk;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    __device__ __forceinline__ static Ahead load_ahead(dflash_delta_net_params const& p, int key_head, int heads)
    {
        int const index = min(static_cast<int>(threadIdx.x), 2 * Chunk::kItems - 1);
        auto const item = Chunk::item_of(p, key_head, heads, index);
        return {item, Chunk::load_taps(p, item)};
    }

    __device__ __forceinline__ typename Prepared::Weights& of_head(int head) const
    {
        return prepared.of_values(index, first_head() + head);
    }

    __device__ __forceinline__ int first_head() const
    {
        return chunk.key_head * heads;
    }

    __device__ __forceinline__ void prepare_keys(Ahead const& ahead) const
    {
        auto const& item = ahead.item;
        auto const inputs = chunk.load(item);
        __syncthreads(); // all have been loaded
        bool const is_there = threadIdx.x < 2 * Chunk::kItems;
        if (is_there)
        {
            chunk.keep(item, inputs);
        }
        auto& kept = prepared.of_keys(index, chunk.key_head);
        SplitRows<kSize> const to[2]
            = {{item.head == 0 ? shared.queries : shared.keys}, {item.head == 0 ? kept.queries : kept.keys}};
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            FourParts const parts(Chunk::normed(item, chunk.convolve(item, ahead.taps, inputs, i)));
            if (is_there)
            {
                to[0].store(item.row + i, item.number, parts);
                to[1].store(item.row + i, item.number, parts);
            }
        }
    }

    // Multiplies keys and queries by keys: an item is 8 columns of one of both, over half of the numbers.
    __device__ __forceinline__ void multiply_keys(int item) const
    {
        int const columns = item % 2 * 8;
        bool const is_query = item / 2 % 2;
        SplitRows<kSize> const left{is_query ? shared.queries : shared.keys};
        float* const to = shared.products[item / 4][is_query] + columns;
        multiply_rows<kSize, 2>(left, {shared.keys}, columns, item / 4, to, kMixStride);
    }

    // By a warp: what lies between a value head's rows, and the inverse.
    __device__ __forceinline__ void solve(
        int head, typename Chunk::Gates const& gates, typename Chunk::Weights const& weights) const
    {
        auto& to = of_head(head);
        chunk.solve(weights, gates.share, shared.products, shared.lower[warp], to.reads, to.solved);
        __syncwarp(); // what lies between the rows has been read
    }

    __device__ __forceinline__ typename Chunk::Gates make_gates(
        int head, typename Chunk::Projected const& projected) const
    {
        auto const gates = chunk.gates_of(Chunk::load_rate(chunk.p, first_head() + head), projected);
        float const kept = product_to(gates.decay);
        if (lane < kDeltaRows)
        {
            of_head(head).kept[lane] = kept;
            of_head(head).decays[lane] = gates.decay;
        }
        return gates;
    }

    // Once keys and queries are there, some warps make what value heads weigh their products by, and the others these.
    __device__ __forceinline__ void run(Ahead const& ahead) const
    {
        int const solving = min(heads, kMostSolving);
        bool const solves = warp < solving;
        typename Chunk::Projected projected = {};
        if (solves)
        {
            projected = chunk.load_projected(first_head() + warp);
        }
        prepare_keys(ahead);
        __syncthreads();
        typename Chunk::Gates gates = {};
        typename Chunk::Weights weights = {};
        if (solves)
        {
            gates = make_gates(warp, projected);
            weights = chunk.weigh(gates);
        }
        for (int item = warp - solving; !solves && item < kProducts; item += kWarps - solving)
        {
            multiply_keys(item);
        }
        __syncthreads();
        if (solves)
        {
            solve(warp, gates, weights);
        }
        for (int head = warp + solving; solves && head < heads; head += solving)
        {
            gates = make_gates(head, chunk.load_projected(first_head() + head));
            solve(head, gates, chunk.weigh(gates));
        }
    }
};

} // namespace delta
} // namespace dflash
