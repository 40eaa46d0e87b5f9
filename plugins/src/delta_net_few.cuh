// A gated delta net's rows that stay pending, where value heads are few: a cluster has a key head, two blocks each of
// its value heads, and all is done in one kernel. Some warps load the state, absorb what was accepted and multiply the
// state by rows; meanwhile others convolve queries and keys and multiply them, two convolve values, and one finds what
// lies between rows.
#pragma once

#include "delta_net_few_work.cuh"
#include "launch.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

template <typename T>
struct Block
{
    using Chunk = ChunkRows<T, kSize>;
    using State = StateTile<kSize, kPartKeys>;
    using S = Shared<T>;
    using OfHead = Place<T, kSize>;

    dflash_delta_net_params const& p;
    S& shared;
    int const heads = gridDim.x / kSplits; // of a key head
    int const head = blockIdx.x / kSplits; // of the key head's
    int const split = blockIdx.x % kSplits;
    int const key_head = blockIdx.y;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const tile = warp % kTiles; // of the values
    int const part = warp / kTiles; // of the keys
    uint32_t const gates_barrier = shared_address(&shared.gates_barrier);
    uint32_t const squares_barrier = shared_address(&shared.squares_barrier);
    DeltaLane const at;
    OfHead const place{p, key_head * heads + head, key_head};

    __device__ __forceinline__ void run() const
    {
        if (threadIdx.x == 0)
        {
            init_barrier(gates_barrier, 1);
            init_barrier(squares_barrier, 1);
            fence_barrier_inits();
        }
        __syncwarp();
        arrive_at_cluster();
        Guess const guess(p, blockIdx.z);
        if (warp < kStateWarps)
        {
            run_state(guess);
        }
        else if (warp < kFirstValueWarp)
        {
            run_keys(guess, warp - kStateWarps);
        }
        else if (warp < kWarps - 1)
        {
            run_values(guess, threadIdx.x - 32 * kFirstValueWarp);
        }
        else
        {
            run_solver(guess);
        }
    }

    // Before anything that the kernels before this one write is read, and other blocks are sent to.
    __device__ __forceinline__ static void wait_for_all()
    {
        wait_for_cluster();
        wait();
    }

    __device__ __forceinline__ int first_value() const
    {
        return place.first_value() + split * kValues;
    }

    __device__ __forceinline__ SplitRows<kSize> keys() const
    {
        return {shared.keys};
    }

    __device__ __forceinline__ SplitRows<kSize> queries() const
    {
        return {shared.queries};
    }

    // Asks for what the first row's convolution sees of some channels.
    __device__ __forceinline__ void prefetch_window(Guess const& guess, int channel, int channels) const
    {
        constexpr int kNumbers = 128 / static_cast<int>(sizeof(T)); // of a line
        Segment const segment = guess.segment();
        int const lines = channels / kNumbers;
        if (lane < kBefore * lines && !segment.begins)
        {
            T const* const from = place.window_row(segment.slot, segment.window + lane / lines) + channel;
            prefetch(from + lane % lines * kNumbers);
        }
    }

    // Waits for all before, and loads the rows of some channels.
    __device__ __forceinline__ Segment load_rows(
        Guess const& guess, typename Chunk::Item const& channels, typename Chunk::Inputs& inputs) const
    {
        Segment const segment = Chunk::load_pending(guess, wait_for_all, key_head, channels, inputs);
        Chunk::pending(p, segment, key_head).clear_before(channels, inputs);
        return segment;
    }

    // -- queries and keys: an item is four rows of one of both, of a warp ---------------------------------------------

    __device__ __forceinline__ void run_keys(Guess const& guess, int item) const
    {
        auto const channels = Chunk::item_of(p, key_head, heads, 32 * item + lane);
        if (channels.row == 0)
        {
            prefetch_window(guess, channels.channel - channels.number, kSize);
        }
        auto const taps = Chunk::load_taps(p, channels);
        typename Chunk::Inputs inputs;
        Segment const whole = load_rows(guess, channels, inputs);
        if (whole.count <= 0)
        {
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        SplitRows<kSize> const to = channels.head == 0 ? queries() : keys();
        float4 rows[Chunk::kRows];
        chunk.convolve_normed(channels, taps, inputs, rows);
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            to.store(channels.row + i, channels.number, FourParts(rows[i]));
        }
        meet_all();
        arrive_at_cluster(); // what is written below has been read: it was needed
        int const columns = item % 2 * 8;
        bool const is_query = item / 2 % 2;
        float* const products = shared.products[item / 4][is_query] + columns;
        multiply_rows<kSize, 4>(is_query ? queries() : keys(), keys(), columns, item / 4, products, kMixStride);
        report(kProductsAreThere, kUntilProducts);
        wait_for_cluster();
        auto const blocks = gridDim.x;
        if (item % blocks == blockIdx.x)
        {
            chunk.keep(channels, inputs);
        }
        if (channels.head == 1 && (item + blocks / 2) % blocks == blockIdx.x)
        {
            keep_keys(chunk, channels);
        }
    }

    __device__ __forceinline__ void keep_keys(Chunk const& chunk, typename Chunk::Item const& channels) const
    {
#pragma unroll 1
        for (int row = channels.row; row < min(channels.row + Chunk::kRows, chunk.count); ++row)
        {
            float* const to = place.keys(chunk.segment.slot, row) + channels.number;
            *reinterpret_cast<float4*>(to) = keys().load(row, channels.number);
        }
    }

    // -- values: an item is four rows of four of them, of a lane ------------------------------------------------------

    __device__ __forceinline__ void run_values(Guess const& guess, int item) const
    {
        constexpr int kLanes = kValues / Chunk::kLane; // of a row
        static_assert(kLanes * kDeltaRows / Chunk::kRows == 32 * kValueWarps);
        int const of_row = item % kLanes;
        auto const channels = Chunk::item_of(
            p, key_head, heads, (2 + head) * Chunk::kItems + item / kLanes * Chunk::kLanes + split * kLanes + of_row);
        if (warp == kFirstValueWarp)
        {
            prefetch_window(guess, channels.channel - of_row * Chunk::kLane, kValues);
        }
        auto const taps = Chunk::load_taps(p, channels);
        typename Chunk::Inputs inputs;
        Segment const whole = load_rows(guess, channels, inputs);
        if (whole.count <= 0)
        {
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        stage_gates(whole.pending());
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            *reinterpret_cast<float4*>(&shared.values[channels.row + i][of_row * Chunk::kLane])
                = chunk.convolve(channels, taps, inputs, i);
        }
        meet_all();
        arrive_at_cluster();
        chunk.keep(channels, inputs); // only this block has read these
        wait_for_cluster();
    }

    // Begins to copy what the outputs are gated by.
    __device__ __forceinline__ void stage_gates(Segment const& segment) const
    {
        constexpr int kBytes = kValues * static_cast<int>(sizeof(T));
        int const row = (warp - kFirstValueWarp) + kValueWarps * lane;
        if (row == 0)
        {
            expect_bytes(gates_barrier, segment.count * kBytes);
        }
        if (row < segment.count)
        {
            T const* const from = place.row(segment.first_row + row) + place.channels() + first_value();
            copy_bytes(shared_address(shared.gates[row]), from, kBytes, gates_barrier);
        }
    }

    // -- what lies between rows ---------------------------------------------------------------------------------------

    __device__ __forceinline__ void run_solver(Guess const& guess) const
    {
        auto const rate = Chunk::load_rate(p, place.head);
        T const* projected_at = nullptr;
        float const* decay_at = nullptr; // of a pending row, if the lane has one
        typename Chunk::Projected projected;
        float pending_decay = 1.f;
        Segment const whole = guess.load(
            wait_for_all,
            [&](Segment const& segment)
            {
                projected_at = Chunk::pending(p, segment, key_head).find_projected(place.head);
                bool const is_pending = lane < segment.pending().accepted;
                decay_at = is_pending ? place.decay(segment.slot, lane) : nullptr;
                settle(projected_at);
                settle(decay_at);
            },
            [&]
            {
                projected = Chunk::load_projected(p, projected_at);
                pending_decay = decay_at ? load_new(decay_at) : 1.f;
            });
        if (whole.count <= 0)
        {
            clear_padding(whole);
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        multiply_pending(pending_decay, shared.pending_behind, shared.pending_kept);
        report(kPendingIsThere, kWithSolver);
        auto const gates = chunk.gates_of(rate, projected);
        float const kept = product_to(gates.decay);
        if (lane < kDeltaRows)
        {
            shared.kept[lane] = kept;
        }
        auto const weights = chunk.weigh(gates);
        meet_all();
        arrive_at_cluster();
        meet(kProductsAreThere, kUntilProducts);
        chunk.solve(weights, gates.share, shared.products, shared.lower, shared.reads, shared.solved);
        report(kIsSolved, kWithSolver);
        wait_for_cluster();
        if (split == 0 && lane < chunk.count)
        {
            *place.decay(whole.slot, lane) = gates.decay;
        }
        clear_padding(whole);
    }

    // Fills the block's outputs of rows between this segment's and the next one's with zeros: they belong to nobody.
    __device__ __forceinline__ void clear_padding(Segment const& whole) const
    {
        int const next = blockIdx.z + 1;
        int const end = next < p.segment_count ? load_new(p.segments + 4 * next + 2) : p.rows;
#pragma unroll 1
        for (int row = whole.first_row + max(whole.count, 0); row < end; ++row)
        {
            T* const to = static_cast<T*>(p.out) + int64_t{row} * place.values_of_row() + first_value();
            to[lane] = from_float<T>(0.f);
            to[lane + 32] = from_float<T>(0.f);
        }
    }

    // -- the state: 16 values and half of the keys, of a warp ---------------------------------------------------------

    __device__ __forceinline__ void run_state(Guess const& guess) const
    {
        prefetch_pending(guess.segment().pending());
        float norm[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            norm[i] = static_cast<float const*>(p.norm)[split * kValues + value(2 * i)];
        }
        State state;
        Staged staged;
        float* state_at = nullptr;
        Segment const whole = guess.load(
            wait_for_all,
            [&](Segment const& segment)
            {
                staged = find_pending(segment.pending());
                state_at = memory(segment.slot);
                settle(staged.from);
                settle(state_at);
            },
            [&]
            {
                stage_pending(staged);
                state.load(state_at);
            });
        wait_for_copies<0>();
        if (whole.count <= 0)
        {
            return;
        }
        Segment const segment = whole.pending();
        if (segment.is_zero)
        {
            state.clear();
        }
        meet(kPendingIsThere, kWithSolver);
        if (segment.accepted > 0)
        {
            absorb_pending(state, segment.accepted, state_at);
        }
        arrive_at_cluster();
        meet_all();
        typename State::Parts parts;
        state.split(parts);
        // The solver waits for the products of keys, all others for the solver: those go first.
        meet(kProductsAreThere, kUntilProducts);
        TileNumbers of_keys = {};
        TileNumbers of_queries = {};
        State::read(parts, keys(), queries(), of_keys, of_queries, part * State::kGroups);
        if (part == 0)
        {
            exchange(of_queries, of_keys);
            write(segment, of_keys);
        }
        else
        {
            exchange(of_keys, of_queries);
            give(segment, norm, of_queries);
        }
        wait_for_cluster();
    }

    __device__ __forceinline__ float* memory(int slot) const
    {
        return place.state(slot) + (split * kValues + tile * 16) * kSize + part * kPartKeys;
    }

    // A warp asks for some rows' lines, and for all keys of its tile or none.
    __device__ __forceinline__ void prefetch_pending(Segment const& segment) const
    {
        constexpr int kRows = kDeltaRows / kStateWarps;
        constexpr int kLine = 128 / static_cast<int>(sizeof(float));
        int const row = warp * kRows + lane % kRows;
        int const number = lane / kRows * kLine;
        if (row < segment.accepted)
        {
            if (number < kSize)
            {
                prefetch(place.keys(segment.slot, row) + number);
            }
            else if (number < kSize + kValues)
            {
                prefetch(place.writes(segment.slot, row) + split * kValues + number - kSize);
            }
            else if (number == kSize + kValues)
            {
                prefetch(place.decay(segment.slot, row));
            }
        }
        if (lane == 0 && part == 0 && !segment.is_zero)
        {
            prefetch_bytes(memory(segment.slot), 4 * 16 * kSize);
        }
    }

    // A thread's part of the accepted rows' keys or writes: four numbers of every kRowsApart-th row.
    struct Staged
    {
        float const* from;
        float* to;
        int64_t from_stride; // of a row
        int to_stride;
        int rows;
    };

    static constexpr int kRowsApart = kStateWarps / 2;

    // Of two warps, one has the keys of a row, the other the block's values of what it writes.
    __device__ __forceinline__ Staged find_pending(Segment const& segment) const
    {
        static_assert(kSize == 4 * 32 && kValues <= kSize);
        int const row = warp / 2;
        int const number = 4 * lane;
        int const rows = (segment.accepted - row + kRowsApart - 1) / kRowsApart; // below 0 none, too
        if (warp % 2 == 0)
        {
            return {place.keys(segment.slot, row) + number, &shared.pending_keys[row][number],
                int64_t{p.key_heads} * kSize, S::kKeyStride, rows};
        }
        return {place.writes(segment.slot, row) + split * kValues + number, &shared.pending_writes[row][number],
            int64_t{place.values_of_row()}, S::kValueStride, number < kValues ? rows : 0};
    }

    // Begins to copy them.
    __device__ __forceinline__ void stage_pending(Staged const& staged) const
    {
        wait_for_copies<0>(); // by a guess that was wrong
#pragma unroll 1
        for (int i = 0; i < staged.rows; ++i)
        {
            stage_16(staged.to + kRowsApart * i * staged.to_stride, staged.from + kRowsApart * i * staged.from_stride);
        }
        commit_copies();
    }

    // What the tile's values write of pending rows from `begin` on, by what is left of each row.
    __device__ __forceinline__ LeftParts pending_writes(int begin, int accepted) const
    {
        float numbers[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            int const row = begin + 2 * at.column + i;
            float const* const from = shared.pending_writes[row] + 16 * tile + at.row;
            float const left = shared.pending_behind[row];
            numbers[i][0] = row < accepted ? from[0] * left : 0.f;
            numbers[i][1] = row < accepted ? from[8] * left : 0.f;
        }
        return {numbers[0][0], numbers[1][0], numbers[0][1], numbers[1][1]};
    }

    // Leaves the state in memory, too.
    __device__ __forceinline__ void absorb_pending(State& state, int accepted, float* memory) const
    {
        LeftParts const left[2] = {pending_writes(0, accepted), pending_writes(8, accepted)};
        state.absorb(shared.pending_kept, accepted > 8, left, memory,
            [&](int half, int key)
            {
                int const row = 8 * half + 2 * at.column;
                float const* const from = &shared.pending_keys[row][part * kPartKeys + key];
                return RightParts(
                    float2{row < accepted ? from[0] : 0.f, row + 1 < accepted ? from[S::kKeyStride] : 0.f});
            });
    }

    // -- two parts of a tile: one finds what rows write, the other what they give -------------------------------------

    __device__ __forceinline__ void meet_part() const
    {
        meet(kPartsMeet + tile, 32 * kParts);
    }

    __device__ __forceinline__ void put(TileNumbers const& x) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            shared.exchange[tile][part][i][lane] = {x[i][0], x[i][1], x[i][2], x[i][3]};
        }
    }

    __device__ __forceinline__ void take(TileNumbers& x) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            *reinterpret_cast<float4*>(x[i]) = shared.exchange[tile][1 - part][i][lane];
        }
    }

    // Gives the other part its sums, and adds those that it has of this part's.
    __device__ __forceinline__ void exchange(TileNumbers const& others, TileNumbers& own) const
    {
        put(others);
        meet_part();
        TileNumbers more;
        take(more);
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            own[i / 4][i % 4] += more[i / 4][i % 4];
        }
    }

    // Number j of half i of a tile's numbers: its row, and its value among the block's.
    __device__ __forceinline__ int row(int i, int j) const
    {
        return 8 * i + 2 * at.column + j % 2;
    }

    __device__ __forceinline__ int value(int j) const
    {
        return 16 * tile + at.row + j / 2 * 8;
    }

    // What rows write, of what the state gives their keys.
    __device__ __forceinline__ void write(Segment const& segment, TileNumbers const& of_keys) const
    {
        TileNumbers missing;
        TileNumbers writes = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                missing[i][j] = shared.values[row(i, j)][value(j)] - shared.kept[row(i, j)] * of_keys[i][j];
            }
        }
        meet(kIsSolved, kWithSolver);
        add_mixed<kMixStride>(missing, shared.solved, writes);
        put(writes);
        meet_part();
        float* const to = place.writes(segment.slot, row(0, 0)) + split * kValues + value(0);
        store_rows(writes, segment.count, to, place.values_of_row());
    }

    // What rows give, of what the state gives their queries.
    __device__ __forceinline__ void give(
        Segment const& segment, float const (&norm)[2], TileNumbers const& of_queries) const
    {
        wait_for_phase(gates_barrier, 0);
        TileNumbers out;
        TileNumbers gates;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                bool const is_there = row(i, j) < segment.count;
                out[i][j] = shared.kept[row(i, j)] * of_queries[i][j];
                gates[i][j] = is_there ? norm[j / 2] * quick_silu(to_float(shared.gates[row(i, j)][value(j)])) : 0.f;
            }
        }
        meet(kIsSolved, kWithSolver);
        meet_part();
        TileNumbers writes;
        take(writes);
        add_mixed<kMixStride>(writes, shared.reads, out);
        send_squares(out);
        wait_for_phase(squares_barrier, 0);
        write_out(segment, gates, out);
    }

    // Sums of the squares of the tile's values, to both blocks of the head: lane (g, t) to block g.
    __device__ __forceinline__ void send_squares(TileNumbers const& out) const
    {
        if (tile == 0 && lane == 0)
        {
            expect_bytes(squares_barrier, sizeof(shared.squares));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float sums[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                sums[j] = out[i][j] * out[i][j] + out[i][j + 2] * out[i][j + 2];
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2)
                {
                    sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], mask);
                }
            }
            if (at.row < kSplits)
            {
                int const to = head * kSplits + at.row;
                uint32_t const inbox = shared_address(&shared.squares[split * kTiles + tile][row(i, 0)]);
                send(address_at(inbox, to), sums, address_at(squares_barrier, to));
            }
        }
    }

    __device__ __forceinline__ void write_out(
        Segment const& segment, TileNumbers const& gates, TileNumbers const& out) const
    {
        float squares[2][2];
        add_squares(shared.squares, squares);
        int64_t const begins = int64_t{segment.first_row + row(0, 0)} * place.values_of_row();
        T* const to = static_cast<T*>(p.out) + begins + first_value() + value(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                float const root = rsqrtf(squares[i][j % 2] / static_cast<float>(kSize) + p.norm_eps);
                if (row(i, j) < segment.count)
                {
                    to[(8 * i + j % 2) * place.values_of_row() + j / 2 * 8]
                        = from_float<T>(out[i][j] * root * gates[i][j]);
                }
            }
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
