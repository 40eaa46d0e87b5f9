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
#include "tensor_copy.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

#include <cuda.h>
#include <type_traits>

namespace dflash
{
namespace sm90
{

constexpr int kRows = 64; // packed rows of a warpgroup
constexpr int kConsumers = 256; // threads
// What the compiler may count on: it leaves registers for blocks of the kernels before and after this one.
constexpr int kMostThreads = 384;
static_assert(kMostThreads <= 32 * kMostWarps);
// Of heads of 256 the output alone takes 128 registers a thread: a whole warpgroup asks for tiles, and gives its own.
constexpr int kLoaderRegisters = 40;
constexpr int kMainloopRegisters = 232;

template <int D>
constexpr bool kGivesRegisters = D > 128;

template <int D>
constexpr int kThreads = kConsumers + (kGivesRegisters<D> ? 128 : 32);

// What lies in shared memory: tiles of keys and values, queries, the box through which warpgroups merge, barriers.
template <int D, bool kSharedTiles>
struct Shared
{
    static constexpr int kTileBytes = kTile * D * 2;
    static constexpr int kHalfBytes = kTile * kAtom * 2; // of a tile: 64 of its columns
    static constexpr int kStages = 4 * 128 / D; // an even number
    static constexpr int kQueryBytes = kRows * D * 2; // of a warpgroup, if tiles are shared, else of both
    static constexpr int kQueriesAt = 2 * kStages * kTileBytes;
    static constexpr int kQueriesEnd = kQueriesAt + (kSharedTiles ? 2 : 1) * kQueryBytes;
    static constexpr int kBoxRows = 1 + D / 16; // of a number of fragment a thread
    // Of heads of 256 there is no place for both: the box is where the queries were.
    static constexpr bool kMergesOverQueries = D > 128;
    static constexpr int kMergeAt = kMergesOverQueries ? kQueriesAt : kQueriesEnd;
    static constexpr int kBarriersAt = kSharedTiles ? kQueriesEnd : kMergeAt + 2 * kBoxRows * 128 * 16;
    static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;

    // Where a 16-byte chunk of a row of queries, keys or values lies: columns of one half together, swizzled.
    static __device__ __forceinline__ int chunk_at(int row, int chunk)
    {
        return chunk / 8 * kHalfBytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16;
    }
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

// Tiles are boxes [D / 64, kTile, 64] of the cache [pages, kv_heads, D / 64, page_rows, 64].
__device__ __forceinline__ void copy_tile(
    uint32_t to, CUtensorMap const& from, TilePlace const& at, int head, uint32_t barrier)
{
    copy_box_5d(to, from, 0, at.row, 0, head, at.page, barrier, read_once_policy());
}

// -- inputs -----------------------------------------------------------------------------------------------------------

// A ring of tiles in shared memory, and for each place a barrier that its tile has come and one that its readers are
// done.
template <typename S>
struct Inputs
{
    uint32_t at;

    __device__ __forceinline__ uint32_t keys(int stage) const
    {
        return at + stage * 2 * S::kTileBytes;
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return at + S::kBarriersAt + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return at + S::kBarriersAt + (S::kStages + stage) * 8;
    }

    // By one thread. readers: warps that take each tile. writers: threads that say that it has come.
    __device__ __forceinline__ void init(int readers, int writers = 1) const
    {
        for (int stage = 0; stage < S::kStages; ++stage)
        {
            init_barrier(full(stage), writers);
            init_barrier(empty(stage), readers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Asks for a tile as soon as there is place. By one thread.
    __device__ __forceinline__ void ask(int stage, uint32_t parity, TilePlace const& place, int head,
        CUtensorMap const& keys_from, CUtensorMap const& values_from) const
    {
        wait_for_phase(empty(stage), parity);
        expect_bytes(full(stage), 2 * S::kTileBytes);
        copy_tile(keys(stage), keys_from, place, head, full(stage));
        copy_tile(keys(stage) + S::kTileBytes, values_from, place, head, full(stage));
    }

    // Asks for all tiles of a range; by then each one's page is known.
    __device__ __forceinline__ void fill(
        Work const& w, Span const& span, CUtensorMap const& keys_from, CUtensorMap const& values_from) const
    {
        if (span.tiles == 0)
        {
            return;
        }
        Cursor ahead = span.at;
        TilePlace place(w, ahead);
        int stage = 0;
        uint32_t parity = 1;
        for (int nth = 0; nth < span.tiles; ++nth)
        {
            ask(stage, parity, place, ahead.head, keys_from, values_from);
            if (nth + 1 < span.tiles)
            {
                ahead.advance(w.p);
                place = TilePlace(w, ahead);
            }
            stage = stage + 1 == S::kStages ? 0 : stage + 1;
            parity ^= stage == 0;
        }
    }
};

// -- main loop --------------------------------------------------------------------------------------------------------

// Eight numbers of a packed row's query; zeros where the segment has no such row.
template <typename T>
__device__ __forceinline__ int4 query_chunk(Work const& w, Cursor const& at, int packed_row, int chunk)
{
    dflash_attention_params const& p = w.p;
    int const group_head = head_of(w, packed_row);
    int const row = packed_row - group_head * p.rows;
    if (packed_row >= w.packed_rows || row >= at.segment.rows)
    {
        return {};
    }
    T const* from = static_cast<T const*>(p.q) + at.first_query(p) + row * p.q_row_stride
        + (at.head * w.group + group_head) * p.q_head_stride;
    return *reinterpret_cast<int4 const*>(from + chunk * 8);
}

// Attention of a warpgroup's 64 packed rows: all tiles of a (slot, head), or every other one.
template <typename T, int D, bool kSharedTiles>
struct Mainloop
{
    using S = Shared<D, kSharedTiles>;
    static constexpr int kSteps = D / 16;

    Work const& w;
    char* shared;
    Inputs<S> inputs;
    int group;
    int row_block;
    Rows rows;
    Paths paths; // of a (slot, head)'s segment
    bool has_rows; // the warp
    float scale; // of the logits, base 2
    float out[2 * kSteps][4]; // unnormalized
    OnlineSoftmax<FlushingExp2> softmax;

    __device__ __forceinline__ Mainloop(Work const& work, char* shared_memory, Inputs<S> const& tiles, int warp)
        : w(work)
        , shared(shared_memory)
        , inputs(tiles)
        , group(warp / 4)
        , row_block(kSharedTiles ? 2 * blockIdx.y + group : blockIdx.y)
        , rows(work, row_block * kRows + warp % 4 * 16)
        , has_rows(row_block * kRows + warp % 4 * 16 < work.packed_rows)
        , scale(work.p.scale * kLog2E)
    {
    }

    // Waits for the others who share the queries.
    __device__ __forceinline__ void meet() const
    {
        if constexpr (kSharedTiles)
        {
            meet_group(group);
        }
        else
        {
            meet_all();
        }
    }

    // Where the warpgroup's queries lie.
    __device__ __forceinline__ int queries_at() const
    {
        return S::kQueriesAt + (kSharedTiles ? group * S::kQueryBytes : 0);
    }

    // Forgets the keys seen so far.
    __device__ __forceinline__ void forget()
    {
#pragma unroll
        for (auto& fragment : out)
        {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
        softmax.begin();
    }

    // Loads the queries of a (slot, head), of whose keys none has been seen.
    __device__ __forceinline__ void begin(Cursor const& at)
    {
        forget();
        paths.load(w.p, at.segment, rows.query);

        constexpr int kSharing = kSharedTiles ? kConsumers / 2 : kConsumers; // threads
        constexpr int kChunks = kRows * (D / 8);
        constexpr int kTogether = kChunks / kSharing < 4 ? kChunks / kSharing : 4; // of a thread: no wait in between
#pragma unroll 1
        for (int first = threadIdx.x % kSharing; first < kChunks; first += kTogether * kSharing)
        {
            int4 x[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kSharing;
                x[i] = query_chunk<T>(w, at, row_block * kRows + chunk / (D / 8), chunk % (D / 8));
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kSharing;
                *reinterpret_cast<int4*>(shared + queries_at() + S::chunk_at(chunk / (D / 8), chunk % (D / 8))) = x[i];
            }
        }
        show_to_products();
        meet();
    }

    // Takes in the tile from first_key on, the nth of the block. hide: makes its logits -inf where a row
    // does not see the key.
    template <typename Hide>
    __device__ __forceinline__ void add(int nth, int first_key, Segment const& segment, Hide const& hide)
    {
        int const stage = nth % S::kStages;
        uint32_t const keys_at = inputs.keys(stage);
        wait_for_phase(inputs.full(stage), nth / S::kStages % 2);

        float logits[8][4] = {};
        multiply_keys(logits, keys_at);
        if (first_key + kTile > segment.length)
        {
            clear_values(stage, segment.length - first_key);
        }
        wait_for_products(logits);
        uint32_t weights[4][4] = {};
        if (has_rows)
        {
            hide(logits, first_key);
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
        multiply_values(weights, keys_at + S::kTileBytes);
        if (threadIdx.x % 32 == 0)
        {
            arrive(inputs.empty(stage));
        }
    }

    // Begins logits [64, 64] += q k^T.
    __device__ __forceinline__ void multiply_keys(float (&logits)[8][4], uint32_t keys_at) const
    {
        begin_products();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
        {
            int const column = k / 4 * S::kHalfBytes + k % 4 * 32;
            multiply_add<T>(logits, matrix(inputs.at + queries_at() + column, 16, 8 * kAtom * 2),
                matrix(keys_at + column, 16, 8 * kAtom * 2));
        }
        commit_products();
    }

    // Values past the length may be anything, NaN too, which no weight of zero takes away: their rows become zeros.
    __device__ __forceinline__ void clear_values(int stage, int past)
    {
        constexpr int kSharing = kSharedTiles ? kConsumers : kConsumers / 2; // threads
        char* values = shared + (2 * stage + 1) * S::kTileBytes;
        for (int i = threadIdx.x % kSharing; i < (kTile - past) * (D / 8); i += kSharing)
        {
            *reinterpret_cast<int4*>(values + S::chunk_at(past + i / (D / 8), i % (D / 8))) = {};
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

    // out [64, D] += weights v
    __device__ __forceinline__ void multiply_values(uint32_t const (&weights)[4][4], uint32_t values_at)
    {
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
        {
            uint32_t const rows_at = values_at + k * 16 * kAtom * 2;
            if constexpr (D > 128)
            {
                // In two products of 128 columns.
                auto& halves = reinterpret_cast<float (&)[2][16][4]>(out);
                multiply_add<T>(halves[0], weights[k], matrix(rows_at, S::kHalfBytes, 8 * kAtom * 2));
                multiply_add<T>(
                    halves[1], weights[k], matrix(rows_at + 2 * S::kHalfBytes, S::kHalfBytes, 8 * kAtom * 2));
            }
            else
            {
                multiply_add<T>(out, weights[k], matrix(rows_at, S::kHalfBytes, 8 * kAtom * 2));
            }
        }
        commit_products();
        wait_for_products(out);
    }

    // Joins what two warpgroups have of the same rows and other keys. Each finishes a half of the output, its own, and
    // gives the other warpgroup what it has of the other half. half: the lower one is whose first tile is the first, so
    // that bits do not depend on which warpgroup it is. By all threads of both.
    __device__ __forceinline__ void merge(int half, float (&own)[kSteps][4])
    {
        if constexpr (S::kMergesOverQueries)
        {
            meet(); // none reads the queries any more
        }
        auto* box = reinterpret_cast<float4*>(shared + S::kMergeAt) + threadIdx.x % 128;
        auto* to = box + half * S::kBoxRows * 128;
        auto* from = box + (1 - half) * S::kBoxRows * 128;
        to[0] = {softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]};
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
        {
            float (&lower)[4] = out[n];
            float (&upper)[4] = out[n + kSteps];
            to[(1 + n) * 128] = half == 0 ? float4{upper[0], upper[1], upper[2], upper[3]}
                                          : float4{lower[0], lower[1], lower[2], lower[3]};
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                own[n][c] = half == 0 ? lower[c] : upper[c];
            }
        }
        meet();
        float4 const others = from[0];
        float const maxima[2] = {others.x, others.y};
        float const sums[2] = {others.z, others.w};
        float const own_sums[2] = {softmax.sum[0], softmax.sum[1]};
        float mine[2];
        float theirs[2];
        softmax.merge(maxima, sums, mine, theirs);
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            // Rounded alike for both halves: a row written here gets the bits that it gets where it is combined.
            softmax.sum[r] = half == 0 ? fmaf(sums[r], theirs[r], __fmul_rn(own_sums[r], mine[r]))
                                       : fmaf(own_sums[r], mine[r], __fmul_rn(sums[r], theirs[r]));
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
        {
            merge_rows(own[n], from[(1 + n) * 128], mine, theirs);
        }
        if constexpr (S::kMergesOverQueries)
        {
            meet(); // none reads the box any more
        }
    }
};

// -- one range --------------------------------------------------------------------------------------------------------

// What the two warpgroups do with a range.
template <typename T, int D, bool kSharedTiles>
__device__ __forceinline__ void attend(
    Work const& w, Span const& span, int range, char* shared, Inputs<Shared<D, kSharedTiles>> const& inputs)
{
    dflash_attention_params const& p = w.p;
    int const warp = threadIdx.x / 32;
    Mainloop<T, D, kSharedTiles> mainloop(w, shared, inputs, warp);
    int const group = mainloop.group;
    Epilogue<T, D> const epilogue{w, range, mainloop.row_block * (kRows / 16) + warp % 4};

    int before = 0; // tiles of the range before the (slot, head)'s
    for (Cursor at = span.at;; at.next_head(p))
    {
        int const count = min(at.tiles - at.tile, span.tiles - before);
        bool const begins = at.tile == 0;
        bool const ends = at.tile + count == at.tiles;
        mainloop.begin(at);
        // Of all tiles of the range, not of this (slot, head): a place of the ring is then always the same warpgroup's,
        // which so has seen each of the phases of its barriers.
        auto const hide = [&](float (&logits)[8][4], int first_key)
        { Mask{p, at.segment}.apply(logits, mainloop.rows.query, mainloop.paths, first_key); };
        int const half = (before + group) % 2;
        for (int i = kSharedTiles ? 0 : half; i < count; i += kSharedTiles ? 1 : 2)
        {
            mainloop.add(before + i, at.first_key() + i * kTile, at.segment, hide);
        }
        // The end of a (slot, head), or of the range.
        mainloop.softmax.finish(mainloop.scale);
        if constexpr (kSharedTiles)
        {
            mainloop.meet(); // none reads the queries any more
            if (mainloop.has_rows)
            {
                epilogue.write(at, begins, ends, mainloop.rows, mainloop.softmax, mainloop.out, 0);
            }
        }
        else
        {
            float own[D / 16][4];
            mainloop.merge(half, own); // after which none reads the queries any more
            if (mainloop.has_rows)
            {
                epilogue.write(at, begins, ends, mainloop.rows, mainloop.softmax, own, half * (D / 16));
            }
        }
        before += count;
        if (before == span.tiles)
        {
            return;
        }
    }
}

#endif

template <typename T, int D, bool kSharedTiles>
__global__ void __launch_bounds__(kMostThreads, 1)
    attend_kernel(Work const w, __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    Inputs<Shared<D, kSharedTiles>> const inputs{shared_address(shared)};
    if (threadIdx.x == 0)
    {
        inputs.init(kSharedTiles ? 8 : 4);
    }
    Span const span = wait_for_span<kGivesRegisters<D> ? 32 : 64>(w);
    bool const computes = threadIdx.x < kConsumers;
    if constexpr (kGivesRegisters<D>)
    {
        computes ? take_registers<kMainloopRegisters>() : release_registers<kLoaderRegisters>();
    }
    if (computes)
    {
        if (span.tiles > 0)
        {
            attend<T, D, kSharedTiles>(w, span, blockIdx.x, shared, inputs);
        }
    }
    else if (threadIdx.x == kConsumers)
    {
        inputs.fill(w, span, keys, values);
        if (blockIdx.y == 0)
        {
            announce(w, span, blockIdx.x);
        }
    }
#endif
}

} // namespace sm90
} // namespace dflash
