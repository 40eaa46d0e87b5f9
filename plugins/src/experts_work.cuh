// A product of a mixture of experts: its arguments, its layout in shared memory, and its division among blocks.
#pragma once

#include "experts_own_route.cuh"
#include "instructions.cuh"

namespace dflash
{
namespace moe
{

constexpr int kMostWarps = 16;
constexpr int kLeastWarps = 4;
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit
constexpr int kUnit = kGranule * kLine; // bytes that a warp loads at a time
constexpr int kUnits = 4; // of a warp's ring
constexpr int kInt4Inputs = 2 * kLine; // of a row in one unit
constexpr int kInt4ScaleLine = kInt4Inputs / 32 * 2; // bytes of their scales
constexpr int kFp8Block = 128; // rows and inputs that share a scale
constexpr int kTileParts = 4; // of a tile of E2M1, 32 columns each
constexpr int kSlabGranules = 4; // whose tiles of the same columns lie together

// The type of a weight's numbers.
enum class Weight
{
    kNumbers, // of the rows' type
    kMxfp4,
    kFp8,
    kInt4,
    kNvfp4
};

// Eight numbers a word, with scales of 32, or two of 16.
__host__ __device__ constexpr bool is_packed(Weight weight)
{
    return weight == Weight::kMxfp4 || weight == Weight::kInt4 || weight == Weight::kNvfp4;
}

// Those of E2M1, which lie in tiles with their scales: see experts_tiles.cuh.
__host__ __device__ constexpr bool is_tiled(Weight weight)
{
    return weight == Weight::kMxfp4 || weight == Weight::kNvfp4;
}

// Bytes of scales of 32 numbers of E2M1.
__host__ __device__ constexpr int scale_bytes_of(Weight weight)
{
    return weight == Weight::kNvfp4 ? 2 : 1;
}

// Bytes of a tile's part: of 16 rows 32 columns, with their scales.
__host__ __device__ constexpr int part_bytes(Weight weight)
{
    return kGranule * (16 + scale_bytes_of(weight));
}

__host__ __device__ constexpr int tile_bytes(Weight weight)
{
    return kTileParts * part_bytes(weight);
}

// Bytes of all tiles of a granule.
__host__ __device__ constexpr int granule_bytes(Weight weight, int inputs)
{
    return inputs / 32 * part_bytes(weight);
}

// Bytes that a warp loads at a time: two tiles, or of other weights 128 of each row, of INT4 with their scales.
__host__ __device__ constexpr int unit_bytes(Weight weight)
{
    int const scales = weight == Weight::kInt4 ? kGranule * kInt4ScaleLine : 0;
    return is_tiled(weight) ? 2 * tile_bytes(weight) : kUnit + scales;
}

inline Weight weight_of(dflash_moe_params const& p)
{
    return p.format == DFLASH_MOE_NUMBERS ? Weight::kNumbers
        : p.format == DFLASH_MOE_MXFP4    ? Weight::kMxfp4
        : p.format == DFLASH_MOE_INT4     ? Weight::kInt4
        : p.format == DFLASH_MOE_NVFP4    ? Weight::kNvfp4
                                          : Weight::kFp8;
}

struct Product
{
    Route route;
    void const* weight; // [E, outputs, inputs]: numbers, INT4's words, or E4M3; MXFP4's and NVFP4's tiles
    void const* scales; // INT4's [E, outputs, inputs / 32]; FP8's [E, outputs], or by block; or null
    float const* row_scales; // NVFP4's [E, outputs]
    void const* bias; // [E, outputs], or null
    void const* x; // of gate and up [N, inputs]; of down [pairs, inputs]
    void* out; // of gate and up [pairs, outputs / 2]; of down [pairs, outputs]
    int inputs;
    int outputs;
    int tokens; // whose inputs lie in shared memory
    bool is_by_block; // FP8's scales are of blocks of 128 by 128
    bool is_clamped;
    bool has_gelu;
    bool routes; // gate and up: by blocks themselves
    bool reads_first; // down: the next kernel begins once a warp of each block has asked for all of its weights
    float alpha;
    float limit;
    void const* ahead[2]; // what the L2 cache is asked for while the routing is not known yet, or null
    uint32_t ahead_bytes[2];

    // Each block asks for its part.
    __device__ __forceinline__ void ask_ahead() const
    {
#pragma unroll 1
        for (int i = 0; i < 2; ++i)
        {
            uint32_t const lines = ahead_bytes[i] / kLine, first = share_begin(lines, blockIdx.x, gridDim.x);
            uint32_t const bytes = (share_begin(lines, blockIdx.x + 1, gridDim.x) - first) * kLine;
            if (threadIdx.x == 0 && bytes > 0)
            {
                prefetch_bytes(static_cast<char const*>(ahead[i]) + first * kLine, bytes);
            }
        }
    }

    __device__ __forceinline__ float activated(float gate, float up) const
    {
        gate = is_clamped ? fminf(gate, limit) : gate;
        up = is_clamped ? fminf(fmaxf(up, -limit), limit) + 1.f : up;
        float const slope = is_clamped ? alpha : 1.f;
        return has_gelu ? gelu(gate) * up : gate / (1.f + expf(-slope * gate)) * up;
    }
};

// The layout of shared memory: each warp's ring, then the tokens' inputs.
struct Layout
{
    int row_bytes; // of the weight, without scales
    int units; // of a row, the last one's end past the row's perhaps
    int steps; // halves of units that have inputs
    int warp_bytes;
    int token_bytes; // inputs, zeros up to the last step's end
    int pitch; // from one token's inputs to the next one's: no two meet in one bank

    __host__ __device__ Layout(int inputs, Weight weight)
        : row_bytes(is_packed(weight)      ? inputs / 2
                  : weight == Weight::kFp8 ? inputs
                                           : inputs * 2)
        , units((row_bytes + kLine - 1) / kLine)
        , steps((row_bytes + kLine / 2 - 1) / (kLine / 2))
        , warp_bytes(kUnits * unit_bytes(weight))
        , token_bytes(steps * (kLine / 2)
              * (is_packed(weight)             ? 4
                      : weight == Weight::kFp8 ? 2
                                               : 1))
        , pitch((token_bytes + 127) / 128 * 128 + 64)
    {
    }
};

// -- division of the work ---------------------------------------------------------------------------------------------

// A block's share: places begin..end - 1, counted over all groups; each group's first ones are its granules.
//
// A block's warps take a group's granules by turns, in rounds. So that no block has a round more than it must, either
// groups divide the blocks among them, or blocks divide whole rounds: what gives the slowest fewer.
struct Share
{
    int const granules; // of a group
    int stride; // from one group's places to the next one's
    int begin;
    int end;

    __device__ __forceinline__ Share(Product const& p, Groups const& of_route)
        : granules(p.outputs / kGranule)
    {
        uint32_t const groups = of_route.count(), warps = blockDim.x / 32, blocks = gridDim.x;
        uint32_t const block = blockIdx.x, group_rounds = (granules + warps - 1) / warps;
        uint32_t const rounds = groups * group_rounds;
        uint32_t const least = groups ? blocks / groups : 0; // blocks of a group
        uint32_t const most_rounds = (rounds + blocks - 1) / blocks;
        if (least && granules <= least * warps * most_rounds)
        {
            // Groups' first blocks: 0, blocks / groups, ...
            uint32_t const group = ((block + 1) * groups - 1) / blocks;
            int const first = share_begin(blocks, group, groups), past = share_begin(blocks, group + 1, groups);
            stride = granules;
            begin = group * granules + share_begin(granules, block - first, past - first);
            end = group * granules + share_begin(granules, block - first + 1, past - first);
        }
        else
        {
            stride = group_rounds * warps;
            begin = share_begin(rounds, block, blocks) * warps;
            end = share_begin(rounds, block + 1, blocks) * warps;
        }
    }
};

// Walks the granules of a warp: in each group that its block has a share of, every warps-th one.
struct Cursor
{
    Groups const& groups;
    Share const& share;
    int group;
    int granule;
    int last; // + 1, of the block's share of the group
    int expert;

    __device__ __forceinline__ Cursor(Groups const& groups_, Share const& share_)
        : groups(groups_)
        , share(share_)
        , group(share_.begin / share_.stride)
        , granule(share_.begin % share_.stride + static_cast<int>(threadIdx.x) / 32)
        , last(min(share_.granules, share_.end - group * share_.stride))
        , expert(share_.begin < share_.end ? groups_.expert(group) : 0)
    {
        settle();
    }

    __device__ __forceinline__ bool is_at_end() const
    {
        return granule >= last;
    }

    __device__ __forceinline__ void advance()
    {
        granule += blockDim.x / 32;
        settle();
    }

    __device__ __forceinline__ void settle()
    {
        while (granule >= last && (group + 1) * share.stride < share.end)
        {
            ++group;
            granule = threadIdx.x / 32;
            last = min(share.granules, share.end - group * share.stride);
            expert = groups.expert(group);
        }
    }
};

// Which rows of an expert's weight a granule is: 16 that lie together, or 8 of the gate and the 8 of up that belong to
// them.
template <bool kGateUp>
struct Rows
{
    static constexpr int kFirst = kGateUp ? kGranule / 2 : kGranule;

    // Rows between the second 8 of a granule and the place that they would have next to the first 8.
    static __device__ __forceinline__ int64_t gap(Product const& p)
    {
        return kGateUp ? p.outputs / 2 - kGranule / 2 : 0;
    }
};

} // namespace moe
} // namespace dflash
