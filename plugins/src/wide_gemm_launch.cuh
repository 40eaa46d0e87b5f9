// What launches of products of tens of rows, and of more, have in common.
#pragma once

#include "tensor_map.cuh"
#include "wide_gemm_sm90.cuh"

#include <algorithm>

namespace dflash
{
namespace wide
{

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

// Says what a product is and how it comes into shared memory, in tiles of L's size.
template <typename L>
cudaError_t fill(dflash_skinny_gemm_params const& p, Launch& launch)
{
    using Factor = typename L::Factor;
    int const row_bytes = p.inputs * static_cast<int>(sizeof(Factor));
    launch.p = p;
    launch.lines = (row_bytes + kLine - 1) / kLine; // what a row lacks of the last one comes as zeros
    launch.tiles = (p.outputs + L::kOutputs - 1) / L::kOutputs;
    launch.box_rows = std::min((p.rows + 7) / 8 * 8, L::kRows);
    cudaError_t const error = map_weight<Factor>(p, L::kOutputs, launch.weight);
    return error ? error : map_rows(p.x, p.rows, row_bytes, launch.box_rows, launch.inputs);
}

} // namespace wide
} // namespace dflash
