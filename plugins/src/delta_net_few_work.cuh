// The division of few value heads among blocks and warps, a block's shared memory, and how it learns of its segment.
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

// Not `bar.sync`, all threads of which execute the same instruction: here warps of several branches meet.
__device__ __forceinline__ void meet(int barrier, int threads)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at a barrier that others meet at.
__device__ __forceinline__ void report(int barrier, int threads)
{
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

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

// A block's segment as memory has it already, which whoever writes it may not have done: where it is right, what a
// block loads need not wait for it. By whole warps.
struct Guess
{
    dflash_delta_net_params const& p;
    int4 words; // slot, start, first row, count: within what there is
    int length;

    __device__ __forceinline__ explicit Guess(dflash_delta_net_params const& p)
        : p(p)
    {
        constexpr int kLanes = 32;
        int const lane = static_cast<int>(threadIdx.x) % kLanes;
        int const of_lane = load_new(p.lengths + min(lane, p.slots - 1)); // beside the segment, not behind it
        words = load_new(reinterpret_cast<int4 const*>(p.segments) + blockIdx.z);
        words.x = min(max(words.x, 0), p.slots - 1);
        words.z = min(max(words.z, 0), p.rows - 1);
        words.w = min(words.w, p.rows - words.z);
        length = __shfl_sync(0xffffffffu, of_lane, words.x % kLanes);
        if (words.x >= kLanes)
        {
            length = load_new(p.lengths + words.x);
        }
    }

    __device__ __forceinline__ Segment segment() const
    {
        return Segment(p, words, length);
    }

    // Behind the kernels before this one: loads what a segment needs by the guess and, if it was wrong, again. Returns
    // the segment; without rows nothing is loaded for it.
    template <typename Load>
    __device__ __forceinline__ Segment load(Load const& load) const
    {
        int4 const asked = load_new(reinterpret_cast<int4 const*>(p.segments) + blockIdx.z);
        int const asked_length = load_new(p.lengths + words.x);
        Segment segment = this->segment();
#pragma unroll 1
        for (bool is_sure = false;; is_sure = true)
        {
            if (segment.count > 0)
            {
                load(segment);
            }
            bool const was_right = asked.x == words.x && asked.y == words.y && asked.z == words.z && asked.w == words.w
                && asked_length == length;
            if (is_sure || was_right)
            {
                return segment;
            }
            bool const is_other = asked.x != words.x && asked.w > 0;
            segment = Segment(p, asked, is_other ? load_new(p.lengths + asked.x) : asked_length);
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
