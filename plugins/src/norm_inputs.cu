// What goes into a product behind RMSNorm, and what its sums are multiplied by: as `skinny_gemm.cu` makes them of few
// rows, to the bit.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "product_order.cuh"

namespace dflash
{
namespace
{

constexpr int kRows = 2; // of a block: a product instruction would take eight, of which a block has more to read
constexpr int kLine = 64; // numbers of a row
constexpr int kVector = 8; // numbers of one access
constexpr int kVectors = 2; // of a line, a lane's

// A chain of lines a warp: lane l has parts of row l / 4, if there is one.
struct Place
{
    int const chain = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const quad = lane / 4, part = lane % 4;
    int const row = blockIdx.x * kRows + quad;
};

// Of a batch of lines, which are on their way at once.
template <int kBatch>
using Batch = uint4[kBatch][kVectors];

// Calls `use` for each vector of a batch of a chain's lines, with the place of the lane's in a row.
template <int kBatch, typename Use>
__device__ __forceinline__ void each_vector(Place const& place, Chains const& chains, int first, Use const& use)
{
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
    {
        if (first + i < chains.count(place.chain))
        {
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
            {
                int const line = chains.line(place.chain, first + i);
                use(i, j, line * kLine + (place.part * kVectors + j) * kVector);
            }
        }
    }
}

// Adds the squares of a lane's eight numbers, as `skinny_gemm_inputs.cuh` does: products of all rows with all rows, of
// which the diagonal counts.
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

// Adds up the chains' squares in their order, and stores the rows' factors.
template <int kBlocks>
__device__ __forceinline__ void store_factors(
    dflash_norm_inputs_params const& p, Place const& place, float per_input, float const (&squares)[4])
{
    __shared__ float sums[kBlocks * kBlockChains][kRows];
    if (place.quad < kRows && place.part == place.quad / 2)
    {
        sums[place.chain][place.quad] = place.quad % 2 ? squares[1] : squares[0];
    }
    __syncthreads();
    int const row = blockIdx.x * kRows + threadIdx.x;
    if (threadIdx.x >= kRows || row >= p.rows)
    {
        return;
    }
    float halves[kBlocks] = {};
#pragma unroll
    for (int chain = 0; chain < kBlocks * kBlockChains; ++chain)
    {
        halves[chain / kBlockChains] += sums[chain][threadIdx.x];
    }
    p.factors[row] = inverse_root_mean(kBlocks == 1 ? halves[0] : halves[0] + halves[kBlocks - 1], per_input, p.eps);
}

// kBlocks: that share a row where rows are few.
template <int kBlocks>
__global__ void __launch_bounds__(kBlocks * kBlockChains * 32)
    norm_inputs_kernel(dflash_norm_inputs_params const p, float per_input)
{
    constexpr int kBatch = 8 / kBlocks;
    trigger();
    Place const place;
    Chains const chains(p.size / kLine, kBlocks);
    bool const has_row = place.quad < kRows && place.row < p.rows;
    int64_t const begin = int64_t{place.row} * p.size;
    auto const* x = static_cast<__nv_bfloat16 const*>(p.x) + begin;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + begin;
    float squares[4] = {};
    for (int first = 0; first == 0 || first < chains.count(place.chain); first += kBatch)
    {
        Batch<kBatch> held = {}, weights = {};
        each_vector<kBatch>(place, chains, first,
            [&](int i, int j, int at)
            {
                auto const* from = static_cast<__nv_bfloat16 const*>(p.weight) + at; // constants
                weights[i][j] = has_row ? __ldg(reinterpret_cast<uint4 const*>(from)) : uint4{};
            });
        if (first == 0)
        {
            wait();
        }
        each_vector<kBatch>(place, chains, first, [&](int i, int j, int at)
            { held[i][j] = has_row ? __ldcg(reinterpret_cast<uint4 const*>(x + at)) : uint4{}; });
        each_vector<kBatch>(place, chains, first,
            [&](int i, int j, int at)
            {
                add_squares(held[i][j], squares);
                if (has_row)
                {
                    *reinterpret_cast<uint4*>(out + at) = weighted_eight(held[i][j], weights[i][j], p.adds_one);
                }
            });
    }
    store_factors<kBlocks>(p, place, per_input, squares);
}

template <int kBlocks>
cudaError_t launch(dflash_norm_inputs_params const& p, cudaStream_t stream)
{
    dim3 const grid((p.rows + kRows - 1) / kRows);
    float const per_input = 1.f / static_cast<float>(p.size);
    return launch_kernel(norm_inputs_kernel<kBlocks>, grid, kBlocks * kBlockChains * 32, 0, stream, p, per_input);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_norm_inputs(dflash_norm_inputs_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->dtype != DFLASH_BF16 || p->rows < 0 || p->outputs < 0 || p->size < kLine || p->size % kLine)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    return blocks_of_a_row(p->outputs) == 1 ? launch<1>(*p, stream) : launch<2>(*p, stream);
}
