// Matrix products of tens of rows (tokens) with large weights, bound by reading the weights, once.
//
// As in `skinny_gemm.cu` weights are on their way before the kernel waits for the one before it. A row's sums go in one
// order, whatever number of rows there is: through the lines of a block in turn, then over the blocks of a cluster.
#include "dflash_kernels.h"
#include "wide_gemm_launch.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace dflash
{
namespace
{

using namespace wide;

// How a weight's outputs are divided.
struct Division
{
    int outputs; // of a tile
    int splits; // blocks of a cluster
};

constexpr Division kDivisions[]
    = {{32, 2}, {48, 2}, {64, 2}, {80, 2}, {96, 2}, {128, 2}, {192, 1}, {128, 1}, {112, 1}, {96, 1}};

// Lines of a weight's rows that the busiest multiprocessor reads; none where a product cannot be divided so.
int64_t most_lines(dflash_skinny_gemm_params const& p, Division const& x, int processors)
{
    int const tiles = (p.outputs + x.outputs - 1) / x.outputs, clusters = std::max(processors / x.splits, 1);
    int const lines = (p.inputs * 2 / kLine + x.splits - 1) / x.splits;
    // With SwiGLU no block has part of a sum, and a warpgroup's share of a tile is whole granules.
    bool const fits = x.splits == 1 ? !p.swiglu || x.outputs % (2 * kGranule) == 0
                                    : tiles <= clusters && !p.swiglu && p.inputs * 2 / kLine >= x.splits;
    return fits ? int64_t{(tiles + clusters - 1) / clusters} * x.outputs * lines : INT64_MAX;
}

// Chooses the division after which that is least.
Division choose(dflash_skinny_gemm_params const& p, int processors)
{
    return *std::min_element(std::begin(kDivisions), std::end(kDivisions), [&](Division const& x, Division const& y)
        { return most_lines(p, x, processors) < most_lines(p, y, processors); });
}

template <typename L>
cudaError_t launch(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    constexpr auto kernel = wide_gemm_kernel<L>;
    Launch launch;
    cudaError_t error = allow_shared_bytes<kernel>(L::kBytes);
    error = error ? error : fill<L>(p, launch);
    int const clusters = L::kSplits > 1 ? launch.tiles : std::min(launch.tiles, processors);
    dim3 const grid(clusters * L::kSplits, (p.rows + L::kRows - 1) / L::kRows);
    return error ? error : launch_kernel(kernel, grid, kThreads, L::kBytes, stream, launch);
}

template <typename T, int kRows>
cudaError_t launch(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    Division const division = choose(p, processors);
    switch (division.outputs * 8 + division.splits)
    {
    case 32 * 8 + 2: return launch<Layout<T, kRows, 32, 2>>(p, processors, stream);
    case 48 * 8 + 2: return launch<Layout<T, kRows, 48, 2>>(p, processors, stream);
    case 64 * 8 + 2: return launch<Layout<T, kRows, 64, 2>>(p, processors, stream);
    case 80 * 8 + 2: return launch<Layout<T, kRows, 80, 2>>(p, processors, stream);
    case 96 * 8 + 2: return launch<Layout<T, kRows, 96, 2>>(p, processors, stream);
    case 96 * 8 + 1: return launch<Layout<T, kRows, 96, 1>>(p, processors, stream);
    case 112 * 8 + 1: return launch<Layout<T, kRows, 112, 1>>(p, processors, stream);
    case 128 * 8 + 2: return launch<Layout<T, kRows, 128, 2>>(p, processors, stream);
    case 128 * 8 + 1: return launch<Layout<T, kRows, 128, 1>>(p, processors, stream);
    case 192 * 8 + 1: return launch<Layout<T, kRows, 192, 1>>(p, processors, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <typename T>
cudaError_t launch(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    int processors = 0;
    cudaError_t const error = find_hopper_processors(processors);
    if (error != cudaSuccess)
    {
        return error;
    }
    return p.rows <= 32 ? launch<T, 32>(p, processors, stream)
        : p.rows <= 64  ? launch<T, 64>(p, processors, stream)
                        : launch<T, 128>(p, processors, stream);
}

} // namespace
} // namespace dflash

extern "C" int32_t dflash_wide_gemm_load(dflash_skinny_gemm_params const* p, int32_t processors)
{
    int64_t const most = dflash::most_lines(*p, dflash::choose(*p, processors), processors);
    int64_t const all = int64_t{p->outputs} * (p->inputs * 2 / dflash::wide::kLine);
    return static_cast<int32_t>(std::min(1000 * most * processors / all, int64_t{INT32_MAX}));
}

extern "C" cudaError_t dflash_wide_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->rows < 0 || p->rows > DFLASH_WIDE_ROWS || p->row_factors || p->inputs < kLine / 2 || p->inputs % (kLine / 2)
        || p->outputs < kGranule || p->outputs % kGranule || p->weight_dtype != p->dtype || p->norm_weight || p->scale
        || (p->swiglu && p->residual) || (p->gelu && !p->swiglu))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch<__half>(*p, stream);
    case DFLASH_BF16: return launch<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
