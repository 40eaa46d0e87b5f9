// Products of few rows, in either order.
#pragma once

#include "dflash_kernels.h"

namespace dflash
{

// is_exact: in the order of `product_order.cuh`, in which more rows can be added up too; else in that order or another.
cudaError_t skinny_gemm(dflash_skinny_gemm_params const& p, bool is_exact, cudaStream_t stream);

} // namespace dflash
