// Products of tens of rows (tokens) with large weights, on Hopper, whose sums go in the order of `product_order.cuh`:
// what differs from `wide_gemm_sm90.cuh`.
//
// A cluster's two blocks have half of the chains each, and any number of tiles, or a block has all chains: eight then.
#pragma once

#include "product_order.cuh"
#include "row_factors.cuh"
#include "wide_gemm_sm90.cuh"

namespace dflash
{
namespace exact
{

using wide::kConsumers;
using wide::kLine;

constexpr int kLoaderRegisters = 40;
constexpr int kMainloopRegisters = 232;

template <typename InputType, int kTileRows, int kTileOutputs, int kClusterSplits>
struct Layout : wide::Layout<InputType, kTileRows, kTileOutputs, kClusterSplits>
{
    using Base = wide::Layout<InputType, kTileRows, kTileOutputs, kClusterSplits>;
    static constexpr int kBarrierBytes = Base::kBarrierBytes + 8;
    static constexpr int kOther = std::max(Base::kInboxBytes + kBarrierBytes, Base::kBehind);
    static constexpr int kStages = std::min((wide::kLimit - kOther) / Base::kStageBytes, wide::kMostStages);
    static constexpr int kBytes = kStages * Base::kStageBytes + kOther;
    static constexpr int kSumRegisters = 2 * Base::kTiles * 4; // of a chain, and of the chains before
    // Two more warps load; where sums need more registers, they are of a warpgroup, which gives its own.
    static constexpr bool kGivesRegisters = kSumRegisters > 128;
    static constexpr int kThreads = kGivesRegisters ? kConsumers + 128 : wide::kThreads;
    static_assert(Base::kSplits <= 2 && kSumRegisters <= 192);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using wide::Sums;

template <typename L>
struct Shared : wide::Shared<L>
{
    // That the other block's inbox has been read.
    __device__ __forceinline__ uint32_t inbox_empty() const
    {
        return this->inbox_full() + 8;
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        init_barrier(inbox_empty(), kConsumers / 32);
        wide::Shared<L>::init();
    }
};

// A block's chains.
template <typename L>
struct Share : wide::Share<L>
{
    Chains const chains;
    int const first = this->rank * kBlockChains, past = min(first + kBlockChains, chains.used());

    __device__ __forceinline__ explicit Share(wide::Launch const& launch)
        : wide::Share<L>(launch)
        , chains(launch.lines, L::kSplits)
    {
    }
};

// Their lines in turn.
template <typename L>
struct Lines
{
    Share<L> const& share;
    ChainLine line{share.first, share.past};

    __device__ __forceinline__ int column() const
    {
        return share.chains.line(line.chain, line.nth) * kLine;
    }

    __device__ __forceinline__ bool advance()
    {
        return line.advance(share.chains);
    }
};

// Multiplies: a warpgroup's work.
template <typename L>
struct Mainloop
{
    wide::Mainloop<L> base;
    Share<L> const& share;

    // Gives one tile's sums, of this block's chains.
    __device__ __forceinline__ void multiply(Sums<L>& sums)
    {
        add_chains(
            share.chains, share.first, share.past, [&](int lines, Sums<L>& c) { base.add_lines(lines, c); }, sums);
    }
};

// Adds up what a cluster's blocks have, each a part of the outputs; and stores it.
template <typename L>
struct Epilogue
{
    wide::Epilogue<L> const base;
    Shared<L> const& shared;
    RowFactors const factors{base.p, base.row};

    // nth: of the block's tiles.
    __device__ __forceinline__ void finish(int tile, int nth, Sums<L>& c) const
    {
        auto const scaled = [&](float2 const& sums, bool below, int)
        { return float2{sums.x * factors.of(below), sums.y * factors.of(below)}; };
        auto const wait_for_inbox = [&]
        {
            if (nth > 0)
            {
                wait_for_phase(shared.inbox_empty(), (nth - 1) % 2);
            }
        };
        base.finish(tile, nth, c, scaled, wait_for_inbox);
        if (L::kSplits > 1 && tile + base.share.tile_step < base.launch.tiles)
        {
            free_inbox();
        }
    }

    // Lets the other block send once more. What it sent has been read by now, for results were made of it; but that of
    // rows past the last, of which none are: it is nobody's.
    __device__ __forceinline__ void free_inbox() const
    {
        if (threadIdx.x == 0)
        {
            expect_bytes(shared.inbox_full(), L::kInboxBytes);
        }
        __syncwarp();
        if (base.lane == 0)
        {
            wide::arrive_there(shared.inbox_empty(), base.share.rank ^ 1);
        }
    }
};

#endif

template <typename L>
__global__ void __cluster_dims__(L::kSplits, 1, 1) __launch_bounds__(L::kThreads, 1)
    exact_gemm_kernel(__grid_constant__ wide::Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared<L> const shared{{{shared_address(memory)}}};
    if (threadIdx.x == kConsumers)
    {
        shared.init();
    }
    if (L::kSplits > 1)
    {
        __syncwarp();
        arrive_at_cluster();
    }
    __syncthreads();
    Share<L> const share(launch);
    if (threadIdx.x >= kConsumers)
    {
        if constexpr (L::kGivesRegisters)
        {
            sm90::release_registers<kLoaderRegisters>();
        }
        if (threadIdx.x == kConsumers)
        {
            wide::Loader<L, Lines<L>>{launch, shared, share, {share}}.load();
        }
        if (threadIdx.x == kConsumers + 32)
        {
            wide::Loader<L, Lines<L>>{launch, shared, share, {share}}.load_first_inputs();
        }
        wide::begin_to_send<L>();
    }
    else
    {
        if constexpr (L::kGivesRegisters)
        {
            sm90::take_registers<kMainloopRegisters>();
        }
        wide::begin_to_send<L>();
        Mainloop<L> mainloop{{shared, share}, share};
        Epilogue<L> const epilogue{{launch, shared, share}, shared};
        int nth = 0;
        for (int tile = share.first_tile; tile < launch.tiles; tile += share.tile_step)
        {
            Sums<L> sums;
            mainloop.multiply(sums);
            epilogue.finish(tile, nth++, sums);
        }
    }
#endif
}

} // namespace exact
} // namespace dflash
