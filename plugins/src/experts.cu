// A mixture of experts' feed-forward for few rows (tokens): bound by reading, once, the experts that any row chose.
//
// Four kernels: the routing, one block; both products, each over the groups that the routing made (an expert, and up to
// a tile of the rows that chose it); and the sum over each row's experts. How the work is divided is decided on the
// device: every multiprocessor reads equally much of the experts that were chosen, however many these are.
//
// A product's warp takes 16 rows of a weight, a granule, and all of their inputs, so that no sum leaves it.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"

#include <algorithm>
#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kMostRows = DFLASH_MOE_MOST_ROWS;
constexpr int kMostExperts = 256;
constexpr int kMostTopK = 32; // a lane each
constexpr unsigned kAll = 0xffffffffu;

// -- what the routing leaves to the kernels after it ------------------------------------------------------------------

// Rows that chose one expert: places first..first + tokens - 1 of the pairs of row and expert, sorted by expert.
struct Group
{
    int32_t expert; // of this rank's
    int32_t first;
    int32_t tokens;
    int32_t unused;
};

struct Route
{
    int32_t* group_count;
    Group* groups;
    int32_t* rows; // [pairs] of each place
    int32_t* places; // [N, k]; -1: an expert of another rank
    float* shares; // [N, k]
};

// How the workspace is divided. h: what the experts' second product takes; y: what it gives.
struct Workspace
{
    Route route;
    void* h; // [pairs, F]
    void* y; // [pairs, H]
    size_t bytes;

    Workspace(dflash_moe_params const& p, void* start)
    {
        auto* at = static_cast<unsigned char*>(start);
        size_t used = 0;
        auto const take = [&](size_t size)
        {
            void* const taken = at + used;
            used += (size + 15) / 16 * 16;
            return taken;
        };
        size_t const pairs = static_cast<size_t>(p.rows) * p.top_k;
        // Tiles have 8 rows or more, and each expert's last one may be smaller.
        size_t const groups = std::min<size_t>(p.count, pairs) + pairs / 8;
        route.group_count = static_cast<int32_t*>(take(sizeof(int32_t)));
        route.groups = static_cast<Group*>(take(groups * sizeof(Group)));
        route.rows = static_cast<int32_t*>(take(pairs * sizeof(int32_t)));
        route.places = static_cast<int32_t*>(take(pairs * sizeof(int32_t)));
        route.shares = static_cast<float*>(take(pairs * sizeof(float)));
        h = take(pairs * p.columns * 2);
        y = take(pairs * p.hidden * 2);
        bytes = used;
    }
};

// -- the routing ------------------------------------------------------------------------------------------------------

constexpr int kRouteThreads = 1024;

// Floats as integers of the same order. Both zeros are one number.
__device__ __forceinline__ uint32_t ordered(float x)
{
    uint32_t const bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t x)
{
    return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x);
}

// The sum of x over the threads before this one, and over all; each warp has a place in `sums`.
__device__ __forceinline__ int scan(int x, int* sums, int& total)
{
    int const lane = threadIdx.x % 32;
    int sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
    {
        int const other = __shfl_up_sync(kAll, sum, step);
        sum += lane >= step ? other : 0;
    }
    __syncthreads();
    if (lane == 31)
    {
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    int before = 0;
    total = 0;
    for (int warp = 0; warp < kRouteThreads / 32; ++warp)
    {
        before += warp < static_cast<int>(threadIdx.x) / 32 ? sums[warp] : 0;
        total += sums[warp];
    }
    return before + sum - x;
}

template <typename L>
__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(dflash_moe_params const p, Route const route, int const tile)
{
    constexpr int kWords = kMostRows / 32;
    __shared__ uint32_t chosen_by[kMostExperts][kWords + 1]; // a bit for each row
    __shared__ int32_t first_place[kMostExperts];
    __shared__ int sums[kRouteThreads / 32];

    begin();
    for (int i = threadIdx.x; i < p.count * (kWords + 1); i += kRouteThreads)
    {
        chosen_by[i / (kWords + 1)][i % (kWords + 1)] = 0;
    }
    __syncthreads();

    int const lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < p.rows; row += kRouteThreads / 32)
    {
        constexpr int kOwn = kMostExperts / 32;
        L const* const logits = static_cast<L const*>(p.logits) + static_cast<int64_t>(row) * p.experts;
        uint32_t keys[kOwn]; // 0: chosen already, or none
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const expert = lane + i * 32;
            float const logit = expert < p.experts ? to_float(logits[expert]) : -INFINITY;
            keys[i] = expert < p.experts ? ordered(logit) : 0;
            largest = fmaxf(largest, logit);
        }
        float sum = 0.f; // of what the shares are divided by
        largest = warp_max(largest);
        if (!p.normalized)
        {
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
            {
                sum += keys[i] ? expf(from_ordered(keys[i]) - largest) : 0.f;
            }
            sum = warp_sum(sum);
        }
        int own_expert = 0; // the lane-th of those chosen
        float own_share = 0.f;
        for (int k = 0; k < p.top_k; ++k)
        {
            uint32_t best = keys[0];
#pragma unroll
            for (int i = 1; i < kOwn; ++i)
            {
                best = max(best, keys[i]);
            }
            best = __reduce_max_sync(kAll, best);
            unsigned expert = kMostExperts - 1;
#pragma unroll
            for (int i = kOwn - 1; i >= 0; --i)
            {
                expert = keys[i] == best ? lane + i * 32 : expert;
            }
            expert = __reduce_min_sync(kAll, expert);
            float const share = expf(from_ordered(best) - largest);
            sum += p.normalized ? share : 0.f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
            {
                keys[i] = lane + i * 32 == static_cast<int>(expert) ? 0 : keys[i];
            }
            if (lane == k)
            {
                own_expert = static_cast<int>(expert);
                own_share = share;
            }
        }
        if (lane < p.top_k)
        {
            int const expert = own_expert - p.first;
            bool const is_own = expert >= 0 && expert < p.count;
            route.shares[row * p.top_k + lane] = own_share / sum;
            route.places[row * p.top_k + lane] = is_own ? expert : -1; // for now
            if (is_own)
            {
                atomicOr(&chosen_by[expert][row / 32], 1u << row % 32);
            }
        }
    }
    __syncthreads();

    // An expert's rows, in order, lie behind those of the experts before it.
    int const expert = threadIdx.x;
    int rows = 0;
    if (expert < p.count)
    {
        for (int word = 0; word < kWords; ++word)
        {
            rows += __popc(chosen_by[expert][word]);
        }
    }
    int pairs = 0, groups = 0;
    int const first = scan(rows, sums, pairs);
    int const first_group = scan((rows + tile - 1) / tile, sums, groups);
    if (expert < p.count)
    {
        first_place[expert] = first;
        for (int i = 0; i * tile < rows; ++i)
        {
            route.groups[first_group + i] = {expert, first + i * tile, min(tile, rows - i * tile), 0};
        }
    }
    if (threadIdx.x == 0)
    {
        *route.group_count = groups;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < p.rows * p.top_k; pair += kRouteThreads)
    {
        int const row = pair / p.top_k, of = route.places[pair];
        if (of >= 0)
        {
            int place = first_place[of] + __popc(chosen_by[of][row / 32] & ((1u << row % 32) - 1));
            for (int word = 0; word < row / 32; ++word)
            {
                place += __popc(chosen_by[of][word]);
            }
            route.places[pair] = place;
            route.rows[place] = row;
        }
    }
}

// -- MXFP4 ------------------------------------------------------------------------------------------------------------

// E2M1 has 2 bits of exponent with bias 1 and 1 of fraction. Put where the wider type has its exponent's low bits, they
// are the number times a power of two, subnormal ones too; a product takes that away and brings the scale.
template <typename T>
struct Mxfp4
{
    static constexpr bool kIsHalf = std::is_same_v<T, __half>;
    static constexpr uint32_t kMostScale = 128; // larger ones take a second factor, and FP16 a third

    // The eight numbers of a word as pairs (0, 4), (1, 5), (2, 6), (3, 7).
    static __device__ __forceinline__ void spread(uint32_t word, uint32_t (&pairs)[4])
    {
        uint32_t const high = word >> 8;
        pairs[0] = place<0>(word);
        pairs[1] = place<4>(word);
        pairs[2] = place<0>(high);
        pairs[3] = place<4>(high);
    }

    // Of each half of a word, the four bits from kFrom on.
    template <int kFrom>
    static __device__ __forceinline__ uint32_t place(uint32_t word)
    {
        if constexpr (kIsHalf)
        {
            return (word << (12 - kFrom) & 0x80008000u) | (word << (9 - kFrom) & 0x0e000e00u);
        }
        // Both shifts are one product.
        return (word & 0x000f000fu << kFrom) * ((1u << (12 - kFrom)) + (1u << (6 - kFrom))) & 0x81c081c0u;
    }

    // What makes such pairs the numbers times 2^(scale - 127), up to kMostScale.
    static __device__ __forceinline__ uint32_t factor(uint32_t scale)
    {
        if constexpr (kIsHalf)
        {
            float const power = __uint_as_float((scale + 14) << 23);
            return packed<T>(power, power);
        }
        return (scale + 126) * 0x00800080u;
    }

    // What is left of a larger scale for the second (0) and the third (1) factor.
    static __device__ __forceinline__ uint32_t excess(uint32_t scale, int which)
    {
        constexpr int kMost = kIsHalf ? 15 : 127;
        int const power = min(max(static_cast<int>(scale - kMostScale) - which * kMost, 0), kMost);
        float const factor = scale == 255 ? __uint_as_float(0x7fc00000u) : exp2f(static_cast<float>(power));
        return packed<T>(factor, factor);
    }

    static __device__ __forceinline__ void multiply(uint32_t (&pairs)[4], uint32_t by)
    {
        using Two = typename Pair<T>::type;
#pragma unroll
        for (uint32_t& pair : pairs)
        {
            Two const product = __hmul2(reinterpret_cast<Two const&>(pair), reinterpret_cast<Two const&>(by));
            pair = reinterpret_cast<uint32_t const&>(product);
        }
    }

    static __device__ __forceinline__ void multiply_excess(uint32_t (&pairs)[4], uint32_t scale)
    {
        multiply(pairs, excess(scale, 0));
        multiply(pairs, excess(scale, 1));
    }
};

// -- the products -----------------------------------------------------------------------------------------------------

constexpr int kMostWarps = 16;
constexpr int kLeastWarps = 4;
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit
constexpr int kUnit = kGranule * kLine; // bytes that a warp loads at a time
constexpr int kUnits = 4; // of a warp's ring

struct Product
{
    Route route;
    void const* weight; // [E, outputs, inputs]: numbers, or MXFP4's blocks
    uint8_t const* scales; // [E, outputs, inputs / 32], or null
    void const* bias; // [E, outputs], or null
    void const* x; // of gate and up [N, inputs]; of down [pairs, inputs]
    void* out; // of gate and up [pairs, outputs / 2]; of down [pairs, outputs]
    int inputs;
    int outputs;
    bool is_clamped;
    float alpha;
    float limit;
};

// Where things lie in shared memory: each warp's ring and scales, then the tokens' inputs.
struct Layout
{
    int row_bytes; // of the weight
    int units; // of a row, the last one's end past the row's perhaps
    int steps; // halves of units that have inputs
    int scale_bytes; // of a granule
    int scale_buffers; // granules that a warp's ring can reach into, and the one that it is at
    int warp_bytes;
    int token_bytes; // inputs, zeros up to the last step's end
    int pitch; // from one token's inputs to the next one's: no two meet in one bank

    __host__ __device__ Layout(int inputs, bool is_packed)
        : row_bytes(is_packed ? inputs / 2 : inputs * 2)
        , units((row_bytes + kLine - 1) / kLine)
        , steps((row_bytes + kLine / 2 - 1) / (kLine / 2))
        , scale_bytes(is_packed ? kGranule * (inputs / 32) : 0)
        , scale_buffers((kUnits + units - 1) / units + 1)
        , warp_bytes(kUnits * kUnit + scale_buffers * scale_bytes)
        , token_bytes(steps * (kLine / 2) * (is_packed ? 4 : 1))
        , pitch((token_bytes + 127) / 128 * 128 + 64)
    {
    }
};

__device__ __forceinline__ void copy_async_16(uint32_t to, void const* from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0));
}

__device__ __forceinline__ void copy_async_8(uint32_t to, void const* from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}

// Walks the granules of a warp: in each group that its block has a share of, every warps-th one.
struct Cursor
{
    Route const& route;
    int const granules; // of a group
    int const end; // of the block's share, counted over all groups
    int group;
    int granule;
    int last; // + 1, of the block's share of the group
    int expert;

    __device__ __forceinline__ Cursor(Route const& route_, int granules_, int begin, int end_)
        : route(route_)
        , granules(granules_)
        , end(end_)
        , group(begin / granules_)
        , granule(begin % granules_ + static_cast<int>(threadIdx.x) / 32)
        , last(min(granules_, end_ - group * granules_))
        , expert(begin < end_ ? __ldcg(&route_.groups[group].expert) : 0)
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
        while (granule >= last && (group + 1) * granules < end)
        {
            ++group;
            granule = threadIdx.x / 32;
            last = min(granules, end - group * granules);
            expert = __ldcg(&route.groups[group].expert);
        }
    }
};

// kPacked: the weight is MXFP4. kGateUp: the first product, whose granules are 8 rows of the gate and the 8 rows of up
// that belong to them, and which ends with the activation.
template <typename T, bool kPacked, int kTokens, bool kGateUp>
__global__ void __launch_bounds__(kMostWarps * 32, 1) product_kernel(Product const p)
{
    using Format = Mxfp4<T>;
    constexpr int kTiles = kTokens / 8;
    constexpr int kStepBytes = kPacked ? 256 : 64; // of a token's inputs, that half of a unit meets
    constexpr int kFirstRows = kGateUp ? kGranule / 2 : kGranule; // of a granule that lie together

    extern __shared__ __align__(128) unsigned char shared[];

    // The routing has to be known. To the second product it is: the first one waited for it before letting this begin.
    // What this one reads of it before its own wait comes from the L2 cache, where it surely is.
    if constexpr (kGateUp)
    {
        wait();
    }
    trigger();
    Layout const layout(p.inputs, kPacked);
    int const warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const granules = p.outputs / kGranule;
    int const total = __ldcg(p.route.group_count) * granules;
    int const begin = share_begin(total, blockIdx.x, gridDim.x), end = share_begin(total, blockIdx.x + 1, gridDim.x);

    // -- loading: four rows of 128 bytes at a time, each second row's halves swapped
    unsigned char* const own = shared + warp * layout.warp_bytes;
    unsigned char* const own_scales = own + kUnits * kUnit;
    uint32_t const ring = shared_address(own);
    uint32_t const ring_at = ring + lane / 8 * kLine + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
    uint32_t const scales_at = ring + kUnits * kUnit;
    int const blocks = p.inputs / 32;
    int const row_bytes = layout.row_bytes;
    int64_t const second = kGateUp ? p.outputs / 2 - kGranule / 2 : 0; // rows to up's from where it were
    Cursor load(p.route, granules, begin, end);
    int load_unit = 0, load_slot = 0, load_buffer = 0;
    char const* load_from = nullptr;
    auto const load_next = [&]
    {
        if (!load.is_at_end())
        {
            if (load_unit == 0)
            {
                int64_t const row = static_cast<int64_t>(load.expert) * p.outputs + load.granule * kFirstRows;
                load_from = static_cast<char const*>(p.weight) + (row + lane / 8) * row_bytes + lane % 8 * 16;
                if constexpr (kPacked)
                {
                    uint8_t const* const from = p.scales + row * blocks;
                    uint32_t const to = scales_at + load_buffer * layout.scale_bytes;
#pragma unroll 2
                    for (int i = lane; i < 2 * blocks; i += 32)
                    {
                        copy_async_8(to + i * 8, from + i * 8 + (i < blocks ? 0 : second * blocks));
                    }
                    load_buffer = load_buffer + 1 == layout.scale_buffers ? 0 : load_buffer + 1;
                }
            }
            bool const is_there = load_unit * kLine + lane % 8 * 16 < row_bytes;
            char const* const from = load_from + (is_there ? load_unit * kLine : 0);
#pragma unroll
            for (int i = 0; i < kGranule / 4; ++i)
            {
                copy_async_16(ring_at + load_slot * kUnit + i * 4 * kLine,
                    from + (i * 4 + (i < 2 ? 0 : second)) * row_bytes, is_there);
            }
            load_slot = load_slot + 1 == kUnits ? 0 : load_slot + 1;
            if (++load_unit == layout.units)
            {
                load_unit = 0;
                load.advance();
            }
        }
        commit_copies(); // empty ones at the end, so that the count of pending ones stays right
    };
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i)
    {
        load_next();
    }
    if constexpr (!kGateUp)
    {
        wait();
    }

    // -- multiplying: lane l has parts of the rows l / 4 and l / 4 + 8 of a granule, and of the inputs of token l / 4
    unsigned char* const inputs = shared + warps * layout.warp_bytes;
    int const quad = lane / 4, part = lane % 4;
    uint32_t const at = quad * kLine + (part ^ (quad % 2 * 4)) * 16;
    int slot = 0, buffer = 0;
    for (int from = begin; from < end;)
    {
        int const group_index = from / granules;
        Group const group = p.route.groups[group_index];
        int const to = min(end, (group_index + 1) * granules);

        // In the order in which lanes take them: of a step the parts' first 16 bytes, then their second ones. Where a
        // pair is numbers 0 and 4 of a word of the weight, it is so here.
        __syncthreads();
        int const chunks = p.inputs / 8;
        for (int chunk = threadIdx.x; chunk < layout.token_bytes / 16; chunk += blockDim.x)
        {
            int const place = kPacked ? chunk / 16 * 256 + chunk % 4 * 64 + chunk / 4 % 4 * 16 : chunk * 16;
#pragma unroll
            for (int first = 0; first < kTokens; first += 8)
            {
                uint4 taken[8];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                {
                    taken[i] = {};
                    if (first + i < group.tokens && chunk < chunks)
                    {
                        int const pair = group.first + first + i;
                        int64_t const row = kGateUp ? p.route.rows[pair] : pair;
                        taken[i] = reinterpret_cast<uint4 const*>(static_cast<T const*>(p.x) + row * p.inputs)[chunk];
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; ++i)
                {
                    uint4 const v = taken[i];
                    if (first + i < group.tokens)
                    {
                        *reinterpret_cast<uint4*>(inputs + (first + i) * layout.pitch + place) = !kPacked
                            ? v
                            : uint4{__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                  __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
                    }
                }
            }
        }
        __syncthreads();

        int const tiles = kTiles == 1 ? 1 : (group.tokens + 7) / 8;
        for (int granule = from % granules + warp; granule < to - group_index * granules; granule += warps)
        {
            int const row = granule * kFirstRows + quad, second_row = row + 8 + static_cast<int>(second);
            float bias[2] = {};
            if (p.bias)
            {
                T const* const biases = static_cast<T const*>(p.bias) + static_cast<int64_t>(group.expert) * p.outputs;
                bias[0] = to_float(biases[row]);
                bias[1] = to_float(biases[second_row]);
            }
            uint8_t const* const scales = own_scales + buffer * layout.scale_bytes + quad * blocks;
            float c[kTiles][4] = {};
            for (int unit = 0; unit < layout.units; ++unit)
            {
                wait_for_copies<kUnits - 1>();
                __syncwarp();
                unsigned char const* const loaded = own + slot * kUnit;
                uint4 upper[2], lower[2];
                uint32_t scale[2][2] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    if constexpr (kPacked)
                    {
                        // Past a row's end its numbers are zeros; any scale of its own will do.
                        int const block = min((unit * 2 + half) * 4 + part, blocks - 1);
                        scale[half][0] = scales[block];
                        scale[half][1] = scales[block + 8 * blocks];
                    }
                    upper[half] = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64));
                    lower[half] = *reinterpret_cast<uint4 const*>(loaded + (at ^ half * 64) + 8 * kLine);
                }
                slot = slot + 1 == kUnits ? 0 : slot + 1;
                __syncwarp();
                load_next();
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    int const step = unit * 2 + half;
                    if (step >= layout.steps)
                    {
                        break;
                    }
                    unsigned char const* const b_from = inputs + quad * layout.pitch + part * 16 + step * kStepBytes;
                    if constexpr (kPacked)
                    {
                        uint32_t const scale_u = scale[half][0], scale_l = scale[half][1];
                        uint32_t const u_words[4] = {upper[half].x, upper[half].y, upper[half].z, upper[half].w};
                        uint32_t const l_words[4] = {lower[half].x, lower[half].y, lower[half].z, lower[half].w};
                        auto const multiply_step = [&](auto are_large)
                        {
                            constexpr bool kAreLarge = decltype(are_large)::value;
                            constexpr uint32_t kMost = kAreLarge ? Format::kMostScale : 255;
                            uint32_t const factor_u = Format::factor(min(scale_u, kMost));
                            uint32_t const factor_l = Format::factor(min(scale_l, kMost));
#pragma unroll
                            for (int word = 0; word < 4; ++word)
                            {
                                uint32_t u[4], l[4];
                                Format::spread(u_words[word], u);
                                Format::spread(l_words[word], l);
                                Format::multiply(u, factor_u);
                                Format::multiply(l, factor_l);
                                if constexpr (kAreLarge)
                                {
                                    Format::multiply_excess(u, scale_u);
                                    Format::multiply_excess(l, scale_l);
                                }
#pragma unroll
                                for (int tile = 0; tile < kTiles; ++tile)
                                {
                                    if (tile < tiles)
                                    {
                                        uint4 const b = *reinterpret_cast<uint4 const*>(
                                            b_from + tile * 8 * layout.pitch + word * 64);
                                        multiply_add<T>(c[tile], {u[0], l[0], u[1], l[1]}, b.x, b.y);
                                        multiply_add<T>(c[tile], {u[2], l[2], u[3], l[3]}, b.z, b.w);
                                    }
                                }
                            }
                        };
                        if (__any_sync(kAll, max(scale_u, scale_l) > Format::kMostScale))
                        {
                            multiply_step(std::true_type());
                        }
                        else
                        {
                            multiply_step(std::false_type());
                        }
                    }
                    else
                    {
                        uint4 const u = upper[half], l = lower[half];
#pragma unroll
                        for (int tile = 0; tile < kTiles; ++tile)
                        {
                            if (tile < tiles)
                            {
                                uint4 const b = *reinterpret_cast<uint4 const*>(b_from + tile * 8 * layout.pitch);
                                multiply_add<T>(c[tile], {u.x, l.x, u.y, l.y}, b.x, b.y);
                                multiply_add<T>(c[tile], {u.z, l.z, u.w, l.w}, b.z, b.w);
                            }
                        }
                    }
                }
            }
            buffer = buffer + 1 == layout.scale_buffers ? 0 : buffer + 1;

            // A lane has two tokens' results of its two rows: a gate and its up, or two outputs.
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                {
                    int const token = tile * 8 + part * 2 + i;
                    if (token >= group.tokens)
                    {
                        continue;
                    }
                    float const upper = rounded<T>(c[tile][i] + bias[0]), lower = rounded<T>(c[tile][2 + i] + bias[1]);
                    int64_t const pair = group.first + token;
                    T* const out = static_cast<T*>(p.out);
                    if constexpr (kGateUp)
                    {
                        float const gate = p.is_clamped ? fminf(upper, p.limit) : upper;
                        float const up = p.is_clamped ? fminf(fmaxf(lower, -p.limit), p.limit) + 1.f : lower;
                        float const slope = p.is_clamped ? p.alpha : 1.f;
                        out[pair * (p.outputs / 2) + row] = from_float<T>(gate / (1.f + expf(-slope * gate)) * up);
                    }
                    else
                    {
                        out[pair * p.outputs + row] = from_float<T>(upper);
                        out[pair * p.outputs + second_row] = from_float<T>(lower);
                    }
                }
            }
        }
        from = to;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// -- the sum ----------------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 128;
constexpr int kVector = 8;

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(dflash_moe_params const p, Route const route, void const* const y)
{
    using Row = Vector<T, kVector>;
    begin();
    int const row = blockIdx.x, at = (blockIdx.y * kSumThreads + threadIdx.x) * kVector;
    if (at >= p.hidden)
    {
        return;
    }
    float sum[kVector] = {};
    for (int k = 0; k < p.top_k; ++k)
    {
        int const place = route.places[row * p.top_k + k];
        float const share = route.shares[row * p.top_k + k];
        if (place >= 0)
        {
            T const* const from = static_cast<T const*>(y) + static_cast<int64_t>(place) * p.hidden;
            Row const part = load_vector<T, kVector>(from + at);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                sum[i] += share * to_float(part.at[i]);
            }
        }
    }
    Row out;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
    {
        out.at[i] = from_float<T>(sum[i]);
    }
    store_vector(static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.hidden + at, out);
}

// -- launching --------------------------------------------------------------------------------------------------------

struct Device
{
    int processors = 0;
    int shared_bytes = 0; // that a block can have

    cudaError_t read()
    {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess)
        {
            error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        }
        if (error == cudaSuccess)
        {
            error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        }
        return error;
    }
};

int warps_that_fit(Device const& device, int inputs, bool is_packed, int tokens)
{
    Layout const layout(inputs, is_packed);
    return std::min(kMostWarps, (device.shared_bytes - tokens * layout.pitch) / layout.warp_bytes);
}

template <typename T, bool kPacked, int kTokens, bool kGateUp>
cudaError_t launch_product(Product const& p, Device const& device, cudaStream_t stream)
{
    constexpr auto kernel = product_kernel<T, kPacked, kTokens, kGateUp>;
    cudaError_t const error = allow_shared_bytes<kernel>(device.shared_bytes);
    if (error)
    {
        return error;
    }
    Layout const layout(p.inputs, kPacked);
    int const warps = warps_that_fit(device, p.inputs, kPacked, kTokens);
    int const bytes = warps * layout.warp_bytes + kTokens * layout.pitch;
    return launch_kernel(kernel, dim3(device.processors), warps * 32, bytes, stream, p);
}

template <typename T, bool kPacked, int kTokens>
cudaError_t launch_products(
    dflash_moe_params const& p, Workspace const& space, Device const& device, cudaStream_t stream)
{
    Product product = {};
    product.route = space.route;
    product.weight = p.gate_up;
    product.scales = p.gate_up_scales;
    product.bias = p.gate_up_bias;
    product.x = p.x;
    product.out = space.h;
    product.inputs = p.hidden;
    product.outputs = 2 * p.columns;
    product.is_clamped = p.clamped != 0;
    product.alpha = p.alpha;
    product.limit = p.limit;
    cudaError_t const error = launch_product<T, kPacked, kTokens, true>(product, device, stream);
    if (error)
    {
        return error;
    }
    product.weight = p.down;
    product.scales = p.down_scales;
    product.bias = p.down_bias;
    product.x = space.h;
    product.out = space.y;
    product.inputs = p.columns;
    product.outputs = p.hidden;
    return launch_product<T, kPacked, kTokens, false>(product, device, stream);
}

template <typename T, int kTokens>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    Workspace const space(p, workspace);
    auto const route = p.logits_dtype == DFLASH_FP32 ? route_kernel<float>
        : p.logits_dtype == DFLASH_FP16              ? route_kernel<__half>
                                                     : route_kernel<__nv_bfloat16>;
    cudaError_t error = launch_kernel(route, dim3(1), kRouteThreads, 0, stream, p, space.route, kTokens);
    if (error == cudaSuccess)
    {
        error = p.packed ? launch_products<T, true, kTokens>(p, space, device, stream)
                         : launch_products<T, false, kTokens>(p, space, device, stream);
    }
    if (error == cudaSuccess)
    {
        int const blocks = (p.hidden / kVector + kSumThreads - 1) / kSumThreads;
        error = launch_kernel(sum_kernel<T>, dim3(p.rows, blocks), kSumThreads, 0, stream, p, space.route,
            static_cast<void const*>(space.y));
    }
    return error;
}

bool do_fit(dflash_moe_params const& p, Device const& device, int tokens)
{
    return warps_that_fit(device, std::max(p.hidden, p.columns), p.packed, tokens) >= kLeastWarps;
}

// More than 8 rows may choose one expert, whose weight is then read once for 16.
int tokens_of(dflash_moe_params const& p, Device const& device)
{
    return p.rows > 8 && do_fit(p, device, 16) ? 16 : 8;
}

bool is_computed(dflash_moe_params const& p, Device const& device)
{
    int const multiple = p.packed ? 32 : 16;
    return p.rows <= kMostRows && p.experts <= kMostExperts && p.top_k >= 1
        && p.top_k <= std::min(kMostTopK, p.experts) && p.first >= 0 && p.count >= 1
        && p.first + p.count <= p.experts && p.hidden >= multiple && p.columns >= multiple && p.hidden % multiple == 0
        && p.columns % multiple == 0 && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16)
        && p.logits_dtype >= DFLASH_FP16 && p.logits_dtype <= DFLASH_FP32 && do_fit(p, device, 8);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_moe_workspace(dflash_moe_params const* p, size_t* bytes)
{
    dflash::Device device;
    cudaError_t const error = device.read();
    if (error)
    {
        return error;
    }
    if (!dflash::is_computed(*p, device))
    {
        return cudaErrorInvalidValue;
    }
    *bytes = dflash::Workspace(*p, nullptr).bytes;
    return cudaSuccess;
}

extern "C" cudaError_t dflash_moe(
    dflash_moe_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    Device device;
    cudaError_t const error = device.read();
    if (error)
    {
        return error;
    }
    if (!is_computed(*p, device) || workspace_bytes < Workspace(*p, nullptr).bytes)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    if (p->dtype == DFLASH_FP16)
    {
        return tokens_of(*p, device) == 8 ? launch_moe<__half, 8>(*p, workspace, device, stream)
                                  : launch_moe<__half, 16>(*p, workspace, device, stream);
    }
    return tokens_of(*p, device) == 8 ? launch_moe<__nv_bfloat16, 8>(*p, workspace, device, stream)
                              : launch_moe<__nv_bfloat16, 16>(*p, workspace, device, stream);
}
