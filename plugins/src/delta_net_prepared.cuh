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
        return static_cast<Keys*>(memory)[segment * key_heads + key_head];
    }

    __device__ __forceinline__ Weights& of_values(int segment, int head) const
    {
        auto* const behind = static_cast<Keys*>(memory) + segments * key_heads;
        return reinterpret_cast<Weights*>(behind)[segment * value_heads + head];
    }

    size_t bytes() const
    {
        return size_t(segments) * (key_heads * sizeof(Keys) + value_heads * sizeof(Weights));
    }
};

// A block prepares a segment's rows of one key head: some warps convolve queries and keys and multiply them, meanwhile
// others make what value heads weigh these products by.
template <typename T, int kSize>
struct Preparation
{
    using Chunk = ChunkRows<T, kSize>;
    using Prepared = PreparedRows<kSize>;
    static constexpr int kRowWarps = (2 * Chunk::kItems + 31) / 32;
    static constexpr int kMostSolving = 4; // warps
    static constexpr int kThreads = 32 * (kRowWarps + kMostSolving);
    static constexpr int kProducts = 8; // of keys and queries by keys

    // Barriers, and the threads that meet there.
    static constexpr int kRowsAreThere = 1;
    static constexpr int kUntilRows = 32 * kRowWarps;
    static constexpr int kProductsAreThere = 2;

    struct alignas(16) Shared
    {
        uint32_t rows[2][SplitRows<kSize>::kWords]; // keys, and queries
        typename Chunk::Products products;
        alignas(16) float lower[kMostSolving][kMix]; // A transposed
    };

    dflash_delta_net_params const& p;
    Prepared const& prepared;
    Shared& shared;
    int const index; // of the segment
    int const key_head;
    int const heads; // of a key head
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    // The next kernel begins behind this one's wait: before its own it may read all that the kernels before this one
    // wrote, and write where they read: states, values' windows, outputs.
    __device__ __forceinline__ static void wait_for_all()
    {
        wait();
        trigger();
    }

    __device__ __forceinline__ int solving() const
    {
        return min(heads, kMostSolving);
    }

    __device__ __forceinline__ int until_products() const
    {
        return 32 * (kRowWarps + solving());
    }

    __device__ __forceinline__ void run() const
    {
        Guess const guess(p, index);
        if (warp < kRowWarps)
        {
            run_rows(guess);
        }
        else if (warp < kRowWarps + solving())
        {
            solve(guess, warp - kRowWarps);
        }
        else
        {
            wait_for_all();
        }
    }

    // -- queries and keys ---------------------------------------------------------------------------------------------

    __device__ __forceinline__ void run_rows(Guess const& guess) const
    {
        auto const item = Chunk::item_of(p, key_head, heads, min(static_cast<int>(threadIdx.x), 2 * Chunk::kItems - 1));
        bool const is_there = threadIdx.x < 2 * Chunk::kItems;
        auto const taps = Chunk::load_taps(p, item);
        typename Chunk::Inputs inputs;
        SegmentSource const source(guess, index);
        Segment const whole = Chunk::load_pending(guess, wait_for_all, source, key_head, item, inputs);
        if (whole.count <= 0)
        {
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        chunk.clear_before(item, inputs);
        auto& kept = prepared.of_keys(index, key_head);
        SplitRows<kSize> const to[2] = {{shared.rows[item.head == 0]}, {item.head == 0 ? kept.queries : kept.keys}};
        float4 rows[Chunk::kRows];
        chunk.convolve_normed(item, taps, inputs, rows);
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            FourParts const parts(rows[i]);
            if (is_there)
            {
                to[0].store(item.row + i, item.number, parts);
                to[1].store(item.row + i, item.number, parts);
            }
        }
        meet(kRowsAreThere, kUntilRows);
        for (int part = warp; part < kProducts; part += kRowWarps)
        {
            multiply_keys(part);
        }
        report(kProductsAreThere, until_products());
        if (is_there)
        {
            chunk.keep(item, inputs); // all have been loaded
        }
    }

    // Multiplies keys and queries by keys: an item is 8 columns of one of both, over half of the numbers.
    __device__ __forceinline__ void multiply_keys(int item) const
    {
        int const columns = item % 2 * 8;
        bool const is_query = item / 2 % 2;
        SplitRows<kSize> const left{shared.rows[is_query]};
        float* const to = shared.products[item / 4][is_query] + columns;
        multiply_rows<kSize, 2>(left, {shared.rows[0]}, columns, item / 4, to, kMixStride);
    }

    // -- what lies between rows, of every kMostSolving-th value head, by a warp ---------------------------------------

    __device__ __forceinline__ void solve(Guess const& guess, int solver) const
    {
        int const first = key_head * heads;
        auto rate = Chunk::load_rate(p, first + solver);
        typename Chunk::ProjectedAt projected_at;
        typename Chunk::Projected projected;
        Segment const whole = guess.load(
            wait_for_all, [&](Segment const& segment)
            { projected_at = Chunk::pending(p, segment, key_head).find_projected(first + solver); },
            [&] { projected = Chunk::load_projected(projected_at); }, SegmentSource(guess, index));
        if (whole.count <= 0)
        {
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
#pragma unroll 1
        for (int head = solver; head < heads; head += kMostSolving)
        {
            if (head > solver)
            {
                rate = Chunk::load_rate(p, first + head);
                projected = chunk.load_projected(first + head);
                __syncwarp(); // what lies between the rows has been read
            }
            auto& to = prepared.of_values(index, first + head);
            auto const gates = chunk.gates_of(rate, projected);
            float const kept = product_to(gates.decay);
            if (lane < kDeltaRows)
            {
                to.kept[lane] = kept;
                to.decays[lane] = gates.decay;
            }
            auto const weights = chunk.weigh(gates, shared.lower[solver]);
            if (head == solver)
            {
                meet(kProductsAreThere, until_products());
            }
            chunk.weigh_reads(weights, shared.products, to.reads);
            chunk.solve(weights, gates.share, shared.products, shared.lower[solver], to.solved);
        }
    }
};

} // namespace delta
} // namespace dflash
