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
    using Chunk = ChunkRows<T, kSize, 2>;
    static constexpr int kValueStride = kSize + 4; // rows apart begin in other banks
    static constexpr int kInputStride = kSize + 8; // likewise
    static constexpr int kCopy = 16 / static_cast<int>(sizeof(T)); // numbers that a copy takes
    static constexpr int kCopies = kSize / kCopy; // of a row
    static_assert(kBefore * kCopies <= kThreads && kSize <= kThreads);
    using State = StateTile<kSize, kSize>;

    struct Shared
    {
        typename Prepared::Keys rows;
        typename Prepared::Weights own;
        alignas(16) T inputs[kBefore + kDeltaRows][kInputStride]; // of the convolution, behind those before them
        alignas(16) T gates[kDeltaRows][kSize]; // of the outputs
        Vector<T, kTaps> taps[kSize];
        alignas(16) float values[kDeltaRows][kValueStride];
        float pending_keys[kDeltaRows][kValueStride];
        float pending_writes[kDeltaRows][kValueStride];
        float pending_behind[kDeltaRows]; // what is left of a row behind the last
        float squares[kWarps][kDeltaRows]; // sums over a warp's values
        uint64_t barrier; // of what is prepared
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
    uint32_t const barrier = shared_address(&shared.barrier);

    // Few enough states leave the L2 cache first: they are in the way of the next net's, and nobody needs them before
    // the next step. Of more than it holds one pushes the other out, which such a policy disturbs.
    __device__ __forceinline__ StateAccessByPolicy access() const
    {
        constexpr int kFitting = 64 * 1024 * 1024 / (4 * kSize * kSize); // measured with a cache of 50 MB
        return {place.p.segment_count * place.p.value_heads <= kFitting ? read_once_policy() : plain_policy()};
    }

    // Begins to copy what the convolution sees, what gates the outputs, and the accepted rows' keys and writes. Nothing
    // of it goes through registers: those are the state's, and the compiler moves what they get to others, which waits.
    __device__ __forceinline__ void stage_first() const
    {
        static_assert(kDeltaRows * kCopies % kThreads == 0);
#pragma unroll
        for (int i = 0; i < kDeltaRows * kCopies / kThreads; ++i)
        {
            int const item = static_cast<int>(threadIdx.x) + i * kThreads;
            int const row = item / kCopies;
            int const number = item % kCopies * kCopy;
            if (row < segment.count)
            {
                T const* const from = place.row(segment.first_row + row) + number;
                stage_16(&shared.inputs[kBefore + row][number], from + place.value_channel());
                stage_16(&shared.gates[row][number], from + place.channels() + place.first_value());
            }
        }
        if (threadIdx.x < kBefore * kCopies)
        {
            int const row = static_cast<int>(threadIdx.x) / kCopies;
            int const number = static_cast<int>(threadIdx.x) % kCopies * kCopy;
            int const at = segment.before + row;
            T const* const from = at < kBefore ? place.window_row(segment.slot, segment.window + at)
                                               : place.row(segment.first_row + row - kBefore);
            stage_16(
                &shared.inputs[row][number], from + place.value_channel() + number, at >= kBefore || !segment.begins);
        }
        if (threadIdx.x < kSize)
        {
            T const* const from = static_cast<T const*>(place.p.conv)
                + int64_t{place.value_channel() + static_cast<int>(threadIdx.x)} * kTaps;
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(&shared.taps[threadIdx.x])),
                "l"(from), "n"(kTaps * sizeof(T))
                : "memory");
        }
        int const rows = segment.count_taken();
#pragma unroll 1
        for (int item = threadIdx.x; item < rows * (kSize / 4); item += kThreads)
        {
            int const row = item / (kSize / 4);
            int const number = item % (kSize / 4) * 4;
            bool const is_there = row < segment.accepted;
            int const from = is_there ? row : 0;
            stage_16(&shared.pending_keys[row][number], place.keys(segment.slot, from) + number, is_there);
            stage_16(&shared.pending_writes[row][number], place.writes(segment.slot, from) + number, is_there);
        }
        commit_copies();
    }

    // Waits for what was prepared, and begins to copy it.
    __device__ __forceinline__ void stage_prepared(Prepared const& prepared) const
    {
        wait();
        if (threadIdx.x == 0)
        {
            auto const& rows = prepared.of_keys(blockIdx.z, place.key_head);
            auto const& own = prepared.of_values(blockIdx.z, place.head);
            expect_bytes(barrier, sizeof(rows) + sizeof(own));
            copy_bytes(shared_address(&shared.rows), &rows, sizeof(rows), barrier);
            copy_bytes(shared_address(&shared.own), &own, sizeof(own), barrier);
        }
    }

    // What the warp's values write of pending rows from `begin` on, by what is left of each row.
    __device__ __forceinline__ LeftParts pending_writes(int begin) const
    {
        int const row = begin + 2 * at.column;
        float const* const from = shared.pending_writes[row] + first + at.row;
        float const left[2] = {shared.pending_behind[row], shared.pending_behind[row + 1]};
        return {from[0] * left[0], from[kValueStride] * left[1], from[8] * left[0], from[kValueStride + 8] * left[1]};
    }

    // Leaves the state in memory, too.
    __device__ __forceinline__ void absorb_pending(State& state, int accepted, float* memory) const
    {
        LeftParts const left[2] = {pending_writes(0), pending_writes(8)};
        state.absorb(
            shared.pending_kept, accepted > 8, left, memory,
            [&](int half, int row, int key)
            {
                float const* const from = shared.pending_keys[8 * half + 2 * at.column + row] + key;
                return *reinterpret_cast<float2 const*>(from);
            },
            access());
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
        T* const window = place.window_row(segment.slot, 0) + place.value_channel();
#pragma unroll 1
        for (int item = threadIdx.x; item < (kBefore + segment.count) * kCopies; item += kThreads)
        {
            int const row = item / kCopies;
            int const number = item % kCopies * kCopy;
            *reinterpret_cast<uint4*>(window + int64_t{row} * place.channels() + number)
                = *reinterpret_cast<uint4 const*>(&shared.inputs[row][number]);
        }
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

    // Convolves the warp's values.
    __device__ __forceinline__ void convolve(Chunk const& chunk) const
    {
        typename Chunk::Item item;
        item.row = lane / 4 * Chunk::kRows;
        item.number = first + lane % 4 * Chunk::kLane;
        typename Chunk::Taps taps;
        typename Chunk::Inputs inputs;
#pragma unroll
        for (int i = 0; i < Chunk::kLane; ++i)
        {
            taps.at[i] = shared.taps[item.number + i];
        }
#pragma unroll
        for (int i = 0; i < kBefore + Chunk::kRows; ++i)
        {
            inputs.at[i] = load_vector<T, Chunk::kLane>(&shared.inputs[item.row + i][item.number]);
        }
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            *reinterpret_cast<float4*>(&shared.values[item.row + i][item.number])
                = chunk.convolve(item, taps, inputs, i);
        }
        __syncwarp();
    }

    // is_first: of the blocks that begin while rows are still prepared.
    __device__ __forceinline__ void run(Prepared const& prepared, Chunk const& chunk, bool is_first) const
    {
        if (threadIdx.x == 0)
        {
            init_barrier(barrier, 1);
            fence_barrier_inits();
        }
        bool const has_decays = warp == kWarps - 1 && lane < segment.accepted;
        float const decay = has_decays ? load_new(place.decay(segment.slot, lane)) : 1.f; // not behind the state
        stage_first();
        float* const memory = State::of_lane(place.state(segment.slot) + first * kSize);
        State state;
        if (segment.is_zero)
        {
            state.clear();
        }
        else
        {
            state.load(memory, access());
        }
        if (!is_first)
        {
            stage_prepared(prepared);
        }
        if (warp == kWarps - 1 && segment.accepted > 0)
        {
            multiply_pending(decay, shared.pending_behind, shared.pending_kept);
        }
        wait_for_copies<0>();
        __syncthreads();
        if (threadIdx.x == 0)
        {
            uint32_t const others = gridDim.x - 1; // a key head's value heads are side by side
            shared.is_last = count_reader(place.counter(segment.slot), others) == others;
        }
        convolve(chunk);
        if (is_first)
        {
            stage_prepared(prepared);
        }
        if (segment.accepted > 0)
        {
            absorb_pending(state, segment.accepted, memory);
        }
        typename State::Parts parts;
        state.split(parts);
        wait_for_phase(barrier, 0);
        TileNumbers of_keys = {};
        TileNumbers of_queries = {};
        State::read(parts, keys(), queries(), of_keys, of_queries);
        finish(of_keys, of_queries);
        keep();
    }
};

} // namespace delta
} // namespace dflash
