// Products of tens of rows (tokens) with large weights, on Hopper: a block's loop and what it does with the sums.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "wgmma.cuh"

#include <algorithm>
#include <cuda.h>

namespace dflash
{
namespace wide
{

constexpr int kGroups = 2; // warpgroups that multiply
constexpr int kConsumers = kGroups * 128;
constexpr int kThreads = kConsumers + 64; // one more warp loads, and another the first stages' inputs
constexpr int kLine = 128; // bytes of a row in one stage
constexpr int kGranule = 16; // rows of a weight, with SwiGLU 8 of the gate and the 8 of up that belong to them
constexpr int kMostStages = 16;
// Bytes of weights that a block asks for at its begin, and then in a cycle until the ring is full. What is asked for
// comes in no order, and what a norm before this kernel still reads comes behind it: so no more than memory gives.
constexpr int kAskedAtOnce = 32 * 1024, kAskedInCycle = 18;
constexpr int kLimit = 212 * 1024; // of shared memory: more than half, so that no two blocks share a multiprocessor

// A tile: kRows tokens times kOutputs rows of a weight, whose inputs a cluster's kSplits blocks share.
template <typename InputType, int kTileRows, int kTileOutputs, int kClusterSplits>
struct Layout
{
    using T = InputType;
    static constexpr int kRows = kTileRows;
    static constexpr int kOutputs = kTileOutputs;
    static constexpr int kSplits = kClusterSplits;
    // The warpgroups share the tokens where there are enough for both, else the outputs.
    static constexpr bool kSharesRows = kRows > 64;
    static constexpr int kGroupOutputs = kSharesRows ? kOutputs : kOutputs / kGroups;
    static constexpr int kTiles = kGroupOutputs / 8; // of 8 outputs, of a warpgroup
    static constexpr int kOwnTiles = kTiles / kSplits; // that it finishes
    static constexpr int kWeightBytes = kOutputs * kLine;
    static constexpr int kStageBytes = kWeightBytes + kRows * kLine;
    static constexpr int kInboxBytes = (kSplits - 1) * kOwnTiles * kConsumers * 16;
    static constexpr int kBarrierBytes = (2 * kMostStages + 1) * 8;
    // Instructions read 64 rows, of 32 tokens' what lies behind them too: nobody takes what they make of it.
    static constexpr int kBehind = std::max(64 - kRows, 0) * kLine;
    static constexpr int kOther = std::max(kInboxBytes + kBarrierBytes, kBehind);
    static constexpr int kStages = std::min((kLimit - kOther) / kStageBytes, kMostStages);
    static constexpr int kBytes = kStages * kStageBytes + kOther;
    static_assert(kRows == 32 || kRows == 64 || kRows == 128);
    static_assert(kTiles % kSplits == 0 && kTiles % 2 == 0 && kStages >= 3);
};

// The kernel's arguments.
struct Launch
{
    dflash_skinny_gemm_params p;
    CUtensorMap weight; // bytes of a row, 8 rows, 2 of such, granules
    CUtensorMap inputs; // bytes of a row, rows
    int lines; // of 128 bytes in a row
    int tiles; // of outputs
    int box_rows; // of inputs, that come at a time
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename L>
struct Shared
{
    uint32_t const start;
    uint32_t const inbox = start + L::kStages * L::kStageBytes; // [kSplits - 1, kOwnTiles, kConsumers, 4] FP32
    uint32_t const barriers = inbox + L::kInboxBytes;

    __device__ __forceinline__ uint32_t weight(int stage) const
    {
        return start + stage * L::kStageBytes;
    }

    __device__ __forceinline__ uint32_t inputs(int stage) const
    {
        return weight(stage) + L::kWeightBytes;
    }

    __device__ __forceinline__ uint32_t full(int stage) const
    {
        return barriers + stage * 8;
    }

    __device__ __forceinline__ uint32_t empty(int stage) const
    {
        return barriers + (kMostStages + stage) * 8;
    }

    __device__ __forceinline__ uint32_t inbox_full() const
    {
        return barriers + 2 * kMostStages * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < L::kStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), kConsumers / 32);
        }
        init_barrier(inbox_full(), 1);
        fence_barrier_inits();
        if (L::kSplits > 1)
        {
            expect_bytes(inbox_full(), L::kInboxBytes);
        }
    }
};

// A place in the ring of stages, and the phase of its barriers.
template <typename L>
struct Stage
{
    int at = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance()
    {
        if (++at == L::kStages)
        {
            at = 0;
            phase ^= 1;
        }
    }
};

// A block's share: some tiles, and of a row's lines those of its rank in the cluster.
template <typename L>
struct Share
{
    int const rank = L::kSplits == 1 ? 0 : static_cast<int>(__clusterRelativeBlockRank());
    int const first_tile = blockIdx.x / L::kSplits, tile_step = gridDim.x / L::kSplits;
    int const first_row = blockIdx.y * L::kRows;
    int const first_line, lines;

    __device__ __forceinline__ explicit Share(Launch const& launch)
        : first_line(share_begin(launch.lines, rank, L::kSplits))
        , lines(share_begin(launch.lines, rank + 1, L::kSplits) - first_line)
    {
    }
};

// Has the stages brought: one thread's work.
template <typename L>
struct Loader
{
    Launch const& launch;
    Shared<L> const& shared;
    Share<L> const& share;
    int tile = share.first_tile, line = 0; // the next ones
    Stage<L> stage;

    __device__ __forceinline__ bool are_left() const
    {
        return tile < launch.tiles;
    }

    __device__ __forceinline__ void advance()
    {
        stage.advance();
        if (++line == share.lines)
        {
            line = 0;
            tile += share.tile_step;
        }
    }

    __device__ __forceinline__ void load_weight() const
    {
        expect_bytes(shared.full(stage.at), L::kWeightBytes + launch.box_rows * kLine);
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(shared.weight(stage.at)),
            "l"(&launch.weight), "r"((share.first_line + line) * kLine), "r"(0), "r"(tile * (L::kOutputs / kGranule)),
            "r"(shared.full(stage.at))
            : "memory");
    }

    __device__ __forceinline__ void load_inputs() const
    {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared.inputs(stage.at)),
            "l"(&launch.inputs), "r"((share.first_line + line) * kLine), "r"(share.first_row),
            "r"(shared.full(stage.at))
            : "memory");
    }

    // Weights of the first stages come before the kernel waits for the one before it.
    __device__ __forceinline__ void load()
    {
        int64_t const begin = clock64();
        for (int ahead = 0; ahead < L::kStages && are_left(); ++ahead)
        {
            while ((clock64() - begin) * kAskedInCycle < ahead * L::kWeightBytes - kAskedAtOnce)
            {
            }
            load_weight();
            advance();
        }
        wait();
        for (; are_left(); advance())
        {
            wait_for_phase(shared.empty(stage.at), stage.phase ^ 1);
            load_weight();
            load_inputs();
        }
    }

    // Their inputs are what the kernel before makes, and come as soon as that has ended. By a thread of another warp,
    // before or after the stage's bytes are expected: a barrier's count of bytes may be below zero.
    __device__ __forceinline__ void load_first_inputs()
    {
        wait();
        for (int ahead = 0; ahead < L::kStages && are_left(); ++ahead)
        {
            load_inputs();
            advance();
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
    using T = typename L::T;

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
        constexpr int kRowsAt = L::kSharesRows ? 64 * kLine : 0,
                      kOutputsAt = L::kSharesRows ? 0 : L::kGroupOutputs * kLine;
#pragma unroll
        for (auto& four : c)
        {
            four[0] = four[1] = four[2] = four[3] = 0.f;
        }
        int before = 0;
        for (int i = 0; i < share.lines; ++i)
        {
            wait_for_phase(shared.full(stage.at), stage.phase);
            uint64_t const rows = sm90::matrix(shared.inputs(stage.at) + group * kRowsAt, 16, 1024);
            uint64_t const outputs = sm90::matrix(shared.weight(stage.at) + group * kOutputsAt, 16, 1024);
            sm90::begin_products();
#pragma unroll
            for (int part = 0; part < kLine / 32; ++part) // 16 columns
            {
                sm90::multiply_add_columns<T, L::kTiles>(c, rows + 2 * part, outputs + 2 * part);
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

// Adds up what the blocks of a cluster have, in the order of their ranks, each a part of the outputs; and stores it.
template <typename L>
struct Epilogue
{
    using T = typename L::T;

    Launch const& launch;
    Shared<L> const& shared;
    Share<L> const& share;
    dflash_skinny_gemm_params const& p = launch.p;
    int const group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const row
        = share.first_row + (L::kSharesRows ? group * 64 : 0) + warp * 16 + lane / 4; // and the eighth behind it
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    __device__ __forceinline__ uint32_t inbox(int from, int tile) const
    {
        return shared.inbox + ((from * L::kOwnTiles + tile) * kConsumers + threadIdx.x) * 16;
    }

    __device__ __forceinline__ void finish(int tile, Sums<L>& c) const
    {
        if constexpr (L::kSplits == 1)
        {
            store<L::kTiles>(tile, 0, c);
        }
        else
        {
            float own[L::kOwnTiles][4];
            exchange(c, own);
            store<L::kOwnTiles>(tile, share.rank * L::kOwnTiles, own);
        }
    }

    __device__ __forceinline__ void exchange(Sums<L> const& c, float (&own)[L::kOwnTiles][4]) const
    {
#pragma unroll
        for (int rank = 0; rank < L::kSplits; ++rank)
        {
#pragma unroll
            for (int i = 0; i < L::kOwnTiles; ++i)
            {
                float const(&x)[4] = c[rank * L::kOwnTiles + i];
                if (rank != share.rank)
                {
                    uint32_t const to = inbox(share.rank - (share.rank > rank), i);
                    send(address_at(to, rank), x, address_at(shared.inbox_full(), rank));
                }
                else
                {
                    own[i][0] = x[0], own[i][1] = x[1], own[i][2] = x[2], own[i][3] = x[3];
                }
            }
        }
        wait_for_phase(shared.inbox_full(), 0);
#pragma unroll
        for (int i = 0; i < L::kOwnTiles; ++i)
        {
            float sum[4] = {};
#pragma unroll
            for (int rank = 0; rank < L::kSplits; ++rank)
            {
                float there[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                    : "=f"(there[0]), "=f"(there[1]), "=f"(there[2]), "=f"(there[3])
                    : "r"(inbox(rank < share.rank ? rank : max(rank - 1, 0), i)));
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    float const x = rank == share.rank ? own[i][j] : there[j];
                    sum[j] = rank == 0 ? x : sum[j] + x;
                }
            }
            own[i][0] = sum[0], own[i][1] = sum[1], own[i][2] = sum[2], own[i][3] = sum[3];
        }
    }

    template <int kCount>
    __device__ __forceinline__ void store(int tile, int first, float (&c)[kCount][4]) const
    {
        int const begin = tile * L::kOutputs + (L::kSharesRows ? 0 : group * L::kGroupOutputs) + first * 8;
#pragma unroll
        for (int below = 0; below < 2; ++below)
        {
            if (row + 8 * below < p.rows)
            {
                if (p.swiglu)
                {
#pragma unroll
                    for (int i = 0; i + 1 < kCount; i += 2)
                    {
                        store_gated(row + 8 * below, begin + i * 8, &c[i][2 * below], &c[i + 1][2 * below]);
                    }
                }
                else
                {
#pragma unroll
                    for (int i = 0; i < kCount; ++i)
                    {
                        store_pair(row + 8 * below, begin + i * 8 + lane % 4 * 2, &c[i][2 * below]);
                    }
                }
            }
        }
    }

    // Rounds as composed operations do: the product, then with a bias, then with a residual.
    __device__ __forceinline__ void store_pair(int at_row, int output, float const* sums) const
    {
        if (output >= p.outputs)
        {
            return;
        }
        int64_t const at = int64_t{at_row} * width + output;
        float y[2] = {rounded<T>(sums[0]), rounded<T>(sums[1])};
        if (p.bias)
        {
            add(static_cast<T const*>(p.bias) + output, y);
        }
        if (p.residual)
        {
            add(static_cast<T const*>(p.residual) + at, y);
        }
        *reinterpret_cast<typename Pair<T>::type*>(static_cast<T*>(p.out) + at) = pair_of<T>(y[0], y[1]);
    }

    __device__ __forceinline__ void add(T const* from, float (&y)[2]) const
    {
        uint32_t const bits = __ldcg(reinterpret_cast<uint32_t const*>(from));
        T const* const two = reinterpret_cast<T const*>(&bits);
        y[0] = rounded<T>(y[0] + to_float(two[0]));
        y[1] = rounded<T>(y[1] + to_float(two[1]));
    }

    __device__ __forceinline__ float activated(float gate) const
    {
        return rounded<T>(p.gelu ? gelu(gate) : silu(gate));
    }

    __device__ __forceinline__ void store_gated(int at_row, int granule_row, float const* gates, float const* ups) const
    {
        if (granule_row >= p.outputs)
        {
            return;
        }
        int const output = granule_row / 2 + lane % 4 * 2;
        float gate[2] = {rounded<T>(gates[0]), rounded<T>(gates[1])};
        float up[2] = {rounded<T>(ups[0]), rounded<T>(ups[1])};
        if (p.bias)
        {
            add(static_cast<T const*>(p.bias) + output, gate);
            add(static_cast<T const*>(p.bias) + p.outputs / 2 + output, up);
        }
        *reinterpret_cast<typename Pair<T>::type*>(static_cast<T*>(p.out) + int64_t{at_row} * width + output)
            = pair_of<T>(activated(gate[0]) * up[0], activated(gate[1]) * up[1]);
    }
};

#endif

template <typename L>
__global__ void __cluster_dims__(L::kSplits, 1, 1) __launch_bounds__(kThreads, 1)
    wide_gemm_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared<L> const shared{shared_address(memory)};
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
        Loader<L>{launch, shared, share}.load();
    }
    if (threadIdx.x == kConsumers + 32)
    {
        Loader<L>{launch, shared, share}.load_first_inputs();
    }
    wait();
    if (L::kSplits > 1)
    {
        __syncwarp();
        wait_for_cluster(); // the other blocks can be sent to
    }
    if (!computes)
    {
        return;
    }
    Mainloop<L> mainloop{shared, share};
    Epilogue<L> const epilogue{launch, shared, share};
    for (int tile = share.first_tile; tile < launch.tiles; tile += share.tile_step)
    {
        Sums<L> c;
        mainloop.multiply(c);
        epilogue.finish(tile, c);
    }
#endif
}

} // namespace wide
} // namespace dflash
