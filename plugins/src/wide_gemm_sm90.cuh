// Products of tens of rows (tokens) with large weights, on Hopper: a block's loop and what it does with the sums.
#pragma once

#include "wgmma.cuh"
#include "wide_gemm_loading_sm90.cuh"

namespace dflash
{
namespace wide
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's sums: of each of its tiles two numbers of one row, and of the eighth row behind it.
template <typename L>
using Sums = float[L::kTiles][4];

// Multiplies: a warpgroup's work.
template <typename L>
struct Mainloop
{
    using T = typename L::T;

    Shared<L> const& shared;
    Share<L> const& share;
    int const group = threadIdx.x / 128;
    Stage<L> stage;

    __device__ __forceinline__ void release(int at) const
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
        {
            arrive(shared.empty(at));
        }
    }

    // Gives one tile's sums, of the lines of this block.
    __device__ __forceinline__ void multiply(Sums<L>& c)
    {
#pragma unroll
        for (auto& four : c)
        {
            four[0] = four[1] = four[2] = four[3] = 0.f;
        }
        add_lines(share.lines, c);
    }

    // Adds the products of the next lines.
    __device__ __forceinline__ void add_lines(int lines, Sums<L>& c)
    {
        constexpr int kRowsAt = L::kSharesRows ? 64 * kLine : 0,
                      kOutputsAt = L::kSharesRows ? 0 : L::kGroupOutputs * kLine;
        int before = 0;
        for (int i = 0; i < lines; ++i)
        {
            wait_for_phase(shared.full(stage.at), stage.phase);
            uint64_t const rows = sm90::matrix(shared.inputs(stage.at) + group * kRowsAt, 16, 1024);
            uint64_t const outputs = sm90::matrix(shared.weight(stage.at) + group * kOutputsAt, 16, 1024);
            sm90::begin_products();
#pragma unroll
            for (int part = 0; part < kLine / 32; ++part) // 16 columns
            {
                sm90::multiply_add_columns<T, L::kTiles>(c, rows + 2 * part, outputs + 2 * part);
            }
            sm90::commit_products();
            sm90::wait_for_all_but<1>();
            if (i > 0)
            {
                release(before);
            }
            before = stage.at;
            stage.advance();
        }
        sm90::wait_for_products(c);
        release(before);
    }
};

// Adds up what the blocks of a cluster have, in the order of their ranks, each a part of the outputs; and stores it.
template <typename L>
struct Epilogue
{
    using T = typename L::T;

    Launch const& launch;
    Shared<L> const& shared;
    Share<L> const& share;
    dflash_skinny_gemm_params const& p = launch.p;
    int const group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const row
        = share.first_row + (L::kSharesRows ? group * 64 : 0) + warp * 16 + lane / 4; // and the eighth behind it
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    __device__ __forceinline__ uint32_t inbox(int from, int tile) const
    {
        return shared.inbox() + ((from * L::kOwnTiles + tile) * kConsumers + threadIdx.x) * 16;
    }

    __device__ __forceinline__ void finish(int tile, Sums<L>& c) const
    {
        if constexpr (L::kSplits == 1)
        {
            store<L::kTiles>(tile, 0, c);
        }
        else
        {
            float own[L::kOwnTiles][4];
            exchange(c, own);
            store<L::kOwnTiles>(tile, share.rank * L::kOwnTiles, own);
        }
    }

    // nth: of the block's tiles.
    __device__ __forceinline__ void exchange(Sums<L> const& c, float (&own)[L::kOwnTiles][4], int nth = 0) const
    {
#pragma unroll
        for (int rank = 0; rank < L::kSplits; ++rank)
        {
#pragma unroll
            for (int i = 0; i < L::kOwnTiles; ++i)
            {
                float const(&x)[4] = c[rank * L::kOwnTiles + i];
                if (rank != share.rank)
                {
                    uint32_t const to = inbox(share.rank - (share.rank > rank), i);
                    send(address_at(to, rank), x, address_at(shared.inbox_full(), rank));
                }
                else
                {
                    own[i][0] = x[0], own[i][1] = x[1], own[i][2] = x[2], own[i][3] = x[3];
                }
            }
        }
        wait_for_phase(shared.inbox_full(), nth % 2);
#pragma unroll
        for (int i = 0; i < L::kOwnTiles; ++i)
        {
            float sum[4] = {};
#pragma unroll
            for (int rank = 0; rank < L::kSplits; ++rank)
            {
                float there[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                    : "=f"(there[0]), "=f"(there[1]), "=f"(there[2]), "=f"(there[3])
                    : "r"(inbox(rank < share.rank ? rank : max(rank - 1, 0), i)));
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    float const x = rank == share.rank ? own[i][j] : there[j];
                    sum[j] = rank == 0 ? x : sum[j] + x;
                }
            }
            own[i][0] = sum[0], own[i][1] = sum[1], own[i][2] = sum[2], own[i][3] = sum[3];
        }
    }

    template <int kCount>
    __device__ __forceinline__ void store(int tile, int first, float (&c)[kCount][4]) const
    {
        int const begin = tile * L::kOutputs + (L::kSharesRows ? 0 : group * L::kGroupOutputs) + first * 8;
#pragma unroll
        for (int below = 0; below < 2; ++below)
        {
            if (row + 8 * below < p.rows)
            {
                if (p.swiglu)
                {
#pragma unroll
                    for (int i = 0; i + 1 < kCount; i += 2)
                    {
                        store_gated(row + 8 * below, begin + i * 8, &c[i][2 * below], &c[i + 1][2 * below]);
                    }
                }
                else
                {
#pragma unroll
                    for (int i = 0; i < kCount; ++i)
                    {
                        store_pair(row + 8 * below, begin + i * 8 + lane % 4 * 2, &c[i][2 * below]);
                    }
                }
            }
        }
    }

    // Rounds as composed operations do: the product, then with a bias, then with a residual.
    __device__ __forceinline__ void store_pair(int at_row, int output, float const* sums) const
    {
        if (output >= p.outputs)
        {
            return;
        }
        int64_t const at = int64_t{at_row} * width + output;
        float y[2] = {rounded<T>(sums[0]), rounded<T>(sums[1])};
        if (p.bias)
        {
            add(static_cast<T const*>(p.bias) + output, y);
        }
        if (p.residual)
        {
            add(static_cast<T const*>(p.residual) + at, y);
        }
        *reinterpret_cast<typename Pair<T>::type*>(static_cast<T*>(p.out) + at) = pair_of<T>(y[0], y[1]);
    }

    __device__ __forceinline__ void add(T const* from, float (&y)[2]) const
    {
        uint32_t const bits = __ldcg(reinterpret_cast<uint32_t const*>(from));
        T const* const two = reinterpret_cast<T const*>(&bits);
        y[0] = rounded<T>(y[0] + to_float(two[0]));
        y[1] = rounded<T>(y[1] + to_float(two[1]));
    }

    __device__ __forceinline__ float activated(float gate) const
    {
        return rounded<T>(p.gelu ? gelu(gate) : silu(gate));
    }

    __device__ __forceinline__ void store_gated(int at_row, int granule_row, float const* gates, float const* ups) const
    {
        if (granule_row >= p.outputs)
        {
            return;
        }
        int const output = granule_row / 2 + lane % 4 * 2;
        float gate[2] = {rounded<T>(gates[0]), rounded<T>(gates[1])};
        float up[2] = {rounded<T>(ups[0]), rounded<T>(ups[1])};
        if (p.bias)
        {
            add(static_cast<T const*>(p.bias) + output, gate);
            add(static_cast<T const*>(p.bias) + p.outputs / 2 + output, up);
        }
        *reinterpret_cast<typename Pair<T>::type*>(static_cast<T*>(p.out) + int64_t{at_row} * width + output)
            = pair_of<T>(activated(gate[0]) * up[0], activated(gate[1]) * up[1]);
    }
};

// Waits for the kernels before this one, and until the other blocks of the cluster can be sent to.
template <typename L>
__device__ __forceinline__ void begin_to_send()
{
    wait();
    if (L::kSplits > 1)
    {
        __syncwarp();
        wait_for_cluster();
    }
}

#endif

template <typename L>
__global__ void __cluster_dims__(L::kSplits, 1, 1) __launch_bounds__(kThreads, 1)
    wide_gemm_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    trigger();
    Shared<L> const shared{{shared_address(memory)}};
    bool const computes = threadIdx.x < kConsumers;
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
    if (threadIdx.x == kConsumers)
    {
        Loader<L>{launch, shared, share, {share}}.load();
    }
    if (threadIdx.x == kConsumers + 32)
    {
        Loader<L>{launch, shared, share, {share}}.load_first_inputs();
    }
    begin_to_send<L>();
    if (!computes)
    {
        return;
    }
    Mainloop<L> mainloop{shared, share};
    Epilogue<L> const epilogue{launch, shared, share};
    for (int tile = share.first_tile; tile < launch.tiles; tile += share.tile_step)
    {
        Sums<L> c;
        mainloop.multiply(c);
        epilogue.finish(tile, c);
    }
#endif
}

} // namespace wide
} // namespace dflash
