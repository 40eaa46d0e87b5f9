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
    uint32_t const values_barrier = shared_address(&shared.values_barrier);
    DeltaLane const at;
    OfHead const place{p, key_head * heads + head, key_head};

    __device__ __forceinline__ void run() const
    {
        if (warp == kSolver) // first: all others wait for what it guesses
        {
            run_solver();
            return;
        }
        if (threadIdx.x == 0)
        {
            init_barrier(rows_barrier, 1);
            init_barrier(squares_barrier, 1);
            init_barrier(values_barrier, kValueWarps + 1);
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
        else
        {
            run_values(threadIdx.x - 32 * kFirstValueWarp);
        }
    }

    // -- the segment: one warp of a block asks memory, for all that did would ask for the same line -------------------

    __device__ __forceinline__ Guess tell_guess() const
    {
        SegmentWords const guessed = Guess::load_early(p, blockIdx.z);
        arrive_at_cluster();
        if (lane < p.pending)
        {
            prefetch(place.decay(likely_slot(), lane));
        }
        if (lane == 0)
        {
            shared.guessed = guessed;
        }
        report(kGuessIsThere, kThreads);
        wait_for_cluster();
        return Guess(p, guessed);
    }

    __device__ __forceinline__ Guess hear_guess() const
    {
        wait_for_cluster(); // its blocks' barriers are there; this empties the L1 cache, so it comes beside that load
        meet(kGuessIsThere, kThreads);
        return Guess(p, shared.guessed);
    }

    // What that warp found. Where they meet all have loaded: behind it the window may be written.
    struct Hearing
    {
        S const& shared;

        __device__ __forceinline__ void ask() const
        {
        }

        __device__ __forceinline__ void began() const
        {
            report(kLoadsBegan, kThreads);
        }

        __device__ __forceinline__ SegmentWords hear() const
        {
            meet(kFoundIsThere, kUntilFound);
            return shared.found;
        }

        __device__ __forceinline__ void loaded() const
        {
            meet(kFoundIsThere, kUntilFound - 32);
        }
    };

    // Likewise, beside what is left of pending rows, which have been copied then.
    struct HearingPending
    {
        S const& shared;

        __device__ __forceinline__ void ask() const
        {
        }

        __device__ __forceinline__ void began() const
        {
        }

        __device__ __forceinline__ SegmentWords hear() const
        {
            wait_for_copies<0>();
            meet(kPendingIsThere, kWithSolver);
            return shared.found;
        }

        __device__ __forceinline__ void loaded() const
        {
            wait_for_copies<0>();
            meet(kStatesMeet, 32 * kStateWarps);
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

        __device__ __forceinline__ void began() const
        {
            report(kLoadsBegan, kThreads);
            __syncwarp(); // the compiler would put the other loads off until the segment has come
        }

        __device__ __forceinline__ SegmentWords hear()
        {
            SegmentWords const found = source.hear();
            if (threadIdx.x % 32 == 0)
            {
                shared.found = found;
            }
            report(kFoundIsThere, kUntilFound);
            return found;
        }

        __device__ __forceinline__ void loaded() const
        {
        }
    };

    __device__ __forceinline__ int first_value() const
    {
        return place.first_value() + split * kValues;
    }

    __device__ __forceinline__ SplitRows<kSize> keys() const
    {
        return {shared.rows[0]};
    }

    __device__ __forceinline__ SplitRows<kSize> queries() const
    {
        return {shared.rows[1]};
    }

    // Asks for the window of the slot that has the segment's index, as it most likely is: before memory has said so,
    // and which of its rows the first one's convolution sees. Of queries and keys each block asks for some rows.
    __device__ __forceinline__ void prefetch_windows(int item) const
    {
        constexpr int kNumbers = 128 / static_cast<int>(sizeof(T)); // of a line
        constexpr int kValueLines = kValues / kNumbers;
        constexpr int kHeadLines = kSize / kNumbers;
        int const rows = kBefore + p.pending;
        T const* const window = place.window_row(likely_slot(), 0);
        if (item < rows * kValueLines)
        {
            int const number = place.value_channel() + split * kValues + item % kValueLines * kNumbers;
            prefetch(window + item / kValueLines * place.channels() + number);
        }
        int const row = blockIdx.x + gridDim.x * (item / (2 * kHeadLines));
        if (row < rows)
        {
            int const head = item / kHeadLines % 2 ? place.key_channel() : place.query_channel();
            prefetch(window + row * place.channels() + head + item % kHeadLines * kNumbers);
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
        typename Row::Places const places(p, channels);
        Guess const guess = hear_guess();
        typename Row::Sources sources;
        typename Row::Inputs inputs;
        Segment const whole = guess.load(
            wait,
            [&](Segment const& segment)
            {
                sources = Row::find_pending(p, segment, key_head, channels, places);
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
        rows.clear_before(channels, inputs);
        FourParts const parts = convolve(rows, channels, Row::take_taps(staged), inputs);
        if (has_row)
        {
            send(channels, parts);
        }
#pragma unroll 1
        for (int more = index + apart; more < kRowItems; more += apart)
        {
            auto const other = row_item(more);
            send(other, convolve(rows, other, Row::load_taps(p, other), rows.load(other)));
        }
        arrive_at_cluster(); // what was needed of what is written below has been read
        wait_for_phase(rows_barrier, 0);
        int const columns = item % 2 * 8;
        bool const is_query = item / 2 % 2;
        float* const products = shared.products[item / 4][is_query] + columns;
        multiply_rows<kSize, 4>({shared.rows[is_query]}, keys(), columns, item / 4, products, kMixStride);
        if (item == 0)
        {
            meet(kProductsAreThere, kUntilProducts);
        }
        else
        {
            report(kProductsAreThere, kUntilProducts);
        }
        gating.store();
        if (item == 0)
        {
            mix_reads();
        }
        report(kIsMixed, kUntilMixed);
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
        MixParts const reads(
            [&](int of, int column) // D (q k)
            {
                int const index = of * kMixStride + column;
                float2 const left = *reinterpret_cast<float2 const*>(shared.left + index);
                float2 const one = *reinterpret_cast<float2 const*>(shared.products[0][1] + index);
                float2 const other = *reinterpret_cast<float2 const*>(shared.products[1][1] + index);
                return float2{left.x * (one.x + other.x), left.y * (one.y + other.y)};
            });
        meet(kMayMix, kUntilMix);
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
    }

    // Without branches: what does not need the inputs is computed before they have come.
    __device__ __forceinline__ static FourParts convolve(Row const& rows, typename Row::Item const& channels,
        typename Row::Taps const& taps, typename Row::Inputs const& inputs)
    {
        float4 const y = Row::normed(channels, Row::convolve(taps, inputs, 0));
        return FourParts::scaled(rows.masked(channels, 0, y));
    }

    // Sends a row to all blocks of the cluster.
    __device__ __forceinline__ void send(typename Row::Item const& channels, FourParts const& parts) const
    {
        SplitRows<kSize> const to{shared.rows[channels.head == 0]};
        uint32_t const inbox = shared_address(to.at(channels.row, channels.number));
        auto const& words = reinterpret_cast<float const(&)[4]>(parts.words); // bits, as `send` takes them
#pragma unroll 1
        for (int block = 0; block < static_cast<int>(gridDim.x); block += kSplits)
        {
#pragma unroll
            for (int i = 0; i < kSplits; ++i)
            {
                dflash::send(address_at(inbox, block + i), words, address_at(rows_barrier, block + i));
            }
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
            from = moved(static_cast<T const*>(block.p.x) + block.place.channels() + block.first_value() + value, at,
                static_cast<int>(block.p.x_row_stride) * static_cast<int>(sizeof(T)));
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

    // By a warp that has values or E in shared memory: those who need them do not wait for each other.
    __device__ __forceinline__ void report_values() const
    {
        __syncwarp();
        if (lane == 0)
        {
            arrive(values_barrier);
        }
    }

    // -- values: an item is four rows of four of them, of a lane ------------------------------------------------------

    __device__ __forceinline__ void run_values(int item) const
    {
        static_assert(kLanes * kDeltaRows / Chunk::kRows == 32 * kValueWarps);
        int const of_row = item % kLanes;
        auto const channels = Chunk::item_of(
            p, key_head, heads, (2 + head) * Chunk::kItems + item / kLanes * Chunk::kLanes + split * kLanes + of_row);
        auto& staged = shared.value_taps[item];
        prefetch_windows(item);
        Chunk::stage_taps(p, channels, staged);
        commit_copies();
        Guess const guess = hear_guess();
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
        report_values();
        arrive_at_cluster();
        chunk.keep(channels, inputs); // only this block has read these
    }

    // -- what lies between rows ---------------------------------------------------------------------------------------

    __device__ __forceinline__ void run_solver() const
    {
        Guess const guess = tell_guess();
        auto const rate = Chunk::load_rate(p, place.head);
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
        multiply_pending(pending_decay, shared.pending_behind, shared.pending_kept);
        report(kPendingIsThere, kWithSolver);
        if (whole.count <= 0)
        {
            clear_padding(whole);
            return;
        }
        settle(projected.share);
        settle(projected.decay);
        Chunk const chunk = Chunk::pending(p, whole, key_head);
        auto const gates = chunk.gates_of(rate, projected);
        float const kept = product_to(gates.decay);
        if (lane < kDeltaRows)
        {
            shared.kept[lane] = kept;
        }
        auto const weights = chunk.weigh(gates, shared.lower);
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            shared.left[(chunk.first_weighed() + i) * kMixStride + chunk.column] = weights.left[i];
        }
        report_values();
        arrive_at_cluster();
        meet(kProductsAreThere, kUntilProducts);
        chunk.solve(weights, gates.share, shared.products, shared.lower, shared.solved);
        report(kMayMix, kUntilMix);
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
        Pending const pending = find_pending();
        float* const states = State::of_lane(memory(0));
        prefetch_likely(pending);
        Guess const guess = hear_guess();
        prefetch_state(guess.guessed.at.x);
        auto const wait_for_loads = [&] // of the other warps
        {
            wait();
            meet(kLoadsBegan, kThreads);
        };
        State state;
        Staged staged;
        float* state_at = nullptr;
        Segment const whole = guess.load(
            wait_for_loads,
            [&](Segment const& segment)
            {
                staged = pending.of(segment.pending());
                state_at = moved(states, segment.slot, p.value_heads * kSize * kSize * static_cast<int>(sizeof(float)));
                settle(staged.from);
                settle(state_at);
            },
            [&]
            {
                wait_for_copies<0>(); // by a guess that was wrong
                stage_pending(staged);
                state.load(state_at);
            },
            HearingPending{shared});
        if (whole.count <= 0)
        {
            return;
        }
        Segment const segment = whole.pending();
        if (segment.is_zero)
        {
            state.clear();
            settle(state.at[0][0][0]); // a branch: else each number would be chosen, as soon as it has come
        }
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
        wait_for_phase(values_barrier, 0);
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
    }

    __device__ __forceinline__ float* memory(int slot) const
    {
        return place.state(slot) + (split * kValues + tile * 16) * kSize + part * kPartKeys;
    }

    // A thread's part of the accepted rows' keys or writes: four numbers of every kRowsApart-th row.
    struct Staged
    {
        float const* from;
        float* to;
        int from_apart; // bytes between one row and the next
        int to_apart; // numbers
        int rows;
        int accepted; // of these; zeros for the others
    };

    static constexpr int kRowsApart = kStateWarps / 2;

    // The same of all that a slot may have, of the first slot.
    struct Pending
    {
        float const* from;
        float* to;
        int from_apart;
        int to_apart;
        int row;
        int slot_bytes; // between one slot and the next
        bool is_there;

        __device__ __forceinline__ Staged of(Segment const& segment) const
        {
            int const rows = is_there ? segment.count_taken() / kRowsApart : 0;
            int const accepted = (segment.accepted - row + kRowsApart - 1) / kRowsApart; // below 0 none, too
            return {moved(from, segment.slot, slot_bytes), to, from_apart, to_apart, rows, accepted};
        }
    };

    // Of two warps, one has the keys of a row, the other the block's values of what it writes.
    __device__ __forceinline__ Pending find_pending() const
    {
        static_assert(kSize == 4 * 32 && kValues <= kSize);
        int const row = warp / 2;
        int const number = 4 * lane;
        bool const is_key = warp % 2 == 0;
        int const row_bytes = (is_key ? p.key_heads : p.value_heads) * kSize * static_cast<int>(sizeof(float));
        float const* const from = is_key ? place.keys(0, row) : place.writes(0, row) + split * kValues;
        float* const to = is_key ? &shared.pending_keys[row][number] : &shared.pending_writes[row][number];
        return {from + number, to, kRowsApart * row_bytes, kRowsApart * (is_key ? S::kKeyStride : S::kValueStride), row,
            p.pending * row_bytes, is_key || number < kValues};
    }

    // Asks for most pending rows of the slot that has the segment's index, as it most likely is: before memory has said
    // so.
    __device__ __forceinline__ void prefetch_likely(Pending const& pending) const
    {
        float const* from = moved(pending.from, likely_slot(), pending.slot_bytes);
#pragma unroll
        for (int row = 0; row < kDeltaRows / 2; row += kRowsApart)
        {
            if (pending.is_there && pending.row + row < p.pending)
            {
                prefetch(from);
            }
            from = moved(from, 1, pending.from_apart);
        }
    }

    __device__ __forceinline__ int likely_slot() const
    {
        return min(static_cast<int>(blockIdx.z), p.slots - 1);
    }

    // Behind what takes fewer bytes, for which others wait.
    __device__ __forceinline__ void prefetch_state(int slot) const
    {
        constexpr int kLine = 128 / static_cast<int>(sizeof(float));
        constexpr int kLines = kPartKeys / kLine; // of a value's keys
        static_assert(16 * kLines == 32);
        prefetch(memory(slot) + lane / kLines * kSize + lane % kLines * kLine);
    }

    // Begins to copy them.
    __device__ __forceinline__ static void stage_pending(Staged staged)
    {
#pragma unroll 1
        for (int i = 0; i < staged.rows; ++i)
        {
            stage_16(staged.to, staged.from, i < staged.accepted);
            staged.to += staged.to_apart;
            staged.from = moved(staged.from, 1, staged.from_apart);
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
        auto const keys = [&](int half, int row, int key)
        {
            float const* const from = shared.pending_keys[8 * half + 2 * at.column + row] + part * kPartKeys + key;
            return *reinterpret_cast<float2 const*>(from);
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
        TileNumbers out;
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            out[i / 4][i % 4] = (i % 2 == 0 ? kept[i / 4].x : kept[i / 4].y) * of_queries[i / 4][i % 4];
        }
        int64_t const begins = int64_t{segment.first_row + row(0, 0)} * place.values_of_row();
        T* const to = static_cast<T*>(p.out) + begins + first_value() + value(0);
        meet(kIsMixed, kUntilMixed);
        add_mixed<kMixStride>(missing, shared.mixed, out);
        send_squares(out);
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            out[i / 4][i % 4] *= shared.gates[row(i / 4, i % 4)][value(i % 4)];
        }
        wait_for_phase(squares_barrier, 0);
        write_out(segment.count, out, to);
    }

    // Sums of the squares of the tile's values, to both blocks of the head. Of eight lanes that have four rows' values,
    // one adds up a row's for one of the blocks.
    __device__ __forceinline__ void send_squares(TileNumbers const& out) const
    {
        float sums[4]; // of the lane's rows
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            float const* const x = &out[i / 2][i % 2];
            sums[i] = x[0] * x[0] + x[2] * x[2];
        }
        bool const has_last = lane & 8; // two of the rows
        bool const has_second = lane & 4; // of these
        float const first = (has_last ? sums[2] : sums[0]) + Chunk::shuffled(has_last ? sums[0] : sums[2], 8);
        float const second = (has_last ? sums[3] : sums[1]) + Chunk::shuffled(has_last ? sums[1] : sums[3], 8);
        float sum[1] = {(has_second ? second : first) + Chunk::shuffled(has_second ? first : second, 4)};
        sum[0] += Chunk::shuffled(sum[0], 16);
        int const to = head * kSplits + lane / 16;
        float* const inbox = &shared.squares[split * kTiles + tile][row(lane / 8 % 2, lane / 4 % 2)];
        dflash::send(address_at(shared_address(inbox), to), sum, address_at(squares_barrier, to));
    }

    // What normed outputs of the lane's rows are multiplied by: a lane adds up half of what there is of a row.
    __device__ __forceinline__ void find_roots(float (&roots)[2][2]) const
    {
        static_assert(kSplits * kTiles == 8 && kDeltaRows == 16);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
        {
            sum += shared.squares[lane / 16 * kTiles + i][lane % 16];
        }
        sum += Chunk::shuffled(sum, 16);
        float const root = rsqrtf(sum / static_cast<float>(kSize) + p.norm_eps);
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            roots[i / 2][i % 2] = __shfl_sync(0xffffffffu, root, row(i / 2, i % 2));
        }
    }

    // to: where the lane's first number goes.
    __device__ __forceinline__ void write_out(int count, TileNumbers const& gated, T* to) const
    {
        float roots[2][2];
        find_roots(roots);
        int const row_bytes = place.values_of_row() * static_cast<int>(sizeof(T));
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            if (row(i / 2, i % 2) < count)
            {
                T* const at = moved(to, 8 * (i / 2) + i % 2, row_bytes);
                at[0] = from_float<T>(gated[i / 2][i % 2] * roots[i / 2][i % 2]);
                at[8] = from_float<T>(gated[i / 2][i % 2 + 2] * roots[i / 2][i % 2]);
            }
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
