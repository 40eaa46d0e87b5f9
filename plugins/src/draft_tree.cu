// Trees of drafts: their growth out of a block's likeliest tokens, the path that is accepted, and its keys and values.
#include "dflash_kernels.h"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kMostThreads = DFLASH_TREE_MOST_LISTED; // of a tree's growth: one a listed node
constexpr int kJoinThreads = 128;
constexpr int kMoveThreads = 128;
constexpr int kMovedTogether = 8; // rows that a thread has on their way
constexpr unsigned kAll = 0xffffffffu;

// -- growth -----------------------------------------------------------------------------------------------------------

// What a block keeps of its slot's tree.
struct Growth
{
    float log_probs[DFLASH_TREE_MOST_PLACES];
    int parents[kMostThreads]; // of listed nodes
    int places[kMostThreads];
    uint64_t keys[kMostThreads]; // by which nodes are ranked, no two the same
    uint64_t likely[kMostThreads]; // of them those that are in the tree, and few others
    uint64_t least; // that the tree's nodes reach
    int rows[kMostThreads]; // that they become
    int counts[kMostThreads / 32]; // of a warp's nodes in the tree
};

// Orders first by value, then by the place in the list; larger is better.
__device__ __forceinline__ uint64_t ranked_node(float score, int node)
{
    uint32_t const bits = __float_as_uint(score + 0.f);
    uint32_t const ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~node);
}

// How many of the keys are larger.
__device__ __forceinline__ int count_larger(uint64_t const* keys, int count, uint64_t key)
{
    int larger = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i)
    {
        larger += keys[i] > key ? 1 : 0;
    }
    return larger;
}

// The number of threads before this one for which it is true. By all threads of the block.
__device__ __forceinline__ int count_before(bool is_counted, int* counts)
{
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    unsigned const counted = __ballot_sync(kAll, is_counted);
    if (lane == 0)
    {
        counts[warp] = __popc(counted);
    }
    __syncthreads();
    int before = __popc(counted & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w)
    {
        before += counts[w];
    }
    return before;
}

// One block a slot, one thread a listed node.
__global__ void __launch_bounds__(kMostThreads) grow_tree_kernel(dflash_grow_tree_params const p)
{
    __shared__ Growth tree;
    int const node = threadIdx.x;
    bool const is_listed = node < p.listed;
    trigger();
    // The list is the same at every step: it is read before the kernel ahead has ended.
    tree.parents[node] = is_listed ? p.list_parents[node] : -1;
    tree.places[node] = is_listed ? p.list_places[node] : 0;
    wait();
    int64_t const slot = blockIdx.x;
    for (int i = node; i < p.places; i += blockDim.x)
    {
        tree.log_probs[i] = fmaxf(p.log_probs[slot * p.places + i], p.least);
    }
    __syncthreads();

    float score = 0.f;
    for (int at = node; is_listed && at >= 0; at = tree.parents[at])
    {
        score += tree.log_probs[tree.places[at]] - p.toll;
    }
    uint64_t const key = is_listed ? ranked_node(score, node) : 0;
    tree.keys[node] = key;
    __syncthreads();
    // The front of the list has the nodes that are likeliest at most steps: as many of them as the tree has bound the
    // rest.
    int const front = min(2 * (p.nodes + 1), p.listed);
    if (node < front && count_larger(tree.keys, front, key) == p.nodes - 1)
    {
        tree.least = key;
    }
    __syncthreads();
    bool const is_likely = is_listed && key >= tree.least;
    int const likely_before = count_before(is_likely, tree.counts);
    if (is_likely)
    {
        tree.likely[likely_before] = key;
    }
    int const likely = __syncthreads_count(is_likely);
    bool const is_chosen = is_likely && count_larger(tree.likely, likely, key) < p.nodes;
    int const row = 1 + count_before(is_chosen, tree.counts);
    tree.rows[node] = is_chosen ? row : 0;
    __syncthreads();

    int64_t const first = slot * (p.nodes + 1);
    if (node == 0)
    {
        p.tokens[first] = p.bonus[slot];
        p.parents[first] = -1;
    }
    if (is_chosen)
    {
        int const parent = tree.parents[node];
        p.tokens[first + row] = p.ids[slot * p.places + tree.places[node]];
        p.parents[first + row] = parent < 0 ? 0 : tree.rows[parent];
    }
}

// -- acceptance -------------------------------------------------------------------------------------------------------

// Bits of both halves of a tree's rows, of which each lane has one. is_set(half) is called by all lanes of a warp.
template <typename IsSet>
__device__ __forceinline__ uint64_t row_bits(IsSet is_set)
{
    uint64_t const low = __ballot_sync(kAll, is_set(0));
    uint64_t const high = __ballot_sync(kAll, is_set(1));
    return high << 32 | low;
}

__device__ __forceinline__ int highest(uint64_t bits)
{
    return 63 - __clzll(static_cast<long long>(bits));
}

// The rows of a tree that a lane of a warp has, two, and what they follow.
struct TreeRows
{
    uint64_t paths[2]; // 0: there is no such row
    int rows; // of the tree

    __device__ __forceinline__ TreeRows(uint64_t const* row_path, int count)
        : rows(count)
    {
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            paths[half] = row(half) < rows ? row_path[row(half)] : 0;
        }
    }

    static __device__ __forceinline__ int row(int half)
    {
        return threadIdx.x % 32 + 32 * half;
    }

    // The rows from the first to the last one accepted. By all lanes of a warp.
    __device__ __forceinline__ uint64_t accepted(int32_t const* tokens, int32_t const* targets) const
    {
        uint64_t const right = row_bits(
            [&](int half)
            {
                int const own = row(half);
                if (own == 0 || own >= rows)
                {
                    return own == 0;
                }
                int const parent = highest(paths[half] ^ uint64_t{1} << own);
                return tokens[own] == targets[parent];
            });
        return path_to(highest(row_bits([&](int half) { return paths[half] && !(paths[half] & ~right); })));
    }

    // A path of so many drafts, or of as many as there are: down the run of rows in front, whose last one moves behind
    // it. By all lanes of a warp.
    __device__ __forceinline__ uint64_t imposed(int count) const
    {
        uint64_t const runs
            = row_bits([&](int half) { return paths[half] == (~uint64_t{0} >> (63 - row(half))) && row(half) < rows; });
        int const run = ~runs ? __ffsll(static_cast<long long>(~runs)) - 1 : 64;
        int const drafts = min(max(count, 0), rows - 1);
        return ((uint64_t{1} << drafts) - 1) | uint64_t{1} << (drafts < run ? drafts : rows - 1);
    }

private:
    __device__ __forceinline__ uint64_t path_to(int row) const
    {
        return __shfl_sync(kAll, row < 32 ? paths[0] : paths[1], row % 32);
    }
};

// A row's place among its siblings, from 1: those before it follow the same rows.
__device__ __forceinline__ int rank_of(uint64_t const* row_path, int row)
{
    uint64_t const parent = row_path[row] ^ uint64_t{1} << row;
    int rank = 1;
#pragma unroll 8
    for (int other = highest(parent) + 1; other < row; ++other)
    {
        rank += (row_path[other] ^ uint64_t{1} << other) == parent ? 1 : 0;
    }
    return rank;
}

// Calls put(to, from) for so many places: the first `before` and those behind the path's come from their own, the
// path's from its rows. By all lanes of a warp.
template <typename Put>
__device__ __forceinline__ void put_in_order(int count, int before, uint64_t path, Put put)
{
    int const accepted = __popcll(path);
    for (int i = threadIdx.x % 32; i < count; i += 32)
    {
        int const row = i - before;
        bool const is_on_path = row >= 0 && row < 64 && (path >> row & 1);
        if (is_on_path)
        {
            put(before + __popcll(path & ((uint64_t{1} << row) - 1)), i);
        }
        if (row < 0 || row >= accepted)
        {
            put(i, i);
        }
    }
}

// One warp a segment.
__global__ void accept_tree_kernel(dflash_accept_tree_params const p)
{
    begin();
    int const index = blockIdx.x;
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
    int const first_logit = p.logit_first[index];
    int const logits = p.logit_first[index + 1] - first_logit;
    bool const is_idle = segment.w <= 0 || logits <= 0;
    int const before = segment.w - logits; // rows without logits
    uint64_t path = is_idle ? 0 : 1;
    if (!is_idle && logits > 1)
    {
        int const first = segment.z + before;
        TreeRows const rows(p.row_path + first, logits);
        path = p.imposed ? rows.imposed(p.imposed[index])
                         : rows.accepted(p.token_ids + first, p.target_ids + first_logit);
    }
    if (threadIdx.x == 0)
    {
        int const accepted = is_idle ? 0 : __popcll(path) - 1;
        int const committed = is_idle ? 0 : before + accepted + 1;
        p.accepted[index] = accepted;
        p.committed[index] = committed;
        p.bonus[index] = is_idle ? 0 : p.target_ids[first_logit + highest(path)];
        p.next_start[index] = is_idle ? 0 : segment.y + committed;
        p.path[index] = path;
    }
    put_in_order(segment.w, before, path, [&](int to, int from) { p.row_order[segment.z + to] = segment.z + from; });
    int const accepted = __popcll(path);
    put_in_order(logits, 0, path,
        [&](int to, int from)
        {
            p.choices[first_logit + to] = p.target_ids[first_logit + from];
            if (p.ranks)
            {
                bool const is_draft = to > 0 && to < accepted;
                p.ranks[first_logit + to] = is_draft ? rank_of(p.row_path + segment.z + before, from) : 0;
            }
        });
    if (index == p.segment_count - 1) // padding
    {
        for (int row = segment.z + max(segment.w, 0) + threadIdx.x; row < p.rows; row += 32)
        {
            p.row_order[row] = row;
        }
        for (int logit = first_logit + logits + threadIdx.x; logit < p.logit_row_count; logit += 32)
        {
            p.choices[logit] = p.target_ids[logit];
        }
    }
}

// -- taps
// --------------------------------------------------------------------------------------------------------------

// Blocks along parts, rows.
__global__ void __launch_bounds__(kJoinThreads) join_rows_kernel(dflash_join_rows_params const p)
{
    begin();
    int const vectors = p.size / 8; // of a part's row
    auto const* from = static_cast<int4 const*>(p.parts[blockIdx.x]) + int64_t{p.order[blockIdx.y]} * vectors;
    auto* to = static_cast<int4*>(p.out) + (int64_t{blockIdx.y} * p.count + blockIdx.x) * vectors;
#pragma unroll 4
    for (int at = threadIdx.x; at < vectors; at += kJoinThreads)
    {
        to[at] = __ldg(from + at); // of which none is written here: several are on their way
    }
}

// -- keys and values --------------------------------------------------------------------------------------------------

// Where the rows of a slot's positions lie in a cache, from a thread's own 16 bytes of the first page on.
struct Places
{
    char* own;
    int32_t const* pages; // the slot's
    int page_rows;
    int64_t page_bytes;
    int64_t row_bytes;

    __device__ __forceinline__ int4* at(int position) const
    {
        int const nth = position / page_rows;
        return reinterpret_cast<int4*>(own + pages[nth] * page_bytes + (position - nth * page_rows) * row_bytes);
    }
};

// Blocks along a position's bytes, caches, segments; a thread has 16 bytes of all rows of a path. Row d of it is moved
// from where it lies, which is not before d, so that none is overwritten which is still to be read.
__global__ void __launch_bounds__(kMoveThreads) move_path_kernel(dflash_move_path_params const p)
{
    begin();
    uint64_t const path = p.path[blockIdx.z];
    if ((path & (path + 1)) == 0) // all are in their places
    {
        return;
    }
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[blockIdx.z]; // slot, start, first row, count
    int64_t const* cache = p.caches + 3 * blockIdx.y; // address, heads, bytes of a row
    int const row_bytes = static_cast<int>(cache[2]);
    int const byte = (blockIdx.x * kMoveThreads + threadIdx.x) * 16;
    int const head = byte / row_bytes;
    if (head >= cache[1])
    {
        return;
    }
    int64_t const head_bytes = int64_t{p.page_rows} * row_bytes;
    Places const places{reinterpret_cast<char*>(cache[0]) + head * head_bytes + (byte - head * row_bytes),
        p.page_table + segment.x * p.page_table_stride, p.page_rows, cache[1] * head_bytes, row_bytes};

    int depth = __ffsll(static_cast<long long>(~path)) - 1; // the first that is not in its place
    for (uint64_t left = path >> depth << depth; left;)
    {
        int4 rows[kMovedTogether];
        uint64_t ahead = left;
#pragma unroll
        for (int i = 0; i < kMovedTogether; ++i)
        {
            if (ahead)
            {
                rows[i] = *places.at(segment.y + __ffsll(static_cast<long long>(ahead)) - 1);
                ahead &= ahead - 1;
            }
        }
#pragma unroll
        for (int i = 0; i < kMovedTogether; ++i)
        {
            if (left)
            {
                *places.at(segment.y + depth++) = rows[i];
                left &= left - 1;
            }
        }
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_grow_tree(dflash_grow_tree_params const* p, cudaStream_t stream)
{
    bool const is_known = p->slots >= 0 && p->nodes > 0 && p->nodes < DFLASH_TREE_MOST_ROWS && p->nodes <= p->listed
        && p->listed <= DFLASH_TREE_MOST_LISTED && p->places > 0 && p->places <= DFLASH_TREE_MOST_PLACES;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    int const threads = (p->listed + 31) / 32 * 32;
    return dflash::launch_kernel(dflash::grow_tree_kernel, dim3(p->slots), threads, 0, stream, *p);
}

extern "C" cudaError_t dflash_accept_tree(dflash_accept_tree_params const* p, cudaStream_t stream)
{
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    return dflash::launch_kernel(dflash::accept_tree_kernel, dim3(p->segment_count), 32, 0, stream, *p);
}

extern "C" cudaError_t dflash_join_rows(dflash_join_rows_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = (p->dtype == DFLASH_FP16 || p->dtype == DFLASH_BF16) && p->count > 0
        && p->count <= DFLASH_MOST_JOINED && p->rows >= 0 && p->rows <= 65535 && p->size > 0 && p->size % 8 == 0;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    return launch_kernel(join_rows_kernel, dim3(p->count, p->rows), kJoinThreads, 0, stream, *p);
}

extern "C" cudaError_t dflash_move_path(dflash_move_path_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->segment_count >= 0 && p->segment_count <= 65535 && p->cache_count >= 0
        && p->cache_count <= 65535 && p->page_rows > 0 && p->most_bytes > 0 && p->most_bytes % 16 == 0;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0 || p->cache_count == 0)
    {
        return cudaSuccess;
    }
    int const parts = (p->most_bytes / 16 + kMoveThreads - 1) / kMoveThreads;
    dim3 const grid(parts, p->cache_count, p->segment_count);
    return launch_kernel(move_path_kernel, grid, kMoveThreads, 0, stream, *p);
}
