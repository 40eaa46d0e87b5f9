// The order in which a row's products are added up, of any number of rows.
//
// A row's inputs lie in lines of 128 bytes, and lines in chains, eight for each block that shares a row where rows are
// few: two blocks do, or with many outputs one. The first chain is the first eighth or sixteenth of the lines, the
// second the next and so on where all are equal, else chain c of n has the lines c, c + n, c + 2 n and so on. Of each
// line of a chain in turn four instructions add the products of 16 inputs that lie together. A block's chains are then
// added up one after the other, and last both blocks' sums. Tensor cores give the same bits by the instructions of a
// warp and of a warpgroup.
//
// With a norm, inputs are multiplied by its weights and rounded before, sums by the inverse root mean square behind.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

namespace dflash
{

constexpr int kBlockChains = 8; // of each block that shares a row
constexpr int kManyOutputs = 16384; // which enough blocks can share with no two of them on one row

inline int blocks_of_a_row(int outputs)
{
    return outputs < kManyOutputs ? 2 : 1;
}

// The chains of a row of so many lines, which so many blocks share.
struct Chains
{
    int lines;
    int all_by_two; // logarithm of their number
    int chain_step; // from the first line of a chain to that of the next
    int line_step; // from a line of a chain to the next

    // may_lie_together: where their number lets them.
    __host__ __device__ Chains(int row_lines, int blocks, bool may_lie_together = true)
        : lines(row_lines)
        , all_by_two(blocks == 1 ? 3 : 4)
        , chain_step(may_lie_together && row_lines % all() == 0 ? row_lines / all() : 1)
        , line_step(may_lie_together && row_lines % all() == 0 ? 1 : all())
    {
    }

    __host__ __device__ int all() const
    {
        return 1 << all_by_two;
    }

    __device__ __forceinline__ int line(int chain, int nth) const
    {
        return chain * chain_step + nth * line_step;
    }

    // The lines of a chain.
    __device__ __forceinline__ int count(int chain) const
    {
        return (lines - chain + all() - 1) >> all_by_two;
    }

    // Those that are not empty.
    __device__ __forceinline__ int used() const
    {
        return min(all(), lines);
    }
};

// A place among the lines of some chains, in turn.
struct ChainLine
{
    int const first, past; // chains
    int chain = first, nth = 0;

    // Goes to the next line, and says whether it has begun anew.
    __device__ __forceinline__ bool advance(Chains const& chains)
    {
        if (++nth < chains.count(chain))
        {
            return false;
        }
        nth = 0;
        chain = chain + 1 == past ? first : chain + 1;
        return chain == first;
    }
};

template <int N>
__device__ __forceinline__ void set_to_zero(float (&sums)[N][4])
{
#pragma unroll
    for (auto& four : sums)
    {
        four[0] = four[1] = four[2] = four[3] = 0.f;
    }
}

template <int N>
__device__ __forceinline__ void copy_sums(float const (&x)[N][4], float (&sums)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        sums[i][0] = x[i][0], sums[i][1] = x[i][1], sums[i][2] = x[i][2], sums[i][3] = x[i][3];
    }
}

// Brings the sums behind the first kNow tiles to where those are.
template <int kNow, int N>
__device__ __forceinline__ void move_sums(float (&sums)[N][4])
{
#pragma unroll
    for (int i = kNow; i < N; ++i)
    {
        float const (&x)[4] = sums[i];
        float (&to)[4] = sums[i - kNow];
        to[0] = x[0], to[1] = x[1], to[2] = x[2], to[3] = x[3];
    }
}

template <int N>
__device__ __forceinline__ void add_sums(float const (&x)[N][4], float (&sums)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            sums[i][j] += x[i][j];
        }
    }
}

// Gives the sums of the chains from `first` to before `past`, of which `next` gives one's: of so many lines.
template <int N, typename Next>
__device__ __forceinline__ void add_chains(
    Chains const& chains, int first, int past, Next const& next, float (&sums)[N][4])
{
    set_to_zero(sums);
#pragma unroll 1
    for (int chain = first; chain < past; ++chain)
    {
        float c[N][4];
        set_to_zero(c);
        next(chains.count(chain), c);
        add_sums(c, sums);
    }
}

// Two inputs by a norm's weights, or by one more than they are: rounded once.
__device__ __forceinline__ __nv_bfloat162 weighted(__nv_bfloat162 x, __nv_bfloat162 weight, bool adds_one)
{
    uint32_t const zeros = 0x80008000u; // negative ones add nothing to any product
    return __hfma2(x, weight, adds_one ? x : reinterpret_cast<__nv_bfloat162 const&>(zeros));
}

// per_input: 1 / the inputs of a row, whose squares have this sum.
__device__ __forceinline__ float inverse_root_mean(float squares, float per_input, float eps)
{
    return rsqrtf(fmaf(squares, per_input, eps));
}

} // namespace dflash
