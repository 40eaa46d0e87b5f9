// Matrix products of hundreds of rows (tokens) with large weights, gated, for the shapes that fill the GPU evenly.
#include "bulk_gemm_sm90.cuh"
#include "dflash_kernels.h"
#include "tensor_map.cuh"

#include <algorithm>
#include <cstdint>

namespace dflash
{
namespace
{

using namespace bulk;

int row_tiles(dflash_skinny_gemm_params const& p)
{
    return (p.rows + kRows - 1) / kRows;
}

int items(dflash_skinny_gemm_params const& p)
{
    return row_tiles(p) * ((p.outputs + kBlocks * kOutputs - 1) / (kBlocks * kOutputs));
}

template <typename T>
cudaError_t map_weight(dflash_skinny_gemm_params const& p, CUtensorMap& map)
{
    cuuint64_t const row_bytes = p.inputs * sizeof(T), count = p.outputs;
    constexpr cuuint64_t kHalf = kGranule / 2;
    return map_bytes<4>(p.weight, {row_bytes, kHalf, 2, count / kGranule},
        {row_bytes, count / 2 * row_bytes, kHalf * row_bytes}, {kLine, kHalf, 2, kOutputs / kGranule}, map);
}

template <typename T>
cudaError_t launch(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    int processors = 0;
    cudaError_t error = find_hopper_processors(processors);
    constexpr auto kernel = bulk_gemm_kernel<T>;
    Launch launch;
    launch.p = p;
    launch.lines = p.inputs * static_cast<int>(sizeof(T)) / kLine;
    launch.row_tiles = row_tiles(p);
    launch.items = items(p);
    error = error ? error : allow_shared_bytes<kernel>(kBytes);
    error = error ? error : map_weight<T>(p, launch.weight);
    error = error ? error : map_rows(p.x, p.rows, p.inputs * sizeof(T), kRows / kBlocks, launch.inputs);
    dim3 const grid(std::min(launch.items, std::max(processors / kBlocks, 1)) * kBlocks);
    return error ? error : launch_kernel(kernel, grid, kThreads, kBytes, stream, launch);
}

} // namespace
} // namespace dflash

extern "C" int32_t dflash_bulk_gemm_load(dflash_skinny_gemm_params const* p, int32_t processors)
{
    using namespace dflash;
    int const clusters = std::max(processors / kBlocks, 1);
    double const most = double((items(*p) + clusters - 1) / clusters) * kRows * kOutputs;
    double const all = double(p->rows) * p->outputs;
    return static_cast<int32_t>(std::min(1000 * most * processors / all, double(INT32_MAX)));
}

extern "C" cudaError_t dflash_bulk_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->rows < 0 || p->inputs < kLine / 2 || p->inputs % (kLine / 2) || p->outputs < 2 * kGranule
        || p->outputs % (2 * kGranule) || p->weight_dtype != p->dtype || p->norm_weight || p->row_factors
        || p->scale || !p->swiglu || p->residual)
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
