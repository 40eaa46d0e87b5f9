// Blocks of a cluster, which read each other's shared memory.
#pragma once

namespace dflash
{

constexpr int kCluster = 8; // blocks that share a row; the largest that every GPU of this generation schedules

// Waits for all threads of the cluster, whose writes to shared memory are then seen. CUDA's own words are used, for
// cooperative_groups.h takes longer to compile than those who ask.
__device__ __forceinline__ void meet_cluster()
{
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}

// The same for a cluster of so many blocks, which may be a block alone.
template <int kBlocks>
__device__ __forceinline__ void meet_blocks()
{
    if constexpr (kBlocks == 1)
    {
        __syncthreads();
    }
    else
    {
        meet_cluster();
    }
}

// What another block of the cluster has where this one has `mine`.
template <typename T>
__device__ __forceinline__ T* of_block(T* mine, int rank)
{
    return static_cast<T*>(__cluster_map_shared_rank(mine, rank));
}

} // namespace dflash
