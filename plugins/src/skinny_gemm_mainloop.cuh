// Products of a pass: the units of a weight, as the ring brings them, with the inputs in registers.
#pragma once

#include "skinny_gemm_inputs.cuh"
#include "skinny_gemm_ring.cuh"

namespace dflash
{
namespace skinny
{

// Sixteen bytes of a weight's row as registers of pairs: eight 16-bit numbers, or sixteen E4M3 ones made FP16.
__device__ __forceinline__ void decode(uint4 const& bytes, uint32_t (&pairs)[4])
{
    pairs[0] = bytes.x;
    pairs[1] = bytes.y;
    pairs[2] = bytes.z;
    pairs[3] = bytes.w;
}

// E4M3 numbers are all FP16 numbers, and one instruction makes two of them.
__device__ __forceinline__ void decode(uint4 const& bytes, uint32_t (&pairs)[8])
{
    uint32_t const words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
    {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low;"
            " cvt.rn.f16x2.e4m3x2 %1, high; }"
            : "=r"(pairs[2 * i]), "=r"(pairs[2 * i + 1])
            : "r"(words[i]));
    }
}

// The scales of a warp's units, where a weight has one a block: those of a run, and of the one behind it on their way.
// Lane l has that of granule l % 8, of its first rows or, from lane 8 on, of those that go with them.
template <typename L>
struct BlockScales
{
    static_assert(L::kGranules <= 8);

    float now = 1.f, ahead = 1.f;

    // Asks for those of a pass's run: they are constants.
    __device__ __forceinline__ void load(Launch const& launch, Share const& share, int line, int pass)
    {
        constexpr int kBlock = 128; // rows, and columns: a line of E4M3
        auto const& p = launch.p;
        int const lane = threadIdx.x % 32;
        int const granule = min(pass * share.of_pass + lane % 8, share.count - 1) + share.first;
        int const second = lane / 8 % 2 * (p.swiglu ? p.outputs / 2 : kGranule / 2);
        int const row = granule * (p.swiglu ? kGranule / 2 : kGranule) + second;
        ahead = __ldg(p.scale + static_cast<int64_t>(row / kBlock) * launch.chains.lines + line);
    }

    __device__ __forceinline__ float of(int granule, int half) const
    {
        return __shfl_sync(0xffffffffu, now, granule + 8 * half);
    }
};

// The registers that a warp keeps from unit to unit.
template <typename L>
struct Registers
{
    Operand<L> operands[L::kMostRuns];
    Squares<L> squares = {};
    Unit ahead;
    BlockScales<L> scales;
};

// The loop over a pass's units: each run's inputs with each granule of weights.
template <typename L>
struct Mainloop
{
    static constexpr int kGranules = L::kGranules, kTiles = L::kTiles, kPairs = L::kPairs;
    static constexpr bool kAhead = L::kDecoded && kTiles == 2; // where a unit takes longest, units are read one ahead
    using Pairs = uint32_t[2][kPairs]; // of both halves of a lane's part
    using Sums = float[kTiles][4]; // of a granule

    Ring<L>& ring;
    Inputs<L>& inputs;
    Share const& share;
    int pass = 0, run = 0; // of the pass
    int active = 0; // granules of the pass

    // Whether a unit comes after that of a granule.
    __device__ __forceinline__ bool has_next(int granule) const
    {
        return granule + 1 < active || run + 1 < inputs.runs || pass + 1 < inputs.passes;
    }

    __device__ __forceinline__ void begin_pass(int next_pass, int granules, Registers<L>& registers)
    {
        pass = next_pass;
        active = granules;
        if (kAhead && pass == 0 && inputs.runs > 0)
        {
            registers.ahead = ring.read();
        }
    }

    // Adds the products of a unit of 16-bit numbers, whose rows are u and v.
    __device__ __forceinline__ void multiply(Pairs const& u, Pairs const& v, Operand<L> const& operand, Sums& c)
    {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 2)
        {
            int const half = i / kPairs, j = i % kPairs;
            uint32_t const a[4] = {u[half][j], v[half][j], u[half][j + 1], v[half][j + 1]};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                multiply_add<typename L::T>(c[tile], a, operand.b[tile][half][j], operand.b[tile][half][j + 1]);
            }
        }
    }

    // Takes the products of a unit that was E4M3: of each half, so that fewer of them wait for each other.
    __device__ __forceinline__ void multiply_halves(
        Pairs const& u, Pairs const& v, Operand<L> const& operand, Sums (&d)[2])
    {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 4)
        {
            int const half = i / 4 % 2, j = i / 8 * 4; // by turns
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                uint32_t const(&b)[kPairs] = operand.b[tile][half];
                uint32_t const first[4] = {u[half][j], v[half][j], u[half][j + 1], v[half][j + 1]};
                uint32_t const second[4] = {u[half][j + 2], v[half][j + 2], u[half][j + 3], v[half][j + 3]};
                multiply_add<__half>(d[half][tile], first, b[j], b[j + 1]);
                multiply_add<__half>(d[half][tile], second, b[j + 2], b[j + 3]);
            }
        }
    }

    // Adds the products of both halves, scaled back, and by the scales of the unit's block.
    __device__ __forceinline__ void add_halves(
        Sums const (&d)[2], int granule, Operand<L> const& operand, BlockScales<L> const& scales, Sums& c)
    {
        float scale[2] = {1.f, 1.f}; // of the rows u and v
        if constexpr (L::kByBlock)
        {
            scale[0] = scales.of(granule, 0);
            scale[1] = scales.of(granule, 1);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                float const sum = d[0][tile][i] + d[1][tile][i];
                float const back = L::kToHalf ? sum * operand.back[tile][i % 2] : sum;
                c[tile][i] += L::kByBlock ? back * scale[i / 2] : back; // both at once might be too small for FP32
            }
        }
    }

    // Adds the next unit's products to the sums of its granule.
    __device__ __forceinline__ void multiply_unit(
        int granule, Operand<L> const& operand, Registers<L>& registers, Sums& c)
    {
        Unit const unit = kAhead ? registers.ahead : ring.read();
        Pairs u, v;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            decode(unit.upper[half], u[half]);
            decode(unit.lower[half], v[half]);
        }
        if constexpr (L::kDecoded)
        {
            Sums d[2] = {};
            multiply_halves(u, v, operand, d);
            if (kAhead && has_next(granule))
            {
                registers.ahead = ring.read(); // while the products are on their way
            }
            add_halves(d, granule, operand, registers.scales, c);
            ring.release(__float_as_uint(c[0][0]));
        }
        else
        {
            ring.release(unit.template of_each_read<L>());
            multiply(u, v, operand, c);
        }
    }

    // Adds the products of a pass to the sums of its granules: where the lines of a chain lie together, those of a
    // granule's two lines that memory brings together one after the other.
    __device__ __forceinline__ void multiply_pass(Registers<L>& registers, Sums (&c)[kGranules])
    {
#pragma unroll 1
        for (run = 0; run < inputs.runs; run += inputs.runs_at_once)
        {
            int const runs = min(inputs.runs_at_once, inputs.runs - run);
            if constexpr (L::kByBlock)
            {
                next_scales(registers.scales);
            }
            if (inputs.are_to_be_taken(pass))
            {
                begin_runs(runs, registers);
            }
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
#pragma unroll
                for (int i = 0; i < L::kMostRuns; ++i)
                {
                    if (granule < active && i < runs)
                    {
                        multiply_unit(granule, registers.operands[i], registers, c[granule]);
                    }
                }
                if (granule == (L::kMostRuns == 1 ? kGranules - 1 : 0))
                {
                    load_next(runs);
                }
            }
        }
    }

    // Takes the scales of the run that begins, and asks for those of the next one.
    __device__ __forceinline__ void next_scales(BlockScales<L>& scales)
    {
        bool const is_last = run + 1 == inputs.runs;
        scales.now = scales.ahead;
        scales.load(inputs.launch, share, inputs.line_of(is_last ? 0 : run + 1), is_last ? pass + 1 : pass);
    }

    // Takes the inputs of some runs, by one code: always as the last operand, from where they move on.
    __device__ __forceinline__ void begin_runs(int runs, Registers<L>& registers)
    {
        constexpr int kLast = L::kMostRuns - 1;
        static_assert(kLast <= 1);
#pragma unroll 1
        for (int i = 0; i <= kLast; ++i)
        {
            registers.operands[0] = registers.operands[kLast];
            if (i < runs)
            {
                inputs.begin_run(pass, run + i, registers.operands[kLast], registers.squares);
            }
        }
    }

    // Loads the inputs of as many runs as have been taken and used.
    __device__ __forceinline__ void load_next(int runs)
    {
#pragma unroll 1
        for (int i = 0; i < runs; ++i)
        {
            inputs.load_next(pass * inputs.runs + run + i + 2);
        }
    }
};

} // namespace skinny
} // namespace dflash
