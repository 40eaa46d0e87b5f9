// Latent attention, absorbed, for Hopper: a cache row of 576 numbers is the key of all heads, its first 512 the value.
//
// One block an SM, of 64 packed rows. One warp asks for tiles of 64 cache rows, each read once for keys and values
// alike; of each, two warpgroups compute. A warpgroup has half of the columns: of the products with keys it sums those,
// of the output it holds those. Both give each other their parts of the logits, 32 keys to each, of which it makes the
// weights; then they give each other the weights. What two threads exchange is always the same two threads'.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_sm90.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "wgmma.cuh"

#include <cuda.h>

namespace dflash
{

constexpr int kLatentRow = 576; // numbers of a cache row
constexpr int kLatentRank = 512; // of them, those that are a value too

namespace sm90
{

constexpr int kLatentThreads = kConsumers + 128; // a warpgroup asks for tiles, and gives its registers to the others

// What lies in shared memory. A column is 64 numbers, 128 bytes, of all rows of a tile or of the queries.
struct LatentShared
{
    static constexpr int kColumnBytes = kTile * kAtom * 2;
    static constexpr int kColumns = kLatentRow / kAtom;
    static constexpr int kTileBytes = kColumns * kColumnBytes;
    static constexpr int kStages = 2;
    static constexpr int kQueriesAt = kStages * kTileBytes;
    static constexpr int kQueryBytes = kLatentRank / kAtom * kColumnBytes; // the other column is in registers
    // What a thread gets from the other warpgroup's: parts of logits, then, in the other direction, weights.
    static constexpr int kBoxesAt = kQueriesAt + kQueryBytes;
    static constexpr int kBoxBytes = 128 * 64;
    static constexpr int kRowsAt = kBoxesAt + 2 * kBoxBytes; // numbers of two rows a thread
    static constexpr int kBarriersAt = kRowsAt + kConsumers * 8;
    static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;

    // Where a 16-byte chunk of a row lies: columns together, swizzled.
    static __device__ __forceinline__ int chunk_at(int row, int chunk)
    {
        return chunk / 8 * kColumnBytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp and the one with the same rows in the other warpgroup.
__device__ __forceinline__ void meet_pair()
{
    asm volatile("bar.sync %0, 64;" ::"r"(4 + static_cast<int>(threadIdx.x) / 32 % 4) : "memory");
}

// A ring of tiles in shared memory, and for each place a barrier that its tile has come and one that its readers are
// done.
struct LatentInputs
{
    using S = LatentShared;

    uint32_t at;

    __device__ __forceinline__ uint32_t rows(int stage) const
    {
        return at + stage * S::kTileBytes;
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return at + S::kBarriersAt + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return at + S::kBarriersAt + (S::kStages + stage) * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        for (int stage = 0; stage < S::kStages; ++stage)
        {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), kConsumers / 32);
        }
        fence_barrier_inits();
    }

    // Asks for all tiles of a range, each as soon as there is place. By one thread.
    __device__ __forceinline__ void fill(Work const& w, Span const& span, CUtensorMap const& cache) const
    {
        Cursor ahead = span.at;
        for (int nth = 0; nth < span.tiles; ++nth)
        {
            int const stage = nth % S::kStages;
            wait_for_phase(empty(stage), 1 ^ nth / S::kStages % 2);
            expect_bytes(full(stage), S::kTileBytes);
            copy_tile(rows(stage), cache, TilePlace(w, ahead), ahead.head, full(stage));
            if (nth + 1 < span.tiles)
            {
                ahead.advance(w.p);
            }
        }
    }
};

// Latent attention of 64 packed rows: of a warpgroup, half of the columns.
template <typename T>
struct LatentMainloop
{
    using S = LatentShared;
    static constexpr int kHalf = kLatentRank / kAtom / 2; // columns of a warpgroup; of the last one it has a half
    static constexpr int kOut = kLatentRank / 2 / 8; // fragments of the output
    static constexpr float kMostPower = 8.f; // of two: the largest weight, which FP16 must hold

    Work const& w;
    char* shared;
    LatentInputs inputs;
    int group;
    Rows rows;
    bool has_rows; // the warp
    float scale; // of the logits, base 2
    uint32_t rotated[2][4]; // of the queries' last column
    float out[kOut][4]; // unnormalized
    OnlineSoftmax<FlushingExp2> softmax;

    __device__ __forceinline__ LatentMainloop(Work const& work, char* shared_memory, LatentInputs const& tiles)
        : w(work)
        , shared(shared_memory)
        , inputs(tiles)
        , group(threadIdx.x / 128)
        , rows(work, blockIdx.y * kRows + threadIdx.x / 32 % 4 * 16)
        , has_rows(static_cast<int>(blockIdx.y * kRows + threadIdx.x / 32 % 4 * 16) < work.packed_rows)
        , scale(work.p.scale * kLog2E)
    {
    }

    // -- queries ------------------------------------------------------------------------------------------------------

    // Loads the queries of a slot, of whose rows none has been seen. By both warpgroups.
    __device__ __forceinline__ void begin(Cursor const& at)
    {
#pragma unroll
        for (auto& fragment : out)
        {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
        softmax.begin();
        constexpr int kChunks = kLatentRank / 8; // of a row
        constexpr int kTogether = 8; // of a thread: no wait in between
#pragma unroll 1
        for (int first = threadIdx.x; first < kRows * kChunks; first += kTogether * kConsumers)
        {
            int4 x[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kConsumers;
                T const* const from = query(at, blockIdx.y * kRows + chunk / kChunks);
                x[i] = from ? reinterpret_cast<int4 const*>(from)[chunk % kChunks] : int4{};
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
            {
                int const chunk = first + i * kConsumers;
                *reinterpret_cast<int4*>(shared + S::kQueriesAt + S::chunk_at(chunk / kChunks, chunk % kChunks)) = x[i];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            T const* const from = query(at, rows.packed[r]);
#pragma unroll
            for (int k = 0; k < 2; ++k)
            {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    int const column = kLatentRank + (2 * group + k) * 16 + half * 8 + threadIdx.x % 4 * 2;
                    rotated[k][2 * half + r] = from ? *reinterpret_cast<uint32_t const*>(from + column) : 0;
                }
            }
        }
        show_to_products();
        meet_all();
    }

    // A packed row's query; null where the slot has no such row.
    __device__ __forceinline__ T const* query(Cursor const& at, int packed_row) const
    {
        dflash_attention_params const& p = w.p;
        int const head = head_of(w, packed_row);
        int const row = packed_row - head * p.rows;
        if (packed_row >= w.packed_rows || row >= at.segment.rows)
        {
            return nullptr;
        }
        return static_cast<T const*>(p.q) + at.first_query(p) + row * p.q_row_stride + head * p.q_head_stride;
    }

    // -- one tile -----------------------------------------------------------------------------------------------------

    // Takes in the tile from first_key on, the nth of the range.
    __device__ __forceinline__ void add(int nth, int first_key, Segment const& segment)
    {
        int const stage = nth % S::kStages;
        uint32_t const tile = inputs.rows(stage);
        wait_for_phase(inputs.full(stage), nth / S::kStages % 2);

        float logits[4][4];
        multiply_keys(logits, tile);
        if (first_key + kTile > segment.length)
        {
            clear_values(stage, segment.length - first_key);
        }
        Mask{w.p, segment}.apply(logits, rows.query, Paths{}, first_key, 32 * group);
        float decay[2];
        raise(logits, decay);
        uint32_t own[2][4];
        uint32_t others[2][4];
        weigh(logits, own);
        give_weights(own); // before products take their registers, which none may read until these are done
        scale_rows(out, decay);
        multiply_values(own, tile, group);
        take_weights(others);
        multiply_values(others, tile, 1 - group);
        wait_for_products(out);
        if (threadIdx.x % 32 == 0)
        {
            arrive(inputs.empty(stage));
        }
    }

    // Makes logits [64, 32] of this warpgroup's keys: its own columns' part of them, and the other's.
    __device__ __forceinline__ void multiply_keys(float (&logits)[4][4], uint32_t tile) const
    {
        float parts[8][4] = {};
        begin_products();
#pragma unroll
        for (int k = 0; k < 4 * kHalf; ++k)
        {
            int const column = (group * kHalf + k / 4) * S::kColumnBytes + k % 4 * 32;
            sm90::multiply_add<T>(parts, matrix(inputs.at + S::kQueriesAt + column, 16, 8 * kAtom * 2),
                matrix(tile + column, 16, 8 * kAtom * 2));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
        {
            int const column = 2 * kHalf * S::kColumnBytes + (2 * group + k) * 32;
            multiply_add_rows<T>(parts, rotated[k], matrix(tile + column, 16, 8 * kAtom * 2));
        }
        commit_products();
        wait_for_products(parts);
#pragma unroll
        for (int n = 0; n < 4; ++n)
        {
            // Registers are chosen by selection: their numbers must be known when this is compiled.
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                logits[n][i] = group == 0 ? parts[n][i] : parts[4 + n][i];
                parts[n][i] = group == 0 ? parts[4 + n][i] : parts[n][i];
            }
            box(1 - group)[n * 128] = {parts[n][0], parts[n][1], parts[n][2], parts[n][3]};
        }
        meet_pair();
#pragma unroll
        for (int n = 0; n < 4; ++n)
        {
            float4 const other = box(group)[n * 128];
            logits[n][0] += other.x;
            logits[n][1] += other.y;
            logits[n][2] += other.z;
            logits[n][3] += other.w;
        }
    }

    // This thread's part of what comes to a warpgroup.
    __device__ __forceinline__ float4* box(int to) const
    {
        return reinterpret_cast<float4*>(shared + S::kBoxesAt + to * S::kBoxBytes) + threadIdx.x % 128;
    }

    // The numbers of two rows that the other warpgroup's thread has, for its own.
    __device__ __forceinline__ float2 exchange(float const (&own)[2]) const
    {
        auto* const all = reinterpret_cast<float2*>(shared + S::kRowsAt);
        all[threadIdx.x] = {own[0], own[1]};
        meet_pair();
        return all[threadIdx.x ^ 128];
    }

    // Raises the maxima to those of all of the tile's logits, but for those that are not much larger: what weights are
    // relative to may be any number near. What that leaves of the output so far.
    __device__ __forceinline__ void raise(float const (&logits)[4][4], float (&decay)[2])
    {
        float top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            top[r] = softmax.maximum[r];
#pragma unroll
            for (auto const& x : logits)
            {
                top[r] = fmaxf(top[r], fmaxf(x[2 * r], x[2 * r + 1]));
            }
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
        }
        float2 const other = exchange(top);
        top[0] = fmaxf(top[0], other.x);
        top[1] = fmaxf(top[1], other.y);
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            bool const is_much = (top[r] - softmax.maximum[r]) * scale > kMostPower; // not of two infinities
            decay[r] = softmax.raise(r, is_much ? top[r] : softmax.maximum[r], scale);
        }
    }

    // Makes the weights of this warpgroup's keys, operands of products.
    __device__ __forceinline__ void weigh(float (&logits)[4][4], uint32_t (&weights)[2][4])
    {
#pragma unroll
        for (int n = 0; n < 4; ++n)
        {
            float (&x)[4] = logits[n];
            softmax.weigh(x, scale);
            weights[n / 2][n % 2 * 2] = packed<T>(x[0], x[1]);
            weights[n / 2][n % 2 * 2 + 1] = packed<T>(x[2], x[3]);
        }
    }

    // Gives the other warpgroup the weights. They go where this thread alone has read, and the other one will write
    // next.
    __device__ __forceinline__ void give_weights(uint32_t const (&own)[2][4]) const
    {
        auto* const mine = reinterpret_cast<uint4*>(box(group));
#pragma unroll
        for (int k = 0; k < 2; ++k)
        {
            mine[k * 128] = {own[k][0], own[k][1], own[k][2], own[k][3]};
        }
    }

    // Takes the other warpgroup's weights, once both have given theirs.
    __device__ __forceinline__ void take_weights(uint32_t (&others)[2][4]) const
    {
        meet_pair();
        auto const* const theirs = reinterpret_cast<uint4 const*>(box(1 - group));
#pragma unroll
        for (int k = 0; k < 2; ++k)
        {
            uint4 const x = theirs[k * 128];
            others[k][0] = x.x;
            others[k][1] = x.y;
            others[k][2] = x.z;
            others[k][3] = x.w;
        }
    }

    // Values past the length may be anything, NaN too, which no weight of zero takes away: they become zeros, in this
    // warpgroup's columns, which no product of the other's reads.
    __device__ __forceinline__ void clear_values(int stage, int past)
    {
        constexpr int kChunks = kHalf * 8;
        char* const tile = shared + stage * S::kTileBytes;
        for (int i = threadIdx.x % 128; i < (kTile - past) * kChunks; i += 128)
        {
            *reinterpret_cast<int4*>(tile + S::chunk_at(past + i / kChunks, group * kChunks + i % kChunks)) = {};
        }
        show_to_products();
        meet_group(group);
    }

    // Begins out [64, 256] += weights [64, 32] values [32, 256], of a warpgroup's keys.
    __device__ __forceinline__ void multiply_values(uint32_t const (&weights)[2][4], uint32_t tile, int of)
    {
        auto& halves = reinterpret_cast<float (&)[2][kOut / 2][4]>(out);
        uint32_t const columns = tile + group * kHalf * S::kColumnBytes + of * 32 * kAtom * 2;
        begin_products();
#pragma unroll
        for (int k = 0; k < 2; ++k)
        {
            uint32_t const from = columns + k * 16 * kAtom * 2;
            sm90::multiply_add<T>(halves[0], weights[k], matrix(from, S::kColumnBytes, 8 * kAtom * 2));
            sm90::multiply_add<T>(
                halves[1], weights[k], matrix(from + 2 * S::kColumnBytes, S::kColumnBytes, 8 * kAtom * 2));
        }
        commit_products();
    }

    // The end of a slot: sums of all lanes' and both warpgroups' keys. After it none reads the queries any more.
    __device__ __forceinline__ void finish()
    {
        softmax.finish(scale);
        float2 const other = exchange(softmax.sum);
        softmax.sum[0] += other.x;
        softmax.sum[1] += other.y;
        meet_all();
    }
};

// What the two warpgroups do with a range.
template <typename T>
__device__ __forceinline__ void attend_latent(Work const& w, Span const& span, char* shared, LatentInputs const& inputs)
{
    LatentMainloop<T> mainloop(w, shared, inputs);
    int const range = blockIdx.x, row_block = blockIdx.y, warp = threadIdx.x / 32;
    Epilogue<T, kLatentRank> const epilogue{w, range, row_block * (kRows / 16) + warp % 4};
    int before = 0; // tiles of the range before the slot's
    for (Cursor at = span.at;; at.next_head(w.p))
    {
        int const count = min(at.tiles - at.tile, span.tiles - before);
        mainloop.begin(at);
        for (int i = 0; i < count; ++i)
        {
            mainloop.add(before + i, at.first_key() + i * kTile, at.segment);
        }
        mainloop.finish();
        if (mainloop.has_rows)
        {
            epilogue.write(at, at.tile == 0, at.tile + count == at.tiles, mainloop.rows, mainloop.softmax, mainloop.out,
                mainloop.group * mainloop.kOut);
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
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_attention_kernel(Work const w, __grid_constant__ CUtensorMap const cache)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    LatentInputs const inputs{shared_address(shared)};
    if (threadIdx.x == 0)
    {
        inputs.init();
    }
    __syncthreads();
    // In this order: what begins beside this kernel may then read segments.
    wait();
    trigger();
    Span const span(w, Segments(w.p), blockIdx.x);
    if (threadIdx.x < kConsumers)
    {
        take_registers<kMainloopRegisters>();
        if (span.tiles > 0)
        {
            attend_latent<T>(w, span, shared, inputs);
        }
    }
    else
    {
        release_registers<kLoaderRegisters>();
        if (threadIdx.x == kConsumers)
        {
            inputs.fill(w, span, cache);
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
