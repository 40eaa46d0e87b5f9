// Products of a mixture of experts for many rows, for Hopper: an expert is read once for up to 64 of the rows that
// chose it.
//
// One block an SM. One warp has the lines of a weight and the tokens' inputs brought, as many ahead as fit; warpgroups
// take the weight into registers, unpacked there where it is MXFP4, NVFP4 or FP8, and multiply it by the inputs as they
// lie in shared memory. Weights are what instructions take as rows, so that few tokens waste little.
#pragma once

#include "experts_fp8_scales.cuh"
#include "experts_many_epilogue.cuh"
#include "experts_many_layout.cuh"
#include "experts_many_loading_sm90.cuh"
#include "fp8.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "mxfp4.cuh"
#include "nvfp4.cuh"
#include "wgmma.cuh"

namespace dflash
{
namespace moe
{
namespace many
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using namespace sm90;

// -- multiplying ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 read_16(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
}

__device__ __forceinline__ uint32_t read_byte(uint32_t from)
{
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from));
    return x;
}

__device__ __forceinline__ uint32_t read_two_bytes(uint32_t from)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from));
    return x;
}

// Multiplies a warpgroup's units by a group's inputs. Of each 16 rows of a unit, a warp's, lane l has parts of the rows
// l / 4 and l / 4 + 8; the first eight are of the unit's first half, the others of its second.
template <typename T, Weight kWeight, bool kGateUp>
struct Mainloop
{
    static constexpr Lines kLines = lines_of(kWeight);
    static constexpr bool kHasScales = kLines == Lines::kE2m1; // in shared memory
    using S = Stage<kLines>;
    using C = Crew<kLines>;
    using Format = Mxfp4<T>;
    using Operand = uint32_t[kAtom / 16][4]; // of a unit's line, what meets an atom of inputs

    // A lane's part of a line of a unit.
    struct Line
    {
        uint4 upper[S::kChunks];
        uint4 lower[S::kChunks];
        uint32_t scale[2] = {}; // of upper and lower
        uint32_t factor[2] = {}; // of NVFP4: two, each of what meets an atom of inputs
        bool is_large = false; // a scale of MXFP4 of the warp's is beyond what one factor can be
    };

    Launch const& launch;
    Shared<kWeight> const& shared;
    int const warpgroup;
    int const row; // of a half
    int const quad;
    int const part;
    int const blocks; // of 32 in a row
    Place next; // stage
    Place next_scales;

    __device__ __forceinline__ Mainloop(Launch const& launch_, Shared<kWeight> const& shared_)
        : launch(launch_)
        , shared(shared_)
        , warpgroup(__shfl_sync(kAll, threadIdx.x / 128, 0)) // which says that it is a warp's
        , row(threadIdx.x / 32 % 4 * 8 + threadIdx.x % 32 / 4)
        , quad(threadIdx.x % 32 / 4)
        , part(threadIdx.x % 4)
        , blocks(launch_.p.inputs / 32)
    {
    }

    __device__ __forceinline__ int unit_of(int i) const
    {
        return i * C::kGroups + warpgroup;
    }

    // Says that this warp is done with what it read.
    __device__ __forceinline__ static void leave(uint32_t barrier)
    {
        if (threadIdx.x % 32 == 0)
        {
            arrive(barrier);
        }
    }

    // Adds to c the products of every line of the rows. Those of one operand run beside the unpacking of the next.
    template <int kTiles>
    __device__ __forceinline__ void multiply(float (&c)[C::kGroupUnits][kTiles][4])
    {
        constexpr int kUnits = C::kGroupUnits;
        if constexpr (kHasScales)
        {
            wait_for_phase(shared.scales_full(next_scales.at), next_scales.phase);
        }
        // The low words of matrices: places by sixteen bytes. The high ones are all the same.
        uint32_t const first_inputs = static_cast<uint32_t>(matrix(shared.inputs(0), 16, 8 * kAtom * 2));
        int last = 0; // stage
        for (int step = 0; step < launch.steps; ++step)
        {
            wait_for_phase(shared.full(next.at), next.phase);
            uint32_t const inputs = first_inputs + next.at * (S::kBytes / 16);
#pragma unroll
            for (int i = 0; i < kUnits; ++i)
            {
                Line const line = read(unit_of(i), step);
#pragma unroll
                for (int atom = 0; atom < S::kAtoms; ++atom)
                {
                    Operand a;
                    unpack(a, line, atom);
                    begin_products();
                    multiply(c[i], a, inputs + atom * kTiles * 8 * kAtom * 2 / 16);
                    commit_products();
                    if constexpr (kUnits == 1)
                    {
                        wait_for_all_but<1>();
                    }
                    else
                    {
                        wait_for_products<1>(c[1 - i]);
                    }
                    if (i == 0 && atom == 0 && step > 0)
                    {
                        leave(shared.empty(last));
                    }
                }
            }
            last = next.at;
            next.advance(launch.stages);
        }
        wait_for_products(c[kUnits - 1]);
        leave(shared.empty(last));
        if constexpr (kHasScales)
        {
            leave(shared.scales_empty(next_scales.at));
            next_scales.advance(kScaleBuffers);
        }
    }

    // Likewise with experts in FP8, a stage's sums apart, for each has a scale: as those of few rows are added.
    template <int kTiles>
    __device__ __forceinline__ void multiply(float (&c)[kTiles][4], Fp8Scales& scales)
    {
        uint32_t const first_inputs = static_cast<uint32_t>(matrix(shared.inputs(0), 16, 8 * kAtom * 2));
        float sums[kTiles][4] = {};
        for (int step = 0; step < launch.steps; ++step)
        {
            wait_for_phase(shared.full(next.at), next.phase);
            uint32_t const inputs = first_inputs + next.at * (S::kBytes / 16);
            Line const line = read(warpgroup, step);
            Operand a[S::kAtoms];
#pragma unroll
            for (int atom = 0; atom < S::kAtoms; ++atom)
            {
                unpack(a[atom], line, atom);
                begin_products();
                multiply(sums, a[atom], inputs + atom * kTiles * 8 * kAtom * 2 / 16);
                commit_products();
            }
            wait_for_products(sums);
            leave(shared.empty(next.at));
            next.advance(launch.stages);
            scales.add(c, sums, step);
        }
    }

    // Leaves an item to the other warpgroups. What is there must be waited for, or a barrier counts this warp twice.
    __device__ __forceinline__ void skip()
    {
        if constexpr (kHasScales)
        {
            wait_for_phase(shared.scales_full(next_scales.at), next_scales.phase);
            leave(shared.scales_empty(next_scales.at));
            next_scales.advance(kScaleBuffers);
        }
        for (int step = 0; step < launch.steps; ++step)
        {
            wait_for_phase(shared.full(next.at), next.phase);
            leave(shared.empty(next.at));
            next.advance(launch.stages);
        }
    }

    template <int kTiles>
    __device__ __forceinline__ static void multiply(float (&c)[kTiles][4], Operand const& a, uint32_t inputs)
    {
#pragma unroll
        for (int k = 0; k < kAtom / 16; ++k)
        {
            uint64_t const high = matrix(0, 16, 8 * kAtom * 2) >> 32 << 32;
            multiply_add_rows<T>(c, a[k], high | (inputs + k * 2));
        }
    }

    __device__ __forceinline__ Line read(int unit, int step) const
    {
        int const unit_row = unit * kHalfRows + row;
        uint32_t const at = shared.weight(next.at) + unit_row * S::kLineBytes;
        Line line;
#pragma unroll
        for (int i = 0; i < S::kChunks; ++i)
        {
            uint32_t const from = at + (kHasScales ? part ^ quad / 2 : (i * 4 + part) ^ quad) * 16;
            line.upper[i] = read_16(from);
            line.lower[i] = read_16(from + S::kHalfBytes);
        }
        if constexpr (kHasScales)
        {
            read_scales(line, unit_row, step);
        }
        return line;
    }

    __device__ __forceinline__ void read_scales(Line& line, int unit_row, int step) const
    {
        // Past a row's end its numbers are zeros; any scale of its own will do.
        int const block = min(step * 4 + part, blocks - 1), row_bytes = shared.layout.row_scale_bytes;
        uint32_t const scales = shared.scales(next_scales.at);
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            uint32_t const from = scales + half * Crew<Lines::kE2m1>::kItemUnits * kHalfRows * row_bytes;
            if constexpr (kWeight == Weight::kNvfp4)
            {
                // Both scales of 32 numbers, of eight rows beside each other.
                uint32_t const at = (unit_row - quad) * row_bytes + (block * 8 + quad) * 2;
                line.factor[half] = Nvfp4<T>::factors(read_two_bytes(from + at));
            }
            else
            {
                line.scale[half] = read_byte(from + unit_row * row_bytes + block);
                line.factor[half] = Format::factor(min(line.scale[half], Format::kMostScale));
            }
        }
        line.is_large
            = kWeight == Weight::kMxfp4 && __any_sync(kAll, max(line.scale[0], line.scale[1]) > Format::kMostScale);
    }

    // Makes of a line the operand that meets an atom of inputs, in the order of `place_of`.
    __device__ __forceinline__ static void unpack(Operand& a, Line const& line, int atom)
    {
        if constexpr (kLines == Lines::kE4m3)
        {
            uint4 const &u = line.upper[atom], &l = line.lower[atom];
            uint32_t const words[2][4] = {{u.x, u.y, u.z, u.w}, {l.x, l.y, l.z, l.w}};
#pragma unroll
            for (int i = 0; i < 8; ++i)
            {
                uint32_t pairs[2];
                Fp8<T>::spread(words[i / 4][i % 4], pairs);
                a[i % 4][i / 4] = pairs[0];
                a[i % 4][2 + i / 4] = pairs[1];
            }
        }
        else if constexpr (kLines == Lines::kE2m1)
        {
            uint4 const& u = line.upper[0];
            uint4 const& l = line.lower[0];
            unpack(a, 0, atom == 0 ? u.x : u.z, atom == 0 ? u.y : u.w, line.factor[0], atom);
            unpack(a, 1, atom == 0 ? l.x : l.z, atom == 0 ? l.y : l.w, line.factor[1], atom);
            if (line.is_large)
            {
                multiply_excess(a, 0, line.scale[0]);
                multiply_excess(a, 1, line.scale[1]);
            }
        }
        else
        {
#pragma unroll
            for (int i = 0; i < S::kChunks; ++i)
            {
                uint4 const &u = line.upper[i], &l = line.lower[i];
                uint32_t const pairs[2][4] = {{u.x, l.x, u.y, l.y}, {u.z, l.z, u.w, l.w}};
#pragma unroll
                for (int j = 0; j < 8; ++j)
                {
                    a[i * 2 + j / 4][j % 4] = pairs[j / 4][j % 4];
                }
            }
        }
    }

    // Unpacks two words of E2M1. half: 0, of an upper row; 1, of a lower one.
    __device__ __forceinline__ static void unpack(
        Operand& a, int half, uint32_t first, uint32_t second, uint32_t factor, int atom)
    {
        uint32_t pairs[2][4];
        Format::spread(first, pairs[0]);
        Format::spread(second, pairs[1]);
#pragma unroll
        for (int word = 0; word < 2; ++word)
        {
            if constexpr (kWeight == Weight::kNvfp4)
            {
                Nvfp4<T>::multiply(pairs[word], factor, atom);
            }
            else
            {
                Format::multiply(pairs[word], factor);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                a[word * 2 + i / 2][i % 2 * 2 + half] = pairs[word][i];
            }
        }
    }

    __device__ __forceinline__ static void multiply_excess(Operand& a, int half, uint32_t scale)
    {
#pragma unroll
        for (int word = 0; word < 2; ++word)
        {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                pairs[i] = a[word * 2 + i / 2][i % 2 * 2 + half];
            }
            Format::multiply_excess(pairs, scale);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                a[word * 2 + i / 2][i % 2 * 2 + half] = pairs[i];
            }
        }
    }
};

// -- an item ---------------------------------------------------------------------------------------------------------

// Computes an item for up to 8 kTiles tokens.
template <int kTiles, typename T, Weight kWeight, bool kGateUp>
__device__ __forceinline__ void compute(Mainloop<T, kWeight, kGateUp>& mainloop, Item const& item)
{
    if (mainloop.unit_of(0) >= item.count)
    {
        mainloop.skip();
        return;
    }
    constexpr int kUnits = Crew<lines_of(kWeight)>::kGroupUnits;
    static_assert(kWeight != Weight::kFp8 || kUnits == 1);
    float c[kUnits][kTiles][4] = {};
    if constexpr (kWeight == Weight::kFp8)
    {
        Product const& p = mainloop.launch.p;
        int rows[2]; // whose scales a lane has; those behind the last row have no numbers
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            int const row = first_row<kGateUp>(p, item, half) + mainloop.unit_of(0) * kHalfRows + mainloop.row;
            rows[half] = min(row, p.outputs - 1);
        }
        Fp8Scales scales(p, item.group.expert, rows[0], rows[1], threadIdx.x % 32);
        mainloop.multiply(c[0], scales);
    }
    else
    {
        mainloop.multiply(c);
    }
    Epilogue<T, kWeight, kGateUp> const epilogue{mainloop.launch, mainloop.launch.p, item, mainloop.row};
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
    {
        if (mainloop.unit_of(i) < item.count)
        {
            epilogue.store(mainloop.unit_of(i), c[i]);
        }
    }
}

#endif

// kGateUp: the first product, which ends with the activation.
template <typename T, Weight kWeight, bool kGateUp>
__global__ void __launch_bounds__(Crew<lines_of(kWeight)>::kThreads, 1)
    many_product_kernel(__grid_constant__ Launch const launch)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using C = Crew<lines_of(kWeight)>;
    extern __shared__ __align__(1024) unsigned char memory[];
    // The routing is known: the kernel before this one waited for it before it let this one begin.
    trigger();
    Shared<kWeight> const shared(launch, shared_address(memory));
    if (threadIdx.x == 0)
    {
        shared.init();
    }
    __syncthreads();
    Items items(launch, C::kItemUnits);
    if (threadIdx.x >= C::kWarps * 32)
    {
        release_registers<C::kLoaderRegisters>();
        if (threadIdx.x == C::kWarps * 32)
        {
            Loader<kWeight, kGateUp>(launch, shared).load(items);
        }
        else
        {
            wait();
        }
        return;
    }
    take_registers<C::kMainloopRegisters>();
    wait();
    Mainloop<T, kWeight, kGateUp> mainloop(launch, shared);
    while (items.are_left())
    {
        Item const item = items.next();
        switch ((item.group.tokens + 15) / 16)
        {
        case 1: compute<2>(mainloop, item); break;
        case 2: compute<4>(mainloop, item); break;
        case 3: compute<6>(mainloop, item); break;
        default: compute<8>(mainloop, item); break;
        }
    }
#endif
}

} // namespace many
} // namespace moe
} // namespace dflash
