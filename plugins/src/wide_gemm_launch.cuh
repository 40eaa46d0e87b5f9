// What launches of products of tens of rows, and of more, have in common.
#pragma once

#include "tensor_map.cuh"
#include "wide_gemm_sm90.cuh"

namespace dflash
{
namespace wide
{

// The current device's multiprocessors; an error where it is no Hopper GPU, or the library has no code for one.
inline cudaError_t find_processors(int& processors)
{
    int device = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    error = error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
#ifdef DFLASH_SM90A
    bool const has_kernel = major == 9;
#else
    bool const has_kernel = false;
#endif
    return error ? error : has_kernel ? cudaSuccess : cudaErrorNotSupported;
}

template <typename T>
cudaError_t map_weight(dflash_skinny_gemm_params const& p, int outputs, CUtensorMap& map)
{
    cuuint64_t const row_bytes = p.inputs * sizeof(T), count = p.outputs;
    constexpr cuuint64_t kHalf = kGranule / 2;
    cuuint64_t const to_second = p.swiglu ? count / 2 : kHalf, to_next = p.swiglu ? kHalf : kGranule; // rows
    return map_bytes<4>(p.weight, {row_bytes, kHalf, 2, count / kGranule},
        {row_bytes, to_second * row_bytes, to_next * row_bytes},
        {kLine, kHalf, 2, static_cast<cuuint32_t>(outputs / kGranule)}, map);
}

} // namespace wide
} // namespace dflash
