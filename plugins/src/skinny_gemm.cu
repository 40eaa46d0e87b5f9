// Matrix products of a few rows (tokens) with large weights: bound by reading the weights, once.
//
// Each cluster of two blocks takes its share of the weight's rows, and the two blocks, with their eight warps each, share
// the inputs of each row. So all multiprocessors read equally much, in one launch, and no sum depends on how many
// tokens there are: a token's result is the same to the bit alone and among others.
//
// Weights reach shared memory, by a warp that does nothing else, before the kernel waits for the one before it: between two
// products, however small the kernels in between, the memory goes on reading.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

#include <algorithm>
#include <cooperative_groups.h>
#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32; // that multiply; one more warp loads
constexpr int kCluster = 2;
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit: a line of the cache
constexpr int kUnit = kGranule * kLine; // bytes that a warp multiplies at a time
constexpr int kStage = kWarps * kUnit; // bytes that come at a time: a unit for each warp
constexpr int kInFlight = 3; // stages that are asked for at once; see `Block::load`
constexpr int kSlots = kWarps / 2; // sums of two warps each, to be added up

// How a block goes about a pass: kGranules of its rows, for at most kTokens tokens, of whose inputs a unit meets
// kInputBytes each, a norm's weights for as many beside them.
template <int kGranules, int kTokens, int kInputBytes>
struct Layout
{
    static constexpr int kRows = kGranules * kGranule;

    // Shared memory: the ring of stages, each warp's inputs, the sums, and what the other block sends. It is more than
    // half of a multiprocessor's: two blocks of one product must not share one, or they would take twice the others'
    // time. Small kernels may still stand beside a block.
    static constexpr int kLimit = 212 * 1024;
    static constexpr int kMostStages = 12;
    static constexpr int kInputs = kTokens * kInputBytes; // bytes of a run; a warp has two, used by turns
    static constexpr int kInputsBytes = kWarps * 2 * (kInputs + kInputBytes);
    static constexpr int kSlot = kRows * kTokens; // numbers
    static constexpr int kSumBytes = kSlots * kSlot * static_cast<int>(sizeof(float));
    static constexpr int kInbox = kSlot / 2; // numbers; there are two, used by turns
    static constexpr int kInboxBytes = 2 * kInbox * static_cast<int>(sizeof(float));
    static constexpr int kSquaresBytes = (kWarps + kCluster) * kTokens * static_cast<int>(sizeof(float));
    static constexpr int kBarrierBytes = (kMostStages * 2 + kWarps * 2 + 3) * 8;
    static constexpr int kOther = kInputsBytes + kSumBytes + kInboxBytes + kSquaresBytes + kBarrierBytes;
    static constexpr int kStages = (kLimit - kOther) / kStage;
    static constexpr int kRingBytes = kStages * kStage;
    static constexpr int kBytes = kRingBytes + kOther;

    // Results go by items, one a thread: of two tokens two of a granule's rows each, which are a gate and an up of swiglu.
    static constexpr int kItemNumbers = 4;
    static constexpr int kItems = kSlot / 2 / kItemNumbers; // of each block of the cluster
    static_assert(kItems <= kThreads && kInFlight <= kStages && kStages <= kMostStages);
};

__device__ __forceinline__ void copy_bulk(uint32_t to, void const* from, int bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Into the shared memory of a block of the cluster, whose barrier counts the bytes. Addresses are the cluster's.
template <int kCount>
__device__ __forceinline__ void send(uint32_t to, float const (&x)[kCount], uint32_t barrier)
{
    if constexpr (kCount == 1)
    {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x[0]), "r"(barrier)
            : "memory");
    }
    else
    {
        static_assert(kCount == 4);
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
            "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
            : "memory");
    }
}

// Where a block of the cluster has what this block has at `address`.
__device__ __forceinline__ uint32_t address_at(uint32_t address, int rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Not from the L1 cache, which may have what was there before: a kernel that begins early does not empty it.
template <typename T>
__device__ __forceinline__ T load_new(T const* from)
{
    unsigned short const bits = __ldcg(reinterpret_cast<unsigned short const*>(from));
    return reinterpret_cast<T const&>(bits);
}

// Two warps wait for each other.
__device__ __forceinline__ void meet(int pair)
{
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// A tile of a tensor map, from its column and its first row on. Of its rows, each 128 bytes, the 16-byte parts are at the
// places that `swizzled` says; rows past the tensor's are zeros.
__device__ __forceinline__ void copy_tile(uint32_t to, CUtensorMap const& map, int column, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(0), "r"(barrier)
        : "memory");
}

// A unit of each warp, from a row and a line of a weight on: see `map_weight`.
__device__ __forceinline__ void copy_stage(uint32_t to, CUtensorMap const& map, int row, int line, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(0), "r"(row), "r"(0), "r"(line), "r"(barrier)
        : "memory");
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet_all()
{
    asm volatile("bar.sync %0, %1;" ::"n"(kSlots + 1), "n"(kThreads) : "memory");
}

__device__ __forceinline__ int swizzled(int row, int part)
{
    return row * kLine + (part ^ row % 8) * 16;
}

// Sixteen bytes of a weight's row as registers of pairs: eight 16-bit numbers, or sixteen E4M3 ones made FP16.
template <typename T, typename W>
struct Fragment;

template <typename T>
struct Fragment<T, T>
{
    static constexpr int kPairs = 4;

    static __device__ __forceinline__ void decode(uint4 const& bytes, uint32_t (&pairs)[kPairs])
    {
        pairs[0] = bytes.x;
        pairs[1] = bytes.y;
        pairs[2] = bytes.z;
        pairs[3] = bytes.w;
    }
};

// E4M3 numbers are all FP16 numbers, and one instruction makes two of them.
template <typename T>
struct Fragment<T, E4M3>
{
    static constexpr int kPairs = 8;

    static __device__ __forceinline__ void decode(uint4 const& bytes, uint32_t (&pairs)[kPairs])
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
};

// BF16 inputs of a run, those of token l / 4 in lane l, become FP16 ones times a power of two that brings the token's
// largest to about 2^14: exact, but for less than 2^-38 of the largest. `back` undoes it for those two tokens whose sums the
// lane has. Zeros, infinities and NaNs stay what they are.
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

// What the kernel is given.
struct Launch
{
    dflash_skinny_gemm_params p;
    CUtensorMap weight;
    CUtensorMap inputs;
    int lines; // of 128 bytes in a weight's row
    int granules, more; // that a cluster has, and how many of the first ones have one more
    float per_input; // 1 / p.inputs
    uint32_t zero; // which the compiler does not know to be one: see `Block::release`
};

// What a cluster has of the weight's granules, and a block of its lines.
struct Share
{
    int first, count; // granules
    int runs; // of lines, one for each warp of the cluster

    __device__ __forceinline__ Share(Launch const& launch, int rank)
    {
        int const index = blockIdx.x / kCluster;
        first = index * launch.granules + min(index, launch.more);
        count = launch.granules + (index < launch.more);
        runs = max(launch.lines - rank * kWarps + kWarps * kCluster - 1, 0) / (kWarps * kCluster);
    }
};

// W: the weights' type.
template <typename T, typename W, int kGranules, int kTokens>
struct Block
{
    static constexpr int kColumns = kLine / static_cast<int>(sizeof(W)); // inputs in one unit
    static constexpr int kInputBytes = kColumns * static_cast<int>(sizeof(T));
    static constexpr int kRunWarps = kWarps * kCluster; // that share the inputs of a row
    static constexpr int kTiles = kTokens / 8;
    static constexpr int kPairs = Fragment<T, W>::kPairs;
    static constexpr bool kDecoded = std::is_same_v<W, E4M3>; // products are FP16 then, whatever T is
    static constexpr bool kToHalf = kDecoded && std::is_same_v<T, __nv_bfloat16>;
    using L = Layout<kGranules, kTokens, kInputBytes>;
    using Two = typename Pair<T>::type;
    using Item = Vector<float, L::kItemNumbers>;

    struct Unit
    {
        uint4 upper[2], lower[2];
    };

    Launch const& launch;
    unsigned char* const shared;
    unsigned char* const inputs = shared + L::kRingBytes;
    unsigned char* const norms = inputs + kWarps * 2 * L::kInputs;
    float* const sums = reinterpret_cast<float*>(inputs + L::kInputsBytes);
    float* const inbox = sums + L::kSumBytes / sizeof(float);
    float* const warp_squares = inbox + L::kInboxBytes / sizeof(float);
    float* const block_squares = warp_squares + kWarps * kTokens;
    uint32_t const barriers = shared_address(block_squares + kCluster * kTokens);
    int const rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const quad = lane / 4, part = lane % 4;
    int const column_warp = rank * kWarps + warp;
    uint32_t const full = barriers, empty = full + L::kStages * 8; // of stages
    uint32_t const own_barriers = empty + L::kStages * 8 + warp * 16; // of inputs
    uint32_t const inbox_barriers = empty + L::kStages * 8 + kWarps * 16;
    uint32_t const squares_barrier = inbox_barriers + 16;
    int stage = 0; // the next one
    uint32_t stage_phase = 0; // of its barriers
    int oldest = 0; // stage that has not been given back
    uint32_t input_phases = 0; // a bit for each of the two barriers

    __device__ __forceinline__ void next_stage()
    {
        if (++stage == L::kStages)
        {
            stage = 0;
            stage_phase ^= 1;
        }
    }

    __device__ __forceinline__ void begin()
    {
        if (lane == 0)
        {
            if (warp == kWarps)
            {
                for (int i = 0; i < L::kStages; ++i)
                {
                    init_barrier(full + i * 8, 1);
                    init_barrier(empty + i * 8, kWarps);
                }
            }
            else
            {
                init_barrier(own_barriers, 1);
                init_barrier(own_barriers + 8, 1);
            }
            if (warp == 0)
            {
                init_barrier(inbox_barriers, 1);
                init_barrier(inbox_barriers + 8, 1);
                init_barrier(squares_barrier, 1);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            if (warp == 0)
            {
                expect_bytes(inbox_barriers, L::kInboxBytes / 2);
                expect_bytes(inbox_barriers + 8, L::kInboxBytes / 2);
            }
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); // this block can be sent to
    }

    // One thread's work: it asks for the stages as the ring has room. A stage is not asked for before all but the last few
    // have come: more than fills the way to the memory only makes everything wait, first of all the inputs, for what is
    // asked for at once comes in no order.
    __device__ __forceinline__ void load()
    {
        Share const share(launch, rank);
        int const granule_rows = launch.p.swiglu ? kGranule / 2 : kGranule;
        int count = 0;
        for (int first = 0; first < share.count; first += kGranules)
        {
            for (int run = 0; run < share.runs; ++run)
            {
                for (int granule = first; granule < min(first + kGranules, share.count); ++granule)
                {
                    if (count >= kInFlight)
                    {
                        int const other = stage - kInFlight;
                        wait_for_phase(full + (other < 0 ? other + L::kStages : other) * 8, stage_phase ^ (other < 0));
                    }
                    wait_for_phase(empty + stage * 8, stage_phase ^ 1);
                    expect_bytes(full + stage * 8, kStage);
                    copy_stage(shared_address(shared) + stage * kStage, launch.weight, (share.first + granule) * granule_rows,
                        rank * kWarps + run * kRunWarps, full + stage * 8);
                    next_stage();
                    ++count;
                }
            }
        }
    }

    // Lane l has parts of the rows l / 4 and l / 4 + 8 of a granule: of a row's eight parts two that lie together.
    __device__ __forceinline__ Unit read_unit()
    {
        wait_for_phase(full + stage * 8, stage_phase);
        unsigned char const* const from = shared + stage * kStage + warp * kUnit;
        Unit unit;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            unit.upper[half] = *reinterpret_cast<uint4 const*>(from + swizzled(quad, part * 2 + half));
            unit.lower[half] = *reinterpret_cast<uint4 const*>(from + swizzled(quad + 8, part * 2 + half));
        }
        next_stage();
        return unit;
    }

    // Gives the oldest unit's stage back. Its numbers must have come, not only been asked for: a copy into the stage passes
    // reads that wait in line, behind those of a residual, say. So the address is made to need what came of them.
    __device__ __forceinline__ void release(uint32_t seen)
    {
        __syncwarp();
        if (lane == 0)
        {
            arrive(empty + oldest * 8 + (seen & launch.zero));
        }
        oldest = oldest + 1 == L::kStages ? 0 : oldest + 1;
    }

    __device__ __forceinline__ void multiply();
};

// All products go through this one code, for what is read first from far away is not only weights but instructions. With
// swiglu a granule is 8 rows of the gate and the 8 rows of up that belong to them. With a norm, inputs are multiplied by its
// weights before the products, sums of products by the inputs' inverse root mean square after.
template <typename T, typename W, int kGranules, int kTokens>
__device__ __forceinline__ void Block<T, W, kGranules, kTokens>::multiply()
{
    // An input times a norm's weight may exceed FP16: each warp then makes its weights smaller by one power of two.
    constexpr bool kScaled = std::is_same_v<T, __half>;

    dflash_skinny_gemm_params const& p = launch.p;
    CUtensorMap const& x_map = launch.inputs;
    bool const is_normed = p.norm_weight != nullptr;
    Share const share(launch, rank);
    int const runs = share.runs, passes = (share.count + kGranules - 1) / kGranules;

    // -- the tokens' inputs, run by run, two runs ahead: lane l takes those of token l / 4 that meet its part of a row
    // Of two runs the warp has room for, so that they are made ready once; a single one stays in registers.
    bool const is_kept = runs <= 2;
    int const input_runs = is_kept ? runs : runs * passes;
    unsigned char* const own_inputs = inputs + warp * 2 * L::kInputs;
    unsigned char* const own_norms = norms + warp * 2 * kInputBytes;
    int load_run = 0;
    auto const expect_inputs = [&](int run, int of_row) // of input_runs, and of the runs of a row
    {
        uint32_t const barrier = own_barriers + run % 2 * 8;
        expect_bytes(barrier, L::kInputs + (is_normed ? kInputBytes : 0));
        if (is_normed)
        {
            // Past the end any numbers will do: they meet zeros.
            int const line = min(column_warp + of_row * kRunWarps, p.inputs / kColumns - 1);
            char const* from = static_cast<char const*>(p.norm_weight) + line * kInputBytes;
            copy_bulk(shared_address(own_norms) + run % 2 * kInputBytes, from, kInputBytes, barrier);
        }
    };
    auto const load_inputs = [&](int run)
    {
#pragma unroll
        for (int i = 0; i < kInputBytes / kLine; ++i)
        {
            copy_tile(shared_address(own_inputs) + run % 2 * L::kInputs + i * kTokens * kLine, x_map,
                (column_warp + load_run * kRunWarps) * kInputBytes + i * kLine,
                own_barriers + run % 2 * 8);
        }
    };
    if (lane == 0)
    {
        for (int run = 0; run < min(input_runs, 2); ++run)
        {
            expect_inputs(run, run); // the norm's weights are constants: they come before the wait
        }
        if (is_normed && warp == 0)
        {
            expect_bytes(squares_barrier, kCluster * kTokens * static_cast<int>(sizeof(float)));
        }
    }
    __syncwarp();
    Two scaled_by{};
    float sum_scale = 1.f;
    if (kScaled && is_normed)
    {
        uint32_t most = 0;
        for (int run = 0; run < runs; ++run)
        {
            int const line = min(column_warp + run * kRunWarps, p.inputs / kColumns - 1);
            uint32_t const* from = static_cast<uint32_t const*>(p.norm_weight) + line * (kColumns / 2) + lane;
#pragma unroll
            for (int i = 0; i < kColumns / 64; ++i)
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
    uint32_t b[kTiles][2][kPairs]; // of both halves of a lane's part
    float back[kTiles][2]; // see to_half
    float squares[kTiles][4] = {}; // of a tile's inputs with all inputs: the diagonal counts
    // Inputs that meet 128 bytes of weights fill a tile of such rows, or two.
    auto const inputs_at = [&](int run, int tile, int i) // the lane's i-th pair, and three more
    {
        int const place = (part * 2 * kPairs + i) / 4;
        unsigned char* const at = own_inputs + run % 2 * L::kInputs + place / 8 * (kTokens * kLine);
        return reinterpret_cast<uint4*>(at + swizzled(tile * 8 + quad, place % 8));
    };
    auto const take_four = [](uint4 const& four, uint32_t (&to)[kPairs], int first)
    {
        to[first] = four.x;
        to[first + 1] = four.y;
        to[first + 2] = four.z;
        to[first + 3] = four.w;
    };
    auto const factors_at = [&](int run) // of tokens, see to_half; where the norm's weights were
    { return reinterpret_cast<float2*>(own_norms + run % 2 * kInputBytes) + part; };
    auto const take_kept = [&](int run)
    {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                take_four(*inputs_at(run, tile, i), b[tile][i / kPairs], i % kPairs);
            }
            if constexpr (kToHalf)
            {
                float2 const two = factors_at(run)[tile * 4];
                back[tile][0] = two.x;
                back[tile][1] = two.y;
            }
        }
    };
    auto const keep = [&](int run)
    {
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                uint32_t const(&from)[kPairs] = b[tile][i / kPairs];
                *inputs_at(run, tile, i)
                    = make_uint4(from[i % kPairs], from[i % kPairs + 1], from[i % kPairs + 2], from[i % kPairs + 3]);
            }
            if (kToHalf && quad == 0)
            {
                factors_at(run)[tile * 4] = make_float2(back[tile][0], back[tile][1]);
            }
        }
        __syncwarp();
    };
    auto const take_inputs = [&](int run, bool is_first_pass)
    {
        wait_for_phase(own_barriers + run % 2 * 8, input_phases >> run % 2 & 1);
        input_phases ^= 1 << run % 2;
        if (is_normed && is_first_pass)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                uint4 x[kTiles];
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
                    x[tile] = *inputs_at(run, tile, i);
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
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
            uint32_t(&x)[2][kPairs] = b[tile];
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                take_four(*inputs_at(run, tile, i), x[i / kPairs], i % kPairs);
            }
            if (is_normed)
            {
#pragma unroll
                for (int i = 0; i < 2 * kPairs; i += 4)
                {
                    auto const four = *reinterpret_cast<uint4 const*>(
                        own_norms + run % 2 * kInputBytes + (part * 2 * kPairs + i) * 4);
                    uint32_t const weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                    {
                        Two weight = reinterpret_cast<Two const&>(weights[j]);
                        if constexpr (kScaled)
                        {
                            weight = __hmul2(weight, scaled_by);
                        }
                        uint32_t& pair = x[i / kPairs][i % kPairs + j];
                        Two const y = __hmul2(reinterpret_cast<Two const&>(pair), weight);
                        pair = reinterpret_cast<uint32_t const&>(y);
                    }
                }
            }
            if constexpr (kToHalf)
            {
                to_half(x, back[tile]);
            }
        }
    };

    // -- results: of each granule of a pass, each block of the cluster finishes what 16 lanes had, a thread one item
    int const item = threadIdx.x;
    int const item_granule = item / (16 * kTiles), item_lane = item % 16 + rank * 16;
    int const item_token = item_lane % 4 * 2 + item / 16 % kTiles * 8;
    int const granule_rows = p.swiglu ? kGranule / 2 : kGranule; // that lie together
    int const to_second = p.swiglu ? p.outputs / 2 : kGranule / 2; // from an item's first row
    int const width = p.swiglu ? p.outputs / 2 : p.outputs;
    Item own{};
    float inverse[2]; // root mean square of the two tokens
    float scale[2]{}; // of the two rows
    T bias[2]{};
    T residual[L::kItemNumbers]{};
    auto const output_at = [&](int pass)
    { return (share.first + pass * kGranules + item_granule) * granule_rows + item_lane / 4; };
    auto const has_item = [&](int pass) { return item < L::kItems && pass * kGranules + item_granule < share.count; };
    // What is added at the end is read at the beginning. Scales and biases are constants.
    auto const load_constants = [&](int pass)
    {
        if (has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                int const output = output_at(pass) + i * to_second;
                if constexpr (kDecoded)
                {
                    scale[i] = p.scale[output];
                }
                if (p.bias)
                {
                    bias[i] = static_cast<T const*>(p.bias)[output];
                }
            }
        }
    };
    auto const load_residual = [&](int pass)
    {
        if (p.residual && has_item(pass))
        {
#pragma unroll
            for (int i = 0; i < L::kItemNumbers; ++i)
            {
                int const token = item_token + i % 2;
                if (token < p.rows)
                {
                    int64_t const at = static_cast<int64_t>(token) * width + output_at(pass) + i / 2 * to_second;
                    residual[i] = load_new(static_cast<T const*>(p.residual) + at);
                }
            }
        }
    };
    auto const finish = [&](int pass)
    {
        if (item >= L::kItems)
        {
            return;
        }
        uint32_t const barrier = inbox_barriers + pass % 2 * 8;
        wait_for_phase(barrier, pass / 2 % 2);
        if (item == 0)
        {
            expect_bytes(barrier, L::kInboxBytes / 2);
        }
        if (is_normed && pass == 0)
        {
            wait_for_phase(squares_barrier, 0);
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                float const sum = block_squares[item_token + i] + block_squares[kTokens + item_token + i];
                inverse[i] = rsqrtf(sum * launch.per_input + p.eps);
            }
        }
        Item y = load_vector<float, L::kItemNumbers>(inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            y.at[i] += own.at[i];
            if (is_normed)
            {
                y.at[i] *= inverse[i % 2];
            }
            if constexpr (kDecoded)
            {
                y.at[i] *= scale[i / 2];
            }
            y.at[i] = rounded<T>(y.at[i]);
            if (p.bias)
            {
                y.at[i] = rounded<T>(y.at[i] + to_float(bias[i / 2]));
            }
            if (p.residual)
            {
                y.at[i] = rounded<T>(y.at[i] + to_float(residual[i]));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            if (item_token + i < p.rows && has_item(pass))
            {
                T* const to = static_cast<T*>(p.out) + static_cast<int64_t>(item_token + i) * width + output_at(pass);
                float const gate = y.at[i], up = y.at[i + 2];
                *to = from_float<T>(p.swiglu ? rounded<T>(silu(gate)) * up : gate);
                if (!p.swiglu)
                {
                    to[to_second] = from_float<T>(up);
                }
            }
        }
    };

    // -- multiplying
    constexpr bool kAhead = kDecoded && kTiles == 2; // where a unit takes longest, units are read one ahead
    Unit ahead;
    for (int pass = 0;; ++pass)
    {
        if (pass > 0)
        {
            finish(pass - 1);
        }
        if (pass < passes)
        {
            load_constants(pass);
        }
        if (pass == 0)
        {
            wait();
            for (int run = 0; run < min(input_runs, 2); ++run)
            {
                if (lane == 0)
                {
                    load_inputs(run);
                }
                load_run = load_run + 1 == runs ? 0 : load_run + 1;
            }
            __syncwarp();
        }
        if (pass == passes)
        {
            break;
        }
        load_residual(pass);
        if (kAhead && pass == 0 && runs > 0)
        {
            ahead = read_unit();
        }
        int const active = min(kGranules, share.count - pass * kGranules);
        float c[kGranules][kTiles][4] = {};
#pragma unroll 1
        for (int run = 0; run < runs; ++run)
        {
            if (pass == 0 || !is_kept)
            {
                take_inputs(pass * runs + run, pass == 0);
                if (is_kept && runs > 1 && passes > 1)
                {
                    keep(run);
                }
            }
            else if (runs > 1)
            {
                take_kept(run);
            }
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
                if (granule >= active)
                {
                    continue;
                }
                Unit unit;
                if constexpr (kAhead)
                {
                    unit = ahead;
                }
                else
                {
                    unit = read_unit();
                }
                uint32_t u[2][kPairs], v[2][kPairs];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    Fragment<T, W>::decode(unit.upper[half], u[half]);
                    Fragment<T, W>::decode(unit.lower[half], v[half]);
                }
                if constexpr (kDecoded)
                {
                    float d[2][kTiles][4] = {}; // of each half, so that fewer products wait for each other
#pragma unroll
                    for (int i = 0; i < 2 * kPairs; i += 4)
                    {
                        int const half = i / 4 % 2, j = i / 8 * 4; // by turns
#pragma unroll
                        for (int tile = 0; tile < kTiles; ++tile)
                        {
                            float(&sums)[4] = d[half][tile];
                            uint32_t const first[4] = {u[half][j], v[half][j], u[half][j + 1], v[half][j + 1]};
                            uint32_t const second[4] = {u[half][j + 2], v[half][j + 2], u[half][j + 3], v[half][j + 3]};
                            multiply_add<__half>(sums, first, b[tile][half][j], b[tile][half][j + 1]);
                            multiply_add<__half>(sums, second, b[tile][half][j + 2], b[tile][half][j + 3]);
                        }
                    }
                    if (kAhead && (granule + 1 < active || run + 1 < runs || pass + 1 < passes))
                    {
                        ahead = read_unit(); // while the products are on their way
                    }
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile)
                    {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                        {
                            float const sum = d[0][tile][i] + d[1][tile][i];
                            c[granule][tile][i] += kToHalf ? sum * back[tile][i % 2] : sum;
                        }
                    }
                    release(__float_as_uint(c[granule][0][0]));
                }
                else
                {
                    release(unit.upper[0].x ^ unit.upper[1].x ^ unit.lower[0].x ^ unit.lower[1].x);
#pragma unroll
                    for (int i = 0; i < 2 * kPairs; i += 2)
                    {
                        int const half = i / kPairs, j = i % kPairs;
                        uint32_t const a[4] = {u[half][j], v[half][j], u[half][j + 1], v[half][j + 1]};
#pragma unroll
                        for (int tile = 0; tile < kTiles; ++tile)
                        {
                            multiply_add<T>(c[granule][tile], a, b[tile][half][j], b[tile][half][j + 1]);
                        }
                    }
                }
            }
            // Not sooner: the products have the inputs by now, while a read of them could still wait behind copies, and
            // the bulk copy that overwrites them passes all of those.
            int const next_run = pass * runs + run + 2;
            __syncwarp();
            if (next_run < input_runs)
            {
                if (lane == 0)
                {
                    expect_inputs(next_run, load_run);
                    load_inputs(next_run);
                }
                load_run = load_run + 1 == runs ? 0 : load_run + 1;
            }
        }

        // -- adding up the warps' sums, in one order whatever the tokens are
        Item* const mine = reinterpret_cast<Item*>(sums + warp % kSlots * L::kSlot) + lane;
        auto const each_sum = [&](auto const& use)
        {
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
                if (granule >= active)
                {
                    continue;
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
                    Item here;
#pragma unroll
                    for (int i = 0; i < L::kItemNumbers; ++i)
                    {
                        here.at[i] = kScaled ? c[granule][tile][i] * sum_scale : c[granule][tile][i];
                    }
                    use(mine[(granule * kTiles + tile) * 32], here);
                }
            }
        };
        if (is_normed && pass == 0 && part == quad / 2)
        {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                warp_squares[warp * kTokens + tile * 8 + quad]
                    = quad % 2 ? squares[tile][tile * 2 + 1] : squares[tile][tile * 2];
            }
        }
        if (warp >= kSlots)
        {
            each_sum([](Item& there, Item const& here) { there = here; });
            meet(warp - kSlots);
        }
        else
        {
            meet(warp);
            each_sum(
                [](Item& there, Item const& here)
                {
                    Item sum = there;
#pragma unroll
                    for (int i = 0; i < L::kItemNumbers; ++i)
                    {
                        sum.at[i] += here.at[i];
                    }
                    there = sum;
                });
        }
        meet_all();

        // -- and the two blocks': the other one's half goes to its shared memory
        auto const block_sum = [&](int of_rank)
        {
            Item x[kSlots];
#pragma unroll
            for (int i = 0; i < kSlots; ++i)
            {
                int const at = (item / 16 * 32 + item % 16 + of_rank * 16) * L::kItemNumbers;
                x[i] = load_vector<float, L::kItemNumbers>(sums + i * L::kSlot + at);
            }
#pragma unroll
            for (int i = 0; i < L::kItemNumbers; ++i)
            {
                x[0].at[i] = (x[0].at[i] + x[1].at[i]) + (x[2].at[i] + x[3].at[i]);
            }
            return x[0];
        };
        if (item < L::kItems)
        {
            uint32_t const barrier = inbox_barriers + pass % 2 * 8;
            uint32_t const to = shared_address(inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
            send(address_at(to, rank ^ 1), block_sum(rank ^ 1).at, address_at(barrier, rank ^ 1));
            own = block_sum(rank); // while the other's are on their way
        }
        int const token = static_cast<int>(threadIdx.x) - (kThreads - kTokens);
        if (is_normed && pass == 0 && token >= 0)
        {
            float sum[1] = {0.f};
#pragma unroll
            for (int i = 0; i < kWarps; ++i)
            {
                sum[0] += warp_squares[i * kTokens + token];
            }
            uint32_t const to = shared_address(block_squares + rank * kTokens + token);
            for (int i = 0; i < kCluster; ++i)
            {
                send(address_at(to, i), sum, address_at(squares_barrier, i));
            }
        }
        if (pass + 1 < passes)
        {
            meet_all(); // the sums have been read
        }
    }
}

template <typename T, typename W, int kGranules, int kTokens>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads + 32, 1)
    skinny_gemm_kernel(__grid_constant__ Launch const launch)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    trigger();
    Block<T, W, kGranules, kTokens> block{launch, shared};
    block.begin();
    if (block.warp == kWarps)
    {
        if (block.lane == 0)
        {
            block.load();
        }
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); // the other block can be sent to
    block.multiply();
}

// Tiles of rows of 128 bytes, whatever their numbers' type. Sizes and strides count bytes of a row.
template <int kDimensions>
cudaError_t map_bytes(void const* tensor, cuuint64_t const (&sizes)[kDimensions],
    cuuint64_t const (&strides)[kDimensions - 1], cuuint32_t const (&box)[kDimensions], CUtensorMap& map)
{
    return map_tiles(
        CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, tensor, sizes, strides, box, map);
}

// The tokens' inputs: rows, in columns of 128 bytes.
template <typename T>
cudaError_t map_inputs(dflash_skinny_gemm_params const& p, int tokens, CUtensorMap& map)
{
    cuuint64_t const row_bytes = p.inputs * sizeof(T);
    return map_bytes<2>(p.x, {row_bytes, static_cast<cuuint64_t>(p.rows)}, {row_bytes},
        {kLine, static_cast<cuuint32_t>(tokens)}, map);
}

// A weight's granules, eight rows and the eight that go with them, of a line for each warp.
template <typename W>
cudaError_t map_weight(dflash_skinny_gemm_params const& p, CUtensorMap& map)
{
    constexpr cuuint64_t kHalf = kGranule / 2;
    cuuint64_t const row_bytes = p.inputs * sizeof(W), outputs = p.outputs;
    cuuint64_t const to_second = p.swiglu ? outputs / 2 : kHalf; // rows
    return map_bytes<4>(p.weight, {kLine, outputs - to_second, 2, row_bytes / kLine},
        {row_bytes, to_second * row_bytes, kLine}, {kLine, kHalf, 2, kWarps}, map);
}

template <typename T, typename W, int kTokens>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    constexpr int kGranules = 6;
    constexpr int kBytes = Layout<kGranules, kTokens, kLine / sizeof(W) * sizeof(T)>::kBytes;
    constexpr auto kernel = skinny_gemm_kernel<T, W, kGranules, kTokens>;
    int device = 0, processors = 0;
    cudaError_t error = allow_shared_bytes<kernel>(kBytes);
    error = error ? error : cudaGetDevice(&device);
    if (error == cudaSuccess)
    {
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess)
    {
        return error;
    }
    int const granules = p.outputs / kGranule, clusters = std::min(processors / kCluster, granules);
    Launch launch;
    launch.p = p;
    launch.lines = p.inputs * static_cast<int>(sizeof(W)) / kLine;
    launch.granules = granules / clusters;
    launch.more = granules % clusters;
    launch.per_input = 1.f / static_cast<float>(p.inputs);
    launch.zero = 0;
    error = map_weight<W>(p, launch.weight);
    error = error ? error : map_inputs<T>(p, kTokens, launch.inputs);
    return error ? error : launch_kernel(kernel, dim3(clusters * kCluster), kThreads + 32, kBytes, stream, launch);
}

template <typename T, typename W>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    return p.rows <= 8 ? launch_skinny_gemm<T, W, 8>(p, stream) : launch_skinny_gemm<T, W, 16>(p, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_skinny_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_fp8 = p->weight_dtype == DFLASH_FP8;
    int const columns = kLine / (is_fp8 ? 1 : 2);
    if (p->rows > DFLASH_SKINNY_ROWS || p->inputs < columns || p->inputs % columns || p->outputs < kGranule
        || p->outputs % kGranule || (is_fp8 ? p->scale == nullptr : p->weight_dtype != p->dtype)
        || (p->swiglu && p->residual))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16:
        return is_fp8 ? launch_skinny_gemm<__half, E4M3>(*p, stream) : launch_skinny_gemm<__half, __half>(*p, stream);
    case DFLASH_BF16:
        return is_fp8 ? launch_skinny_gemm<__nv_bfloat16, E4M3>(*p, stream)
                      : launch_skinny_gemm<__nv_bfloat16, __nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
