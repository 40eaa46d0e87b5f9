// Matrix products of tens of rows (tokens) with large weights, bound by reading the weights, once.
//
// As in `skinny_gemm.cu` weights are on their way before the kernel waits for the one before it. A row's sums go in one
// order, whatever number of rows there is: through the lines of a block in turn, then over the blocks of a cluster. In
// FP8 there are two such orders, of fewer rows and of more.
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

// Outputs of a warpgroup, where lines have scales of their own: a line's sums are apart from those before.
constexpr int kMostScaled = 96;

bool is_fp8(dflash_skinny_gemm_params const& p)
{
    return p.weight_dtype == DFLASH_FP8;
}

// Of a weight's row.
int lines_of(dflash_skinny_gemm_params const& p)
{
    return (p.inputs * (is_fp8(p) ? 1 : 2) + kLine - 1) / kLine;
}

// Lines of a weight's rows that the busiest multiprocessor reads; none where a product cannot be divided so.
int64_t most_lines(dflash_skinny_gemm_params const& p, Division const& x, int processors)
{
    int const tiles = (p.outputs + x.outputs - 1) / x.outputs, clusters = std::max(processors / x.splits, 1);
    int const lines = (lines_of(p) + x.splits - 1) / x.splits;
    // With SwiGLU no block has part of a sum, and a warpgroup's share of a tile is whole granules.
    bool const fits = x.splits == 1 ? !p.swiglu || x.outputs % (2 * kGranule) == 0
                                    : tiles <= clusters && !p.swiglu && lines_of(p) >= x.splits;
    bool const has_registers = !p.is_scaled_by_block || p.rows <= 64 || x.outputs <= kMostScaled;
    return fits && has_registers ? int64_t{(tiles + clusters - 1) / clusters} * x.outputs * lines : INT64_MAX;
}

// Multiprocessors for each DFLASH_WIDE_ROWS of the rows, which are multiplied side by side.
int own_processors(dflash_skinny_gemm_params const& p, int processors)
{
    return processors / std::max((p.rows + DFLASH_WIDE_ROWS - 1) / DFLASH_WIDE_ROWS, 1);
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

// What is multiplied, and what comes of it.
template <typename OutputType, typename FactorType, bool kScaledByBlock>
struct Kind
{
    template <int kRows, int kOutputs, int kSplits>
    static cudaError_t launch_tiles(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
    {
        if constexpr (kScaledByBlock && kRows > 64 && kOutputs > kMostScaled)
        {
            return cudaErrorInvalidValue; // not chosen
        }
        else
        {
            return launch<Layout<OutputType, kRows, kOutputs, kSplits, FactorType, kScaledByBlock>>(
                p, processors, stream);
        }
    }

    template <int kRows>
    static cudaError_t launch_rows(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
    {
        Division const division = choose(p, processors);
        switch (division.outputs * 8 + division.splits)
        {
        case 32 * 8 + 2: return launch_tiles<kRows, 32, 2>(p, processors, stream);
        case 48 * 8 + 2: return launch_tiles<kRows, 48, 2>(p, processors, stream);
        case 64 * 8 + 2: return launch_tiles<kRows, 64, 2>(p, processors, stream);
        case 80 * 8 + 2: return launch_tiles<kRows, 80, 2>(p, processors, stream);
        case 96 * 8 + 2: return launch_tiles<kRows, 96, 2>(p, processors, stream);
        case 96 * 8 + 1: return launch_tiles<kRows, 96, 1>(p, processors, stream);
        case 112 * 8 + 1: return launch_tiles<kRows, 112, 1>(p, processors, stream);
        case 128 * 8 + 2: return launch_tiles<kRows, 128, 2>(p, processors, stream);
        case 128 * 8 + 1: return launch_tiles<kRows, 128, 1>(p, processors, stream);
        case 192 * 8 + 1: return launch_tiles<kRows, 192, 1>(p, processors, stream);
        default: return cudaErrorInvalidValue;
        }
    }

    static cudaError_t launch_any(dflash_skinny_gemm_params const& p, cudaStream_t stream)
    {
        int processors = 0;
        cudaError_t const error = find_hopper_processors(processors);
        if (error != cudaSuccess)
        {
            return error;
        }
        int const own = own_processors(p, processors);
        return p.rows <= 32 ? launch_rows<32>(p, own, stream)
            : p.rows <= 64  ? launch_rows<64>(p, own, stream)
                            : launch_rows<DFLASH_WIDE_ROWS>(p, own, stream);
    }
};

cudaError_t launch_bf16(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    using T = __nv_bfloat16;
    return !is_fp8(p)          ? Kind<T, T, false>::launch_any(p, stream)
        : p.is_scaled_by_block ? Kind<T, E4M3, true>::launch_any(p, stream)
                               : Kind<T, E4M3, false>::launch_any(p, stream);
}

// Whether numbers are of types and sizes that there are products of.
bool are_known(dflash_skinny_gemm_params const& p)
{
    bool const has_more_rows = is_fp8(p) && !p.is_scaled_by_block;
    if (p.rows < 0 || p.rows > (has_more_rows ? DFLASH_WIDE_FP8_ROWS : DFLASH_WIDE_ROWS))
    {
        return false;
    }
    if (is_fp8(p))
    {
        int const unit = p.is_scaled_by_block ? kLine : 16;
        bool const has_scales = p.scale && p.row_factors && reinterpret_cast<uintptr_t>(p.scale) % sizeof(float2) == 0;
        return p.dtype == DFLASH_BF16 && has_scales && p.inputs >= unit && p.inputs % unit == 0;
    }
    return p.weight_dtype == p.dtype && !p.scale && !p.row_factors && p.inputs >= kLine / 2
        && p.inputs % (kLine / 2) == 0;
}

} // namespace
} // namespace dflash

extern "C" int32_t dflash_wide_gemm_load(dflash_skinny_gemm_params const* p, int32_t processors)
{
    int const own = dflash::own_processors(*p, processors);
    int64_t const most = dflash::most_lines(*p, dflash::choose(*p, own), own);
    int64_t const all = int64_t{p->outputs} * dflash::lines_of(*p);
    return static_cast<int32_t>(std::min(1000 * most * own / all, int64_t{INT32_MAX}));
}

extern "C" cudaError_t dflash_wide_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (!are_known(*p) || p->outputs < kGranule || p->outputs % kGranule || p->norm_weight || (p->swiglu && p->residual)
        || (p->gelu && !p->swiglu))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return Kind<__half, __half, false>::launch_any(*p, stream);
    case DFLASH_BF16: return launch_bf16(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
