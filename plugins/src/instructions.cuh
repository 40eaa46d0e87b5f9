// Instructions that C++ has no words for, and the division of work among blocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>

namespace dflash
{

__device__ __forceinline__ uint32_t shared_address(void const* at)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// -- asynchronous copies ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// For copies of what is read once, such as weights: what else the L2 cache has should stay there. The number is what
// `createpolicy.fractional.L2::evict_first` gives for all of a copy. As a constant it needs no registers of each
// thread, which every copy would move to where it takes the policy from.
__device__ __forceinline__ constexpr uint64_t read_once_policy()
{
    return 0x12f0000000000000;
}

// What accesses have that name no policy.
__device__ __forceinline__ constexpr uint64_t plain_policy()
{
    return 0x1000000000000000;
}

// For what the next kernels read and is soon written anew, as `createpolicy.fractional.L2::evict_last` gives it:
// the memory, which would stop reading weights for each line that leaves the cache, need not see it.
__device__ __forceinline__ constexpr uint64_t keep_policy()
{
    return 0x14f0000000000000;
}

// Stores 2, 4 or 16 bytes by a policy.
template <typename T>
__device__ __forceinline__ void store_by(uint64_t policy, T* to, T const& x)
{
    if constexpr (sizeof(T) == 2)
    {
        auto const bits = reinterpret_cast<uint16_t const&>(x);
        asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(to), "h"(bits), "l"(policy) : "memory");
    }
    else if constexpr (sizeof(T) == 4)
    {
        auto const bits = reinterpret_cast<uint32_t const&>(x);
        asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(bits), "l"(policy) : "memory");
    }
    else
    {
        static_assert(sizeof(T) == 16);
        auto const bits = reinterpret_cast<uint4 const&>(x);
        asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(bits.x), "r"(bits.y),
            "r"(bits.z), "r"(bits.w), "l"(policy)
            : "memory");
    }
}

template <typename T>
__device__ __forceinline__ void store_kept(T* to, T const& x)
{
    store_by(keep_policy(), to, x);
}

// Asks the L2 cache for a line, and for so many bytes, a multiple of 16.
__device__ __forceinline__ void prefetch(void const* from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ void prefetch_bytes(void const* from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

// -- barriers in shared memory that count arrivals and the bytes of bulk copies ---------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows the cluster, and bulk copies, the barriers that this thread has made ready.
__device__ __forceinline__ void fence_barrier_inits()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, too.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity)
{
    uint32_t is_done = 0;
    while (!is_done)
    {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(is_done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Begins a bulk copy into shared memory, a multiple of 16 bytes, which the barrier counts.
__device__ __forceinline__ void copy_bytes(uint32_t to, void const* from, int bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// -- the cluster's barrier --------------------------------------------------------------------------------------------

// Arrives, a whole warp at once, and goes on. Of its writes others then see only the barriers that it has shown.
__device__ __forceinline__ void arrive_at_cluster()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Likewise, behind all writes of the warp to shared memory.
__device__ __forceinline__ void arrive_behind_writes()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Waits until all warps of the cluster have arrived.
__device__ __forceinline__ void wait_for_cluster()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Sends numbers into the shared memory of a block of the cluster, whose barrier counts the bytes. Addresses are the
// cluster's.
template <int kCount>
__device__ __forceinline__ void send(uint32_t to, float const (&x)[kCount], uint32_t barrier)
{
    if constexpr (kCount == 1)
    {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x[0]),
            "r"(barrier)
            : "memory");
    }
    else if constexpr (kCount == 2)
    {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
            "f"(x[0]), "f"(x[1]), "r"(barrier)
            : "memory");
    }
    else
    {
        static_assert(kCount == 4);
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
            "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
            : "memory");
    }
}

// The address in another block of the cluster of the object at `address` in this one.
__device__ __forceinline__ uint32_t address_at(uint32_t address, int rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// -- products ---------------------------------------------------------------------------------------------------------

// Four matrices of 8 rows of 16 bytes from shared memory, as products take them: lane l has the address of row l % 8 of
// matrix l / 8, and gets of each matrix two numbers of row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(from)
        : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(from)
        : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    else
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// -- division ---------------------------------------------------------------------------------------------------------

// The begin of the index-th of `parts` shares of `count`: count * index / parts, of numbers from zero on, with up to
// 65535 parts and none behind the last. Products and quotients stay in 32 bits: those of 64 are functions.
__device__ __forceinline__ int share_begin(int count, int index, int parts)
{
    uint32_t const all = count, divisor = parts, each = all / divisor;
    return static_cast<int>(each * index + (all - each * divisor) * index / divisor);
}

} // namespace dflash
