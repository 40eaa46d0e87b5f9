// A value head's state, which absorbs what was accepted of the rows beside it, and what new rows read, write and give.
#pragma once

#include "delta_net_prepared.cuh"
#include "launch.cuh"

namespace dflash
{
namespace delta
{

// A block has a value head of one segment, a warp all keys of 16 of its values: nothing of them leaves the warp's
// registers but what outputs are normed by.
template <typename T, int kSize>
struct HeadRows
{
    static constexpr int kWarps = kSize / 16;
    static constexpr int kThreads = 32 * kWarps;
    using Prepared = PreparedRows<kSize>;
    using Chunk = ChunkRows<T, kSize>;
    static constexpr int kValueStride = kSize + 4; // rows apart begin in other banks
    static_assert(Chunk::kItems <= kThreads);
    using State = StateTile<kSize, kSize>;

    struct Shared
    {
        typename Prepared::Keys rows;
        typename Prepared::Weights own;
        float values[kDeltaRows][kValueStride];
        float pending_keys[kDeltaRows][kValueStride];
        float pending_writes[kDeltaRows][kValueStride];
        float pending_behind[kDeltaRows]; // what is left of a row behind the last
        float squares[kWarps][kDeltaRows]; // sums over a warp's values
        T gates[kDeltaRows][kSize]; // of the outputs
        uint64_t barriers[2]; // of what was there before, and of what is prepared
        float pending_kept; // of the state behind the pending rows
        int is_last; // of the blocks that read what value heads share
    };

    Place<T, kSize> const& place;
    Segment const& segment;
    Shared& shared;
    DeltaLane const at;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const first = warp * 16; // of the warp's values
    uint32_t const barrier = shared_address(shared.barriers);

    // A thread for all.
    __device__ __forceinline__ void make_barriers() const
    {
        if (threadIdx.x == 0)
        {
            init_barrier(barrier, 1);
            init_barrier(barrier + 8, 1);
            fence_barrier_inits();
        }
        __syncthreads();
    }

    // Begins to copy the accepted rows' keys and writes, and what gates the outputs: a warp some rows, a lane one.
    __device__ __forceinline__ void stage_first() const
    {
        constexpr int kGateBytes = kSize * static_cast<int>(sizeof(T));
        constexpr int kBytes = kSize * static_cast<int>(sizeof(float));
        if (threadIdx.x == 0)
        {
            expect_bytes(barrier, segment.count * kGateBytes + segment.accepted * 2 * kBytes);
        }
        constexpr int kRowsOfWarp = kDeltaRows / kWarps;
        int const row = warp * kRowsOfWarp + lane % kRowsOfWarp;
        int const what = lane / kRowsOfWarp;
        if (what == 0 && row < segment.accepted)
        {
            copy_bytes(shared_address(shared.pending_keys[row]), place.keys(segment.slot, row), kBytes, barrier);
        }
        if (what == 1 && row < segment.accepted)
        {
            copy_bytes(shared_address(shared.pending_writes[row]), place.writes(segment.slot, row), kBytes, barrier);
        }
        if (what == 1 && row < segment.count)
        {
            T const* const from = place.row(segment.first_row + row) + place.channels() + place.first_value();
            copy_bytes(shared_address(shared.gates[row]), from, kGateBytes, barrier);
        }
    }

    // Waits for what was prepared, and begins to copy it.
    __device__ __forceinline__ void stage_prepared(Prepared const& prepared) const
    {
        wait();
        if (threadIdx.x == 0)
        {
            auto const& rows = prepared.of_keys(blockIdx.z, place.key_head);
            auto const& own = prepared.of_values(blockIdx.z, place.head);
            expect_bytes(barrier + 8, sizeof(rows) + sizeof(own));
            copy_bytes(shared_address(&shared.rows), &rows, sizeof(rows), barrier + 8);
            copy_bytes(shared_address(&shared.own), &own, sizeof(own), barrier + 8);
        }
    }

    // Zeros for rows that were not accepted, up to those whose products are not taken.
    __device__ __forceinline__ void clear_pending(int accepted) const
    {
        int const rows = (accepted > kDeltaRows / 2 ? kDeltaRows : kDeltaRows / 2) - accepted;
#pragma unroll 1
        for (int item = threadIdx.x; item < rows * (kSize / 4); item += kThreads)
        {
            int const row = accepted + item / (kSize / 4);
            int const number = item % (kSize / 4) * 4;
            *reinterpret_cast<float4*>(&shared.pending_keys[row][number]) = {};
            *reinterpret_cast<float4*>(&shared.pending_writes[row][number]) = {};
        }
    }

    // By a warp.
    __device__ __forceinline__ void multiply_pending_decays() const
    {
        float const decay = lane < segment.accepted ? load_new(place.decay(segment.slot, lane)) : 1.f;
        multiply_pending(decay, shared.pending_behind, shared.pending_kept);
    }

    // What the warp's values write of pending rows from `begin` on, by what is left of each row.
    __device__ __forceinline__ LeftParts pending_writes(int begin) const
    {
        int const row = begin + 2 * at.column;
        float const* const from = shared.pending_writes[row] + first + at.row;
        float const left[2] = {shared.pending_behind[row], shared.pending_behind[row + 1]};
        return {from[0] * left[0], from[kValueStride] * left[1], from[8] * left[0], from[kValueStride + 8] * left[1]};
    }

    __device__ __forceinline__ void absorb_pending(State& state, int accepted) const
    {
        LeftParts const left[2] = {pending_writes(0), pending_writes(8)};
        state.absorb(shared.pending_kept, accepted > 8, left,
            [&](int half, int key)
            {
                float const* const from = &shared.pending_keys[8 * half + 2 * at.column][key];
                return RightParts(float2{from[0], from[kValueStride]});
            });
    }

    __device__ __forceinline__ SplitRows<kSize> keys() const
    {
        return {shared.rows.keys};
    }

    __device__ __forceinline__ SplitRows<kSize> queries() const
    {
        return {shared.rows.queries};
    }

    __device__ __forceinline__ int row(int i, int j) const
    {
        return 8 * i + 2 * at.column + j % 2;
    }

    __device__ __forceinline__ int value(int j) const
    {
        return first + at.row + j / 2 * 8;
    }

    // Computes what rows write of what the state gives their keys.
    __device__ __forceinline__ void write(TileNumbers const& of_keys, TileNumbers& writes) const
    {
        TileNumbers missing;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                missing[i][j] = shared.values[row(i, j)][value(j)] - shared.own.kept[row(i, j)] * of_keys[i][j];
                writes[i][j] = 0.f;
            }
        }
        add_mixed<kMixStride>(missing, shared.own.solved, writes);
        float* const to = place.writes(segment.slot, row(0, 0)) + value(0);
        store_rows(writes, segment.count, to, place.values_of_row());
    }

    // Sums of the squares of the warp's values, for all warps.
    __device__ __forceinline__ void sum_squares(TileNumbers const& out) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                float sum = out[i][j] * out[i][j] + out[i][j + 2] * out[i][j + 2];
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2)
                {
                    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
                }
                if (at.row == 0)
                {
                    shared.squares[first / 16][row(i, j)] = sum;
                }
            }
        }
    }

    // Norms and gates the outputs, once all warps' squares are there.
    __device__ __forceinline__ void give(float const (&norm)[2], TileNumbers const& out) const
    {
        float squares[2][2];
        add_squares(shared.squares, squares);
        int64_t const begins = int64_t{segment.first_row + row(0, 0)} * place.values_of_row();
        T* const to = static_cast<T*>(place.p.out) + begins + place.first_value() + value(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                float const root = rsqrtf(squares[i][j] / static_cast<float>(kSize) + place.p.norm_eps);
                if (row(i, j) < segment.count)
                {
#pragma unroll
                    for (int k = j; k < 4; k += 2)
                    {
                        float const gate = to_float(shared.gates[row(i, j)][value(k)]);
                        to[(8 * i + j) * place.values_of_row() + k / 2 * 8]
                            = from_float<T>(out[i][k] * root * norm[k / 2] * quick_silu(gate));
                    }
                }
            }
        }
    }

    // of_keys and of_queries: what the state gives the rows.
    __device__ __forceinline__ void finish(TileNumbers const& of_keys, TileNumbers const& of_queries) const
    {
        float norm[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            norm[i] = static_cast<float const*>(place.p.norm)[value(2 * i)];
        }
        TileNumbers writes;
        write(of_keys, writes);
        TileNumbers out;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                out[i][j] = shared.own.kept[row(i, j)] * of_queries[i][j];
            }
        }
        add_mixed<kMixStride>(writes, shared.own.reads, out);
        sum_squares(out);
        __syncthreads();
        give(norm, out);
    }

    // Keeps beside the state what the next step needs; keys by the last block that has read those before them.
    __device__ __forceinline__ void keep() const
    {
        if (threadIdx.x < segment.count)
        {
            *place.decay(segment.slot, threadIdx.x) = shared.own.decays[threadIdx.x];
        }
#pragma unroll 1
        for (int item = threadIdx.x; shared.is_last && item < kSize / 4 * segment.count; item += kThreads)
        {
            int const row = item / (kSize / 4);
            int const number = item % (kSize / 4) * 4;
            *reinterpret_cast<float4*>(place.keys(segment.slot, row) + number) = keys().load(row, number);
        }
    }

    // Convolves the head's values, once what was before them may be written over.
    __device__ __forceinline__ void convolve(Chunk const& chunk, typename Chunk::Item const& channels,
        typename Chunk::Taps const& taps, typename Chunk::Inputs const& inputs) const
    {
        chunk.keep(channels, inputs);
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            *reinterpret_cast<float4*>(&shared.values[channels.row + i][channels.number])
                = chunk.convolve(channels, taps, inputs, i);
        }
    }

    // is_first: of the blocks that begin while rows are still prepared; these absorb meanwhile.
    __device__ __forceinline__ void run(Prepared const& prepared, Chunk const& chunk, int head, bool is_first) const
    {
        bool const convolves = threadIdx.x < Chunk::kItems;
        auto const channels = Chunk::item_of(place.p, place.key_head, gridDim.x,
            (2 + head) * Chunk::kItems + static_cast<int>(threadIdx.x % Chunk::kItems));
        typename Chunk::Taps taps = {};
        typename Chunk::Inputs inputs = {};
        if (convolves)
        {
            taps = Chunk::load_taps(place.p, channels);
            inputs = chunk.load(channels);
        }
        float* const memory = place.state(segment.slot) + first * kSize;
        State state;
        if (segment.is_zero)
        {
            state.clear();
        }
        else
        {
            state.load(memory);
        }
        make_barriers();
        stage_first();
        if (!is_first)
        {
            stage_prepared(prepared);
        }
        if (segment.accepted > 0)
        {
            if (warp == kWarps - 1)
            {
                multiply_pending_decays();
            }
            clear_pending(segment.accepted);
        }
        if (convolves)
        {
            convolve(chunk, channels, taps, inputs);
        }
        __syncthreads();
        wait_for_phase(barrier, 0);
        if (threadIdx.x == 0)
        {
            uint32_t const others = gridDim.x - 1; // a key head's value heads are side by side
            shared.is_last = count_reader(place.counter(segment.slot), others) == others;
        }
        if (segment.accepted > 0)
        {
            absorb_pending(state, segment.accepted);
            state.store(memory);
        }
        typename State::Parts parts;
        state.split(parts);
        if (is_first)
        {
            stage_prepared(prepared);
        }
        wait_for_phase(barrier + 8, 0);
        TileNumbers of_keys = {};
        TileNumbers of_queries = {};
        State::read(parts, keys(), queries(), of_keys, of_queries);
        finish(of_keys, of_queries);
        keep();
    }
};

} // namespace delta
} // namespace dflash
