// Tensor maps: how the bulk copy engine sees a tensor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace dflash
{

// Numbers of 16 bits in 128 bytes: a row of a box, and the longest of shared memory that products read with one
// swizzle.
constexpr int kAtom = 64;

// The driver's function that encodes tensor maps, found at the first call: the library is not linked with the driver's,
// for it loads where there is none. A failed search is not remembered.
inline cudaError_t find_encoder(PFN_cuTensorMapEncodeTiled_v12000& encode)
{
    static std::atomic<PFN_cuTensorMapEncodeTiled_v12000> known{nullptr};
    encode = known;
    if (encode)
    {
        return cudaSuccess;
    }
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error
        = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error == cudaSuccess && (result != cudaDriverEntryPointSuccess || !function))
    {
        return cudaErrorInsufficientDriver; // drivers before 12.0 have none
    }
    if (error == cudaSuccess)
    {
        encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
        known = encode;
    }
    return error;
}

// Maps a tensor's tiles: boxes whose rows are 128 bytes, with the 16-byte parts of a row in shared memory exchanged by
// the row's number modulo 8; elements past the tensor's are zeros. Sizes and boxes count elements, the innermost
// dimension first; strides count bytes, of all dimensions but the innermost.
template <int kDimensions>
cudaError_t map_tiles(CUtensorMapDataType type, CUtensorMapL2promotion promotion, void const* tensor,
    cuuint64_t const (&sizes)[kDimensions], cuuint64_t const (&strides)[kDimensions - 1],
    cuuint32_t const (&box)[kDimensions], CUtensorMap& map)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    cudaError_t const error = find_encoder(encode);
    if (error != cudaSuccess)
    {
        return error;
    }
    cuuint32_t steps[kDimensions];
    std::fill_n(steps, kDimensions, 1);
    CUresult const result = encode(&map, type, kDimensions, const_cast<void*>(tensor), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Likewise, whatever the numbers' type: sizes and strides count bytes of a row.
template <int kDimensions>
cudaError_t map_bytes(void const* tensor, cuuint64_t const (&sizes)[kDimensions],
    cuuint64_t const (&strides)[kDimensions - 1], cuuint32_t const (&box)[kDimensions], CUtensorMap& map)
{
    return map_tiles(
        CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, tensor, sizes, strides, box, map);
}

// Rows that lie one behind the other, in columns of 128 bytes of so many rows at a time.
inline cudaError_t map_rows(void const* tensor, int rows, cuuint64_t row_bytes, int at_a_time, CUtensorMap& map)
{
    return map_bytes<2>(tensor, {row_bytes, static_cast<cuuint64_t>(rows)}, {row_bytes},
        {128, static_cast<cuuint32_t>(at_a_time)}, map);
}

} // namespace dflash
