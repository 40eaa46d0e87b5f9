// The flat rows of a step: laid out at its begin from what the host wrote and slots kept, what slots keep of them, and
// what the host reads.
#include "dflash_kernels.h"
#include "launch.cuh"
#include "philox.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kMostThreads = 1024;
constexpr int kEndThreads = 64; // of each of the things that are kept

// How many rows, logits and cuts there are before something.
struct Count
{
    int rows;
    int logits;
    int cuts;

    __device__ __forceinline__ Count operator+(Count const& other) const
    {
        return {rows + other.rows, logits + other.logits, cuts + other.cuts};
    }

    __device__ __forceinline__ Count from_lane_below(int step) const
    {
        constexpr unsigned kAll = 0xffffffffu;
        return {__shfl_up_sync(kAll, rows, step), __shfl_up_sync(kAll, logits, step), __shfl_up_sync(kAll, cuts, step)};
    }
};

// Adds up what the threads of a block have: of each the sum up to its own. totals: one a warp. By all threads.
__device__ __forceinline__ Count inclusive_sum(Count own, Count* totals)
{
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
    {
        Count const below = own.from_lane_below(step);
        own = lane >= step ? own + below : own;
    }
    if (lane == 31)
    {
        totals[warp] = own;
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w)
    {
        own = own + totals[w];
    }
    __syncthreads();
    return own;
}

// The segments of a step in shared memory, and where each ends.
struct Layout
{
    int4* segments; // [G]: slot, start, first row, count
    int* row_ends; // [G], as the others
    int* logit_ends;
    int* cut_ends;
    Count* totals; // [warps]

    static constexpr int kBytesOfSegment = sizeof(int4) + 3 * sizeof(int);

    __device__ __forceinline__ Layout(int4* shared, int count)
        : segments(shared)
        , row_ends(reinterpret_cast<int*>(shared + count))
        , logit_ends(row_ends + count)
        , cut_ends(logit_ends + count)
        , totals(reinterpret_cast<Count*>(cut_ends + count))
    {
    }

    // Lays all segments out. By all threads of the block.
    __device__ __forceinline__ void fill(dflash_begin_rows_params const& p) const
    {
        Count before = {};
        for (int first = 0; first < p.segment_count; first += blockDim.x)
        {
            int const index = first + threadIdx.x;
            bool const is_there = index < p.segment_count;
            int4 word = is_there ? reinterpret_cast<int4 const*>(p.words)[index] : int4{}; // slot, count, start, logits
            int const cuts = word.z < 0 ? 0 : (word.y + p.cut_rows - 1) / p.cut_rows;
            Count const end = before + inclusive_sum({word.y, word.w, cuts}, totals);
            if (is_there)
            {
                int const start = word.z < 0 && word.y > 0 ? p.kept_start[word.x] : word.z;
                segments[index] = {word.x, start, end.rows - word.y, word.y};
                row_ends[index] = end.rows;
                logit_ends[index] = end.logits;
                cut_ends[index] = end.cuts;
            }
            __syncthreads();
            int const last = min(first + static_cast<int>(blockDim.x), p.segment_count) - 1;
            before = {row_ends[last], logit_ends[last], cut_ends[last]};
        }
    }
};

// The first segment that ends past `at`; `count` where there is none.
__device__ __forceinline__ int segment_at(int const* ends, int count, int at)
{
    int low = 0;
    int high = count;
    while (low < high)
    {
        int const middle = (low + high) / 2;
        if (ends[middle] > at)
        {
            high = middle;
        }
        else
        {
            low = middle + 1;
        }
    }
    return low;
}

__device__ __forceinline__ int before_of(int const* ends, int index)
{
    return index > 0 ? ends[index - 1] : 0;
}

// The rows from a slot's first to one of its own, which is among them: a bit each.
__device__ __forceinline__ uint64_t path_of(int32_t const* parents, int row)
{
    uint64_t path = 1;
    for (int at = row; at > 0; at = min(parents[at], at - 1)) // it ends whatever parents hold
    {
        path |= uint64_t{1} << at;
    }
    return path;
}

// The segments that decode and those that are pieces, each apart: attention of either passes over the other.
__device__ __forceinline__ void write_segments(dflash_begin_rows_params const& p, Layout const& layout, int first_piece)
{
    for (int index = threadIdx.x; index < p.segment_count; index += blockDim.x)
    {
        int4 const segment = layout.segments[index];
        reinterpret_cast<int4*>(p.segments)[index] = segment;
        p.logit_first[index + 1] = layout.logit_ends[index];
        if (index < p.decode_segments)
        {
            reinterpret_cast<int4*>(p.decoding)[index] = index < first_piece ? segment : int4{};
        }
        if (index < p.piece_count)
        {
            int const at = first_piece + index;
            reinterpret_cast<int4*>(p.pieces)[index] = at < p.segment_count ? layout.segments[at] : int4{};
        }
    }
    if (threadIdx.x == 0)
    {
        p.logit_first[0] = 0;
    }
}

__device__ __forceinline__ void write_rows(dflash_begin_rows_params const& p, Layout const& layout, int first_piece)
{
    int const first_prompt_row = before_of(layout.row_ends, first_piece);
    int32_t const* piece_tokens = p.words + 4 * p.segment_count;
    for (int row = threadIdx.x; row < p.rows; row += blockDim.x)
    {
        int const index = segment_at(layout.row_ends, p.segment_count, row);
        int4 const segment = index < p.segment_count ? layout.segments[index] : int4{0, 0, row, 0};
        int const of_segment = row - segment.z;
        int token = 0;
        int position = segment.y + of_segment;
        uint64_t path = 0;
        if (index < first_piece)
        {
            int64_t const kept = int64_t{segment.x} * p.block;
            token = p.tokens[kept + of_segment];
            if (p.parents)
            {
                path = path_of(p.parents + kept, of_segment);
                position = segment.y + __popcll(path) - 1;
            }
        }
        else if (index < p.segment_count)
        {
            token = piece_tokens[row - first_prompt_row];
        }
        p.row_segment[row] = index < p.segment_count ? index : -1;
        p.token_ids[row] = token;
        if (p.parents)
        {
            p.row_position[row] = position;
            p.row_path[row] = path;
        }
    }
}

__device__ __forceinline__ void write_logits(dflash_begin_rows_params const& p, Layout const& layout)
{
    for (int logit = threadIdx.x; logit < p.logit_row_count; logit += blockDim.x)
    {
        int const index = segment_at(layout.logit_ends, p.segment_count, logit);
        int row = 0;
        int slot = 0;
        int position = 0;
        if (index < p.segment_count)
        {
            int4 const segment = layout.segments[index];
            int const of_segment = segment.w - layout.logit_ends[index] + logit; // they are those of its last rows
            row = segment.z + of_segment;
            slot = segment.x;
            position = p.parents ? p.row_position[row] : segment.y + of_segment;
        }
        p.logit_rows[logit] = row;
        p.logit_slot[logit] = slot;
        p.logit_position[logit] = position;
        if (p.seeds)
        {
            p.logit_uniform[logit] = uniform_number(p.seeds[slot], position + 1);
        }
    }
}

__device__ __forceinline__ void write_cuts(dflash_begin_rows_params const& p, Layout const& layout)
{
    for (int cut = threadIdx.x; cut < p.cut_count; cut += blockDim.x)
    {
        int const index = segment_at(layout.cut_ends, p.segment_count, cut);
        int4 part = {};
        if (index < p.segment_count)
        {
            int4 const segment = layout.segments[index];
            int const first = (cut - before_of(layout.cut_ends, index)) * p.cut_rows;
            part = {segment.x, segment.y + first, segment.z + first, min(segment.w - first, p.cut_rows)};
        }
        reinterpret_cast<int4*>(p.cuts)[cut] = part;
    }
}

// One block.
__global__ void __launch_bounds__(kMostThreads) begin_rows_kernel(dflash_begin_rows_params const p)
{
    begin();
    extern __shared__ int4 shared[];
    Layout const layout(shared, p.segment_count);
    layout.fill(p);
    int const first_piece = segment_at(layout.cut_ends, p.segment_count, 0); // only pieces have cuts
    write_segments(p, layout, first_piece);
    write_rows(p, layout, first_piece);
    __syncthreads(); // a tree's positions are read
    write_logits(p, layout);
    write_cuts(p, layout);
}

// What end_rows writes of a segment, each by threads of its own: none waits for what another reads.
enum class Kept
{
    kDecided,
    kRanks,
    kTokens,
    kParents,
    kCount
};

// One block a segment.
__global__ void __launch_bounds__(kEndThreads* static_cast<int>(Kept::kCount))
    end_rows_kernel(dflash_end_rows_params const p)
{
    begin();
    int const index = blockIdx.x;
    int const nth = threadIdx.x % kEndThreads;
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
    int const first = p.logit_first[index];
    int const logits = p.logit_first[index + 1] - first;
    int32_t* const decided = p.decided + int64_t{index} * (1 + p.width + p.depths);
    int64_t const from = int64_t{index} * p.next_rows;
    int64_t const to = int64_t{segment.x} * p.block;
    bool const is_kept = segment.w > 0;
    switch (static_cast<Kept>(threadIdx.x / kEndThreads))
    {
    case Kept::kDecided:
        for (int i = nth; i < p.width; i += kEndThreads)
        {
            decided[1 + i] = i < logits ? p.target_ids[first + i] : 0;
        }
        break;
    case Kept::kRanks:
        if (nth == 0)
        {
            decided[0] = p.accepted[index];
        }
        for (int i = nth; i < p.depths; i += kEndThreads)
        {
            decided[1 + p.width + i] = i + 1 < logits ? p.ranks[first + i + 1] : 0;
        }
        break;
    case Kept::kTokens:
        for (int i = nth; i < p.next_rows; i += kEndThreads)
        {
            int const token = p.next_tokens[from + i];
            if (is_kept)
            {
                p.tokens[to + i] = token;
            }
        }
        break;
    default:
        if (nth == 0 && is_kept)
        {
            p.kept_start[segment.x] = min(p.next_start[index], p.last_start);
        }
        for (int i = nth; p.parents && i < p.next_rows; i += kEndThreads)
        {
            int const parent = p.next_parents ? p.next_parents[from + i] : i - 1;
            if (is_kept)
            {
                p.parents[to + i] = parent;
            }
        }
    }
}

constexpr int kSendThreads = 256;

__global__ void __launch_bounds__(kSendThreads) send_kernel(dflash_send_params const p)
{
    begin();
    for (int i = threadIdx.x; i < p.count; i += kSendThreads)
    {
        p.host[i] = p.numbers[i];
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_begin_rows(dflash_begin_rows_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    int const most = std::max({p->segment_count, p->rows, p->logit_row_count, p->cut_count});
    int const threads = std::min(std::max((most + 31) / 32 * 32, 128), kMostThreads);
    int const bytes = p->segment_count * Layout::kBytesOfSegment + kMostThreads / 32 * static_cast<int>(sizeof(Count));
    bool const is_known = p->segment_count > 0 && p->decode_segments >= 0 && p->decode_segments <= p->segment_count
        && p->piece_count >= 0 && p->piece_count <= p->segment_count && p->rows >= 0 && p->logit_row_count >= 0
        && p->cut_count >= 0 && p->cut_rows > 0 && p->block > 0 && (!p->seeds || p->logit_uniform)
        && (!p->parents || (p->row_position && p->row_path && p->block <= DFLASH_TREE_MOST_ROWS));
    if (!is_known || bytes > 48 * 1024) // some 1,700 segments
    {
        return cudaErrorInvalidValue;
    }
    return launch_kernel(begin_rows_kernel, dim3(1), threads, bytes, stream, *p);
}

extern "C" cudaError_t dflash_end_rows(dflash_end_rows_params const* p, cudaStream_t stream)
{
    if (p->next_rows < 1 || p->next_rows > p->block || p->width < 1 || p->depths < 0 || (p->depths && !p->ranks))
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    int const threads = dflash::kEndThreads * static_cast<int>(dflash::Kept::kCount);
    return dflash::launch_kernel(dflash::end_rows_kernel, dim3(p->segment_count), threads, 0, stream, *p);
}

extern "C" cudaError_t dflash_send(dflash_send_params const* p, cudaStream_t stream)
{
    if (p->count < 0)
    {
        return cudaErrorInvalidValue;
    }
    return p->count == 0 ? cudaSuccess
                         : dflash::launch_kernel(dflash::send_kernel, dim3(1), dflash::kSendThreads, 0, stream, *p);
}
