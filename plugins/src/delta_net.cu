// Gated delta nets: convolution, gates, the state's pending rows, and what new rows read, write and give, by kernels
// that read a state once and write it at most once. Their rows are those that stay pending, at most 16; those of
// prompts before them delta_net_prompt.cu takes.
//
// The rows are taken by products alone (the delta rule's chunk form): with k, q, v of rows i and j, the decays d,
// D_ij = d_j+1 * ... * d_i and E_i = d_0 * ... * d_i,
//
//     A_ij = b_i D_ij (k_i k_j) below the diagonal;  U = (I + A)^-1 (b (v - E (k S)));  o = E (q S) + (D (q k)) U
//
// Before that S has become E_n S + sum of D_nj k_j u_j, of the pending rows of the step before that were accepted.
//
// Decays are multiplied, never divided: one of 0 is as good as any. One kernel prepares all that does not need the
// state, for all value heads of a key head at once; meanwhile blocks of the other load their states, which absorb. Of
// few heads of 128 one kernel does all (delta_net_few.cuh).
//
// The value heads of one key head share the pending rows' keys. Who writes those is the last block that has read them;
// of few heads all blocks of the key head, once all have.
#include "delta_net_few.cuh"
#include "delta_net_head.cuh"
#include "delta_net_prompt.h"
#include "delta_net_single.cuh"
#include "launch.cuh"

#include <algorithm>
#include <atomic>

namespace dflash
{
namespace
{

// Blocks of heads that begin while rows are still prepared: two for each multiprocessor of today's large GPUs.
constexpr int kFirstBlocks = 264;

// Fills a value head's outputs of rows between a segment's and the next one's with zeros: they belong to nobody.
template <typename T, int kSize>
__device__ __forceinline__ void clear_padding(dflash_delta_net_params const& p, int head, int4 segment, int end)
{
    int const first = segment.z + max(segment.w, 0);
    for (int item = threadIdx.x; item < (end - first) * kSize; item += blockDim.x)
    {
        int64_t const to = (int64_t{first + item / kSize} * p.value_heads + head) * kSize;
        static_cast<T*>(p.out)[to + item % kSize] = from_float<T>(0.f);
    }
}

// The first row that is not a segment's, nor padding behind it.
__device__ __forceinline__ int load_end(dflash_delta_net_params const& p, int index)
{
    return index + 1 < p.segment_count ? load_new(p.segments + 4 * (index + 1) + 2) : p.rows;
}

// One block a key head and segment.
template <typename T, int kSize>
__global__ void __launch_bounds__(delta::Preparation<T, kSize>::kThreads, 2) prepare_kernel(
    __grid_constant__ dflash_delta_net_params const p, delta::PreparedRows<kSize> const prepared, int heads)
{
    using Preparation = delta::Preparation<T, kSize>;
    __shared__ typename Preparation::Shared shared;
    Preparation const preparation{
        p, prepared, shared, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x), heads};
    preparation.run();
}

// One block a value head and segment.
template <typename T, int kSize>
__global__ void __launch_bounds__(delta::HeadRows<T, kSize>::kThreads, 2)
    delta_net_kernel(__grid_constant__ dflash_delta_net_params const p, delta::PreparedRows<kSize> const prepared)
{
    using Rows = delta::HeadRows<T, kSize>;
    trigger();
    extern __shared__ float4 memory[];
    int const index = blockIdx.z;
    delta::Place<T, kSize> const place(p, blockIdx.y * gridDim.x + blockIdx.x, blockIdx.y);
    int4 const words = load_new(reinterpret_cast<int4 const*>(p.segments) + index);
    int const end = load_end(p, index);
    int const length = delta::load_length(p, words, min(index, p.slots - 1));
    clear_padding<T, kSize>(p, place.head, words, end);
    if (words.w > 0)
    {
        delta::Segment const segment(p, words, length);
        delta::Segment const pending = segment.pending();
        Rows const rows{place, pending, *reinterpret_cast<typename Rows::Shared*>(memory)};
        bool const is_first = index * p.value_heads + place.head < kFirstBlocks;
        rows.run(prepared, Rows::Chunk::pending(p, segment, place.key_head), is_first);
    }
    else
    {
        wait();
    }
}

// One cluster a key head and segment. Its size is the launch's; that it has one is known here, so nothing asks for it.
template <typename T>
__global__ void __cluster_dims__() __launch_bounds__(delta::few::kThreads, 1)
    few_heads_kernel(__grid_constant__ dflash_delta_net_params const p)
{
    trigger();
    extern __shared__ float4 memory[];
    uint32_t address = shared_address(memory);
    asm volatile("" : "+r"(address)); // else it would be worked out anew for each access
    delta::few::Block<T> const block{p, *static_cast<delta::few::Shared<T>*>(__cvta_shared_to_generic(address))};
    block.run();
}

// One block a value head and segment.
template <typename T>
__global__ void __launch_bounds__(delta::SingleRows<T>::kThreads, 2)
    single_rows_kernel(__grid_constant__ dflash_delta_net_params const p)
{
    using Single = delta::SingleRows<T>;
    trigger();
    __shared__ typename Single::Shared shared;
    typename Single::OfHead const place(p, blockIdx.y * gridDim.x + blockIdx.x, blockIdx.y);
    Single const block{place, shared};
    auto const ahead = block.load_ahead();
    int const guess = delta::guess_slot(p, blockIdx.z);
    block.prefetch_state(guess);
    wait();
    int4 const* const segments = reinterpret_cast<int4 const*>(p.segments) + blockIdx.z;
    int4 const segment = segments[0];
    int const end = load_end(p, blockIdx.z);
    int const length = delta::load_length(p, segment, guess);
    if (segment.w > 0)
    {
        block.run(delta::Segment(p, segment, length), ahead);
    }
    clear_padding<T, delta::SingleRows<T>::kSize>(p, place.head, segment, end);
}

// One thread a segment.
__global__ void advance_states_kernel(dflash_advance_states_params const p)
{
    begin();
    int const index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < p.segment_count)
    {
        int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
        if (segment.w > 0)
        {
            int const accepted = delta::count_accepted(segment.y, p.lengths[segment.x], p.pending);
            if (!delta::joins_pending(p.keeps, segment.w, accepted))
            {
                p.lengths[segment.x] = segment.y + max(segment.w - p.pending, 0);
            }
        }
    }
}

// What the kernels count by 32 bits: heads of all slots' rows, and a row's bytes.
bool has_few_numbers(dflash_delta_net_params const& p)
{
    constexpr int64_t kMost = INT32_MAX;
    int64_t const rows = int64_t{std::max(p.slots, p.segment_count)} * (delta::kBefore + p.pending);
    return rows * std::max(p.value_heads, p.key_heads) <= kMost
        && std::max(p.x_row_stride, p.gates_row_stride) <= kMost / static_cast<int64_t>(sizeof(float));
}

// What is copied by 16 bytes.
bool has_aligned(void const* tensor)
{
    return reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

// One of each segment, most likely; if not, one after another.
bool has_single_rows(dflash_delta_net_params const& p)
{
    return p.head_size == 128 && p.rows <= p.segment_count;
}

template <typename T, int kSize>
cudaError_t launch_delta_net(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream)
{
    using Rows = delta::HeadRows<T, kSize>;
    constexpr int kBytes = sizeof(typename Rows::Shared);
    int const heads = p.value_heads / p.key_heads;
    delta::PreparedRows<kSize> const prepared{workspace, p.segment_count, p.key_heads, p.value_heads};
    dim3 const grid(p.key_heads, p.segment_count);
    cudaError_t error = allow_shared_bytes<delta_net_kernel<T, kSize>>(kBytes);
    error = error ? error
                  : launch_kernel(prepare_kernel<T, kSize>, grid, delta::Preparation<T, kSize>::kThreads, 0, stream, p,
                        prepared, heads);
    dim3 const of_heads(heads, p.key_heads, p.segment_count);
    return error ? error
                 : launch_kernel(delta_net_kernel<T, kSize>, of_heads, Rows::kThreads, kBytes, stream, p, prepared);
}

// Clusters of so many blocks that the device's multiprocessors have room for at once; 0 where there are none.
template <typename T>
int count_clusters(int blocks)
{
    constexpr int kDevices = 64;
    static std::atomic<int> found[kDevices][delta::few::kMostHeads * delta::few::kSplits + 1]; // one more; 0: not known
    int device = 0;
    bool const is_known = cudaGetDevice(&device) == cudaSuccess && device < kDevices;
    if (is_known && found[device][blocks] > 0)
    {
        return found[device][blocks] - 1;
    }
    constexpr int kBytes = sizeof(delta::few::Shared<T>);
    int clusters = 0;
    cudaError_t error = allow_shared_bytes<few_heads_kernel<T>>(kBytes);
    ClusterLaunch const launch(dim3(blocks), blocks, delta::few::kThreads, kBytes, nullptr);
    error = error ? error : cudaOccupancyMaxActiveClusters(&clusters, few_heads_kernel<T>, &launch.config);
    if (error != cudaSuccess)
    {
        cudaGetLastError(); // nobody else's
        return 0;
    }
    if (is_known)
    {
        found[device][blocks] = clusters + 1;
    }
    return clusters;
}

// Whether all blocks of few heads run at once; otherwise rows that are prepared once take less time.
template <typename T>
bool has_few_heads(dflash_delta_net_params const& p)
{
    int const heads = p.value_heads / p.key_heads;
    return heads <= delta::few::kMostHeads
        && p.key_heads * p.segment_count <= count_clusters<T>(heads * delta::few::kSplits);
}

template <typename T>
cudaError_t launch_few_heads(dflash_delta_net_params const& p, cudaStream_t stream)
{
    int const blocks = p.value_heads / p.key_heads * delta::few::kSplits;
    dim3 const grid(blocks, p.key_heads, p.segment_count);
    return launch_clusters(
        few_heads_kernel<T>, grid, blocks, delta::few::kThreads, sizeof(delta::few::Shared<T>), stream, p);
}

template <typename T>
cudaError_t launch_single_rows(dflash_delta_net_params const& p, cudaStream_t stream)
{
    dim3 const grid(p.value_heads / p.key_heads, p.key_heads, p.segment_count);
    return launch_kernel(single_rows_kernel<T>, grid, delta::SingleRows<T>::kThreads, 0, stream, p);
}

// Rows that segments may have to absorb at once. Where there is one of each, most likely, none are.
bool has_prompts(dflash_delta_net_params const& p)
{
    return p.most_rows > p.pending && !has_single_rows(p);
}

template <typename T>
cudaError_t launch_of_size(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream)
{
    switch (p.head_size)
    {
    case 16: return launch_delta_net<T, 16>(p, workspace, stream);
    case 32: return launch_delta_net<T, 32>(p, workspace, stream);
    case 64: return launch_delta_net<T, 64>(p, workspace, stream);
    case 128:
        if (has_single_rows(p))
        {
            return launch_single_rows<T>(p, stream);
        }
        return has_few_heads<T>(p) ? launch_few_heads<T>(p, stream) : launch_delta_net<T, 128>(p, workspace, stream);
    default: return cudaErrorInvalidValue;
    }
}

size_t prepared_bytes(dflash_delta_net_params const& p)
{
    switch (p.head_size)
    {
    case 16: return delta::PreparedRows<16>{nullptr, p.segment_count, p.key_heads, p.value_heads}.bytes();
    case 32: return delta::PreparedRows<32>{nullptr, p.segment_count, p.key_heads, p.value_heads}.bytes();
    case 64: return delta::PreparedRows<64>{nullptr, p.segment_count, p.key_heads, p.value_heads}.bytes();
    default: return delta::PreparedRows<128>{nullptr, p.segment_count, p.key_heads, p.value_heads}.bytes();
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_delta_net_workspace(dflash_delta_net_params const* p, size_t* bytes)
{
    using namespace dflash;
    size_t const of_prompts = has_prompts(*p) ? delta_net_prompt_bytes(*p) : 0;
    *bytes = has_single_rows(*p) ? 0 : std::max(of_prompts, prepared_bytes(*p));
    return cudaSuccess;
}

extern "C" cudaError_t dflash_delta_net(
    dflash_delta_net_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->key_heads > 0 && p->value_heads > 0 && p->value_heads % p->key_heads == 0 && p->slots > 0
        && p->kernel == delta::kTaps && p->pending > 0 && p->pending <= kDeltaRows && p->segment_count <= 65535
        && p->key_heads <= 65535 && p->value_heads <= 65535 && p->x_row_stride % 8 == 0 && has_few_numbers(*p)
        && p->keeps >= 0 && p->keeps <= (has_single_rows(*p) ? p->pending : 0) && has_aligned(p->window)
        && has_aligned(p->conv) && has_aligned(p->norm);
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0 || p->rows == 0)
    {
        return cudaSuccess;
    }
    size_t needed = 0;
    cudaError_t error = dflash_delta_net_workspace(p, &needed);
    if (error == cudaSuccess && needed > 0 && (workspace == nullptr || workspace_bytes < needed))
    {
        error = cudaErrorInvalidValue;
    }
    if (error == cudaSuccess && has_prompts(*p))
    {
        error = launch_delta_net_prompts(*p, workspace, stream);
    }
    if (error != cudaSuccess)
    {
        return error;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_of_size<__half>(*p, workspace, stream);
    case DFLASH_BF16: return launch_of_size<__nv_bfloat16>(*p, workspace, stream);
    case DFLASH_FP32: return launch_of_size<float>(*p, workspace, stream);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t dflash_advance_states(dflash_advance_states_params const* p, cudaStream_t stream)
{
    constexpr int kThreads = 128;
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    dim3 const grid((p->segment_count + kThreads - 1) / kThreads);
    return dflash::launch_kernel(dflash::advance_states_kernel, grid, kThreads, 0, stream, *p);
}
