// Logits that a tanh holds below a cap.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kThreads = 256;
constexpr int kNumbers = 8; // of a thread at a time

template <typename T>
__global__ void __launch_bounds__(kThreads) cap_kernel(dflash_cap_params const p)
{
    constexpr int kVector = sizeof(T) == 4 ? kNumbers / 2 : kNumbers; // of one access
    begin();
    int64_t const step = int64_t{gridDim.x} * kThreads * kVector;
    for (int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; at < p.count; at += step)
    {
        auto x = load_vector<T, kVector>(static_cast<T const*>(p.x) + at);
#pragma unroll
        for (T& logit : x.at)
        {
            logit = from_float<T>(tanhf(to_float(logit) / p.cap) * p.cap);
        }
        store_vector(static_cast<T*>(p.out) + at, x);
    }
}

template <typename T>
cudaError_t launch(dflash_cap_params const& p, cudaStream_t stream)
{
    int64_t const blocks = (p.count + kThreads * kNumbers - 1) / (kThreads * kNumbers);
    dim3 const grid(static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20)));
    return launch_kernel(cap_kernel<T>, grid, kThreads, 0, stream, p);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_cap(dflash_cap_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->count < 0 || p->count % kNumbers || !(p->cap > 0.f))
    {
        return cudaErrorInvalidValue;
    }
    if (p->count == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch<__half>(*p, stream);
    case DFLASH_BF16: return launch<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
