// The division of a gated delta net among blocks, and a block's shared memory.
#pragma once

#include "delta_net_products.cuh"
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"

namespace dflash
{
namespace delta
{

constexpr int kTaps = 4;
constexpr int kBefore = kTaps - 1; // rows in front of a row that its convolution sees
constexpr int kLane = 4; // numbers that a lane has of a row
constexpr int kMixStride = 20; // of 16 x 16 numbers: rows apart begin in other banks

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
template <typename T, int kSize, int kBlockValues>
struct Division
{
    static constexpr int kValues = kBlockValues; // of a block
    static constexpr int kSplits = kSize / kValues; // blocks of a cluster
    static constexpr int kWarps = kSize / 16; // that hold the state
    static constexpr int kTiles = kValues / 16; // of values, a warp has one
    static constexpr int kParts = kWarps / kTiles; // of keys, a warp has one
    static constexpr int kPartKeys = kSize / kParts;
    static constexpr int kRowsOfWarp = kDeltaRows / kWarps; // that a warp finishes
    static constexpr int kOfLane = (kValues + 31) / 32; // values that a lane has of them
    static constexpr int kWorkers = 32 * kWarps;
    static constexpr bool kIsWhole = kParts == 1; // a warp has all keys: the last one of them solves, too
    static constexpr int kThreads = kWorkers + (kIsWhole ? 0 : 32);
};

// Rows that a segment's state absorbs at once.
__device__ __forceinline__ int count_absorbed(dflash_delta_net_params const& p, int4 const& segment)
{
    return max(segment.w - p.pending, 0);
}

// Whether a segment's only row joins the accepted ones beside the state, which then absorbs nothing.
__device__ __forceinline__ bool joins_pending(int keeps, int count, int accepted)
{
    return count == 1 && accepted > 0 && accepted < keeps;
}

// Pending rows of a state at `length` that a step from `start` on follows.
__device__ __forceinline__ int count_accepted(int start, int length, int pending)
{
    return start == 0 ? 0 : min(max(start - length, 0), pending);
}

// A segment of rows, and how its slot's state stands to it.
struct Segment
{
    int slot;
    int first_row; // among all rows
    int count;
    int absorbed; // rows that the state absorbs at once; those behind them stay beside it
    int accepted; // pending rows of the step before that the state absorbs first
    int window; // the row of the window that the first row's convolution sees first
    int before; // rows in front of the first one that are the sequence's, too
    bool begins; // at position 0: there is nothing before
    bool is_zero; // the state: what lies there is another sequence's

    // Of [slot, start, first row, count]; the state stands at `length`.
    __device__ __forceinline__ Segment(dflash_delta_net_params const& p, int4 const& segment, int length)
        : slot(segment.x)
        , first_row(segment.z)
        , count(segment.w)
        , absorbed(count_absorbed(p, segment))
        , accepted(count_accepted(segment.y, length, p.pending))
        , window(accepted)
        , before(0)
        , begins(segment.y == 0)
        , is_zero(begins || length == 0)
    {
    }

    // The rows that stay beside the state, once it has absorbed those before them.
    __device__ __forceinline__ Segment pending() const
    {
        Segment segment = *this;
        segment.first_row += absorbed;
        segment.count -= absorbed;
        segment.absorbed = 0;
        segment.accepted = absorbed > 0 ? 0 : accepted;
        segment.before = absorbed;
        segment.is_zero = is_zero && absorbed == 0;
        return segment;
    }
};

// Where a block's numbers lie in memory. Blocks: a key head's value heads, and the splits of each (x), key heads (y),
// segments (z).
template <typename T, int kSize, int kBlockValues>
struct Place
{
    using D = Division<T, kSize, kBlockValues>;

    dflash_delta_net_params const& p;
    int head; // value head
    int split; // which of its values
    int key_head;

    __device__ __forceinline__ explicit Place(dflash_delta_net_params const& p)
        : p(p)
        , head(blockIdx.y * (gridDim.x / D::kSplits) + blockIdx.x / D::kSplits)
        , split(blockIdx.x % D::kSplits)
        , key_head(blockIdx.y)
    {
    }

    // The slot of the block's segment as memory has it already: whoever writes it may not be done yet.
    __device__ __forceinline__ int guess_slot() const
    {
        int const slot = *static_cast<int const volatile*>(p.segments + 4 * blockIdx.z);
        return min(max(slot, 0), p.slots - 1);
    }

    // Blocks that read what a key head's value heads share.
    __device__ __forceinline__ static uint32_t readers()
    {
        return gridDim.x;
    }

    __device__ __forceinline__ int channels() const
    {
        return (2 * p.key_heads + p.value_heads) * kSize;
    }

    // Numbers of a row of outputs, or of what is written.
    __device__ __forceinline__ int values_of_row() const
    {
        return p.value_heads * kSize;
    }

    __device__ __forceinline__ int query_channel() const
    {
        return key_head * kSize;
    }

    __device__ __forceinline__ int key_channel() const
    {
        return (p.key_heads + key_head) * kSize;
    }

    __device__ __forceinline__ int first_value() const
    {
        return head * kSize + split * D::kValues;
    }

    __device__ __forceinline__ int value_channel() const
    {
        return 2 * p.key_heads * kSize + first_value();
    }

    __device__ __forceinline__ T const* row(int row) const
    {
        return static_cast<T const*>(p.x) + int64_t{row} * p.x_row_stride;
    }

    __device__ __forceinline__ T* window_row(int slot, int row) const
    {
        return static_cast<T*>(p.window) + (int64_t{slot} * (kBefore + p.pending) + row) * channels();
    }

    // [kValues, kSize]
    __device__ __forceinline__ float* state(int slot) const
    {
        return static_cast<float*>(p.states) + (int64_t{slot} * p.value_heads * kSize + first_value()) * kSize;
    }

    // Of a pending row: what it writes [kValues], its keys [kSize], its decay.
    __device__ __forceinline__ float* writes(int slot, int row) const
    {
        return static_cast<float*>(p.writes) + (int64_t{slot} * p.pending + row) * p.value_heads * kSize
            + first_value();
    }

    __device__ __forceinline__ float* keys(int slot, int row) const
    {
        return static_cast<float*>(p.keys) + ((int64_t{slot} * p.pending + row) * p.key_heads + key_head) * kSize;
    }

    __device__ __forceinline__ float* decay(int slot, int row) const
    {
        return static_cast<float*>(p.decays) + (int64_t{slot} * p.pending + row) * p.value_heads + head;
    }

    // Counts the blocks that have read what a key head's value heads share.
    __device__ __forceinline__ int32_t* counter(int slot) const
    {
        return p.counters + int64_t{slot} * p.key_heads + key_head;
    }
};

template <typename T, int kSize, int kBlockValues>
struct Shared
{
    using D = Division<T, kSize, kBlockValues>;

    static constexpr int kValueStride = D::kValues + 4;
    static constexpr int kKeyStride = D::kPartKeys + 8; // of pending keys
    static constexpr int kRawStride = 2 * kSize + D::kValues;
    static constexpr int kMix = kDeltaRows * kMixStride;
    static constexpr int kPart = 2 * kDeltaRows * kValueStride;
    static constexpr int kRows = kDeltaRows * kValueStride;
    static_assert(kDeltaRows * kKeyStride <= kPart);
    static constexpr int kPairStride = 4 * (kSize + 2); // of two pending rows' keys, in parts
    static constexpr int kParts = D::kIsWhole
        ? (kDeltaRows / 2 * kPairStride > kPart ? kDeltaRows / 2 * kPairStride : kPart)
        : D::kParts * kPart;
    static constexpr int kGates = D::kIsWhole ? kDeltaRows * D::kValues : 0; // of the outputs
    static constexpr int kSquares = (D::kIsWhole ? D::kWarps : D::kSplits) * kDeltaRows;

    SplitRows<kSize> keys;
    SplitRows<kSize> queries;
    T* raw; // [3 + 16, queries, keys, values] before the convolution
    T* gates; // [16, kValues] of the outputs, where warps have all keys
    float* values; // [16, kValues]: v, then what the state has not of it
    float* writes; // [16, kValues]: U, and before it the pending rows'
    float* parts; // [kParts, keys' and queries', 16, kValues]: of what rows read; before them the pending rows' keys,
                  // of warps that have all: [8 pairs of rows, kSize, both high parts and both low ones]
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
    float* squares; // [kSplits, 16]: sums over a block's values; of warps that have all keys: [kWarps, 16]
    uint32_t squares_barrier;

    static constexpr int kRawBytes = (kBefore + kDeltaRows) * kRawStride * static_cast<int>(sizeof(T));
    static constexpr int kGatesBytes = kGates * static_cast<int>(sizeof(T));
    static constexpr int kBytes = kRawBytes + kGatesBytes
        + 4 * (2 * SplitRows<kSize>::kWords + 2 * kRows + kParts + 6 * kMix + 3 * kDeltaRows + 4 + kSquares + 2);

    __device__ __forceinline__ explicit Shared(float* memory)
        : keys{reinterpret_cast<uint32_t*>(memory)}
        , queries{keys.words + SplitRows<kSize>::kWords}
        , raw(reinterpret_cast<T*>(queries.words + SplitRows<kSize>::kWords))
        , gates(raw + kRawBytes / static_cast<int>(sizeof(T)))
        , values(reinterpret_cast<float*>(gates) + kGatesBytes / 4)
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

} // namespace delta
} // namespace dflash
