// The division of few value heads among blocks and warps, and a block's shared memory.
#pragma once

#include "delta_net_products.cuh"
#include "delta_net_rows.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

constexpr int kSize = 128; // of heads
constexpr int kSplits = 2; // blocks of a value head
constexpr int kMostHeads = 4; // of a key head, whose blocks are a cluster
constexpr int kValues = kSize / kSplits; // of a block
constexpr int kTiles = kValues / 16;
constexpr int kParts = 2; // of the keys
constexpr int kPartKeys = kSize / kParts;
constexpr int kRowItems = 2 * kDeltaRows; // rows of queries and of keys

// Warps: first those of the state, a tile of its values and a part of its keys each; then those of queries and keys,
// of values, and one for what lies between rows.
constexpr int kStateWarps = kTiles * kParts;
constexpr int kRowWarps = 8;
constexpr int kValueWarps = 2;
constexpr int kFirstValueWarp = kStateWarps + kRowWarps;
constexpr int kSolver = kFirstValueWarp + kValueWarps;
constexpr int kWarps = kSolver + 1;
constexpr int kThreads = 32 * kWarps;

// Barriers, and the threads that meet there, or report what they have.
constexpr int kGuessIsThere = 0; // all threads of the block
constexpr int kLoadsBegan = 1; // likewise: those of states come behind all others, for they take the longest to come
constexpr int kFoundIsThere = 2; // the segment
constexpr int kUntilFound = 32 * (kRowWarps + kValueWarps + 1); // and the solver
constexpr int kPendingIsThere = 3; // what is left of pending rows, and these; the segment, too
constexpr int kWithSolver = 32 * (kStateWarps + 1);
constexpr int kStatesMeet = 4;
constexpr int kProductsAreThere = 5;
constexpr int kUntilProducts = 32 * (kRowWarps + 1); // and the solver
constexpr int kIsSolved = 6; // for parts that write
constexpr int kUntilSolved = 32 * (kTiles + 1); // and the solver
constexpr int kMayMix = 7; // it is, for the warp that mixes
constexpr int kUntilMix = 32 * 2;
constexpr int kIsMixed = 8; // and gates are there
constexpr int kUntilMixed = 32 * (kTiles + kRowWarps); // parts that give, and those that have gates and mix
constexpr int kPartsMeet = 9; // and on, one for each tile

template <typename T>
struct Shared
{
    static constexpr int kKeyStride = kSize + 4; // rows apart begin in other banks
    static constexpr int kValueStride = kValues + 4;

    alignas(16) uint32_t rows[2][SplitRows<kSize>::kWords]; // keys, and queries
    float pending_keys[kDeltaRows][kKeyStride];
    float pending_writes[kDeltaRows][kValueStride];
    float values[kDeltaRows][kValueStride];
    float4 of_keys[kTiles][kParts][2][32]; // what each part's keys read, for the other one
    float4 of_queries[kTiles][2][32]; // and of the first part's
    float gates[kDeltaRows][kValueStride]; // what the outputs are multiplied by
    typename ChunkRows<T, kSize>::Products products;
    float solved[kMix]; // (I + A)^-1 b
    float mixed[kMix]; // D (q k) (I + A)^-1 b
    float left[kMix]; // D
    float lower[kMix]; // A transposed
    typename ChunkRows<T, kSize, 1>::StagedTaps row_taps[32 * kRowWarps];
    typename ChunkRows<T, kSize>::StagedTaps value_taps[32 * kValueWarps];
    float4 norm[32 * kRowWarps];
    float squares[kSplits * kTiles][kDeltaRows]; // sums over a tile's values, from both blocks
    float kept[kDeltaRows]; // E
    float pending_behind[kDeltaRows]; // what is left of a row behind the last
    float pending_kept; // of the state behind the pending rows
    SegmentWords guessed; // the segment
    SegmentWords found; // once the kernels before this one are done
    uint64_t rows_barrier; // of keys and queries
    uint64_t values_barrier; // of values and E
    uint64_t squares_barrier;
};

} // namespace few
} // namespace delta
} // namespace dflash
