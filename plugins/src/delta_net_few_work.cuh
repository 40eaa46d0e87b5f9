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

// Warps: first those of the state, a tile of its values and a part of its keys each; then those of queries and keys,
// of values, and one for what lies between rows.
constexpr int kStateWarps = kTiles * kParts;
constexpr int kRowWarps = 8;
constexpr int kValueWarps = 2;
constexpr int kFirstValueWarp = kStateWarps + kRowWarps;
constexpr int kWarps = kFirstValueWarp + kValueWarps + 1;
constexpr int kThreads = 32 * kWarps;

// Barriers, and the threads that meet there.
constexpr int kProductsAreThere = 1;
constexpr int kUntilProducts = 32 * (kStateWarps + kRowWarps + 1);
constexpr int kIsSolved = 2;
constexpr int kPendingIsThere = 3;
constexpr int kWithSolver = 32 * (kStateWarps + 1); // at both of these
constexpr int kPartsMeet = 4; // and on, one for each tile

// All threads of the block.
__device__ __forceinline__ void meet_all()
{
    meet(0, kThreads);
}

template <typename T>
struct Shared
{
    static constexpr int kKeyStride = kSize + 4; // rows apart begin in other banks
    static constexpr int kValueStride = kValues + 4;

    alignas(16) uint32_t keys[SplitRows<kSize>::kWords];
    uint32_t queries[SplitRows<kSize>::kWords];
    float pending_keys[kDeltaRows][kKeyStride];
    float pending_writes[kDeltaRows][kValueStride];
    float values[kDeltaRows][kValueStride];
    float4 exchange[kTiles][kParts][2][32]; // of a part for the other: sums; then what rows write
    T gates[kDeltaRows][kValues]; // of the outputs
    typename ChunkRows<T, kSize>::Products products;
    float solved[kMix]; // (I + A)^-1 b
    float reads[kMix]; // D (q k)
    float lower[kMix]; // A transposed
    float squares[kSplits * kTiles][kDeltaRows]; // sums over a tile's values, from both blocks
    float kept[kDeltaRows]; // E
    float pending_behind[kDeltaRows]; // what is left of a row behind the last
    float pending_kept; // of the state behind the pending rows
    uint64_t gates_barrier;
    uint64_t squares_barrier;
};

} // namespace few
} // namespace delta
} // namespace dflash
