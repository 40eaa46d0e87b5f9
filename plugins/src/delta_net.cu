// Gated delta nets: convolution, gates, the state's pending rows, and what new rows read, write and give, in one kernel
// that reads a state once and writes it at most once. Its rows are those that stay pending, at most 16; those of
// prompts before them delta_net_prompt.cu takes.
//
// A cluster has one value head of one segment, each block some of its values. The rows are taken by products alone (the
// delta rule's chunk form): with k, q, v of rows i and j, the decays d, D_ij = d_j+1 * ... * d_i and E_i = d_0 * ... *
// d_i,
//
//     A_ij = b_i D_ij (k_i k_j) below the diagonal;  U = (I + A)^-1 (b (v - E (k S)));  o = E (q S) + (D (q k)) U
//
// Before that S has become E_n S + sum of D_nj k_j u_j, of the pending rows of the step before that were accepted.
//
// Decays are multiplied, never divided: one of 0 is as good as any. While the other warps read the state, one inverts;
// where each warp has all keys of its values, that is one of them, and what belongs to values stays in registers.
//
// The value heads of one key head share its keys, the pending ones too, and the window's rows. Who writes those is the
// last block that has read them.
#include "delta_net_block.cuh"
#include "delta_net_prompt.h"
#include "delta_net_single.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

// Value heads of all segments, up to which a block has 32 values of heads of 128, and up to which it has 64.
constexpr int kFewHeads = 64;
constexpr int kMoreHeads = 300;

// Fills the output of rows between a segment's and the next one's with zeros: they belong to nobody.
template <typename T, int kSize, int kBlockValues>
__device__ __forceinline__ void clear_padding(delta::Place<T, kSize, kBlockValues> const& place, int4 segment, int end)
{
    constexpr int kValues = delta::Division<T, kSize, kBlockValues>::kValues;
    int const first = segment.z + max(segment.w, 0);
    for (int item = threadIdx.x; item < (end - first) * kValues; item += blockDim.x)
    {
        int64_t const to = int64_t{first + item / kValues} * place.p.value_heads * kSize;
        static_cast<T*>(place.p.out)[to + place.first_value() + item % kValues] = from_float<T>(0.f);
    }
}

// Where the state of a segment's slot stands: asked for beside the segment's own load, not behind it, if that is the
// slot that was guessed.
__device__ __forceinline__ int load_length(dflash_delta_net_params const& p, int4 segment, int guess)
{
    int length = p.lengths[guess];
    if (segment.x != guess && segment.w > 0)
    {
        length = p.lengths[segment.x];
    }
    return length;
}

// One cluster a value head and segment, of which it takes the rows that stay pending.
template <typename T, int kSize, int kBlockValues>
__global__ void __cluster_dims__(delta::Division<T, kSize, kBlockValues>::kSplits, 1, 1)
    __launch_bounds__(delta::Division<T, kSize, kBlockValues>::kThreads, kSize == 128 ? 2 : 1)
        delta_net_kernel(__grid_constant__ dflash_delta_net_params const p)
{
    trigger();
    extern __shared__ float4 memory[];
    delta::Place<T, kSize, kBlockValues> const place(p);
    delta::Shared<T, kSize, kBlockValues> const shared(reinterpret_cast<float*>(memory));
    delta::Block<T, kSize, kBlockValues> const block{place, shared};
    auto ahead = block.begin_ahead();
    int const guess = place.guess_slot();
    wait();
    if (delta::Division<T, kSize, kBlockValues>::kSplits > 1)
    {
        wait_for_cluster(); // the other blocks can be sent to
    }
    int4 const* const segments = reinterpret_cast<int4 const*>(p.segments) + blockIdx.z;
    int4 const segment = segments[0];
    int const end = blockIdx.z + 1 < gridDim.z ? segments[1].z : p.rows;
    int const length = load_length(p, segment, guess);
    clear_padding(place, segment, end);
    if (segment.w > 0)
    {
        delta::Segment const own = delta::Segment(p, segment, length).pending();
        block.stage_first(own);
        block.run(own, ahead);
    }
}

// One block a value head and segment.
template <typename T>
__global__ void __launch_bounds__(delta::SingleRows<T>::kThreads, 2)
    single_rows_kernel(__grid_constant__ dflash_delta_net_params const p)
{
    using Single = delta::SingleRows<T>;
    trigger();
    __shared__ typename Single::Shared shared;
    typename Single::OfHead const place(p);
    Single const block{place, shared};
    auto const ahead = block.load_ahead();
    int const guess = place.guess_slot();
    block.prefetch_state(guess);
    wait();
    int4 const* const segments = reinterpret_cast<int4 const*>(p.segments) + blockIdx.z;
    int4 const segment = segments[0];
    int const end = blockIdx.z + 1 < gridDim.z ? segments[1].z : p.rows;
    int const length = load_length(p, segment, guess);
    if (segment.w > 0)
    {
        block.run(delta::Segment(p, segment, length), ahead);
    }
    clear_padding(place, segment, end);
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

// One of each segment, most likely; if not, one after another.
bool has_single_rows(dflash_delta_net_params const& p)
{
    return p.head_size == 128 && p.rows <= p.segment_count;
}

template <typename T, int kSize, int kBlockValues>
cudaError_t launch_delta_net(dflash_delta_net_params const& p, cudaStream_t stream)
{
    using D = delta::Division<T, kSize, kBlockValues>;
    constexpr auto kKernel = delta_net_kernel<T, kSize, kBlockValues>;
    constexpr int kBytes = delta::Shared<T, kSize, kBlockValues>::kBytes;
    cudaError_t const error = allow_shared_bytes<kKernel>(kBytes);
    dim3 const grid(p.value_heads / p.key_heads * D::kSplits, p.key_heads, p.segment_count);
    return error == cudaSuccess ? launch_kernel(kKernel, grid, D::kThreads, kBytes, stream, p) : error;
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
cudaError_t launch_of_size(dflash_delta_net_params const& p, cudaStream_t stream)
{
    constexpr int kWidest = sizeof(T) == 4 ? 64 : 128; // SM120 has not the shared memory for FP32's rows of 128 values
    switch (p.head_size)
    {
    case 16: return launch_delta_net<T, 16, 16>(p, stream);
    case 32: return launch_delta_net<T, 32, 32>(p, stream);
    case 64: return launch_delta_net<T, 64, 32>(p, stream);
    case 128:
        if (has_single_rows(p))
        {
            return launch_single_rows<T>(p, stream);
        }
        // Blocks of fewer values end sooner; what they all do again takes longer once they wait for each other.
        if (p.value_heads * p.segment_count <= kFewHeads)
        {
            return launch_delta_net<T, 128, 32>(p, stream);
        }
        if (p.value_heads * p.segment_count <= kMoreHeads)
        {
            return launch_delta_net<T, 128, 64>(p, stream);
        }
        return launch_delta_net<T, 128, kWidest>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_delta_net_workspace(dflash_delta_net_params const* p, size_t* bytes)
{
    *bytes = dflash::has_prompts(*p) ? dflash::delta_net_prompt_bytes(*p) : 0;
    return cudaSuccess;
}

extern "C" cudaError_t dflash_delta_net(
    dflash_delta_net_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->key_heads > 0 && p->value_heads > 0 && p->value_heads % p->key_heads == 0 && p->slots > 0
        && p->kernel == delta::kTaps && p->pending > 0 && p->pending <= kDeltaRows && p->segment_count <= 65535
        && p->key_heads <= 65535 && p->value_heads <= 65535 && p->x_row_stride % 8 == 0 && p->keeps >= 0
        && p->keeps <= (has_single_rows(*p) ? p->pending : 0);
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0 || p->rows == 0)
    {
        return cudaSuccess;
    }
    if (has_prompts(*p))
    {
        bool const has_room = workspace != nullptr && workspace_bytes >= delta_net_prompt_bytes(*p);
        cudaError_t const error = has_room ? launch_delta_net_prompts(*p, workspace, stream) : cudaErrorInvalidValue;
        if (error != cudaSuccess)
        {
            return error;
        }
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_of_size<__half>(*p, stream);
    case DFLASH_BF16: return launch_of_size<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_of_size<float>(*p, stream);
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
