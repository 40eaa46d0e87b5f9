// Rows as E4M3 numbers with a scale each, for products with FP8 weights.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <cuda_fp8.h>

namespace dflash
{
namespace
{

constexpr int kVector = 8; // elements of one 16-byte access
constexpr int kMaxThreads = 1024;
constexpr int kMaxVectors = 4; // a thread's
constexpr float kLargest = 448.f; // of E4M3
constexpr float kLeast = 1e-12f; // so that a row of zeros has a scale

// One block a row, which stays in registers between its largest number and its scaling.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) quantize_kernel(dflash_quantize_params const p)
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
#pragma unroll
            for (int j = 0; j < kVector; ++j)
            {
                largest = fmaxf(largest, fabsf(to_float(held[i].at[j])));
            }
        }
    }
    __shared__ float warps[kMaxThreads / 32];
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0)
    {
        warps[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    largest = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.f);
    float const scale = fmaf(largest, 1.f / kLargest, kLeast);
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
            alignas(8) uint16_t pairs[kVector / 2];
#pragma unroll
            for (int j = 0; j < kVector; j += 2)
            {
                float2 const pair = {to_float(held[i].at[j]) / scale, to_float(held[i].at[j + 1]) / scale};
                pairs[j / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
            }
            *reinterpret_cast<uint2*>(p.out + row * p.size + at) = *reinterpret_cast<uint2 const*>(pairs);
        }
    }
}

template <typename T>
cudaError_t launch_quantize(dflash_quantize_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = vectors >= kMaxThreads ? kMaxThreads : (vectors + 31) / 32 * 32;
    auto const kernel = vectors <= threads ? quantize_kernel<T, 1> : quantize_kernel<T, kMaxVectors>;
    return launch_kernel(kernel, dim3(p.rows), threads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_quantize(dflash_quantize_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < kVector || p->size % kVector || p->size > kMaxThreads * kMaxVectors * kVector)
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
