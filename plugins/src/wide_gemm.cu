// Matrix products of tens of rows (tokens) with large weights, bound by reading the weights, once; and of hundreds.
//
// As in `skinny_gemm.cu` weights are on their way before the kernel waits for the one before it. A row's sums go in one
// order, whatever number of rows there is: through the lines of a part in turn, then over the parts, which are a
// cluster's blocks of few rows and follow each other in a block of many.
#include "dflash_kernels.h"
#include "tall_gemm_sm90.cuh"
#include "tensor_map.cuh"
#include "wide_gemm_sm90.cuh"

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

constexpr Division kDivisions[] = {{64, 4}, {64, 2}, {96, 2}, {128, 2}, {192, 1}, {128, 1}, {96, 1}};

// Lines of a weight's rows that the busiest multiprocessor reads; none where a product cannot be divided so.
int64_t most_lines(dflash_skinny_gemm_params const& p, Division const& x, int processors)
{
    int const tiles = (p.outputs + x.outputs - 1) / x.outputs, clusters = std::max(processors / x.splits, 1);
    int const lines = (p.inputs * 2 / kLine + x.splits - 1) / x.splits;
    bool const fits = tiles <= clusters && !p.swiglu && p.inputs * 2 / kLine >= x.splits;
    return x.splits == 1 || fits ? int64_t{(tiles + clusters - 1) / clusters} * x.outputs * lines : INT64_MAX;
}

// Chooses the division after which that is least.
Division choose(dflash_skinny_gemm_params const& p, int processors)
{
    return *std::min_element(std::begin(kDivisions), std::end(kDivisions), [&](Division const& x, Division const& y)
        { return most_lines(p, x, processors) < most_lines(p, y, processors); });
}

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

template <typename L>
cudaError_t launch(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    constexpr auto kernel = wide_gemm_kernel<L>;
    using T = typename L::T;
    Launch launch;
    launch.p = p;
    launch.lines = p.inputs * static_cast<int>(sizeof(T)) / kLine;
    launch.tiles = (p.outputs + L::kOutputs - 1) / L::kOutputs;
    launch.box_rows = std::min((p.rows + 7) / 8 * 8, L::kRows);
    cudaError_t error = allow_shared_bytes<kernel>(L::kBytes);
    error = error ? error : map_weight<T>(p, L::kOutputs, launch.weight);
    error = error ? error : map_rows(p.x, p.rows, p.inputs * sizeof(T), launch.box_rows, launch.inputs);
    int const clusters = L::kSplits > 1 ? launch.tiles : std::min(launch.tiles, processors);
    dim3 const grid(clusters * L::kSplits, (p.rows + L::kRows - 1) / L::kRows);
    return error ? error : launch_kernel(kernel, grid, kThreads, L::kBytes, stream, launch);
}

int tall_pairs(dflash_skinny_gemm_params const& p)
{
    constexpr int kBoth = tall::kBlocks * tall::kRows;
    return (p.rows + kBoth - 1) / kBoth;
}

// Outputs of a tile of hundreds of rows. A tile takes as long as it has outputs, and a little for its begin and end.
int choose_tall(dflash_skinny_gemm_params const& p, int clusters, int parts)
{
    constexpr int kOutputs[] = {256, 192, 128, 96, 64}, kEnds = 16;
    auto const load = [&](int outputs)
    {
        bool const is_taken = (!p.swiglu || outputs % 64 == 0) && (parts == 1 || outputs < 256);
        int64_t const tiles = int64_t{tall_pairs(p)} * ((p.outputs + outputs - 1) / outputs);
        return is_taken ? (tiles + clusters - 1) / clusters * (outputs + kEnds) : INT64_MAX;
    };
    return *std::min_element(std::begin(kOutputs), std::end(kOutputs), [&](int x, int y) { return load(x) < load(y); });
}

template <typename T, int kOutputs, bool kInParts>
cudaError_t launch_tall(dflash_skinny_gemm_params const& p, int clusters, int parts, cudaStream_t stream)
{
    using L = tall::Layout<T, kOutputs, kInParts>;
    constexpr auto kernel = tall::tall_gemm_kernel<L>;
    tall::Launch launch;
    launch.p = p;
    launch.lines = p.inputs * static_cast<int>(sizeof(T)) / kLine;
    launch.parts = parts;
    launch.pairs = tall_pairs(p);
    launch.tiles = (p.outputs + kOutputs - 1) / kOutputs * launch.pairs;
    cudaError_t error = allow_shared_bytes<kernel>(L::kBytes);
    error = error ? error : map_weight<T>(p, kOutputs / tall::kBlocks, launch.weight);
    error = error ? error : map_rows(p.x, p.rows, p.inputs * sizeof(T), tall::kRows, launch.inputs);
    dim3 const grid(std::min(launch.tiles, clusters) * tall::kBlocks);
    return error ? error : launch_kernel(kernel, grid, tall::kThreads, L::kBytes, stream, launch);
}

template <typename T>
cudaError_t launch_tall(dflash_skinny_gemm_params const& p, int processors, int parts, cudaStream_t stream)
{
    int const clusters = std::max(processors / tall::kBlocks, 1);
    switch (choose_tall(p, clusters, parts) * 2 + (parts > 1))
    {
    case 256 * 2: return launch_tall<T, 256, false>(p, clusters, parts, stream);
    case 192 * 2: return launch_tall<T, 192, false>(p, clusters, parts, stream);
    case 192 * 2 + 1: return launch_tall<T, 192, true>(p, clusters, parts, stream);
    case 128 * 2: return launch_tall<T, 128, false>(p, clusters, parts, stream);
    case 128 * 2 + 1: return launch_tall<T, 128, true>(p, clusters, parts, stream);
    case 96 * 2: return launch_tall<T, 96, false>(p, clusters, parts, stream);
    case 96 * 2 + 1: return launch_tall<T, 96, true>(p, clusters, parts, stream);
    case 64 * 2: return launch_tall<T, 64, false>(p, clusters, parts, stream);
    case 64 * 2 + 1: return launch_tall<T, 64, true>(p, clusters, parts, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <typename T, int kRows>
cudaError_t launch(dflash_skinny_gemm_params const& p, int processors, cudaStream_t stream)
{
    Division const division = choose(p, processors);
    switch (division.outputs * 8 + division.splits)
    {
    case 64 * 8 + 4: return launch<Layout<T, kRows, 64, 4>>(p, processors, stream);
    case 64 * 8 + 2: return launch<Layout<T, kRows, 64, 2>>(p, processors, stream);
    case 96 * 8 + 2: return launch<Layout<T, kRows, 96, 2>>(p, processors, stream);
    case 96 * 8 + 1: return launch<Layout<T, kRows, 96, 1>>(p, processors, stream);
    case 128 * 8 + 2: return launch<Layout<T, kRows, 128, 2>>(p, processors, stream);
    case 128 * 8 + 1: return launch<Layout<T, kRows, 128, 1>>(p, processors, stream);
    case 192 * 8 + 1: return launch<Layout<T, kRows, 192, 1>>(p, processors, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <typename T>
cudaError_t launch(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    int device = 0, processors = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    error = error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess)
    {
        return error;
    }
#ifdef DFLASH_SM90A
    bool const has_kernel = major == 9;
#else
    bool const has_kernel = false;
#endif
    if (!has_kernel)
    {
        return cudaErrorNotSupported;
    }
    return p.rows <= 32 ? launch<T, 32>(p, processors, stream)
        : p.rows <= 64  ? launch<T, 64>(p, processors, stream)
        : p.rows <= 128 ? launch<T, 128>(p, processors, stream)
                        : launch_tall<T>(p, processors, choose(p, processors).splits, stream);
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
    if (p->rows < 0 || p->inputs < kLine / 2 || p->inputs % (kLine / 2) || p->outputs < kGranule
        || p->outputs % kGranule || p->weight_dtype != p->dtype || p->norm_weight || p->scale
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
