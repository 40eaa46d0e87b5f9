// Pages of caches: which ones a slot has.
#include "dflash_kernels.h"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 128;

// One thread an update.
__global__ void set_pages_kernel(dflash_set_pages_params const p)
{
    begin();
    int const index = blockIdx.x * kThreads + threadIdx.x;
    if (index < p.count)
    {
        int32_t const* update = p.updates + 3 * index; // slot, index, page
        p.page_table[update[0] * p.page_table_stride + update[1]] = update[2];
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_set_pages(dflash_set_pages_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->count < 0)
    {
        return cudaErrorInvalidValue;
    }
    if (p->count == 0)
    {
        return cudaSuccess;
    }
    return launch_kernel(set_pages_kernel, dim3((p->count + kThreads - 1) / kThreads), kThreads, 0, stream, *p);
}
