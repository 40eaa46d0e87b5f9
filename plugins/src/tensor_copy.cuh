// Bulk copies by tensor maps: boxes that the copy engine brings into shared memory, whose bytes a barrier there counts.
// x0, x1, ...: a box's first element, the innermost dimension first. Elements past the tensor's are zeros.
//
// policy: of the L2 cache. blocks: of the cluster, a bit each, to the same place of all of which a box goes, and for a
// barrier at the same place.
#pragma once

#include <cstdint>
#include <cuda.h>

namespace dflash
{

__device__ __forceinline__ void copy_box_2d(uint32_t to, CUtensorMap const& map, int x0, int x1, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void multicast_box_2d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, uint32_t barrier, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void copy_box_3d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_box_3d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_box_4d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, int x3, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_box_4d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, int x3, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void multicast_box_4d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, int x3, uint32_t barrier, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void copy_box_5d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, int x3, int x4, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_box_5d(
    uint32_t to, CUtensorMap const& map, int x0, int x1, int x2, int x3, int x4, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier), "l"(policy)
        : "memory");
}

} // namespace dflash
