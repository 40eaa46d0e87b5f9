// Gated products of hundreds of rows (tokens) with large weights, on Hopper: bound by tensor cores, and by the power
// that they and what feeds them take.
//
// A block takes 256 rows and as many outputs as its registers hold sums of, so that what comes into shared memory is
// used as often as can be, and gates them at the end. The two blocks of a cluster have the same rows and outputs of
// their own: each brings half of the rows, for both.
#pragma once

#include "tall_gemm_sm90.cuh"
#include "tensor_copy.cuh"

namespace dflash
{
namespace bulk
{

using wide::kConsumers;
using wide::kGranule;
using wide::kGroups;
using wide::kLine;

constexpr int kBlocks = 2; // of a cluster
constexpr int kRows = 256; // of a block
constexpr int kGroupRows = kRows / kGroups;
constexpr int kMatrices = kGroupRows / 64; // of rows, of a warpgroup
constexpr int kOutputs = 192; // of a weight's rows: gates, and what they gate
constexpr int kTiles = kOutputs / 8; // of 8 outputs
constexpr int kThreads = kConsumers + 128; // a warpgroup loads: it gives registers to those that multiply
constexpr int kLoaderRegisters = 40;
constexpr int kMainloopRegisters = 232;
constexpr int kStages = 4;
constexpr int kWeightBytes = kOutputs * kLine;
constexpr int kStageBytes = kWeightBytes + kRows * kLine;
constexpr int kBytes = kStages * kStageBytes + 2 * kStages * 8;
constexpr int kStoredTiles = 8; // of 8 outputs, that a warp stores at a time

// The kernel's arguments.
struct Launch
{
    dflash_skinny_gemm_params p;
    CUtensorMap weight; // as of `wide::Launch`
    CUtensorMap inputs; // bytes of a row, rows
    int lines; // of 128 bytes in a row
    int row_tiles; // of 256 rows
    int items; // row tiles times pairs of output tiles
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Shared
{
    uint32_t const start;
    uint32_t const barriers = start + kStages * kStageBytes;

    __device__ __forceinline__ uint32_t inputs(int stage) const
    {
        return start + stage * kStageBytes;
    }

    __device__ __forceinline__ uint32_t weight(int stage) const
    {
        return inputs(stage) + kRows * kLine;
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return barriers + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return barriers + (kStages + stage) * 8;
    }

    // By one thread. A stage is empty when the warps of both blocks are done with it: each block fills both.
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < kStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), kBlocks * kConsumers / 32);
        }
        fence_barrier_inits();
    }
};

// A place in the ring of stages, and the phase of its barriers.
struct Stage
{
    int at = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance()
    {
        at = at + 1 == kStages ? 0 : at + 1;
        phase ^= at == 0;
    }
};

// Where an item begins: a block's part of it.
struct Place
{
    int row, output;
};

// A cluster's items: every so manieth, of a row tile and a pair of output tiles, one for each block. Those of the same
// outputs follow each other.
struct Items
{
    Launch const& launch;
    int const rank = static_cast<int>(__clusterRelativeBlockRank());
    uint32_t index = blockIdx.x / kBlocks;

    __device__ __forceinline__ bool are_left() const
    {
        return static_cast<int>(index) < launch.items;
    }

    __device__ __forceinline__ void advance()
    {
        index += gridDim.x / kBlocks;
    }

    // Divides, in some twenty instructions.
    __device__ __forceinline__ Place place() const
    {
        uint32_t const before = index / launch.row_tiles;
        int const row_tile = index - before * launch.row_tiles;
        return {row_tile * kRows, static_cast<int>(before * kBlocks + rank) * kOutputs};
    }
};

// Has the stages brought: one thread's work.
struct Loader
{
    Launch const& launch;
    Shared const& shared;
    Items items{launch};
    Place place = items.place();
    int line = 0; // the next one
    Stage stage;

    __device__ __forceinline__ void advance()
    {
        stage.advance();
        if (++line == launch.lines)
        {
            line = 0;
            items.advance();
            place = items.place();
        }
    }

    __device__ __forceinline__ void load_weight() const
    {
        expect_bytes(shared.full(stage.at), kStageBytes);
        copy_box_4d(
            shared.weight(stage.at), launch.weight, line * kLine, 0, 0, place.output / kGranule, shared.full(stage.at));
    }

    __device__ __forceinline__ void load_inputs() const
    {
        constexpr int kOwn = kRows / kBlocks;
        multicast_box_2d(shared.inputs(stage.at) + items.rank * kOwn * kLine, launch.inputs, line * kLine,
            place.row + items.rank * kOwn, shared.full(stage.at), (1 << kBlocks) - 1);
    }

    // Weights of the first stages come before the kernel waits for the one before it: that one makes the inputs.
    __device__ __forceinline__ void load()
    {
        Loader inputs = *this;
        int ahead = 0;
#pragma unroll 1 // code is read from far away in every step
        for (; ahead < kStages && items.are_left(); ++ahead)
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
        for (; items.are_left(); advance())
        {
            wait_for_phase(shared.empty(stage.at), stage.phase ^ 1);
            load_weight();
            load_inputs();
        }
    }
};

// A thread's sums, one 64 rows after the other: of each of its tiles two numbers of one row, and of the eighth row
// behind it.
using Sums = float[kMatrices * kTiles][4];

// Multiplies: a warpgroup's work.
template <typename T>
struct Mainloop
{
    Shared const& shared;
    int const group = threadIdx.x / 128;
    Stage stage;

    __device__ __forceinline__ void release(int at) const
    {
        __syncwarp();
        if (threadIdx.x % 32 < kBlocks)
        {
            wide::arrive_there(shared.empty(at), threadIdx.x % 32);
        }
    }

    // Gives the sums of one item.
    __device__ __forceinline__ void multiply(int lines, Sums& c)
    {
#pragma unroll
        for (auto& four : c)
        {
            four[0] = four[1] = four[2] = four[3] = 0.f;
        }
        int before = 0;
        for (int i = 0; i < lines; ++i)
        {
            wait_for_phase(shared.full(stage.at), stage.phase);
            uint64_t const rows = sm90::matrix(shared.inputs(stage.at) + group * kGroupRows * kLine, 16, 1024);
            uint64_t const outputs = sm90::matrix(shared.weight(stage.at), 16, 1024);
            sm90::begin_products();
#pragma unroll
            for (int step = 0; step < kLine / 32; ++step) // 16 columns
            {
#pragma unroll
                for (int m = 0; m < kMatrices; ++m)
                {
                    sm90::multiply_add_columns<T, kTiles>(
                        c + m * kTiles, rows + m * (64 * kLine >> 4) + 2 * step, outputs + 2 * step);
                }
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

// Gates and stores the sums of a warpgroup, in a loop, the next ones moved to where the code looks for them: code is
// read from far away in every step, and of all sums one after the other it would be 70 KB.
template <typename T>
__device__ __forceinline__ void store(Launch const& launch, Items const& items, Sums& c)
{
    tall::Epilogue<T> const epilogue{launch.p};
    Place const place = items.place();
    int const first_row
        = place.row + threadIdx.x / 128 * kGroupRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int first = 0; first < kMatrices * kTiles; first += kStoredTiles)
    {
        int const m = first / kTiles;
        int const row = first_row + m * 64, output = place.output + (first - m * kTiles) * 8;
        epilogue.template each_row<kStoredTiles>(
            c, [](float x, bool) { return x; },
            [&](int below, Two<T> const (&y)[kStoredTiles]) { epilogue.store_gated(row + below, output, y); });
        move_sums<kStoredTiles>(c);
    }
}

#endif

template <typename T>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    bulk_gemm_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared const shared{shared_address(memory)};
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
            Loader{launch, shared}.load();
        }
        wait();
    }
    else
    {
        sm90::take_registers<kMainloopRegisters>();
        wait();
        Mainloop<T> mainloop{shared};
        for (Items items{launch}; items.are_left(); items.advance())
        {
            Sums sums;
            mainloop.multiply(launch.lines, sums);
            store<T>(launch, items, sums);
        }
    }
    // The other block may still fill this one's stages, and give them back.
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
#endif
}

} // namespace bulk
} // namespace dflash
