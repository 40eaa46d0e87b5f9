// Hopper's warpgroup products (wgmma): what their instructions say in C++.
#pragma once

#include "element.cuh"

#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>

namespace dflash
{
namespace sm90
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What this thread wrote into shared memory, for products.
__device__ __forceinline__ void show_to_products()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A matrix in shared memory with the swizzle of 128 bytes, in atoms of 8 rows of 128 bytes.
__device__ __forceinline__ uint64_t matrix(uint32_t at, int between_columns, int between_rows)
{
    return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(between_columns >> 4) << 16
        | static_cast<uint64_t>(between_rows >> 4) << 32 | uint64_t{1} << 62;
}

// Before products that take registers which were written since the last.
__device__ __forceinline__ void begin_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all are done but the last kPending groups; x is what they gave.
template <int kPending = 0, int N>
__device__ __forceinline__ void wait_for_products(float (&x)[N][4])
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
    for (auto& fragment : x)
    {
        asm volatile("" : "+f"(fragment[0]), "+f"(fragment[1]), "+f"(fragment[2]), "+f"(fragment[3])::"memory");
    }
}

// Until all are done but the last kPending groups, of whose sums nothing is read yet.
template <int kPending>
__device__ __forceinline__ void wait_for_all_but()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Gives registers of this warpgroup back, and takes what others gave back. By all of its warps.
template <int kRegisters>
__device__ __forceinline__ void release_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#define DFLASH_FRAGMENT(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define DFLASH_FRAGMENTS(c, i)                                                                                         \
    DFLASH_FRAGMENT(c, i), DFLASH_FRAGMENT(c, i + 1), DFLASH_FRAGMENT(c, i + 2), DFLASH_FRAGMENT(c, i + 3)
#define DFLASH_REGISTERS_32                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31}"
#define DFLASH_REGISTERS_64                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63}"

// c [64, 64] += a [64, 16] b [64, 16]^T
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[8][4], uint64_t a, uint64_t b)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " DFLASH_REGISTERS_32
                     ", %32, %33, 1, 1, 1, 0, 0;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4)
            : "l"(a), "l"(b)
            : "memory");
    }
    else
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " DFLASH_REGISTERS_32
                     ", %32, %33, 1, 1, 1, 0, 0;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4)
            : "l"(a), "l"(b)
            : "memory");
    }
}

// c [64, 128] = a [64, 16] b [128, 16]^T, or += where it adds
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[16][4], uint64_t a, uint64_t b, bool adds)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " DFLASH_REGISTERS_64
                     ", %64, %65, p, 1, 1, 0, 0; }"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4), DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12)
            : "l"(a), "l"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
    else
    {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " DFLASH_REGISTERS_64
                     ", %64, %65, p, 1, 1, 0, 0; }"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4), DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12)
            : "l"(a), "l"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
}

// c [64, 64] += a [64, 16] b [16, 64]
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[8][4], uint32_t const (&a)[4], uint64_t b)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " DFLASH_REGISTERS_32
                     ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
            : "memory");
    }
    else
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " DFLASH_REGISTERS_32
                     ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
            : "memory");
    }
}

// c [64, 128] += a [64, 16] b [16, 128]
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[16][4], uint32_t const (&a)[4], uint64_t b)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " DFLASH_REGISTERS_64
                     ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4), DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
            : "memory");
    }
    else
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " DFLASH_REGISTERS_64
                     ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
            : DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4), DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
            : "memory");
    }
}

// a0..a3, at: which operands of the instruction a's registers and b are.
#define DFLASH_MULTIPLY_ROWS(n, type, sums, a0, a1, a2, a3, at, ...)                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " sums ", {%" #a0 ",%" #a1 ",%" #a2 \
                 ",%" #a3 "}, %" #at ", 1, 1, 1, 0;"                                                                   \
        : __VA_ARGS__                                                                                                  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                           \
        : "memory")
#define DFLASH_REGISTERS_8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define DFLASH_REGISTERS_16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define DFLASH_REGISTERS_24 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}"

// c [64, 8 kTiles] += a [64, 16] b [8 kTiles, 16]^T
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_add_rows(float (&c)[kTiles][4], uint32_t const (&a)[4], uint64_t b)
{
    static_assert(kTiles == 2 || kTiles == 4 || kTiles == 6 || kTiles == 8);
    constexpr bool kIsHalf = std::is_same_v<T, __half>;
    if constexpr (kTiles == 2 && kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(
            16, "f16", DFLASH_REGISTERS_8, 8, 9, 10, 11, 12, DFLASH_FRAGMENT(c, 0), DFLASH_FRAGMENT(c, 1));
    }
    if constexpr (kTiles == 2 && !kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(
            16, "bf16", DFLASH_REGISTERS_8, 8, 9, 10, 11, 12, DFLASH_FRAGMENT(c, 0), DFLASH_FRAGMENT(c, 1));
    }
    if constexpr (kTiles == 4 && kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(32, "f16", DFLASH_REGISTERS_16, 16, 17, 18, 19, 20, DFLASH_FRAGMENTS(c, 0));
    }
    if constexpr (kTiles == 4 && !kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(32, "bf16", DFLASH_REGISTERS_16, 16, 17, 18, 19, 20, DFLASH_FRAGMENTS(c, 0));
    }
    if constexpr (kTiles == 6 && kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(48, "f16", DFLASH_REGISTERS_24, 24, 25, 26, 27, 28, DFLASH_FRAGMENTS(c, 0),
            DFLASH_FRAGMENT(c, 4), DFLASH_FRAGMENT(c, 5));
    }
    if constexpr (kTiles == 6 && !kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(48, "bf16", DFLASH_REGISTERS_24, 24, 25, 26, 27, 28, DFLASH_FRAGMENTS(c, 0),
            DFLASH_FRAGMENT(c, 4), DFLASH_FRAGMENT(c, 5));
    }
    if constexpr (kTiles == 8 && kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(
            64, "f16", DFLASH_REGISTERS_32, 32, 33, 34, 35, 36, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4));
    }
    if constexpr (kTiles == 8 && !kIsHalf)
    {
        DFLASH_MULTIPLY_ROWS(
            64, "bf16", DFLASH_REGISTERS_32, 32, 33, 34, 35, 36, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4));
    }
}

#define DFLASH_REGISTERS_12 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}"
#define DFLASH_REGISTERS_20 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}"
#define DFLASH_REGISTERS_28                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27}"
#define DFLASH_REGISTERS_40                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"      \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}"
#define DFLASH_REGISTERS_56                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"      \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"         \
    "%55}"
#define DFLASH_REGISTERS_48                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"          \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}"
#define DFLASH_REGISTERS_96                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"          \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"         \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"         \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}"
#define DFLASH_REGISTERS_128                                                                                           \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"          \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"         \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"         \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,"        \
    "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,"        \
    "%126,%127}"

// at_a, at_b: which operands of the instruction a and b are.
#define DFLASH_MULTIPLY_TYPE(n, columns, type, how, sums, at_a, at_b, ...)                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k" #columns ".f32." type "." type " " sums ", %" #at_a        \
                 ", %" #at_b ", " how ";"                                                                              \
        : __VA_ARGS__                                                                                                  \
        : "l"(a), "l"(b)                                                                                               \
        : "memory")
#define DFLASH_MULTIPLY_EACH(n, sums, at_a, at_b, ...)                                                                 \
    if constexpr (std::is_same_v<T, E4M3>)                                                                             \
        DFLASH_MULTIPLY_TYPE(n, 32, "e4m3", "1, 1, 1", sums, at_a, at_b, __VA_ARGS__);                                 \
    else if constexpr (std::is_same_v<T, __half>)                                                                      \
        DFLASH_MULTIPLY_TYPE(n, 16, "f16", "1, 1, 1, 0, 0", sums, at_a, at_b, __VA_ARGS__);                            \
    else                                                                                                               \
        DFLASH_MULTIPLY_TYPE(n, 16, "bf16", "1, 1, 1, 0, 0", sums, at_a, at_b, __VA_ARGS__)

// c [64, 8 kTiles] += a [64, 32 bytes] b [8 kTiles, 32 bytes]^T, by as few instructions as there are for so many
// columns: each reads a anew.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_add_columns(float (*c)[4], uint64_t a, uint64_t b)
{
    static_assert(kTiles > 1);
    constexpr bool kIsOne = kTiles == 32 || kTiles == 24 || kTiles == 14 || kTiles == 12 || kTiles == 10 || kTiles < 8;
    constexpr int kFirst = kIsOne ? kTiles : kTiles >= 16 ? 16 : 8;
    if constexpr (kFirst == 32)
    {
        DFLASH_MULTIPLY_EACH(256, DFLASH_REGISTERS_128, 128, 129, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4),
            DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12), DFLASH_FRAGMENTS(c, 16), DFLASH_FRAGMENTS(c, 20),
            DFLASH_FRAGMENTS(c, 24), DFLASH_FRAGMENTS(c, 28));
    }
    else if constexpr (kFirst == 24)
    {
        DFLASH_MULTIPLY_EACH(192, DFLASH_REGISTERS_96, 96, 97, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4),
            DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12), DFLASH_FRAGMENTS(c, 16), DFLASH_FRAGMENTS(c, 20));
    }
    else if constexpr (kFirst == 14)
    {
        DFLASH_MULTIPLY_EACH(112, DFLASH_REGISTERS_56, 56, 57, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4),
            DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENT(c, 12), DFLASH_FRAGMENT(c, 13));
    }
    else if constexpr (kFirst == 12)
    {
        DFLASH_MULTIPLY_EACH(
            96, DFLASH_REGISTERS_48, 48, 49, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4), DFLASH_FRAGMENTS(c, 8));
    }
    else if constexpr (kFirst == 10)
    {
        DFLASH_MULTIPLY_EACH(80, DFLASH_REGISTERS_40, 40, 41, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4),
            DFLASH_FRAGMENT(c, 8), DFLASH_FRAGMENT(c, 9));
    }
    else if constexpr (kFirst == 7)
    {
        DFLASH_MULTIPLY_EACH(56, DFLASH_REGISTERS_28, 28, 29, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENT(c, 4),
            DFLASH_FRAGMENT(c, 5), DFLASH_FRAGMENT(c, 6));
    }
    else if constexpr (kFirst == 6)
    {
        DFLASH_MULTIPLY_EACH(
            48, DFLASH_REGISTERS_24, 24, 25, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENT(c, 4), DFLASH_FRAGMENT(c, 5));
    }
    else if constexpr (kFirst == 5)
    {
        DFLASH_MULTIPLY_EACH(40, DFLASH_REGISTERS_20, 20, 21, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENT(c, 4));
    }
    else if constexpr (kFirst == 4)
    {
        DFLASH_MULTIPLY_EACH(32, DFLASH_REGISTERS_16, 16, 17, DFLASH_FRAGMENTS(c, 0));
    }
    else if constexpr (kFirst == 3)
    {
        DFLASH_MULTIPLY_EACH(
            24, DFLASH_REGISTERS_12, 12, 13, DFLASH_FRAGMENT(c, 0), DFLASH_FRAGMENT(c, 1), DFLASH_FRAGMENT(c, 2));
    }
    else if constexpr (kFirst == 2)
    {
        DFLASH_MULTIPLY_EACH(16, DFLASH_REGISTERS_8, 8, 9, DFLASH_FRAGMENT(c, 0), DFLASH_FRAGMENT(c, 1));
    }
    else if constexpr (kFirst == 16)
    {
        DFLASH_MULTIPLY_EACH(128, DFLASH_REGISTERS_64, 64, 65, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4),
            DFLASH_FRAGMENTS(c, 8), DFLASH_FRAGMENTS(c, 12));
    }
    else
    {
        DFLASH_MULTIPLY_EACH(64, DFLASH_REGISTERS_32, 32, 33, DFLASH_FRAGMENTS(c, 0), DFLASH_FRAGMENTS(c, 4));
    }
    if constexpr (kTiles > kFirst)
    {
        multiply_add_columns<T, kTiles - kFirst>(c + kFirst, a, b + kFirst * (1024 >> 4)); // 8 rows of 128 bytes a tile
    }
}

#undef DFLASH_MULTIPLY_EACH
#undef DFLASH_MULTIPLY_TYPE
#undef DFLASH_MULTIPLY_ROWS
#undef DFLASH_REGISTERS_8
#undef DFLASH_REGISTERS_12
#undef DFLASH_REGISTERS_16
#undef DFLASH_REGISTERS_20
#undef DFLASH_REGISTERS_24
#undef DFLASH_REGISTERS_28
#undef DFLASH_FRAGMENT
#undef DFLASH_FRAGMENTS
#undef DFLASH_REGISTERS_32
#undef DFLASH_REGISTERS_64
#undef DFLASH_REGISTERS_40
#undef DFLASH_REGISTERS_48
#undef DFLASH_REGISTERS_56
#undef DFLASH_REGISTERS_96
#undef DFLASH_REGISTERS_128

#endif

} // namespace sm90
} // namespace dflash
