// Trees of drafts: their growth out of a block's likeliest tokens.
#include "dflash_kernels.h"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kMostThreads = DFLASH_TREE_MOST_LISTED; // of a tree's growth: one a listed node
constexpr unsigned kAll = 0xffffffffu;

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
