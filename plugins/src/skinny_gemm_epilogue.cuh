// Finishes and stores a product's sums: norm, scale, bias, residual and SwiGLU.
#pragma once

#include "skinny_gemm_layout.cuh"

namespace dflash
{
namespace skinny
{

// Reads past the L1 cache, which may have what was there before: a kernel that begins early does not empty it.
template <typename T>
__device__ __forceinline__ T load_new(T const* from)
{
    unsigned short const bits = __ldcg(reinterpret_cast<unsigned short const*>(from));
    return reinterpret_cast<T const&>(bits);
}

// Each block of the cluster finishes 16 lanes' sums of each granule of a pass, a thread one item.
template <typename L>
struct Epilogue
{
    using T = typename L::T;
    using Item = typename L::Item;

    Launch const& launch;
    Place const& place;
    Shared<L> const& shared;
    Share const& share;
    dflash_skinny_gemm_params const& p = launch.p;
    bool const is_normed = p.norm_weight != nullptr;
    int const item = threadIdx.x;
    int const granule = item / (16 * L::kTiles), item_lane = item % 16 + place.rank * 16;
    int const token = item_lane % 4 * 2 + item / 16 % L::kTiles * 8; // and the next one
    int const granule_rows = p.swiglu ? kGranule / 2 : kGranule; // that lie together
    int const to_second = p.swiglu ? p.outputs / 2 : kGranule / 2; // from an item's first row
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    // The terms and factors of an item's sums.
    struct Terms
    {
        float inverse[2]; // root mean square of the two tokens
        float scale[2]{}; // of the two rows
        T bias[2]{};
        T residual[L::kItemNumbers]{};
    };

    // The first of the two rows of an item.
    __device__ __forceinline__ int output_at(int pass) const
    {
        return (share.first + pass * L::kGranules + granule) * granule_rows + item_lane / 4;
    }

    __device__ __forceinline__ bool has_item(int pass) const
    {
        return item < L::kItems && pass * L::kGranules + granule < share.count;
    }

    // Reads scales and biases of a pass at its beginning.
    __device__ __forceinline__ void load_constants(int pass, Terms& terms) const
    {
        if (has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                int const output = output_at(pass) + i * to_second;
                if constexpr (L::kDecoded)
                {
                    terms.scale[i] = p.scale[output];
                }
                if (p.bias)
                {
                    terms.bias[i] = static_cast<T const*>(p.bias)[output];
                }
            }
        }
    }

    // Reads a residual of a pass at its beginning, which kernels before this one may have written.
    __device__ __forceinline__ void load_residual(int pass, Terms& terms) const
    {
        if (p.residual && has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < L::kItemNumbers; ++i)
            {
                if (token + i % 2 < p.rows)
                {
                    int64_t const at
                        = static_cast<int64_t>(token + i % 2) * width + output_at(pass) + i / 2 * to_second;
                    terms.residual[i] = load_new(static_cast<T const*>(p.residual) + at);
                }
            }
        }
    }

    // Waits for the other block's sums, whose barrier it makes ready for the pass after the next.
    __device__ __forceinline__ Item receive(int pass, Terms& terms) const
    {
        uint32_t const barrier = shared.inbox_barriers + pass % 2 * kBarrier;
        wait_for_phase(barrier, pass / 2 % 2);
        if (item == 0)
        {
            expect_bytes(barrier, L::kInboxBytes / 2);
        }
        if (is_normed && pass == 0)
        {
            wait_for_phase(shared.squares_barrier, 0);
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                float const sum = shared.block_squares[token + i] + shared.block_squares[L::kTokens + token + i];
                terms.inverse[i] = rsqrtf(sum * launch.per_input + p.eps);
            }
        }
        return load_vector<float, L::kItemNumbers>(shared.inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
    }

    // Stores what has a place in the output: with swiglu gates times ups.
    __device__ __forceinline__ void store(int pass, Item const& y) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            if (token + i < p.rows && has_item(pass))
            {
                T* const to = static_cast<T*>(p.out) + static_cast<int64_t>(token + i) * width + output_at(pass);
                float const gate = y.at[i], up = y.at[i + 2];
                *to = from_float<T>(p.swiglu ? rounded<T>(p.gelu ? gelu(gate) : silu(gate)) * up : gate);
                if (!p.swiglu)
                {
                    to[to_second] = from_float<T>(up);
                }
            }
        }
    }

    // Finishes a pass's item, of which this block has the sums `own`.
    __device__ __forceinline__ void finish(int pass, Item const& own, Terms& terms) const
    {
        if (item >= L::kItems)
        {
            return;
        }
        Item y = receive(pass, terms);
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            y.at[i] += own.at[i];
            if (is_normed)
            {
                y.at[i] *= terms.inverse[i % 2];
            }
            if constexpr (L::kDecoded)
            {
                y.at[i] *= terms.scale[i / 2];
            }
            y.at[i] = rounded<T>(y.at[i]);
            if (p.bias)
            {
                y.at[i] = rounded<T>(y.at[i] + to_float(terms.bias[i / 2]));
            }
            if (p.residual)
            {
                y.at[i] = rounded<T>(y.at[i] + to_float(terms.residual[i]));
            }
        }
        store(pass, y);
    }
};

} // namespace skinny
} // namespace dflash
