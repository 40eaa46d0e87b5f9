#include "tree_segments.h"

namespace dflash
{
namespace
{

__global__ void tree_segments_kernel(
    int32_t const* start, int32_t slots, int32_t rows, int4* segments, int32_t* row_segment)
{
    int32_t const index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < slots)
    {
        segments[index] = {index, start[index], index * rows, rows};
    }
    if (index < slots * rows)
    {
        row_segment[index] = index / rows;
    }
}

} // namespace

cudaError_t make_tree_segments(
    int32_t const* start, int32_t slots, int32_t rows, int32_t* segments, int32_t* row_segment, cudaStream_t stream)
{
    constexpr int32_t kThreads = 128;
    tree_segments_kernel<<<(slots * rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
        start, slots, rows, reinterpret_cast<int4*>(segments), row_segment);
    return cudaGetLastError();
}

} // namespace dflash
