// Rows as E4M3 numbers with a scale each or a scale a block, for products with FP8 weights.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"
#include "normed.cuh"

#include <cuda_fp8.h>

namespace dflash
{
namespace
{

constexpr int kVector = 8; // elements of one 16-byte access
constexpr int kMaxVectors = 4; // a thread's
constexpr int kBlock = 128; // numbers that share a scale, where not all of a row do
constexpr int kBlockLanes = kBlock / kVector;
constexpr int kBlockThreads = 256;
constexpr float kLargest = 448.f; // of E4M3
constexpr float kLeast = 1e-12f; // so that a row of zeros has a scale

__device__ __forceinline__ float scale_of(float largest)
{
    return fmaf(largest, 1.f / kLargest, kLeast);
}

template <typename T>
__device__ __forceinline__ float largest_of(Vector<T, kVector> const& x, float largest)
{
#pragma unroll
    for (int j = 0; j < kVector; ++j)
    {
        largest = fmaxf(largest, fabsf(to_float(x.at[j])));
    }
    return largest;
}

template <typename T>
__device__ __forceinline__ void store_scaled(uint8_t* out, Vector<T, kVector> const& x, float scale)
{
    alignas(8) uint16_t pairs[kVector / 2];
#pragma unroll
    for (int j = 0; j < kVector; j += 2)
    {
        float2 const pair = {to_float(x.at[j]) / scale, to_float(x.at[j + 1]) / scale};
        pairs[j / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2 const*>(pairs);
}

// The largest of the lanes that have a block.
__device__ __forceinline__ float block_lanes_max(float x)
{
#pragma unroll
    for (int step = kBlockLanes / 2; step > 0; step /= 2)
    {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

// One block a row, which stays in registers between its largest number and its scaling.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostBlockThreads) quantize_kernel(dflash_quantize_params const p)
{
    begin();
    int64_t const row = blockIdx.x;
    T const* x = static_cast<T const*>(p.x) + row * p.size;
    Vector<T, kVector> held[kVectors];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at < p.size)
        {
            held[i] = load_vector<T, kVector>(x + at);
            largest = largest_of(held[i], largest);
        }
    }
    float const scale = scale_of(over_block<warp_max>(largest));
    if (threadIdx.x == 0)
    {
        p.scale[row] = scale;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at < p.size)
        {
            store_scaled(p.out + row * p.size + at, held[i], scale);
        }
    }
}

// One block a row, normed before, as rms_norm_kernel gives it.
template <typename T, typename W, int kVectors>
__global__ void __launch_bounds__(kMostBlockThreads) quantize_normed_kernel(dflash_quantize_params const p)
{
    trigger();
    Vector<W, kVector> by[kVectors];
    load_own_weights(by, p.norm_weight, p.size);
    wait();
    int64_t const row = blockIdx.x;
    T const* x = static_cast<T const*>(p.x) + row * p.size;
    Vector<T, kVector> held[kVectors] = {};
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= p.size)
        {
            continue;
        }
        held[i] = load_vector<T, kVector>(x + at);
        add_squares(squares, held[i]);
    }
    float const root = rsqrtf(over_block<warp_sum>(squares) / static_cast<float>(p.size) + p.eps);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        if ((threadIdx.x + i * blockDim.x) * kVector < p.size)
        {
            held[i] = normed(held[i], root, by[i]);
            largest = largest_of(held[i], largest);
        }
    }
    float const of_row = p.by_block ? 0.f : scale_of(over_block<warp_max>(largest));
    if (!p.by_block && threadIdx.x == 0)
    {
        p.scale[row] = of_row;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        float const scale = p.by_block ? scale_of(block_lanes_max(largest_of(held[i], 0.f))) : of_row;
        if (at < p.size)
        {
            store_scaled(p.out + row * p.size + at, held[i], scale);
            if (p.by_block && threadIdx.x % kBlockLanes == 0)
            {
                p.scale[int64_t{at / kBlock} * p.rows + row] = scale;
            }
        }
    }
}

// Half a warp a block of a row.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) quantize_blocks_kernel(dflash_quantize_params const p)
{
    begin();
    int const blocks = p.size / kBlock; // of a row
    int64_t const index = int64_t{blockIdx.x} * (kBlockThreads / kBlockLanes) + threadIdx.x / kBlockLanes;
    bool const is_one = index < int64_t{p.rows} * blocks;
    int64_t const at = index * kBlock + threadIdx.x % kBlockLanes * kVector;
    auto const held = is_one ? load_vector<T, kVector>(static_cast<T const*>(p.x) + at) : Vector<T, kVector>{};
    float const scale = scale_of(block_lanes_max(largest_of(held, 0.f)));
    if (is_one)
    {
        store_scaled(p.out + at, held, scale);
        if (threadIdx.x % kBlockLanes == 0)
        {
            p.scale[index % blocks * p.rows + index / blocks] = scale;
        }
    }
}

template <typename T, typename W>
cudaError_t launch_normed(dflash_quantize_params const& p, int threads, cudaStream_t stream)
{
    bool const has_one = p.size <= threads * kVector;
    auto const kernel = has_one ? quantize_normed_kernel<T, W, 1> : quantize_normed_kernel<T, W, kMaxVectors>;
    return launch_kernel(kernel, dim3(p.rows), threads, 0, stream, p);
}

template <typename T>
cudaError_t launch_quantize(dflash_quantize_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = count_block_threads(vectors);
    if (p.norm_weight)
    {
        return p.is_weight_wide ? launch_normed<T, float>(p, threads, stream) : launch_normed<T, T>(p, threads, stream);
    }
    if (p.by_block)
    {
        int64_t const all = int64_t{p.rows} * vectors;
        int const count = static_cast<int>((all + kBlockThreads - 1) / kBlockThreads);
        return launch_kernel(quantize_blocks_kernel<T>, dim3(count), kBlockThreads, 0, stream, p);
    }
    auto const kernel = vectors <= threads ? quantize_kernel<T, 1> : quantize_kernel<T, kMaxVectors>;
    return launch_kernel(kernel, dim3(p.rows), threads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_quantize(dflash_quantize_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    int const unit = p->by_block ? kBlock : kVector;
    if (p->size < unit || p->size % unit || p->size > kMostBlockThreads * kMaxVectors * kVector)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_quantize<__half>(*p, stream);
    case DFLASH_BF16: return launch_quantize<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
