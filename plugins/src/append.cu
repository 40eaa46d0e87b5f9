// Norm of heads, RoPE and append, of a block's rows and of the context rows before it, or of a step's flat rows.
#include "dflash_kernels.h"
#include "element.cuh"
#include "heads.cuh"
#include "launch.cuh"

#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kThreads = 128;
// How the heads of all rows are divided: parts of so many heads of one row, first those of qkv, then of the context.
struct Division
{
    int heads_each; // of a part, which the same lanes compute one after the other
    int block_rows;
    int block_parts; // of a row
    int context_parts;
};

// Some neighbouring heads of a row: queries, then keys, then values.
struct Heads
{
    bool in_block; // of qkv, else of the context
    int row; // of the slot, or of all segments
    int first;
    int past;

    __device__ __forceinline__ Heads(dflash_append_params const& p, Division const& division, int nth)
    {
        int const block = division.block_rows * division.block_parts;
        in_block = nth < block;
        nth -= in_block ? 0 : block;
        int const parts = in_block ? division.block_parts : division.context_parts;
        row = static_cast<unsigned>(nth) / static_cast<unsigned>(parts);
        first = (in_block ? 0 : p.heads) + (nth - row * parts) * division.heads_each;
        past = min(first + division.heads_each, p.heads + 2 * p.kv_heads);
    }
};

// A row, and where it goes.
struct Row
{
    bool is_there; // else there is nothing to do
    bool is_padding; // a row of no segment
    int slot; // of the caches
    int position; // where it lies
    int rotation; // the position that it is rotated by
};

// Of a slot's rows.
__device__ __forceinline__ Row row_of_slot(dflash_append_params const& p, Heads const& heads, int slot)
{
    int const committed = p.committed ? p.committed[slot] : p.context_rows;
    bool const is_there = heads.in_block || heads.row < min(committed, p.context_rows);
    int const position = p.start[slot] + (heads.in_block ? committed : 0) + heads.row;
    return {is_there, false, slot, position, position};
}

// Of all segments' rows.
__device__ __forceinline__ Row row_of_segments(dflash_append_params const& p, Heads const& heads)
{
    bool const is_after = heads.in_block && p.block > 0; // behind the segment's own rows
    int const nth = is_after ? heads.row / p.block : p.row_segment[heads.row];
    if (nth < 0)
    {
        return {heads.in_block, true, 0, 0, 0};
    }
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[nth]; // slot, start, first row, count
    int const committed = p.committed ? p.committed[nth] : segment.w;
    int const of_segment = heads.row - (is_after ? nth * p.block : segment.z);
    bool const is_there = is_after ? segment.w > 0 : heads.in_block || of_segment < committed;
    int const position = segment.y + of_segment + (is_after ? committed : 0);
    bool const is_of_tree = p.row_position && heads.in_block && !is_after;
    return {is_there, false, segment.x, position, is_of_tree ? p.row_position[heads.row] : position};
}

// Where a row of a position lies in the caches, of the first head.
__device__ __forceinline__ int64_t place_of(dflash_append_params const& p, Row const& to)
{
    int page = to.slot;
    int row = to.position;
    if (p.page_table)
    {
        int const nth = row / p.page_rows;
        page = p.page_table[to.slot * p.page_table_stride + nth];
        row -= nth * p.page_rows;
    }
    return page * p.cache_slot_stride + int64_t{row} * p.head_size;
}

// Where the heads of a row are read.
template <typename T>
struct Source
{
    T const* row; // of queries and keys, as if keys came behind queries
    T const* values; // as if they came behind both

    __device__ __forceinline__ Source(dflash_append_params const& p, Heads const& heads, int slot)
    {
        if (heads.in_block)
        {
            int const nth = p.block > 0 ? heads.row / p.block : slot;
            int const of_block = heads.row - (p.block > 0 ? nth * p.block : 0);
            row = static_cast<T const*>(p.qkv) + nth * p.qkv_slot_stride + of_block * p.qkv_row_stride;
            values = row - (p.keys_as_values ? p.kv_heads * p.head_size : 0);
        }
        else
        {
            int64_t const at = slot * p.context_slot_stride + heads.row * p.context_row_stride;
            row = static_cast<T const*>(p.context_k) + at - p.heads * p.head_size;
            values = static_cast<T const*>(p.context_v) + at - (p.heads + p.kv_heads) * p.head_size;
        }
    }

    __device__ __forceinline__ T const* of(dflash_append_params const& p, int head) const
    {
        return (head < p.heads + p.kv_heads ? row : values) + head * p.head_size;
    }
};

// Computes some heads of a row and stores them, or for a rehearsal nothing. C: the type of the caches.
template <typename T, typename C, int D>
__device__ __forceinline__ void append(
    dflash_append_params const& p, Heads const& heads, int slot, Source<T> const& source, bool rehearses)
{
    using H = Head<T, D>;
    auto next = H::load_anew(source.of(p, heads.first)); // on its way while it is found out where the row goes
    Row to{true, false, 0, 0, 0};
    if (!rehearses)
    {
        to = p.segments ? row_of_segments(p, heads) : row_of_slot(p, heads, slot);
    }
    if (!to.is_there)
    {
        return;
    }
    int64_t const query = (int64_t{slot} * p.rows + heads.row) * p.heads * D; // its row of queries
    T* const queries = static_cast<T*>(p.q_out) + query;
    bool const is_dropped = to.is_padding || to.position < 0 || to.position >= p.cache_rows;
    int const past = is_dropped ? min(heads.past, p.heads) : heads.past;
    if (to.is_padding)
    {
        for (int head = heads.first; head < past; ++head)
        {
            H::store_zeros(queries + head * D);
            H::store_zeros(static_cast<T*>(p.out) + query + head * D);
        }
        return;
    }

    int const rotary_size = p.rotary_size > 0 ? p.rotary_size : D;
    int const rotary_lanes = rotary_size / H::kVector;
    int64_t const table_row = int64_t{min(max(to.rotation, 0), p.positions - 1)} * (rotary_size / 2);
    int64_t const place = past > p.heads && !rehearses ? place_of(p, to) : 0;
#pragma unroll 1
    for (int head = heads.first; head < past; ++head)
    {
        H x{next};
        if (head + 1 < past)
        {
            next = H::load_anew(source.of(p, head + 1));
        }
        bool const is_query = head < p.heads;
        bool const is_value = head >= p.heads + p.kv_heads;
        if (!is_value)
        {
            auto const cos = H::load_half(static_cast<T const*>(p.cos) + table_row, rotary_lanes);
            auto const sin = H::load_half(static_cast<T const*>(p.sin) + table_row, rotary_lanes);
            void const* weight = is_query ? p.q_norm : p.k_norm;
            if (weight && p.is_norm_wide)
            {
                x.norm(static_cast<float const*>(weight), p.norm_eps);
            }
            else if (weight)
            {
                x.norm(static_cast<T const*>(weight), p.norm_eps);
            }
            x.rotate(cos, sin, rotary_lanes);
        }
        else if (p.norms_values)
        {
            x.norm(p.norm_eps);
        }
        if (rehearses)
        {
            return;
        }
        if (is_query)
        {
            x.store(queries + head * D);
            continue;
        }
        int const kv_head = head - p.heads - (is_value ? p.kv_heads : 0);
        C* const cache = static_cast<C*>(is_value ? p.values : p.keys) + place + kv_head * p.cache_head_stride;
        if constexpr (std::is_same_v<C, E4M3>)
        {
            x.store(cache, __ldg(is_value ? p.value_scale : p.key_scale));
        }
        else
        {
            x.store(cache);
        }
    }
}

// The code comes from memory at each launch, for between two of them other kernels run. So where rows are few, and the
// kernel ahead lets this one begin early, a block computes its first heads of whatever lies there before it waits, and
// stores nothing.
template <typename T, typename C, int D>
__global__ void __launch_bounds__(kThreads) append_kernel(dflash_append_params const p, Division const division)
{
    trigger();
    int const slot = blockIdx.y;
    Heads const heads(p, division, (blockIdx.x * kThreads + threadIdx.x) / Head<T, D>::kLanes);
    bool const has_row = heads.in_block || heads.row < p.context_rows;
    Source<T> const source(p, heads, slot);
#pragma unroll 1
    for (bool rehearses = division.heads_each == 1;; rehearses = false)
    {
        if (!rehearses)
        {
            wait();
        }
        if (has_row)
        {
            append<T, C, D>(p, heads, slot, source, rehearses);
        }
        if (!rehearses)
        {
            return;
        }
    }
}

template <typename T, typename C, int D>
cudaError_t launch(dflash_append_params const& p, cudaStream_t stream)
{
    int const slots = p.segments ? 1 : p.slots;
    int const block_rows = p.segments && p.block ? p.slots * p.block : p.rows;
    int const row_heads = p.heads + 2 * p.kv_heads;
    int64_t const heads = slots * (int64_t{block_rows} * row_heads + int64_t{p.context_rows} * 2 * p.kv_heads);
    // Where there are more than a GPU computes at once anyway, a row's place is found once for several.
    int const each = heads >= 16384 ? 4 : heads >= 8192 ? 2 : 1;
    Division const division{each, block_rows, (row_heads + each - 1) / each, (2 * p.kv_heads + each - 1) / each};
    int const parts = block_rows * division.block_parts + p.context_rows * division.context_parts;
    int const lanes = parts * Head<T, D>::kLanes;
    dim3 const grid((lanes + kThreads - 1) / kThreads, slots);
    return launch_kernel(append_kernel<T, C, D>, grid, kThreads, 0, stream, p, division);
}

template <typename T, typename C>
cudaError_t launch_size(dflash_append_params const& p, cudaStream_t stream)
{
    switch (p.head_size)
    {
    case 64: return launch<T, C, 64>(p, stream);
    case 128: return launch<T, C, 128>(p, stream);
    case 256: return launch<T, C, 256>(p, stream);
    case 512: return launch<T, C, 512>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <typename T>
cudaError_t launch_caches(dflash_append_params const& p, cudaStream_t stream)
{
    return p.key_scale ? launch_size<T, E4M3>(p, stream) : launch_size<T, T>(p, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_append(dflash_append_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    int const rotated = 2 * (p->head_size > 256 ? kNeighbours<512> : kNeighbours<256>); // by two lanes
    bool const is_known = p->slots <= 65535 && p->positions > 0 && !p->key_scale == !p->value_scale
        && p->rotary_size >= 0 && p->rotary_size <= p->head_size && p->rotary_size % rotated == 0;
    bool const has_flat_rows = p->segments && (p->context_rows || (p->rows && !p->block));
    bool const is_placed = (!has_flat_rows || p->row_segment) && (!p->page_table || p->page_rows > 0)
        && (p->segments ? p->block == 0 || p->block == p->rows : p->block == 0)
        && (!p->segments || !p->rows || p->block || p->out);
    if (!is_known || !is_placed || (p->rows && (!p->qkv || !p->q_out))
        || (p->context_rows && (!p->context_k || !p->context_v)))
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0 || p->rows + p->context_rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_caches<__half>(*p, stream);
    case DFLASH_BF16: return launch_caches<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
