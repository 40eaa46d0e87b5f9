// Latent attention, absorbed, for Hopper: a cache row of 576 numbers is the key of all heads, its first 512 the value.
//
// One block an SM, of 64 packed rows. One warp asks for tiles of 32 cache rows, each read once for keys and values
// alike; of each, two warpgroups compute. A warpgroup has half of the columns: of the products with keys it sums those,
// of the output it holds those. Both give each other their parts of the logits, 16 keys to each, of which it makes the
// weights; then they give each other the weights. What two threads exchange is always the same two threads'. A tile's
// products with keys run beside the softmax of the tile before it.
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

constexpr int kLatentTile = 32; // keys; two of them are a unit of work

// What lies in shared memory. A column is 64 numbers, 128 bytes, of all rows of a tile or of the queries.
struct LatentShared
{
    static constexpr int kColumnBytes = kLatentTile * kAtom * 2; // of a tile
    static constexpr int kQueryColumnBytes = kRows * kAtom * 2;
    static constexpr int kColumns = kLatentRow / kAtom;
    static constexpr int kTileBytes = kColumns * kColumnBytes;
    static constexpr int kStages = 4;
    static constexpr int kQueriesAt = kStages * kTileBytes;
    static constexpr int kQueryBytes = kLatentRank / kAtom * kQueryColumnBytes; // the other column is in registers
    // What a thread gets from the other warpgroup's: parts of logits, then, in the other direction, weights.
    static constexpr int kBoxesAt = kQueriesAt + kQueryBytes;
    static constexpr int kBoxBytes = 128 * 32;
    static constexpr int kRowsAt = kBoxesAt + 2 * kBoxBytes; // numbers of two rows a thread
    static constexpr int kBarriersAt = kRowsAt + kConsumers * 8;
    static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;

    // Where a 16-byte chunk of a row lies: columns of so many bytes together, swizzled.
    static __device__ __forceinline__ int chunk_at(int row, int chunk, int column_bytes)
    {
        return chunk / 8 * column_bytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp and the one with the same rows in the other warpgroup.
__device__ __forceinline__ void meet_pair()
{
    asm volatile("bar.sync %0, 64;" ::"r"(4 + static_cast<int>(threadIdx.x) / 32 % 4) : "memory");
}

// Tiles of a unit: of a segment's last one there may be none of the second's keys.
__device__ __forceinline__ int latent_tiles_of(int first_key, Segment const& segment)
{
    return first_key + kLatentTile < segment.length ? 2 : 1;
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
        int nth = 0;
        for (int unit = span.first; unit < span.past; ++unit)
        {
            TilePlace place(w, ahead);
            for (int tile = 0; tile < latent_tiles_of(ahead.first_key(), ahead.segment); ++tile, ++nth)
            {
                int const stage = nth % S::kStages;
                wait_for_phase(empty(stage), 1 ^ nth / S::kStages % 2);
                expect_bytes(full(stage), S::kTileBytes);
                copy_tile(rows(stage), cache, place, ahead.head, full(stage));
                place.row += kLatentTile;
            }
            if (unit + 1 < span.past)
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

    Work const& w;
    char* shared;
    LatentInputs inputs;
    int group;
    Rows rows;
    bool has_rows; // the warp
    float scale; // of the logits, base 2
    uint32_t rotated[2][4]; // of the queries' last column
    float parts[4][4]; // of a tile's logits: this warpgroup's columns'
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
        constexpr int kTogether = 4; // of a thread: no wait in between
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
                *reinterpret_cast<int4*>(shared + S::kQueriesAt
                    + S::chunk_at(chunk / kChunks, chunk % kChunks, S::kQueryColumnBytes)) = x[i];
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

    // Takes in the tile from first_key on, the nth of the range, whose products with keys have begun; begins those of
    // the next one of the same slot.
    template <bool kIsLast>
    __device__ __forceinline__ void add(int nth, int first_key, Segment const& segment)
    {
        int const stage = nth % S::kStages;
        float logits[2][4];
        give_parts(logits);
        if constexpr (!kIsLast)
        {
            multiply_keys(nth + 1);
        }
        take_parts(logits);
        if (first_key + kLatentTile > segment.length)
        {
            clear_values(stage, segment.length - first_key);
        }
        Mask{w.p, segment}.apply(logits, rows.query, Paths{}, first_key, 16 * group);
        float decay[2];
        raise(logits, decay);
        uint32_t weights[4];
        weigh(logits, weights);
        scale_rows(out, decay);
        begin_products();
        multiply_values(weights, inputs.rows(stage), group);
        uint32_t others[4];
        exchange_weights(weights, others);
        begin_products();
        multiply_values(others, inputs.rows(stage), 1 - group);
        wait_for_products(out);
        if (threadIdx.x % 32 == 0)
        {
            arrive(inputs.empty(stage));
        }
    }

    // Begins parts [64, 32] = q k^T of this warpgroup's columns, of the nth tile of the range.
    __device__ __forceinline__ void multiply_keys(int nth)
    {
        int const stage = nth % S::kStages;
        uint32_t const tile = inputs.rows(stage);
        wait_for_phase(inputs.full(stage), nth / S::kStages % 2);
#pragma unroll
        for (auto& x : parts)
        {
            x[0] = x[1] = x[2] = x[3] = 0.f;
        }
        begin_products();
#pragma unroll
        for (int k = 0; k < 4 * kHalf; ++k)
        {
            int const column = group * kHalf + k / 4;
            multiply_add_columns<T, 4>(parts,
                matrix(inputs.at + S::kQueriesAt + column * S::kQueryColumnBytes + k % 4 * 32, 16, 8 * kAtom * 2),
                matrix(tile + column * S::kColumnBytes + k % 4 * 32, 16, 8 * kAtom * 2));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
        {
            uint32_t const column = tile + 2 * kHalf * S::kColumnBytes + (2 * group + k) * 32;
            multiply_add_rows<T>(parts, rotated[k], matrix(column, 16, 8 * kAtom * 2));
        }
        commit_products();
    }

    // Gives the other warpgroup its keys' parts, once they are there, and keeps one's own.
    __device__ __forceinline__ void give_parts(float (&own)[2][4])
    {
        wait_for_products(parts);
#pragma unroll
        for (int n = 0; n < 2; ++n)
        {
            // Registers are chosen by selection: their numbers must be known when this is compiled.
            float other[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                own[n][i] = group == 0 ? parts[n][i] : parts[2 + n][i];
                other[i] = group == 0 ? parts[2 + n][i] : parts[n][i];
            }
            box(1 - group)[n * 128] = {other[0], other[1], other[2], other[3]};
        }
    }

    // Adds the other's parts, and so makes logits [64, 16] of this warpgroup's keys.
    __device__ __forceinline__ void take_parts(float (&logits)[2][4]) const
    {
        meet_pair();
#pragma unroll
        for (int n = 0; n < 2; ++n)
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

    // Raises the maxima to those of all of the tile's logits; what that leaves of the output so far.
    __device__ __forceinline__ void raise(float const (&logits)[2][4], float (&decay)[2])
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
        decay[0] = softmax.raise(0, fmaxf(top[0], other.x), scale);
        decay[1] = softmax.raise(1, fmaxf(top[1], other.y), scale);
    }

    // Makes the weights of this warpgroup's keys, an operand of products.
    __device__ __forceinline__ void weigh(float (&logits)[2][4], uint32_t (&weights)[4])
    {
#pragma unroll
        for (int n = 0; n < 2; ++n)
        {
            float (&x)[4] = logits[n];
            softmax.weigh(x, scale);
            weights[n * 2] = packed<T>(x[0], x[1]);
            weights[n * 2 + 1] = packed<T>(x[2], x[3]);
        }
    }

    // Gives the other warpgroup the weights, and takes its. They go where this thread alone has read, and the other one
    // will write next.
    __device__ __forceinline__ void exchange_weights(uint32_t const (&own)[4], uint32_t (&others)[4]) const
    {
        *reinterpret_cast<uint4*>(box(group)) = {own[0], own[1], own[2], own[3]};
        meet_pair();
        uint4 const x = *reinterpret_cast<uint4 const*>(box(1 - group));
        others[0] = x.x;
        others[1] = x.y;
        others[2] = x.z;
        others[3] = x.w;
    }

    // Values past the length may be anything, NaN too, which no weight of zero takes away: they become zeros, in this
    // warpgroup's columns, which no product of the other's reads.
    __device__ __forceinline__ void clear_values(int stage, int past)
    {
        constexpr int kChunks = kHalf * 8;
        char* const tile = shared + stage * S::kTileBytes;
        for (int i = threadIdx.x % 128; i < (kLatentTile - past) * kChunks; i += 128)
        {
            *reinterpret_cast<int4*>(
                tile + S::chunk_at(past + i / kChunks, group * kChunks + i % kChunks, S::kColumnBytes)) = {};
        }
        show_to_products();
        meet_group(group);
    }

    // Begins out [64, 256] += weights [64, 16] values [16, 256], of a warpgroup's keys.
    __device__ __forceinline__ void multiply_values(uint32_t const (&weights)[4], uint32_t tile, int of)
    {
        auto& halves = reinterpret_cast<float (&)[2][kOut / 2][4]>(out);
        uint32_t const from = tile + group * kHalf * S::kColumnBytes + of * 16 * kAtom * 2;
        sm90::multiply_add<T>(halves[0], weights, matrix(from, S::kColumnBytes, 8 * kAtom * 2));
        sm90::multiply_add<T>(halves[1], weights, matrix(from + 2 * S::kColumnBytes, S::kColumnBytes, 8 * kAtom * 2));
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
    Epilogue<T, kLatentRank> const epilogue{w, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), kRows / 16,
        static_cast<int>(threadIdx.x) / 32 % 4};
    int unit = span.first; // of the slot, the first that is in the range
    int nth = 0; // tile of the range
    for (Cursor at = span.at;; at.next_head(w.p))
    {
        int const count = min(at.tiles - at.tile, span.past - unit);
        mainloop.begin(at);
        mainloop.multiply_keys(nth);
        int key = at.first_key();
        int const last_unit = key + (count - 1) * kTile;
        int const last_key = last_unit + (latent_tiles_of(last_unit, at.segment) - 1) * kLatentTile;
        for (; key < last_key; key += kLatentTile, ++nth)
        {
            mainloop.template add<false>(nth, key, at.segment);
        }
        mainloop.template add<true>(nth++, last_key, at.segment);
        mainloop.finish();
        if (mainloop.has_rows)
        {
            epilogue.write(at, at.tile == 0, at.tile + count == at.tiles, mainloop.rows, mainloop.softmax, mainloop.out,
                mainloop.group * mainloop.kOut);
        }
        unit += count;
        if (unit == span.past)
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
    if (span.first >= span.past)
    {
        return;
    }
    if (threadIdx.x < kConsumers)
    {
        take_registers<kMainloopRegisters>();
        attend_latent<T>(w, span, shared, inputs);
    }
    else
    {
        release_registers<kLoaderRegisters>();
        if (threadIdx.x == kConsumers)
        {
            inputs.fill(w, span, cache);
        }
    }
#endif
}

} // namespace sm90
} // namespace dflash
