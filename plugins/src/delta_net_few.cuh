// A gated delta net's rows that stay pending, where value heads are few: a cluster has a key head, two blocks each of
// its value heads, and all is done in one kernel. Some warps load the state, absorb what was accepted and multiply the
// state by rows. Meanwhile others convolve queries and keys, each block some rows, which it sends to all of the
// cluster, and multiply them; two convolve values, and one finds what lies between rows.
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
    using Row = ChunkRows<T, kSize, 1>;
    using State = StateTile<kSize, kPartKeys>;
    using S = Shared<T>;
    using OfHead = Place<T, kSize>;
    static constexpr int kLanes = kValues / Chunk::kLane; // of a row of the block's values

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
    uint32_t const rows_barrier = shared_address(&shared.rows_barrier);
    uint32_t const squares_barrier = shared_address(&shared.squares_barrier);
    DeltaLane const at;
    OfHead const place{p, key_head * heads + head, key_head};

    __device__ __forceinline__ void run() const
    {
        if (threadIdx.x == 0)
        {
            init_barrier(rows_barrier, 1);
            init_barrier(squares_barrier, 1);
            fence_barrier_inits();
            expect_bytes(rows_barrier, kRowItems * kSize * sizeof(uint32_t));
            expect_bytes(squares_barrier, sizeof(shared.squares));
        }
        __syncwarp();
        arrive_at_cluster();
        if (warp < kStateWarps)
        {
            run_state();
        }
        else if (warp < kFirstValueWarp)
        {
            run_keys(warp - kStateWarps);
        }
        else if (warp < kSolver)
        {
            run_values(threadIdx.x - 32 * kFirstValueWarp);
        }
        else
        {
            run_solver();
        }
    }

    // -- the segment: one warp of a block asks memory, for all that did would ask for the same line -------------------

    __device__ __forceinline__ Guess tell_guess() const
    {
        SegmentWords const guessed = Guess::load_early(p, blockIdx.z);
        if (lane == 0)
        {
            shared.guessed = guessed;
        }
        meet_all();
        wait_for_cluster();
        return Guess(p, shared.guessed);
    }

    __device__ __forceinline__ Guess hear_guess() const
    {
        wait_for_cluster(); // its blocks' barriers are there; this empties the L1 cache, so it comes beside that load
        meet_all();
        return Guess(p, shared.guessed);
    }

    // What that warp found. Where they meet all have loaded: behind it the window may be written.
    struct Hearing
    {
        S const& shared;

        __device__ __forceinline__ void ask() const
        {
        }

        __device__ __forceinline__ SegmentWords hear() const
        {
            meet_all();
            return shared.found;
        }

        __device__ __forceinline__ void loaded() const
        {
            meet_all();
        }
    };

    // That warp's own, which tells them.
    struct Telling
    {
        S& shared;
        SegmentSource source;

        __device__ __forceinline__ void ask()
        {
            source.ask();
        }

        __device__ __forceinline__ SegmentWords hear()
        {
            SegmentWords const found = source.hear();
            if (threadIdx.x % 32 == 0)
            {
                shared.found = found;
            }
            meet_all();
            return found;
        }

        __device__ __forceinline__ void loaded() const
        {
            meet_all();
        }
    };

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

    // -- queries and keys: an item is a row of one of both, of a warp -------------------------------------------------

    // Blocks of the cluster take turns.
    __device__ __forceinline__ typename Row::Item row_item(int index) const
    {
        bool const is_key = index % 2;
        int const number = lane * Row::kLane;
        return {is_key, index / 2, number, (is_key ? place.key_channel() : place.query_channel()) + number};
    }

    __device__ __forceinline__ void run_keys(int item) const
    {
        int const blocks = gridDim.x;
        int const index = blockIdx.x + blocks * item;
        int const apart = blocks * kRowWarps; // from a warp's next item: of two blocks each warp has two
        bool const has_row = index < kRowItems; // of six and eight blocks some have none; they load the last one
        auto const channels = row_item(min(index, kRowItems - 1));
        auto& staged = shared.row_taps[32 * item + lane];
        Row::stage_taps(p, channels, staged);
        Gating gating(*this);
        commit_copies();
        Guess const guess = hear_guess();
        if (index < 2)
        {
            prefetch_window(guess, channels.channel - channels.number, kSize);
        }
        typename Row::Sources sources;
        typename Row::Inputs inputs;
        Segment const whole = guess.load(
            wait,
            [&](Segment const& segment)
            {
                sources = Row::find_pending(p, segment, key_head, channels);
                gating.find(segment);
            },
            [&]
            {
                inputs = Row::load(sources);
                gating.load();
            },
            Hearing{shared});
        Row::settle(inputs);
        Row::settle(gating.gates);
        wait_for_copies<0>();
        if (whole.count <= 0)
        {
            return;
        }
        Row const rows = Row::pending(p, whole, key_head);
        if (has_row)
        {
            if (channels.row < kBefore)
            {
                rows.clear_before(channels, inputs);
            }
            send_row(rows, channels, Row::take_taps(staged), inputs);
        }
#pragma unroll 1
        for (int more = index + apart; more < kRowItems; more += apart)
        {
            auto const other = row_item(more);
            send_row(rows, other, Row::load_taps(p, other), rows.load(other));
        }
        gating.store();
        report(kRowsAreThere, kThreads);
        arrive_at_cluster(); // what was needed of what is written below has been read
        wait_for_phase(rows_barrier, 0);
        int const columns = item % 2 * 8;
        bool const is_query = item / 2 % 2;
        float* const products = shared.products[item / 4][is_query] + columns;
        multiply_rows<kSize, 4>(is_query ? queries() : keys(), keys(), columns, item / 4, products, kMixStride);
        if (item == 0)
        {
            mix_reads();
        }
        else
        {
            report(kProductsAreThere, kUntilProducts);
        }
        wait_for_cluster();
        if (has_row)
        {
            rows.keep(channels, inputs);
            keep_key(rows, channels);
        }
#pragma unroll 1
        for (int more = index + apart; more < kRowItems; more += apart)
        {
            auto const other = row_item(more);
            rows.keep(other, rows.load(other)); // what these see is not of the window: nobody writes it
            keep_key(rows, other);
        }
    }

    // By a warp: what rows give of what all of them miss, D (q k) (I + A)^-1 b. So they need not wait for what these
    // write.
    __device__ __forceinline__ void mix_reads() const
    {
        meet(kProductsAreThere, kUntilProducts);
        MixParts const reads(
            [&](int of, int column) // D (q k)
            {
                int const index = of * kMixStride + column;
                float2 const left = *reinterpret_cast<float2 const*>(shared.left + index);
                float2 const one = *reinterpret_cast<float2 const*>(shared.products[0][1] + index);
                float2 const other = *reinterpret_cast<float2 const*>(shared.products[1][1] + index);
                return float2{left.x * (one.x + other.x), left.y * (one.y + other.y)};
            });
        meet(kIsSolved, kUntilSolved);
        // As a tile has values: its columns.
        TileNumbers solved;
        TileNumbers mixed = {};
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            solved[i / 4][i % 4] = shared.solved[row(i / 4, i % 4) * kMixStride + at.row + i % 4 / 2 * 8];
        }
        add_mixed(solved, reads, mixed);
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            shared.mixed[row(i / 4, i % 4) * kMixStride + at.row + i % 4 / 2 * 8] = mixed[i / 4][i % 4];
        }
        report(kIsMixed, kUntilMixed);
    }

    // Convolves it, and sends it to all blocks of the cluster.
    __device__ __forceinline__ void send_row(Row const& rows, typename Row::Item const& channels,
        typename Row::Taps const& taps, typename Row::Inputs const& inputs) const
    {
        FourParts parts(float4{});
        if (channels.row < rows.count)
        {
            parts = FourParts::scaled(Row::normed(channels, Row::convolve(taps, inputs, 0)));
        }
        SplitRows<kSize> const to = channels.head == 0 ? queries() : keys();
        uint32_t const inbox = shared_address(to.at(channels.row, channels.number));
        auto const& words = reinterpret_cast<float const(&)[4]>(parts.words); // bits, as `send` takes them
#pragma unroll 1
        for (int block = 0; block < static_cast<int>(gridDim.x); ++block)
        {
            send(address_at(inbox, block), words, address_at(rows_barrier, block));
        }
    }

    // Beside the state, for the next step.
    __device__ __forceinline__ void keep_key(Row const& rows, typename Row::Item const& channels) const
    {
        if (channels.head == 1 && channels.row < rows.count)
        {
            float* const to = place.keys(rows.segment.slot, channels.row) + channels.number;
            *reinterpret_cast<float4*>(to) = keys().load(channels.row, channels.number);
        }
    }

    // What outputs are gated by, and normed: a thread has four of these numbers.
    struct Gating
    {
        Block const& block;
        int const row;
        int const value;
        float4& norm;
        T const* from;
        typename Row::Four gates;

        __device__ __forceinline__ explicit Gating(Block const& block)
            : block(block)
            , row((threadIdx.x - 32 * kStateWarps) / kLanes)
            , value(threadIdx.x % kLanes * Row::kLane)
            , norm(block.shared.norm[threadIdx.x - 32 * kStateWarps])
        {
            static_assert(kLanes * kDeltaRows == 32 * kRowWarps);
            stage_16(&norm, static_cast<float const*>(block.p.norm) + block.split * kValues + value);
        }

        // Past the last row that one again.
        __device__ __forceinline__ void find(Segment const& whole)
        {
            int const at = whole.first_row + min(whole.absorbed + row, max(whole.count, 1) - 1);
            from = block.place.row(at) + block.place.channels() + block.first_value() + value;
            settle(from);
        }

        __device__ __forceinline__ void load()
        {
            gates = load_new(reinterpret_cast<typename Row::Four const*>(from));
        }

        __device__ __forceinline__ void store() const
        {
            *reinterpret_cast<float4*>(&block.shared.gates[row][value])
                = {norm.x * quick_silu(to_float(gates.at[0])), norm.y * quick_silu(to_float(gates.at[1])),
                    norm.z * quick_silu(to_float(gates.at[2])), norm.w * quick_silu(to_float(gates.at[3]))};
        }
    };

    // -- values: an item is four rows of four of them, of a lane ------------------------------------------------------

    __device__ __forceinline__ void run_values(int item) const
    {
        static_assert(kLanes * kDeltaRows / Chunk::kRows == 32 * kValueWarps);
        int const of_row = item % kLanes;
        auto const channels = Chunk::item_of(
            p, key_head, heads, (2 + head) * Chunk::kItems + item / kLanes * Chunk::kLanes + split * kLanes + of_row);
        auto& staged = shared.value_taps[item];
        Chunk::stage_taps(p, channels, staged);
        commit_copies();
        Guess const guess = hear_guess();
        if (warp == kFirstValueWarp)
        {
            prefetch_window(guess, channels.channel - of_row * Chunk::kLane, kValues);
        }
        typename Chunk::Inputs inputs;
        Segment const whole = Chunk::load_pending(guess, wait, Hearing{shared}, key_head, channels, inputs);
        wait_for_copies<0>();
        if (whole.count <= 0)
        {
            return;
        }
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        chunk.clear_before(channels, inputs);
        auto const taps = Chunk::take_taps(staged);
#pragma unroll
        for (int i = 0; i < Chunk::kRows; ++i)
        {
            *reinterpret_cast<float4*>(&shared.values[channels.row + i][of_row * Chunk::kLane])
                = chunk.convolve(channels, taps, inputs, i);
        }
        report(kRowsAreThere, kThreads);
        arrive_at_cluster();
        chunk.keep(channels, inputs); // only this block has read these
        wait_for_cluster();
    }

    // -- what lies between rows ---------------------------------------------------------------------------------------

    __device__ __forceinline__ void run_solver() const
    {
        auto const rate = Chunk::load_rate(p, place.head);
        Guess const guess = tell_guess();
        typename Chunk::ProjectedAt projected_at;
        float const* decay_at = nullptr; // of a pending row, if the lane has one
        typename Chunk::Projected projected;
        float pending_decay = 1.f;
        Segment const whole = guess.load(
            wait,
            [&](Segment const& segment)
            {
                projected_at = Chunk::pending(p, segment, key_head).find_projected(place.head);
                bool const is_pending = lane < segment.pending().accepted;
                decay_at = is_pending ? place.decay(segment.slot, lane) : nullptr;
                settle(decay_at);
            },
            [&]
            {
                projected = Chunk::load_projected(projected_at);
                pending_decay = decay_at ? load_new(decay_at) : 1.f;
            },
            Telling{shared, SegmentSource(guess, blockIdx.z)});
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
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            shared.left[(chunk.first_weighed() + i) * kMixStride + chunk.column] = weights.left[i];
        }
        report(kRowsAreThere, kThreads);
        arrive_at_cluster();
        meet(kProductsAreThere, kUntilProducts);
        chunk.solve(weights, gates.share, shared.products, shared.lower, shared.solved);
        report(kIsSolved, kUntilSolved);
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

    __device__ __forceinline__ void run_state() const
    {
        Guess const guess = hear_guess();
        prefetch_pending(guess.segment().pending());
        State state;
        Staged staged;
        float* state_at = nullptr;
        Segment const whole = guess.load(
            wait,
            [&](Segment const& segment)
            {
                staged = find_pending(segment.pending());
                state_at = State::of_lane(memory(segment.slot));
                settle(staged.from);
                settle(state_at);
            },
            [&]
            {
                wait_for_copies<0>(); // by a guess that was wrong
                stage_pending(staged);
                state.load(state_at);
            },
            Hearing{shared});
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
        typename State::Parts parts;
        state.split(parts);
        wait_for_phase(rows_barrier, 0);
        TileNumbers of_keys = {};
        TileNumbers of_queries = {};
        State::read(parts, keys(), queries(), of_keys, of_queries, part * State::kGroups);
        meet(kRowsAreThere, kThreads);
        TileNumbers missing;
        load_values(missing);
        float2 const kept[2] = {kept_of(0), kept_of(1)};
        exchange(of_keys, of_queries);
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            missing[i / 4][i % 4] -= (i % 2 == 0 ? kept[i / 4].x : kept[i / 4].y) * of_keys[i / 4][i % 4];
        }
        if (part == kWriter)
        {
            write(segment, missing);
        }
        else
        {
            give(segment, missing, kept, of_queries);
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
        int from_apart; // numbers between one row and the next
        int to_apart;
        int rows;
        int accepted; // of these; zeros for the others
    };

    static constexpr int kRowsApart = kStateWarps / 2;

    // Of two warps, one has the keys of a row, the other the block's values of what it writes.
    __device__ __forceinline__ Staged find_pending(Segment const& segment) const
    {
        static_assert(kSize == 4 * 32 && kValues <= kSize);
        int const row = warp / 2;
        int const number = 4 * lane;
        int const rows = segment.count_taken() / kRowsApart;
        int const accepted = (segment.accepted - row + kRowsApart - 1) / kRowsApart; // below 0 none, too
        if (warp % 2 == 0)
        {
            return {place.keys(segment.slot, row) + number, &shared.pending_keys[row][number],
                kRowsApart * p.key_heads * kSize, kRowsApart * S::kKeyStride, rows, accepted};
        }
        return {place.writes(segment.slot, row) + split * kValues + number, &shared.pending_writes[row][number],
            kRowsApart * place.values_of_row(), kRowsApart * S::kValueStride, number < kValues ? rows : 0, accepted};
    }

    // Begins to copy them.
    __device__ __forceinline__ static void stage_pending(Staged staged)
    {
#pragma unroll 1
        for (int i = 0; i < staged.rows; ++i)
        {
            stage_16(staged.to, staged.from, i < staged.accepted);
            staged.to += staged.to_apart;
            staged.from += staged.from_apart;
        }
        commit_copies();
    }

    // What the tile's values write of pending rows from `begin` on, by what is left of each row.
    __device__ __forceinline__ LeftParts pending_writes(int begin) const
    {
        int const row = begin + 2 * at.column;
        float const* const from = shared.pending_writes[row] + 16 * tile + at.row;
        float2 const left = *reinterpret_cast<float2 const*>(shared.pending_behind + row);
        return {from[0] * left.x, from[S::kValueStride] * left.y, from[8] * left.x, from[S::kValueStride + 8] * left.y};
    }

    // Leaves the state in memory, too.
    __device__ __forceinline__ void absorb_pending(State& state, int accepted, float* memory) const
    {
        auto const keys = [&](int half, int key)
        {
            float const* const from = &shared.pending_keys[8 * half + 2 * at.column][part * kPartKeys + key];
            return RightParts(float2{from[0], from[S::kKeyStride]});
        };
        LeftParts const first = pending_writes(0);
        if (accepted > kDeltaRows / 2) // each by code of its own, or groups of keys would wait for each other
        {
            state.absorb(shared.pending_kept, true, {first, pending_writes(8)}, memory, keys);
        }
        else
        {
            state.absorb(shared.pending_kept, false, {first, first}, memory, keys);
        }
    }

    // -- the parts of a tile: one finds what rows write, the other what they give -------------------------------------

    static constexpr int kWriter = 0;

    // Number j of half i of a tile's numbers: its row, and its value among the block's.
    __device__ __forceinline__ int row(int i, int j) const
    {
        return 8 * i + 2 * at.column + j % 2;
    }

    __device__ __forceinline__ int value(int j) const
    {
        return 16 * tile + at.row + j / 2 * 8;
    }

    __device__ __forceinline__ void load_values(TileNumbers& x) const
    {
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            x[i / 4][i % 4] = shared.values[row(i / 4, i % 4)][value(i % 4)];
        }
    }

    // E of the lane's rows of a half.
    __device__ __forceinline__ float2 kept_of(int half) const
    {
        return *reinterpret_cast<float2 const*>(shared.kept + row(half, 0));
    }

    using Inbox = float4 (&)[2][32];

    __device__ __forceinline__ void put(TileNumbers const& x, Inbox to) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            to[i][lane] = {x[i][0], x[i][1], x[i][2], x[i][3]};
        }
    }

    __device__ __forceinline__ void add(Inbox from, TileNumbers& sums) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float4 const x = from[i][lane];
            sums[i][0] += x.x;
            sums[i][1] += x.y;
            sums[i][2] += x.z;
            sums[i][3] += x.w;
        }
    }

    // Has the sums over all keys: of what keys read both parts, of what queries do the one that gives.
    __device__ __forceinline__ void exchange(TileNumbers& of_keys, TileNumbers& of_queries) const
    {
        static_assert(kParts == 2);
        put(of_keys, shared.of_keys[tile][part]);
        if (part == kWriter)
        {
            put(of_queries, shared.of_queries[tile]);
        }
        meet(kPartsMeet + tile, 32 * kParts);
        add(shared.of_keys[tile][1 - part], of_keys);
        if (part != kWriter)
        {
            add(shared.of_queries[tile], of_queries);
        }
    }

    // What rows write, of what they miss.
    __device__ __forceinline__ void write(Segment const& segment, TileNumbers const& missing) const
    {
        float* const to = place.writes(segment.slot, row(0, 0)) + split * kValues + value(0);
        TileNumbers writes = {};
        meet(kIsSolved, kUntilSolved);
        add_mixed<kMixStride>(missing, shared.solved, writes);
        store_rows(writes, segment.count, to, place.values_of_row());
    }

    // What rows give, of what the state gives their queries, and of what all of them miss.
    __device__ __forceinline__ void give(Segment const& segment, TileNumbers const& missing, float2 const (&kept)[2],
        TileNumbers const& of_queries) const
    {
        TileNumbers gates;
        TileNumbers out;
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            gates[i / 4][i % 4] = shared.gates[row(i / 4, i % 4)][value(i % 4)];
            out[i / 4][i % 4] = (i % 2 == 0 ? kept[i / 4].x : kept[i / 4].y) * of_queries[i / 4][i % 4];
        }
        int64_t const begins = int64_t{segment.first_row + row(0, 0)} * place.values_of_row();
        T* const to = static_cast<T*>(p.out) + begins + first_value() + value(0);
        meet(kIsMixed, kUntilMixed);
        add_mixed<kMixStride>(missing, shared.mixed, out);
        send_squares(out);
        wait_for_phase(squares_barrier, 0);
        write_out(segment.count, gates, out, to);
    }

    // Sums of the squares of the tile's values, to both blocks of the head: lane (g, t) to block g.
    __device__ __forceinline__ void send_squares(TileNumbers const& out) const
    {
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

    // to: where the lane's first number goes.
    __device__ __forceinline__ void write_out(int count, TileNumbers const& gates, TileNumbers const& out, T* to) const
    {
        float squares[2][2];
        add_squares(shared.squares, squares);
        float normed[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            float const root = rsqrtf(squares[i / 4][i % 2] / static_cast<float>(kSize) + p.norm_eps);
            normed[i / 4][i % 4] = out[i / 4][i % 4] * root * gates[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) // all at once: of what a branch needs alone each would wait for the one before
        {
            settle(normed[i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            if (row(i / 4, i % 4) < count)
            {
                to[(8 * (i / 4) + i % 2) * place.values_of_row() + i % 4 / 2 * 8] = from_float<T>(normed[i / 4][i % 4]);
            }
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
