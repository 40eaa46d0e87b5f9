// Products of tens of rows (tokens) with large weights, on Hopper: a block's loop and what it does with the sums.
#pragma once

#include "pairs.cuh"
#include "product_order.cuh"
#include "row_factors.cuh"
#include "wgmma.cuh"
#include "wide_gemm_loading_sm90.cuh"

namespace dflash
{
namespace wide
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's sums: of each of its tiles two numbers of one row, and of the eighth row behind it.
template <typename L>
using Sums = float[L::kTiles][4];

// Where the lane's first number of a tile of 8 outputs lies among a weight's rows: with SwiGLU they come as granules
// do. Of a tile past the last, some row.
__device__ __forceinline__ int weight_row(dflash_skinny_gemm_params const& p, int output)
{
    int const own = p.swiglu ? output / 8 % 2 * (p.outputs / 2) + output / kGranule * 8 : output;
    return min(own, p.outputs - 8) + threadIdx.x % 4 * 2;
}

// Scales of blocks of 128 of a weight's rows, of a line: those of even tiles' rows and of odd ones', which with SwiGLU
// are far apart, each in two blocks at most.
template <typename L>
struct BlockScales
{
    static constexpr int kBlock = 128; // rows, and columns: a line of E4M3
    static_assert(!L::kByBlock || L::kGroupOutputs <= kBlock);

    // Those of a line.
    struct OfLine
    {
        float rows[2];
        float weight[2][2];
    };

    float const* rows[2]; // of the thread's two rows; null: there is none
    int rows_step; // from line to line
    float const* weight[2][2]; // of even and odd tiles: their first block's, and the next one's
    int in_first[2]; // tiles from the first to those of the next block, of even and odd ones

    // output: of the warpgroup's first tile. row: the thread's first one.
    __device__ __forceinline__ BlockScales(dflash_skinny_gemm_params const& p, int lines, int output, int row)
        : rows_step(p.rows)
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            rows[i] = row + 8 * i < p.rows ? p.row_factors + row + 8 * i : nullptr;
            int const first = weight_row(p, output + 8 * i) / 8 * 8, block = first / kBlock;
            int const last = (p.outputs - 1) / kBlock;
            weight[i][0] = p.scale + block * lines;
            weight[i][1] = p.scale + min(block + 1, last) * lines;
            // Without SwiGLU a tile and the next of its kind are 16 rows apart, with it 8.
            int const step = p.swiglu ? 8 : 16;
            in_first[i] = 2 * (((block + 1) * kBlock - first + step - 1) / step) + i;
        }
    }

    __device__ __forceinline__ OfLine load(int line) const
    {
        OfLine x;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            x.rows[i] = rows[i] ? __ldcg(rows[i] + line * rows_step) : 0.f;
            x.weight[i][0] = __ldg(weight[i][0] + line);
            x.weight[i][1] = __ldg(weight[i][1] + line);
        }
        return x;
    }

    // Adds a line's sums, each by its scales.
    __device__ __forceinline__ void add(
        OfLine const& x, float const (&own)[L::kTiles][4], float (&c)[L::kTiles][4]) const
    {
#pragma unroll
        for (int tile = 0; tile < L::kTiles; ++tile)
        {
            float const(&both)[2] = x.weight[tile % 2];
            float const by = tile < in_first[tile % 2] ? both[0] : both[1];
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                c[tile][j] += own[tile][j] * (by * x.rows[j / 2]);
            }
        }
    }
};

// Multiplies: a warpgroup's work.
template <typename L>
struct Mainloop
{
    using Factor = typename L::Factor;

    Shared<L> const& shared;
    Share<L> const& share;
    int const group = threadIdx.x / 128;
    Stage<L> stage;

    __device__ __forceinline__ void release(int at) const
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
        {
            arrive(shared.empty(at));
        }
    }

    // Gives one tile's sums, of the lines of this block.
    __device__ __forceinline__ void multiply(Sums<L>& c)
    {
        clear(c);
        add_lines(share.lines, c);
    }

    __device__ __forceinline__ void multiply_scaled(BlockScales<L> const& scales, Sums<L>& c)
    {
        clear(c);
        add_scaled_lines(scales, c);
    }

    __device__ __forceinline__ static void clear(Sums<L>& c)
    {
#pragma unroll
        for (auto& four : c)
        {
            four[0] = four[1] = four[2] = four[3] = 0.f;
        }
    }

    // Waits for a line, and begins to add its products.
    __device__ __forceinline__ void begin_line(Sums<L>& c) const
    {
        constexpr int kRowsAt = L::kSharesRows ? 64 * kLine : 0,
                      kOutputsAt = L::kSharesRows ? 0 : L::kGroupOutputs * kLine;
        wait_for_phase(shared.full(stage.at), stage.phase);
        uint64_t const rows = sm90::matrix(shared.inputs(stage.at) + group * kRowsAt, 16, 1024);
        uint64_t const outputs = sm90::matrix(shared.weight(stage.at) + group * kOutputsAt, 16, 1024);
        sm90::begin_products();
#pragma unroll
        for (int part = 0; part < kLine / 32; ++part)
        {
            sm90::multiply_add_columns<Factor, L::kTiles>(c, rows + 2 * part, outputs + 2 * part);
        }
        sm90::commit_products();
    }

    // Adds the products of the block's lines, each by its scales.
    __device__ __forceinline__ void add_scaled_lines(BlockScales<L> const& scales, Sums<L>& c)
    {
        int const last = share.first_line + share.lines - 1;
        auto next = scales.load(share.first_line), ahead = scales.load(min(share.first_line + 1, last));
        for (int i = 0; i < share.lines; ++i)
        {
            auto const now = next;
            next = ahead;
            ahead = scales.load(min(share.first_line + i + 2, last));
            Sums<L> own = {};
            begin_line(own);
            sm90::wait_for_products(own);
            release(stage.at);
            stage.advance();
            scales.add(now, own, c);
        }
    }

    // Adds the products of the next lines.
    __device__ __forceinline__ void add_lines(int lines, Sums<L>& c)
    {
        int before = 0;
        for (int i = 0; i < lines; ++i)
        {
            begin_line(c);
            sm90::wait_for_all_but<1>();
            if (i > 0)
            {
                release(before);
            }
            before = stage.at;
            stage.advance();
        }
        sm90::wait_for_products(c);
        release(before);
    }
};

// Adds up what a cluster's two blocks have, each a part of the outputs; and stores it.
template <typename L>
struct Epilogue
{
    using T = typename L::T;
    using Two = dflash::Two<T>;

    // Of kCount tiles, those that are stored at a time.
    template <int kCount>
    static constexpr int kTurn = kCount <= 8 ? kCount
        : kCount % 8 == 0                    ? 8
        : kCount % 6 == 0                    ? 6
                                             : 7;

    // Residuals of a turn's tiles, as they lie in memory: of a thread's two rows.
    template <int kCount>
    using Residuals = Two[2][kTurn<kCount>];

    Launch const& launch;
    Shared<L> const& shared;
    Share<L> const& share;
    dflash_skinny_gemm_params const& p = launch.p;
    int const group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const row
        = share.first_row + (L::kSharesRows ? group * 64 : 0) + warp * 16 + lane / 4; // and the eighth behind it
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    // Outputs from this one on that are stored: of a block with fewer tiles, those of its warpgroup.
    __device__ __forceinline__ int left_from(int output) const
    {
        int end = p.outputs;
        if constexpr (!L::kDividesEvenly)
        {
            int const first = output / L::kOutputs * L::kOutputs + (L::kSharesRows ? 0 : group * L::kGroupOutputs);
            end = min(end, first + L::kGroupOutputs);
        }
        return end - output;
    }

    __device__ __forceinline__ uint32_t inbox(int tile) const
    {
        return shared.inbox() + (tile * kConsumers + threadIdx.x) * 16;
    }

    // nth: of the block's tiles. scaled: gives what is rounded of two sums of the first or of the second row, by the
    // row of the weight that the first of them is of.
    template <typename Scaled, typename Begin>
    __device__ __forceinline__ void finish(
        int tile, int nth, Sums<L>& c, Scaled const& scaled, Begin const& begin_to_exchange) const
    {
        int const first_output = tile * L::kOutputs + (L::kSharesRows ? 0 : group * L::kGroupOutputs);
        if constexpr (L::kSplits == 1)
        {
            Residuals<L::kTiles> residuals;
            store(first_output, c, false, residuals, scaled);
        }
        else
        {
            int const own_output = first_output + share.rank * L::kOwnTiles * 8;
            Residuals<L::kOwnTiles> residuals; // they come while the blocks exchange their sums
            load_residuals(own_output, residuals);
            float own[L::kOwnTiles][4] = {};
            begin_to_exchange();
            exchange(c, own, nth);
            store(own_output, own, true, residuals, scaled);
        }
    }

    // nth: of the block's tiles. Of two blocks, the order of adding is all the same.
    __device__ __forceinline__ void exchange(Sums<L> const& c, float (&own)[L::kOwnTiles][4], int nth) const
    {
        uint32_t const to = address_at(inbox(0), share.rank ^ 1);
        uint32_t const barrier = address_at(shared.inbox_full(), share.rank ^ 1);
#pragma unroll
        for (int rank = 0; rank < 2; ++rank)
        {
            if (rank != share.rank)
            {
#pragma unroll
                for (int i = 0; i < L::kOwnTiles && rank * L::kOwnTiles + i < L::kTiles; ++i)
                {
                    send(to + i * kConsumers * 16, c[rank * L::kOwnTiles + i], barrier);
                }
            }
            else
            {
#pragma unroll
                for (int i = 0; i < L::kOwnTiles && rank * L::kOwnTiles + i < L::kTiles; ++i)
                {
                    float const(&x)[4] = c[rank * L::kOwnTiles + i];
                    own[i][0] = x[0], own[i][1] = x[1], own[i][2] = x[2], own[i][3] = x[3];
                }
            }
        }
        wait_for_phase(shared.inbox_full(), nth % 2);
#pragma unroll
        for (int i = 0; i < L::kOwnTiles; ++i)
        {
            float there[4];
            load_inbox(i, there);
            own[i][0] += there[0], own[i][1] += there[1], own[i][2] += there[2], own[i][3] += there[3];
        }
    }

    // What the other block has sent of a tile.
    __device__ __forceinline__ void load_inbox(int tile, float (&there)[4]) const
    {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
            : "=f"(there[0]), "=f"(there[1]), "=f"(there[2]), "=f"(there[3])
            : "r"(inbox(tile)));
    }

    // Stores tiles from an output on, some in a turn and a row after the other, the next sums moved to where the code
    // looks for them: code is read from far away in every step, and of all sums one after the other it would be 80 KB.
    // has_residuals: those of the first turn.
    template <int kCount, typename Scaled>
    __device__ __forceinline__ void store(
        int output, float (&c)[kCount][4], bool has_residuals, Residuals<kCount>& residuals, Scaled const& scaled) const
    {
        constexpr int kNow = kTurn<kCount>;
        static_assert(kCount % kNow == 0);
        if (row >= p.rows)
        {
            return;
        }
#pragma unroll 1
        for (int left = kCount; left > 0; left -= kNow)
        {
            if (!has_residuals || left < kCount)
            {
                load_residuals(output, residuals);
            }
#pragma unroll 1
            for (int below = 0; below < 2; ++below)
            {
                if (row + 8 * below < p.rows)
                {
                    Two y[kNow];
#pragma unroll
                    for (int i = 0; i < kNow; ++i)
                    {
                        float2 const two = scaled(float2{c[i][0], c[i][1]}, below, weight_row(p, output + i * 8));
                        y[i] = pair_of<T>(two.x, two.y);
                    }
                    store_row(row + 8 * below, output, residuals[0], y);
                }
#pragma unroll
                for (int i = 0; i < kNow; ++i)
                {
                    c[i][0] = c[i][2], c[i][1] = c[i][3];
                    residuals[0][i] = residuals[1][i];
                }
            }
            move_sums<kNow>(c);
            output += kNow * 8;
        }
    }

    // Asks for a turn's residuals, all before the first is needed. Zeros where there are none: else registers would be
    // held for them all the time.
    template <int kNow>
    __device__ __forceinline__ void load_residuals(int output, Two (&residuals)[2][kNow]) const
    {
#pragma unroll
        for (int i = 0; i < 2 * kNow; ++i)
        {
            residuals[i / kNow][i % kNow] = Two{};
        }
        if (p.residual)
        {
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                if (row + 8 * below < p.rows)
                {
                    int64_t const at = int64_t{row + 8 * below} * width + output + lane % 4 * 2;
                    load(p.residual, at, left_from(output), residuals[below]);
                }
            }
        }
    }

    // Rounds as composed operations do: the product, then with a bias, then with a residual.
    template <int kNow>
    __device__ __forceinline__ void store_row(
        int at_row, int output, Two const (&residuals)[kNow], Two (&y)[kNow]) const
    {
        if (p.swiglu)
        {
            if constexpr (kNow % 2 == 0)
            {
                store_gated(at_row, output, y);
            }
            return;
        }
        int const column = output + lane % 4 * 2, left = left_from(output);
        if (p.bias)
        {
            Two bias[kNow] = {};
            load(p.bias, column, left, bias);
            add_pairs<T>(bias, y);
        }
        if (p.residual)
        {
            add_pairs<T>(residuals, y);
        }
        Two* const to = reinterpret_cast<Two*>(static_cast<T*>(p.out) + int64_t{at_row} * width + column);
#pragma unroll
        for (int i = 0; i < kNow; ++i)
        {
            if (i * 8 < left)
            {
                to[i * 4] = y[i];
            }
        }
    }

    // granule_row: of a weight, with eight rows of the gate and the eight of up that belong to them in turn.
    template <int kNow>
    __device__ __forceinline__ void store_gated(int at_row, int granule_row, Two (&y)[kNow]) const
    {
        int const output = granule_row / 2 + lane % 4 * 2, left = p.outputs - granule_row;
        Two gates[kNow / 2], ups[kNow / 2];
#pragma unroll
        for (int i = 0; i < kNow / 2; ++i)
        {
            gates[i] = y[2 * i], ups[i] = y[2 * i + 1];
        }
        if (p.bias)
        {
            Two gate_bias[kNow / 2] = {}, up_bias[kNow / 2] = {};
            load(p.bias, output, left / 2, gate_bias);
            load(p.bias, p.outputs / 2 + output, left / 2, up_bias);
            add_pairs<T>(gate_bias, gates);
            add_pairs<T>(up_bias, ups);
        }
        gate_pairs<T>(p.gelu, gates, ups);
        Two* const to = reinterpret_cast<Two*>(static_cast<T*>(p.out) + int64_t{at_row} * width + output);
#pragma unroll
        for (int i = 0; i < kNow / 2; ++i)
        {
            if (i * kGranule < left)
            {
                to[i * 4] = gates[i];
            }
        }
    }

    // Two numbers of each eight, of as many eights as there are outputs left. From the L2 cache: the kernel before may
    // have made them.
    template <int N>
    __device__ __forceinline__ static void load(void const* from, int64_t at, int left, Two (&x)[N])
    {
        uint32_t const* words = reinterpret_cast<uint32_t const*>(static_cast<T const*>(from) + at);
        asm("" : "+l"(words)); // or else each number's address is made up on its own
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            if (i * 8 < left)
            {
                uint32_t const word = __ldcg(words + i * 4);
                x[i] = reinterpret_cast<Two const&>(word);
            }
        }
    }
};

// What all sums are multiplied by: of E4M3 numbers with a scale a row, that and the weight's.
template <typename L, bool kIsByRow = std::is_same_v<typename L::Factor, E4M3> && !L::kByBlock>
struct Scales
{
    __device__ __forceinline__ explicit Scales(Epilogue<L> const&)
    {
    }

    __device__ __forceinline__ float2 operator()(float2 const& sums, bool, int) const
    {
        return sums;
    }
};

template <typename L>
struct Scales<L, true>
{
    float const* const of_weight;
    RowFactors const factors;

    __device__ __forceinline__ explicit Scales(Epilogue<L> const& epilogue)
        : of_weight(epilogue.p.scale)
        , factors(epilogue.p, epilogue.row)
    {
    }

    __device__ __forceinline__ float2 operator()(float2 const& sums, bool below, int weight_row) const
    {
        float2 const scale = __ldg(reinterpret_cast<float2 const*>(of_weight + weight_row));
        float const factor = factors.of(below);
        return {sums.x * (factor * scale.x), sums.y * (factor * scale.y)};
    }
};

// Waits for the kernels before this one, and until the other blocks of the cluster can be sent to.
template <typename L>
__device__ __forceinline__ void begin_to_send()
{
    wait();
    if (L::kSplits > 1)
    {
        __syncwarp();
        wait_for_cluster();
    }
}

#endif

template <typename L>
__global__ void __cluster_dims__(L::kSplits, 1, 1) __launch_bounds__(kThreads, 1)
    wide_gemm_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared<L> const shared{{shared_address(memory)}};
    bool const computes = threadIdx.x < kConsumers;
    if (threadIdx.x == kConsumers)
    {
        shared.init();
    }
    if (L::kSplits > 1)
    {
        __syncwarp();
        arrive_at_cluster();
    }
    __syncthreads();
    Share<L> const share(launch);
    if (threadIdx.x == kConsumers)
    {
        Loader<L>{launch, shared, share, {share}}.load();
    }
    if (threadIdx.x == kConsumers + 32)
    {
        Loader<L>{launch, shared, share, {share}}.load_first_inputs();
    }
    begin_to_send<L>();
    if (!computes)
    {
        return;
    }
    Mainloop<L> mainloop{shared, share};
    Epilogue<L> const epilogue{launch, shared, share};
    Scales<L> const scales{epilogue};
    for (int tile = share.first_tile; tile < launch.tiles; tile += share.tile_step)
    {
        Sums<L> c;
        if constexpr (L::kByBlock)
        {
            int const output = tile * L::kOutputs + (L::kSharesRows ? 0 : mainloop.group * L::kGroupOutputs);
            mainloop.multiply_scaled({launch.p, launch.lines, output, epilogue.row}, c);
        }
        else
        {
            mainloop.multiply(c);
        }
        epilogue.finish(tile, 0, c, scales, [] {});
    }
#endif
}

} // namespace wide
} // namespace dflash
