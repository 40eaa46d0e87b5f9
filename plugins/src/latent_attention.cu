// Latent attention (MLA), absorbed, of short runs of rows over long caches: all heads share the rows of one cache.
//
// The work is divided as attention's is, over the slots' tiles; the partial results of a slot that was divided are
// combined as there. See attention.cu.
#include "attention_combine.cuh"
#include "attention_work.cuh"
#include "dflash_kernels.h"
#include "element.cuh"
#include "latent_attention_sm90.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

// Of a slot, from which on a warp would go through their partial results for long.
constexpr int kManyRanges = 64;

struct LatentPlan
{
    Work work;
    int sms;
    size_t sums_at; // where the sums lie in the workspace
    size_t divided_at;
    size_t bytes;
};

cudaError_t make_plan(dflash_attention_params const& p, LatentPlan& plan)
{
    bool const is_known = p.head_size == kLatentRow && p.kv_heads == 1 && p.heads > 0 && p.rows > 0 && p.slots >= 0
        && p.cache_rows > 0 && p.causal && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16);
    bool const is_plain = !p.window && !p.sinks && !p.key_scale && !p.value_scale && !p.segments && !p.page_table
        && !p.block && !p.row_path;
    if (!is_known || !is_plain)
    {
        return cudaErrorInvalidValue;
    }
    cudaError_t const error = find_hopper_processors(plan.sms);
    if (error != cudaSuccess || p.is_exact)
    {
        return error ? error : cudaErrorNotSupported;
    }
    Work& w = plan.work;
    w = {};
    w.p = p;
    w.group = p.heads;
    w.packed_rows = p.heads * p.rows;
    w.per_row = 1.f / p.rows;
    w.page_tiles = (p.cache_rows + kTile - 1) / kTile;
    w.per_page = 1.f / w.page_tiles;
    w.row_blocks = (w.packed_rows + sm90::kRows - 1) / sm90::kRows;
    w.least_units = 1;
    int64_t const most = std::max(int64_t{p.slots} * w.page_tiles, int64_t{1});
    w.ranges = static_cast<int>(std::min(int64_t{std::max(plan.sms / w.row_blocks, 1)}, most));
    w.row_tiles = w.row_blocks * (sm90::kRows / 16);
    w.owners = std::min(w.ranges, p.slots);
    size_t const rows = size_t{2} * w.ranges * w.row_tiles * 16;
    plan.sums_at = rows * kLatentRank * sizeof(float);
    plan.divided_at = plan.sums_at + rows * sizeof(float2);
    plan.bytes = plan.divided_at + w.owners * sizeof(Divided);
    return cudaSuccess;
}

// A cache as the copy engine sees it: [slots, 1, 9, S, 64], in boxes of one tile.
cudaError_t map_rows(dflash_attention_params const& p, CUtensorMap& map)
{
    constexpr int kColumns = sm90::LatentShared::kColumns;
    auto const rows = static_cast<cuuint64_t>(p.cache_rows);
    auto const slot_bytes = 2 * (p.slots > 1 ? static_cast<cuuint64_t>(p.cache_slot_stride) : rows * kLatentRow);
    return map_tiles<5>(p.dtype == DFLASH_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, p.keys, {kAtom, rows, kColumns, 1, static_cast<cuuint64_t>(p.slots)},
        {2 * kLatentRow, 2 * kAtom, slot_bytes, slot_bytes}, {kAtom, kTile, kColumns, 1, 1}, map);
}

template <typename T>
cudaError_t launch(LatentPlan const& plan, cudaStream_t stream)
{
    constexpr int kBytes = sm90::LatentShared::kBytes;
    constexpr auto kernel = sm90::latent_attention_kernel<T>;
    Work const& w = plan.work;
    CUtensorMap cache;
    cudaError_t error = map_rows(w.p, cache);
    error = error ? error : allow_shared_bytes<kernel>(kBytes);
    error = error ? error
                  : launch_kernel(kernel, dim3(w.ranges, w.row_blocks), sm90::kLatentThreads, kBytes, stream, w, cache);
    if (error)
    {
        return error;
    }
    if (w.ranges < kManyRanges * w.p.slots)
    {
        return launch_combine<T, kLatentRank>(w, plan.sms, stream);
    }
    // Few slots: each is divided among so many ranges that a warp would go through them for long. As many blocks as the
    // GPU has room for: only the driver knows that, for the registers are those of code that this pass does not see.
    int blocks_per_sm = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks_per_sm, combine_kernel<T, kLatentRank, kCombineWarps, 1, 2>, kCombineWarps * 32, 0);
    return error ? error : launch_combine<T, kLatentRank, kCombineWarps, 1>(w, blocks_per_sm * plan.sms, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_latent_attention_workspace(dflash_attention_params const* p, size_t* bytes)
{
    dflash::LatentPlan plan;
    cudaError_t const error = dflash::make_plan(*p, plan);
    *bytes = error ? 0 : plan.bytes;
    return error;
}

extern "C" cudaError_t dflash_latent_attention(
    dflash_attention_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    LatentPlan plan;
    cudaError_t const error = make_plan(*p, plan);
    if (error)
    {
        return error;
    }
    if (workspace_bytes < plan.bytes)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    plan.work.partial_out = static_cast<float4*>(workspace);
    plan.work.partial_sums = reinterpret_cast<float2*>(static_cast<char*>(workspace) + plan.sums_at);
    plan.work.divided = reinterpret_cast<Divided*>(static_cast<char*>(workspace) + plan.divided_at);
    return p->dtype == DFLASH_FP16 ? launch<__half>(plan, stream) : launch<__nv_bfloat16>(plan, stream);
}
