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

constexpr int kMostParts = 4; // of a residual

enum class Residual
{
    kNone,
    kRow,
    kParts, // in FP32, to be added up
};

// Numbers of a row of what is added, of its parts rounded as one number.
template <typename T, Residual kResidual>
__device__ __forceinline__ Vector<T, kVector> load_residual(dflash_rms_norm_params const& p, int64_t row, int at)
{
    int64_t const first = row * p.size + at;
    if constexpr (kResidual == Residual::kRow)
    {
        return load_vector<T, kVector>(static_cast<T const*>(p.residual) + first);
    }
    auto const* from = reinterpret_cast<float4 const*>(static_cast<float const*>(p.residual) + first);
    int64_t const part = int64_t{p.slots} * p.rows * p.size / 4;
    float4 halves[kMostParts][2] = {};
#pragma unroll
    for (int nth = 0; nth < kMostParts; ++nth)
    {
        if (nth < p.parts)
        {
            halves[nth][0] = __ldcs(from + nth * part);
            halves[nth][1] = __ldcs(from + nth * part + 1);
        }
    }
    Vector<T, kVector> sum;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
    {
        float total = 0.f;
#pragma unroll
        for (int nth = 0; nth < kMostParts; ++nth)
        {
            total += reinterpret_cast<float const*>(halves[nth])[j];
        }
        sum.at[j] = from_float<T>(total);
    }
    return sum;
}

// One block a row. A row stays in registers between the sum of its squares and its scaling. W: the weight's type.
template <typename T, typename W, Residual kResidual, int kVectors>
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
        if constexpr (kResidual != Residual::kNone)
        {
            Row const other = load_residual<T, kResidual>(p, row, at);
#pragma unroll
            for (int j = 0; j < kVector; ++j)
            {
                held[i].at[j] = from_float<T>(to_float(held[i].at[j]) + to_float(other.at[j]));
            }
            store_vector(static_cast<T*>(p.sum) + row * p.size + at, held[i]);
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

template <typename T, typename W, Residual kResidual>
cudaError_t launch_rms_norm(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    int const vectors = p.size / kVector;
    int const threads = count_block_threads(vectors);
    dim3 const grid(static_cast<unsigned>(p.slots) * p.rows);
    auto const kernel
        = vectors <= threads ? rms_norm_kernel<T, W, kResidual, 1> : rms_norm_kernel<T, W, kResidual, kMaxVectors>;
    return launch_kernel(kernel, grid, threads, 0, stream, p);
}

template <typename T, Residual kResidual>
cudaError_t launch_norm_of(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    return p.is_weight_wide ? launch_rms_norm<T, float, kResidual>(p, stream)
                            : launch_rms_norm<T, T, kResidual>(p, stream);
}

template <typename T>
cudaError_t launch_norm_of(dflash_rms_norm_params const& p, cudaStream_t stream)
{
    return p.parts   ? launch_norm_of<T, Residual::kParts>(p, stream)
        : p.residual ? launch_norm_of<T, Residual::kRow>(p, stream)
                     : launch_norm_of<T, Residual::kNone>(p, stream);
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
        || p->x_slot_stride % kVector || p->x_row_stride % kVector || (p->residual != nullptr) != (p->sum != nullptr)
        || p->parts < 0 || p->parts > kMostParts || (p->parts && !p->residual))
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0 || p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_norm_of<__half>(*p, stream);
    case DFLASH_BF16: return launch_norm_of<__nv_bfloat16>(*p, stream);
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
