// Append and attention of one row a slot in one launch: of steps that decode without drafts.
//
// A cluster has the query heads of a slot's KV head, at most eight, and its blocks share the cached keys; of long
// caches several clusters have a part each. Products are of transposed matrices, so that keys, and dimensions of
// values, are the tiles' sixteen and heads their eight: logits [keys, heads] = K q^T, outputs [dimensions, heads] = V^T
// weights^T. Each warp has keys of its own, in shared memory of which a block needs so little, as of registers, that it
// finds place beside a product of few rows: it asks for its first keys while that still runs, and reads nothing of it
// but the row's own queries, key and value, which are the last to come. The row's own key is added where the blocks'
// results are joined.
#include "cache_map.cuh"
#include "dflash_kernels.h"
#include "row_attention_sm90.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kLeastCluster = 2; // blocks: one alone cannot be sent to
constexpr int kTogether = 18; // multiprocessors of a GPC, on one of which all of a cluster's blocks lie
constexpr int kMostLarge = 6; // clusters of the most blocks for which there surely is room at once
constexpr int kWhole = 100; // multiprocessors of a GPU that is not divided: its parts may have GPCs of fewer
constexpr int kWorthRounds = 12; // of each block, before a slot's keys are divided among clusters

struct Plan
{
    RowWork work;
    int clusters;
    size_t sums_at; // where the sums lie in the workspace
    size_t bytes;
};

// Whether both say the same of what both have.
bool are_alike(dflash_append_params const& a, dflash_attention_params const& p)
{
    return a.dtype == p.dtype && a.slots == p.slots && a.heads == p.heads && a.kv_heads == p.kv_heads
        && a.head_size == p.head_size && a.cache_rows == p.cache_rows && a.keys == p.keys && a.values == p.values
        && a.cache_slot_stride == p.cache_slot_stride && a.cache_head_stride == p.cache_head_stride
        && a.key_scale == p.key_scale && a.value_scale == p.value_scale && a.segments && a.page_table == p.page_table
        && a.page_table_stride == p.page_table_stride && a.page_rows == p.page_rows && a.out == p.out;
}

// Whether the kernel, were it for all, computes that.
bool is_right(dflash_append_params const& a, dflash_attention_params const& p)
{
    bool const is_known = (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16) && p.segments && p.rows == 1 && p.causal
        && p.block == 0 && !p.added && !p.row_path && p.cache_rows > 0 && p.slots >= 0 && p.kv_heads > 0
        && p.heads % p.kv_heads == 0 && !p.key_scale == !p.value_scale;
    bool const has_rows = a.rows == p.slots && a.context_rows == 0 && a.block == 0 && !a.committed && a.qkv
        && a.row_segment && a.positions > 0 && !a.q_norm == !a.k_norm && a.rotary_size >= 0
        && a.rotary_size <= a.head_size;
    // Copies lie within a page: of several they hold whole tiles.
    bool const has_pages = p.pages > 0
        && (!p.page_table || (p.page_rows > 0 && (p.page_rows % kTile == 0 || p.page_rows >= p.cache_rows)));
    return is_known && has_rows && has_pages && are_alike(a, p);
}

cudaError_t make_plan(dflash_append_params const& a, dflash_attention_params const& p, Plan& plan)
{
    int processors = 0;
    cudaError_t const error = find_hopper_processors(processors);
    if (error)
    {
        return error;
    }
    if (!is_right(a, p))
    {
        return cudaErrorInvalidValue;
    }
    bool const has_size = p.head_size == 64 || p.head_size == 128;
    int const runs = p.slots * p.kv_heads, most = 2 * processors; // blocks at once, without a product beside them
    if (!has_size || p.heads > row::kHeads * p.kv_heads || p.key_scale || p.is_exact || a.keys_as_values
        || a.norms_values || a.rotary_size % row::kRotated || p.slots > 32 || runs > processors)
    {
        return cudaErrorNotSupported;
    }
    RowWork& w = plan.work;
    int cluster = runs > kMostLarge || processors < kWhole ? row::kMostCluster / 2 : row::kMostCluster;
    while (cluster > kLeastCluster && runs * cluster > processors)
    {
        cluster /= 2;
    }
    plan.clusters = most / cluster;
    w.early = processors / kTogether * (kTogether / cluster);
    w.cluster = cluster;
    w.reads_first = runs * cluster <= processors; // of more, those that begin late would keep it from beginning
    w.group = p.heads / p.kv_heads;
    w.clusters_a_head = plan.clusters / p.kv_heads;
    w.least_tiles = kWorthRounds * cluster * (p.head_size == 64 ? 2 : 1);
    w.page_tiles = ((p.page_table ? p.page_rows : p.cache_rows) + kTile - 1) / kTile;
    w.per_page = 1.f / static_cast<float>(w.page_tiles);
    size_t const blocks = size_t{1} * plan.clusters * cluster;
    plan.sums_at = size_t{1} * plan.clusters * row::kHeads * p.head_size * sizeof(float);
    plan.bytes = plan.sums_at + blocks * row::kHeads * sizeof(float2);
    return cudaSuccess;
}

template <typename T, int D, int kCluster>
cudaError_t launch(
    dflash_append_params const& a, dflash_attention_params const& p, Plan const& plan, cudaStream_t stream)
{
    constexpr auto kernel = row::row_attention_kernel<T, D, kCluster>;
    constexpr int kBytes = sizeof(row::Shared<T, D>);
    CUtensorMap keys;
    CUtensorMap values;
    cudaError_t error = map_cache(p, p.keys, row::Shape<T, D>::kKeys, D, keys);
    error = error ? error : map_cache(p, p.values, row::Shape<T, D>::kKeys, D, values);
    error = error ? error : set_attribute<kernel, cudaFuncAttributeNonPortableClusterSizeAllowed>(1);
    error = error ? error : share_multiprocessors<kernel>();
    error = error ? error : allow_shared_bytes<kernel>(kBytes);
    dim3 const grid(plan.clusters * kCluster);
    return error
        ? error
        : launch_clusters(kernel, grid, kCluster, row::kThreads, kBytes, stream, a, p, plan.work, keys, values);
}

template <typename T, int D>
cudaError_t launch(
    dflash_append_params const& a, dflash_attention_params const& p, Plan const& plan, cudaStream_t stream)
{
    switch (plan.work.cluster)
    {
    case 2: return launch<T, D, 2>(a, p, plan, stream);
    case 4: return launch<T, D, 4>(a, p, plan, stream);
    case 8: return launch<T, D, 8>(a, p, plan, stream);
    default: return launch<T, D, 16>(a, p, plan, stream);
    }
}

template <typename T>
cudaError_t launch_size(
    dflash_append_params const& a, dflash_attention_params const& p, Plan const& plan, cudaStream_t stream)
{
    return p.head_size == 64 ? launch<T, 64>(a, p, plan, stream) : launch<T, 128>(a, p, plan, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_row_attention_workspace(
    dflash_append_params const* append, dflash_attention_params const* p, size_t* bytes)
{
    dflash::Plan plan;
    cudaError_t const error = dflash::make_plan(*append, *p, plan);
    *bytes = error == cudaSuccess ? plan.bytes : 0;
    return error;
}

extern "C" cudaError_t dflash_row_attention(dflash_append_params const* append, dflash_attention_params const* p,
    uint32_t* arrivals, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    Plan plan = {};
    cudaError_t const error = make_plan(*append, *p, plan);
    if (error)
    {
        return error;
    }
    if (workspace_bytes < plan.bytes || !arrivals)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    plan.work.arrivals = arrivals;
    plan.work.partial_out = static_cast<float*>(workspace);
    plan.work.partial_sums = reinterpret_cast<float2*>(static_cast<char*>(workspace) + plan.sums_at);
    return p->dtype == DFLASH_FP16 ? launch_size<__half>(*append, *p, plan, stream)
                                   : launch_size<__nv_bfloat16>(*append, *p, plan, stream);
}
