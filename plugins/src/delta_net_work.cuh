// Segments of a gated delta net's rows, and where the numbers of a value head lie in memory.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"

namespace dflash
{

constexpr int kDeltaRows = 16; // of a chunk, whose products are taken together

namespace delta
{

constexpr int kTaps = 4;
constexpr int kBefore = kTaps - 1; // rows in front of a row that its convolution sees

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

// Has an address worked out here, not where it is read.
template <typename T>
__device__ __forceinline__ void settle(T*& address)
{
    asm volatile("" : "+l"(address));
}

// Likewise a number.
__device__ __forceinline__ void settle(float& x)
{
    asm volatile("" : "+f"(x));
}

// The object so many times `bytes` behind one, by one instruction: the compiler takes four.
template <typename T>
__device__ __forceinline__ T* moved(T* from, int times, int bytes)
{
    uint64_t to;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(times), "r"(bytes), "l"(reinterpret_cast<uint64_t>(from)));
    return reinterpret_cast<T*>(to);
}

// Likewise a number of a tensor.
template <typename T>
__device__ __forceinline__ void settle(T& x)
{
    if constexpr (sizeof(T) == 2)
    {
        asm volatile("" : "+h"(reinterpret_cast<uint16_t&>(x)));
    }
    else
    {
        asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(x)));
    }
}

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

    // Rows whose products the state takes to absorb those that were accepted: the others of these are zeros.
    __device__ __forceinline__ int count_taken() const
    {
        return accepted > kDeltaRows / 2 ? kDeltaRows : accepted > 0 ? kDeltaRows / 2 : 0;
    }
};

// Where the state of a segment's slot stands: asked for beside the segment's own load, not behind it, if that is the
// slot that was guessed.
__device__ __forceinline__ int load_length(dflash_delta_net_params const& p, int4 const& segment, int guess)
{
    int length = load_new(p.lengths + guess);
    if (segment.x != guess && segment.w > 0)
    {
        length = load_new(p.lengths + segment.x);
    }
    return length;
}

// The slot of a segment as memory has it already: whoever writes it may not be done yet.
__device__ __forceinline__ int guess_slot(dflash_delta_net_params const& p, int index)
{
    int const slot = *static_cast<int const volatile*>(p.segments + 4 * index);
    return min(max(slot, 0), p.slots - 1);
}

// A segment as it lies in memory, and where its slot's state stands.
struct SegmentWords
{
    int4 at; // slot, start, first row, count
    int length;

    __device__ __forceinline__ bool operator==(SegmentWords const& other) const
    {
        return at.x == other.at.x && at.y == other.at.y && at.z == other.at.z && at.w == other.at.w
            && length == other.length;
    }
};

// A segment as memory has it already, which whoever writes it may not have done: where it is right, what a block loads
// need not wait for it. By whole warps.
struct Guess
{
    dflash_delta_net_params const& p;
    SegmentWords const guessed; // within what there is

    __device__ __forceinline__ Guess(dflash_delta_net_params const& p, SegmentWords const& guessed)
        : p(p)
        , guessed(guessed)
    {
    }

    __device__ __forceinline__ Guess(dflash_delta_net_params const& p, int index)
        : Guess(p, load_early(p, index))
    {
    }

    __device__ __forceinline__ static SegmentWords load_early(dflash_delta_net_params const& p, int index)
    {
        constexpr int kLanes = 32;
        int const lane = static_cast<int>(threadIdx.x) % kLanes;
        int const of_lane = load_new(p.lengths + min(lane, p.slots - 1)); // beside the segment, not behind it
        int4 words = load_new(reinterpret_cast<int4 const*>(p.segments) + index);
        words.x = min(max(words.x, 0), p.slots - 1);
        words.y = max(words.y, 0);
        words.z = min(max(words.z, 0), p.rows - 1);
        words.w = min(max(words.w, 0), p.rows - words.z);
        int length = __shfl_sync(0xffffffffu, of_lane, words.x % kLanes);
        if (words.x >= kLanes)
        {
            length = load_new(p.lengths + words.x);
        }
        return {words, max(length, 0)};
    }

    __device__ __forceinline__ Segment segment() const
    {
        return Segment(p, guessed.at, guessed.length);
    }

    // Waits for the kernels before this one by `wait_for_all`, and loads what a segment needs: by the guess and, if it
    // was wrong, again. Returns the segment. `find` works out where that lies: before the wait, for its code, and the
    // kernel's parameters, come from afar. A guess of no rows is loaded as well: nothing stands between the wait and
    // the loads. `source` is asked what the segment is behind the wait, and says so behind the loads; it is told that
    // these have begun, and that those of the right segment have been made, too.
    template <typename Wait, typename Find, typename Load, typename Source>
    __device__ __forceinline__ Segment load(
        Wait const& wait_for_all, Find const& find, Load const& load, Source source) const
    {
        Segment segment = this->segment();
        find(segment);
        wait_for_all();
        source.ask();
        load();
        source.began();
        SegmentWords const found = source.hear();
        if (!(found == guessed))
        {
            segment = Segment(p, found.at, found.length);
            if (segment.count > 0)
            {
                find(segment);
                load();
            }
            source.loaded();
        }
        return segment;
    }
};

// Memory, which says what a segment is once the kernels before this one are done.
struct SegmentSource
{
    Guess const& guess;
    int const index;
    SegmentWords asked;

    __device__ __forceinline__ SegmentSource(Guess const& guess, int index)
        : guess(guess)
        , index(index)
    {
    }

    __device__ __forceinline__ void ask()
    {
        asked.at = load_new(reinterpret_cast<int4 const*>(guess.p.segments) + index);
        asked.length = load_new(guess.p.lengths + guess.guessed.at.x); // beside the segment, not behind it
    }

    __device__ __forceinline__ void began() const
    {
    }

    __device__ __forceinline__ SegmentWords hear()
    {
        if (asked.at.x != guess.guessed.at.x && asked.at.w > 0)
        {
            asked.length = load_new(guess.p.lengths + asked.at.x);
        }
        return asked;
    }

    __device__ __forceinline__ void loaded() const
    {
    }
};

template <int kSize>
__device__ __forceinline__ int channels_of(dflash_delta_net_params const& p)
{
    return (2 * p.key_heads + p.value_heads) * kSize;
}

// A row of what a slot's next convolution sees.
template <typename T, int kSize>
__device__ __forceinline__ T* window_row(dflash_delta_net_params const& p, int slot, int row)
{
    return static_cast<T*>(p.window) + int64_t{slot * (kBefore + p.pending) + row} * channels_of<kSize>(p);
}

// Counts one of those that read what a key head's value heads share, and says how many did before: a count that the
// last of them leaves at 0. Relaxed: nothing was written, and what was read has come, for it lies in shared memory.
__device__ __forceinline__ uint32_t count_reader(int32_t* counter, uint32_t others)
{
    uint32_t before = 0;
    asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(others) : "memory");
    return before;
}

// Where a value head's numbers lie in memory. What counts heads of all slots' rows has 32 bits: 64 take several
// instructions, in code that comes from memory, in front of the loads that a block waits for.
template <typename T, int kSize>
struct Place
{
    dflash_delta_net_params const& p;
    int head; // value head
    int key_head;

    __device__ __forceinline__ Place(dflash_delta_net_params const& p, int head, int key_head)
        : p(p)
        , head(head)
        , key_head(key_head)
    {
    }

    __device__ __forceinline__ int channels() const
    {
        return channels_of<kSize>(p);
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
        return head * kSize;
    }

    __device__ __forceinline__ int value_channel() const
    {
        return 2 * p.key_heads * kSize + first_value();
    }

    __device__ __forceinline__ T const* row(int row) const
    {
        return static_cast<T const*>(p.x) + int64_t{row} * static_cast<int>(p.x_row_stride);
    }

    __device__ __forceinline__ T* window_row(int slot, int row) const
    {
        return delta::window_row<T, kSize>(p, slot, row);
    }

    // Among those of all slots.
    __device__ __forceinline__ int pending_row(int slot, int row) const
    {
        return slot * p.pending + row;
    }

    // [kSize values, kSize keys]
    __device__ __forceinline__ float* state(int slot) const
    {
        return static_cast<float*>(p.states) + int64_t{slot * p.value_heads + head} * (kSize * kSize);
    }

    // Of a pending row: what it writes [kSize], its keys [kSize], its decay.
    __device__ __forceinline__ float* writes(int slot, int row) const
    {
        return static_cast<float*>(p.writes) + int64_t{pending_row(slot, row) * p.value_heads + head} * kSize;
    }

    __device__ __forceinline__ float* keys(int slot, int row) const
    {
        return static_cast<float*>(p.keys) + int64_t{pending_row(slot, row) * p.key_heads + key_head} * kSize;
    }

    __device__ __forceinline__ float* decay(int slot, int row) const
    {
        return static_cast<float*>(p.decays) + (pending_row(slot, row) * p.value_heads + head);
    }

    // Counts the blocks that have read what a key head's value heads share.
    __device__ __forceinline__ int32_t* counter(int slot) const
    {
        return p.counters + (slot * p.key_heads + key_head);
    }
};

} // namespace delta
} // namespace dflash
