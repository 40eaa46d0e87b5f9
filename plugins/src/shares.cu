// Rows by survival: the rows of a step, and those of the blocks drafted in it, go to the drafts of all slots that are
// likeliest to become tokens.
//
// Each kernel is one block: it ranks some hundreds of chances.
#include "dflash_kernels.h"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kThreads = 1024;
constexpr int kMostRanked = 4096; // chances of all segments
constexpr unsigned kAll = 0xffffffffu;
// Of a slot whose first block is drafted, the mean log-probability of a draft behind right ones: some 0.85.
constexpr float kFirstOutlook = -0.16f;
constexpr float kLeastOutlook = -4.f;
constexpr float kRecent = 0.5f; // what the newest block weighs in a slot's outlook

// A chance and its place, as one number: larger chances are larger, then lower places. No chance: 0.
__device__ __forceinline__ uint64_t ranked(float chance, int place)
{
    return chance > 0.f ? uint64_t{__float_as_uint(chance)} << 32 | (0xffffffffu - static_cast<unsigned>(place)) : 0;
}

__device__ __forceinline__ int place_of(uint64_t key)
{
    return static_cast<int>(0xffffffffu - static_cast<unsigned>(key));
}

// The next power of two.
__host__ __device__ constexpr int padded(int count)
{
    int size = 1;
    while (size < count)
    {
        size *= 2;
    }
    return size;
}

// Sorts keys, a power of two of them, the largest first. By all threads of the block.
__device__ __forceinline__ void sort(uint64_t* keys, int count)
{
    for (int run = 2; run <= count; run *= 2)
    {
        for (int apart = run / 2; apart > 0; apart /= 2)
        {
            __syncthreads();
            for (int pair = threadIdx.x; pair < count / 2; pair += blockDim.x)
            {
                int const low = pair / apart * 2 * apart + pair % apart;
                uint64_t const here = keys[low], there = keys[low + apart];
                bool const falls = (low & run) == 0;
                if ((here < there) == falls)
                {
                    keys[low] = there;
                    keys[low + apart] = here;
                }
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ float sum_of_lanes(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
    {
        x += __shfl_xor_sync(kAll, x, step);
    }
    return x;
}

// What a block shares: the chances of segments' drafts, by position first, and the rows that segments get.
struct Ranking
{
    uint64_t* keys; // [padded(segments * drafts)]
    int* counts; // [segments]
    float* outlooks; // [segments], where they are needed
    int segments;
    int drafts;

    __device__ __forceinline__ Ranking(uint64_t* shared, int segments_, int drafts_)
        : keys(shared)
        , counts(reinterpret_cast<int*>(shared + padded(segments_ * drafts_)))
        , outlooks(reinterpret_cast<float*>(counts + segments_))
        , segments(segments_)
        , drafts(drafts_)
    {
    }

    static int bytes(int segments, int drafts)
    {
        return padded(segments * drafts) * static_cast<int>(sizeof(uint64_t)) + 8 * segments;
    }

    __device__ __forceinline__ void clear() const
    {
        for (int i = threadIdx.x; i < padded(segments * drafts); i += blockDim.x)
        {
            keys[i] = 0;
        }
        __syncthreads();
    }

    __device__ __forceinline__ void set(int segment, int draft, float chance) const
    {
        int const place = draft * segments + segment;
        keys[place] = ranked(chance, place);
    }

    // Gives the drafts of the `most` largest chances a row each, once they are sorted.
    __device__ __forceinline__ void give(int most) const
    {
        for (int i = threadIdx.x; i < min(most, segments * drafts); i += blockDim.x)
        {
            if (keys[i])
            {
                atomicAdd(&counts[place_of(keys[i]) % segments], 1);
            }
        }
        __syncthreads();
    }
};

__global__ void __launch_bounds__(kThreads) divide_rows_kernel(dflash_divide_rows_params const p)
{
    begin();
    extern __shared__ uint64_t shared[];
    __shared__ int decoding, total;
    int const count = p.decode_segments;
    Ranking const ranking(shared, count, p.drafts);
    if (threadIdx.x == 0)
    {
        decoding = 0;
        total = 0;
    }
    ranking.clear();
    for (int index = threadIdx.x; index < count; index += blockDim.x)
    {
        int4 const word = reinterpret_cast<int4 const*>(p.words)[index]; // slot, most rows, start, rows of all
        bool const decodes = word.z < 0 && word.y > 0;
        ranking.counts[index] = decodes;
        if (decodes)
        {
            atomicAdd(&decoding, 1);
            total = word.w; // the same in all
        }
        float chance = 1.f;
        for (int draft = 0; draft < p.drafts && decodes && draft + 1 < word.y; ++draft)
        {
            float const foretold = fabsf(p.foretold[int64_t{word.x} * p.drafts + draft]);
            chance = fminf(chance, foretold * (p.survived[draft] / p.expected[draft]));
            ranking.set(index, draft, chance);
        }
    }
    sort(ranking.keys, padded(count * p.drafts));
    ranking.give(max(min(total, p.most) - decoding, 0));
    int4* const divided = reinterpret_cast<int4*>(p.divided);
    for (int index = threadIdx.x; index < count; index += blockDim.x)
    {
        int4 const word = reinterpret_cast<int4 const*>(p.words)[index];
        int const rows = ranking.counts[index];
        divided[index] = rows ? int4{word.x, rows, word.z, rows} : word;
    }
    for (int i = 4 * count + threadIdx.x; i < p.word_count; i += blockDim.x)
    {
        p.divided[i] = p.words[i];
    }
}

// The sum of the counts of the segments before each. By the first warp.
__device__ __forceinline__ void write_blocks(dflash_divide_blocks_params const& p, int const* counts)
{
    int before = 0;
    for (int first = 0; first < p.segment_count; first += 32)
    {
        int const index = first + threadIdx.x;
        int const own = index < p.segment_count ? counts[index] : 0;
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
        {
            int const below = __shfl_up_sync(kAll, sum, step);
            sum += static_cast<int>(threadIdx.x) >= step ? below : 0;
        }
        if (index < p.segment_count)
        {
            int const slot = p.segments[4 * index];
            reinterpret_cast<int4*>(p.words)[index] = own ? int4{slot, own, p.next_start[index], own} : int4{};
            if (own)
            {
                p.words[4 * p.segment_count + before + sum - own] = p.bonus[index];
            }
        }
        before += __shfl_sync(kAll, sum, 31);
    }
}

__global__ void __launch_bounds__(kThreads) divide_blocks_kernel(dflash_divide_blocks_params const p)
{
    begin();
    extern __shared__ uint64_t shared[];
    __shared__ int active;
    int const count = p.segment_count;
    Ranking const ranking(shared, count, p.drafts);
    if (threadIdx.x == 0)
    {
        active = 0;
    }
    for (int row = threadIdx.x; row < p.rows; row += blockDim.x)
    {
        p.words[4 * count + row] = p.mask_id;
    }
    ranking.clear();
    for (int index = threadIdx.x; index < count; index += blockDim.x)
    {
        int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
        bool const is_active = segment.w > 0;
        bool const decodes = index < p.decode_segments && p.decoding[4 * index + 3] > 0;
        float const outlook = decodes ? p.outlook[segment.x] : kFirstOutlook;
        ranking.counts[index] = is_active;
        ranking.outlooks[index] = outlook;
        if (is_active)
        {
            atomicAdd(&active, 1);
        }
        for (int draft = 0; draft < p.drafts && is_active; ++draft)
        {
            // Everybody's first draft comes before all others: it shows whether later ones are worth their rows.
            ranking.set(index, draft, draft ? expf(outlook * (draft + 1)) : 1.f + expf(outlook));
        }
    }
    sort(ranking.keys, padded(count * p.drafts));
    ranking.give(max(p.rows - active, 0));
    // How much each more draft a slot, on average, is likely to commit.
    int const lane = threadIdx.x % 32;
    for (int draft = threadIdx.x / 32; draft < p.drafts; draft += blockDim.x / 32)
    {
        float sum = 0.f;
        for (int i = lane; i < active; i += 32)
        {
            uint64_t const key = ranking.keys[draft * active + i]; // 0: its chance is no number that is left
            int const place = place_of(key);
            sum += key ? expf(ranking.outlooks[place % count] * (place / count + 1)) : 0.f;
        }
        sum = sum_of_lanes(sum);
        if (lane == 0)
        {
            p.gains[draft] = active ? sum / active : 0.f;
        }
    }
    if (threadIdx.x < 32)
    {
        write_blocks(p, ranking.counts);
    }
}

// Learns how often drafts of each position survive, of how many were expected to: a warp for each position.
__device__ __forceinline__ void learn(dflash_keep_drafts_params const& p)
{
    int const lane = threadIdx.x % 32;
    for (int draft = threadIdx.x / 32; draft < p.drafts; draft += blockDim.x / 32)
    {
        float tries = 0.f, expected = 0.f, survived = 0.f;
        for (int index = lane; index < p.decode_segments; index += 32)
        {
            int4 const segment = reinterpret_cast<int4 const*>(p.decoding)[index];
            float const foretold = draft + 1 < segment.w ? p.foretold[int64_t{segment.x} * p.drafts + draft] : 0.f;
            if (foretold > 0.f)
            {
                tries += 1.f;
                expected += foretold;
                survived += draft < p.accepted[index] ? 1.f : 0.f;
            }
        }
        tries = sum_of_lanes(tries);
        expected = sum_of_lanes(expected);
        survived = sum_of_lanes(survived);
        if (lane == 0)
        {
            float const kept = fminf(1.f, p.memory / (p.memory + tries));
            p.expected[draft] = kept * p.expected[draft] + expected;
            p.survived[draft] = kept * p.survived[draft] + survived;
        }
    }
}

__global__ void __launch_bounds__(kThreads) keep_drafts_kernel(dflash_keep_drafts_params const p)
{
    begin();
    learn(p);
    __syncthreads(); // what was foretold is read above, and written below
    for (int index = threadIdx.x; index < p.segment_count; index += blockDim.x)
    {
        int32_t* const tokens = p.next_tokens + int64_t{index} * (p.drafts + 1);
        int4 const block = reinterpret_cast<int4 const*>(p.blocks)[index]; // slot, start, first row, count
        tokens[0] = p.bonus[index];
        float sum = 0.f, weighed = 0.f, weights = 0.f;
        for (int draft = 0; draft < p.drafts; ++draft)
        {
            bool const is_drafted = draft + 1 < block.w;
            int64_t const row = block.z + draft + 1;
            tokens[draft + 1] = is_drafted ? p.ids[row * p.id_stride] : 0;
            if (is_drafted)
            {
                float const weight = expf(sum); // that the drafts before it survive
                float const own = fminf(p.log_probs[row * p.log_prob_stride], 0.f);
                weighed += weight * fmaxf(own, kLeastOutlook);
                weights += weight;
                sum += own;
            }
            if (block.w > 0)
            {
                p.foretold[int64_t{block.x} * p.drafts + draft] = is_drafted ? expf(sum) : 0.f;
            }
        }
        if (weights > 0.f)
        {
            bool const decodes = index < p.decode_segments && p.decoding[4 * index + 3] > 0;
            float const newest = weighed / weights;
            float const before = decodes ? p.outlook[block.x] : newest;
            p.outlook[block.x] = before + kRecent * (newest - before);
        }
    }
}

bool is_ranked(int segments, int drafts)
{
    return segments > 0 && drafts > 0 && segments <= kMostRanked / drafts;
}

int threads_for(int segments, int drafts)
{
    return std::min(std::max(padded(segments * drafts) / 2, 128), kThreads);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_divide_rows(dflash_divide_rows_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (!is_ranked(p->decode_segments, p->drafts) || p->most < 0 || p->word_count < 4 * p->decode_segments)
    {
        return cudaErrorInvalidValue;
    }
    int const bytes = Ranking::bytes(p->decode_segments, p->drafts);
    int const threads = threads_for(p->decode_segments, p->drafts);
    return launch_kernel(divide_rows_kernel, dim3(1), threads, bytes, stream, *p);
}

extern "C" cudaError_t dflash_divide_blocks(dflash_divide_blocks_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (!is_ranked(p->segment_count, p->drafts) || p->decode_segments < 0 || p->decode_segments > p->segment_count
        || p->rows < 2 * p->segment_count)
    {
        return cudaErrorInvalidValue;
    }
    int const bytes = Ranking::bytes(p->segment_count, p->drafts);
    int const threads = threads_for(p->segment_count, p->drafts);
    return launch_kernel(divide_blocks_kernel, dim3(1), threads, bytes, stream, *p);
}

extern "C" cudaError_t dflash_keep_drafts(dflash_keep_drafts_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (!is_ranked(p->segment_count, p->drafts) || p->decode_segments < 0 || p->decode_segments > p->segment_count)
    {
        return cudaErrorInvalidValue;
    }
    return launch_kernel(keep_drafts_kernel, dim3(1), 512, 0, stream, *p);
}
