// Gated delta nets of prompts: all rows of a segment but those that stay pending, which dflash_delta_net's other
// kernels then take. What is known of chunks without the state, by blocks of all of them; the states, chunk after
// chunk; and outputs.
#include "delta_net_prompt.h"
#include "delta_net_prompt_states.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

// Chunks at most that are taken together: some 1,000 rows, whose numbers a large L2 cache mostly keeps.
constexpr int kMostPlaces = 72;

template <typename T, int kSize>
__global__ void __launch_bounds__(delta::kPromptThreads, 4)
    prompt_rows_kernel(__grid_constant__ dflash_delta_net_params const p, delta::PromptRange<kSize> range)
{
    using Rows = delta::PromptRows<T, kSize>;
    begin();
    extern __shared__ float4 memory[];
    typename Rows::Shared& shared = *reinterpret_cast<typename Rows::Shared*>(memory);
    int const place = range.first + blockIdx.x;
    delta::PromptChunk const chunk(p, place);
    if (chunk.count > 0)
    {
        delta::Segment const segment(p, chunk.segment, p.lengths[chunk.segment.x]);
        Rows const rows{p, range, shared, place, {p, segment, chunk.row, chunk.count, static_cast<int>(blockIdx.y)}};
        rows.run(blockIdx.y);
    }
}

// Of heads of 128 one block a multiprocessor, by its registers: where the kernel before it still runs, two would be put
// on those that become free, and others left without.
template <int kSize>
__global__ void __launch_bounds__(delta::PromptStates<kSize>::kThreads, 1)
    prompt_states_kernel(__grid_constant__ dflash_delta_net_params const p, delta::PromptRange<kSize> range, int stages)
{
    using States = delta::PromptStates<kSize>;
    begin();
    extern __shared__ float4 memory[];
    int4 const words = reinterpret_cast<int4 const*>(p.segments)[blockIdx.z];
    int const chunks = (delta::count_absorbed(p, words) + kDeltaRows - 1) / kDeltaRows;
    int const own = delta::first_place(words, blockIdx.z);
    int const first = max(own, range.first);
    int const end = min(own + chunks, range.first + range.count);
    if (first < end)
    {
        delta::Segment const segment(p, words, p.lengths[words.x]);
        int const head = static_cast<int>(blockIdx.y);
        int const first_value = static_cast<int>(blockIdx.x) * States::kValues;
        auto* const places = reinterpret_cast<typename States::Stage*>(memory);
        States const states{p, range, segment, head, first_value, stages, places};
        states.run(first, end, first - own);
    }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(delta::PromptOutputs<T, kSize>::kThreads)
    prompt_outputs_kernel(__grid_constant__ dflash_delta_net_params const p, delta::PromptRange<kSize> range)
{
    using Outputs = delta::PromptOutputs<T, kSize>;
    begin();
    __shared__ __align__(16) float shared[kDeltaRows * Outputs::kStride];
    int const place = range.first + blockIdx.x;
    delta::PromptChunk const chunk(p, place);
    if (chunk.count > 0)
    {
        Outputs const outputs{p, chunk, static_cast<int>(blockIdx.y), shared};
        outputs.run(range.values(place, blockIdx.y));
    }
}

// Ranges that all places are divided into, and the places of each.
int count_ranges(dflash_delta_net_params const& p)
{
    return (delta::count_places(p) + kMostPlaces - 1) / kMostPlaces;
}

int places_of_range(dflash_delta_net_params const& p)
{
    int const ranges = count_ranges(p);
    return (delta::count_places(p) + ranges - 1) / ranges;
}

// Chunks that a block may have in shared memory, of which GPUs for workstations have less.
template <int kSize>
cudaError_t find_stages(int& stages)
{
    using States = delta::PromptStates<kSize>;
    int device = 0, bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    error = error ? error : cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    stages = States::kMostStages;
    while (stages > 1 && States::bytes(stages) > bytes)
    {
        --stages;
    }
    return error;
}

template <typename T, int kSize>
cudaError_t launch_range(dflash_delta_net_params const& p, delta::PromptRange<kSize> const& range, cudaStream_t stream)
{
    using States = delta::PromptStates<kSize>;
    using Outputs = delta::PromptOutputs<T, kSize>;
    constexpr int kRowsBytes = sizeof(typename delta::PromptRows<T, kSize>::Shared);
    cudaError_t error = allow_shared_bytes<prompt_rows_kernel<T, kSize>>(kRowsBytes);
    error = error ? error
                  : launch_kernel(prompt_rows_kernel<T, kSize>, dim3(range.count, p.key_heads), delta::kPromptThreads,
                        kRowsBytes, stream, p, range);
    int stages = 0;
    error = error ? error : find_stages<kSize>(stages);
    error = error ? error : allow_shared_bytes<prompt_states_kernel<kSize>>(States::bytes(stages));
    dim3 const grid(kSize / States::kValues, p.value_heads, p.segment_count);
    error = error ? error
                  : launch_kernel(prompt_states_kernel<kSize>, grid, States::kThreads, States::bytes(stages), stream, p,
                        range, stages);
    return error ? error
                 : launch_kernel(prompt_outputs_kernel<T, kSize>, dim3(range.count, p.value_heads), Outputs::kThreads,
                       0, stream, p, range);
}

template <typename T, int kSize>
cudaError_t launch_ranges(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream)
{
    int const end = delta::count_places(p);
    int const count = places_of_range(p);
    for (int first = 0; first < end; first += count)
    {
        delta::PromptRange<kSize> const range{
            static_cast<float*>(workspace), first, std::min(count, end - first), p.key_heads, p.value_heads};
        cudaError_t const error = launch_range<T, kSize>(p, range, stream);
        if (error != cudaSuccess)
        {
            return error;
        }
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t launch_of_size(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream)
{
    switch (p.head_size)
    {
    case 16: return launch_ranges<T, 16>(p, workspace, stream);
    case 32: return launch_ranges<T, 32>(p, workspace, stream);
    case 64: return launch_ranges<T, 64>(p, workspace, stream);
    case 128: return launch_ranges<T, 128>(p, workspace, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

size_t delta_net_prompt_bytes(dflash_delta_net_params const& p)
{
    int64_t const of_values = delta::numbers_of_values(p.head_size) + kDeltaRows * p.head_size;
    int64_t const numbers = p.key_heads * int64_t{delta::numbers_of_keys(p.head_size)} + p.value_heads * of_values;
    return sizeof(float) * numbers * std::min(delta::count_places(p), kMostPlaces);
}

cudaError_t launch_delta_net_prompts(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream)
{
    switch (p.dtype)
    {
    case DFLASH_FP16: return launch_of_size<__half>(p, workspace, stream);
    case DFLASH_BF16: return launch_of_size<__nv_bfloat16>(p, workspace, stream);
    case DFLASH_FP32: return launch_of_size<float>(p, workspace, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace dflash
