// Attention for Hopper: warpgroup products from shared memory, which the bulk copy engine fills.
//
// One block an SM. One warp asks for tiles of keys and values, as many ahead as fit; two warpgroups of 64 packed rows
// compute. Where there are more than 64 packed rows, both take every tile, each with its own rows; else each takes
// every other tile with the same rows, so that one's softmax runs beside the other's products, and they merge their
// results at the end of a (slot, head).
#pragma once

#include "attention_epilogue.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "wgmma.cuh"

#include <cuda.h>
#include <type_traits>

namespace dflash
{
namespace sm90
{

constexpr int kRows = 64; // packed rows of a warpgroup
constexpr int kConsumers = 256; // threads
constexpr int kThreads = kConsumers + 32;
// What the compiler may count on: it leaves registers for blocks of the kernels before and after this one.
constexpr int kMostThreads = 384;
constexpr int kAtom = 64; // numbers, 128 bytes: the longest row of shared memory that products read with one swizzle

// What lies in shared memory: tiles of keys and values, queries, the box through which warpgroups merge, barriers.
template <int D, bool kSharedTiles>
struct Shared
{
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kStages = 4 * 128 / D; // an even number
    static constexpr int kQueryBytes = kRows * D * 2; // of a warpgroup, if tiles are shared, else of both
    static constexpr int kQueriesAt = 2 * kStages * kTileBytes;
    static constexpr int kMergeAt = kQueriesAt + (kSharedTiles ? 2 : 1) * kQueryBytes;
    static constexpr int kBoxRows = 1 + D / 16; // of a number of fragment a thread
    static constexpr int kBarriersAt = kMergeAt + (kSharedTiles ? 0 : 2 * kBoxRows * 128 * 16);
    static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- instructions -----------------------------------------------------------------------------------------------------

// Both warpgroups.
__device__ __forceinline__ void meet_all()
{
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// One warpgroup.
__device__ __forceinline__ void meet_group(int group)
{
    if (group == 0)
    {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
    else
    {
        asm volatile("bar.sync 3, 128;" ::: "memory");
    }
}

// Tiles are boxes [D / 64, kTile, 64] of the cache [slots, kv_heads, D / 64, S, 64].
__device__ __forceinline__ void copy_tile(uint32_t to, CUtensorMap const& from, Cursor const& at, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %2, %4, %5}], [%6];" ::"r"(to),
        "l"(&from), "r"(0), "r"(at.first_key()), "r"(at.head), "r"(at.slot), "r"(barrier)
        : "memory");
}

#endif

// -- one range --------------------------------------------------------------------------------------------------------

template <typename T, int D, bool kSharedTiles>
__global__ void __launch_bounds__(kMostThreads, 1) attend_kernel(
    Work const w, __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = Shared<D, kSharedTiles>;
    constexpr int kHalfBytes = kTile * kAtom * 2; // of a tile: 64 of its columns
    constexpr int kSteps = D / 16;
    dflash_attention_params const& p = w.p;

    extern __shared__ __align__(1024) char tiles[];
    uint32_t const tiles_at = shared_address(tiles);
    uint32_t const full = tiles_at + S::kBarriersAt; // a tile has come
    uint32_t const empty = full + S::kStages * 8; // its readers are done

    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    int const group = warp / 4; // 2: who asks for tiles
    int const range = blockIdx.x;

    if (threadIdx.x == 0)
    {
        for (int stage = 0; stage < S::kStages; ++stage)
        {
            init_barrier(full + stage * 8, 1);
            init_barrier(empty + stage * 8, kSharedTiles ? 8 : 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Until the wait lengths are a guess, for a kernel before this one may be writing them; but mostly a right one, and
    // what follows from them takes longer than the look whether they have changed.
    Lengths lengths(p);
    bool const can_guess = p.slots <= 32; // then all is in registers
    Span span = can_guess ? Span(w, lengths, range) : Span();
    __syncthreads();
    // In this order: what begins beside this kernel may then read lengths.
    wait();
    trigger();
    if (lengths.renew() || !can_guess)
    {
        span = Span(w, lengths, range);
    }
    if (span.first >= span.past)
    {
        return;
    }

    if (group == 2)
    {
        if (lane == 0)
        {
            Cursor ahead = span.at;
            int stage = 0;
            uint32_t parity = 1;
            for (int unit = span.first; unit < span.past; ++unit)
            {
                wait_for_phase(empty + stage * 8, parity);
                uint32_t const to = tiles_at + stage * 2 * S::kTileBytes;
                expect_bytes(full + stage * 8, 2 * S::kTileBytes);
                copy_tile(to, keys, ahead, full + stage * 8);
                copy_tile(to + S::kTileBytes, values, ahead, full + stage * 8);
                if (unit + 1 < span.past)
                {
                    ahead.advance(p);
                }
                stage = stage + 1 == S::kStages ? 0 : stage + 1;
                parity ^= stage == 0;
            }
        }
        return;
    }

    // This thread's two packed rows, as in a fragment.
    int const row_block = kSharedTiles ? 2 * blockIdx.y + group : 0;
    int const warp_rows = row_block * kRows + warp % 4 * 16;
    bool const has_rows = warp_rows < w.packed_rows;
    int const packed_rows[2] = {warp_rows + lane / 4, warp_rows + lane / 4 + 8};
    int const rows[2] = {
        packed_rows[0] - head_of(w, packed_rows[0]) * p.rows, packed_rows[1] - head_of(w, packed_rows[1]) * p.rows};
    float const scale = p.scale * kLog2E;

    // Queries of a warpgroup of its own, or of both.
    constexpr int kQueryThreads = kSharedTiles ? kConsumers / 2 : kConsumers;
    uint32_t const queries_at = tiles_at + S::kQueriesAt + (kSharedTiles ? group * S::kQueryBytes : 0);
    auto const meet_for_queries = [&]()
    {
        if constexpr (kSharedTiles)
        {
            meet_group(group);
        }
        else
        {
            meet_all();
        }
    };
    // A 16-byte chunk of a row of queries, keys or values: the columns of one half lie together, swizzled.
    auto const swizzled = [](int row, int chunk)
    { return chunk / 8 * kHalfBytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16; };

    int unit = span.first; // of the (slot, head), the first that is in the range
    for (Cursor at = span.at;; at.next_head(p))
    {
        int const count = min(at.tiles - at.tile, span.past - unit);
        float out[2 * kSteps][4] = {};
        OnlineSoftmax<FlushingExp2> softmax;
        softmax.begin();

        for (int i = threadIdx.x % kQueryThreads; i < kRows * (D / 8); i += kQueryThreads)
        {
            int const row = i / (D / 8);
            int const chunk = i % (D / 8);
            int const packed_row = row_block * kRows + row;
            int4 x = {};
            if (packed_row < w.packed_rows)
            {
                int const group_head = head_of(w, packed_row);
                T const* from = static_cast<T const*>(p.q) + at.slot * p.q_slot_stride
                    + (packed_row - group_head * p.rows) * p.q_row_stride
                    + (at.head * w.group + group_head) * p.q_head_stride;
                x = *reinterpret_cast<int4 const*>(from + chunk * 8);
            }
            *reinterpret_cast<int4*>(tiles + (queries_at - tiles_at) + swizzled(row, chunk)) = x;
        }
        show_to_products();
        meet_for_queries();

        // Of all tiles of the range, not of this (slot, head): a place of the ring is then always the same warpgroup's,
        // which so has seen each of the phases of its barriers.
        int const before = unit - span.first;
        for (int i = kSharedTiles ? 0 : (before + group) % 2; i < count; i += kSharedTiles ? 1 : 2)
        {
            int const nth = before + i;
            int const stage = nth % S::kStages;
            uint32_t const keys_at = tiles_at + stage * 2 * S::kTileBytes;
            uint32_t const values_at = keys_at + S::kTileBytes;
            int const first_key = at.first_key() + i * kTile;
            wait_for_phase(full + stage * 8, nth / S::kStages % 2);

            // logits = q k^T
            float logits[8][4] = {};
            begin_products();
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
            {
                int const column = k / 4 * kHalfBytes + k % 4 * 32;
                multiply_add<T>(logits, matrix(queries_at + column, 16, 8 * kAtom * 2),
                    matrix(keys_at + column, 16, 8 * kAtom * 2));
            }
            commit_products();
            // Values past the length may be anything, NaN too, which no weight of zero takes away.
            if (first_key + kTile > at.length)
            {
                constexpr int kSharing = kSharedTiles ? kConsumers : kConsumers / 2;
                int const past = at.length - first_key;
                for (int j = threadIdx.x % kSharing; j < (kTile - past) * (D / 8); j += kSharing)
                {
                    *reinterpret_cast<int4*>(
                        tiles + (values_at - tiles_at) + swizzled(past + j / (D / 8), j % (D / 8))) = {};
                }
                show_to_products();
                if constexpr (kSharedTiles)
                {
                    meet_all();
                }
                else
                {
                    meet_group(group);
                }
            }
            wait_for_products(logits);

            uint32_t weights[4][4] = {};
            if (has_rows)
            {
                Mask{p, at.length}.apply(logits, rows, first_key);
                softmax.advance(logits, scale, out);
#pragma unroll
                for (int n = 0; n < 8; ++n)
                {
                    float(&x)[4] = logits[n];
                    softmax.weigh(x, scale);
                    weights[n / 2][n % 2 * 2] = packed<T>(x[0], x[1]);
                    weights[n / 2][n % 2 * 2 + 1] = packed<T>(x[2], x[3]);
                }
            }

            // out += softmax v
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k)
            {
                multiply_add<T>(
                    out, weights[k], matrix(values_at + k * 16 * kAtom * 2, kHalfBytes, 8 * kAtom * 2));

            }
            commit_products();
            wait_for_products(out);
            if (lane == 0)
            {
                arrive(empty + stage * 8);
            }
        }

        // The end of a (slot, head), or of the range.
        softmax.finish(scale);
        // Of results in two warpgroups each finishes a half: this is of the other's half, and the other's is of this.
        constexpr int kOwn = kSharedTiles ? 2 * kSteps : kSteps; // fragments
        int const first_own = kSharedTiles ? 0 : group * kSteps;
        float own[kOwn][4];
        if constexpr (kSharedTiles)
        {
#pragma unroll
            for (int i = 0; i < 4 * kOwn; ++i)
            {
                own[i / 4][i % 4] = out[i / 4][i % 4];
            }
            meet_for_queries(); // of the next (slot, head): none reads these any more
        }
        else
        {
            auto* box = reinterpret_cast<float4*>(tiles + S::kMergeAt) + threadIdx.x % 128;
            auto* to = box + group * S::kBoxRows * 128;
            auto* from = box + (1 - group) * S::kBoxRows * 128;
            to[0] = {softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]};
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
            {
                float(&lower)[4] = out[n];
                float(&upper)[4] = out[n + kSteps];
                to[(1 + n) * 128] = group == 0 ? float4{upper[0], upper[1], upper[2], upper[3]}
                                               : float4{lower[0], lower[1], lower[2], lower[3]};
#pragma unroll
                for (int c = 0; c < 4; ++c)
                {
                    own[n][c] = group == 0 ? lower[c] : upper[c];
                }
            }
            meet_for_queries(); // and for the box
            float4 const others = from[0];
            float const maxima[2] = {others.x, others.y};
            float const sums[2] = {others.z, others.w};
            float mine[2];
            float theirs[2];
            softmax.merge(maxima, sums, mine, theirs);
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
            {
                float4 const x = from[(1 + n) * 128];
                own[n][0] = own[n][0] * mine[0] + x.x * theirs[0];
                own[n][1] = own[n][1] * mine[0] + x.y * theirs[0];
                own[n][2] = own[n][2] * mine[1] + x.z * theirs[1];
                own[n][3] = own[n][3] * mine[1] + x.w * theirs[1];
            }
        }
        if (has_rows)
        {
            Partial const partial(w, D, range, at.tile == 0, row_block, kRows / 16, warp % 4);
            bool const is_whole = at.tile == 0 && count == at.tiles;
            if (is_whole)
            {
                write_rows<T, D>(w, at.slot, at.head, packed_rows, softmax.maximum, softmax.sum, own, first_own);
            }
            else
            {
                partial.write(own, first_own);
                if (first_own == 0)
                {
                    partial.write_sums(softmax.maximum, softmax.sum);
                }
            }
        }
        unit += count;
        if (unit == span.past)
        {
            return;
        }
    }
#endif
}

} // namespace sm90
} // namespace dflash
