// The division of attention's work among blocks.
#pragma once

#include "dflash_kernels.h"
#include "instructions.cuh"
#include "launch.cuh"

namespace dflash
{

constexpr int kTile = 64; // keys

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

// Segments by index, by all lanes of a warp: each holds one of the first 32, read once.
struct Segments
{
    dflash_attention_params const& p;
    Segment own;

    __device__ explicit Segments(dflash_attention_params const& params)
        : p(params)
        , own(read_own())
    {
    }

    __device__ Segment read_own() const
    {
        return static_cast<int>(threadIdx.x % 32) < p.slots ? segment_of(p, threadIdx.x % 32) : Segment{};
    }

    // Reads them again; whether any is another one now.
    __device__ bool renew()
    {
        Segment const before = own;
        own = read_own();
        bool const is_same = own.slot == before.slot && own.first_row == before.first_row && own.rows == before.rows
            && own.length == before.length;
        return __any_sync(0xffffffffu, !is_same);
    }

    // A segment of the lane's own.
    __device__ Segment of_lane(int index) const
    {
        return index < 32 ? own : segment_of(p, index);
    }

    // One segment, the same in all lanes.
    __device__ Segment of(int index) const
    {
        if (index >= 32)
        {
            return segment_of(p, index);
        }
        constexpr unsigned kAll = 0xffffffffu;
        return {__shfl_sync(kAll, own.slot, index), __shfl_sync(kAll, own.first_row, index),
            __shfl_sync(kAll, own.rows, index), __shfl_sync(kAll, own.length, index)};
    }
};

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

// The cut of tiles into ranges. Where few enough ranges hold each (slot, head) apart from the others, they do, so that
// no block has to end one (slot, head) before it begins another.
struct Division
{
    int each = 0; // tiles of a range
    int units; // of all segments
    bool is_apart = false;

    // Called by all lanes of a warp. Tiles are counted, and then ranges of some sizes, by one loop: code that runs once
    // takes longer to come than to run.
    __device__ __forceinline__ Division(Work const& w, Segments const& segments)
    {
        int most = 0;
#pragma unroll 1
        for (int size = 1;;)
        {
            Quotient const quotient(size);
            int used = 0;
            int shortest = 1 << 30;
            int longest = 0;
            int count = 0;
#pragma unroll 1
            for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
            {
                int const tiles = tiles_of(w.p, segments.of_lane(b));
                count += quotient.up(tiles);
                used += tiles > 0 ? 1 : 0;
                shortest = tiles > 0 ? min(shortest, tiles) : shortest;
                longest = max(longest, tiles);
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
                used = __reduce_add_sync(0xffffffffu, used) * w.p.kv_heads;
                uint32_t const ranges = w.ranges;
                each = max(static_cast<int>((units + ranges - 1) / ranges), w.least_units);
                if (used > w.ranges)
                {
                    // If all have one length, whole ones may come out almost even, and leave nothing to combine.
                    shortest = __reduce_min_sync(0xffffffffu, shortest);
                    longest = __reduce_max_sync(0xffffffffu, longest);
                    int const whole = static_cast<int>((used + ranges - 1) / ranges) * longest;
                    each = shortest == longest && whole <= each + max(each / 16, 1) ? whole : each;
                }
                size = each;
                most = used > w.ranges ? 0 : each + max(each / 4, 1);
            }
            if (size > most)
            {
                return;
            }
        }
    }

    // Units are ranges where these are apart, else tiles.
    __device__ __forceinline__ int unit() const
    {
        return is_apart ? each : 1;
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
template <typename Count>
__device__ __forceinline__ Found find_segment(
    dflash_attention_params const& p, Segments const& segments, int unit, Count const& count)
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

    Cursor() = default;

    // Called by all lanes of a warp; unit must be below the sum of all.
    __device__ __forceinline__ Cursor(
        dflash_attention_params const& p, Segments const& segments, Division const& division, int unit)
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

    // Called by all lanes of a warp.
    __device__ __forceinline__ Span(Work const& w, Segments const& segments, int range)
    {
        Division const division(w, segments);
        each = division.each;
        int const unit = division.is_apart ? range : range * each;
        if (unit < division.units)
        {
            at = Cursor(w.p, segments, division, unit);
            tiles = min(each, division.is_apart ? at.tiles - at.tile : division.units - unit);
        }
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
// them; but mostly a right one, and what follows from them takes longer than the look whether they have changed. By all
// threads of the block.
__device__ __forceinline__ Span wait_for_span(Work const& w)
{
    ask_for_sinks(w.p);
    Segments segments(w.p);
    bool const can_guess = w.p.slots <= 32; // then all is in registers
    bool is_new = can_guess;
    Span span;
#pragma unroll 1
    for (bool has_waited = false;; has_waited = true)
    {
        if (is_new)
        {
            span = Span(w, segments, blockIdx.x);
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
