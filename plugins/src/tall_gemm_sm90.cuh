// Products of hundreds of rows (tokens) with large weights, on Hopper: bound by tensor cores and the L2 cache.
//
// Two blocks of a cluster take 128 rows each and the same outputs: each brings half of a weight's lines, for both. A
// row's sums go in the order of `product_order.cuh`.
#pragma once

#include "parked_sums.cuh"
#include "product_order.cuh"
#include "row_factors.cuh"
#include "tall_gemm_epilogue_sm90.cuh"
#include "tensor_copy.cuh"
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

// A cluster's tiles: every so manieth, those of the same outputs one behind the other.
struct Tiles
{
    Launch const& launch;
    int const rank = static_cast<int>(__clusterRelativeBlockRank());
    uint32_t index = blockIdx.x / kBlocks;
    int of_outputs = index / launch.pairs; // one division for each tile: its code is long
    int pair = index - of_outputs * launch.pairs;

    __device__ __forceinline__ bool are_left() const
    {
        return static_cast<int>(index) < launch.tiles;
    }

    __device__ __forceinline__ void advance()
    {
        index += gridDim.x / kBlocks;
        if (are_left())
        {
            of_outputs = index / launch.pairs;
            pair = index - of_outputs * launch.pairs;
        }
    }

    // The block's.
    __device__ __forceinline__ int first_row() const
    {
        return (pair * kBlocks + rank) * kRows;
    }
};

// Has the stages brought: one thread's work.
template <typename L>
struct Loader
{
    Launch const& launch;
    Shared<L> const& shared;
    Chains const chains{launch.lines, L::kHasHalves ? 2 : 1};
    Tiles tiles{launch};
    ChainLine line{0, chains.used()};
    wide::Stage<L> stage;

    __device__ __forceinline__ void advance()
    {
        stage.advance();
        if (line.advance(chains))
        {
            tiles.advance();
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
        multicast_box_4d(shared.weight(stage.at) + tiles.rank * L::kShareBytes, launch.weight, column(), 0, 0,
            tiles.of_outputs * kGranules + tiles.rank * kOwn, shared.full(stage.at), (1 << kBlocks) - 1);
    }

    __device__ __forceinline__ void load_inputs() const
    {
        copy_box_2d(shared.inputs(stage.at), launch.inputs, column(), tiles.first_row(), shared.full(stage.at));
    }

    // Weights of the first stages come before the kernel waits for the one before it: that one makes the inputs.
    __device__ __forceinline__ void load()
    {
        Loader inputs = *this;
        int ahead = 0;
#pragma unroll 1 // code is read from far away in every step
        for (; ahead < L::kStages && tiles.are_left(); ++ahead)
        {
            load_weight();
            advance();
        }
        wait();
#pragma unroll 1
        for (; ahead > 0; --ahead)
        {
            inputs.load_inputs();
            inputs.advance();
        }
        for (; tiles.are_left(); advance())
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

    // Gives one tile's sums: of halves in a loop, so that their code is read once.
    __device__ __forceinline__ void multiply(Sums<L>& sums)
    {
        Chains const chains(launch.lines, L::kHasHalves ? 2 : 1);
        auto const next = [&](int lines, Sums<L>& c) { add_lines(lines, c); };
        auto const add_halves = [&](auto const& keep) // keep: what becomes of the first
        {
#pragma unroll 1
            for (int first = 0; first < 2 * kBlockChains; first += kBlockChains)
            {
                add_chains(chains, first, min(first + kBlockChains, chains.used()), next, sums);
                if (first == 0)
                {
                    keep();
                }
            }
        };
        if constexpr (!L::kHasHalves)
        {
            add_chains(chains, 0, chains.used(), next, sums);
        }
        else if constexpr (L::kParks)
        {
            Parking<kConsumers> const parking(launch.parking, L::kTiles);
            add_halves([&] { parking.put(sums); });
            parking.add_to(sums);
        }
        else
        {
            Sums<L> half;
            set_to_zero(half);
            add_halves([&] { copy_sums(sums, half); });
            add_sums(half, sums);
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
    if (threadIdx.x >= kConsumers)
    {
        sm90::release_registers<kLoaderRegisters>();
        if (threadIdx.x == kConsumers)
        {
            Loader<L>{launch, shared}.load();
        }
        wait();
    }
    else
    {
        sm90::take_registers<kMainloopRegisters>();
        wait();
        Mainloop<L> mainloop{launch, shared};
        Epilogue<typename L::T> const epilogue{launch.p};
        for (Tiles tiles{launch}; tiles.are_left(); tiles.advance())
        {
            int const row = tiles.first_row() + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
            Sums<L> sums;
            mainloop.multiply(sums);
            RowFactors const factors(launch.p, row);
            epilogue.store(row, tiles.of_outputs * L::kOutputs, sums,
                [&](float x, bool below) { return x * factors.of(below); });
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
