// The division of prompts' attention among blocks.
#pragma once

#include "dflash_kernels.h"

namespace dflash
{
namespace prompts
{

constexpr int kRows = 128; // packed rows of an item
constexpr int kKeys = 128; // of a tile
constexpr int kMostItems = 80; // of a block

// Packed row = query row * group + query head of the group: an item has the rows that a run of a segment's query rows
// and the heads of one KV head make, and all keys that they see.
struct PromptWork
{
    dflash_attention_params p;
    int group; // query heads of one KV head
    int item_rows; // query rows of an item: as many as fit
    int box_rows; // keys that the copy engine brings at once: half a tile, or a whole one
};

struct alignas(16) Item
{
    int slot; // of the caches
    int head; // the KV head
    int first_row; // of the queries and the output
    int rows;
    int start; // position of the first row
    int length; // of the segment's keys
    int first_key; // of the first tile
    int tiles; // at least one
};

__device__ __forceinline__ int row_blocks_of(PromptWork const& w, int4 const& segment)
{
    return (segment.w + w.item_rows - 1) / w.item_rows;
}

// The index-th run of query rows of all segments (slot, start, first row, count); there must be one.
__device__ __forceinline__ Item item_of(PromptWork const& w, int4 const* segments, int index, int head)
{
    int4 segment = *segments;
    for (int blocks = row_blocks_of(w, segment); index >= blocks; blocks = row_blocks_of(w, segment))
    {
        index -= blocks;
        segment = *++segments;
    }
    int const before = index * w.item_rows;
    Item item;
    item.slot = segment.x;
    item.head = head;
    item.first_row = segment.z + before;
    item.rows = min(segment.w - before, w.item_rows);
    item.start = segment.y + before;
    item.length = min(segment.y + segment.w, w.p.cache_rows);
    int const past = min(item.start + item.rows, w.p.cache_rows);
    int const first_seen = w.p.window > 0 ? max(item.start - w.p.window + 1, 0) : 0;
    // Pages before the first key that is seen may be another's by now: not even a box lies in one of them.
    item.first_key = min(first_seen, past - 1) / w.box_rows * w.box_rows;
    item.tiles = (past - item.first_key + kKeys - 1) / kKeys;
    return item;
}

// The place in the order of all items of a block's nth. Items are dealt out there and back: where they come in the
// order of their lengths, blocks get about the same number of tiles.
__device__ __forceinline__ int place_of(int nth)
{
    int const grid = gridDim.x;
    int const block = blockIdx.x;
    return nth * grid + (nth % 2 == 0 ? block : grid - 1 - block);
}

// A number of integers that fills whole 16 bytes: compiled code reads as many at once, so nothing may lie in them that
// is written meanwhile.
template <typename Int>
__host__ __device__ __forceinline__ Int padded(Int count)
{
    return (count + 3) / 4 * 4;
}

// Lists the block's items, longest first, and returns their number. scratch: of 16 bytes a segment and 8 a run of rows,
// padded. By all threads of the block, which must meet after it.
__device__ __forceinline__ int list_items(PromptWork const& w, int4* scratch, Item* items)
{
    int const segment_count = w.p.slots;
    int4* const segments = scratch;
    for (int g = threadIdx.x; g < segment_count; g += blockDim.x)
    {
        int4 segment = reinterpret_cast<int4 const*>(w.p.segments)[g];
        segment.y = max(segment.y, 0);
        segment.w = max(segment.w, 0);
        segments[g] = segment;
    }
    __syncthreads();
    int count = 0; // runs of rows
    for (int g = 0; g < segment_count; ++g)
    {
        count += row_blocks_of(w, segments[g]);
    }
    int* const tiles = reinterpret_cast<int*>(segments + segment_count);
    int* const order = tiles + padded(count);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
    {
        tiles[i] = item_of(w, segments, i, 0).tiles;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x)
    {
        int const own = tiles[i];
        int before = 0;
        for (int j = 0; j < count; ++j)
        {
            before += tiles[j] > own || (tiles[j] == own && j < i) ? 1 : 0;
        }
        order[before] = i;
    }
    __syncthreads();
    int const all = count * w.p.kv_heads;
    for (int nth = threadIdx.x; nth < kMostItems && place_of(nth) < all; nth += blockDim.x)
    {
        int const place = place_of(nth);
        items[nth] = item_of(w, segments, order[place / w.p.kv_heads], place % w.p.kv_heads);
    }
    int const rounds = all / static_cast<int>(gridDim.x);
    return min(rounds + (place_of(rounds) < all ? 1 : 0), kMostItems);
}

} // namespace prompts
} // namespace dflash
