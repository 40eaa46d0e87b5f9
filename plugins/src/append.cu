// Norm of heads, RoPE and append, of a block's rows and of the context rows before it.
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

// C: the type of the caches.
template <typename T, typename C, int D>
__global__ void __launch_bounds__(kWarps * 32) append_kernel(dflash_append_params const p)
{
    begin();
    int const slot = blockIdx.y;
    int unit = blockIdx.x * kWarps + threadIdx.x / 32; // a head of a row: of the block's rows first
    int const block_heads = p.heads + 2 * p.kv_heads;
    bool const in_block = unit < p.rows * block_heads;
    unit -= in_block ? 0 : p.rows * block_heads;
    int const row_heads = in_block ? block_heads : 2 * p.kv_heads;
    int const row = unit / row_heads;
    int head = unit % row_heads + (in_block ? 0 : p.heads); // queries, then keys, then values
    int const committed = p.committed ? p.committed[slot] : p.context_rows;
    if (!in_block && row >= min(committed, p.context_rows))
    {
        return;
    }
    int const position = p.start[slot] + (in_block ? committed + row : row);
    bool const is_query = head < p.heads;
    bool const is_key = !is_query && head < p.heads + p.kv_heads;
    if (!is_query && (position < 0 || position >= p.cache_rows))
    {
        return;
    }
    head -= is_query ? 0 : is_key ? p.heads : p.heads + p.kv_heads;

    T const* source;
    if (in_block)
    {
        int const first = is_query ? 0 : is_key ? p.heads : p.heads + p.kv_heads;
        source = static_cast<T const*>(p.qkv) + slot * p.qkv_slot_stride + row * p.qkv_row_stride + (first + head) * D;
    }
    else
    {
        source = static_cast<T const*>(is_key ? p.context_k : p.context_v) + slot * p.context_slot_stride
            + row * p.context_row_stride + head * D;
    }
    Head<T, D> x(source);
    if (is_query || is_key)
    {
        T const* weight = static_cast<T const*>(is_query ? p.q_norm : p.k_norm);
        if (weight)
        {
            x.norm(weight, p.norm_eps);
        }
        int64_t const table_row = min(max(position, 0), p.positions - 1);
        x.rotate(
            static_cast<T const*>(p.cos) + table_row * (D / 2), static_cast<T const*>(p.sin) + table_row * (D / 2));
    }
    if (is_query)
    {
        x.store(static_cast<T*>(p.q_out) + ((int64_t{slot} * p.rows + row) * p.heads + head) * D);
        return;
    }
    C* cache = static_cast<C*>(is_key ? p.keys : p.values);
    C* const to = cache + slot * p.cache_slot_stride + head * p.cache_head_stride + int64_t{position} * D;
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
    int const units = p.rows * (p.heads + 2 * p.kv_heads) + p.context_rows * 2 * p.kv_heads;
    dim3 const grid((units + kWarps - 1) / kWarps, p.slots);
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
    if (!is_known || (p->rows && (!p->qkv || !p->q_out)) || (p->context_rows && (!p->context_k || !p->context_v)))
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
