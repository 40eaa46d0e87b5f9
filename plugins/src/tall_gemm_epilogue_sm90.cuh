// Finishes and stores sums of products of hundreds of rows (tokens), on Hopper: bias, residual and SwiGLU.
#pragma once

#include "pairs.cuh"
#include "wide_gemm_loading_sm90.cuh"

namespace dflash
{
namespace tall
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Stores sums: four lanes have eight outputs of a row, and exchange them, so that each has those of one of four tiles.
template <typename InputType>
struct Epilogue
{
    using T = InputType;
    using Two = dflash::Two<T>;

    // Outputs of a lane that lie together.
    struct alignas(16) Eight
    {
        Two at[4];
    };

    // Those of a turn of so many tiles, of a thread's two rows.
    template <int kNow>
    using Residuals = Eight[2][kNow / 4];

    dflash_skinny_gemm_params const& p;
    int const lane = threadIdx.x % 32;
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    // Stores tiles in turns of some, the next sums moved to where the code looks for them: code is read from far away
    // in every step. The next turn's residuals come meanwhile. row: the first of those that this thread has. scaled:
    // gives what is rounded of a sum of that row, or of the eighth behind it.
    template <int kTiles, typename Scaled>
    __device__ __forceinline__ void store(int row, int output, float (&c)[kTiles][4], Scaled const& scaled) const
    {
        constexpr int kNow = kTiles % 8 == 0 ? 8 : 4;
        Residuals<kNow> residuals;
#pragma unroll 1
        for (int turn = p.residual ? -1 : 0; turn < kTiles / kNow; ++turn)
        {
            Residuals<kNow> next;
            load_residuals<kNow>(row, output + (turn + 1) * kNow * 8, turn + 1 < kTiles / kNow, next);
            if (turn >= 0)
            {
                int const now = output + turn * kNow * 8;
                each_row<kNow>(c, scaled,
                    [&](int below, Two const (&y)[kNow])
                    {
                        store_row<kNow>(row + below, now, residuals[0], y);
#pragma unroll
                        for (int i = 0; i < kNow / 4; ++i)
                        {
                            residuals[0][i] = residuals[1][i];
                        }
                    });
                move_sums<kNow>(c);
            }
#pragma unroll
            for (int i = 0; i < kNow / 2; ++i)
            {
                residuals[i / (kNow / 4)][i % (kNow / 4)] = next[i / (kNow / 4)][i % (kNow / 4)];
            }
        }
    }

    // Calls `use` with a thread's two numbers of each of the first kNow tiles: of its first row, then of the second.
    template <int kNow, int kTiles, typename Scaled, typename Use>
    __device__ __forceinline__ static void each_row(float const (&c)[kTiles][4], Scaled const& scaled, Use const& use)
    {
        Two y[kNow], others[kNow];
#pragma unroll
        for (int i = 0; i < kNow; ++i)
        {
            y[i] = pair_of<T>(scaled(c[i][0], false), scaled(c[i][1], false));
            others[i] = pair_of<T>(scaled(c[i][2], true), scaled(c[i][3], true));
        }
#pragma unroll 1
        for (int below = 0; below < 16; below += 8)
        {
            use(below, y);
#pragma unroll
            for (int i = 0; i < kNow; ++i)
            {
                y[i] = others[i];
            }
        }
    }

    // The output of this lane among those of a turn's nth four tiles.
    __device__ __forceinline__ int own_output(int output, int nth) const
    {
        return output + (nth * 4 + lane % 4) * 8;
    }

    // Zeros where there are none: else registers would be held for them all the time.
    template <int kNow>
    __device__ __forceinline__ void load_residuals(int row, int output, bool are_left, Residuals<kNow>& x) const
    {
#pragma unroll
        for (int i = 0; i < kNow / 2; ++i)
        {
            int const below = i / (kNow / 4), at_row = row + 8 * below, at = own_output(output, i % (kNow / 4));
            Eight& eight = x[below][i % (kNow / 4)];
            eight = {};
            if (p.residual && are_left && at_row < p.rows && at < p.outputs)
            {
                eight = load(p.residual, int64_t{at_row} * width + at);
            }
        }
    }

    // Rounds as composed operations do: the product, then with a bias, then with a residual. All lanes.
    template <int kNow>
    __device__ __forceinline__ void store_row(
        int row, int output, Eight const (&residuals)[kNow / 4], Two const (&sums)[kNow]) const
    {
        if (p.swiglu)
        {
            if constexpr (kNow == 8)
            {
                store_gated(row, output, sums);
            }
            return;
        }
        Eight y[kNow / 4], bias[kNow / 4] = {};
#pragma unroll
        for (int i = 0; i < kNow / 4; ++i)
        {
            int const at = own_output(output, i);
            if (p.bias && at < p.outputs)
            {
                bias[i] = load(p.bias, at);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                y[i].at[j] = sums[i * 4 + j];
            }
            exchange(y[i]);
        }
#pragma unroll
        for (int i = 0; i < kNow / 4; ++i)
        {
            if (p.bias)
            {
                add_pairs<T>(bias[i].at, y[i].at);
            }
            if (p.residual)
            {
                add_pairs<T>(residuals[i].at, y[i].at);
            }
            put(row, own_output(output, i), own_output(output, i), y[i]);
        }
    }

    // granule_row: of a weight, with eight rows of the gate and the eight of up that belong to them in turn. All lanes.
    __device__ __forceinline__ void store_gated(int row, int granule_row, Two const (&sums)[8]) const
    {
        Eight gates, ups;
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            gates.at[j] = sums[2 * j], ups.at[j] = sums[2 * j + 1];
        }
        if (p.bias)
        {
            add_gated_bias(granule_row, gates, ups);
        }
        gate_pairs<T>(p.gelu, gates.at, ups.at);
        exchange(gates);
        int const own = granule_row + lane % 4 * wide::kGranule;
        put(row, own, own / 2, gates);
    }

    __device__ __forceinline__ void add_gated_bias(int granule_row, Eight& gates, Eight& ups) const
    {
        Eight of_gates = {}, of_ups = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            if (granule_row + j * wide::kGranule < p.outputs)
            {
                T const* const from
                    = static_cast<T const*>(p.bias) + granule_row / 2 + j * wide::kGranule / 2 + lane % 4 * 2;
                of_gates.at[j] = *reinterpret_cast<Two const*>(from);
                of_ups.at[j] = *reinterpret_cast<Two const*>(from + p.outputs / 2);
            }
        }
        add_pairs<T>(of_gates.at, gates.at);
        add_pairs<T>(of_ups.at, ups.at);
    }

    // weight_row: of the first output, or of its gate.
    __device__ __forceinline__ void put(int row, int weight_row, int output, Eight const& y) const
    {
        if (row < p.rows && weight_row < p.outputs)
        {
            *reinterpret_cast<Eight*>(static_cast<T*>(p.out) + int64_t{row} * width + output) = y;
        }
    }

    // From the L2 cache: the kernel before may have made it.
    __device__ __forceinline__ static Eight load(void const* from, int64_t at)
    {
        int4 const x = __ldcg(reinterpret_cast<int4 const*>(static_cast<T const*>(from) + at));
        return reinterpret_cast<Eight const&>(x);
    }

    // A lane's pairs, one of each of four tiles, become the four of its tile. By all lanes of a warp.
    __device__ __forceinline__ void exchange(Eight& y) const
    {
        uint32_t (&words)[4] = reinterpret_cast<uint32_t (&)[4]>(y);
#pragma unroll
        for (int step = 1; step <= 2; step *= 2)
        {
            bool const is_upper = lane & step;
#pragma unroll
            for (int k = 0; k < 2; ++k)
            {
                int const low = step == 1 ? 2 * k : k;
                uint32_t const there = __shfl_xor_sync(0xffffffffu, is_upper ? words[low] : words[low + step], step);
                words[low] = is_upper ? there : words[low];
                words[low + step] = is_upper ? words[low + step] : there;
            }
        }
    }
};

#endif

} // namespace tall
} // namespace dflash
