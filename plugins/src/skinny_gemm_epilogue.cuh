// Finishes and stores a product's sums: norm, scale, bias, residual and SwiGLU.
#pragma once

#include "skinny_gemm_layout.cuh"

namespace dflash
{
namespace skinny
{

// Each block of the cluster finishes 16 lanes' sums of each granule of a pass, a thread one item: of a half of them. A
// block that is alone with its rows finishes both halves.
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
    int const granule = item / (16 * L::kTiles);
    int const token = item % 4 * 2 + item / 16 % L::kTiles * 8; // and the next one
    int const granule_rows = p.swiglu ? kGranule / 2 : kGranule; // that lie together
    int const to_second = p.swiglu ? p.outputs / 2 : kGranule / 2; // from an item's first row
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;

    // The terms and factors of an item's sums.
    struct Terms
    {
        float scale[2]{}; // of the two rows
        T bias[2]{};
        T residual[L::kItemNumbers]{};
    };

    // Those of a thread's items, the last of its own half, and what both have alike.
    struct AllTerms
    {
        float inverse[2]; // root mean square of the two tokens
        Terms halves[kCluster];
    };

    // The first of the two rows of an item: of the block's own half, or of the other.
    __device__ __forceinline__ int output_at(int pass, bool is_own) const
    {
        int const half = is_own ? place.rank : place.rank ^ 1;
        return (share.first + pass * share.of_pass + granule) * granule_rows + item % 16 / 4 + half * 4;
    }

    __device__ __forceinline__ bool has_item(int pass) const
    {
        return item < L::kItems && granule < share.active(pass);
    }

    // Calls `use` with the terms of each half that the block finishes, and whether it is its own.
    template <typename Use>
    __device__ __forceinline__ void each_half(AllTerms& terms, Use const& use) const
    {
        use(terms.halves[1], true);
        if (place.is_alone)
        {
            use(terms.halves[0], false);
        }
    }

    // Reads scales and biases of a pass at its beginning.
    __device__ __forceinline__ void load_constants(int pass, AllTerms& terms) const
    {
        each_half(terms, [&](Terms& half, bool is_own) { load_constants(pass, is_own, half); });
    }

    // Reads a residual of a pass at its beginning, which kernels before this one may have written.
    __device__ __forceinline__ void load_residual(int pass, AllTerms& terms) const
    {
        each_half(terms, [&](Terms& half, bool is_own) { load_residual(pass, is_own, half); });
    }

    __device__ __forceinline__ void load_constants(int pass, bool is_own, Terms& terms) const
    {
        if (has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                int const output = output_at(pass, is_own) + i * to_second;
                if constexpr (L::kDecoded && !L::kByBlock)
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

    __device__ __forceinline__ void load_residual(int pass, bool is_own, Terms& terms) const
    {
        if (p.residual && has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < L::kItemNumbers; ++i)
            {
                if (token + i % 2 < p.rows)
                {
                    int64_t const at
                        = static_cast<int64_t>(token + i % 2) * width + output_at(pass, is_own) + i / 2 * to_second;
                    terms.residual[i] = load_new(static_cast<T const*>(p.residual) + at);
                }
            }
        }
    }

    // Adds the other block's sums, whose barrier it makes ready for the pass after the next.
    __device__ __forceinline__ void receive(int pass, Item& own) const
    {
        uint32_t const barrier = shared.inbox_barriers + pass % 2 * kBarrier;
        wait_for_phase(barrier, pass / 2 % 2);
        if (item == 0)
        {
            expect_bytes(barrier, L::kInboxBytes / 2);
        }
        Item const there
            = load_vector<float, L::kItemNumbers>(shared.inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            own.at[i] += there.at[i];
        }
    }

    // Waits for the sums of squares.
    __device__ __forceinline__ void find_inverse(float (&inverse)[2]) const
    {
        wait_for_phase(shared.squares_barrier, 0);
        float const* const first = shared.block_squares + token;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float const sum = place.is_alone ? first[place.rank * L::kTokens + i] : first[i] + first[L::kTokens + i];
            inverse[i] = inverse_root_mean(sum, launch.per_input, p.eps);
        }
    }

    // Stores what has a place in the output: with swiglu gates times ups.
    __device__ __forceinline__ void store(int pass, bool is_own, Item const& y) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            if (token + i < p.rows && has_item(pass))
            {
                int64_t const at = static_cast<int64_t>(token + i) * width + output_at(pass, is_own);
                T* const to = static_cast<T*>(p.out) + at;
                float const gate = y.at[i], up = y.at[i + 2];
                store_kept(to, from_float<T>(p.swiglu ? rounded<T>(p.gelu ? gelu(gate) : silu(gate)) * up : gate));
                if (!p.swiglu)
                {
                    store_kept(to + to_second, from_float<T>(up));
                }
            }
        }
    }

    // Finishes a pass's items, of which this block has the sums, the last of its own half.
    __device__ __forceinline__ void finish(int pass, Item (&sums)[kCluster], AllTerms& terms) const
    {
        if (item >= L::kItems)
        {
            return;
        }
        if (!place.is_alone)
        {
            receive(pass, sums[1]);
        }
        if (is_normed && pass == 0)
        {
            find_inverse(terms.inverse);
        }
        // In a loop: the code is read from far away in every step.
#pragma unroll 1
        for (int other = 0; other <= place.is_alone; ++other)
        {
            finish_item(pass, other == 0, terms.inverse, terms.halves[1], sums[1]);
            terms.halves[1] = terms.halves[0];
            sums[1] = sums[0];
        }
    }

    __device__ __forceinline__ void finish_item(
        int pass, bool is_own, float const (&inverse)[2], Terms const& terms, Item& y) const
    {
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            if (is_normed)
            {
                y.at[i] *= inverse[i % 2];
            }
            if constexpr (L::kDecoded && !L::kByBlock)
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
        store(pass, is_own, y);
    }
};

} // namespace skinny
} // namespace dflash
