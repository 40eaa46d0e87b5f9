// Products of a mixture of experts for many rows, for Hopper: an expert is read once for up to 64 of the rows that
// chose it.
//
// One block an SM. One warp has the lines of a weight and the tokens' inputs brought, as many ahead as fit; warpgroups
// take the weight into registers, unpacked there where it is MXFP4, NVFP4 or FP8, and multiply it by the inputs as they
// lie in shared memory. Weights are what instructions take as rows, so that few tokens waste little.
// Of MXFP4 and NVFP4 each warp multiplies by itself where tokens are at most 16.
#pragma once

#include "experts_fp8_scales.cuh"
#include "experts_many_epilogue.cuh"
#include "experts_many_layout.cuh"
#include "experts_many_loading_sm90.cuh"
#include "experts_tiles.cuh"
#include "fp8.cuh"
#include "instructions.cuh"
#include "launch.cuh"
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

// Multiplies a warpgroup's units by a group's inputs. Of each 16 rows of a unit, a warp's, lane l has parts of the rows
// l / 4 and l / 4 + 8; the first eight are of the unit's first half, the others of its second.
template <typename T, Weight kWeight, bool kGateUp>
struct Mainloop
{
    static constexpr Lines kLines = lines_of(kWeight);
    using S = Stage<kLines>;
    using C = Crew<kLines>;
    using Operand = uint32_t[kAtom / 16][4]; // of a unit's line, what meets an atom of inputs

    // A lane's part of a line of a unit.
    struct RowsLine
    {
        uint4 upper[S::kChunks];
        uint4 lower[S::kChunks];
    };

    using Line = std::conditional_t<S::kIsTiled, TilePart<T, kWeight>, RowsLine>;

    Launch const& launch;
    Shared<kWeight> const& shared;
    int const warpgroup;
    int const row; // of a half
    int const quad;
    int const part;
    int const blocks; // of 32 in a row
    Place next; // stage

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
    template <int kUnits, int kTiles>
    __device__ __forceinline__ void multiply(float (&c)[kUnits][kTiles][4])
    {
        // The low words of matrices: places by sixteen bytes. The high ones are all the same.
        uint32_t const first_inputs = static_cast<uint32_t>(matrix(shared.inputs(0), 16, 8 * kAtom * 2));
        int last = 0; // stage
        for (int step = 0; step < launch.steps; ++step)
        {
            wait_for_phase(shared.full(next.at), next.phase);
            uint32_t const inputs = first_inputs + next.at * (S::kBytes / 16);
            Line lines[kUnits];
#pragma unroll
            for (int i = 0; i < S::kAtoms * kUnits; ++i)
            {
                int const atom = i / kUnits, unit = i % kUnits;
                if (atom == 0)
                {
                    lines[unit] = read(unit_of(unit), step, kTiles * 8);
                }
                Operand a;
                unpack(a, lines[unit], atom);
                begin_products();
                multiply(c[unit], a, inputs + atom * kTiles * 8 * kAtom * 2 / 16);
                commit_products();
                if constexpr (kUnits == 1)
                {
                    wait_for_all_but<1>();
                }
                else
                {
                    wait_for_products<1>(c[1 - unit]);
                }
                if (i == 0 && step > 0)
                {
                    leave(shared.empty(last));
                }
            }
            last = next.at;
            next.advance(launch.stages);
        }
        wait_for_products(c[kUnits - 1]);
        leave(shared.empty(last));
    }

    // Likewise of tiles, where tokens are few: each warp multiplies granules of its own by instructions of its own,
    // which take less for 8 or 16 tokens than a warpgroup's. Two granules share what is read of the inputs.
    template <int kOwn, int kTiles>
    __device__ __forceinline__ void multiply_alone(float (&c)[kOwn][kTiles][4])
    {
        constexpr int kAtomBytes = (kTiles + 1) / 2 * kBoxTokens * kAtom * 2;
        int const lane = threadIdx.x % 32, chunk = lane / 8;
        uint32_t const own_row = lane % 8 * kAtom * 2;
        for (int step = 0; step < launch.steps; ++step)
        {
            wait_for_phase(shared.full(next.at), next.phase);
            uint32_t const inputs = shared.inputs(next.at) + own_row;
            Line lines[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
            {
                lines[i] = read(unit_of(i), step, kTiles * 8);
            }
#pragma unroll
            for (int word = 0; word < 4; ++word)
            {
                uint32_t b[kTiles][4];
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
                    uint32_t const at = inputs + word / 2 * kAtomBytes + tile * 8 * kAtom * 2;
                    load_matrices(b[tile], at + ((word % 2 * 4 + chunk) ^ lane % 8) * 16);
                }
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                {
                    uint32_t u[4], l[4];
                    lines[i].unpack(0, word, u);
                    lines[i].unpack(1, word, l);
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile)
                    {
                        multiply_add<T>(c[i][tile], {u[0], l[0], u[1], l[1]}, b[tile][0], b[tile][1]);
                        multiply_add<T>(c[i][tile], {u[2], l[2], u[3], l[3]}, b[tile][2], b[tile][3]);
                    }
                }
            }
            __syncwarp(); // all lanes have read, before one says so
            leave(shared.empty(next.at));
            next.advance(launch.stages);
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
            Line const line = read(warpgroup, step, kTiles * 8);
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

    __device__ __forceinline__ Line read(int unit, int step, int tokens) const
    {
        uint32_t const weight = shared.weight(next.at, tokens);
        Line line;
        if constexpr (S::kIsTiled)
        {
            int const parts = min(kTileParts, blocks - step * kTileParts);
            uint32_t const slab = weight + unit * S::kSlabBytes;
            // Of parts that are not there the last one's numbers, which meet inputs of zeros.
            int const own = row / 8 * parts + min(part, parts - 1);
            line.read(slab + own * part_bytes(kWeight), place_in_part<kWeight>(quad));
        }
        else
        {
            uint32_t const at = weight + (unit * kHalfRows + row) * S::kLineBytes;
#pragma unroll
            for (int i = 0; i < S::kChunks; ++i)
            {
                uint32_t const from = at + ((i * 4 + part) ^ quad) * 16;
                line.upper[i] = read_16(from);
                line.lower[i] = read_16(from + S::kHalfBytes);
            }
        }
        return line;
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
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                uint32_t pairs[4];
                line.unpack(i % 2, atom * 2 + i / 2, pairs);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    a[i / 2 * 2 + j / 2][j % 2 * 2 + i % 2] = pairs[j];
                }
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
};

// -- an item ---------------------------------------------------------------------------------------------------------

// Computes a warpgroup's kUnits units of an item for up to 8 kTiles tokens.
template <int kTiles, int kUnits, typename T, Weight kWeight, bool kGateUp>
__device__ __forceinline__ void compute_units(Mainloop<T, kWeight, kGateUp>& mainloop, Item const& item)
{
    float c[kUnits][kTiles][4] = {};
    using E = Epilogue<T, kWeight, kGateUp>;
    E const first(mainloop.launch, item, mainloop.unit_of(0), mainloop.row);
    E const last(mainloop.launch, item, mainloop.unit_of(kUnits - 1), mainloop.row);
    if constexpr (kWeight == Weight::kFp8)
    {
        static_assert(kUnits == 1);
        // Whose scales a lane has: those behind the last row have no numbers.
        int const most = mainloop.launch.p.outputs - 1;
        Fp8Scales scales(
            mainloop.launch.p, item.group.expert, min(first.row(0), most), min(first.row(1), most), threadIdx.x % 32);
        mainloop.multiply(c[0], scales);
    }
    else if constexpr (is_tiled(kWeight) && kTiles * 8 <= kAloneTokens)
    {
        mainloop.multiply_alone(c);
    }
    else
    {
        mainloop.multiply(c);
    }
    first.store(c[0]);
    if (kUnits > 1 && mainloop.unit_of(kUnits - 1) < item.count)
    {
        last.store(c[kUnits - 1]);
    }
}

template <int kTiles, typename T, Weight kWeight, bool kGateUp>
__device__ __forceinline__ void compute(Mainloop<T, kWeight, kGateUp>& mainloop, Item const& item)
{
    constexpr bool kAreAlone = is_tiled(kWeight) && kTiles * 8 <= kAloneTokens;
    constexpr int kUnits = kAreAlone ? 2 : Crew<lines_of(kWeight)>::kGroupUnits;
    if (mainloop.unit_of(0) >= item.count)
    {
        mainloop.skip();
    }
    else if (kAreAlone && mainloop.unit_of(1) >= item.count)
    {
        compute_units<kTiles, 1>(mainloop, item);
    }
    else
    {
        compute_units<kTiles, kUnits>(mainloop, item);
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
    Items<lines_of(kWeight)> items(launch);
    if (threadIdx.x >= C::kWarps * 32)
    {
        release_registers<C::kLoaderRegisters>();
        if (threadIdx.x / 32 == C::kWarps)
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
        case 1:
            if constexpr (is_tiled(kWeight))
            {
                if (item.group.tokens <= 8)
                {
                    compute<1>(mainloop, item);
                    break;
                }
            }
            compute<2>(mainloop, item);
            break;
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
