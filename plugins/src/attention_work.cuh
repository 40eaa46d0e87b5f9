// The division of attention's work among blocks.
#pragma once

#include "dflash_kernels.h"
#include "instructions.cuh"
#include "launch.cuh"

namespace dflash
{

constexpr int kTile = 64; // keys
constexpr int kMostWarps = 12; // of a block that attends

// Where the parts of a (slot, head) lie that was divided among ranges, for the kernel that combines them.
struct __align__(16) Divided
{
    int first_range = 0;
    int count = 0; // ranges; of fewer than two nothing is combined
    int head;
    int first_row; // of its segment
    int rows;
};

// Packed row = query head of the group * Q + i. A fragment is 16 packed rows of 8 columns as tensor cores give them: of
// rows lane / 4 and 8 further each, columns lane % 4 * 2 and the next.
struct Work
{
    dflash_attention_params p;
    float4* partial_out; // [ranges, 2 or exactly cut 1, row tiles, D / 8, 32]: fragments, loaded and stored as whole
                         // lines
    float2* partial_sums; // [ranges, 2 or exactly cut 1, row tiles, 16]: maximum (of scaled logits, base 2) and sum
    Divided* divided; // [owners], but for exact cuts: a (slot, head)'s, or that of the one that a range's end divides
    int owners; // (slot, head)s, or ranges where these are fewer
    int group; // query heads of one KV head
    int packed_rows; // group * Q
    float per_row; // 1 / Q
    int row_blocks; // M tiles that hold them
    int row_tiles; // tiles of 16 of them, of all row blocks
    int ranges; // of a (slot, head) that is cut exactly, places for its cuts and its tails
    int least_units; // of a range
    int most_cuts; // of a (slot, head) that is cut exactly: see attention_exact_work.cuh
    int blocks; // that take ranges beside each other
    int page_tiles; // tiles of a page
    float per_page; // 1 / page_tiles

    // Whether owners are ranges.
    __device__ __forceinline__ bool has_range_owners() const
    {
        return owners < p.slots * p.kv_heads;
    }
};

// Which of the group a packed row's query head is; exact, for rows are few.
__device__ __forceinline__ int head_of(Work const& w, int packed_row)
{
    return static_cast<int>((packed_row + 0.5f) * w.per_row);
}

// The two rows that a thread has of a fragment.
struct Rows
{
    int packed[2];
    int query[2]; // of the segment's Q

    // first: the fragment's first packed row.
    __device__ __forceinline__ Rows(Work const& w, int first)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            packed[r] = first + threadIdx.x % 32 / 4 + r * 8;
            query[r] = packed[r] - head_of(w, packed[r]) * w.p.rows;
        }
    }
};

// -- division of the work ---------------------------------------------------------------------------------------------

// One slot's rows of the call. They are the last of its keys.
struct Segment
{
    int slot; // of the caches
    int first_row; // of the output
    int rows;
    int length; // keys; 0: it costs nothing
};

// Loads from the L2: the combining kernel reads segments before it waits, and this SM's L1 may be older than they are.
__device__ __forceinline__ Segment segment_of(dflash_attention_params const& p, int index)
{
    Segment s{index, index * p.rows, p.rows, p.added ? __ldcg(p.added + index) : 0};
    if (p.segments)
    {
        int4 const x = __ldcg(reinterpret_cast<int4 const*>(p.segments) + index); // slot, start, first row, count
        s.slot = x.x;
        if (p.block == 0)
        {
            s.first_row = x.z;
            s.rows = min(max(x.w, 0), p.rows);
        }
        s.length = x.w > 0 ? s.length + x.y + s.rows : 0;
    }
    else
    {
        s.length += __ldcg(p.lengths + index) + p.length_offset;
    }
    s.length = min(max(s.length, 0), p.cache_rows);
    return s;
}

// The first tile that any row of a segment sees.
__device__ __forceinline__ int first_tile_of(dflash_attention_params const& p, Segment const& s)
{
    return p.window > 0 ? max(s.length - s.rows - p.window + 1, 0) / kTile : 0;
}

__device__ __forceinline__ int tiles_of(dflash_attention_params const& p, Segment const& s)
{
    return (s.length + kTile - 1) / kTile - first_tile_of(p, s);
}

// Segments by index, by all lanes of a warp: each holds one of the first 32, read once, and of kMost one of the next.
template <int kMost>
struct HeldSegments
{
    static_assert(kMost == 32 || kMost == 64);
    static constexpr int kHeld = kMost;

    dflash_attention_params const& p;
    Segment own;
    Segment further; // by 32

    __device__ explicit HeldSegments(dflash_attention_params const& params)
        : p(params)
        , own(read(0))
        , further(kHeld > 32 ? read(32) : Segment{})
    {
    }

    __device__ Segment read(int first) const
    {
        int const index = first + static_cast<int>(threadIdx.x % 32);
        return index < p.slots ? segment_of(p, index) : Segment{};
    }

    // Reads them again; whether any is another one now.
    __device__ bool renew()
    {
        bool is_new = renew(own, 0);
        if constexpr (kHeld > 32)
        {
            is_new |= renew(further, 32);
        }
        return __any_sync(0xffffffffu, is_new);
    }

    __device__ bool renew(Segment& held, int first) const
    {
        Segment const before = held;
        held = read(first);
        return held.slot != before.slot || held.first_row != before.first_row || held.rows != before.rows
            || held.length != before.length;
    }

    // A segment of the lane's own.
    __device__ Segment of_lane(int index) const
    {
        return index < 32 ? own : index < kHeld ? further : segment_of(p, index);
    }

    // One segment, the same in all lanes.
    __device__ Segment of(int index) const
    {
        if (index >= kHeld)
        {
            return segment_of(p, index);
        }
        constexpr unsigned kAll = 0xffffffffu;
        Segment const held = kHeld == 32 || index < 32 ? own : further;
        return {__shfl_sync(kAll, held.slot, index % 32), __shfl_sync(kAll, held.first_row, index % 32),
            __shfl_sync(kAll, held.rows, index % 32), __shfl_sync(kAll, held.length, index % 32)};
    }
};

using Segments = HeldSegments<32>;

// Quotients by one number, without the code of a division: exact below 2^20. Divided are tiles times KV heads, and what
// a slot's rows give, by eight.
struct Quotient
{
    float number;
    float factor; // its reciprocal, wrong by a last place at most

    __device__ __forceinline__ explicit Quotient(int divisor)
        : number(divisor)
    {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(number));
    }

    __device__ __forceinline__ int down(int x) const
    {
        return static_cast<int>((x + 0.5f) * factor);
    }

    __device__ __forceinline__ int up(int x) const
    {
        return static_cast<int>((x + (number - 0.5f)) * factor);
    }
};

// What dividing a (slot, head) costs, in tiles: it is begun and ended twice, and combined. And how much longer than
// equal ones ranges of whole ones may be, of which some have nothing.
constexpr int kDividing = 3;
constexpr int kUneven = 2;

// The cut of tiles into ranges. Where few enough ranges hold each (slot, head) apart from the others, they do, so that
// no block has to end one (slot, head) before it begins another.
struct Division
{
    int each = 0; // tiles of a range
    int units; // of all segments
    int used; // (slot, head)s with keys
    int tiles[2] = {}; // of a head of the lane's segment, and of the one 32 further
    bool is_apart = false;
    bool is_whole = false; // all (slot, head)s are as long, and ranges hold whole ones

    // Called by all lanes of a warp. Tiles are counted, and then ranges of some sizes, by one loop: code that runs once
    // takes longer to come than to run.
    template <int kHeld>
    __device__ __forceinline__ Division(Work const& w, HeldSegments<kHeld> const& segments)
    {
        int most = 0;
#pragma unroll 1
        for (int size = 1;;)
        {
            Quotient const quotient(size);
            int slots = 0;
            int shortest = 1 << 30;
            int longest = 0;
            int count = 0;
#pragma unroll 1
            for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
            {
                int const own = tiles_of(w.p, segments.of_lane(b));
                count += quotient.up(own);
                slots += own > 0 ? 1 : 0;
                shortest = own > 0 ? min(shortest, own) : shortest;
                longest = max(longest, own);
                tiles[0] = b < 32 ? own : tiles[0];
                tiles[1] = b >= 32 && b < 64 ? own : tiles[1];
            }
            count = __reduce_add_sync(0xffffffffu, count) * w.p.kv_heads;
            if (each > 0)
            {
                if (count <= w.ranges)
                {
                    is_apart = true;
                    each = size;
                    units = count;
                    return;
                }
                size += max(each / 32, 1);
            }
            else
            {
                units = count;
                used = __reduce_add_sync(0xffffffffu, slots) * w.p.kv_heads;
                uint32_t const ranges = w.ranges;
                each = max(static_cast<int>((units + ranges - 1) / ranges), w.least_units);
                if (used > w.ranges)
                {
                    // If all have one length, whole ones may come out almost even, and leave nothing to combine.
                    shortest = __reduce_min_sync(0xffffffffu, shortest);
                    longest = __reduce_max_sync(0xffffffffu, longest);
                    int const whole = static_cast<int>((used + ranges - 1) / ranges) * longest;
                    is_whole = shortest == longest && whole <= each + max(each / 16, 1);
                    each = is_whole ? whole : each;
                }
                size = each;
                most = used > w.ranges ? 0 : each + max(each / 4, kDividing);
            }
            if (size > most)
            {
                return;
            }
        }
    }

    // Tiles that a range of whole (slot, head)s may have.
    __device__ __forceinline__ int most_dealt() const
    {
        return each + max(each / 16, kUneven);
    }

    // Units are ranges where these are apart, else tiles.
    __device__ __forceinline__ int unit() const
    {
        return is_apart ? each : 1;
    }
};

// A whole (slot, head) of those that are dealt to a range.
struct Dealt
{
    Segment segment;
    int index; // of the segment
    int head;
};

// Whole (slot, head)s dealt out, where there are more of them than ranges: the longest first, and back and forth, so
// that ranges get almost equally many tiles, and leave nothing to combine. By all lanes of a warp.
struct Deal
{
    static constexpr int kMostSlots = 64;
    static constexpr int kMostRounds = 4;

    int kv_heads;
    int runs; // (slot, head)s with keys
    int rounds; // in each of which a range gets one
    int ranges; // that get any
    int sorted[2]; // tiles * kMostSlots + index of the lane-th segment by falling tiles, and of the one 32 further

    __device__ __forceinline__ Deal(Work const& w, Division const& division)
        : kv_heads(w.p.kv_heads)
        , runs(division.used)
    {
        rounds = Quotient(w.ranges).up(runs);
        ranges = Quotient(max(rounds, 1)).up(runs);
    }

    // Whether ranges of whole ones, were they equally long, would be short enough.
    __device__ __forceinline__ bool may_be_worth(Division const& division) const
    {
        return rounds > 1 && rounds <= kMostRounds && !division.is_whole
            && division.units <= division.most_dealt() * ranges;
    }

    __device__ __forceinline__ void sort(Work const& w, Division const& division)
    {
        int const lane = threadIdx.x % 32;
        sorted[0] = division.tiles[0] * kMostSlots + lane;
        sorted[1] = division.tiles[1] * kMostSlots + lane + 32;
        bool const is_long = w.p.slots > 32;
        // A bitonic network.
#pragma unroll 1
        for (int run = 2; run <= (is_long ? 64 : 32); run *= 2)
        {
#pragma unroll 1
            for (int step = run / 2; step > 0; step /= 2)
            {
                if (step == 32)
                {
                    int const larger = max(sorted[0], sorted[1]);
                    sorted[1] = min(sorted[0], sorted[1]);
                    sorted[0] = larger;
                    continue;
                }
                sorted[0] = exchange(sorted[0], lane, step, run);
                if (is_long)
                {
                    sorted[1] = exchange(sorted[1], lane + 32, step, run);
                }
            }
        }
    }

    static __device__ __forceinline__ int exchange(int own, int nth, int step, int run)
    {
        int const other = __shfl_xor_sync(0xffffffffu, own, step);
        return !(nth & step) == !(nth & run) ? max(own, other) : min(own, other);
    }

    // The tiles, segment and head of what a range gets in a round, each lane's own; no tiles where that is nothing.
    __device__ __forceinline__ int of(int range, int round, int& index, int& head) const
    {
        int const place = round % 2 == 0 ? round * ranges + range : (round + 1) * ranges - 1 - range;
        int const nth = Quotient(kv_heads).down(place);
        int const first = __shfl_sync(0xffffffffu, sorted[0], nth % 32);
        int const second = __shfl_sync(0xffffffffu, sorted[1], nth % 32);
        int const found = nth < 32 ? first : second;
        index = found % kMostSlots;
        head = place - nth * kv_heads;
        return place < runs && round < rounds ? found / kMostSlots : 0;
    }

    // Whether ranges, of which 32 are looked at, are short enough.
    __device__ __forceinline__ bool is_worth(Division const& division) const
    {
        int const lane = threadIdx.x % 32;
        int most = 0;
#pragma unroll 1
        for (int round = 0; round < rounds; ++round)
        {
            int index;
            int head;
            most += of(lane * ranges / 32, round, index, head);
        }
        most = __reduce_max_sync(0xffffffffu, most);
        return most <= division.most_dealt();
    }
};

// The segment that a unit lies in.
struct Found
{
    int index;
    int before; // units of the segments before it
    int count; // of one of its heads
};

// count: units of one of a segment's heads. By all lanes of a warp; unit must be below the sum of all.
template <int kHeld, typename Count>
__device__ __forceinline__ Found find_segment(
    dflash_attention_params const& p, HeldSegments<kHeld> const& segments, int unit, Count const& count)
{
    int const lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll 1
    for (int b = 0;; b += 32)
    {
        int const own = b + lane < p.slots ? count(segments.of_lane(b + lane)) : 0;
        int end = own * p.kv_heads;
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
        {
            int const other = __shfl_up_sync(0xffffffffu, end, step);
            end += lane >= step ? other : 0;
        }
        unsigned const past = __ballot_sync(0xffffffffu, before + end > unit);
        if (past)
        {
            int const found = __ffs(past) - 1;
            before += __shfl_sync(0xffffffffu, end - own * p.kv_heads, found);
            return {b + found, before, __shfl_sync(0xffffffffu, own, found)};
        }
        before += __shfl_sync(0xffffffffu, end, 31);
    }
}

// A place in the order of units.
struct Cursor
{
    int index; // of the segment
    Segment segment;
    int head;
    int tile; // from the segment's first that is seen
    int tiles;
    int first_tile;
    Dealt const* dealt = nullptr; // the next of the range's whole (slot, head)s, where these are dealt out

    Cursor() = default;

    // Called by all lanes of a warp; unit must be below the sum of all.
    template <int kHeld>
    __device__ __forceinline__ Cursor(
        dflash_attention_params const& p, HeldSegments<kHeld> const& segments, Division const& division, int unit)
    {
        Quotient const quotient(division.unit());
        Found const found
            = find_segment(p, segments, unit, [&](Segment const& s) { return quotient.up(tiles_of(p, s)); });
        enter(p, found.index, segments.of(found.index));
        int const nth = unit - found.before;
        head = Quotient(found.count).down(nth);
        tile = (nth - head * found.count) * division.unit();
    }

    __device__ void enter(dflash_attention_params const& p, int at, Segment const& entered)
    {
        index = at;
        segment = entered;
        first_tile = first_tile_of(p, segment);
        tiles = tiles_of(p, segment);
    }

    // Moves to the first unit of the next (slot, head); there must be one.
    __device__ void next_head(dflash_attention_params const& p)
    {
        tile = 0;
        if (dealt)
        {
            head = dealt->head;
            enter(p, dealt->index, dealt->segment);
            ++dealt;
            return;
        }
        if (++head < p.kv_heads)
        {
            return;
        }
        head = 0;
        do
        {
            enter(p, index + 1, segment_of(p, index + 1));
        } while (tiles == 0);
    }

    // Moves to the next unit; there must be one.
    __device__ void advance(dflash_attention_params const& p)
    {
        if (++tile == tiles)
        {
            next_head(p);
        }
    }

    __device__ int first_key() const
    {
        return (first_tile + tile) * kTile;
    }

    // Where the segment's first query lies.
    __device__ int64_t first_query(dflash_attention_params const& p) const
    {
        return p.segments ? segment.first_row * p.q_row_stride : index * p.q_slot_stride;
    }
};

// Where a tile lies in the caches.
struct TilePlace
{
    int page;
    int row; // of the page

    __device__ TilePlace(Work const& w, Cursor const& at)
    {
        int const tile = at.first_tile + at.tile;
        int const nth = static_cast<int>((tile + 0.5f) * w.per_page); // exact, for tiles are few
        row = (tile - nth * w.page_tiles) * kTile;
        page = w.p.page_table ? w.p.page_table[at.segment.slot * w.p.page_table_stride + nth] : at.segment.slot;
    }
};

// The tiles of one range.
struct Span
{
    int tiles = 0;
    int each = 1; // tiles of a range
    Cursor at; // the first; where there is none, nothing

    Span() = default;

    // Called by all lanes of a warp. hand: what whole (slot, head)s are dealt to, the warp's own; null: none are.
    template <int kHeld>
    __device__ __forceinline__ Span(
        Work const& w, HeldSegments<kHeld> const& segments, int range, Dealt* hand = nullptr)
    {
        static_assert(kHeld <= Deal::kMostSlots);
        Division const division(w, segments);
        each = division.each;
        Deal deal(w, division);
        if (hand && w.p.slots <= kHeld && deal.may_be_worth(division))
        {
            deal.sort(w, division);
            if (deal.is_worth(division))
            {
                take(w.p, deal, range, hand);
                return;
            }
        }
        int const unit = division.is_apart ? range : range * each;
        if (unit < division.units)
        {
            at = Cursor(w.p, segments, division, unit);
            tiles = min(each, division.is_apart ? at.tiles - at.tile : division.units - unit);
        }
    }

    // Takes the whole (slot, head)s that are dealt to a range: a lane finds each.
    __device__ __forceinline__ void take(dflash_attention_params const& p, Deal const& deal, int range, Dealt* hand)
    {
        if (range >= deal.ranges)
        {
            return;
        }
        int const round = threadIdx.x % 32;
        int index;
        int head;
        int const own = deal.of(range, round, index, head);
        __syncwarp(); // what was dealt before has been read
        if (own > 0)
        {
            hand[round] = {segment_of(p, index), index, head};
        }
        __syncwarp();
        tiles = __reduce_add_sync(0xffffffffu, own);
        at.dealt = hand;
        at.next_head(p);
    }
};

// Asks the L2 cache for the sinks, which no kernel writes: steps read more between two launches than it keeps, and who
// needs them last would wait for memory.
__device__ __forceinline__ void ask_for_sinks(dflash_attention_params const& p)
{
    constexpr int kLine = 128;
    int const bytes = p.heads * (p.sinks_dtype == DFLASH_FP32 ? 4 : 2), at = static_cast<int>(threadIdx.x) * kLine;
    if (p.sinks && at < bytes)
    {
        prefetch(static_cast<char const*>(p.sinks) + at);
    }
}

// A block's range. Until the wait, which is here, segments are a guess, for a kernel before this one may be writing
// them; but mostly a right one, and what follows from them takes longer than the look whether they have changed. kHeld:
// as many as there are registers for. By all threads of the block.
template <int kHeld>
__device__ __forceinline__ Span wait_for_span(Work const& w)
{
    __shared__ Dealt hands[kMostWarps][Deal::kMostRounds];
    ask_for_sinks(w.p);
    HeldSegments<kHeld> segments(w.p);
    bool const can_guess = w.p.slots <= kHeld; // then all is in registers
    bool is_new = can_guess;
    Span span;
#pragma unroll 1
    for (bool has_waited = false;; has_waited = true)
    {
        if (is_new)
        {
            span = Span(w, segments, blockIdx.x, hands[threadIdx.x / 32]);
        }
        if (has_waited)
        {
            return span;
        }
        __syncthreads();
        // In this order: what begins beside this kernel may then read segments.
        wait();
        trigger();
        is_new = segments.renew() || !can_guess;
    }
}

// Says of every owner where the parts lie that are to be combined: a (slot, head)'s are known to the block that has its
// first tile. By one thread of each range.
__device__ __forceinline__ void announce(Work const& w, Span const& span, int range)
{
    bool const is_of_range = w.has_range_owners();
    // (slot, head)s without keys have no first tile.
    if (is_of_range || (range < w.owners && segment_of(w.p, Quotient(w.p.kv_heads).down(range)).length == 0))
    {
        w.divided[range] = {};
    }
    Quotient const quotient(span.each);
    Cursor at = span.at;
    for (int left = span.tiles; left > 0;)
    {
        int const own = at.tiles - at.tile;
        int const ranges = 1 + quotient.up(max(own - left, 0));
        if (at.tile == 0 && (ranges > 1 || !is_of_range))
        {
            int const owner = is_of_range ? range : at.index * w.p.kv_heads + at.head;
            w.divided[owner] = {range, ranges, at.head, at.segment.first_row, at.segment.rows};
        }
        left -= own;
        if (left > 0)
        {
            at.next_head(w.p);
        }
    }
}

} // namespace dflash
