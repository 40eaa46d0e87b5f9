// The division of attention's work among blocks.
#pragma once

#include "dflash_kernels.h"

namespace dflash
{

constexpr int kTile = 64; // keys

// Packed row = query head of the group * Q + i. A fragment is 16 packed rows of 8 columns as tensor cores give them: of
// rows lane / 4 and 8 further each, columns lane % 4 * 2 and the next.
struct Work
{
    dflash_attention_params p;
    float4* partial_out; // [ranges, 2 or exactly cut 1, row blocks, M / 16, D / 8, 32]: fragments, loaded and stored as
                         // whole lines
    float2* partial_sums; // [ranges, 2 or exactly cut 1, row blocks, M]: maximum (of scaled logits, base 2) and sum
    int group; // query heads of one KV head
    int packed_rows; // group * Q
    float per_row; // 1 / Q
    int row_blocks; // M tiles that hold them
    int ranges; // of a (slot, head) that is cut exactly, places for its cuts and its tails
    int least_units; // of a range
    int most_cuts; // of a (slot, head) that is cut exactly: see attention_exact_work.cuh
    int blocks; // that take ranges beside each other
    int page_tiles; // tiles of a page
    float per_page; // 1 / page_tiles
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

// The cut of units into ranges. Where few enough ranges hold each (slot, head) apart from the others, its units count
// as a multiple of a range's, so that no block has to end one (slot, head) before it begins another.
struct Division
{
    int each; // units of a range
    int units; // of all segments
    bool is_apart;
    bool has_idle; // slots without keys

    // Called by all lanes of a warp.
    __device__ Division(Work const& w, Segments const& segments)
        : is_apart(false)
    {
        int used = 0;
        int shortest = 1 << 30;
        int longest = 0;
        units = 0;
        for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
        {
            int const tiles = tiles_of(w.p, segments.of_lane(b));
            units += tiles;
            used += tiles > 0 ? 1 : 0;
            shortest = tiles > 0 ? min(shortest, tiles) : shortest;
            longest = max(longest, tiles);
        }
        units = __reduce_add_sync(0xffffffffu, units) * w.p.kv_heads;
        used = __reduce_add_sync(0xffffffffu, used) * w.p.kv_heads;
        has_idle = used < w.p.slots * w.p.kv_heads;
        each = max((units + w.ranges - 1) / w.ranges, w.least_units);
        if (used > w.ranges)
        {
            // If all have one length, whole ones may come out almost even, and leave nothing to combine.
            shortest = __reduce_min_sync(0xffffffffu, shortest);
            longest = __reduce_max_sync(0xffffffffu, longest);
            int const whole = (used + w.ranges - 1) / w.ranges * longest;
            each = shortest == longest && whole <= each + max(each / 16, 1) ? whole : each;
        }
        int const most = used > w.ranges ? 0 : each + max(each / 4, 1);
        for (int size = each; size <= most; size += max(each / 32, 1))
        {
            int ranges = 0;
            for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
            {
                ranges += (tiles_of(w.p, segments.of_lane(b)) + size - 1) / size;
            }
            ranges = __reduce_add_sync(0xffffffffu, ranges) * w.p.kv_heads;
            if (ranges <= w.ranges)
            {
                is_apart = true;
                each = size;
                units = ranges * size;
                break;
            }
        }
    }

    // The units that a (slot, head) of so many tiles counts as.
    __device__ int of(int tiles) const
    {
        return is_apart ? (tiles + each - 1) / each * each : tiles;
    }

    // Units of the segments before one. By all lanes of a warp.
    __device__ int before(Work const& w, Segments const& segments, int index) const
    {
        int sum = 0;
        for (int b = threadIdx.x % 32; b < index; b += 32)
        {
            sum += of(tiles_of(w.p, segments.of_lane(b)));
        }
        return __reduce_add_sync(0xffffffffu, sum) * w.p.kv_heads;
    }
};

// The segment that a unit lies in, and the units of those before it. count: of a segment. By all lanes of a warp; unit
// must be below the sum of all.
template <typename Count>
__device__ __forceinline__ int find_segment(
    dflash_attention_params const& p, Segments const& segments, int unit, int& before, Count const& count)
{
    int const lane = threadIdx.x % 32;
    for (int b = 0;; b += 32)
    {
        int const own = b + lane < p.slots ? count(segments.of_lane(b + lane)) : 0;
        int end = own;
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
            before += __shfl_sync(0xffffffffu, end - own, found);
            return b + found;
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
    __device__ Cursor(dflash_attention_params const& p, Segments const& segments, Division const& division, int unit)
    {
        int before = 0;
        int const found = find_segment(p, segments, unit, before,
            [&](Segment const& s) { return division.of(tiles_of(p, s)) * p.kv_heads; });
        enter(p, found, segments.of(found));
        int const counted = division.of(tiles);
        head = (unit - before) / counted;
        tile = unit - before - head * counted;
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

// The units of one range.
struct Span
{
    int first = 0;
    int past = 0;
    Cursor at; // the first; where there is none, nothing

    Span() = default;

    // Called by all lanes of a warp.
    __device__ Span(Work const& w, Segments const& segments, int range)
    {
        Division const division(w, segments);
        first = range * division.each;
        past = min(first + division.each, division.units);
        if (first < past)
        {
            at = Cursor(w.p, segments, division, first);
            past = division.is_apart ? min(past, first + at.tiles - at.tile) : past;
        }
    }
};

} // namespace dflash
