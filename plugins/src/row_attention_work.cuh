// The division of what one row a slot attends to among clusters, blocks and warps.
#pragma once

#include "attention_work.cuh"
#include "dflash_kernels.h"
#include "tensor_map.cuh"

namespace dflash
{

struct RowWork
{
    float* partial_out; // [clusters, heads, D]: what is not all of a slot's keys
    float2* partial_sums; // [clusters, blocks, heads]: maximum (of scaled logits, base 2) and sum
    uint32_t* arrivals; // [slots, KV heads, kMostCluster]: clusters whose part is there; zeros between launches
    int cluster; // blocks
    int group; // query heads of a KV head
    int early; // clusters for which there is room beside a product
    bool reads_first; // the next kernel begins once most keys have been asked for
    int clusters_a_head;
    int least_tiles; // of a cluster, where a slot's are divided
    int page_tiles;
    float per_page; // 1 / page_tiles
};

namespace row
{

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 8; // columns of a product
constexpr int kMostCluster = DFLASH_ROW_ARRIVALS; // blocks
constexpr unsigned kAll = 0xffffffffu;

// -- division of the work ---------------------------------------------------------------------------------------------

// What a cluster has: a part of the cached keys of a slot's KV head.
struct Part
{
    bool is_there;
    int index; // of the segment
    int slot;
    int start; // the row's position, and its cached keys
    int row; // of queries and outputs
    int head;
    int nth;
    int count; // parts
};

// The tile that the first of the keys lies in which a row at a position sees.
__device__ __forceinline__ int first_tile_of_row(dflash_attention_params const& p, int position)
{
    return p.window > 0 ? max(position - p.window + 1, 0) / kTile : 0;
}

// Those that it sees.
__device__ __forceinline__ int cached_tiles(dflash_attention_params const& p, int position)
{
    int const past = (min(position, p.cache_rows) + kTile - 1) / kTile;
    return max(past - first_tile_of_row(p, position), 0);
}

// A cluster's part. By all lanes of a warp, each of which has a slot.
__device__ __forceinline__ Part find_part(dflash_attention_params const& p, RowWork const& w, int cluster)
{
    int const lane = threadIdx.x % 32;
    int4 const segment
        = lane < p.slots ? __ldcg(reinterpret_cast<int4 const*>(p.segments) + lane) : int4{}; // slot, start, row, count
    bool const is_used = segment.w > 0;
    int const tiles = is_used ? cached_tiles(p, segment.y) : 0;
    // Each slot has a cluster a head; the others are shared where caches are long.
    int const used = __reduce_add_sync(kAll, is_used);
    int const all = __reduce_add_sync(kAll, tiles);
    int count = is_used ? max(Quotient(max(w.least_tiles, Quotient(w.clusters_a_head).up(all))).up(tiles), 1) : 0;
    if (__reduce_add_sync(kAll, count) > static_cast<unsigned>(w.clusters_a_head))
    {
        // Rounded up, those were too many: so many never are.
        int const others = w.clusters_a_head - used;
        count = is_used && others > 0 ? max(Quotient(max(w.least_tiles, Quotient(others).up(all))).up(tiles), 1)
                                      : is_used;
    }
    int end = count * p.kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
    {
        int const other = __shfl_up_sync(kAll, end, step);
        end += lane >= step ? other : 0;
    }
    unsigned const past = __ballot_sync(kAll, end > cluster);
    int const found = max(__ffs(past) - 1, 0);
    Part part;
    part.is_there = __reduce_or_sync(kAll, past) != 0; // alike in all lanes, as is known now
    part.index = found;
    part.slot = __shfl_sync(kAll, segment.x, found);
    part.start = __shfl_sync(kAll, segment.y, found);
    part.row = __shfl_sync(kAll, segment.z, found);
    part.count = __shfl_sync(kAll, count, found);
    int const nth = cluster - __shfl_sync(kAll, end - count * p.kv_heads, found);
    part.head = Quotient(part.count).down(nth);
    part.nth = nth - part.head * part.count;
    return part;
}

// A warp's keys: some of each of the block's rounds.
template <int kCluster>
struct Range
{
    int begin; // a tile's
    int past; // of the block
    int rounds;

    // keys: of a warp's round.
    __device__ __forceinline__ Range(dflash_attention_params const& p, Part const& part, int rank, int keys)
    {
        int const first = first_tile_of_row(p, part.start);
        int const cached = min(part.start, p.cache_rows);
        int const all = cached_tiles(p, part.start);
        int const each = Quotient(part.count).up(all);
        int const own = max(min(each, all - part.nth * each), 0);
        int const of_block = (own + kCluster - 1) / kCluster;
        int const before = min(rank * of_block, own);
        int const of_all = (first + part.nth * each + before) * kTile;
        past = min(of_all + min(of_block, own - before) * kTile, cached);
        begin = of_all + static_cast<int>(threadIdx.x) / 32 * keys;
        int const round = kWarps * keys, left = max(past - begin, 0);
        rounds = __reduce_max_sync(kAll, Quotient(round).up(left)); // alike in all lanes, as is known now
    }
};

// Where a key lies in the caches.
struct KeyPlace
{
    int page = 0;
    int row = 0; // of the page

    KeyPlace() = default;

    __device__ __forceinline__ KeyPlace(dflash_attention_params const& p, RowWork const& w, int slot, int key)
    {
        int const nth = static_cast<int>((key / kTile + 0.5f) * w.per_page); // exact, for tiles are few
        page = p.page_table ? __ldcg(p.page_table + slot * p.page_table_stride + nth) : slot;
        row = key - nth * w.page_tiles * kTile;
    }
};

} // namespace row
} // namespace dflash
