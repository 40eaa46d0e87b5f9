// The two ends of a decoding step: what each slot kept from the last one, the embeddings of its rows, and what it keeps
// for the next.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kThreads = 256;
constexpr int kVector = 8; // numbers of one 16-byte access

// One block a slot.
__global__ void begin_step_kernel(dflash_begin_step_params const p)
{
    begin();
    int const slot = blockIdx.x;
    for (int row = threadIdx.x; row < p.rows; row += blockDim.x)
    {
        p.token_ids[int64_t{slot} * p.rows + row] = p.tokens[int64_t{slot} * p.block + row];
    }
    if (threadIdx.x == 0)
    {
        p.start[slot] = p.row_count[slot] > 0 ? p.kept_start[slot] : -p.step_rows;
    }
}

// One block a slot.
__global__ void end_step_kernel(dflash_end_step_params const p)
{
    begin();
    int const slot = blockIdx.x;
    int32_t* const decided = p.decided + int64_t{slot} * (p.logit_rows + 1);
    for (int row = threadIdx.x; row < p.logit_rows; row += blockDim.x)
    {
        decided[row + 1] = p.target_ids[int64_t{slot} * p.logit_rows + row];
    }
    if (threadIdx.x == 0)
    {
        decided[0] = p.accepted[slot];
    }
    if (p.row_count[slot] <= 0)
    {
        return;
    }
    for (int row = threadIdx.x; row < p.next_rows; row += blockDim.x)
    {
        p.tokens[int64_t{slot} * p.block + row] = p.next_tokens[int64_t{slot} * p.next_rows + row];
    }
    if (threadIdx.x == 0)
    {
        p.kept_start[slot] = min(p.next_start[slot], p.last_start);
    }
}

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) embed_kernel(dflash_embed_params const p)
{
    begin();
    int const row = blockIdx.x;
    int const id = p.block == 0 ? p.ids[row] : row % p.block == 0 ? p.ids[row / p.block] : p.mask_id;
    bool const is_known = id >= 0 && id < p.vocabulary;
    T const* from = static_cast<T const*>(p.table) + int64_t{id} * p.size;
    T* to = static_cast<T*>(p.out) + int64_t{row} * p.size;
    for (int at = threadIdx.x * kVector; at < p.size; at += kThreads * kVector)
    {
        store_vector<T, kVector>(to + at, is_known ? load_vector<T, kVector>(from + at) : Vector<T, kVector>{});
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_begin_step(dflash_begin_step_params const* p, cudaStream_t stream)
{
    if (p->rows < 1 || p->rows > p->block)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    return dflash::launch_kernel(dflash::begin_step_kernel, dim3(p->slots), 32, 0, stream, *p);
}

extern "C" cudaError_t dflash_end_step(dflash_end_step_params const* p, cudaStream_t stream)
{
    if (p->next_rows < 1 || p->next_rows > p->block || p->logit_rows < 1)
    {
        return cudaErrorInvalidValue;
    }
    if (p->slots == 0)
    {
        return cudaSuccess;
    }
    return dflash::launch_kernel(dflash::end_step_kernel, dim3(p->slots), 32, 0, stream, *p);
}

extern "C" cudaError_t dflash_embed(dflash_embed_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->size % kVector || p->block < 0 || (p->block > 0 && p->rows % p->block))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_kernel(embed_kernel<__half>, dim3(p->rows), kThreads, 0, stream, *p);
    case DFLASH_BF16: return launch_kernel(embed_kernel<__nv_bfloat16>, dim3(p->rows), kThreads, 0, stream, *p);
    default: return cudaErrorInvalidValue;
    }
}
