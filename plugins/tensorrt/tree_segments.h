// The segments of rows that are trees, one a slot.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dflash
{

// Writes segments [B, 4]: slot b's rows are all of those from row b * rows on, from position start[b] on; and
// row_segment [B * rows], the slot of each row.
cudaError_t make_tree_segments(
    int32_t const* start, int32_t slots, int32_t rows, int32_t* segments, int32_t* row_segment, cudaStream_t stream);

} // namespace dflash
