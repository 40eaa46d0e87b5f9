// RMSNorm, alone or after a residual addition, and SwiGLU.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kVector = 8; // elements of one 16-byte access
constexpr int kMaxThreads = 1024;
constexpr int kMaxVectors = 4; // a thread's

// A vector of weights, by accesses of at most 16 bytes.
template <typename W>
__device__ __forceinline__ Vector<W, kVector> load_weights(W const* from)
{
    constexpr int kPart = sizeof(W) == 4 ? kVector / 2 : kVector;
    Vector<W, kVector> weights;
#pragma unroll
    for (int first = 0; first < kVector; first += kPart)
    {
        auto const part = load_vector<W, kPart>(from + first);
#pragma unroll
        for (int i = 0; i < kPart; ++i)
        {
            weights.at[first + i] = part.at[i];
        }
    }
    return weights;
}

// One block a row. A row stays in registers between the sum of its squares and its scaling. W: the weight's type.
template <typename T, typename W, bool kResidual, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(dflash_rms_norm_params const p)
{
    using Row = Vector<T, kVector>;
    trigger();
    // A constant: it is read while the kernel before still runs.
    W const* weight = static_cast<W const*>(p.weight);
    Vector<W, kVector> scale[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at < p.size)
        {
            scale[i] = load_weights<W>(weight + at);
        }
    }
    wait();
    int64_t const row = blockIdx.x;
    int const slot = static_cast<int>(row / p.rows);
    int const vectors = p.size / kVector;
    T const* x = static_cast<T const*>(p.x) + slot * p.x_slot_stride + (row - int64_t{slot} * p.rows) * p.x_row_stride;
    T const* residual = kResidual ? static_cast<T const*>(p.residual) + row * p.size : nullptr;
    T* sum = kResidual ? static_cast<T*>(p.sum) + row * p.size : nullptr;
    T* out = static_cast<T*>(p.out) + row * p.size;

    Row held[kVectors];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= vectors * kVector)
        {
            continue;
        }
        held[i] = load_vector<T, kVector>(x + at);
        if constexpr (kResidual)
        {
            Row const other = load_vector<T, kVector>(residual + at);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
            {
                held[i].at[j] = from_float<T>(to_float(held[i].at[j]) + to_float(other.at[j]));
            }
            store_vector(sum + at, held[i]);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j)
        {
            float const value = to_float(held[i].at[j]);
            squares += value * value;
        }
    }

    __shared__ float sums[kMaxThreads / 32];
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0)
    {
        sums[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    float total = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f;
    float const root = rsqrtf(warp_sum(total) / static_cast<float>(p.size) + p.eps);

#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= vectors * kVector)
        {
            continue;
        }
        Row normed;
#pragma unroll
        for (int j = 0; j < kVector; ++j)
        {
            float const value = to_float(held[i].at[j]) * root;
            float const once = std::is_same_v<W, float> ? value : rounded<T>(value);
            normed.at[j] = from_float<T>(once * to_float(scale[i].at[j]));
        }
        store_vector(out + at, normed);
    }
}

template <typename T, typename W, bool kResidual>
cudaError_t launch_rms_norm(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = vectors >= kMaxThreads ? kMaxThreads : (vectors + 31) / 32 * 32;
    dim3 const grid(static_cast<unsigned>(p.slots) * p.rows);
    auto const kernel
        = vectors <= threads ? rms_norm_kernel<T, W, kResidual, 1> : rms_norm_kernel<T, W, kResidual, kMaxVectors>;
    return launch_kernel(kernel, grid, threads, 0, stream, p);
}

template <typename T, bool kResidual>
cudaError_t launch_norm_of(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    return p.is_weight_wide ? launch_rms_norm<T, float, kResidual>(p, stream)
                            : launch_rms_norm<T, T, kResidual>(p, stream);
}

template <typename T>
__global__ void swiglu_kernel(dflash_swiglu_params const p)
{
    begin();
    int const at = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
    if (at >= p.size)
    {
        return;
    }
    int64_t const row = blockIdx.x;
    T const* x = static_cast<T const*>(p.x) + row * 2 * p.size;
    auto const gate = load_vector<T, kVector>(x + at);
    auto const up = load_vector<T, kVector>(x + p.size + at);
    Vector<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
    {
        float const value = to_float(gate.at[j]);
        out.at[j] = from_float<T>(rounded<T>(silu(value)) * to_float(up.at[j]));
    }
    store_vector(static_cast<T*>(p.out) + row * p.size + at, out);
}

template <typename T>
cudaError_t launch_swiglu(dflash_swiglu_params const& p, cudaStream_t stream)
{
    constexpr int kThreads = 128;
    int const vectors = p.size / kVector;
    dim3 const grid(p.rows, (vectors + kThreads - 1) / kThreads);
    return launch_kernel(swiglu_kernel<T>, grid, kThreads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_rms_norm(dflash_rms_norm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < kVector || p->size % kVector || p->size > kVector * kMaxThreads * kMaxVectors
        || p->x_slot_stride % kVector || p->x_row_stride % kVector || (p->residual != nullptr) != (p->sum != nullptr))
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0 || p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16:
        return p->residual ? launch_norm_of<__half, true>(*p, stream) : launch_norm_of<__half, false>(*p, stream);
    case DFLASH_BF16:
        return p->residual ? launch_norm_of<__nv_bfloat16, true>(*p, stream)
                           : launch_norm_of<__nv_bfloat16, false>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t dflash_swiglu(dflash_swiglu_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < kVector || p->size % kVector)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_swiglu<__half>(*p, stream);
    case DFLASH_BF16: return launch_swiglu<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
