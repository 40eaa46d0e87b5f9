// Trees of drafts: their growth out of a block's likeliest tokens.
#include "dflash_kernels.h"
#include "launch.cuh"
#include "ranked.cuh"

namespace dflash
{
namespace
{

constexpr int kMostThreads = DFLASH_TREE_MOST_LISTED; // of a tree's growth: one a listed node
constexpr int kKnownDepths = 16; // of a tree's nodes: so far their paths are known before the kernel ahead has ended
constexpr unsigned kAll = 0xffffffffu;

// What a block keeps of its slot's tree.
struct Growth
{
    float log_probs[DFLASH_TREE_MOST_PLACES];
    int parents[kMostThreads]; // of listed nodes
    int places[kMostThreads];
    alignas(16) uint64_t keys[kMostThreads]; // by which nodes are ranked, no two the same; 0: it is not listed
    alignas(16) uint64_t likely[kMostThreads]; // of them those that are in the tree, and few others; then zeros
    uint64_t least; // that the tree's nodes reach
    int rows[kMostThreads]; // that they become
    int counts[kMostThreads / 32]; // of a warp's nodes in the tree
};

// The number of threads for which it is true.
struct Counted
{
    int before; // this one
    int all;
};

// By all threads of the block.
__device__ __forceinline__ Counted count_threads(bool is_counted, int* counts)
{
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const warps = blockDim.x / 32;
    unsigned const counted = __ballot_sync(kAll, is_counted);
    if (lane == 0)
    {
        counts[warp] = __popc(counted);
    }
    __syncthreads();
    int const of_warp = lane < warps ? counts[lane] : 0;
    int const before = __reduce_add_sync(kAll, lane < warp ? of_warp : 0);
    return {before + __popc(counted & ((1u << lane) - 1)), __reduce_add_sync(kAll, of_warp)};
}

// One block a slot, one thread a listed node.
__global__ void __launch_bounds__(kMostThreads) grow_tree_kernel(dflash_grow_tree_params const p)
{
    __shared__ Growth tree;
    int const node = threadIdx.x;
    bool const is_listed = node < p.listed;
    trigger();
    // The list is the same at every step: it is read, and followed, before the kernel ahead has ended.
    int const own_parent = is_listed ? p.list_parents[node] : -1;
    int const own_place = is_listed ? p.list_places[node] : 0;
    tree.parents[node] = own_parent;
    tree.places[node] = own_place;
    tree.likely[node] = 0;
    __syncthreads();
    int places[kKnownDepths]; // of the node and those above it; -1: there is none
    int above = is_listed ? node : -1;
#pragma unroll
    for (int i = 0; i < kKnownDepths; ++i)
    {
        places[i] = above < 0 ? -1 : tree.places[above];
        above = above < 0 ? -1 : tree.parents[above];
    }
    wait();
    int64_t const slot = blockIdx.x;
    for (int i = node; i < p.places; i += blockDim.x)
    {
        tree.log_probs[i] = fmaxf(p.log_probs[slot * p.places + i], p.least);
    }
    int const id = is_listed ? p.ids[slot * p.places + own_place] : 0;
    int const bonus = node == 0 ? p.bonus[slot] : 0;
    __syncthreads();

    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kKnownDepths; ++i)
    {
        score += places[i] < 0 ? 0.f : tree.log_probs[places[i]] - p.toll;
    }
    for (; above >= 0; above = tree.parents[above])
    {
        score += tree.log_probs[tree.places[above]] - p.toll;
    }
    uint64_t const key = is_listed ? ranked(score, node) : 0;
    tree.keys[node] = key;
    __syncthreads();
    // The front of the list has the nodes that are likeliest at most steps: as many of them as the tree has bound the
    // rest.
    int const front = min(whole_keys(2 * (p.nodes + 1)), static_cast<int>(blockDim.x));
    if (node < front && count_larger(tree.keys, front, key) == p.nodes - 1)
    {
        tree.least = key;
    }
    __syncthreads();
    bool const is_likely = is_listed && key >= tree.least;
    Counted const likely = count_threads(is_likely, tree.counts);
    if (is_likely)
    {
        tree.likely[likely.before] = key;
    }
    __syncthreads();
    bool const is_chosen = is_likely && count_larger(tree.likely, likely.all, key) < p.nodes;
    int const row = 1 + count_threads(is_chosen, tree.counts).before;
    tree.rows[node] = is_chosen ? row : 0;
    __syncthreads();

    int64_t const first = slot * (p.nodes + 1);
    if (node == 0)
    {
        p.tokens[first] = bonus;
        p.parents[first] = -1;
    }
    if (is_chosen)
    {
        p.tokens[first + row] = id;
        p.parents[first + row] = own_parent < 0 ? 0 : tree.rows[own_parent];
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
