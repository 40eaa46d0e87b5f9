// Attention from heads of 512 for Hopper: as of smaller heads, but that a block has 64 packed rows alone.
//
// Their output takes 128 registers of each thread of both warpgroups. So each sums half of the values' columns, by the
// weights of all keys, which both compute: to exchange them would take as long as the products that it spares. Tiles
// come in parts of 256 columns, in the order in which they are read, each of which leaves its place as soon as it has
// been.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_sm90.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

#include <cuda.h>

namespace dflash
{
namespace sm90
{

constexpr int kWideHead = 512;

// What lies in shared memory: a ring of parts of tiles, queries, barriers.
struct WideShared
{
    static constexpr int kColumns = 256; // of a part
    static constexpr int kParts = 4; // of a tile: the keys' two, then the values'
    static constexpr int kStages = 5;
    static constexpr int kHalfBytes = kTile * kAtom * 2; // of a part: 64 of its columns
    static constexpr int kPartBytes = kTile * kColumns * 2;
    static constexpr int kQueriesAt = kStages * kPartBytes;
    static constexpr int kBarriersAt = kQueriesAt + kRows * kWideHead * 2;
    static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;

    // Where a 16-byte chunk of a row of queries, or of a part, lies.
    static __device__ __forceinline__ int chunk_at(int row, int chunk)
    {
        return chunk / 8 * kHalfBytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- inputs -----------------------------------------------------------------------------------------------------------

// Parts are boxes [4, kTile, 64] of the cache [pages, kv_heads, D / 64, page_rows, 64].
__device__ __forceinline__ void copy_part(
    uint32_t to, CUtensorMap const& from, TilePlace const& at, int head, int half, uint32_t barrier)
{
    copy_box_5d(to, from, 0, at.row, half * (WideShared::kColumns / kAtom), head, at.page, barrier, read_once_policy());
}

// A ring of parts in shared memory, and for each place a barrier that its part has come and one that its readers are
// done. Parts are counted from the range's first on.
struct WideInputs
{
    using S = WideShared;

    uint32_t at;

    static __device__ __forceinline__ int stage(int part)
    {
        return part % S::kStages;
    }

    __device__ __forceinline__ uint32_t part(int nth) const
    {
        return at + stage(nth) * S::kPartBytes;
    }

    __device__ __forceinline__ uint32_t full(int nth) const
    {
        return at + S::kBarriersAt + stage(nth) * 8;
    }

    __device__ __forceinline__ uint32_t empty(int nth) const
    {
        return at + S::kBarriersAt + (S::kStages + stage(nth)) * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < S::kStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), kConsumers / 32);
        }
        fence_barrier_inits();
    }

    // Waits until a part has come.
    __device__ __forceinline__ void wait(int nth) const
    {
        wait_for_phase(full(nth), nth / S::kStages % 2);
    }

    // Leaves a part that has come. By all warps of both warpgroups.
    __device__ __forceinline__ void leave(int nth) const
    {
        if (threadIdx.x % 32 == 0)
        {
            arrive(empty(nth));
        }
    }

    // Asks for all tiles of a range, each part as soon as there is place. By one thread.
    __device__ __forceinline__ void fill(
        Work const& w, Span const& span, CUtensorMap const& keys_from, CUtensorMap const& values_from) const
    {
        if (span.tiles == 0)
        {
            return;
        }
        Cursor ahead = span.at;
        TilePlace place(w, ahead);
        int nth = 0;
        for (int tile = 0; tile < span.tiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < S::kParts; ++i, ++nth)
            {
                wait_for_phase(empty(nth), 1 ^ nth / S::kStages % 2);
                expect_bytes(full(nth), S::kPartBytes);
                copy_part(part(nth), i < 2 ? keys_from : values_from, place, ahead.head, i % 2, full(nth));
            }
            if (tile + 1 < span.tiles)
            {
                ahead.advance(w.p);
                place = TilePlace(w, ahead);
            }
        }
    }
};

// -- main loop --------------------------------------------------------------------------------------------------------

// Attention of 64 packed rows: of all keys' weights a warpgroup makes its half of the output's columns.
template <typename T>
struct WideMainloop
{
    using S = WideShared;
    static constexpr int kFragments = S::kColumns / 8;

    Work const& w;
    char* shared;
    WideInputs inputs;
    int group;
    int row_block;
    Rows rows;
    Paths paths; // of a (slot, head)'s segment
    bool has_rows; // the warp
    float scale; // of the logits, base 2
    float out[kFragments][4]; // unnormalized
    OnlineSoftmax<FlushingExp2> softmax;

    __device__ __forceinline__ WideMainloop(Work const& work, char* shared_memory, WideInputs const& tiles, int warp)
        : w(work)
        , shared(shared_memory)
        , inputs(tiles)
        , group(warp / 4)
        , row_block(blockIdx.y)
        , rows(work, row_block * kRows + warp % 4 * 16)
        , has_rows(row_block * kRows + warp % 4 * 16 < work.packed_rows)
        , scale(work.p.scale * kLog2E)
    {
    }

    // Loads the queries of a (slot, head), of whose keys none has been seen.
    __device__ __forceinline__ void begin(Cursor const& at)
    {
#pragma unroll
        for (auto& fragment : out)
        {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
        softmax.begin();
        paths.load(w.p, at.segment, rows.query);

        constexpr int kChunks = kRows * (kWideHead / 8);
        constexpr int kTogether = 4; // of a thread: no wait in between
#pragma unroll 1
        for (int first = threadIdx.x; first < kChunks; first += kTogether * kConsumers)
        {
            int4 x[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kConsumers;
                x[i] = query_chunk<T>(w, at, row_block * kRows + chunk / (kWideHead / 8), chunk % (kWideHead / 8));
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kConsumers;
                int const to = S::kQueriesAt + S::chunk_at(chunk / (kWideHead / 8), chunk % (kWideHead / 8));
                *reinterpret_cast<int4*>(shared + to) = x[i];
            }
        }
        show_to_products();
        meet_all();
    }

    // Takes in the tile from first_key on, the nth of the range.
    __device__ __forceinline__ void add(int nth, int first_key, Segment const& segment)
    {
        int const first_part = nth * S::kParts;
        float logits[8][4] = {};
        multiply_keys(logits, first_part);
        uint32_t weights[4][4] = {};
        if (has_rows)
        {
            Mask{w.p, segment}.apply(logits, rows.query, paths, first_key);
            softmax.advance(logits, scale, out);
#pragma unroll
            for (int n = 0; n < 8; ++n)
            {
                float (&x)[4] = logits[n];
                softmax.weigh(x, scale);
                weights[n / 2][n % 2 * 2] = packed<T>(x[0], x[1]);
                weights[n / 2][n % 2 * 2 + 1] = packed<T>(x[2], x[3]);
            }
        }
        int const own = first_part + 2 + group;
        int const others = first_part + 3 - group;
        inputs.wait(own);
        if (first_key + kTile > segment.length)
        {
            clear_values(own, segment.length - first_key);
        }
        multiply_values(weights, inputs.part(own));
        inputs.leave(own);
        // Only once it has come: its place's phase is then the one that this is to end.
        inputs.wait(others);
        inputs.leave(others);
    }

    // logits [64, 64] = q k^T
    __device__ __forceinline__ void multiply_keys(float (&logits)[8][4], int first_part) const
    {
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            inputs.wait(first_part + half);
            begin_products();
            uint32_t const queries_at = inputs.at + S::kQueriesAt + half * (S::kColumns / kAtom) * S::kHalfBytes;
            uint32_t const keys_at = inputs.part(first_part + half);
#pragma unroll
            for (int k = 0; k < S::kColumns / 16; ++k)
            {
                int const column = k / 4 * S::kHalfBytes + k % 4 * 32;
                multiply_add<T>(logits, matrix(queries_at + column, 16, 8 * kAtom * 2),
                    matrix(keys_at + column, 16, 8 * kAtom * 2));
            }
            commit_products();
        }
        wait_for_all_but<1>();
        inputs.leave(first_part);
        wait_for_products(logits);
        inputs.leave(first_part + 1);
    }

    // Values past the length may be anything, NaN too, which no weight of zero takes away: their rows become zeros.
    __device__ __forceinline__ void clear_values(int part, int past)
    {
        constexpr int kChunks = S::kColumns / 8; // of a row
        char* values = shared + WideInputs::stage(part) * S::kPartBytes;
        for (int i = threadIdx.x % 128; i < (kTile - past) * kChunks; i += 128)
        {
            *reinterpret_cast<int4*>(values + S::chunk_at(past + i / kChunks, i % kChunks)) = {};
        }
        show_to_products();
        meet_group(group);
    }

    // out [64, 256] += weights v, in two products of 128 columns
    __device__ __forceinline__ void multiply_values(uint32_t const (&weights)[4][4], uint32_t values_at)
    {
        auto& halves = reinterpret_cast<float (&)[2][16][4]>(out);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
        {
            uint32_t const rows_at = values_at + k * 16 * kAtom * 2;
            multiply_add<T>(halves[0], weights[k], matrix(rows_at, S::kHalfBytes, 8 * kAtom * 2));
            multiply_add<T>(halves[1], weights[k], matrix(rows_at + 2 * S::kHalfBytes, S::kHalfBytes, 8 * kAtom * 2));
        }
        commit_products();
        wait_for_products(out);
    }
};

// -- one range --------------------------------------------------------------------------------------------------------

// What the two warpgroups do with a range.
template <typename T>
__device__ __forceinline__ void attend_wide(Work const& w, Span const& span, char* shared, WideInputs const& inputs)
{
    dflash_attention_params const& p = w.p;
    int const warp = threadIdx.x / 32;
    WideMainloop<T> mainloop(w, shared, inputs, warp);
    int const range = blockIdx.x;
    Epilogue<T, kWideHead> const epilogue{w, range, mainloop.row_block * (kRows / 16) + warp % 4};

    int before = 0; // tiles of the range before the (slot, head)'s
    for (Cursor at = span.at;; at.next_head(p))
    {
        int const count = min(at.tiles - at.tile, span.tiles - before);
        bool const begins = at.tile == 0;
        bool const ends = at.tile + count == at.tiles;
        mainloop.begin(at);
        for (int i = 0; i < count; ++i)
        {
            mainloop.add(before + i, at.first_key() + i * kTile, at.segment);
        }
        mainloop.softmax.finish(mainloop.scale);
        meet_all(); // none reads the queries any more
        if (mainloop.has_rows)
        {
            int const first = mainloop.group * WideMainloop<T>::kFragments;
            epilogue.write(at, begins, ends, mainloop.rows, mainloop.softmax, mainloop.out, first);
        }
        before += count;
        if (before == span.tiles)
        {
            return;
        }
    }
}

#endif

template <typename T>
__global__ void __launch_bounds__(kMostThreads, 1) attend_wide_kernel(
    Work const w, __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    WideInputs const inputs{shared_address(shared)};
    if (threadIdx.x == 0)
    {
        inputs.init();
    }
    Span const span = wait_for_span<32>(w);
    if (threadIdx.x < kConsumers)
    {
        take_registers<kMainloopRegisters>();
        if (span.tiles > 0)
        {
            attend_wide<T>(w, span, shared, inputs);
        }
    }
    else
    {
        release_registers<kLoaderRegisters>();
        if (threadIdx.x == kConsumers)
        {
            inputs.fill(w, span, keys, values);
            if (blockIdx.y == 0)
            {
                announce(w, span, blockIdx.x);
            }
        }
    }
#endif
}

} // namespace sm90
} // namespace dflash
