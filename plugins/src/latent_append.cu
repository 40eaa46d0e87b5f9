// The cache rows of latent attention, and the rotated parts of its queries: norm, RoPE and append in one.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kWarps = 8;
constexpr int kRank = 512;
constexpr int kRotary = 64; // a pair a lane
constexpr int kRow = kRank + kRotary;
constexpr int kVector = 8;

// A row's place: its position, and its part of the RoPE tables for this lane.
template <typename T>
struct Place
{
    int position;
    float cos;
    float sin;

    __device__ __forceinline__ Place(dflash_latent_append_params const& p, int slot, int row)
        : position(p.start[slot] + row)
    {
        int const known = min(max(position, 0), p.positions - 1); // of rows that are dropped whatever is there
        int64_t const at = static_cast<int64_t>(known) * (kRotary / 2) + threadIdx.x % 32;
        cos = to_float(static_cast<T const*>(p.cos)[at]);
        sin = to_float(static_cast<T const*>(p.sin)[at]);
    }

    // Rotates 64 numbers, of which number i and i + 32 are a pair. By a warp.
    __device__ __forceinline__ void rotate(T const* from, T* to) const
    {
        int const lane = threadIdx.x % 32;
        float const x = to_float(from[lane]), y = to_float(from[lane + kRotary / 2]);
        to[lane] = from_float<T>(x * cos - y * sin);
        to[lane + kRotary / 2] = from_float<T>(y * cos + x * sin);
    }
};

// Norms 512 numbers, rounded before the weight and behind it. By a warp.
template <typename T>
__device__ __forceinline__ void norm(T const* from, T const* weight, float eps, T* to)
{
    using Numbers = Vector<T, kVector>;
    constexpr int kParts = kRank / kVector / 32;
    Numbers x[kParts];
    float squares = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
    {
        x[part] = load_vector<T, kVector>(from + (part * 32 + threadIdx.x % 32) * kVector);
#pragma unroll
        for (T const number : x[part].at)
        {
            squares += to_float(number) * to_float(number);
        }
    }
    float const root = rsqrtf(warp_sum(squares) / kRank + eps);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
    {
        int const at = (part * 32 + threadIdx.x % 32) * kVector;
        Numbers const scale = load_vector<T, kVector>(weight + at);
        Numbers y;
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            y.at[i] = from_float<T>(rounded<T>(to_float(x[part].at[i]) * root) * to_float(scale.at[i]));
        }
        store_vector(to + at, y);
    }
}

// A row by a block: its cache row by two warps, its heads by all.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) latent_append_kernel(dflash_latent_append_params const p)
{
    begin();
    int const slot = blockIdx.y, row = blockIdx.x, warp = threadIdx.x / 32;
    Place<T> const place(p, slot, row);
    T const* const kv = static_cast<T const*>(p.kv) + slot * p.kv_slot_stride + row * p.kv_row_stride;
    if (place.position >= 0 && place.position < p.cache_rows)
    {
        T* const to
            = static_cast<T*>(p.cache) + slot * p.cache_slot_stride + static_cast<int64_t>(place.position) * kRow;
        if (warp == 0)
        {
            norm(kv, static_cast<T const*>(p.norm), p.norm_eps, to);
        }
        if (warp == 1)
        {
            place.rotate(kv + kRank, to + kRank);
        }
    }
    int64_t const first = (static_cast<int64_t>(slot) * p.rows + row) * p.heads;
    T const* const q = static_cast<T const*>(p.q) + first * (p.plain_size + kRotary) + p.plain_size;
    T* const out = static_cast<T*>(p.queries) + first * kRow + kRank;
    for (int head = kWarps - 1 - warp; head < p.heads; head += kWarps)
    {
        place.rotate(q + head * (p.plain_size + kRotary), out + head * kRow);
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_latent_append(dflash_latent_append_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->slots >= 0 && p->rows > 0 && p->heads > 0 && p->plain_size >= 0 && p->cache_rows > 0
        && p->positions > 0 && (p->dtype == DFLASH_FP16 || p->dtype == DFLASH_BF16);
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    auto const kernel = p->dtype == DFLASH_FP16 ? latent_append_kernel<__half> : latent_append_kernel<__nv_bfloat16>;
    return launch_kernel(kernel, dim3(p->rows, p->slots), kWarps * 32, 0, stream, *p);
}
