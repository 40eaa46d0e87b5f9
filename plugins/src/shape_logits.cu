// Penalties of slots and masks of rows, which change logits before tokens are chosen.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kThreads = 256;
constexpr int kChunk = 4096; // tokens of a block, a multiple of a mask's word
constexpr int kMostRuns = 64;
constexpr int kMostRunLength = 8;
constexpr int kAny = -1;
constexpr float kBanned = -1e30f;

// A row's slot, and what the step has of its reply up to the row.
struct Row
{
    int slot;
    int position;
    int said; // tokens of the step that are in the reply
    int32_t const* tokens; // these
    uint32_t const* mask; // null: none
    bool is_penalized;

    __device__ __forceinline__ Row(dflash_shape_logits_params const& p, int logit)
        : slot(p.logit_slot[logit])
        , position(p.logit_position[logit])
        , said(0)
        , tokens(p.token_ids)
        , mask(nullptr)
        , is_penalized(false)
    {
        if (logit >= p.logit_first[p.segment_count])
        {
            return; // padding
        }
        int const row = p.logit_rows[logit];
        int const segment = p.row_segment[row];
        if (segment < p.decode_segments && reinterpret_cast<int4 const*>(p.decoding)[segment].w > 0)
        {
            said = logit - p.logit_first[segment] + 1;
            tokens = p.token_ids + row + 1 - said;
        }
        is_penalized = p.penalized[slot] != 0;
        int const which = p.mask_rows[logit];
        mask = which < 0 ? nullptr : p.masks + int64_t{which} * p.mask_words;
    }

    __device__ __forceinline__ bool allows(int token) const
    {
        return !mask || (mask[token / 32] >> token % 32 & 1);
    }
};

// Penalizes x of a token that the reply has `more` times in the step. Rounds as the operations one by one do.
__device__ __forceinline__ float penalized(
    dflash_shape_logits_params const& p, Row const& row, float x, int token, int more)
{
    int64_t const at = int64_t{row.slot} * p.vocabulary + token;
    if (p.ends[at] && row.position + 1 < p.ends_from[row.slot])
    {
        return kBanned;
    }
    int const count = p.counts[at] + more;
    if (count > 0 || p.in_prompt[at])
    {
        float const repetition = p.repetition[row.slot];
        x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    }
    if (count > 0)
    {
        x = __fsub_rn(x, __fmul_rn(static_cast<float>(count), p.frequency[row.slot]));
        x = __fsub_rn(x, p.presence[row.slot]);
    }
    return __fadd_rn(x, p.bias[at]);
}

// The last token of a run whose others the reply ends with; -1: it does not.
__device__ __forceinline__ int end_of_run(dflash_shape_logits_params const& p, Row const& row, int index)
{
    int const length = p.run_length;
    int32_t const* run = p.runs + (int64_t{row.slot} * p.run_count + index) * length;
    int32_t const* recent = p.recent + int64_t{row.slot} * (length - 1);
    bool is_there = run[length - 1] != kAny;
    for (int i = 0; i < length - 1; ++i)
    {
        int const back = row.said + i - (length - 1); // among the step's tokens; negative: before them
        int const token = back < 0 ? recent[row.said + i] : row.tokens[back];
        is_there = is_there && (run[i] == kAny || run[i] == token);
    }
    return is_there ? run[length - 1] : -1;
}

// A block has a chunk of a row.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) shape_logits_kernel(dflash_shape_logits_params const p)
{
    begin();
    int const logit = blockIdx.y;
    Row const row(p, logit);
    if (p.is_shaped)
    {
        bool const changes = row.is_penalized || row.mask;
        if (blockIdx.x == 0 && threadIdx.x == 0)
        {
            p.is_shaped[logit] = changes;
        }
        if (!changes)
        {
            return;
        }
    }
    int const begin_at = blockIdx.x * kChunk;
    int const end_at = min(begin_at + kChunk, p.size);
    T const* logits = static_cast<T const*>(p.logits) + int64_t{logit} * p.size;
    float* shaped = p.shaped + int64_t{logit} * p.size;
    for (int first = begin_at + threadIdx.x * kVector; first < end_at; first += kThreads * kVector)
    {
        auto const x = load_vector<T, kVector>(logits + first);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            int const token = p.first_token + first + i;
            float value = to_float(x.at[i]);
            value = row.is_penalized ? penalized(p, row, value, token, 0) : value;
            shaped[first + i] = row.allows(token) ? value : -INFINITY;
        }
    }
    if (!row.is_penalized)
    {
        return;
    }
    // Few tokens are in the step's own rows, or end a run: theirs are written once more.
    auto const is_here = [&](int token)
    { return token >= p.first_token + begin_at && token < p.first_token + end_at && row.allows(token); };
    __syncthreads();
    for (int i = threadIdx.x; i < row.said; i += kThreads)
    {
        int const token = row.tokens[i];
        if (is_here(token))
        {
            int more = 0;
            for (int j = 0; j < row.said; ++j)
            {
                more += row.tokens[j] == token;
            }
            int const at = token - p.first_token;
            shaped[at] = penalized(p, row, to_float(logits[at]), token, more);
        }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < p.run_count)
    {
        int const token = end_of_run(p, row, threadIdx.x);
        if (token >= 0 && is_here(token))
        {
            shaped[token - p.first_token] = kBanned;
        }
    }
}

template <typename T>
cudaError_t launch_shape_logits(dflash_shape_logits_params const& p, cudaStream_t stream)
{
    constexpr int kVector = 16 / sizeof(T);
    bool const is_aligned = p.size % kVector == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
    dim3 const grid((p.size + kChunk - 1) / kChunk, p.rows);
    auto* const kernel = is_aligned ? shape_logits_kernel<T, kVector> : shape_logits_kernel<T, 1>;
    return launch_kernel(kernel, grid, kThreads, 0, stream, p);
}

// One warp a segment.
__global__ void keep_replies_kernel(dflash_keep_replies_params const p)
{
    begin();
    int const index = blockIdx.x;
    int4 const segment = reinterpret_cast<int4 const*>(p.decoding)[index]; // slot, start, first row, count
    if (segment.w <= 0 || !p.penalized[segment.x])
    {
        return;
    }
    int const lane = threadIdx.x;
    int const said = min(p.accepted[index] + 1, segment.w);
    int32_t const* tokens = p.token_ids + segment.z;
    for (int i = lane; i < said; i += 32)
    {
        atomicAdd(p.counts + int64_t{segment.x} * p.vocabulary + tokens[i], 1);
    }
    int const most = p.run_length - 1;
    int32_t* recent = p.recent + int64_t{segment.x} * most;
    int token = 0;
    if (lane < most)
    {
        int const back = said + lane - most; // among the step's tokens; negative: before them
        token = back < 0 ? recent[said + lane] : tokens[back];
    }
    __syncwarp();
    if (lane < most)
    {
        recent[lane] = token;
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_shape_logits(dflash_shape_logits_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->size > 0 && p->rows >= 0 && p->rows <= 65535 && p->first_token >= 0
        && p->first_token + p->size <= p->vocabulary && p->mask_words >= (p->vocabulary + 31) / 32
        && p->segment_count > 0 && p->decode_segments >= 0 && p->decode_segments <= p->segment_count
        && p->run_count >= 0 && p->run_count <= kMostRuns && p->run_length > 0 && p->run_length <= kMostRunLength;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_shape_logits<__half>(*p, stream);
    case DFLASH_BF16: return launch_shape_logits<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_shape_logits<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t dflash_keep_replies(dflash_keep_replies_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->decode_segments < 0 || p->vocabulary < 1 || p->run_length < 1 || p->run_length > kMostRunLength)
    {
        return cudaErrorInvalidValue;
    }
    if (p->decode_segments == 0)
    {
        return cudaSuccess;
    }
    return launch_kernel(keep_replies_kernel, dim3(p->decode_segments), 32, 0, stream, *p);
}
