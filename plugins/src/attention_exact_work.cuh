// Exact attention's cuts of keys, and their division among blocks.
//
// A row at position p of its text has a tail: its last 16 keys, those of positions p - 15 to p. In a tree of drafts they
// lie apart from each other, so a tail's keys are gathered: at whatever places they lie, each has its own place in the
// row's sums. The keys before the tail lie at their positions, for a tree is no deeper than a tail. They are cut at
// every DFLASH_EXACT_KEYS-th from the first on, whatever else there is to do and however many follow; those behind a
// row's own last one, or before its window, have no weight in it. A row's result is that of its tail, and then of its
// cuts, one after the other: it depends on its own keys alone.
#pragma once

#include "attention_work.cuh"
#include "dflash_kernels.h"

namespace dflash
{

constexpr int kTail = DFLASH_EXACT_TAIL; // keys
constexpr int kCutTiles = DFLASH_EXACT_KEYS / kTile;

// The position of a segment's row: as many behind those before the segment as the row has ancestors in it. path: the
// row's, of a tree.
__device__ __forceinline__ int position_of(dflash_attention_params const& p, Segment const& s, int row, uint64_t path)
{
    return s.length - s.rows + (p.row_path ? max(__popcll(path), 1) - 1 : row);
}

// Tiles of keys that any of a segment's rows sees before its tail.
struct CutTiles
{
    int first;
    int past;

    __device__ __forceinline__ CutTiles(dflash_attention_params const& p, Segment const& s)
    {
        int const keys = max(s.length - (p.row_path ? s.rows : kTail), 0);
        past = (keys + kTile - 1) / kTile;
        first = min(first_tile_of(p, s), past);
    }

    __device__ __forceinline__ int count() const
    {
        return past - first;
    }

    // The cut that the first of them lies in.
    __device__ __forceinline__ int first_cut() const
    {
        return first / kCutTiles;
    }

    __device__ __forceinline__ int cuts() const
    {
        return count() > 0 ? (past + kCutTiles - 1) / kCutTiles - first_cut() : 0;
    }
};

// The cut of each (slot, head) into ranges, of cuts and tails: all of one, or a cut, the last of them with the tails or
// not. All give the same bits: what is likely to end soonest.
struct ExactDivision
{
    int ranges = 0; // of all segments
    bool is_whole = true;
    bool is_apart = false; // tails are

    // Called by all lanes of a warp.
    __device__ ExactDivision(Work const& w, Segments const& segments)
    {
        // What it costs to begin and end a range, to combine ranges, and tails: in tiles.
        constexpr int kBegin = 6;
        constexpr int kCombine = 3;
        constexpr int kTails = 2;
        int used = 0;
        int cuts = 0;
        int joined = 0;
        int longest = 0;
        for (int b = threadIdx.x % 32; b < w.p.slots; b += 32)
        {
            Segment const s = segments.of_lane(b);
            CutTiles const tiles(w.p, s);
            int const own = tiles.cuts();
            used += s.length > 0 ? 1 : 0;
            cuts += own;
            joined += s.length > 0 ? max(own, 1) : 0;
            longest = max(longest, tiles.count());
        }
        used = __reduce_add_sync(0xffffffffu, used) * w.p.kv_heads;
        cuts = __reduce_add_sync(0xffffffffu, cuts) * w.p.kv_heads;
        joined = __reduce_add_sync(0xffffffffu, joined) * w.p.kv_heads;
        longest = __reduce_max_sync(0xffffffffu, longest);
        auto const rounds = [&](int count) { return (count + w.blocks - 1) / w.blocks; };
        is_apart = cuts + used <= w.blocks;
        int const cut = min(longest, kCutTiles) + kBegin + (is_apart ? 0 : kTails);
        is_whole = rounds(used) * (longest + kBegin + kTails) <= rounds(joined) * cut + kCombine;
        ranges = is_whole ? used : is_apart ? cuts + used : joined;
    }

    // Ranges of one of a segment's heads.
    __device__ __forceinline__ int of(dflash_attention_params const& p, Segment const& s) const
    {
        int const cuts = is_whole ? 0 : CutTiles(p, s).cuts();
        return s.length == 0 ? 0 : is_apart && !is_whole ? cuts + 1 : max(cuts, 1);
    }
};

// What a block takes of a (slot, head) at a time: its tails, and tiles of its cuts, or one of both.
struct ExactRange
{
    Cursor at; // its first tile of cuts
    int past; // the tile behind its last
    int part; // of the (slot, head)
    bool is_all; // of the (slot, head)
    bool has_tails;

    ExactRange() = default;

    // Called by all lanes of a warp; range must be below those of the division.
    __device__ ExactRange(Work const& w, Segments const& segments, ExactDivision const& division, int range)
    {
        dflash_attention_params const& p = w.p;
        Found const found = find_segment(p, segments, range, [&](Segment const& s) { return division.of(p, s); });
        at.index = found.index;
        at.segment = segments.of(at.index);
        CutTiles const tiles(p, at.segment);
        at.tiles = tiles.past;
        at.first_tile = 0;
        int const nth = range - found.before;
        at.head = Quotient(found.count).down(nth);
        part = nth - at.head * found.count;
        is_all = found.count == 1;
        has_tails = part == found.count - 1;
        int const cut = tiles.first_cut() + part;
        at.tile = min(max(cut * kCutTiles, tiles.first), tiles.past);
        past = is_all ? tiles.past : min((cut + 1) * kCutTiles, tiles.past);
    }

    // The first tile that any tail has a key in.
    __device__ __forceinline__ int first_tail() const
    {
        return max(at.segment.length - at.segment.rows - (kTail - 1), 0) / kTile;
    }

    __device__ __forceinline__ int past_tail() const
    {
        return (at.segment.length + kTile - 1) / kTile;
    }

    __device__ __forceinline__ int tail_tiles() const
    {
        return has_tails ? past_tail() - first_tail() : 0;
    }

    __device__ __forceinline__ int tiles() const
    {
        return tail_tiles() + past - at.tile;
    }

    // The place of the partial result of the range's tails; those of the (slot, head)'s cuts are behind it.
    __device__ __forceinline__ int tails_result(Work const& w) const
    {
        return (at.index * w.p.kv_heads + at.head) * (w.most_cuts + 1);
    }

    __device__ __forceinline__ int cut_result(Work const& w) const
    {
        return tails_result(w) + 1 + part;
    }
};

} // namespace dflash
