// Embeddings of tokens, and of blocks to draft.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 256;
constexpr int kVector = 8; // numbers of one 16-byte access

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) embed_kernel(dflash_embed_params const p)
{
    // In this order: kernels that begin behind this one may read what those before it wrote, caches and the layout of
    // rows, whatever runs yet.
    wait();
    trigger();
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
