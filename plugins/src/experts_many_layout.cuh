// Products of a mixture of experts for many rows (tokens): their arguments, the division of the work, and a block's
// shared memory.
#pragma once

#include "experts_work.cuh"
#include "tensor_map.cuh"

#include <cuda.h>

namespace dflash
{
namespace moe
{
namespace many
{

constexpr int kTokens = 64; // of a group: the most that one reading of an expert serves
constexpr int kHalfRows = 32; // of a unit: a gate's rows and those of up, or outputs and others
constexpr int kUnitRows = 2 * kHalfRows; // rows of a weight that a warpgroup multiplies at once
constexpr int kUnitGranules = kUnitRows / kGranule; // a warp's each
constexpr int kBoxTokens = 16; // tokens are copied in sixteens
constexpr int kAloneTokens = 16; // up to which warps multiply tiles alone
constexpr int kBoxes = kTokens / kBoxTokens; // sizes of copies
constexpr int kMostStages = 8;
constexpr int kLeastStages = 3;
// Stages whose weights a first product asks for ahead of its inputs, which would come behind the weights of all.
constexpr int kStagesAhead = 3;
static_assert(kStagesAhead <= kLeastStages);

// What the lines of a weight are of.
enum class Lines
{
    kNumbers, // of the rows' type
    kE4m3,
    kE2m1
};

__host__ __device__ constexpr Lines lines_of(Weight weight)
{
    return weight == Weight::kFp8 ? Lines::kE4m3 : is_tiled(weight) ? Lines::kE2m1 : Lines::kNumbers;
}

// Who multiplies. What is unpacked is by as many warps as there are registers for.
template <Lines kLines>
struct Crew
{
    static constexpr bool kUnpacks = kLines != Lines::kNumbers;
    static constexpr int kGroups = kUnpacks ? 3 : 2; // warpgroups
    static constexpr int kGroupUnits = kUnpacks ? 1 : 2; // that a warpgroup has of an item
    static constexpr int kItemUnits = kGroups * kGroupUnits;
    static constexpr int kWarps = 4 * kGroups; // that multiply; one more loads
    static constexpr int kThreads = kWarps * 32 + 128; // registers are given to warpgroups
    static constexpr int kLoaderRegisters = kUnpacks ? 56 : 40;
    static constexpr int kMainloopRegisters = kUnpacks ? 152 : 232;
};

constexpr int kMostItemUnits = Crew<Lines::kNumbers>::kItemUnits;

// One stage: a line of each of an item's rows, or their tiles of E2M1, and the inputs that it meets, of each token.
template <Lines kLines>
struct Stage
{
    static constexpr bool kIsTiled = kLines == Lines::kE2m1;
    static constexpr int kLineBytes = 128; // of a row
    static constexpr int kColumns = kLines == Lines::kNumbers ? 64 : 128; // inputs
    static constexpr int kChunks = kLineBytes / 64; // of sixteen bytes, that a lane has of a line
    // Of all units: first halves, then seconds.
    static constexpr int kHalfBytes = Crew<kLines>::kItemUnits * kHalfRows * kLineBytes;
    static constexpr int kTileBytes = tile_bytes(Weight::kNvfp4); // the larger ones
    static constexpr int kSlabBytes = kUnitGranules * kTileBytes;
    static constexpr int kAtoms = kColumns / kAtom;
    static constexpr int kTokenBytes = kColumns * 2; // by atoms: of all tokens the first, then the next
    static constexpr int kInputBytes = kTokens * kTokenBytes;
    // Inputs come first, swizzled. Twice as many units where tokens are few.
    static constexpr int kTileUnits = Crew<kLines>::kItemUnits;
    static constexpr int kAloneBytes = kAloneTokens * kTokenBytes + 2 * kTileUnits * kSlabBytes;
    static constexpr int kTiledBytes = kInputBytes + kTileUnits * kSlabBytes;
    static constexpr int kMostBytes
        = kIsTiled ? (kAloneBytes > kTiledBytes ? kAloneBytes : kTiledBytes) : kInputBytes + 2 * kHalfBytes;
    static constexpr int kBytes = (kMostBytes + 1023) / 1024 * 1024;
};

// Inputs of a token lie in the order in which products take them: registers get a weight by sixteen bytes a lane, and
// numbers that are unpacked come out of their words in pairs. Columns are exchanged within 32, 64 of E4M3, 128 of E2M1.
template <Lines kLines>
__host__ __device__ __forceinline__ int place_of(int column)
{
    if constexpr (kLines == Lines::kE4m3)
    {
        int const part = column / 16 % 4, word = column / 4 % 4, pair = column % 2, element = column / 2 % 2;
        return column / 64 * 64 + word * 16 + pair * 8 + part * 2 + element;
    }
    if constexpr (kLines == Lines::kE2m1)
    {
        int const part = column / 32 % 4, word = column / 8 % 4, pair = column % 4, element = column / 4 % 2;
        return column / 128 * 128 + word * 32 + pair * 8 + part * 2 + element;
    }
    int const part = column / 8 % 4, pair = column / 2 % 4, element = column % 2;
    return column / 32 * 32 + pair * 8 + part * 2 + element;
}

// Inputs of a token as they lie: whole stages, zeros behind the last column.
template <Lines kLines>
__host__ __device__ __forceinline__ int pitch_of(int columns)
{
    constexpr int kColumns = Stage<kLines>::kColumns;
    return (columns + kColumns - 1) / kColumns * kColumns;
}

__host__ __device__ constexpr int stage_bytes(Weight weight)
{
    return weight == Weight::kFp8 ? Stage<Lines::kE4m3>::kBytes
        : is_tiled(weight)        ? Stage<Lines::kE2m1>::kBytes
                                  : Stage<Lines::kNumbers>::kBytes;
}

inline int pitch_of(Weight weight, int columns)
{
    return weight == Weight::kFp8 ? pitch_of<Lines::kE4m3>(columns)
        : is_tiled(weight)        ? pitch_of<Lines::kE2m1>(columns)
                                  : pitch_of<Lines::kNumbers>(columns);
}

struct Launch
{
    Product p; // its x is the maps', and its weight, but of tiles
    int32_t const* begins; // [blocks + 1], each block's first unit of all groups', and their number; null: equally many
    int units; // of a group, the last one's end past the weight's perhaps
    int steps; // stages that a row takes
    int stages;
    int pitch; // of `out`
    CUtensorMap weight[kMostItemUnits]; // [E, outputs, bytes of a row], in halves of so many units
    CUtensorMap inputs[kBoxes]; // [atoms, pairs, kAtom], in so many sixteens of tokens
};

// Bytes of shared memory, in order: the stages, the barriers.
struct SharedLayout
{
    int barriers_at;
    int bytes;

    __host__ __device__ SharedLayout(Weight weight, int stages)
        : barriers_at(stages * stage_bytes(weight))
        , bytes(barriers_at + 2 * kMostStages * 8)
    {
    }
};

// -- division of the work ---------------------------------------------------------------------------------------------

// Units of one group's weight that a block computes at a time.
struct Item
{
    Group group;
    int unit; // the first
    int count;
};

// What a unit of a group costs: its weight, and as much again for so many sixteens of tokens. Of tiles by the time that
// units took in steps on one H200.
template <Lines kLines>
__device__ __forceinline__ int cost_of(int tokens)
{
    if constexpr (kLines == Lines::kE2m1)
    {
        return tokens <= 8 ? 20 : tokens <= 16 ? 24 : tokens <= 32 ? 32 : tokens <= 48 ? 36 : 40;
    }
    constexpr int kWeight = kLines == Lines::kE4m3 ? 3 : 6;
    return kWeight + (tokens + kBoxTokens - 1) / kBoxTokens;
}

// The items of a block: units of groups one after the other. An expert that all rows go through has the largest groups,
// the last ones, and who has them would end long after the others: then blocks have units of equal costs, as have those
// of tiles, which are multiplied more slowly where tokens are more. Else they end sooner with equally many units each.
template <Lines kLines>
struct Items
{
    using C = Crew<kLines>;

    Route const& route;
    int const units; // of a group
    int at;
    int end;

    __device__ __forceinline__ explicit Items(Launch const& launch)
        : route(launch.p.route)
        , units(launch.units)
    {
        if (launch.begins)
        {
            at = __ldcg(launch.begins + blockIdx.x);
            end = __ldcg(launch.begins + blockIdx.x + 1);
            return;
        }
        int const total = __ldcg(route.group_count) * units;
        at = share_begin(total, blockIdx.x, gridDim.x);
        end = share_begin(total, blockIdx.x + 1, gridDim.x);
    }

    __device__ __forceinline__ bool are_left() const
    {
        return at < end;
    }

    __device__ __forceinline__ Item next()
    {
        int4 const group = __ldcg(reinterpret_cast<int4 const*>(route.groups + at / units));
        int const own = kLines == Lines::kE2m1 && group.z <= kAloneTokens ? 2 * C::kItemUnits : C::kItemUnits;
        int const unit = at % units, count = min(own, min(units - unit, end - at));
        at += count;
        return {{group.x, group.y, group.z, group.w}, unit, count};
    }
};

// The first of an item's rows that are units' first halves (0) or second ones (1): unit after unit.
template <bool kGateUp>
__device__ __forceinline__ int first_row(Product const& p, Item const& item, int half)
{
    return kGateUp ? half * (p.outputs / 2) + item.unit * kHalfRows
                   : item.unit * kUnitRows + half * item.count * kHalfRows;
}

// The weight's row that is `row` of a half of one of an item's units.
template <Lines kLines, bool kGateUp>
__device__ __forceinline__ int row_of(Product const& p, Item const& item, int unit, int half, int row)
{
    return kLines == Lines::kE2m1 && !kGateUp ? (item.unit + unit) * kUnitRows + row / 8 * kGranule + half * 8 + row % 8
                                              : first_row<kGateUp>(p, item, half) + unit * kHalfRows + row;
}

} // namespace many
} // namespace moe
} // namespace dflash
