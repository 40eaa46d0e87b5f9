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
    float4* partial_out; // [ranges, 2, row blocks, M / 16, D / 8, 32]: fragments, loaded and stored as whole lines
    float2* partial_sums; // [ranges, 2, row blocks, M]: maximum (of scaled logits, base 2) and sum
    int group; // query heads of one KV head
    int packed_rows; // group * Q
    float per_row; // 1 / Q
    int row_blocks; // M tiles that hold them
    int ranges;
    int least_units; // of a range
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
    int query[2]; // of the slot's Q

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

// Loads from the L2: the combining kernel reads lengths before it waits, and this SM's L1 may be older than they are.
__device__ __forceinline__ int length_of(dflash_attention_params const& p, int slot)
{
    int const length = __ldcg(p.lengths + slot) + (p.added ? __ldcg(p.added + slot) : 0) + p.length_offset;
    return min(max(length, 0), p.cache_rows);
}

// The first tile that any row of a slot sees.
__device__ __forceinline__ int first_tile_of(dflash_attention_params const& p, int length)
{
    return p.window > 0 ? max(length - p.rows - p.window + 1, 0) / kTile : 0;
}

__device__ __forceinline__ int tiles_of(dflash_attention_params const& p, int length)
{
    return (length + kTile - 1) / kTile - first_tile_of(p, length);
}

// Lengths by slot, by all lanes of a warp: each holds one of the first 32, read once.
struct Lengths
{
    dflash_attention_params const& p;
    int own;

    __device__ explicit Lengths(dflash_attention_params const& params)
        : p(params)
        , own(static_cast<int>(threadIdx.x % 32) < p.slots ? length_of(p, threadIdx.x % 32) : 0)
    {
    }

    // Reads them again; whether any is another one now.
    __device__ bool renew()
    {
        int const before = own;
        own = static_cast<int>(threadIdx.x % 32) < p.slots ? length_of(p, threadIdx.x % 32) : 0;
        return __any_sync(0xffffffffu, own != before);
    }

    // The length of a slot of the lane's own.
    __device__ int of_lane(int slot) const
    {
        return slot < 32 ? own : length_of(p, slot);
    }

    // The length of one slot, the same in all lanes.
    __device__ int of(int slot) const
    {
        return slot < 32 ? __shfl_sync(0xffffffffu, own, slot) : length_of(p, slot);
    }
};

// The cut of units into ranges. Where few enough ranges hold each (slot, head) apart from the others, its units count
// as a multiple of a range's, so that no block has to end one (slot, head) before it begins another.
struct Division
{
    int each; // units of a range
    int units; // of all slots
    bool is_apart;

    // Called by all lanes of a warp.
    __device__ Division(Work const& w, Lengths const& lengths)
        : is_apart(false)
    {
        int used = 0;
        int shortest = 1 << 30;
        int longest = 0;
        units = 0;
        for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
        {
            int const tiles = tiles_of(w.p, lengths.of_lane(b));
            units += tiles;
            used += tiles > 0 ? 1 : 0;
            shortest = tiles > 0 ? min(shortest, tiles) : shortest;
            longest = max(longest, tiles);
        }
        units = __reduce_add_sync(0xffffffffu, units) * w.p.kv_heads;
        used = __reduce_add_sync(0xffffffffu, used) * w.p.kv_heads;
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
                ranges += (tiles_of(w.p, lengths.of_lane(b)) + size - 1) / size;
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

    // Units of the slots before one. By all lanes of a warp.
    __device__ int before(Work const& w, Lengths const& lengths, int slot) const
    {
        int sum = 0;
        for (int b = threadIdx.x % 32; b < slot; b += 32)
        {
            sum += of(tiles_of(w.p, lengths.of_lane(b)));
        }
        return __reduce_add_sync(0xffffffffu, sum) * w.p.kv_heads;
    }
};

// A place in the order of units.
struct Cursor
{
    int slot;
    int head;
    int tile; // from the slot's first that is seen
    int tiles;
    int length;
    int first_tile;

    Cursor() = default;

    // Called by all lanes of a warp; unit must be below the sum of all.
    __device__ Cursor(dflash_attention_params const& p, Lengths const& lengths, Division const& division, int unit)
    {
        int const lane = threadIdx.x % 32;
        int before = 0;
        for (int b = 0;; b += 32)
        {
            int const own = b + lane < p.slots ? division.of(tiles_of(p, lengths.of_lane(b + lane))) * p.kv_heads : 0;
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
                enter(p, b + found, lengths.of(b + found));
                break;
            }
            before += __shfl_sync(0xffffffffu, end, 31);
        }
        int const counted = division.of(tiles);
        head = (unit - before) / counted;
        tile = unit - before - head * counted;
    }

    __device__ void enter(dflash_attention_params const& p, int at, int rows)
    {
        slot = at;
        length = rows;
        first_tile = first_tile_of(p, length);
        tiles = tiles_of(p, length);
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
            enter(p, slot + 1, length_of(p, slot + 1));
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
};

// The units of one range.
struct Span
{
    int first = 0;
    int past = 0;
    Cursor at; // the first; where there is none, nothing

    Span() = default;

    // Called by all lanes of a warp.
    __device__ Span(Work const& w, Lengths const& lengths, int range)
    {
        Division const division(w, lengths);
        first = range * division.each;
        past = min(first + division.each, division.units);
        if (first < past)
        {
            at = Cursor(w.p, lengths, division, first);
            past = division.is_apart ? min(past, first + at.tiles - at.tile) : past;
        }
    }
};

} // namespace dflash
