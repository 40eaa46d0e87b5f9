// Pages of caches: which ones a slot has, and copies of them.
#include "dflash_kernels.h"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 128;
constexpr int kCopyThreads = 256;
constexpr int kCopyBlocks = 8; // of a cache
constexpr int kBytes = 16; // of one access

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

// Each row of blocks has a cache: the rows of its first head, then of the next.
__global__ void __launch_bounds__(kCopyThreads) copy_pages_kernel(dflash_copy_pages_params const p)
{
    begin();
    int64_t const* cache = p.caches + 3 * blockIdx.y; // address, heads, bytes of a row
    int64_t const head_bytes = p.page_rows * cache[2];
    int64_t const page_bytes = cache[1] * head_bytes;
    auto* const pages = reinterpret_cast<char*>(cache[0]);
    char const* from = pages + p.source * page_bytes;
    char* to = pages + p.target * page_bytes;
    int const of_head = static_cast<int>(p.rows * cache[2] / kBytes); // accesses
    int const count = static_cast<int>(cache[1]) * of_head;
    for (int i = blockIdx.x * kCopyThreads + threadIdx.x; i < count; i += kCopyBlocks * kCopyThreads)
    {
        int const head = i / of_head;
        int64_t const at = head * head_bytes + int64_t{i - head * of_head} * kBytes;
        *reinterpret_cast<int4*>(to + at) = *reinterpret_cast<int4 const*>(from + at);
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

extern "C" cudaError_t dflash_copy_pages(dflash_copy_pages_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->cache_count < 0 || p->cache_count > 65535 || p->rows < 0 || p->rows > p->page_rows || p->source < 0
        || p->target < 0)
    {
        return cudaErrorInvalidValue;
    }
    if (p->cache_count == 0 || p->rows == 0 || p->source == p->target)
    {
        return cudaSuccess;
    }
    return launch_kernel(copy_pages_kernel, dim3(kCopyBlocks, p->cache_count), kCopyThreads, 0, stream, *p);
}
