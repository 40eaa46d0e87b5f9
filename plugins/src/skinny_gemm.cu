// Matrix products of a few rows (tokens) with large weights: bound by reading the weights, once.
//
// Each cluster of two blocks takes its share of the weight's rows, and the two blocks, with their eight warps each,
// share the inputs of each row; where a weight has many rows, each block takes some of them alone. So all
// multiprocessors read equally much, in one launch, and no sum depends on how many tokens there are: a token's result
// is the same to the bit alone and among others.
//
// Weights reach shared memory, by a warp that does nothing else, before the kernel waits for the one before it: between
// two products, however small the kernels in between, the memory goes on reading.
#include "dflash_kernels.h"
#include "launch.cuh"
#include "skinny_gemm.cuh"
#include "skinny_gemm_epilogue.cuh"
#include "skinny_gemm_mainloop.cuh"
#include "skinny_gemm_reduce.cuh"
#include "tensor_map.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

using namespace skinny;

// Makes the barriers ready, each by the thread that is the first to use it: the one that loads begins at once. Other
// threads, and the other block, may use them once the cluster has met.
template <typename L>
__device__ __forceinline__ void init_barriers(Place const& place, Shared<L> const& shared)
{
    if (place.lane == 0)
    {
        if (place.warp == kWarps)
        {
#pragma unroll 1
            for (int i = 0; i < shared.stages; ++i)
            {
                init_barrier(shared.full + i * kBarrier, 1);
                init_barrier(shared.empty + i * kBarrier, kWarps);
            }
        }
        else
        {
            init_barrier(shared.own_barriers, 1);
            init_barrier(shared.own_barriers + kBarrier, 1);
            if (place.warp == 0)
            {
                init_barrier(shared.inbox_barriers, 1);
                init_barrier(shared.inbox_barriers + kBarrier, 1);
                init_barrier(shared.squares_barrier, 1);
            }
        }
        fence_barrier_inits();
    }
    __syncwarp();
    arrive_at_cluster();
}

// The work of the eight warps that multiply. All products go through this one code, for what is read first from far
// away is not only weights but instructions. With swiglu a granule is 8 rows of the gate and the 8 rows of up that
// belong to them.
template <typename L>
__device__ __forceinline__ void multiply(
    Launch const& launch, Place const& place, Shared<L> const& shared, Ring<L>& ring)
{
    Share const share(launch, place, L::kGranules);
    Inputs<L> inputs{launch, place, shared, share.runs, share.passes};
    inputs.expect_first();
    Reduce<L> reduce{place, shared};
    reduce.expect_first(inputs.is_normed);
    if (inputs.kScaled && inputs.is_normed)
    {
        inputs.scale_norm();
    }
    Mainloop<L> mainloop{ring, inputs, share};
    Registers<L> registers;
    if constexpr (L::kByBlock)
    {
        registers.scales.load(launch, share, inputs.line_of(0), 0);
    }
    Epilogue<L> const epilogue{launch, place, shared, share};
    typename Epilogue<L>::AllTerms terms;
    typename L::Item sums[kCluster] = {}; // of an item of either half, the last the block's own
    for (int pass = 0;; ++pass)
    {
        if (pass > 0)
        {
            epilogue.finish(pass - 1, sums, terms);
        }
        if (pass < share.passes)
        {
            epilogue.load_constants(pass, terms);
        }
        if (pass == 0)
        {
            wait();
            inputs.load_first();
        }
        if (pass == share.passes)
        {
            break;
        }
        epilogue.load_residual(pass, terms);
        int const active = share.active(pass); // granules
        float c[L::kGranules][L::kTiles][4] = {};
        mainloop.begin_pass(pass, active, registers);
        mainloop.multiply_pass(registers, c);
        if (inputs.is_normed && pass == 0)
        {
            reduce.store_squares(registers.squares);
        }
        reduce.template add_warps<Inputs<L>::kScaled>(c, active, inputs.sum_scale, sums);
        if (!place.is_alone)
        {
            reduce.send_items(pass, sums[0]);
        }
        if (inputs.is_normed && pass == 0)
        {
            reduce.send_squares();
        }
        if (pass + 1 < share.passes)
        {
            meet_all(); // the sums have been read
        }
    }
}

template <typename L>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads + 32, 1)
    skinny_gemm_kernel(__grid_constant__ Launch const launch)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Place const place(L::kOrdered && launch.is_alone);
    Shared<L> const shared{place.warp, launch.stages, memory};
    Ring<L> ring{launch, place, shared};
    init_barriers(place, shared);
    if (place.warp == kWarps)
    {
        if (place.lane == 0)
        {
            ring.load();
        }
        __syncwarp();
        wait_for_cluster();
        return;
    }
    wait_for_cluster(); // the other block can be sent to
    multiply(launch, place, shared, ring);
}

// A weight's granules, eight rows and the eight that go with them, of a line for each warp: of chains whose lines lie
// together, or of lines that are the first of what would be more chains.
template <typename W>
cudaError_t map_weight(dflash_skinny_gemm_params const& p, Launch& launch)
{
    constexpr cuuint64_t kHalf = kGranule / 2;
    cuuint64_t const row_bytes = p.inputs * sizeof(W), outputs = p.outputs;
    cuuint64_t const to_second = p.swiglu ? outputs / 2 : kHalf; // rows
    bool const is_together = launch.chains.line_step == 1;
    cuuint64_t const chain_bytes = (is_together ? launch.chains.chain_step : 1) * kLine;
    launch.run_bytes = is_together ? kLine : 0;
    launch.run_chains = is_together ? 0 : launch.chains.all();
    return map_bytes<4>(p.weight, {chain_bytes, outputs - to_second, 2, row_bytes / chain_bytes},
        {row_bytes, to_second * row_bytes, chain_bytes}, {kLine, kHalf, 2, kWarps}, launch.weight);
}

// How a product is divided: among clusters, or blocks that have whole rows each, in which order.
struct Division
{
    int units; // clusters or blocks
    bool is_ordered;
    Chains chains;
};

Division divide(dflash_skinny_gemm_params const& p, int lines, int processors, bool may_be_ordered, bool is_exact)
{
    int const granules = p.outputs / kGranule, clusters = std::min(processors / kCluster, granules);
    // Of rows that a block reads at most, in halves: a cluster's block has half of each.
    auto const most = [&](int units) { return (granules + units - 1) / units * (units / clusters); };
    int blocks = blocks_of_a_row(p.outputs);
    if (!is_exact && most(clusters * kCluster / blocks) > most(clusters))
    {
        blocks = kCluster; // where whole rows cannot be shared as evenly, and nobody asks for one order
    }
    bool const has_pairs = lines % (2 * blocks * kBlockChains) == 0;
    bool const is_ordered = is_exact || (may_be_ordered && has_pairs);
    blocks = is_ordered ? blocks : kCluster;
    return {clusters * kCluster / blocks, is_ordered, Chains(lines, blocks, is_ordered)};
}

template <typename L>
cudaError_t launch_skinny_gemm(
    dflash_skinny_gemm_params const& p, Division const& division, int processors, cudaStream_t stream)
{
    using T = typename L::T;
    using W = typename L::W;
    constexpr auto kernel = skinny_gemm_kernel<L>;
    int const granules = p.outputs / kGranule, clusters = std::min(processors / kCluster, granules);
    Launch launch{p, {}, {}, division.chains, 0, 0, 0, 0, 0, 0, 0, 0.f, 0};
    launch.runs_at_once = division.chains.line_step == 1 ? L::kMostRuns : 1;
    launch.granules = granules / division.units;
    launch.more = granules % division.units;
    launch.is_alone = division.units > clusters;
    launch.per_input = 1.f / static_cast<float>(p.inputs);
    launch.stages = L::stages(p.leaves_room);
    int const bytes = L::bytes(launch.stages);
    cudaError_t error = allow_shared_bytes<kernel>(L::bytes(L::stages(false)));
    error = error ? error : share_multiprocessors<kernel>();
    error = error ? error : map_weight<W>(p, launch);
    error = error ? error : map_rows(p.x, p.rows, p.inputs * sizeof(T), L::kTokens, launch.inputs);
    return error ? error : launch_kernel(kernel, dim3(clusters * kCluster), kThreads + 32, bytes, stream, launch);
}

template <typename T, typename W, int kTokens>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, bool is_exact, cudaStream_t stream)
{
    constexpr bool kMayBeOrdered = std::is_same_v<T, W>;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess)
    {
        return error;
    }
    int const lines = p.inputs * static_cast<int>(sizeof(W)) / kLine;
    Division const division = divide(p, lines, processors, kMayBeOrdered, is_exact);
    if constexpr (kMayBeOrdered)
    {
        if (division.is_ordered)
        {
            return launch_skinny_gemm<Layout<T, W, 6, kTokens, true>>(p, division, processors, stream);
        }
    }
    if constexpr (std::is_same_v<W, E4M3>)
    {
        if (p.is_scaled_by_block)
        {
            return launch_skinny_gemm<Layout<T, W, 6, kTokens, false, true>>(p, division, processors, stream);
        }
    }
    return launch_skinny_gemm<Layout<T, W, 6, kTokens, false>>(p, division, processors, stream);
}

template <typename T, typename W>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, bool is_exact, cudaStream_t stream)
{
    return p.rows <= 8 ? launch_skinny_gemm<T, W, 8>(p, is_exact, stream)
                       : launch_skinny_gemm<T, W, 16>(p, is_exact, stream);
}

} // namespace

cudaError_t skinny_gemm(dflash_skinny_gemm_params const& p, bool is_exact, cudaStream_t stream)
{
    bool const is_fp8 = p.weight_dtype == DFLASH_FP8;
    int const columns = kLine / (is_fp8 ? 1 : 2);
    if (p.rows < 0 || p.rows > DFLASH_SKINNY_ROWS || p.inputs < columns || p.inputs % columns || p.outputs < kGranule
        || p.outputs % kGranule || (is_fp8 ? p.scale == nullptr : p.weight_dtype != p.dtype) || (p.swiglu && p.residual)
        || (p.gelu && !p.swiglu) || (p.is_scaled_by_block && !is_fp8)
        || (p.norm_adds_one && (is_fp8 || p.dtype != DFLASH_BF16)))
    {
        return cudaErrorInvalidValue;
    }
    if (p.rows == 0)
    {
        return cudaSuccess;
    }
    switch (p.dtype)
    {
    case DFLASH_FP16:
        return is_fp8 ? launch_skinny_gemm<__half, E4M3>(p, is_exact, stream)
                      : launch_skinny_gemm<__half, __half>(p, is_exact, stream);
    case DFLASH_BF16:
        return is_fp8 ? launch_skinny_gemm<__nv_bfloat16, E4M3>(p, is_exact, stream)
                      : launch_skinny_gemm<__nv_bfloat16, __nv_bfloat16>(p, is_exact, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace dflash

extern "C" cudaError_t dflash_skinny_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    return dflash::skinny_gemm(*p, false, stream);
}
