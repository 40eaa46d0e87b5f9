// Products of tens of rows (tokens) with large weights, on Hopper: who computes what, and how it comes into shared
// memory.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "tensor_copy.cuh"

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

// A tile: kRows tokens times kOutputs rows of a weight, whose inputs a cluster's two blocks share, or one has all.
// FactorType: of the numbers that are multiplied. kScaledByBlock: E4M3 ones that have a scale for each line of a row,
// and for each line of 128 of a weight's rows; else one a row.
template <typename OutputType, int kTileRows, int kTileOutputs, int kClusterSplits, typename FactorType = OutputType,
    bool kScaledByBlock = false>
struct Layout
{
    using T = OutputType;
    using Factor = FactorType;
    static constexpr bool kByBlock = kScaledByBlock;
    static constexpr int kRows = kTileRows;
    static constexpr int kOutputs = kTileOutputs;
    static constexpr int kSplits = kClusterSplits;
    // The warpgroups share the tokens where there are enough for both, else the outputs.
    static constexpr bool kSharesRows = kRows > 64;
    static constexpr int kGroupOutputs = kSharesRows ? kOutputs : kOutputs / kGroups;
    static constexpr int kTiles = kGroupOutputs / 8; // of 8 outputs, of a warpgroup
    static constexpr int kOwnTiles = (kTiles + kSplits - 1) / kSplits; // that it finishes; of the last block, fewer
    static constexpr bool kDividesEvenly = kTiles % kSplits == 0;
    static constexpr int kWeightBytes = kOutputs * kLine;
    static constexpr int kStageBytes = kWeightBytes + kRows * kLine;
    static constexpr int kInboxBytes = kSplits > 1 ? kOwnTiles * kConsumers * 16 : 0;
    static constexpr int kBarrierBytes = (2 * kMostStages + 1) * 8;
    // Instructions read 64 rows, of 32 tokens' what lies behind them too: nobody takes what they make of it.
    static constexpr int kBehind = std::max(64 - kRows, 0) * kLine;
    static constexpr int kOther = std::max(kInboxBytes + kBarrierBytes, kBehind);
    static constexpr int kStages = std::min((kLimit - kOther) / kStageBytes, kMostStages);
    static constexpr int kBytes = kStages * kStageBytes + kOther;
    static_assert(kRows == 32 || kRows == 64 || kRows == 128);
    static_assert(kOutputs % kGranule == 0 && kStages >= 3 && kSplits <= 2);
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

// Arrives at a barrier of any block of the cluster.
__device__ __forceinline__ void arrive_there(uint32_t barrier, int rank)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_at(barrier, rank)) : "memory");
}

// Where the stages of a ring lie in shared memory, each a line of weights and of inputs, and behind kBetween bytes two
// barriers for each of at most kMost.
template <typename L, int kMost, int kBetween>
struct Ring
{
    uint32_t const start;
    uint32_t const behind = start + L::kStages * L::kStageBytes;
    uint32_t const barriers = behind + kBetween;

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
        return barriers + (kMost + stage) * 8;
    }

    // By one thread. readers: warps that are done with a stage when it is empty.
    __device__ __forceinline__ void init_barriers(int readers) const
    {
#pragma unroll 1
        for (int i = 0; i < L::kStages; ++i)
        {
            init_barrier(full(i), 1);
            init_barrier(empty(i), readers);
        }
    }
};

template <typename L>
struct Shared : Ring<L, kMostStages, L::kInboxBytes>
{
    // [kOwnTiles, kConsumers, 4] FP32
    __device__ __forceinline__ uint32_t inbox() const
    {
        return this->behind;
    }

    __device__ __forceinline__ uint32_t inbox_full() const
    {
        return this->barriers + 2 * kMostStages * 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        this->init_barriers(kConsumers / 32);
        init_barrier(inbox_full(), 1);
        fence_barrier_inits();
        if (L::kSplits > 1)
        {
            bool const has_fewer = !L::kDividesEvenly && __clusterRelativeBlockRank() == 1;
            expect_bytes(inbox_full(), L::kInboxBytes - (has_fewer ? kConsumers * 16 : 0));
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

// The lines of a block's share in turn.
template <typename L>
struct Lines
{
    Share<L> const& share;
    int line = 0; // the next one

    // Its first byte in a row.
    __device__ __forceinline__ int column() const
    {
        return (share.first_line + line) * kLine;
    }

    // Says whether they have begun anew.
    __device__ __forceinline__ bool advance()
    {
        if (++line < share.lines)
        {
            return false;
        }
        line = 0;
        return true;
    }
};

// Has the stages brought: one thread's work.
template <typename L, typename OwnLines = Lines<L>>
struct Loader
{
    Launch const& launch;
    Shared<L> const& shared;
    Share<L> const& share;
    OwnLines lines;
    int tile = share.first_tile; // the next one
    Stage<L> stage;
    uint64_t const policy = read_once_policy();

    __device__ __forceinline__ bool are_left() const
    {
        return tile < launch.tiles;
    }

    __device__ __forceinline__ void advance()
    {
        stage.advance();
        if (lines.advance())
        {
            tile += share.tile_step;
        }
    }

    __device__ __forceinline__ void load_weight() const
    {
        expect_bytes(shared.full(stage.at), L::kWeightBytes + launch.box_rows * kLine);
        copy_box_4d(shared.weight(stage.at), launch.weight, lines.column(), 0, 0, tile * (L::kOutputs / kGranule),
            shared.full(stage.at), policy);
    }

    __device__ __forceinline__ void load_inputs() const
    {
        copy_box_2d(shared.inputs(stage.at), launch.inputs, lines.column(), share.first_row, shared.full(stage.at));
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
#pragma unroll 1 // the code is read from far away, too
        for (int ahead = 0; ahead < L::kStages && are_left(); ++ahead)
        {
            load_inputs();
            advance();
        }
    }
};

#endif

} // namespace wide
} // namespace dflash
