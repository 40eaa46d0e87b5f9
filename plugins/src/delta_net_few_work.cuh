// The division of few value heads among blocks, and a block's shared memory.
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
constexpr int kLane = 4; // numbers that a lane has of a row

// Not `bar.sync`, all threads of which execute the same instruction: here warps of several branches meet.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void meet()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Arrives at a barrier that others meet at.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void report()
{
    asm volatile("barrier.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Barriers: 0 is all threads'.
constexpr int kWorkersMeet = 1;
constexpr int kProductsAreThere = 2;
constexpr int kPartMeets = 3; // and on, one for each part of the keys

// The blocks of a cluster share a head: each has some of its values, and all of its keys.
template <typename T>
struct Division
{
    static constexpr int kValues = 32; // of a block
    static constexpr int kSplits = kSize / kValues; // blocks of a cluster
    static constexpr int kWarps = kSize / 16; // that hold the state
    static constexpr int kTiles = kValues / 16; // of values, a warp has one
    static constexpr int kParts = kWarps / kTiles; // of keys, a warp has one
    static constexpr int kPartKeys = kSize / kParts;
    static constexpr int kRowsOfWarp = kDeltaRows / kWarps; // that a warp finishes
    static constexpr int kWorkers = 32 * kWarps;
    static constexpr int kThreads = kWorkers + 32;
    static_assert(kWarps == 8 && kValues == 32 && kSize == 32 * kLane); // as work is given to warps and lanes
};

// Where a block's numbers lie in memory. Blocks: a key head's value heads, and the splits of each (x), key heads (y),
// segments (z).
template <typename T>
struct Place : delta::Place<T, kSize>
{
    using D = Division<T>;
    using OfHead = delta::Place<T, kSize>;

    int split; // which of the head's values

    __device__ __forceinline__ explicit Place(dflash_delta_net_params const& p)
        : OfHead(p, blockIdx.y * (gridDim.x / D::kSplits) + blockIdx.x / D::kSplits, blockIdx.y)
        , split(blockIdx.x % D::kSplits)
    {
    }

    __device__ __forceinline__ int first_value() const
    {
        return OfHead::first_value() + split * D::kValues;
    }

    __device__ __forceinline__ int value_channel() const
    {
        return OfHead::value_channel() + split * D::kValues;
    }

    // [kValues, kSize]
    __device__ __forceinline__ float* state(int slot) const
    {
        return OfHead::state(slot) + split * D::kValues * kSize;
    }

    // What a pending row writes [kValues].
    __device__ __forceinline__ float* writes(int slot, int row) const
    {
        return OfHead::writes(slot, row) + split * D::kValues;
    }
};

template <typename T>
struct Shared
{
    using D = Division<T>;

    static constexpr int kValueStride = D::kValues + 4;
    static constexpr int kKeyStride = D::kPartKeys + 8; // of pending keys
    static constexpr int kRawStride = 2 * kSize + D::kValues;
    static constexpr int kMix = kDeltaRows * kMixStride;
    static constexpr int kPart = 2 * kDeltaRows * kValueStride;
    static constexpr int kRows = kDeltaRows * kValueStride;
    static_assert(kDeltaRows * kKeyStride <= kPart);
    static constexpr int kParts = D::kParts * kPart;
    static constexpr int kSquares = D::kSplits * kDeltaRows;

    SplitRows<kSize> keys;
    SplitRows<kSize> queries;
    T* raw; // [3 + 16, queries, keys, values] before the convolution
    float* values; // [16, kValues]: v, then what the state has not of it
    float* writes; // [16, kValues]: U, and before it the pending rows'
    float* parts; // [kParts, keys' and queries', 16, kValues]: of what rows read; before them the pending rows' keys
    float* products; // [2 halves of the keys, k k and q k, 16, 16]
    float* lower; // [16, 16]: A transposed
    float* reads; // [16, 16]: D (q k)
    float* solved; // [16, 16]: (I + A)^-1 with the rows' shares
    float* weights; // [16, 16]: D
    float* decays; // [16] each
    float* kept; // E
    float* pending_behind; // what is left of a row behind the last
    float* pending_kept; // [1], of the state behind the pending rows
    int* is_last; // [1]
    float* squares; // [kSplits, 16]: sums over a block's values
    uint32_t squares_barrier;

    static constexpr int kRawBytes = (kBefore + kDeltaRows) * kRawStride * static_cast<int>(sizeof(T));
    static constexpr int kBytes = kRawBytes
        + 4 * (2 * SplitRows<kSize>::kWords + 2 * kRows + kParts + 6 * kMix + 3 * kDeltaRows + 4 + kSquares + 2);

    __device__ __forceinline__ explicit Shared(float* memory)
        : keys{reinterpret_cast<uint32_t*>(memory)}
        , queries{keys.words + SplitRows<kSize>::kWords}
        , raw(reinterpret_cast<T*>(queries.words + SplitRows<kSize>::kWords))
        , values(reinterpret_cast<float*>(raw) + kRawBytes / 4)
        , writes(values + kRows)
        , parts(writes + kRows)
        , products(parts + kParts)
        , lower(products)
        , reads(products + kMix)
        , solved(products + 4 * kMix)
        , weights(solved + kMix)
        , decays(weights + kMix)
        , kept(decays + kDeltaRows)
        , pending_behind(kept + kDeltaRows)
        , pending_kept(pending_behind + kDeltaRows)
        , is_last(reinterpret_cast<int*>(pending_kept + 1))
        , squares(pending_kept + 4)
        , squares_barrier(shared_address(squares + kSquares))
    {
    }

    __device__ __forceinline__ SplitRows<kSize> rows(bool is_query) const
    {
        return {keys.words + (is_query ? SplitRows<kSize>::kWords : 0)};
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
