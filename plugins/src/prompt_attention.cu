// Attention of many rows of prompts: each item of work is a run of a prompt's rows and all keys that they see, so that
// keys and values are read once for 128 packed rows, and nothing is left to combine.
#include "cache_map.cuh"
#include "dflash_kernels.h"
#include "launch.cuh"
#include "prompt_attention_sm90.cuh"

#include <algorithm>

namespace dflash
{
namespace prompts
{
namespace
{

struct Plan
{
    PromptWork work;
    int blocks;
};

cudaError_t make_plan(dflash_attention_params const& p, Plan& plan)
{
    bool const is_known = (p.head_size == 64 || p.head_size == 128) && p.rows >= 0 && p.heads > 0 && p.kv_heads > 0
        && p.slots >= 0 && p.heads % p.kv_heads == 0 && p.heads / p.kv_heads <= kRows && p.cache_rows > 0
        && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16) && !p.key_scale && !p.value_scale;
    bool const has_pages = p.page_table && p.pages > 0 && p.page_rows > 0
        && (p.page_rows % (kKeys / 2) == 0 || p.page_rows >= p.cache_rows);
    if (!is_known || !has_pages || !p.segments || p.added || p.block != 0 || p.row_path || p.causal != 1)
    {
        return cudaErrorInvalidValue;
    }
    int sms = 0;
    cudaError_t const error = find_hopper_processors(sms);
    if (error != cudaSuccess || p.is_exact)
    {
        return error ? error : cudaErrorNotSupported;
    }
    PromptWork& w = plan.work;
    w.p = p;
    w.group = p.heads / p.kv_heads;
    w.item_rows = kRows / w.group;
    w.box_rows = p.page_rows % kKeys == 0 || p.page_rows >= p.cache_rows ? kKeys : kKeys / 2;
    int64_t const row_blocks = p.rows / w.item_rows + int64_t{p.slots}; // at most
    int64_t const items = row_blocks * p.kv_heads;
    plan.blocks = static_cast<int>(std::clamp<int64_t>(items, 1, sms));
    int64_t const scratch = p.slots * int64_t{sizeof(int4)} + padded(row_blocks) * 2 * int64_t{sizeof(int)};
    bool const fits = items <= int64_t{plan.blocks} * kMostItems && scratch <= Shared<64>::kQueriesAt;
    return fits ? cudaSuccess : cudaErrorInvalidValue;
}

// Queries as the copy engine sees them: [kv_heads, D / 64, rows, group, 64], in boxes of 64 columns of an item's rows.
cudaError_t map_queries(PromptWork const& w, CUtensorMap& map)
{
    dflash_attention_params const& p = w.p;
    auto const number = [](int64_t x) { return static_cast<cuuint64_t>(x); };
    return map_tiles<5>(map_type_of(p), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, p.q,
        {kAtom, number(w.group), number(p.rows), number(p.head_size / kAtom), number(p.kv_heads)},
        {number(2 * p.q_head_stride), number(2 * p.q_row_stride), 2 * kAtom, number(2 * w.group * p.q_head_stride)},
        {kAtom, static_cast<cuuint32_t>(w.group), static_cast<cuuint32_t>(w.item_rows), 1, 1}, map);
}

template <typename T, int D>
cudaError_t launch(Plan const& plan, cudaStream_t stream)
{
    PromptWork const& w = plan.work;
    constexpr auto kernel = prompt_kernel<T, D>;
    CUtensorMap queries;
    CUtensorMap keys;
    CUtensorMap values;
    cudaError_t error = map_queries(w, queries);
    error = error == cudaSuccess ? map_cache(w.p, w.p.keys, w.box_rows, kAtom, keys) : error;
    error = error == cudaSuccess ? map_cache(w.p, w.p.values, w.box_rows, kAtom, values) : error;
    error = error == cudaSuccess ? allow_shared_bytes<kernel>(Shared<D>::kBytes) : error;
    if (error != cudaSuccess)
    {
        return error;
    }
    return launch_kernel(kernel, dim3(plan.blocks), kThreads, Shared<D>::kBytes, stream, w, queries, keys, values);
}

} // namespace
} // namespace prompts
} // namespace dflash

extern "C" cudaError_t dflash_attend_prompts(dflash_attention_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    prompts::Plan plan;
    cudaError_t const error = prompts::make_plan(*p, plan);
    if (error != cudaSuccess || p->slots == 0 || p->rows == 0)
    {
        return error;
    }
    if (p->dtype == DFLASH_FP16)
    {
        return p->head_size == 64 ? prompts::launch<__half, 64>(plan, stream)
                                  : prompts::launch<__half, 128>(plan, stream);
    }
    return p->head_size == 64 ? prompts::launch<__nv_bfloat16, 64>(plan, stream)
                              : prompts::launch<__nv_bfloat16, 128>(plan, stream);
}
