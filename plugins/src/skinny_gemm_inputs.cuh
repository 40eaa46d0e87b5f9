// The tokens' inputs of a product: brought into shared memory run by run, and made ready in registers.
#pragma once

#include "skinny_gemm_layout.cuh"
#include "tensor_copy.cuh"

namespace dflash
{
namespace skinny
{

// Turns BF16 inputs of a run, those of token l / 4 in lane l, into FP16 ones times a power of two that brings the
// token's largest to about 2^14: exact, but for less than 2^-38 of the largest. `back` undoes it for those two tokens
// whose sums the lane has. Zeros, infinities and NaNs stay what they are.
template <int kPairs>
__device__ __forceinline__ void to_half(uint32_t (&x)[2][kPairs], float (&back)[2])
{
    auto const two = [](uint32_t const& bits) { return reinterpret_cast<__nv_bfloat162 const&>(bits); };
    __nv_bfloat162 most = __habs2(two(x[0][0]));
#pragma unroll
    for (int i = 1; i < 2 * kPairs; ++i)
    {
        most = __hmax2_nan(most, __habs2(two(x[i / kPairs][i % kPairs])));
    }
    auto const bits = reinterpret_cast<uint32_t const&>(most);
    uint32_t exponent = max(bits & 0xffff, bits >> 16) >> 7; // biased
    exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 1));
    exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 2));
    exponent = max(exponent, 15); // so that the power and its inverse are normal numbers
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
        uint32_t const of_column = __shfl_sync(0xffffffffu, exponent, (threadIdx.x % 4 * 2 + i) * 4);
        back[i] = __uint_as_float((of_column - 14) << 23);
    }
    uint32_t const factor = (268 - exponent) * 0x00800080u; // 2^(14 - the exponent)
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i)
    {
        uint32_t& pair = x[i / kPairs][i % kPairs];
        __nv_bfloat162 const y = __hmul2(two(pair), two(factor));
        auto const bits = reinterpret_cast<uint32_t const&>(y);
        __half2 const z = __floats2half2_rn(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
        pair = reinterpret_cast<uint32_t const&>(z);
    }
}

// A run's inputs in registers, as the operand of products.
template <typename L>
struct Operand
{
    uint32_t b[L::kTiles][2][L::kPairs]; // of both halves of a lane's part
    float back[L::kTiles][2]; // see to_half
};

// Products of a tile's inputs with all inputs, of which the diagonal counts.
template <typename L>
using Squares = float[L::kTiles][4];

// A warp's inputs, two runs ahead: lane l takes those of token l / 4 that meet its part of a row. With a norm, inputs
// are multiplied by its weights here, sums of products by the inputs' inverse root mean square in `Epilogue`.
template <typename L>
struct Inputs
{
    using T = typename L::T;
    using Two = typename Pair<T>::type;
    static constexpr int kPairs = L::kPairs, kTiles = L::kTiles;
    // An input times a norm's weight may exceed FP16: each warp then makes its weights smaller by one power of two.
    static constexpr bool kScaled = std::is_same_v<T, __half>;

    Launch const& launch;
    Place const& place;
    Shared<L> const& shared;
    int const runs, passes;
    int const runs_at_once = L::kMostRuns == 1 ? 1 : launch.runs_at_once; // that stay in registers
    bool const is_normed = launch.p.norm_weight != nullptr;
    // Two runs fit the warp's room, so they are prepared once; what fits the registers stays there.
    bool const is_kept = runs <= 2;
    int const loads = is_kept ? runs : runs * passes; // of a run each
    unsigned char* const own_inputs = shared.inputs + place.warp * 2 * L::kInputs;
    unsigned char* const own_norms = shared.norms + place.warp * 2 * L::kInputBytes;
    uint32_t const barriers = shared.own_barriers;
    int load_run = 0; // the run of a row that is loaded next
    uint32_t phases = 0; // a bit for each of the two barriers
    Two scaled_by{}; // a norm's weights
    float sum_scale = 1.f; // undoes it

    // The warp's line of a norm's weights. Past the end any will do: they meet zeros.
    __device__ __forceinline__ int line_of(int run) const
    {
        return min(launch.chains.line(place.chain, run), launch.chains.lines - 1);
    }

    __device__ __forceinline__ void next_run()
    {
        load_run = load_run + 1 == runs ? 0 : load_run + 1;
    }

    // Says what a load brings, and asks for a norm's weights of a run: one lane's work.
    __device__ __forceinline__ void expect(int load, int run)
    {
        uint32_t const barrier = barriers + load % 2 * kBarrier;
        expect_bytes(barrier, L::kInputs + (is_normed ? L::kInputBytes : 0));
        if (is_normed)
        {
            char const* from = static_cast<char const*>(launch.p.norm_weight) + line_of(run) * L::kInputBytes;
            copy_bytes(shared_address(own_norms) + load % 2 * L::kInputBytes, from, L::kInputBytes, barrier);
        }
    }

    // Asks for the inputs of the next run: one lane's work.
    __device__ __forceinline__ void load(int load)
    {
#pragma unroll
        for (int i = 0; i < L::kInputBytes / kLine; ++i)
        {
            copy_box_2d(shared_address(own_inputs) + load % 2 * L::kInputs + i * L::kTokens * kLine, launch.inputs,
                launch.chains.line(place.chain, load_run) * L::kInputBytes + i * kLine, 0,
                barriers + load % 2 * kBarrier);
        }
    }

    // Begins what need not wait for the kernels before this one: a norm's weights are constants.
    __device__ __forceinline__ void expect_first()
    {
        if (place.lane == 0)
        {
#pragma unroll 1 // as what follows: code is read from far away in every step
            for (int run = 0; run < min(loads, 2); ++run)
            {
                expect(run, run);
            }
        }
        __syncwarp();
    }

    // Asks for the first two runs, when the kernels before this one have ended.
    __device__ __forceinline__ void load_first()
    {
#pragma unroll 1
        for (int run = 0; run < min(loads, 2); ++run)
        {
            if (place.lane == 0)
            {
                load(run);
            }
            next_run();
        }
        __syncwarp();
    }

    // Loads once more, where the run was that all lanes have taken and used. Not sooner: the products have the inputs
    // by now, while a read of them could still wait behind copies, and the bulk copy that overwrites them passes all of
    // those.
    __device__ __forceinline__ void load_next(int next)
    {
        __syncwarp();
        if (next < loads)
        {
            if (place.lane == 0)
            {
                expect(next, load_run);
                load(next);
            }
            next_run();
        }
    }

    // Finds the power of two for the norm's weights that the warp's inputs meet.
    __device__ __forceinline__ void scale_norm()
    {
        uint32_t most = 0;
        for (int run = 0; run < runs; ++run)
        {
            uint32_t const* from
                = static_cast<uint32_t const*>(launch.p.norm_weight) + line_of(run) * (L::kColumns / 2) + place.lane;
#pragma unroll
            for (int i = 0; i < L::kColumns / 64; ++i)
            {
                most = __vmaxu2(most, __ldg(from + i * 32) & 0x7fff7fffu);
            }
        }
        most = __reduce_max_sync(0xffffffffu, max(most & 0xffff, most >> 16));
        int const exponent = min(max(static_cast<int>(most >> 10), 14), 28); // biased: 14 of the numbers below one
        uint32_t const factor = (29 - exponent) * 0x04000400u;
        scaled_by = reinterpret_cast<Two const&>(factor);
        sum_scale = __uint_as_float((127 + exponent - 14) << 23);
    }

    // The address in a load of the lane's i-th pair of a tile, and three more. The inputs for 128 bytes of weights fill
    // a tile of such rows, or two.
    __device__ __forceinline__ uint4* inputs_at(int load, int tile, int i) const
    {
        int const at = (place.part * 2 * kPairs + i) / 4;
        unsigned char* const from = own_inputs + load % 2 * L::kInputs + at / 8 * (L::kTokens * kLine);
        return reinterpret_cast<uint4*>(from + swizzled(tile * 8 + place.quad, at % 8));
    }

    // The address of the tokens' factors that `keep` stores, see to_half: over the norm's weights.
    __device__ __forceinline__ float2* factors_at(int load) const
    {
        return reinterpret_cast<float2*>(own_norms + load % 2 * L::kInputBytes) + place.part;
    }

    // Takes a tile of inputs as a load brought them: in order sixteen that lie together for one instruction.
    __device__ __forceinline__ void take_loaded(int load, int tile, Operand<L>& to) const
    {
        if constexpr (!L::kOrdered)
        {
            take_tile(load, tile, to);
        }
        else
        {
            uint32_t const from = shared_address(own_inputs) + load % 2 * L::kInputs;
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                load_matrices(to.b[tile][half], from + swizzled(tile * 8 + place.lane % 8, half * 4 + place.lane / 8));
            }
        }
    }

    // Takes what a lane has of a tile in places of its own.
    __device__ __forceinline__ void take_tile(int load, int tile, Operand<L>& to) const
    {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 4)
        {
            uint4 const four = *inputs_at(load, tile, i);
            uint32_t (&pairs)[kPairs] = to.b[tile][i / kPairs];
            pairs[i % kPairs] = four.x;
            pairs[i % kPairs + 1] = four.y;
            pairs[i % kPairs + 2] = four.z;
            pairs[i % kPairs + 3] = four.w;
        }
    }

    // Takes a run's inputs as `keep` left them.
    __device__ __forceinline__ void take_kept(int run, Operand<L>& to) const
    {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
            take_tile(run, tile, to);
            if constexpr (L::kToHalf)
            {
                float2 const two = factors_at(run)[tile * 4];
                to.back[tile][0] = two.x;
                to.back[tile][1] = two.y;
            }
        }
    }

    // Puts a run's inputs back where they came from, for the passes that follow.
    __device__ __forceinline__ void keep(int run, Operand<L> const& operand) const
    {
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                uint32_t const(&from)[kPairs] = operand.b[tile][i / kPairs];
                *inputs_at(run, tile, i)
                    = make_uint4(from[i % kPairs], from[i % kPairs + 1], from[i % kPairs + 2], from[i % kPairs + 3]);
            }
            if (L::kToHalf && place.quad == 0)
            {
                factors_at(run)[tile * 4] = make_float2(operand.back[tile][0], operand.back[tile][1]);
            }
        }
        __syncwarp();
    }

    // Adds the squares of a run's inputs.
    __device__ __forceinline__ void add_squares(int load, Squares<L>& squares) const
    {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 4)
        {
            uint4 x[kTiles];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                x[tile] = *inputs_at(load, tile, i);
            }
            // Tokens as rows lie in registers as tokens as columns do.
            auto const &upper = x[0], &lower = x[kTiles - 1];
            uint32_t const first[4] = {upper.x, lower.x, upper.y, lower.y};
            uint32_t const second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                multiply_add<T>(squares[tile], first, x[tile].x, x[tile].y);
                multiply_add<T>(squares[tile], second, x[tile].z, x[tile].w);
            }
        }
    }

    // The norm's weights for the lane's i-th pair of inputs, and three more.
    __device__ __forceinline__ void load_norm(int load, int i, uint32_t (&weights)[4]) const
    {
        unsigned char const* const from = own_norms + load % 2 * L::kInputBytes;
        if constexpr (!L::kOrdered)
        {
            auto const four = *reinterpret_cast<uint4 const*>(from + (place.part * 2 * kPairs + i) * 4);
            weights[0] = four.x, weights[1] = four.y, weights[2] = four.z, weights[3] = four.w;
        }
        else
        {
            load_matrices(weights, shared_address(from) + (i + place.lane / 8) * 16); // whose rows are all one
        }
    }

    // By a norm's weights, or by one more than they are; either is rounded once.
    __device__ __forceinline__ void multiply_by_norm(int load, int tile, Operand<L>& operand) const
    {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 4)
        {
            uint32_t weights[4];
            load_norm(load, i, weights);
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                Two weight = reinterpret_cast<Two const&>(weights[j]);
                if constexpr (kScaled)
                {
                    weight = __hmul2(weight, scaled_by);
                }
                uint32_t& pair = operand.b[tile][i / kPairs][i % kPairs + j];
                Two const x = reinterpret_cast<Two const&>(pair);
                Two y;
                if constexpr (L::kMayAddOne)
                {
                    y = weighted(x, weight, launch.p.norm_adds_one);
                }
                else
                {
                    y = __hmul2(x, weight);
                }
                pair = reinterpret_cast<uint32_t const&>(y);
            }
        }
    }

    // Takes the inputs that a load brought, and makes them ready.
    __device__ __forceinline__ void take(int load, bool is_first_pass, Operand<L>& to, Squares<L>& squares)
    {
        wait_for_phase(barriers + load % 2 * kBarrier, phases >> load % 2 & 1);
        phases ^= 1 << load % 2;
        if (is_normed && is_first_pass)
        {
            add_squares(load, squares);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
            take_loaded(load, tile, to);
            if (is_normed)
            {
                multiply_by_norm(load, tile, to);
            }
            if constexpr (L::kToHalf)
            {
                to_half(to.b[tile], to.back[tile]);
            }
        }
    }

    // Whether a pass's inputs are to be taken, or are in registers still.
    __device__ __forceinline__ bool are_to_be_taken(int pass) const
    {
        return pass == 0 || !is_kept || runs > runs_at_once;
    }

    // Takes the inputs of a pass's run: as a load brought them, or as they were kept.
    __device__ __forceinline__ void begin_run(int pass, int run, Operand<L>& to, Squares<L>& squares)
    {
        if (pass == 0 || !is_kept)
        {
            take(pass * runs + run, pass == 0, to, squares);
            if (is_kept && runs > runs_at_once && passes > 1)
            {
                keep(run, to);
            }
        }
        else
        {
            take_kept(run, to);
        }
    }
};

} // namespace skinny
} // namespace dflash
