// What goes into a product behind RMSNorm, and what its sums are multiplied by: as `skinny_gemm.cu` makes them of few
// rows, to the bit.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "product_order.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kVector = 8; // numbers of one access
constexpr int kLineVectors = 8; // of a line of 128 bytes
constexpr int kMaxThreads = 1024;
constexpr int kMaxSize = 24576; // of a row, which fits the shared memory that a block has without asking

// Adds the squares of a lane's eight numbers, as `skinny_gemm_inputs.cuh` does: products of what each four lanes have
// with what all have, of which the diagonal counts.
__device__ __forceinline__ void add_squares(uint4 const& x, float (&squares)[4])
{
    uint32_t const first[4] = {x.x, x.x, x.y, x.y}, second[4] = {x.z, x.z, x.w, x.w};
    multiply_add<__nv_bfloat16>(squares, first, x.x, x.y);
    multiply_add<__nv_bfloat16>(squares, second, x.z, x.w);
}

__device__ __forceinline__ uint4 weighted_eight(uint4 const& x, uint4 const& weight, bool adds_one)
{
    auto const two = [&](uint32_t const& a, uint32_t const& b)
    {
        __nv_bfloat162 const y = weighted(
            reinterpret_cast<__nv_bfloat162 const&>(a), reinterpret_cast<__nv_bfloat162 const&>(b), adds_one);
        return reinterpret_cast<uint32_t const&>(y);
    };
    return make_uint4(two(x.x, weight.x), two(x.y, weight.y), two(x.z, weight.z), two(x.w, weight.w));
}

// The sum of a row's squares, by the first lane of the warp that calls it: each four lanes have a chain of those that a
// block adds up, or one for each of two blocks.
template <int kBlocks>
__device__ __forceinline__ float sum_squares(uint4 const* row, int lines)
{
    Chains const chains(lines, kBlocks);
    int const lane = threadIdx.x, chain = lane / 4, part = lane % 4;
    float squares[kBlocks][4] = {};
#pragma unroll 1
    for (int nth = 0; nth < chains.count(0); ++nth) // the first chain is a longest one
    {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
        {
            int const of = block * kBlockChains + chain;
            bool const has_line = nth < chains.count(of);
            uint4 const* const from = row + chains.line(of, nth) * kLineVectors + part * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                add_squares(has_line ? from[i] : uint4{}, squares[block]);
            }
        }
    }
    float sum = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
    {
        float const own = chain % 2 ? squares[block][1] : squares[block][0];
        float of_block = 0.f;
#pragma unroll
        for (int i = 0; i < kBlockChains; ++i)
        {
            of_block += __shfl_sync(0xffffffffu, own, i * 4 + i / 2);
        }
        sum = block == 0 ? of_block : sum + of_block;
    }
    return sum;
}

// One block a row. kBlocks: that share a row where rows are few. The code is short, for it comes from memory at each
// launch: between two of them other kernels run.
template <int kBlocks>
__global__ void __launch_bounds__(kMaxThreads)
    norm_inputs_kernel(dflash_norm_inputs_params const p, float per_input)
{
    extern __shared__ uint4 row[];
    trigger();
    int const vectors = p.size / kVector;
    auto const* weight = static_cast<uint4 const*>(p.weight); // constants
    int at = threadIdx.x;
    uint4 by = at < vectors ? __ldg(weight + at) : uint4{};
    wait();
    int64_t const begin = int64_t{blockIdx.x} * vectors;
    auto const* x = static_cast<uint4 const*>(p.x) + begin;
    auto* out = static_cast<uint4*>(p.out) + begin;
#pragma unroll 1
    while (at < vectors)
    {
        uint4 const held = __ldcg(x + at);
        row[at] = held;
        out[at] = weighted_eight(held, by, p.adds_one);
        at += blockDim.x;
        by = at < vectors ? __ldg(weight + at) : uint4{};
    }
    __syncthreads();
    if (threadIdx.x < 32)
    {
        float const sum = sum_squares<kBlocks>(row, vectors / kLineVectors);
        if (threadIdx.x == 0)
        {
            p.factors[blockIdx.x] = inverse_root_mean(sum, per_input, p.eps);
        }
    }
}

template <int kBlocks>
cudaError_t launch(dflash_norm_inputs_params const& p, cudaStream_t stream)
{
    int const threads = std::min((p.size / kVector + 31) / 32 * 32, kMaxThreads);
    float const per_input = 1.f / static_cast<float>(p.size);
    return launch_kernel(norm_inputs_kernel<kBlocks>, dim3(p.rows), threads, p.size * 2, stream, p, per_input);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_norm_inputs(dflash_norm_inputs_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->dtype != DFLASH_BF16 || p->rows < 0 || p->outputs < 0 || p->size <= 0 || p->size > kMaxSize
        || p->size % (kLineVectors * kVector))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    return blocks_of_a_row(p->outputs) == 1 ? launch<1>(*p, stream) : launch<2>(*p, stream);
}
