// Rows times the sigmoid of their gates.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 128;
constexpr int kVector = 8; // numbers of one 16-byte access

__device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.f, 1.f + __expf(-x));
}

// kIsWide: there is a gate for each number, else one for each row.
template <typename T, bool kIsWide>
__global__ void __launch_bounds__(kThreads) gate_kernel(dflash_gate_params const p)
{
    begin();
    int const at = (blockIdx.y * kThreads + threadIdx.x) * kVector;
    int64_t const row = blockIdx.x;
    if (at >= p.size)
    {
        return;
    }
    T const* gates = static_cast<T const*>(p.gates) + row * p.gates_row_stride;
    auto const x = load_vector<T, kVector>(static_cast<T const*>(p.x) + row * p.size + at);
    Vector<T, kVector> gate;
    if constexpr (kIsWide)
    {
        gate = load_vector<T, kVector>(gates + at);
    }
    float const of_row = kIsWide ? 0.f : sigmoid(to_float(gates[0]));
    Vector<T, kVector> residual = {};
    if (p.residual)
    {
        residual = load_vector<T, kVector>(static_cast<T const*>(p.residual) + row * p.size + at);
    }
    Vector<T, kVector> out;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
    {
        float const y = rounded<T>(to_float(x.at[i]) * (kIsWide ? sigmoid(to_float(gate.at[i])) : of_row));
        out.at[i] = from_float<T>(y + to_float(residual.at[i]));
    }
    store_vector(static_cast<T*>(p.out) + row * p.size + at, out);
}

template <typename T>
cudaError_t launch(dflash_gate_params const& p, cudaStream_t stream)
{
    dim3 const grid(p.rows, (p.size / kVector + kThreads - 1) / kThreads);
    auto const kernel = p.gates_of_row == 1 ? gate_kernel<T, false> : gate_kernel<T, true>;
    return launch_kernel(kernel, grid, kThreads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_gate(dflash_gate_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_wide = p->gates_of_row == p->size && p->gates_row_stride % kVector == 0;
    if (p->size < kVector || p->size % kVector || (p->gates_of_row != 1 && !is_wide))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch<__half>(*p, stream);
    case DFLASH_BF16: return launch<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
