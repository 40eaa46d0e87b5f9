// Products of hundreds of rows (tokens) with large weights, on Hopper: bound by tensor cores and the L2 cache.
//
// Two blocks of a cluster take 128 rows each and the same outputs: each brings half of a weight's lines, for both. A
// row's sums go in the order of `product_order.cuh`.
#pragma once

#include "parked_sums.cuh"
#include "product_order.cuh"
#include "row_factors.cuh"
#include "wide_gemm_sm90.cuh"

namespace dflash
{
namespace tall
{

using wide::kConsumers;
using wide::kLimit;
using wide::kLine;

constexpr int kBlocks = 2; // of a cluster
constexpr int kRows = 128; // of a block, 64 of a warpgroup
constexpr int kMostStages = 8;
constexpr int kLoaderRegisters = 40;
constexpr int kMainloopRegisters = 232;
constexpr int kThreads = kConsumers + 128; // a warpgroup loads: it gives registers to those that multiply

// A block's tile: kRows tokens times kOutputs rows of a weight, whose chains are in two halves or not.
template <typename InputType, int kTileOutputs, bool kInHalves>
struct Layout
{
    using T = InputType;
    static constexpr int kOutputs = kTileOutputs;
    static constexpr int kTiles = kOutputs / 8; // of 8 outputs
    static constexpr bool kHasHalves = kInHalves;
    static constexpr bool kParks = kHasHalves && kTiles > 16; // sums of the first half, while it adds up the other
    static constexpr int kWeightBytes = kOutputs * kLine;
    static constexpr int kShareBytes = kWeightBytes / kBlocks; // that one block brings
    static constexpr int kStageBytes = kWeightBytes + kRows * kLine;
    static constexpr int kBarrierBytes = 2 * kMostStages * 8;
    static constexpr int kStages = std::min((kLimit - kBarrierBytes) / kStageBytes, kMostStages);
    static constexpr int kBytes = kStages * kStageBytes + kBarrierBytes;
    static_assert(kTiles % 4 == 0 && kShareBytes % 1024 == 0);
};

// The kernel's arguments.
struct Launch
{
    dflash_skinny_gemm_params p;
    CUtensorMap weight; // as of `wide::Launch`, in boxes of a block's share
    CUtensorMap inputs; // bytes of a row, rows
    int lines; // of 128 bytes in a row
    int pairs; // of 128 rows
    int tiles; // times pairs
    void* parking; // see `Parking`
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename L>
struct Shared : wide::Ring<L, kMostStages, 0>
{
    // By one thread. A stage is empty when the warps of both blocks are done with it: each block fills both.
    __device__ __forceinline__ void init() const
    {
        this->init_barriers(kBlocks * kConsumers / 32);
        fence_barrier_inits();
    }
};

// A cluster's share: every so manieth tile, those of the same outputs one behind the other.
struct Share
{
    int const rank = static_cast<int>(__clusterRelativeBlockRank());
    int const first_tile = blockIdx.x / kBlocks, tile_step = gridDim.x / kBlocks;
};

// Has the stages brought: one thread's work.
template <typename L>
struct Loader
{
    Launch const& launch;
    Shared<L> const& shared;
    Share const& share;
    Chains const chains{launch.lines, L::kHasHalves ? 2 : 1};
    int tile = share.first_tile; // the next one
    ChainLine line{0, chains.used()};
    wide::Stage<L> stage;

    __device__ __forceinline__ bool are_left() const
    {
        return tile < launch.tiles;
    }

    __device__ __forceinline__ void advance()
    {
        stage.advance();
        if (line.advance(chains))
        {
            tile += share.tile_step;
        }
    }

    // The first byte of a row that comes next.
    __device__ __forceinline__ int column() const
    {
        return chains.line(line.chain, line.nth) * kLine;
    }

    __device__ __forceinline__ void load_weight() const
    {
        constexpr int kGranules = L::kOutputs / wide::kGranule, kOwn = kGranules / kBlocks;
        expect_bytes(shared.full(stage.at), L::kStageBytes);
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared.weight(stage.at) + share.rank * L::kShareBytes),
            "l"(&launch.weight), "r"(column()), "r"(0), "r"(tile / launch.pairs * kGranules + share.rank * kOwn),
            "r"(shared.full(stage.at)), "h"(static_cast<uint16_t>((1 << kBlocks) - 1))
            : "memory");
    }

    __device__ __forceinline__ void load_inputs() const
    {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared.inputs(stage.at)),
            "l"(&launch.inputs), "r"(column()), "r"((tile % launch.pairs * kBlocks + share.rank) * kRows),
            "r"(shared.full(stage.at))
            : "memory");
    }

    // Weights of the first stages come before the kernel waits for the one before it: that one makes the inputs.
    __device__ __forceinline__ void load()
    {
        Loader inputs = *this;
        int ahead = 0;
        for (; ahead < L::kStages && are_left(); ++ahead)
        {
            load_weight();
            advance();
        }
        wait();
        for (; ahead > 0; --ahead)
        {
            inputs.load_inputs();
            inputs.advance();
        }
        for (; are_left(); advance())
        {
            wait_for_phase(shared.empty(stage.at), stage.phase ^ 1);
            load_weight();
            load_inputs();
        }
    }
};

// A thread's sums: of each of its tiles two numbers of one row, and of the eighth row behind it.
template <typename L>
using Sums = float[L::kTiles][4];

// Multiplies: a warpgroup's work.
template <typename L>
struct Mainloop
{
    Launch const& launch;
    Shared<L> const& shared;
    Share const& share;
    int const group = threadIdx.x / 128;
    wide::Stage<L> stage;

    __device__ __forceinline__ void release(int at) const
    {
        __syncwarp();
        if (threadIdx.x % 32 < kBlocks)
        {
            wide::arrive_there(shared.empty(at), threadIdx.x % 32);
        }
    }

    // Gives one tile's sums.
    __device__ __forceinline__ void multiply(Sums<L>& sums)
    {
        Chains const chains(launch.lines, L::kHasHalves ? 2 : 1);
        auto const next = [&](int lines, Sums<L>& c) { add_lines(lines, c); };
        add_chains(chains, 0, min(kBlockChains, chains.used()), next, sums);
        if constexpr (L::kParks)
        {
            Parking<kConsumers> const parking(launch.parking, L::kTiles);
            parking.put(sums);
            add_chains(chains, kBlockChains, chains.used(), next, sums);
            parking.add_to(sums);
        }
        else if constexpr (L::kHasHalves)
        {
            Sums<L> others;
            add_chains(chains, kBlockChains, chains.used(), next, others);
            add_sums(others, sums);
        }
    }

    // Gives the sums of the next lines.
    __device__ __forceinline__ void add_lines(int lines, Sums<L>& c)
    {
        int before = 0;
        for (int i = 0; i < lines; ++i)
        {
            wait_for_phase(shared.full(stage.at), stage.phase);
            uint64_t const rows = sm90::matrix(shared.inputs(stage.at) + group * 64 * kLine, 16, 1024);
            uint64_t const outputs = sm90::matrix(shared.weight(stage.at), 16, 1024);
            sm90::begin_products();
#pragma unroll
            for (int step = 0; step < kLine / 32; ++step) // 16 columns
            {
                sm90::multiply_add_columns<typename L::T, L::kTiles>(c, rows + 2 * step, outputs + 2 * step);
            }
            sm90::commit_products();
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

// Stores a tile: four lanes have eight outputs of a row, and exchange them, so that each has those of one of four
// tiles.
template <typename L>
struct Epilogue
{
    using T = typename L::T;
    static constexpr int kEight = 8;
    using Row = Vector<T, kEight>;

    dflash_skinny_gemm_params const& p;
    int const lane = threadIdx.x % 32;
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    // row: of those of the tile that this thread has of each eight.
    __device__ __forceinline__ void store(int row, int first_output, Sums<L> const& c) const
    {
        if (p.swiglu)
        {
            if constexpr (L::kTiles % 8 == 0)
            {
                store_gated(row, 0, first_output, c);
                store_gated(row + 8, 2, first_output, c);
            }
            return;
        }
        store_row(row, 0, first_output, c);
        store_row(row + 8, 2, first_output, c);
    }

    // Rounds as composed operations do: the product, then with a bias, then with a residual. All lanes.
    __device__ __forceinline__ void store_row(int row, int at, int first_output, Sums<L> const& c) const
    {
        constexpr int kFours = L::kTiles / 4;
        constexpr int kTogether = kFours % 3 == 0 ? 3 : kFours == 4 ? 4 : 2; // whose residuals come at once
        int64_t const begin = int64_t{row} * width;
#pragma unroll
        for (int i = 0; i < kFours; i += kTogether)
        {
            Row residuals[kTogether];
#pragma unroll
            for (int k = 0; k < kTogether; ++k)
            {
                int const output = first_output + ((i + k) * 4 + lane % 4) * kEight;
                if (p.residual && row < p.rows && output < p.outputs)
                {
                    residuals[k] = load(p.residual, begin + output);
                }
            }
#pragma unroll
            for (int k = 0; k < kTogether; ++k)
            {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    float const(&x)[4] = c[(i + k) * 4 + j];
                    words[j] = packed<T>(x[at], x[at + 1]);
                }
                exchange(words);
                int const output = first_output + ((i + k) * 4 + lane % 4) * kEight;
                if (row < p.rows && output < p.outputs)
                {
                    Row y = reinterpret_cast<Row const&>(words);
                    if (p.bias)
                    {
                        add(load(p.bias, output), y);
                    }
                    if (p.residual)
                    {
                        add(residuals[k], y);
                    }
                    store_vector(static_cast<T*>(p.out) + begin + output, y);
                }
            }
        }
    }

    __device__ __forceinline__ void store_gated(int row, int at, int first_output, Sums<L> const& c) const
    {
#pragma unroll
        for (int i = 0; i < L::kTiles / 8; ++i)
        {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                float const(&gates)[4] = c[i * 8 + 2 * j];
                float const(&ups)[4] = c[i * 8 + 2 * j + 1];
                words[j] = gated(first_output + (i * 4 + j) * wide::kGranule, &gates[at], &ups[at]);
            }
            exchange(words);
            int const granule_row = first_output + (i * 4 + lane % 4) * wide::kGranule;
            if (row < p.rows && granule_row < p.outputs)
            {
                store_vector(static_cast<T*>(p.out) + int64_t{row} * width + granule_row / 2,
                    reinterpret_cast<Row const&>(words));
            }
        }
    }

    // Two outputs of a lane.
    __device__ __forceinline__ uint32_t gated(int granule_row, float const* gates, float const* ups) const
    {
        int const output = granule_row / 2 + lane % 4 * 2;
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float gate = rounded<T>(gates[i]), up = rounded<T>(ups[i]);
            if (p.bias && granule_row < p.outputs)
            {
                T const* const bias = static_cast<T const*>(p.bias) + output + i;
                gate = rounded<T>(gate + to_float(bias[0]));
                up = rounded<T>(up + to_float(bias[p.outputs / 2]));
            }
            y[i] = rounded<T>(p.gelu ? gelu(gate) : silu(gate)) * up;
        }
        return packed<T>(y[0], y[1]);
    }

    // From the L2 cache: the kernel before may have made it.
    __device__ __forceinline__ static Row load(void const* from, int64_t at)
    {
        int4 const x = __ldcg(reinterpret_cast<int4 const*>(static_cast<T const*>(from) + at));
        return reinterpret_cast<Row const&>(x);
    }

    __device__ __forceinline__ static void add(Row const& x, Row& y)
    {
#pragma unroll
        for (int i = 0; i < kEight; ++i)
        {
            y.at[i] = from_float<T>(to_float(y.at[i]) + to_float(x.at[i]));
        }
    }

    // A lane's words, one of each of four tiles, become the four of its tile. By all lanes of a warp.
    __device__ __forceinline__ void exchange(uint32_t (&words)[4]) const
    {
#pragma unroll
        for (int step = 1; step <= 2; step *= 2)
        {
            bool const is_upper = lane & step;
#pragma unroll
            for (int k = 0; k < 2; ++k)
            {
                int const low = step == 1 ? 2 * k : k;
                uint32_t const there = __shfl_xor_sync(0xffffffffu, is_upper ? words[low] : words[low + step], step);
                words[low] = is_upper ? there : words[low];
                words[low + step] = is_upper ? words[low + step] : there;
            }
        }
    }
};

#endif

template <typename L>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    tall_gemm_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared<L> const shared{{shared_address(memory)}};
    if (threadIdx.x == kConsumers)
    {
        shared.init();
    }
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster(); // the barriers of both blocks can be used
    Share const share;
    if (threadIdx.x >= kConsumers)
    {
        sm90::release_registers<kLoaderRegisters>();
        if (threadIdx.x == kConsumers)
        {
            Loader<L>{launch, shared, share}.load();
        }
        wait();
    }
    else
    {
        sm90::take_registers<kMainloopRegisters>();
        wait();
        Mainloop<L> mainloop{launch, shared, share};
        Epilogue<L> const epilogue{launch.p};
        for (int tile = share.first_tile; tile < launch.tiles; tile += share.tile_step)
        {
            int const row
                = (tile % launch.pairs * kBlocks + share.rank) * kRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
            Sums<L> sums;
            mainloop.multiply(sums);
            RowFactors(launch.p, row).multiply(sums);
            epilogue.store(row, tile / launch.pairs * L::kOutputs, sums);
        }
    }
    // The other block may still fill this one's stages, and give them back.
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
#endif
}

} // namespace tall
} // namespace dflash
