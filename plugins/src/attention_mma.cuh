// Attention for every GPU but Hopper, and for FP8 caches on all: matrix products of a warp (mma.sync), and copies that
// each thread asks for.
//
// FP8 caches are read and kept in shared memory as they are, and made FP16 on their way into the products: one
// instruction makes two of them, each exact. Queries and weights are then FP16 too, whatever the model's type. A word
// of four numbers holds other dimensions (of keys) and other rows (of values) than a product's operand does: see where
// each is loaded. The scales meet the logits and the output.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_softmax.cuh"
#include "attention_work.cuh"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"

#include <type_traits>

namespace dflash
{

// Warps of a block: some along the packed rows, 16 each, times the others along a tile's keys. Eight in one block an
// SM were slower than four in each of two: a block's warps wait for each other at every tile.
constexpr int kWarps = 4;
constexpr int kMostStages = 3;

// The number of blocks that registers allow.
constexpr int most_blocks_per_sm(int head_size)
{
    return head_size == 64 ? 3 : 2;
}

// Tiles of keys and values, and the box through which warps that share a tile's keys merge their results.
constexpr int shared_bytes(int head_size, int warps_m, int stages, int number_bytes)
{
    int const warps_n = kWarps / warps_m;
    int const merge = warps_n / 2 * warps_m * 32 * (head_size / 2 + 4) * static_cast<int>(sizeof(float));
    return 2 * stages * kTile * head_size * number_bytes + merge;
}

// -- instructions -----------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory; zeros where is_real is false.
__device__ __forceinline__ void copy_async(uint32_t to, void const* from, bool is_real)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
        "r"(is_real ? 16 : 0), "l"(read_once_policy())
        : "memory");
}

// The first two E4M3 numbers of x as two FP16 ones.
__device__ __forceinline__ uint32_t widened(uint32_t x)
{
    uint32_t y;
    asm("{.reg .b16 two; cvt.u16.u32 two, %1; cvt.rn.f16x2.e4m3x2 %0, two;}" : "=r"(y) : "r"(x));
    return y;
}

// Two neighbouring queries in the type that they are multiplied in.
template <typename P, typename T>
__device__ __forceinline__ uint32_t load_queries(T const* from)
{
    uint32_t const two = *reinterpret_cast<uint32_t const*>(from);
    if constexpr (std::is_same_v<P, T>)
    {
        return two;
    }
    else
    {
        auto const& x = reinterpret_cast<T const(&)[2]>(two);
        constexpr float kMost = 65504.f; // of FP16; beyond it BF16 goes on
        return packed<P>(fminf(fmaxf(to_float(x[0]), -kMost), kMost), fminf(fmaxf(to_float(x[1]), -kMost), kMost));
    }
}

// -- shape ------------------------------------------------------------------------------------------------------------

// C: the caches' numbers. kStages: tiles in shared memory, one in use, the others on their way. Each warp has a softmax
// of its own until the end of a (slot, head).
template <typename T, typename C, int D, int kWarpsAlongRows, int kStagesOfTiles>
struct Shape
{
    using Query = T;
    using Number = C;
    static constexpr bool kIsFp8 = std::is_same_v<C, E4M3>;
    using Product = std::conditional_t<kIsFp8, __half, T>; // what is multiplied
    static constexpr int kHeadSize = D;
    static constexpr int kStages = kStagesOfTiles;
    static constexpr int kWarpsM = kWarpsAlongRows;
    static constexpr int kWarpsN = kWarps / kWarpsM;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kM = 16 * kWarpsM;
    static constexpr int kKeys = kTile / kWarpsN; // a warp's share of a tile
    static constexpr int kKeySteps = kKeys / 16;
    static constexpr int kDimSteps = D / 16;
    static constexpr int kLoadSteps = kIsFp8 ? 2 : 1; // steps of 16 dimensions in what is loaded at a time
    static constexpr int kChunkNumbers = 16 / sizeof(C);
    static constexpr int kChunks = D / kChunkNumbers; // 16-byte chunks of a cache row
    static constexpr int kTileBytes = kTile * D * sizeof(C);
    static constexpr int kLaneDims = kIsFp8 ? 4 : 2; // neighbouring dimensions of one lane
};

// Chunks of a row are permuted by its number: eight rows' chunks of one column then lie in eight different banks.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk)
{
    return (row * kChunks + (chunk ^ (kChunks < 8 ? row / 2 & 3 : row & 7))) * 16;
}

// -- inputs -----------------------------------------------------------------------------------------------------------

// Tiles of keys and values on their way to shared memory, [stages, 2, kTile, D]; each thread asks for its share.
template <typename S>
struct Inputs
{
    using C = typename S::Number;

    Work const& w;
    uint32_t tiles_at;
    Cursor ahead; // of the next tile
    TilePlace place; // its, known long before it is asked for
    int left; // tiles, with it

    __device__ __forceinline__ Inputs(Work const& work, uint32_t shared_at, Span const& span)
        : w(work)
        , tiles_at(shared_at)
        , ahead(span.at)
        , place(work, span.at)
        , left(span.tiles)
    {
    }

    __device__ __forceinline__ uint32_t keys(int stage) const
    {
        return tiles_at + stage * 2 * S::kTileBytes;
    }

    // Asks for the next tile, if there is one. Rows past the length may hold anything, NaN too: in shared memory they
    // are zeros.
    __device__ __forceinline__ void fetch(int stage)
    {
        if (left > 0)
        {
            dflash_attention_params const& p = w.p;
            int64_t const offset
                = place.page * p.cache_slot_stride + ahead.head * p.cache_head_stride + place.row * S::kHeadSize;
            C const* keys_from = static_cast<C const*>(p.keys) + offset;
            C const* values_from = static_cast<C const*>(p.values) + offset;
            uint32_t const to = keys(stage);
            int const real = ahead.segment.length - ahead.first_key(); // rows
#pragma unroll
            for (int i = 0; i < kTile * S::kChunks / S::kThreads; ++i)
            {
                int const index = threadIdx.x + i * S::kThreads;
                int const row = index / S::kChunks;
                int const chunk = index % S::kChunks;
                bool const is_real = row < real;
                int const from = is_real ? row * S::kHeadSize + chunk * S::kChunkNumbers : 0;
                copy_async(to + swizzled<S::kChunks>(row, chunk), keys_from + from, is_real);
                copy_async(to + S::kTileBytes + swizzled<S::kChunks>(row, chunk), values_from + from, is_real);
            }
            if (--left > 0)
            {
                ahead.advance(p);
                place = TilePlace(w, ahead);
            }
        }
        commit_copies();
    }
};

// -- main loop --------------------------------------------------------------------------------------------------------

// Attention of a warp's 16 packed rows over its share of each tile's keys.
template <typename S>
struct Mainloop
{
    using P = typename S::Product;

    Work const& w;
    Rows rows;
    Paths paths; // of a (slot, head)'s segment
    float scale; // of the logits, base 2
    uint32_t q[S::kDimSteps][4];
    float out[2 * S::kDimSteps][4]; // unnormalized
    OnlineSoftmax<Exp2> softmax;

    __device__ __forceinline__ Mainloop(Work const& work, int first_row)
        : w(work)
        , rows(work, first_row)
        , scale(work.p.scale * kLog2E)
    {
        if constexpr (S::kIsFp8)
        {
            scale *= __ldg(work.p.key_scale);
        }
    }

    // The first of the warp's keys in a tile.
    static __device__ __forceinline__ int first_key()
    {
        int const warp = threadIdx.x / 32;
        return warp / S::kWarpsM * S::kKeys;
    }

    // Loads the queries of a (slot, head), of whose keys none has been seen.
    __device__ __forceinline__ void begin(Cursor const& at)
    {
        using T = typename S::Query;
        dflash_attention_params const& p = w.p;
        int const lane = threadIdx.x % 32;
        softmax.begin();
        paths.load(w.p, at.segment, rows.query);
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            bool const is_real = rows.packed[r] < w.packed_rows && rows.query[r] < at.segment.rows;
            int const head = at.head * w.group + (is_real ? head_of(w, rows.packed[r]) : 0);
            T const* from = static_cast<T const*>(p.q) + at.first_query(p) + rows.query[r] * p.q_row_stride
                + head * p.q_head_stride + lane % 4 * S::kLaneDims;
#pragma unroll
            for (int k = 0; k < S::kDimSteps; ++k)
            {
                q[k][r] = is_real ? load_queries<P>(from + k * 16) : 0;
                q[k][r + 2] = is_real ? load_queries<P>(from + k * 16 + (S::kIsFp8 ? 2 : 8)) : 0;
            }
        }
#pragma unroll
        for (auto& fragment : out)
        {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
    }

    // Takes in the tile at the cursor, whose values follow its keys.
    __device__ __forceinline__ void add(Cursor const& at, uint32_t keys_at)
    {
        float logits[2 * S::kKeySteps][4] = {};
        multiply_keys(logits, keys_at);
        Mask{w.p, at.segment}.apply(logits, rows.query, paths, at.first_key(), first_key());
        softmax.advance(logits, scale, out);
#pragma unroll
        for (int n = 0; n < S::kKeySteps; ++n)
        {
            uint32_t weights[4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                float (&x)[4] = logits[2 * n + half];
                softmax.weigh(x, scale);
                weights[2 * half] = packed<P>(x[0], x[1]);
                weights[2 * half + 1] = packed<P>(x[2], x[3]);
            }
            multiply_values(weights, keys_at + S::kTileBytes, n * 16);
        }
    }

    // logits [16, keys] += q k^T
    __device__ __forceinline__ void multiply_keys(float (&logits)[2 * S::kKeySteps][4], uint32_t keys_at) const
    {
        int const lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < S::kDimSteps; k += S::kLoadSteps)
        {
#pragma unroll
            for (int n = 0; n < S::kKeySteps; ++n)
            {
                uint32_t b[4];
                int const row = first_key() + n * 16 + lane % 8 + lane / 16 * 8;
                load_matrices(b, keys_at + swizzled<S::kChunks>(row, k * 2 / S::kLoadSteps + lane / 8 % 2));
                if constexpr (S::kIsFp8)
                {
                    // A lane has four neighbouring dimensions of a key, and has of its queries the same four.
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                    {
                        multiply_add<P>(logits[2 * n], q[k + i], widened(b[i]), widened(b[i] >> 16));
                        multiply_add<P>(logits[2 * n + 1], q[k + i], widened(b[2 + i]), widened(b[2 + i] >> 16));
                    }
                }
                else
                {
                    multiply_add<P>(logits[2 * n], q[k], b[0], b[1]);
                    multiply_add<P>(logits[2 * n + 1], q[k], b[2], b[3]);
                }
            }
        }
    }

    // out [16, D] += weights v, for 16 of the warp's keys of a tile
    __device__ __forceinline__ void multiply_values(uint32_t const (&weights)[4], uint32_t values_at, int first)
    {
        int const lane = threadIdx.x % 32;
        int const row = first_key() + first + lane % 16;
#pragma unroll
        for (int d = 0; d < S::kDimSteps; d += S::kLoadSteps)
        {
            uint32_t b[4];
            load_matrices_transposed(b, values_at + swizzled<S::kChunks>(row, d * 2 / S::kLoadSteps + lane / 16));
            if constexpr (S::kIsFp8)
            {
                // A lane has two neighbouring dimensions of two keys. One product takes the even dimensions, the next
                // the odd ones.
#pragma unroll
                for (int i = 0; i < 2; ++i)
                {
                    uint32_t const low = __byte_perm(b[2 * i], 0, 0x3120); // both keys' even one, then the odd
                    uint32_t const high = __byte_perm(b[2 * i + 1], 0, 0x3120);
                    multiply_add<P>(out[2 * (d + i)], weights, widened(low), widened(high));
                    multiply_add<P>(out[2 * (d + i) + 1], weights, widened(low >> 16), widened(high >> 16));
                }
            }
            else
            {
                multiply_add<P>(out[2 * d], weights, b[0], b[1]);
                multiply_add<P>(out[2 * d + 1], weights, b[2], b[3]);
            }
        }
    }
};

// -- merge ------------------------------------------------------------------------------------------------------------

// Joins what warps have of the same rows and other keys, half of them giving theirs to the other half until the first
// has all. boxes [warps_n / 2, warps_m, 4 + D / 2, 32]: maxima, sums and outputs. By all threads of the block.
template <typename S>
__device__ __forceinline__ void merge_warps(
    float* boxes, int warp_m, int warp_n, OnlineSoftmax<Exp2>& softmax, float (&out)[2 * S::kDimSteps][4])
{
    constexpr int kNumbers = S::kHeadSize / 2; // of a lane's output
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int half = S::kWarpsN / 2; half > 0; half /= 2)
    {
        float* box = boxes + (warp_n % half * S::kWarpsM + warp_m) * 32 * (kNumbers + 4) + lane;
        if (warp_n >= half && warp_n < 2 * half)
        {
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                box[r * 32] = softmax.maximum[r];
                box[(2 + r) * 32] = softmax.sum[r];
            }
#pragma unroll
            for (int i = 0; i < kNumbers; ++i)
            {
                box[(4 + i) * 32] = out[i / 4][i % 4];
            }
        }
        __syncthreads();
        if (warp_n < half)
        {
            float const maxima[2] = {box[0], box[32]};
            float const sums[2] = {box[64], box[96]};
            float mine[2];
            float theirs[2];
            softmax.merge(maxima, sums, mine, theirs);
#pragma unroll
            for (int i = 0; i < kNumbers; ++i)
            {
                float& x = out[i / 4][i % 4];
                x = x * mine[i % 4 / 2] + box[(4 + i) * 32] * theirs[i % 4 / 2];
            }
        }
        __syncthreads();
    }
}

// The products with FP8 values leave a lane four neighbouring dimensions of sixteen: the even ones in one fragment, the
// odd ones in the next. Here they are scaled, and come to the lanes that have them in other outputs: two neighbours of
// the first eight, and two of the last.
template <int kFragments>
__device__ __forceinline__ void in_order(float (&out)[kFragments][4], float scale)
{
    int const lane = threadIdx.x % 32;
    int const part = lane % 4;
#pragma unroll
    for (int i = 0; i < kFragments; i += 2)
    {
        float (&even)[4] = out[i];
        float (&odd)[4] = out[i + 1];
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            int const from = lane - part + half * 2 + part / 2;
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                // A lane's first two dimensions are its c = 0 of both fragments, its last two its c = 1.
                float const first = __shfl_sync(0xffffffffu, c % 2 ? odd[c - 1] : even[c], from);
                float const last = __shfl_sync(0xffffffffu, c % 2 ? odd[c] : even[c + 1], from);
                x[half][c] = (part % 2 ? last : first) * scale;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
        {
            even[c] = x[0][c];
            odd[c] = x[1][c];
        }
    }
}

// -- one range --------------------------------------------------------------------------------------------------------

template <typename T, typename C, int D, int kWarpsM, int kStages>
__global__ void __launch_bounds__(32 * kWarps, most_blocks_per_sm(D)) attend_kernel(Work const w)
{
    using S = Shape<T, C, D, kWarpsM, kStages>;
    // In this order: what begins beside this kernel may then read segments.
    wait();
    trigger();

    extern __shared__ __align__(128) char shared[];
    int const warp = threadIdx.x / 32;
    int const warp_m = warp % kWarpsM;
    int const warp_n = warp / kWarpsM;
    int const range = blockIdx.x / w.row_blocks;
    int const row_block = blockIdx.x % w.row_blocks;
    Span const span(w, Segments(w.p), range);
    bool const announces = row_block == 0 && threadIdx.x == 0;
    if (span.tiles == 0)
    {
        if (announces)
        {
            announce(w, span, range);
        }
        return;
    }
    Inputs<S> inputs(w, shared_address(shared), span);
    Mainloop<S> mainloop(w, row_block * S::kM + warp_m * 16);
    Epilogue<T, D> const epilogue{w, range, row_block * kWarpsM + warp_m};

    Cursor at = span.at;
    int first_tile = at.tile;
    mainloop.begin(at); // before the first tiles are asked for: queries would arrive after all of them
#pragma unroll
    for (int stage = 0; stage + 1 < kStages; ++stage)
    {
        inputs.fetch(stage);
    }
    if (announces) // while the first tiles are on their way
    {
        announce(w, span, range);
    }
    for (int nth = 0, stage = 0; nth < span.tiles; ++nth, stage = stage + 1 == kStages ? 0 : stage + 1)
    {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        inputs.fetch(stage == 0 ? kStages - 1 : stage - 1); // where the tile before this one was
        mainloop.add(at, inputs.keys(stage));

        bool const is_last_tile = at.tile + 1 == at.tiles;
        if (!is_last_tile && nth + 1 < span.tiles)
        {
            at.advance(w.p);
            continue;
        }
        // The end of a (slot, head), or of the range.
        mainloop.softmax.finish(mainloop.scale);
        if constexpr (S::kWarpsN > 1)
        {
            auto* boxes = reinterpret_cast<float*>(shared + 2 * kStages * S::kTileBytes);
            merge_warps<S>(boxes, warp_m, warp_n, mainloop.softmax, mainloop.out);
        }
        if (warp_n == 0)
        {
            if constexpr (S::kIsFp8)
            {
                in_order(mainloop.out, __ldg(w.p.value_scale));
            }
            epilogue.write(at, first_tile == 0, is_last_tile, mainloop.rows, mainloop.softmax, mainloop.out, 0);
        }
        if (nth + 1 < span.tiles)
        {
            at.advance(w.p);
            first_tile = at.tile;
            mainloop.begin(at);
        }
    }
}

} // namespace dflash
