// Matrix products of any number of rows (tokens) with large weights, whose sums go in one order: `product_order.cuh`.
//
// Few rows are `skinny_gemm.cu`'s, tens the kernel's of `exact_gemm_sm90.cuh`, more that of `tall_gemm_sm90.cuh`.
#include "dflash_kernels.h"
#include "exact_gemm_sm90.cuh"
#include "skinny_gemm.cuh"
#include "tall_gemm_sm90.cuh"
#include "wide_gemm_launch.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace dflash
{
namespace
{

constexpr int kEnds = 16; // what a tile's begin and end take, in outputs
constexpr size_t kParked = size_t{tall::kRows} * 192 * sizeof(float); // bytes of a block: see `Parking`

// How a weight's outputs are divided where there are tens of rows.
struct Division
{
    int outputs; // of a tile
    int splits; // blocks of a cluster, each with half of the chains
};

constexpr Division kDivisions[] = {{192, 1}, {128, 1}, {96, 1}, {64, 1}, {192, 2}, {128, 2}, {96, 2}, {64, 2}, {32, 2}};

// A row's lines, and whether they are in two halves to be added up: of so few lines the last half would be empty.
int lines_of(dflash_skinny_gemm_params const& p)
{
    return p.inputs * 2 / wide::kLine;
}

bool has_halves(dflash_skinny_gemm_params const& p)
{
    return blocks_of_a_row(p.outputs) == 2 && lines_of(p) > kBlockChains;
}

// What the busiest multiprocessor then does, or that it cannot be done so.
int64_t load_of(dflash_skinny_gemm_params const& p, Division const& x, int processors)
{
    bool const shares_rows = p.rows > 64;
    int const tiles = (p.outputs + x.outputs - 1) / x.outputs, clusters = std::max(processors / x.splits, 1);
    int const own_tiles = x.outputs / 8 / (shares_rows ? 1 : wide::kGroups) / x.splits; // of a warpgroup
    bool const fits = (x.splits == 2) == has_halves(p) && (!p.swiglu || own_tiles % 2 == 0);
    return fits ? int64_t{(tiles + clusters - 1) / clusters} * (x.outputs + kEnds) : INT64_MAX;
}

template <typename L>
cudaError_t launch_wide(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    constexpr auto kernel = exact::exact_gemm_kernel<L>;
    wide::Launch launch;
    cudaError_t error = allow_shared_bytes<kernel>(L::kBytes);
    error = error ? error : wide::fill<L>(p, launch);
    dim3 const grid(std::min(launch.tiles, std::max(processors / L::kSplits, 1)) * L::kSplits);
    return error ? error : launch_kernel(kernel, grid, L::kThreads, L::kBytes, stream, launch);
}

template <typename T, int kRows>
cudaError_t launch_wide(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    using exact::Layout;
    Division const division = *std::min_element(std::begin(kDivisions), std::end(kDivisions),
        [&](Division const& x, Division const& y) { return load_of(p, x, processors) < load_of(p, y, processors); });
    switch (division.outputs * 2 + division.splits - 1)
    {
    case 192 * 2: return launch_wide<Layout<T, kRows, 192, 1>>(p, processors, stream);
    case 128 * 2: return launch_wide<Layout<T, kRows, 128, 1>>(p, processors, stream);
    case 96 * 2: return launch_wide<Layout<T, kRows, 96, 1>>(p, processors, stream);
    case 64 * 2: return launch_wide<Layout<T, kRows, 64, 1>>(p, processors, stream);
    case 192 * 2 + 1: return launch_wide<Layout<T, kRows, 192, 2>>(p, processors, stream);
    case 128 * 2 + 1: return launch_wide<Layout<T, kRows, 128, 2>>(p, processors, stream);
    case 96 * 2 + 1: return launch_wide<Layout<T, kRows, 96, 2>>(p, processors, stream);
    case 64 * 2 + 1: return launch_wide<Layout<T, kRows, 64, 2>>(p, processors, stream);
    case 32 * 2 + 1: return launch_wide<Layout<T, kRows, 32, 2>>(p, processors, stream);
    default: return cudaErrorInvalidValue;
    }
}

int tall_pairs(dflash_skinny_gemm_params const& p)
{
    constexpr int kBoth = tall::kBlocks * tall::kRows;
    return (p.rows + kBoth - 1) / kBoth;
}

// Outputs of a tile of hundreds of rows.
int choose_tall(dflash_skinny_gemm_params const& p, int clusters)
{
    constexpr int kOutputs[] = {192, 128, 96, 64};
    auto const load = [&](int outputs)
    {
        int64_t const tiles = int64_t{tall_pairs(p)} * ((p.outputs + outputs - 1) / outputs);
        bool const is_taken = !p.swiglu || outputs % 64 == 0;
        return is_taken ? (tiles + clusters - 1) / clusters * (outputs + kEnds) : INT64_MAX;
    };
    return *std::min_element(std::begin(kOutputs), std::end(kOutputs), [&](int x, int y) { return load(x) < load(y); });
}

template <typename T, int kOutputs, bool kHasHalves>
cudaError_t launch_tall(dflash_skinny_gemm_params const& p, int clusters, void* parking, cudaStream_t stream)
{
    using L = tall::Layout<T, kOutputs, kHasHalves>;
    constexpr auto kernel = tall::tall_gemm_kernel<L>;
    tall::Launch launch;
    launch.p = p;
    launch.lines = lines_of(p);
    launch.pairs = tall_pairs(p);
    launch.parking = parking;
    launch.tiles = (p.outputs + kOutputs - 1) / kOutputs * launch.pairs;
    cudaError_t error = allow_shared_bytes<kernel>(L::kBytes);
    error = error ? error : wide::map_weight<T>(p, kOutputs / tall::kBlocks, launch.weight);
    error = error ? error : map_rows(p.x, p.rows, p.inputs * sizeof(T), tall::kRows, launch.inputs);
    dim3 const grid(std::min(launch.tiles, clusters) * tall::kBlocks);
    return error ? error : launch_kernel(kernel, grid, tall::kThreads, L::kBytes, stream, launch);
}

template <typename T, bool kHasHalves>
cudaError_t launch_tall_of(dflash_skinny_gemm_params const& p, int processors, void* parking, cudaStream_t stream)
{
    int const clusters = std::max(processors / tall::kBlocks, 1);
    switch (choose_tall(p, clusters))
    {
    case 192: return launch_tall<T, 192, kHasHalves>(p, clusters, parking, stream);
    case 128: return launch_tall<T, 128, kHasHalves>(p, clusters, parking, stream);
    case 96: return launch_tall<T, 96, kHasHalves>(p, clusters, parking, stream);
    default: return launch_tall<T, 64, kHasHalves>(p, clusters, parking, stream);
    }
}

size_t workspace_of(dflash_skinny_gemm_params const& p, int processors)
{
    return p.rows > DFLASH_WIDE_ROWS && has_halves(p) ? processors * kParked : 0;
}

template <typename T>
cudaError_t launch(
    dflash_skinny_gemm_params const& p, void* workspace, size_t workspace_bytes, int processors, cudaStream_t stream)
{
    if (workspace_bytes < workspace_of(p, processors))
    {
        return cudaErrorInvalidValue;
    }
    return p.rows <= 32              ? launch_wide<T, 32>(p, processors, stream)
        : p.rows <= 64               ? launch_wide<T, 64>(p, processors, stream)
        : p.rows <= DFLASH_WIDE_ROWS ? launch_wide<T, 128>(p, processors, stream)
        : has_halves(p)              ? launch_tall_of<T, true>(p, processors, workspace, stream)
                                     : launch_tall_of<T, false>(p, processors, workspace, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_exact_gemm_workspace(dflash_skinny_gemm_params const* p, size_t* bytes)
{
    int processors = 0;
    cudaError_t const error = dflash::find_hopper_processors(processors);
    *bytes = error == cudaSuccess ? dflash::workspace_of(*p, processors) : 0;
    return error;
}

extern "C" cudaError_t dflash_exact_gemm(
    dflash_skinny_gemm_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_few = p->rows <= DFLASH_SKINNY_ROWS;
    constexpr int kColumns = wide::kLine / 2;
    if (p->rows < 0 || p->inputs < kColumns || p->inputs % kColumns || p->outputs < wide::kGranule
        || p->outputs % wide::kGranule || p->weight_dtype != p->dtype || p->scale || (p->swiglu && p->residual)
        || (p->gelu && !p->swiglu) || (is_few ? p->row_factors != nullptr : p->norm_weight != nullptr)
        || (p->norm_weight && p->dtype != DFLASH_BF16))
    {
        return cudaErrorInvalidValue;
    }
    int processors = 0;
    cudaError_t const error = find_hopper_processors(processors);
    if (error != cudaSuccess || p->rows == 0)
    {
        return error;
    }
    if (is_few)
    {
        return skinny_gemm(*p, true, stream);
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch<__half>(*p, workspace, workspace_bytes, processors, stream);
    case DFLASH_BF16: return launch<__nv_bfloat16>(*p, workspace, workspace_bytes, processors, stream);
    default: return cudaErrorInvalidValue;
    }
}
