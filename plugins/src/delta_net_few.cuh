// A gated delta net's rows that stay pending, where value heads are few: a cluster has a head, each block some of its
// values, and all is done in one kernel, whose code is short. With more heads blocks would do the same for each of
// them.
#pragma once

#include "delta_net_few_finish.cuh"
#include "delta_net_few_rows.cuh"
#include "delta_net_few_solver.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

__device__ __forceinline__ void prefetch(void const* from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

template <typename T>
struct Block
{
    using D = Division<T>;
    using S = Shared<T>;

    Place<T> const& place;
    S const& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const tile = warp % D::kTiles; // of the values: 16
    int const part = warp / D::kTiles; // of the keys
    Rows<T> const rows{place, shared};
    Solver<T> const solver{place, shared};
    Finish<T> const finish{place, shared};

    // What a thread has of the weights.
    struct Ahead
    {
        typename Rows<T>::Weights weights;
        typename Solver<T>::Rate rate;
        float norm; // of a lane's value
    };

    // One warp does nothing else.
    __device__ __forceinline__ bool is_solver() const
    {
        return warp == D::kThreads / 32 - 1;
    }

    // What does not wait for the kernels before this one: weights, and what memory sends to the L2.
    __device__ __forceinline__ Ahead begin_ahead() const
    {
        if (threadIdx.x == 0)
        {
            init_barrier(shared.squares_barrier, 1);
            fence_barrier_inits();
        }
        __syncwarp();
        arrive_at_cluster();
        if (is_solver())
        {
            prefetch_state();
        }
        return load_ahead();
    }

    __device__ __forceinline__ Ahead load_ahead() const
    {
        Ahead ahead = {};
        if (is_solver())
        {
            ahead.rate = solver.load_rate();
        }
        else
        {
            rows.load_weights(warp, ahead.weights);
            ahead.norm = static_cast<float const*>(place.p.norm)[place.split * D::kValues + lane];
        }
        return ahead;
    }

    // Likewise, where the numbers lie that its rows need: those that say it are read again.
    __device__ __forceinline__ void prefetch_state() const
    {
        int const volatile* const at = place.p.segments + 4 * blockIdx.z;
        int4 const guess = {guess_slot(place.p, blockIdx.z), at[1], at[2], at[3]};
        if (guess.w <= 0)
        {
            return;
        }
        int const length = *static_cast<int const volatile*>(place.p.lengths + guess.x);
        Segment const segment = Segment(place.p, guess, length).pending();
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
        if (lane < kBefore && !segment.begins && segment.before == 0)
        {
            T const* const window = place.window_row(segment.slot, segment.window + lane);
            prefetch(window + place.query_channel() + first);
            prefetch(window + place.key_channel() + first);
            prefetch(window + place.value_channel());
        }
    }

    using State = StateTile<kSize, D::kPartKeys>;

    __device__ __forceinline__ float* state(Segment const& segment) const
    {
        return place.state(segment.slot) + tile * 16 * kSize + part * D::kPartKeys;
    }

    __device__ __forceinline__ void absorb_pending(State& state, int accepted) const
    {
        DeltaLane const at;
        LeftParts const left[2] = {left_of(0), left_of(8)};
        float const* const keys = shared.parts + part * S::kPart + 2 * at.column * S::kKeyStride;
        state.absorb(*shared.pending_kept, accepted > 8, left,
            [&](int half, int key)
            {
                float const* const from = keys + 8 * half * S::kKeyStride + key;
                return RightParts(float2{from[0], from[S::kKeyStride]});
            });
    }

    // What the warp's values write of pending rows from `first` on, by what is left of each row.
    __device__ __forceinline__ LeftParts left_of(int first) const
    {
        DeltaLane const at;
        int const row = first + 2 * at.column;
        float const* const from = shared.writes + row * S::kValueStride + 16 * tile + at.row;
        float const left[2] = {shared.pending_behind[row], shared.pending_behind[row + 1]};
        return {
            from[0] * left[0], from[S::kValueStride] * left[1], from[8] * left[0], from[S::kValueStride + 8] * left[1]};
    }

    // Puts what the warp's keys have of the rows' keys and queries where all parts of it are summed up.
    __device__ __forceinline__ void share_sums(TileNumbers const& of_keys, TileNumbers const& of_queries) const
    {
        DeltaLane const at;
        // The pending rows' keys lay there: of this part both warps have read them.
        asm volatile("bar.sync %0, %1;" ::"r"(kPartMeets + part), "n"(32 * D::kTiles) : "memory");
        float* const to = shared.parts + part * S::kPart + 2 * at.column * S::kValueStride + 16 * tile + at.row;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                to[(8 * i + j % 2) * S::kValueStride + j / 2 * 8] = of_keys[i][j];
                to[(kDeltaRows + 8 * i + j % 2) * S::kValueStride + j / 2 * 8] = of_queries[i][j];
            }
        }
    }

    // By a warp that does not wait for the number before it has solved.
    __device__ __forceinline__ uint32_t count_reader(Segment const& segment) const
    {
        return lane == 0 ? delta::count_reader(place.counter(segment.slot), gridDim.x - 1) : 0;
    }

    // By the same warp: says whether this block is the last.
    __device__ __forceinline__ void note_last(uint32_t before) const
    {
        if (lane == 0)
        {
            *shared.is_last = before == gridDim.x - 1;
        }
    }

    // All threads, wherever they are in the code.
    __device__ __forceinline__ static void meet_all()
    {
        meet<0, D::kThreads>();
    }

    // All threads, before any of what follows.
    __device__ __forceinline__ void stage_first(Segment const& segment) const
    {
        rows.stage(segment);
        if (segment.accepted > 0)
        {
            rows.stage_pending(segment);
        }
        commit_copies();
    }

    // The two below meet each other: before the convolution, behind it, and when the state has been read.
    __device__ __forceinline__ void solve(Segment const& segment, typename Solver<T>::Rate const& rate) const
    {
        auto gates = solver.load(segment);
        solver.fill(gates, rate, segment.count);
        wait_for_copies<0>();
        meet_all();
        meet_all();
        uint32_t const before = count_reader(segment);
        meet<kProductsAreThere, D::kThreads>();
        solver.solve(gates.share);
        note_last(before);
        meet_all();
    }

    __device__ __forceinline__ void load(Segment const& segment, State& state) const
    {
        if (segment.is_zero)
        {
            state.clear();
        }
        else
        {
            state.load(this->state(segment));
        }
    }

    __device__ __forceinline__ void work(Segment const& segment, Ahead const& ahead) const
    {
        State state;
        load(segment, state);
        wait_for_copies<0>();
        meet_all(); // the rows are staged
        rows.convolve(ahead.weights, segment.count);
        meet_all();
        if (threadIdx.x == 0)
        {
            expect_bytes(shared.squares_barrier, 4 * D::kSplits * kDeltaRows);
        }
        rows.multiply_keys();
        report<kProductsAreThere, D::kThreads>();
        if (segment.accepted > 0)
        {
            absorb_pending(state, segment.accepted);
            state.store(this->state(segment));
        }
        TileNumbers of_keys = {};
        TileNumbers of_queries = {};
        state.read(shared.keys, shared.queries, of_keys, of_queries, part * State::kGroups);
        typename Finish<T>::Outputs outputs;
        finish.load_gates(segment, outputs);
        share_sums(of_keys, of_queries);
        meet_all();
        finish.run(segment, ahead.norm, outputs);
        keep(segment);
    }

    __device__ __forceinline__ void run(Segment const& segment, Ahead const& ahead) const
    {
        if (is_solver())
        {
            solve(segment, ahead.rate);
        }
        else
        {
            work(segment, ahead);
        }
    }

    // Keeps beside the state what the next step needs. All blocks of the cluster have read what was kept before.
    __device__ __forceinline__ void keep(Segment const& segment) const
    {
        if (place.split == 0 && threadIdx.x < segment.count)
        {
            *place.decay(segment.slot, threadIdx.x) = shared.decays[threadIdx.x];
        }
        rows.keep(segment, *shared.is_last);
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
