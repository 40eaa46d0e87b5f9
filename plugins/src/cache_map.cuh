// A cache of keys or values as the bulk copy engine sees it.
#pragma once

#include "dflash_kernels.h"
#include "tensor_map.cuh"

namespace dflash
{

inline CUtensorMapDataType map_type_of(dflash_attention_params const& p)
{
    return p.dtype == DFLASH_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// [pages, kv_heads, D / 64, page_rows, 64], in boxes of so many rows, and of columns in sixty-fours.
inline cudaError_t map_cache(
    dflash_attention_params const& p, void const* cache, int box_rows, int box_columns, CUtensorMap& map)
{
    auto const size = static_cast<cuuint64_t>(p.head_size);
    auto const rows = static_cast<cuuint64_t>(p.page_table ? p.page_rows : p.cache_rows);
    int const pages = p.page_table || p.segments ? p.pages : p.slots;
    // The stride of the only page, or head, may be any number.
    auto const bytes = [&](int count, int64_t stride) { return 2 * (count > 1 ? stride : size * rows); };
    return map_tiles<5>(map_type_of(p), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, cache,
        {kAtom, rows, size / kAtom, static_cast<cuuint64_t>(p.kv_heads), static_cast<cuuint64_t>(pages)},
        {2 * size, 2 * kAtom, bytes(p.kv_heads, p.cache_head_stride), bytes(pages, p.cache_slot_stride)},
        {kAtom, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_columns / kAtom), 1, 1}, map);
}

} // namespace dflash
