// Norm of heads, RoPE and append, of a block's rows and of the context rows before it, or of a step's flat rows.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <cuda_fp8.h>
#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kWarps = 4;

// One warp a head of a row: lane l holds D / 32 neighbours, and what RoPE pairs them with (half a head away) is in lane
// l ^ 16. Rounds where the separate operations would: after the norm, its weight, each product and their sum.
template <typename T, int D>
struct Head
{
    static constexpr int kPerLane = D / 32;
    float x[kPerLane];

    __device__ explicit Head(T const* from)
    {
        auto const loaded = load_vector<T, kPerLane>(from + threadIdx.x % 32 * kPerLane);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            x[i] = to_float(loaded.at[i]);
        }
    }

    __device__ void norm(T const* weight, float eps)
    {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            squares += x[i] * x[i];
        }
        float const root = rsqrtf(warp_sum(squares) / D + eps);
        auto const scale = load_vector<T, kPerLane>(weight + threadIdx.x % 32 * kPerLane);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            x[i] = rounded<T>(rounded<T>(x[i] * root) * to_float(scale.at[i]));
        }
    }

    // cos, sin: the position's row of the tables, [D / 2].
    __device__ void rotate(T const* cos, T const* sin)
    {
        int const lane = threadIdx.x % 32;
        auto const c = load_vector<T, kPerLane>(cos + lane % 16 * kPerLane);
        auto const s = load_vector<T, kPerLane>(sin + lane % 16 * kPerLane);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            float const other = __shfl_xor_sync(0xffffffffu, x[i], 16);
            float const mine = rounded<T>(x[i] * to_float(c.at[i]));
            float const crossed = rounded<T>(other * to_float(s.at[i]));
            x[i] = lane < 16 ? mine - crossed : mine + crossed;
        }
    }

    __device__ void store(T* to) const
    {
        Vector<T, kPerLane> out;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            out.at[i] = from_float<T>(x[i]);
        }
        store_vector(to + threadIdx.x % 32 * kPerLane, out);
    }

    // Divides the numbers after rounding them to T, as a composition of operations would.
    __device__ void store(E4M3* to, float scale) const
    {
        Vector<E4M3, kPerLane> out;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
        {
            out.at[i] = __nv_cvt_float_to_fp8(rounded<T>(x[i]) / scale, __NV_SATFINITE, __NV_E4M3);
        }
        store_vector(to + threadIdx.x % 32 * kPerLane, out);
    }
};

// By all lanes of a warp: one head.
template <typename T, int D>
__device__ __forceinline__ void store_zeros(T* to)
{
    constexpr int kPerLane = D / 32;
    store_vector(to + threadIdx.x % 32 * kPerLane, Vector<T, kPerLane>{});
}

// A head of a row, and where it goes.
struct Unit
{
    bool is_there; // else there is nothing to do
    bool is_padding; // a row of no segment
    bool in_block; // of qkv, else of the context
    int head; // queries, then keys, then values
    int64_t from; // where the row lies in qkv, or in the context
    int64_t query; // its row of queries
    int slot; // of the caches
    int position;
};

// Of a slot's rows: first those of its block.
__device__ __forceinline__ Unit unit_of_slot(dflash_append_params const& p, int slot, int index)
{
    Unit u = {};
    int const block_heads = p.heads + 2 * p.kv_heads;
    u.in_block = index < p.rows * block_heads;
    index -= u.in_block ? 0 : p.rows * block_heads;
    int const row_heads = u.in_block ? block_heads : 2 * p.kv_heads;
    int const row = index / row_heads;
    int const committed = p.committed ? p.committed[slot] : p.context_rows;
    u.is_there = u.in_block || row < min(committed, p.context_rows);
    u.head = index % row_heads + (u.in_block ? 0 : p.heads);
    u.from = u.in_block ? slot * p.qkv_slot_stride + row * p.qkv_row_stride
                        : slot * p.context_slot_stride + row * p.context_row_stride;
    u.query = int64_t{slot} * p.rows + row;
    u.slot = slot;
    u.position = p.start[slot] + (u.in_block ? committed + row : row);
    return u;
}

// Of all segments' rows: first those of qkv.
__device__ __forceinline__ Unit unit_of_segments(dflash_append_params const& p, int index)
{
    Unit u = {};
    int const block_heads = p.heads + 2 * p.kv_heads;
    int const block_units = (p.block ? p.slots * p.block : p.rows) * block_heads;
    u.in_block = index < block_units;
    index -= u.in_block ? 0 : block_units;
    int const row_heads = u.in_block ? block_heads : 2 * p.kv_heads;
    int const row = index / row_heads;
    u.head = index % row_heads + (u.in_block ? 0 : p.heads);
    u.query = row;
    if (!u.in_block && row >= p.context_rows)
    {
        return u;
    }
    bool const is_after = u.in_block && p.block > 0; // behind the segment's own rows
    int const nth = is_after ? row / p.block : p.row_segment[row];
    u.is_padding = nth < 0;
    u.is_there = u.in_block;
    u.from = row * (u.in_block ? p.qkv_row_stride : p.context_row_stride);
    if (u.is_padding)
    {
        return u;
    }
    int4 const segment = reinterpret_cast<int4 const*>(p.segments)[nth]; // slot, start, first row, count
    int const committed = p.committed ? p.committed[nth] : segment.w;
    int const of_segment = row - (is_after ? nth * p.block : segment.z);
    u.is_there = is_after ? segment.w > 0 : u.in_block || of_segment < committed;
    u.from = is_after ? nth * p.qkv_slot_stride + of_segment * p.qkv_row_stride : u.from;
    u.slot = segment.x;
    u.position = segment.y + of_segment + (is_after ? committed : 0);
    return u;
}

// Where a head's row of a position lies in the caches.
__device__ __forceinline__ int64_t place_of(dflash_append_params const& p, int slot, int head, int position)
{
    int page = slot;
    int row = position;
    if (p.page_table)
    {
        int const nth = position / p.page_rows;
        page = p.page_table[slot * p.page_table_stride + nth];
        row -= nth * p.page_rows;
    }
    return page * p.cache_slot_stride + head * p.cache_head_stride + int64_t{row} * p.head_size;
}

// C: the type of the caches.
template <typename T, typename C, int D>
__global__ void __launch_bounds__(kWarps * 32) append_kernel(dflash_append_params const p)
{
    begin();
    int const index = blockIdx.x * kWarps + threadIdx.x / 32;
    Unit const u = p.segments ? unit_of_segments(p, index) : unit_of_slot(p, blockIdx.y, index);
    bool const is_query = u.head < p.heads;
    bool const is_key = !is_query && u.head < p.heads + p.kv_heads;
    bool const is_dropped = u.is_padding || u.position < 0 || u.position >= p.cache_rows;
    if (!u.is_there || (!is_query && is_dropped))
    {
        return;
    }
    int64_t const query = (u.query * p.heads + u.head) * D;
    if (u.is_padding)
    {
        store_zeros<T, D>(static_cast<T*>(p.q_out) + query);
        store_zeros<T, D>(static_cast<T*>(p.out) + query);
        return;
    }

    int const head = u.head - (is_query ? 0 : is_key ? p.heads : p.heads + p.kv_heads);
    T const* source = u.in_block ? static_cast<T const*>(p.qkv) + u.from + u.head * D
                                 : static_cast<T const*>(is_key ? p.context_k : p.context_v) + u.from + head * D;
    Head<T, D> x(source);
    if (is_query || is_key)
    {
        T const* weight = static_cast<T const*>(is_query ? p.q_norm : p.k_norm);
        if (weight)
        {
            x.norm(weight, p.norm_eps);
        }
        int64_t const table_row = min(max(u.position, 0), p.positions - 1);
        x.rotate(
            static_cast<T const*>(p.cos) + table_row * (D / 2), static_cast<T const*>(p.sin) + table_row * (D / 2));
    }
    if (is_query)
    {
        x.store(static_cast<T*>(p.q_out) + query);
        return;
    }
    C* const to = static_cast<C*>(is_key ? p.keys : p.values) + place_of(p, u.slot, head, u.position);
    if constexpr (std::is_same_v<C, E4M3>)
    {
        x.store(to, __ldg(is_key ? p.key_scale : p.value_scale));
    }
    else
    {
        x.store(to);
    }
}

template <typename T, typename C, int D>
cudaError_t launch(dflash_append_params const& p, cudaStream_t stream)
{
    int const block_rows = p.segments && p.block ? p.slots * p.block : p.rows;
    int const units = block_rows * (p.heads + 2 * p.kv_heads) + p.context_rows * 2 * p.kv_heads;
    dim3 const grid((units + kWarps - 1) / kWarps, p.segments ? 1 : p.slots);
    return launch_kernel(append_kernel<T, C, D>, grid, kWarps * 32, 0, stream, p);
}

template <typename T, typename C>
cudaError_t launch_size(dflash_append_params const& p, cudaStream_t stream)
{
    return p.head_size == 64 ? launch<T, C, 64>(p, stream) : launch<T, C, 128>(p, stream);
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
    bool const is_known = (p->head_size == 64 || p->head_size == 128) && p->slots <= 65535 && p->positions > 0
        && !p->key_scale == !p->value_scale;
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
