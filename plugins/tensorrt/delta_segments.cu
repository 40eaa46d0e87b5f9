#include "delta_segments.h"

namespace dflash
{
namespace
{

__global__ void delta_segments_kernel(int32_t const* start, int32_t const* row_count, int32_t slots, int32_t rows,
    int4* segments, int32_t* counters, int32_t counter_count)
{
    int32_t const index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < slots)
    {
        segments[index] = {index, start[index], index * rows, min(max(row_count[index], 0), rows)};
    }
    if (index < counter_count)
    {
        counters[index] = 0;
    }
}

} // namespace

cudaError_t make_delta_segments(int32_t const* start, int32_t const* row_count, int32_t slots, int32_t rows,
    int32_t* segments, int32_t* counters, int32_t counter_count, cudaStream_t stream)
{
    constexpr int32_t kThreads = 128;
    int32_t const most = counter_count > slots ? counter_count : slots;
    delta_segments_kernel<<<(most + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
        start, row_count, slots, rows, reinterpret_cast<int4*>(segments), counters, counter_count);
    return cudaGetLastError();
}

} // namespace dflash
