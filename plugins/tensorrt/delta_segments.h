// The segments of a gated delta net's rows, and its counters, from what a step says of its slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dflash
{

// Writes segments [B, 4]: slot b's rows begin at row b * rows, at position start[b], and the first row_count[b] are
// real. Counts outside 0..rows, as TensorRT may give while it times a layer, are brought there. Clears counters.
cudaError_t make_delta_segments(int32_t const* start, int32_t const* row_count, int32_t slots, int32_t rows,
    int32_t* segments, int32_t* counters, int32_t counter_count, cudaStream_t stream);

} // namespace dflash
