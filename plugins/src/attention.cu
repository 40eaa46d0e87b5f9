// Attention of short runs of rows over long caches: flash-decoding on tensor cores.
//
// A unit of work is one tile of keys of one (slot, KV head). All query heads of that KV head, times the Q rows, make
// the M dimension of the matrix tiles, so that a cache row is read once for all of them. The units of the whole call,
// in the order slot, head, tile, are cut into equal ranges, one a block: whatever the lengths are, the blocks finish
// together, and lengths are read on the device, so that one captured launch serves them all. Where rows are flat, the
// slots of a call are its segments; where caches are pages, a tile lies within one. A block whose range begins
// or ends inside a (slot, head) leaves a partial result (unnormalized output, maximum, sum), which a second kernel
// combines, where the block that began the (slot, head) says; ranges that hold all of one write the output themselves.
#include "attention_combine.cuh"
#include "attention_exact_sm90.cuh"
#include "attention_mma.cuh"
#include "attention_sm90.cuh"
#include "attention_wide_sm90.cuh"
#include "attention_work.cuh"
#include "cache_map.cuh"
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace dflash
{
namespace
{

// A (slot, head) of no more tiles is not worth dividing: its parts would take longer to combine.
constexpr int kWholeTiles = 4;

struct Plan
{
    Work work;
    bool is_sm90;
    bool divides; // whether any (slot, head) may be divided
    bool shares_tiles; // on Hopper: warpgroups have rows of their own
    int blocks; // beside each other, that take the ranges
    int warps_m;
    int m; // packed rows of one row block
    int stages;
    int sms;
    size_t sums_at; // where the sums lie in the workspace
    size_t divided_at;
    size_t bytes;
};

cudaError_t make_plan(dflash_attention_params const& p, Plan& plan)
{
    bool const has_size = p.head_size == 64 || p.head_size == 128 || p.head_size == 256 || p.head_size == 512;
    bool const is_known = has_size && p.rows > 0 && p.heads > 0 && p.kv_heads > 0 && p.slots >= 0
        && p.heads % p.kv_heads == 0 && p.cache_rows > 0 && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16)
        && !p.key_scale == !p.value_scale;
    // A tile lies within a page: of several they hold whole tiles.
    bool const has_pages = p.page_table
        ? p.pages > 0 && p.page_rows > 0 && (p.page_rows % kTile == 0 || p.page_rows >= p.cache_rows)
        : p.pages > 0 || !p.segments;
    bool const has_rows = p.segments ? p.block == 0 || p.block == p.rows : p.block == 0;
    bool const has_tree = !p.row_path || (p.segments && p.block == 0 && p.causal && p.rows <= DFLASH_TREE_MOST_ROWS);
    if (!is_known || !has_pages || !has_rows || !has_tree)
    {
        return cudaErrorInvalidValue;
    }
    int device = 0;
    int sms = 0;
    int block_bytes = 0;
    int sm_bytes = 0;
    int major = 0;
    cudaError_t error = cudaGetDevice(&device);
    for (auto const& [to, what] :
        {std::pair{&sms, cudaDevAttrMultiProcessorCount}, std::pair{&major, cudaDevAttrComputeCapabilityMajor},
            std::pair{&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
            std::pair{&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor}})
    {
        error = error == cudaSuccess ? cudaDeviceGetAttribute(to, what, device) : error;
    }
    if (error != cudaSuccess)
    {
        return error;
    }
    Work& w = plan.work;
    w.p = p;
    w.p.window = p.window < p.cache_rows ? p.window : 0; // it hides nothing, and what it is taken from may overflow
    w.group = p.heads / p.kv_heads;
    w.packed_rows = w.group * p.rows;
    w.per_row = 1.f / p.rows;
    w.page_tiles = ((p.page_table ? p.page_rows : p.cache_rows) + kTile - 1) / kTile;
    w.per_page = 1.f / w.page_tiles;
    plan.sms = sms;
#ifdef DFLASH_SM90A
    plan.is_sm90 = major == 9 && (!p.key_scale || p.is_exact); // products take no FP8 as it lies in a cache
#else
    plan.is_sm90 = false;
#endif
    bool const has_tails = p.segments && p.causal && p.block == 0 && !p.added && p.rows <= DFLASH_TREE_MOST_ROWS;
    bool const is_shorter = p.window > 0 && p.window < kTail; // than tails
    bool const is_missing = p.is_exact && (!plan.is_sm90 || is_shorter || p.head_size > 128 || !has_tails);
    if ((p.head_size > 128 && !plan.is_sm90) || is_missing)
    {
        return cudaErrorNotSupported;
    }
    int64_t blocks = sms;
    if (plan.is_sm90)
    {
        plan.m = sm90::kRows;
        w.row_blocks = (w.packed_rows + plan.m - 1) / plan.m;
        bool const is_wide = p.head_size == sm90::kWideHead; // a block has one row block, not two
        // Exact, a row's tiles go to both warpgroups by turns, whatever rows are beside it.
        plan.shares_tiles = is_wide || (w.row_blocks > 1 && !p.is_exact);
        bool const by_two = plan.shares_tiles && !is_wide;
        blocks = std::max(sms / (by_two ? (w.row_blocks + 1) / 2 : w.row_blocks), 1);
        // One a warpgroup, or as many as save less by being divided than combining them costs: parts of two row blocks
        // are twice as large.
        bool const is_full = int64_t{p.slots} * p.kv_heads * 4 >= blocks;
        w.least_units = is_full && plan.shares_tiles ? 4 : is_wide ? 1 : 2;
    }
    else
    {
        plan.warps_m = w.packed_rows <= 16 ? 1 : w.packed_rows <= 32 ? 2 : 4;
        plan.m = 16 * plan.warps_m;
        // SM120 has less than half the shared memory of the others.
        int const number = p.key_scale ? 1 : 2; // bytes
        plan.stages = shared_bytes(p.head_size, plan.warps_m, kMostStages, number) <= block_bytes ? kMostStages : 2;
        int const bytes = shared_bytes(p.head_size, plan.warps_m, plan.stages, number) + 1024; // the system's own
        int const blocks_per_sm = std::clamp(sm_bytes / bytes, 1, most_blocks_per_sm(p.head_size));
        w.row_blocks = (w.packed_rows + plan.m - 1) / plan.m;
        blocks = std::max(blocks_per_sm * sms / w.row_blocks, 1);
        w.least_units = 1;
    }
    int64_t const tiles = (p.cache_rows + kTile - 1) / kTile, runs = int64_t{p.slots} * p.kv_heads;
    int64_t const keys = int64_t{p.window} + p.rows - 1; // that rows in a window see, wherever it begins in a tile
    bool const is_short = p.window > 0 && keys <= kWholeTiles * kTile;
    int const window_tiles = is_short ? static_cast<int>(std::max<int64_t>(keys - 2, 0)) / kTile + 2 : kWholeTiles + 1;
    bool const is_whole = window_tiles <= kWholeTiles && !p.is_exact;
    w.least_units = is_whole ? std::max(w.least_units, window_tiles) : w.least_units;
    // Zeros of idle slots are written where parts are combined; flat rows have none.
    plan.divides = !is_whole || runs > blocks || !p.segments || p.block > 0;
    w.row_tiles = w.row_blocks * (plan.m / 16);
    w.most_cuts = static_cast<int>((tiles + kCutTiles - 1) / kCutTiles);
    int64_t const most = runs * (p.is_exact ? w.most_cuts + 1 : tiles); // a range for tails
    plan.blocks = static_cast<int>(std::min(blocks, std::max(most, int64_t{1})));
    w.blocks = plan.blocks;
    w.ranges = p.is_exact ? static_cast<int>(most) : plan.blocks;
    w.owners = static_cast<int>(std::min(int64_t{w.ranges}, runs));
    size_t const rows = size_t{p.is_exact ? 1u : 2u} * w.ranges * w.row_tiles * 16;
    plan.sums_at = rows * p.head_size * sizeof(float);
    plan.divided_at = plan.sums_at + rows * sizeof(float2);
    plan.bytes = plan.divided_at + w.owners * sizeof(Divided);
    return cudaSuccess;
}

template <typename T, typename C, int D, int kWarpsM, int kStages>
cudaError_t launch_attend(Work const& w, cudaStream_t stream)
{
    constexpr int kBytes = shared_bytes(D, kWarpsM, kStages, sizeof(C));
    constexpr auto kernel = attend_kernel<T, C, D, kWarpsM, kStages>;
    cudaError_t const error = allow_shared_bytes<kernel>(kBytes);
    if (error != cudaSuccess)
    {
        return error;
    }
    dim3 const grid(w.ranges * w.row_blocks);
    return launch_kernel(kernel, grid, 32 * kWarps, kBytes, stream, w);
}

template <typename T, typename C, int D, int kWarpsM>
cudaError_t launch_attend(Plan const& plan, cudaStream_t stream)
{
    return plan.stages == kMostStages ? launch_attend<T, C, D, kWarpsM, kMostStages>(plan.work, stream)
                                      : launch_attend<T, C, D, kWarpsM, 2>(plan.work, stream);
}

template <auto kKernel>
cudaError_t launch_sm90(Plan const& plan, int threads, int bytes, dim3 grid, cudaStream_t stream)
{
    Work const& w = plan.work;
    CUtensorMap keys;
    CUtensorMap values;
    int const columns = std::min(w.p.head_size, sm90::WideShared::kColumns);
    cudaError_t error = map_cache(w.p, w.p.keys, kTile, columns, keys);
    error = error == cudaSuccess ? map_cache(w.p, w.p.values, kTile, columns, values) : error;
    error = error == cudaSuccess ? allow_shared_bytes<kKernel>(bytes) : error;
    return error == cudaSuccess ? launch_kernel(kKernel, grid, threads, bytes, stream, w, keys, values) : error;
}

template <typename T, typename C, int D>
cudaError_t launch_attend_exact(Plan const& plan, cudaStream_t stream)
{
    constexpr int kBytes = sm90::kExactBytes<D>;
    dim3 const grid(plan.blocks, plan.work.row_blocks);
    if constexpr (std::is_same_v<T, C>)
    {
        return launch_sm90<sm90::attend_exact_kernel<T, D>>(plan, sm90::kExactThreads, kBytes, grid, stream);
    }
    else
    {
        constexpr auto kernel = sm90::attend_exact_fp8_kernel<T, D>;
        cudaError_t const error = allow_shared_bytes<kernel>(kBytes);
        return error ? error : launch_kernel(kernel, grid, sm90::kExactThreads, kBytes, stream, plan.work);
    }
}

template <typename T, int D, bool kSharedTiles>
cudaError_t launch_attend_sm90(Plan const& plan, cudaStream_t stream)
{
    constexpr int kBytes = sm90::Shared<D, kSharedTiles>::kBytes;
    constexpr auto kernel = sm90::attend_kernel<T, D, kSharedTiles>;
    dim3 const grid(plan.blocks, kSharedTiles ? (plan.work.row_blocks + 1) / 2 : plan.work.row_blocks);
    return launch_sm90<kernel>(plan, sm90::kThreads<D>, kBytes, grid, stream);
}

template <typename T>
cudaError_t launch_attend_wide(Plan const& plan, cudaStream_t stream)
{
    dim3 const grid(plan.blocks, plan.work.row_blocks);
    return launch_sm90<sm90::attend_wide_kernel<T>>(plan, sm90::kMostThreads, sm90::WideShared::kBytes, grid, stream);
}

template <typename T, typename C, int D>
cudaError_t launch_attend(Plan const& plan, cudaStream_t stream)
{
    if constexpr (D <= 128)
    {
        if (plan.work.p.is_exact)
        {
            return launch_attend_exact<T, C, D>(plan, stream);
        }
    }
    if constexpr (D == sm90::kWideHead)
    {
        return std::is_same_v<T, C> && plan.is_sm90 ? launch_attend_wide<T>(plan, stream) : cudaErrorNotSupported;
    }
    else if constexpr (std::is_same_v<T, C>)
    {
        if (plan.is_sm90)
        {
            return plan.shares_tiles ? launch_attend_sm90<T, D, true>(plan, stream)
                                     : launch_attend_sm90<T, D, false>(plan, stream);
        }
    }
    if constexpr (D > 128)
    {
        return cudaErrorNotSupported;
    }
    else
    {
        return plan.warps_m == 1 ? launch_attend<T, C, D, 1>(plan, stream)
            : plan.warps_m == 2  ? launch_attend<T, C, D, 2>(plan, stream)
                                 : launch_attend<T, C, D, 4>(plan, stream);
    }
}

template <typename T, int D>
cudaError_t launch(Plan const& plan, cudaStream_t stream)
{
    Work const& w = plan.work;
    cudaError_t const error
        = w.p.key_scale ? launch_attend<T, E4M3, D>(plan, stream) : launch_attend<T, T, D>(plan, stream);
    if (error != cudaSuccess || !plan.divides)
    {
        return error;
    }
    return launch_combine<T, D>(w, plan.sms, stream);
}

template <typename T>
cudaError_t launch_size(Plan const& plan, cudaStream_t stream)
{
    switch (plan.work.p.head_size)
    {
    case 64: return launch<T, 64>(plan, stream);
    case 128: return launch<T, 128>(plan, stream);
    case 256: return launch<T, 256>(plan, stream);
    default: return launch<T, 512>(plan, stream);
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_attention_workspace(dflash_attention_params const* p, size_t* bytes)
{
    dflash::Plan plan;
    cudaError_t const error = dflash::make_plan(*p, plan);
    *bytes = error == cudaSuccess ? plan.bytes : 0;
    return error;
}

extern "C" cudaError_t dflash_attention(
    dflash_attention_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    Plan plan;
    cudaError_t const error = make_plan(*p, plan);
    if (error != cudaSuccess)
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
    return p->dtype == DFLASH_FP16 ? launch_size<__half>(plan, stream) : launch_size<__nv_bfloat16>(plan, stream);
}
