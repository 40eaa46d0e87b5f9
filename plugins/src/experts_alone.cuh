// The second product of a row that is alone, and the sum over its experts.
//
// A block has all experts' outputs of its granules, so that no kernel comes behind that adds up. It fits beside a block
// of the first product: its weights are on their way before there are inputs.
#pragma once

#include "experts_product.cuh"

namespace dflash
{
namespace moe
{

// A block's items, a warp's at a time: one for each of its granules and each of the row's groups, which have one token
// and are places of the routing.
struct AloneShare
{
    int groups;
    int first_granule;
    int granules;

    __device__ __forceinline__ AloneShare(Product const& p, int group_count)
        : groups(group_count)
        , first_granule(share_begin(p.outputs / kGranule, blockIdx.x, gridDim.x))
        , granules(share_begin(p.outputs / kGranule, blockIdx.x + 1, gridDim.x) - first_granule)
    {
    }

    __device__ __forceinline__ int items() const
    {
        return granules * groups;
    }
};

// Walks the items of a warp: every warps-th one of its block's.
struct AloneWalk
{
    Groups const& of_route;
    AloneShare const& share;
    int item = threadIdx.x / 32;
    int granule = 0;
    int expert = 0;

    __device__ __forceinline__ AloneWalk(Groups const& groups, AloneShare const& share_)
        : of_route(groups)
        , share(share_)
    {
        settle();
    }

    __device__ __forceinline__ bool is_at_end() const
    {
        return item >= share.items();
    }

    __device__ __forceinline__ int group() const
    {
        return item % share.groups;
    }

    __device__ __forceinline__ void advance()
    {
        item += blockDim.x / 32;
        settle();
    }

private:
    __device__ __forceinline__ void settle()
    {
        if (!is_at_end())
        {
            granule = share.first_granule + item / share.groups;
            expert = of_route.expert(group());
        }
    }
};

// A block's shared memory behind its warps' rings and the groups' inputs.
struct AloneSums
{
    float shares[kMostTopK]; // of the row's experts, in their order
    int32_t groups[kMostTopK]; // likewise; -1: another rank's

    // Behind them: the residuals of the block's granules, then the items' outputs.
    __device__ __forceinline__ float* numbers()
    {
        return reinterpret_cast<float*>(this + 1);
    }
};

// Bytes of them, of a block with so many granules and experts of a row.
constexpr int alone_sums_bytes(int granules, int experts)
{
    return static_cast<int>(sizeof(AloneSums) + granules * (1 + experts) * kGranule * sizeof(float));
}

// Copies the groups' inputs into shared memory, [groups, pitch]. A thread's reads are on their way together.
template <Weight kWeight>
__device__ __forceinline__ void load_groups(Product const& p, Layout const& layout, int groups, unsigned char* inputs)
{
    constexpr int kAtOnce = 6;
    int const chunks = layout.token_bytes / 16, there = p.inputs / 8;
#pragma unroll 1
    for (int first = threadIdx.x; first < groups * chunks; first += kAtOnce * blockDim.x)
    {
        uint4 taken[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            int const at = first + i * blockDim.x, group = at / chunks, chunk = at - group * chunks;
            bool const is_there = group < groups && chunk < there;
            taken[i] = is_there ? load_new(static_cast<uint4 const*>(p.x) + group * there + chunk) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
        {
            int const at = first + i * blockDim.x, group = at / chunks, chunk = at - group * chunks;
            if (group < groups)
            {
                *reinterpret_cast<uint4*>(inputs + group * layout.pitch + Order<kWeight>::place(chunk))
                    = Order<kWeight>::ordered(taken[i]);
            }
        }
    }
}

// The first product let this begin once it knew the routing, and so the residuals, which are older.
template <typename T, Weight kWeight>
__global__ void __launch_bounds__(kMostWarps * 32, 1) alone_kernel(Product const p, dflash_moe_params const of)
{
    extern __shared__ __align__(128) unsigned char shared[];
    trigger();
    Layout const layout(p.inputs, kWeight);
    int const warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, chosen = experts_of_row(of);
    unsigned char* const ring = shared + warp * layout.warp_bytes;
    unsigned char* const inputs = shared + warps * layout.warp_bytes; // [experts of a row, pitch]
    AloneSums& sums = *reinterpret_cast<AloneSums*>(inputs + chosen * layout.pitch);
    clear_ring<kWeight>(p, ring);
    Groups const groups(p.route, nullptr);
    AloneShare const share(p, groups.count());
    AloneWalk walk(groups, share);
    Weights<kWeight, false, AloneWalk> weights(p, layout, walk, lane, ring);
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i)
    {
        weights.load_next(i * unit_bytes(kWeight));
    }
    int const columns = share.granules * kGranule, first_column = share.first_granule * kGranule;
    float* const residuals = sums.numbers(); // [columns]
    float* const outputs = residuals + columns; // [items, kGranule]
    if (threadIdx.x < chosen)
    {
        sums.groups[threadIdx.x] = load_new(p.route.places + threadIdx.x);
        sums.shares[threadIdx.x] = load_new(p.route.shares + threadIdx.x);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
    {
        T const* const from = static_cast<T const*>(of.residual) + first_column + i;
        residuals[i] = of.residual ? to_float(load_new(from)) : 0.f;
    }
    wait();
    load_groups<kWeight>(p, layout, share.groups, inputs);
    __syncthreads();
    Mainloop<T, kWeight, 1> mainloop(p, layout, lane, ring, inputs);
    unsigned char const* const first_inputs = mainloop.inputs;
    mainloop.begin_unit();
    for (; !walk.is_at_end(); walk.advance())
    {
        Group const group = {walk.expert, walk.group(), 1, 0};
        Epilogue<T, kWeight, false> const epilogue(p, group, walk.granule, lane);
        mainloop.inputs = first_inputs + group.first * layout.pitch;
        float c[1][4] = {};
        mainloop.multiply(c, 1, weights, nullptr);
        if (lane % 4 == 0) // others have the same: all quads' inputs are the token's
        {
            float* const to = outputs + walk.item * kGranule + lane / 4;
            to[0] = rounded<T>(epilogue.scaled(c[0][0], 0) + epilogue.bias[0]);
            to[8] = rounded<T>(epilogue.scaled(c[0][2], 1) + epilogue.bias[1]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
    {
        float const* const own = outputs + i / kGranule * share.groups * kGranule + i % kGranule;
        float sum = 0.f;
#pragma unroll 4
        for (int k = 0; k < chosen; ++k)
        {
            int const group = sums.groups[k];
            sum = group >= 0 ? fmaf(sums.shares[k], own[group * kGranule], sum) : sum;
        }
        static_cast<T*>(of.out)[first_column + i] = from_float<T>(sum + residuals[i]);
    }
}

} // namespace moe
} // namespace dflash
