// Acceptance of drafts that are trees: the path that is accepted, and where its taps, keys and values go.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 128;
constexpr int kMovedTogether = 8; // rows that a thread has on their way
constexpr unsigned kAll = 0xffffffffu;

// Bits of both halves of a tree's rows, of which each lane has one. is_set(half) is called by all lanes of a warp.
template <typename IsSet>
__device__ __forceinline__ uint64_t row_bits(IsSet is_set)
{
    uint64_t const low = __ballot_sync(kAll, is_set(0));
    uint64_t const high = __ballot_sync(kAll, is_set(1));
    return high << 32 | low;
}

__device__ __forceinline__ int highest(uint64_t bits)
{
    return 63 - __clzll(static_cast<long long>(bits));
}

__device__ __forceinline__ int lowest(uint64_t bits)
{
    return __ffsll(static_cast<long long>(bits)) - 1;
}

__device__ __forceinline__ uint64_t bit_of(int row)
{
    return uint64_t{1} << row;
}

// The bits that are lower than a row's.
__device__ __forceinline__ uint64_t bits_below(int row)
{
    return bit_of(row) - 1;
}

__device__ __forceinline__ int4 segment_of(dflash_accept_tree_params const& p, int index)
{
    return reinterpret_cast<int4 const*>(p.segments)[index];
}

// What is decided of a segment. Each warp that asks finds it for itself, by all its lanes; a lane has two of the rows.
// All that they have is read at once, and what others have is asked of them.
struct Verdict
{
    int4 segment; // slot, start, first row, count
    int first_logit;
    int logits;
    int before; // rows without logits
    bool is_idle;
    uint64_t paths[2]; // of the lane's rows; 0: there is no such row
    int targets[2]; // the target's choices there
    uint64_t path; // the accepted rows; 0: it is idle

    __device__ __forceinline__ Verdict(dflash_accept_tree_params const& p, int index)
        : segment(segment_of(p, index))
        , first_logit(p.logit_first[index])
        , logits(p.logit_first[index + 1] - first_logit)
        , before(segment.w - logits)
        , is_idle(segment.w <= 0 || logits <= 0)
    {
        int const drafts = p.imposed ? p.imposed[index] : 0;
        int const first = segment.z + before;
        int const rows = is_idle ? 0 : logits;
        int tokens[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            bool const is_row = row(half) < rows;
            paths[half] = is_row ? p.row_path[first + row(half)] : 0;
            tokens[half] = is_row ? p.token_ids[first + row(half)] : 0;
            targets[half] = row(half) < logits ? p.target_ids[first_logit + row(half)] : 0;
        }
        path = rows < 2 ? rows : p.imposed ? imposed(drafts) : deepest(tokens);
    }

    static __device__ __forceinline__ int row(int half)
    {
        return threadIdx.x % 32 + 32 * half;
    }

    __device__ __forceinline__ int accepted() const
    {
        return is_idle ? 0 : __popcll(path) - 1;
    }

    __device__ __forceinline__ int committed() const
    {
        return is_idle ? 0 : before + __popcll(path);
    }

    // The target's choice at a row, which each lane may ask for of another. By all lanes of a warp.
    __device__ __forceinline__ int target(int of_row) const
    {
        int const low = __shfl_sync(kAll, targets[0], of_row % 32);
        int const high = __shfl_sync(kAll, targets[1], of_row % 32);
        return of_row < 32 ? low : high;
    }

    // The flat row whose tokens are final at a row's place in the segment, the same for all lanes; behind the final
    // ones the place's own. By all lanes of a warp.
    __device__ __forceinline__ int final_row(int place) const
    {
        int const depth = place - before;
        if (depth < 0 || depth >= __popcll(path))
        {
            return segment.z + place;
        }
        uint64_t const there = row_bits(
            [&](int half) { return (path >> row(half) & 1) && __popcll(path & bits_below(row(half))) == depth; });
        return segment.z + before + lowest(there);
    }

    // Places of the lane's rows among their siblings, from 1, of those that are accepted drafts; else 0. What an
    // accepted row follows are the accepted ones before it. By all lanes of a warp.
    __device__ __forceinline__ void find_ranks(int (&ranks)[2]) const
    {
        ranks[0] = ranks[1] = 0;
        for (uint64_t left = path & ~uint64_t{1}; left; left &= left - 1)
        {
            int const draft = lowest(left);
            uint64_t const parent = path & bits_below(draft);
            uint64_t const siblings
                = row_bits([&](int half) { return paths[half] && (paths[half] ^ bit_of(row(half))) == parent; });
            int const rank = 1 + __popcll(siblings & bits_below(draft));
            ranks[0] = row(0) == draft ? rank : ranks[0];
            ranks[1] = row(1) == draft ? rank : ranks[1];
        }
    }

private:
    // The rows from the first to the last one of those whose tokens the target chose, as it did those they follow.
    __device__ __forceinline__ uint64_t deepest(int const (&tokens)[2]) const
    {
        uint64_t const right = row_bits(
            [&](int half)
            {
                uint64_t const parents = paths[half] & ~bit_of(row(half));
                int const chosen = target(parents ? highest(parents) : 0);
                return row(half) == 0 || (parents && tokens[half] == chosen);
            });
        int const last = highest(row_bits([&](int half) { return paths[half] && !(paths[half] & ~right); }));
        uint64_t const low = __shfl_sync(kAll, paths[0], last % 32);
        uint64_t const high = __shfl_sync(kAll, paths[1], last % 32);
        return last < 32 ? low : high;
    }

    // A path of so many drafts, or of as many as there are: down the run of rows in front, whose last one moves behind
    // it.
    __device__ __forceinline__ uint64_t imposed(int count) const
    {
        uint64_t const runs = row_bits(
            [&](int half) { return row(half) < logits && paths[half] == (~uint64_t{0} >> (63 - row(half))); });
        int const run = ~runs ? lowest(~runs) : 64;
        int const drafts = min(max(count, 0), logits - 1);
        return bits_below(drafts) | bit_of(drafts < run ? drafts : logits - 1);
    }
};

// Writes what is decided of a segment; of the last one also the choices of padding. By all lanes of a warp.
__device__ __forceinline__ void tell_verdict(dflash_accept_tree_params const& p, int index)
{
    Verdict const verdict(p, index);
    uint64_t const path = verdict.path;
    int const bonus = verdict.target(path ? highest(path) : 0);
    if (threadIdx.x == 0)
    {
        p.accepted[index] = verdict.accepted();
        p.committed[index] = verdict.committed();
        p.bonus[index] = verdict.is_idle ? 0 : bonus;
        p.next_start[index] = verdict.is_idle ? 0 : verdict.segment.y + verdict.committed();
        p.path[index] = path;
    }
    int const accepted = __popcll(path);
    int ranks[2] = {};
    if (p.ranks)
    {
        verdict.find_ranks(ranks);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
    {
        auto const put = [&](int place, int rank)
        {
            p.choices[verdict.first_logit + place] = verdict.targets[half];
            if (p.ranks)
            {
                p.ranks[verdict.first_logit + place] = rank;
            }
        };
        int const row = Verdict::row(half);
        if (path >> row & 1)
        {
            put(__popcll(path & bits_below(row)), ranks[half]);
        }
        if (row >= accepted && row < verdict.logits)
        {
            put(row, 0);
        }
    }
    if (index == p.segment_count - 1)
    {
        for (int at = verdict.first_logit + verdict.logits + threadIdx.x; at < p.logit_row_count; at += 32)
        {
            p.choices[at] = p.target_ids[at];
        }
    }
}

// Copies the tap of the row that is final at a row's place.
__device__ __forceinline__ void join_row(dflash_accept_tree_params const& p, int row, int nth)
{
    int const index = p.row_segment[row];
    int from_row = row;
    if (index >= 0)
    {
        Verdict const verdict(p, index);
        from_row = verdict.final_row(row - verdict.segment.z);
    }
    int const vectors = p.size / 8; // of a tap's row
    auto const* from = static_cast<int4 const*>(p.taps[nth]) + int64_t{from_row} * vectors;
    auto* to = static_cast<int4*>(p.joined) + (int64_t{row} * p.tap_count + nth) * vectors;
    constexpr int kAtOnce = 4; // on their way
    for (int first = threadIdx.x; first < vectors; first += kAtOnce * kThreads)
    {
        int4 held[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            if (int const at = first + i * kThreads; at < vectors)
            {
                held[i] = load_new(from + at);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            if (int const at = first + i * kThreads; at < vectors)
            {
                to[at] = held[i];
            }
        }
    }
}

// A cache of the target, as the host lists it.
struct Cache
{
    int64_t address;
    int64_t heads;
    int64_t row_bytes;
    int64_t is_windowed; // whether its pages are those of the other table
};

// Where the rows of a tree lie in a cache: in one page, or in it and the next one.
struct Places
{
    char* page; // a thread's own 16 bytes of its first row
    char* next_page; // as if its first row were behind this one's last
    int first; // the tree's first row in the page
    int page_rows;
    int row_bytes;

    __device__ __forceinline__ int4* at(int row) const
    {
        int const there = first + row;
        return reinterpret_cast<int4*>((there < page_rows ? page : next_page) + int64_t{there} * row_bytes);
    }
};

// Moves rows of a path in a cache to their positions; a thread has 16 bytes of all of them. Row d of it is moved from
// where it lies, which is not before d, so that none is overwritten which is still to be read.
__device__ __forceinline__ void move_path(dflash_accept_tree_params const& p, Cache const& cache, int part, int index)
{
    int4 const segment = segment_of(p, index);
    int32_t const* table = cache.is_windowed ? p.window_table : p.page_table;
    table += segment.x * (cache.is_windowed ? p.window_table_stride : p.page_table_stride);
    int const nth = segment.y / p.page_rows;
    int const page = segment.w > 0 ? table[nth] : 0; // on its way while the verdict is found
    uint64_t const path = Verdict(p, index).path;
    int const row_bytes = static_cast<int>(cache.row_bytes);
    int const byte = (part * kThreads + threadIdx.x) * 16;
    int const head = byte / row_bytes;
    if ((path & (path + 1)) == 0 || head >= cache.heads) // all are in their places, or there is no such byte
    {
        return;
    }
    int const first = segment.y - nth * p.page_rows;
    int const next_page = first + highest(path) < p.page_rows ? page : table[nth + 1];
    int64_t const head_bytes = int64_t{p.page_rows} * row_bytes;
    int64_t const page_bytes = cache.heads * head_bytes;
    char* const own = reinterpret_cast<char*>(cache.address) + head * head_bytes + (byte - head * row_bytes);
    Places const places{
        own + page * page_bytes, own + next_page * page_bytes - head_bytes, first, p.page_rows, row_bytes};

    int depth = lowest(~path); // the first that is not in its place
    for (uint64_t left = path >> depth << depth; left;)
    {
        int4 rows[kMovedTogether];
        uint64_t ahead = left;
#pragma unroll
        for (int i = 0; i < kMovedTogether; ++i)
        {
            if (ahead)
            {
                rows[i] = *places.at(lowest(ahead));
                ahead &= ahead - 1;
            }
        }
#pragma unroll
        for (int i = 0; i < kMovedTogether; ++i)
        {
            if (left)
            {
                *places.at(depth++) = rows[i];
                left &= left - 1;
            }
        }
    }
}

__host__ __device__ __forceinline__ int parts_of_move(dflash_accept_tree_params const& p)
{
    return (p.most_bytes / 16 + kThreads - 1) / kThreads;
}

// A block a segment, then one a row and tap, then one a decode segment, cache and part of a position's bytes. None
// waits for another: each finds the verdict that it needs.
__global__ void __launch_bounds__(kThreads) accept_tree_kernel(dflash_accept_tree_params const p)
{
    trigger();
    int block = blockIdx.x;
    if (block < p.segment_count)
    {
        wait();
        if (threadIdx.x < 32)
        {
            tell_verdict(p, block);
        }
        return;
    }
    block -= p.segment_count;
    if (block < p.rows * p.tap_count)
    {
        wait();
        join_row(p, block / p.tap_count, block % p.tap_count);
        return;
    }
    block -= p.rows * p.tap_count;
    int const parts = parts_of_move(p);
    int const of_parts = block / parts;
    // The caches are the same at every step: they are read before the kernel ahead has ended.
    Cache const cache = reinterpret_cast<Cache const*>(p.caches)[of_parts % p.cache_count];
    wait();
    move_path(p, cache, block % parts, of_parts / p.cache_count);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_accept_tree(dflash_accept_tree_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_joined = p->tap_count == 0
        || (p->tap_count > 0 && p->tap_count <= DFLASH_MOST_JOINED && p->size > 0 && p->size % 8 == 0
            && p->row_segment);
    bool const is_moved
        = p->cache_count == 0 || (p->cache_count > 0 && p->page_rows > 0 && p->most_bytes > 0 && p->page_table);
    bool const is_known = p->rows >= 0 && p->decode_segments >= 0 && p->decode_segments <= p->segment_count && is_joined
        && is_moved && !(p->imposed && p->ranks);
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    int64_t const moves = p->cache_count ? int64_t{parts_of_move(*p)} * p->cache_count * p->decode_segments : 0;
    int64_t const blocks = p->segment_count + int64_t{p->rows} * p->tap_count + moves;
    if (blocks > INT32_MAX)
    {
        return cudaErrorInvalidValue;
    }
    return launch_kernel(accept_tree_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, *p);
}
