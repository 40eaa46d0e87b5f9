// The division of products of few rows among clusters, blocks, warps and lanes, and a block's shared memory.
//
// The structs of these files that compute have plain numbers alone; arrays in registers are in structs of their own.
// The compiler finds registers for an array, and for all else in its struct, only once it has unrolled the loops over
// it: nvcc 13.0 made up to 4% more instructions of structs with both.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "product_order.cuh"

#include <cuda.h>
#include <type_traits>

namespace dflash
{
namespace skinny
{

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32; // that multiply; one more warp loads
constexpr int kCluster = 2;
static_assert(kWarps == kBlockChains); // a warp has a chain of a row's lines: a run is a unit for each
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit: a line of the cache
constexpr int kUnit = kGranule * kLine; // bytes that a warp multiplies at a time
constexpr int kStage = kWarps * kUnit; // bytes that come at a time: a unit for each warp
constexpr int kInFlight = 3; // stages that are asked for at once; see `Ring::load`
constexpr int kSlots = kWarps / 2; // for sums of warps, to be added up
constexpr int kBarrier = 8; // bytes

// The sizes of a block's pass: some granules of its rows, for at most kTokens tokens. A unit is multiplied by
// kInputBytes of each token's inputs; the norm's weights for as many lie beside them.
//
// Sums go in the order of `product_order.cuh`, or in another: of FP8 weights, for which that takes too many registers,
// and where lines of a chain do not lie together by pairs, which memory brings. A line of FP8 numbers is of one block
// of columns, a granule of one block of rows, with swiglu of two.
template <typename InputType, typename WeightType, int kPassGranules, int kMostTokens, bool kIsOrdered,
    bool kIsByBlock = false>
struct Layout
{
    using T = InputType;
    using W = WeightType;
    static constexpr int kGranules = kPassGranules;
    static constexpr int kTokens = kMostTokens;
    static constexpr int kTiles = kTokens / 8;
    static constexpr int kColumns = kLine / static_cast<int>(sizeof(W)); // inputs in one unit
    static constexpr int kPairs = 8 / static_cast<int>(sizeof(W)); // of numbers in sixteen bytes of a weight
    static constexpr bool kDecoded = std::is_same_v<W, E4M3>; // products are FP16 then, whatever T is
    static constexpr bool kOrdered = kIsOrdered;
    static constexpr bool kByBlock = kIsByBlock; // whether a weight has a scale a block of rows and columns, not a row
    static constexpr int kMostRuns = kOrdered ? 2 : 1; // whose inputs are in registers at once
    static constexpr bool kMayAddOne = std::is_same_v<T, __nv_bfloat16> && !kDecoded; // to a norm's weights
    static constexpr bool kToHalf = kDecoded && std::is_same_v<T, __nv_bfloat16>;

    // Shared memory: the ring of stages, each warp's inputs, the sums, and what the other block sends. It is more than
    // half of a multiprocessor's: two blocks of one product must not share one, or they would take twice the others'
    // time. Small kernels may still stand beside a block.
    static constexpr int kLimit = 212 * 1024;
    static constexpr int kSmallLimit = 180 * 1024; // beside a block of `row_attention_kernel`
    static constexpr int kMostStages = 12;
    static constexpr int kInputBytes = kColumns * static_cast<int>(sizeof(T)); // a token's
    static constexpr int kInputs = kTokens * kInputBytes; // bytes of a run; a warp has two, used by turns
    static constexpr int kInputsBytes = kWarps * 2 * (kInputs + kInputBytes);
    static constexpr int kSlot = kPassGranules * kGranule * kTokens; // numbers
    static constexpr int kSumBytes = kSlots * kSlot * static_cast<int>(sizeof(float));
    static constexpr int kInbox = kSlot / 2; // numbers; there are two, used by turns
    static constexpr int kInboxBytes = 2 * kInbox * static_cast<int>(sizeof(float));
    static constexpr int kSquaresBytes = (kWarps + kCluster) * kTokens * static_cast<int>(sizeof(float));
    static constexpr int kBarrierBytes = (kMostStages * 2 + kWarps * 2 + 3) * kBarrier;
    static constexpr int kOther = kInputsBytes + kSumBytes + kInboxBytes + kSquaresBytes + kBarrierBytes;

    // Stages of the ring, and the shared memory that they need with all else.
    static constexpr int stages(bool leaves_room)
    {
        return ((leaves_room ? kSmallLimit : kLimit) - kOther) / kStage;
    }

    static constexpr int bytes(int stages)
    {
        return stages * kStage + kOther;
    }

    // Results go by items, one a thread: of two tokens two of a granule's rows each, which are a gate and an up of
    // swiglu.
    static constexpr int kItemNumbers = 4;
    static constexpr int kItems = kSlot / 2 / kItemNumbers; // of each block of the cluster
    static_assert(!kOrdered || !kDecoded);
    static_assert(kItems <= kThreads && kInFlight <= stages(true) && stages(false) <= kMostStages);
    using Item = Vector<float, kItemNumbers>;
};

// The kernel's arguments.
struct Launch
{
    dflash_skinny_gemm_params p;
    CUtensorMap weight;
    CUtensorMap inputs;
    Chains chains; // of lines of 128 bytes in a weight's row
    int run_bytes, run_chains; // from the columns and chains of the weight's map in a run to those in the next
    int runs_at_once; // two, where the lines of a chain lie together
    int stages; // of the ring
    int granules, more; // that a cluster or a block has, and how many of the first ones have one more
    int is_alone; // each block, with all of a row's chains; else a cluster's two blocks have half of them each
    float per_input; // 1 / p.inputs
    uint32_t zero; // which the compiler does not know to be one: see `Ring::release`
};

// A thread's place: its block in the cluster, its warp in the block, its lane, and the lane's place in a tile.
struct Place
{
    int const rank = static_cast<int>(__clusterRelativeBlockRank());
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const quad = lane / 4, part = lane % 4;
    bool const is_alone;
    int const first_chain = is_alone ? 0 : rank * kWarps; // of the block
    int const chain = first_chain + warp;

    __device__ __forceinline__ explicit Place(bool alone)
        : is_alone(alone)
    {
    }
};

// A cluster's or a block's share of the weight's granules, in passes of equally many but for the last, and a block's
// share of their lines. Each pass goes through all runs: one of a granule or two would wait for the inputs of each.
struct Share
{
    int first, count; // granules
    int passes, of_pass; // granules that a pass has, or the last one at most
    int runs; // of lines, one for each warp

    // most: granules that a pass may have.
    __device__ __forceinline__ Share(Launch const& launch, Place const& place, int most)
    {
        int const index = place.is_alone ? blockIdx.x : blockIdx.x / kCluster;
        first = index * launch.granules + min(index, launch.more);
        count = launch.granules + (index < launch.more);
        passes = (count + most - 1) / most;
        of_pass = (count + passes - 1) / passes;
        runs = launch.chains.count(place.first_chain);
    }

    // The granules of a pass.
    __device__ __forceinline__ int active(int pass) const
    {
        return min(of_pass, count - pass * of_pass);
    }
};

// A block's shared memory, piece by piece, and what of it is a warp's own.
template <typename L>
struct Shared
{
    int const warp;
    int const stages;
    unsigned char* const ring; // [stages, kWarps, kGranule, kLine]
    unsigned char* const inputs = ring + stages * kStage; // [kWarps, 2, kInputs]
    unsigned char* const norms = inputs + kWarps * 2 * L::kInputs; // [kWarps, 2, kInputBytes]
    float* const sums = reinterpret_cast<float*>(inputs + L::kInputsBytes); // [kSlots, kSlot]
    float* const inbox = sums + L::kSumBytes / sizeof(float); // [2, kInbox]
    float* const warp_squares = inbox + L::kInboxBytes / sizeof(float); // [kWarps, kTokens]
    float* const block_squares = warp_squares + kWarps * L::kTokens; // [kCluster, kTokens]
    uint32_t const full = shared_address(block_squares + kCluster * L::kTokens); // barriers of stages
    uint32_t const empty = full + L::kMostStages * kBarrier;
    uint32_t const own_barriers = empty + L::kMostStages * kBarrier + warp * 2 * kBarrier; // of inputs: a warp has two
    uint32_t const inbox_barriers = empty + L::kMostStages * kBarrier + kWarps * 2 * kBarrier; // two
    uint32_t const squares_barrier = inbox_barriers + 2 * kBarrier;
};

// The offset of a part of 16 bytes in a tile: rows of 128 bytes, as the bulk copy engine swizzles them.
__device__ __forceinline__ int swizzled(int row, int part)
{
    return row * kLine + (part ^ row % 8) * 16;
}

} // namespace skinny
} // namespace dflash
