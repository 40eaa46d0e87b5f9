// Factors of rows, by which a product's sums are multiplied.
#pragma once

#include "dflash_kernels.h"

namespace dflash
{

// What the sums of two rows are multiplied by.
struct RowFactors
{
    float first, second;

    // row: the first; the second is the eighth behind it.
    __device__ __forceinline__ RowFactors(dflash_skinny_gemm_params const& p, int row)
        : first(factor_of(p, row))
        , second(factor_of(p, row + 8))
    {
    }

    __device__ __forceinline__ static float factor_of(dflash_skinny_gemm_params const& p, int row)
    {
        return p.row_factors && row < p.rows ? __ldcg(p.row_factors + row) : 1.f;
    }

    // below: of the second row.
    __device__ __forceinline__ float of(bool below) const
    {
        return below ? second : first;
    }
};

} // namespace dflash
