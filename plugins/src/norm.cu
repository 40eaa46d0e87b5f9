// RMSNorm, alone, after a residual addition or before one, and gating by SiLU or GELU.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"
#include "normed.cuh"

namespace dflash
{
namespace
{

constexpr int kVector = 8; // elements of one 16-byte access
constexpr int kMaxVectors = 4; // a thread's

// One block a row. A row stays in registers between the sum of its squares and its scaling. W: the weight's type.
template <typename T, typename W, bool kResidual, int kVectors>
__global__ void __launch_bounds__(kMostBlockThreads) rms_norm_kernel(dflash_rms_norm_params const p)
{
    using Row = Vector<T, kVector>;
    trigger();
    Vector<W, kVector> scale[kVectors];
    load_own_weights(scale, p.weight, p.size);
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
        add_squares(squares, held[i]);
    }

    float const root = rsqrtf(over_block<warp_sum>(squares) / static_cast<float>(p.size) + p.eps);

#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= vectors * kVector)
        {
            continue;
        }
        store_vector(out + at, normed(held[i], root, scale[i]));
    }
}

// One block a row: its norm, then what is added to it and what that is multiplied by, each rounded.
template <typename T, typename W, int kVectors>
__global__ void __launch_bounds__(kMostBlockThreads) add_normed_kernel(dflash_add_normed_params const p)
{
    trigger();
    Vector<W, kVector> by[kVectors];
    load_own_weights(by, p.weight, p.size);
    // A constant, too.
    float const factor = p.factor ? to_float(*static_cast<T const*>(p.factor)) : 1.f;
    wait();
    int64_t const row = int64_t{blockIdx.x} * p.size;
    Vector<T, kVector> x[kVectors];
    Vector<T, kVector> residual[kVectors] = {};
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= p.size)
        {
            continue;
        }
        x[i] = load_vector<T, kVector>(static_cast<T const*>(p.x) + row + at);
        if (p.residual)
        {
            residual[i] = load_vector<T, kVector>(static_cast<T const*>(p.residual) + row + at);
        }
        add_squares(squares, x[i]);
    }
    float const root = rsqrtf(over_block<warp_sum>(squares) / static_cast<float>(p.size) + p.eps);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
    {
        int const at = (threadIdx.x + i * blockDim.x) * kVector;
        if (at >= p.size)
        {
            continue;
        }
        auto y = normed(x[i], root, by[i]);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
        {
            float const sum = rounded<T>(to_float(y.at[j]) + to_float(residual[i].at[j]));
            y.at[j] = from_float<T>(rounded<T>(sum * factor) * p.scale);
        }
        store_vector(static_cast<T*>(p.out) + row + at, y);
    }
}

template <typename T, typename W>
cudaError_t launch_add_normed(dflash_add_normed_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = count_block_threads(vectors);
    auto const kernel = vectors <= threads ? add_normed_kernel<T, W, 1> : add_normed_kernel<T, W, kMaxVectors>;
    return launch_kernel(kernel, dim3(p.rows), threads, 0, stream, p);
}

template <typename T, typename W, bool kResidual>
cudaError_t launch_rms_norm(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = count_block_threads(vectors);
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
        out.at[j] = from_float<T>(rounded<T>(p.gelu ? gelu(value) : silu(value)) * to_float(up.at[j]));
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
    if (p->size < kVector || p->size % kVector || p->size > kVector * kMostBlockThreads * kMaxVectors
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

extern "C" cudaError_t dflash_add_normed(dflash_add_normed_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size < kVector || p->size % kVector || p->size > kVector * kMostBlockThreads * kMaxVectors)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16:
        return p->is_weight_wide ? launch_add_normed<__half, float>(*p, stream)
                                 : launch_add_normed<__half, __half>(*p, stream);
    case DFLASH_BF16:
        return p->is_weight_wide ? launch_add_normed<__nv_bfloat16, float>(*p, stream)
                                 : launch_add_normed<__nv_bfloat16, __nv_bfloat16>(*p, stream);
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
