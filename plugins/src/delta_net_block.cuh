// A block of the gated delta net's kernel: some values of a head, of one segment.
#pragma once

#include "delta_net_finish.cuh"
#include "delta_net_rows.cuh"
#include "delta_net_solver.cuh"

namespace dflash
{
namespace delta
{

__device__ __forceinline__ void prefetch(void const* from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

template <typename T, int kSize, int kBlockValues>
struct Block
{
    using D = Division<T, kSize, kBlockValues>;
    using S = Shared<T, kSize, kBlockValues>;

    Place<T, kSize, kBlockValues> const& place;
    S const& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const tile = warp % D::kTiles; // of the values: 16
    int const part = warp / D::kTiles; // of the keys
    Rows<T, kSize, kBlockValues> const rows{place, shared};
    Solver<T, kSize, kBlockValues> const solver{place, shared};
    Finish<T, kSize, kBlockValues> const finish{place, shared};

    // What a thread has of the weights.
    struct Ahead
    {
        typename Rows<T, kSize, kBlockValues>::Weights weights;
        typename Solver<T, kSize, kBlockValues>::Rate rate;
        float norm[D::kOfLane];
    };

    __device__ __forceinline__ bool is_solver() const
    {
        return warp == D::kWarps;
    }

    // What does not wait for the kernels before this one: weights, and what memory sends to the L2.
    __device__ __forceinline__ Ahead begin_ahead() const
    {
        if (threadIdx.x == 0 && D::kSplits > 1)
        {
            init_barrier(shared.squares_barrier(0), 1);
            init_barrier(shared.squares_barrier(1), 1);
            fence_barrier_inits();
        }
        __syncwarp();
        if (D::kSplits > 1)
        {
            arrive_at_cluster();
        }
        Ahead ahead = {};
        if (is_solver())
        {
            ahead.rate = solver.load_rate();
            prefetch_state();
        }
        else
        {
            rows.load_weights(warp, ahead.weights);
#pragma unroll
            for (int j = 0; j < D::kOfLane; ++j)
            {
                ahead.norm[j] = static_cast<float const*>(place.p.norm)[place.split * D::kValues + finish.value(j)];
            }
        }
        return ahead;
    }

    // The slot of the block's segment, as memory has it already: whoever writes it may not be done yet.
    __device__ __forceinline__ int guess_slot() const
    {
        int const slot = *static_cast<int const volatile*>(place.p.segments + 4 * blockIdx.y);
        return min(max(slot, 0), place.p.slots - 1);
    }

    // Likewise, where the numbers lie that its rows need: those that say it are read again.
    __device__ __forceinline__ void prefetch_state() const
    {
        int const volatile* const at = place.p.segments + 4 * blockIdx.y;
        int4 const guess = {guess_slot(), at[1], at[2], at[3]};
        if (guess.w <= 0)
        {
            return;
        }
        Segment const segment(place.p, guess, *static_cast<int const volatile*>(place.p.lengths + guess.x));
        constexpr int kShare = kSize / D::kSplits; // of the keys, that this block of the cluster asks for
        int const first = place.split * kShare;
        if (!segment.is_zero && lane == 0)
        {
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(place.state(segment.slot)),
                "r"(4 * D::kValues * kSize));
        }
        if (lane < segment.accepted)
        {
            prefetch(place.keys(segment.slot, lane) + first);
            prefetch(place.writes(segment.slot, lane));
            prefetch(place.decay(segment.slot, lane));
        }
        if (lane < kBefore && !segment.begins)
        {
            T const* const window = place.window_row(segment.slot, segment.accepted + lane);
            prefetch(window + place.query_channel() + first);
            prefetch(window + place.key_channel() + first);
            prefetch(window + place.value_channel());
        }
    }

    // Multiplies keys and queries by keys. By items of 8 columns of one of both, over half of the numbers.
    __device__ __forceinline__ void multiply_keys() const
    {
        DeltaLane const at;
        for (int item = warp; item < 8; item += D::kWarps)
        {
            int const columns = item % 2;
            bool const is_query = item / 2 % 2;
            int const half_of_keys = item / 4;
            SplitRows<kSize> const left = shared.rows(is_query);
            float sums[3][4] = {}; // each of one of the three products
#pragma unroll
            for (int group = 0; group < kSize / 16; group += 2)
            {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    int const own = group + half_of_keys;
                    if (own < kSize / 16)
                    {
                        uint4 const above = left.pair(at.row, own, half, at.column);
                        uint4 const below = left.pair(at.row + 8, own, half, at.column);
                        uint4 const right = shared.keys.pair(8 * columns + at.row, own, half, at.column);
                        uint32_t const high[4] = {above.x, below.x, above.y, below.y};
                        uint32_t const low[4] = {above.z, below.z, above.w, below.w};
                        multiply_tf32(sums[0], low, right.x, right.y);
                        multiply_tf32(sums[1], high, right.z, right.w);
                        multiply_tf32(sums[2], high, right.x, right.y);
                    }
                }
            }
            float* const to = shared.products + (2 * half_of_keys + is_query) * S::kMix + at.row * kMixStride
                + 8 * columns + 2 * at.column;
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                float const first = sums[0][2 * below] + sums[1][2 * below] + sums[2][2 * below];
                float const second = sums[0][2 * below + 1] + sums[1][2 * below + 1] + sums[2][2 * below + 1];
                *reinterpret_cast<float2*>(to + below * 8 * kMixStride) = {first, second};
            }
        }
    }

    using State = StateTile<kSize, D::kPartKeys>;

    __device__ __forceinline__ float* state(Segment const& segment) const
    {
        return place.state(segment.slot) + tile * 16 * kSize + part * D::kPartKeys;
    }

    __device__ __forceinline__ void absorb_pending(State& state) const
    {
        float const* const keys = shared.parts + part * S::kPart;
        float const* const writes = shared.writes + 16 * tile;
        state.absorb(
            *shared.pending_kept,
            [&](int row, int of) { return writes[row * S::kValueStride + of] * shared.pending_behind[row]; },
            [&](int row, int key) { return keys[row * S::kKeyStride + key]; });
    }

    __device__ __forceinline__ void absorb(State& state) const
    {
        float const* const writes = shared.writes + 16 * tile;
        state.absorb(
            shared.kept[kDeltaRows - 1],
            [&](int row, int of) { return writes[row * S::kValueStride + of] * shared.behind[row]; },
            [&](int row, int key) { return shared.keys.number(row, part * D::kPartKeys + key); });
    }

    // Reads what the warp's keys have of the rows' keys and queries.
    __device__ __forceinline__ void read(State const& state) const
    {
        DeltaLane const at;
        float sums[4][4] = {};
        state.read(shared.keys, shared.queries, part * State::kGroups, sums);
        // The pending rows' keys lay there: of this part both warps have read them.
        if (D::kTiles > 1)
        {
            asm volatile("bar.sync %0, %1;" ::"r"(kPartMeets + part), "n"(32 * D::kTiles) : "memory");
        }
        else
        {
            __syncwarp();
        }
        float* const to = shared.parts + part * S::kPart + 2 * at.column * S::kValueStride + 16 * tile + at.row;
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                to[(8 * i + j % 2) * S::kValueStride + j / 2 * 8] = sums[i][j];
            }
        }
    }

    // Says whether this block is the last that has read what a key head's value heads share. By one thread.
    __device__ __forceinline__ void note_last(Segment const& segment, int before) const
    {
        bool const is_last = before == place.p.value_heads / place.p.key_heads * D::kSplits - 1;
        if (is_last)
        {
            *place.counter(segment.slot) = 0;
        }
        *shared.is_last = is_last;
    }

    // All threads, wherever they are in the code.
    __device__ __forceinline__ static void meet_all()
    {
        meet<0, D::kThreads>();
    }

    __device__ __forceinline__ void stage_first(Segment const& segment) const
    {
        rows.stage(segment, 0, segment.rows_at(0));
        if (segment.accepted > 0)
        {
            rows.stage_pending(segment);
        }
        commit_copies();
    }

    // Stages the rows behind those of a chunk, which have been convolved.
    __device__ __forceinline__ void stage_next(Segment const& segment, int row, int count) const
    {
        if (row != segment.absorbed)
        {
            rows.stage(segment, row + count, segment.rows_at(row + count));
            commit_copies();
        }
    }

    // The two below meet each other: before a chunk's convolution, behind it, and when the state has been read.
    __device__ __forceinline__ void solve(
        Segment const& segment, typename Solver<T, kSize, kBlockValues>::Rate const& rate) const
    {
        stage_first(segment);
        int count = 0;
        for (int row = 0; row < segment.count; row += count)
        {
            count = segment.rows_at(row);
            auto gates = solver.load(segment, row, count);
            wait_for_copies<0>();
            meet_all();
            solver.fill(gates, rate, count);
            meet_all();
            stage_next(segment, row, count);
            meet<kProductsAreThere, D::kThreads>();
            solver.solve(gates);
            meet_all();
        }
    }

    __device__ __forceinline__ void work(Segment const& segment, Ahead& ahead) const
    {
        stage_first(segment);
        State state;
        if (segment.is_zero)
        {
            state.clear();
        }
        else
        {
            state.load(this->state(segment));
        }
        int count = 0;
        int chunk = 0;
        for (int row = 0; row < segment.count; row += count, ++chunk)
        {
            count = segment.rows_at(row);
            bool const is_pending = row == segment.absorbed;
            wait_for_copies<0>();
            meet_all(); // the rows are staged, and those before them done with
            rows.convolve(ahead.weights, count);
            meet_all();
            int const before = count_reader(segment, row, chunk);
            stage_next(segment, row, count);
            multiply_keys();
            report<kProductsAreThere, D::kThreads>();
            if (row == 0 && segment.accepted > 0)
            {
                absorb_pending(state);
            }
            if (is_pending && (segment.accepted > 0 || segment.absorbed > 0))
            {
                state.store(this->state(segment));
            }
            read(state);
            if (threadIdx.x == 0 && row == segment.reader_row())
            {
                note_last(segment, before);
            }
            meet_all();
            finish.run(segment, ahead.norm, row, count, chunk);
            if (!is_pending)
            {
                absorb(state);
            }
        }
        keep(segment, count);
    }

    // Counts this block among those that have read what a key head's value heads share, and expects the others' sums.
    // Relaxed: nothing was written, and what was read has come, for it lies in shared memory.
    __device__ __forceinline__ int count_reader(Segment const& segment, int row, int chunk) const
    {
        if (threadIdx.x == 0 && D::kSplits > 1)
        {
            expect_bytes(shared.squares_barrier(chunk % 2), 4 * D::kSplits * kDeltaRows);
        }
        return threadIdx.x == 0 && row == segment.reader_row() ? atomicAdd(place.counter(segment.slot), 1) : 0;
    }

    // Keeps beside the state what the next step needs. All blocks of the cluster have read what was kept before.
    __device__ __forceinline__ void keep(Segment const& segment, int count) const
    {
        if (place.split == 0 && threadIdx.x < count)
        {
            *place.decay(segment.slot, threadIdx.x) = shared.decays[threadIdx.x];
        }
        rows.keep(segment, count, *shared.is_last);
    }
};

} // namespace delta
} // namespace dflash
