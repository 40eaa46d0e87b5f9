// Matrix products of a few rows (tokens) with large weights: bound by reading the weights, once.
//
// Each cluster of two blocks takes its share of the weight's rows, and the two blocks, with their eight warps each, share
// the inputs of each row. So all multiprocessors read equally much, in one launch, and no sum depends on how many
// tokens there are: a token's result is the same to the bit alone and among others.
//
// Weights reach shared memory before the kernel waits for the one before it: between two products, however small the
// kernels in between, the memory goes on reading.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"

#include <algorithm>
#include <cooperative_groups.h>
#include <cuda.h>
#include <type_traits>

namespace dflash
{
namespace
{

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kCluster = 2;
constexpr int kGranule = 16; // rows of a weight that one product instruction takes
constexpr int kLine = 128; // bytes of a row in one unit: a line of the cache
constexpr int kUnit = kGranule * kLine; // bytes that a warp loads at a time
constexpr int kSlots = kWarps / 2; // sums of two warps each, to be added up

// How a block goes about a pass: kGranules of its rows, for at most kTokens tokens, of whose inputs a unit meets
// kInputBytes each, the norm's weights for as many beside them.
template <int kGranules, int kTokens, int kInputBytes, bool kSwiglu, bool kNormed>
struct Layout
{
    static constexpr int kRows = kGranules * kGranule;

    // Results go by items, one a thread: of two tokens a gate and an up each, or one row's of all tokens that a lane has.
    static constexpr int kItemNumbers = kSwiglu ? 4 : kTokens / 4;
    static constexpr int kItems = kRows / 2 * kTokens / kItemNumbers; // of each block of the cluster

    // Shared memory: each warp's ring of units and inputs, the sums, and what the other block sends. It is more than
    // half of a multiprocessor's: two blocks of one product must not share one, or they would take twice the others'
    // time. Small kernels may still stand beside a block.
    static constexpr int kLimit = 212 * 1024;
    static constexpr int kInputs = kTokens * kInputBytes; // bytes of a run; a warp has two, used by turns
    static constexpr int kNormBytes = kNormed ? kInputBytes : 0; // likewise
    static constexpr int kInputsBytes = kWarps * 2 * (kInputs + kNormBytes);
    static constexpr int kSlot = kRows * kTokens; // numbers
    static constexpr int kSumBytes = kSlots * kSlot * static_cast<int>(sizeof(float));
    static constexpr int kInbox = kSlot / 2; // numbers; there are two, used by turns
    static constexpr int kInboxBytes = 2 * kInbox * static_cast<int>(sizeof(float));
    static constexpr int kSquares = kNormed ? kTokens : 0; // of each warp; then of each block
    static constexpr int kSquaresBytes = (kWarps + kCluster) * kSquares * static_cast<int>(sizeof(float));
    static constexpr int kBarrierBytes = (kWarps * 2 + 2) * 8;
    static constexpr int kOther = kInputsBytes + kSumBytes + kInboxBytes + kSquaresBytes + kBarrierBytes;
    static constexpr int kUnits = (kLimit - kOther) / (kWarps * kUnit); // of a warp's ring
    static constexpr int kRingBytes = kWarps * kUnits * kUnit;
    static constexpr int kBytes = kRingBytes + kOther;
    static_assert(kItems <= kThreads);
};

__device__ __forceinline__ void copy_async(uint32_t to, void const* from)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

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
    else if constexpr (kCount == 2)
    {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x[0]),
            "f"(x[1]), "r"(barrier)
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

// BF16 inputs of a run, those of token l / 4 of each tile in lane l, become FP16 ones times a power of two that brings
// the token's largest to about 2^14: exact, but for less than 2^-38 of the largest. `back` undoes it for those tokens
// whose sums the lane has. Zeros, infinities and NaNs stay what they are.
template <int kTiles, int kPairs>
__device__ __forceinline__ void to_half(uint32_t (&x)[2][kTiles][kPairs], float (&back)[kTiles][2])
{
    auto const two = [](uint32_t const& bits) { return reinterpret_cast<__nv_bfloat162 const&>(bits); };
    uint32_t exponents = 0; // of each tile's token, biased, 16 bits each
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
    {
        __nv_bfloat162 most = __habs2(two(x[0][tile][0]));
#pragma unroll
        for (int i = 1; i < 2 * kPairs; ++i)
        {
            most = __hmax2_nan(most, __habs2(two(x[i / kPairs][tile][i % kPairs])));
        }
        auto const bits = reinterpret_cast<uint32_t const&>(most);
        exponents |= max(bits & 0xffff, bits >> 16) >> 7 << tile * 16;
    }
    exponents = __vmaxu2(exponents, __shfl_xor_sync(0xffffffffu, exponents, 1));
    exponents = __vmaxu2(exponents, __shfl_xor_sync(0xffffffffu, exponents, 2));
    exponents = __vmaxu2(exponents, 0x000f000fu); // so that the power and its inverse are normal numbers
#pragma unroll
    for (int i = 0; i < 2; ++i)
    {
        uint32_t const of_column = __shfl_sync(0xffffffffu, exponents, (threadIdx.x % 4 * 2 + i) * 4);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
            back[tile][i] = __uint_as_float(((of_column >> tile * 16 & 0xff) - 14) << 23);
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
    {
        uint32_t const factor = (268 - (exponents >> tile * 16 & 0xff)) * 0x00800080u; // 2^(14 - the exponent)
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i)
        {
            uint32_t& pair = x[i / kPairs][tile][i % kPairs];
            __nv_bfloat162 const y = __hmul2(two(pair), two(factor));
            auto const bits = reinterpret_cast<uint32_t const&>(y);
            __half2 const z = __floats2half2_rn(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
            pair = reinterpret_cast<uint32_t const&>(z);
        }
    }
}

// Walks a warp's units: in each pass, for each of its runs of inputs, its granules. Offsets are in bytes.
struct Cursor
{
    int64_t at; // the next unit
    int64_t const granule_bytes;
    int const most; // granules of a pass
    int const runs;
    int const run_bytes; // from one run to the next
    int granules_left; // of the run
    int runs_left;
    int left; // granules of this pass and those after it; 0: at the end

    __device__ __forceinline__ void advance()
    {
        at += granule_bytes;
        if (--granules_left > 0)
        {
            return;
        }
        int const taken = min(most, left);
        granules_left = taken;
        at += run_bytes - taken * granule_bytes;
        if (--runs_left > 0)
        {
            return;
        }
        at += taken * granule_bytes - static_cast<int64_t>(runs) * run_bytes;
        runs_left = runs;
        left -= taken;
        granules_left = min(most, left);
    }
};

// W: the weight's type. kSwiglu: a granule is 8 rows of the gate and the 8 rows of up that belong to them. kNormed: inputs
// are multiplied by the norm's weights before the products, sums of products by the inputs' inverse root mean square after.
template <typename T, typename W, int kGranules, int kTokens, bool kSwiglu, bool kNormed>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    skinny_gemm_kernel(dflash_skinny_gemm_params const p, __grid_constant__ CUtensorMap const x_map)
{
    namespace cg = cooperative_groups;
    constexpr int kColumns = kLine / static_cast<int>(sizeof(W)); // inputs in one unit
    constexpr int kInputBytes = kColumns * static_cast<int>(sizeof(T));
    using L = Layout<kGranules, kTokens, kInputBytes, kSwiglu, kNormed>;
    using Item = Vector<float, L::kItemNumbers>;
    using Two = typename Pair<T>::type;
    constexpr int kRunWarps = kWarps * kCluster; // that share the inputs of a row
    constexpr int kTiles = kTokens / 8;
    constexpr int kPairs = Fragment<T, W>::kPairs;
    constexpr int kFirstRows = kSwiglu ? kGranule / 2 : kGranule; // of a granule that lie together
    // An input times a norm's weight may exceed FP16: each warp then makes its weights smaller by one power of two.
    constexpr bool kScaled = kNormed && std::is_same_v<T, __half>;
    constexpr bool kDecoded = std::is_same_v<W, E4M3>; // products are FP16 then, whatever T is
    constexpr bool kToHalf = kDecoded && std::is_same_v<T, __nv_bfloat16>;

    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char* const inputs = shared + L::kRingBytes;
    unsigned char* const norms = inputs + kWarps * 2 * L::kInputs;
    float* const sums = reinterpret_cast<float*>(inputs + L::kInputsBytes);
    float* const inbox = sums + L::kSumBytes / sizeof(float);
    float* const warp_squares = inbox + L::kInboxBytes / sizeof(float);
    float* const block_squares = warp_squares + kWarps * L::kSquares;
    unsigned char* const barriers = reinterpret_cast<unsigned char*>(block_squares + kCluster * L::kSquares);

    trigger();
    int const rank = static_cast<int>(cg::this_cluster().block_rank());
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const column_warp = rank * kWarps + warp;

    // The cluster's share of the granules, and the warp's of the inputs.
    int const clusters = gridDim.x / kCluster, index = blockIdx.x / kCluster;
    int const granules = p.outputs / kGranule;
    int const first = share_begin(granules, index, clusters);
    int const count = share_begin(granules, index + 1, clusters) - first;
    int const lines = p.inputs / kColumns;
    int const runs = lines > column_warp ? (lines - column_warp - 1) / kRunWarps + 1 : 0;
    int const passes = (count + kGranules - 1) / kGranules;

    // -- loading: four rows of 128 bytes at a time, each second row's halves swapped
    int64_t const row_bytes = static_cast<int64_t>(p.inputs) * sizeof(W);
    int64_t const up_bytes = kSwiglu ? (p.outputs / 2 - kGranule / 2) * row_bytes : 0; // to up's row from where it were
    Cursor load{(static_cast<int64_t>(first) * kFirstRows + lane / 8) * row_bytes + column_warp * kLine
            + lane % 8 * 16,
        kFirstRows * row_bytes, kGranules, runs, kRunWarps * kLine, 0, runs, runs > 0 ? count : 0};
    load.granules_left = min(load.most, load.left);
    uint32_t const ring = shared_address(shared) + warp * L::kUnits * kUnit
        + lane / 8 * kLine + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
    uint32_t load_slot = ring;
    auto const load_unit = [&]
    {
        if (load.left > 0)
        {
            char const* from = static_cast<char const*>(p.weight) + load.at;
#pragma unroll
            for (int i = 0; i < kGranule / 4; ++i)
            {
                copy_async(load_slot + i * 4 * kLine, from + i * 4 * row_bytes + (i < 2 ? 0 : up_bytes));
            }
            load_slot = load_slot + kUnit == ring + L::kUnits * kUnit ? ring : load_slot + kUnit;
            load.advance();
        }
        commit_copies(); // empty ones at the end, so that the count of pending ones stays right
    };
#pragma unroll
    for (int i = 0; i < L::kUnits; ++i)
    {
        load_unit();
    }

    uint32_t const own_barriers = shared_address(barriers) + warp * 16;
    uint32_t const inbox_barriers = shared_address(barriers) + kWarps * 16;
    if (lane == 0)
    {
        init_barrier(own_barriers, 1);
        init_barrier(own_barriers + 8, 1);
        if (warp == 0)
        {
            init_barrier(inbox_barriers, 1);
            init_barrier(inbox_barriers + 8, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (warp == 0)
        {
            // The squares come with the first sums.
            constexpr int kBytes = L::kInbox * static_cast<int>(sizeof(float));
            expect_bytes(inbox_barriers, kBytes + kCluster * L::kSquares * static_cast<int>(sizeof(float)));
            expect_bytes(inbox_barriers + 8, kBytes);
        }
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); // this block can be sent to

    // -- the tokens' inputs, run by run, two runs ahead: lane l takes those of token l / 4 that meet its part of a row
    int const quad = lane / 4, part = lane % 4;
    int const input_runs = runs > 1 ? runs * passes : runs; // a single one stays in registers
    unsigned char* const own_inputs = inputs + warp * 2 * L::kInputs;
    int load_run = 0;
    uint32_t const inputs_at = shared_address(own_inputs);
    uint32_t const norms_at = shared_address(norms) + warp * 2 * L::kNormBytes;
    auto const expect_inputs = [&](int run, int of_row) // of input_runs, and of the runs of a row
    {
        uint32_t const barrier = own_barriers + run % 2 * 8;
        expect_bytes(barrier, L::kInputs + L::kNormBytes);
        if constexpr (kNormed)
        {
            char const* from
                = static_cast<char const*>(p.norm_weight) + (column_warp + of_row * kRunWarps) * kInputBytes;
            copy_bulk(norms_at + run % 2 * L::kNormBytes, from, kInputBytes, barrier);
        }
    };
    auto const load_inputs = [&](int run)
    {
#pragma unroll
        for (int i = 0; i < kInputBytes / kLine; ++i)
        {
            copy_tile(inputs_at + run % 2 * L::kInputs + i * kTokens * kLine, x_map,
                (column_warp + load_run * kRunWarps) * kColumns + i * (kLine / static_cast<int>(sizeof(T))),
                own_barriers + run % 2 * 8);
        }
    };
    if (lane == 0)
    {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        for (int run = 0; run < min(input_runs, 2); ++run)
        {
            expect_inputs(run, run); // the norm's weights are constants: they come before the wait
        }
    }
    __syncwarp();
    Two scaled_by{};
    float sum_scale = 1.f;
    if constexpr (kScaled)
    {
        uint32_t most = 0;
        for (int run = 0; run < runs; ++run)
        {
            uint32_t const* from = static_cast<uint32_t const*>(p.norm_weight)
                + (column_warp + run * kRunWarps) * (kColumns / 2) + lane;
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

    // -- results: of each granule of a pass, each block of the cluster finishes half of the rows, a thread one item
    constexpr int kOutputs = kSwiglu ? 2 : 1; // of an item
    int const item = threadIdx.x;
    int const item_lane = kSwiglu ? item % 16 + rank * 16 : item % 32; // the lane that had its numbers
    int const item_granule = kSwiglu ? item / (16 * kTiles) : item / 32;
    int const item_row = item_lane / 4 + (kSwiglu ? 0 : rank * 8);
    int const item_token = item_lane % 4 * 2 + (kSwiglu ? item / 16 % kTiles * 8 : 0);
    auto const token_of = [&](int number)
    { return item_token + (kSwiglu ? number % 2 : number / 2 * 8 + number % 2); };
    auto const number_at = [&](int of_rank) // in a slot of the sums
    {
        int const there = kSwiglu ? item / 16 * 32 + item % 16 + of_rank * 16 : (item / 32 * 2 + of_rank) * 32 + item % 32;
        return there * L::kItemNumbers;
    };
    Item own{};
    float scale[kOutputs]{};
    T bias[kOutputs]{};
    T residual[L::kItemNumbers]{};
    auto const has_item = [&](int pass) { return item < L::kItems && pass * kGranules + item_granule < count; };
    auto const output_at = [&](int pass) // up's is half of them further
    { return (first + pass * kGranules + item_granule) * kFirstRows + item_row; };
    // What is added at the end is read at the beginning. Scales and biases are constants.
    auto const load_constants = [&](int pass)
    {
        if (!has_item(pass))
        {
            return;
        }
#pragma unroll
        for (int i = 0; i < kOutputs; ++i)
        {
            int const output = output_at(pass) + i * (p.outputs / 2);
            if constexpr (kDecoded)
            {
                scale[i] = p.scale[output];
            }
            if (p.bias)
            {
                bias[i] = static_cast<T const*>(p.bias)[output];
            }
        }
    };
    auto const load_residual = [&](int pass)
    {
        if constexpr (!kSwiglu)
        {
            if (p.residual && has_item(pass))
            {
#pragma unroll
                for (int i = 0; i < L::kItemNumbers; ++i)
                {
                    if (token_of(i) < p.rows)
                    {
                        residual[i] = static_cast<T const*>(
                            p.residual)[static_cast<int64_t>(token_of(i)) * p.outputs + output_at(pass)];
                    }
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
        if (item == 0 && pass + 2 < passes)
        {
            expect_bytes(barrier, L::kInbox * static_cast<int>(sizeof(float)));
        }
        auto const theirs = load_vector<float, L::kItemNumbers>(
            inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
        float y[L::kItemNumbers];
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            int const output = kSwiglu ? i / 2 : 0;
            y[i] = own.at[i] + theirs.at[i];
            if constexpr (kNormed)
            {
                float const squares = block_squares[token_of(i)] + block_squares[kTokens + token_of(i)];
                y[i] *= rsqrtf(squares / static_cast<float>(p.inputs) + p.eps);
            }
            if constexpr (kDecoded)
            {
                y[i] *= scale[output];
            }
            y[i] = rounded<T>(y[i]);
            if (p.bias)
            {
                y[i] = rounded<T>(y[i] + to_float(bias[output]));
            }
            if constexpr (!kSwiglu)
            {
                if (p.residual)
                {
                    y[i] = rounded<T>(y[i] + to_float(residual[i]));
                }
            }
        }
        constexpr int kResults = L::kItemNumbers / kOutputs;
        int const width = p.outputs / kOutputs;
#pragma unroll
        for (int i = 0; i < kResults; ++i)
        {
            float result = y[i];
            if constexpr (kSwiglu)
            {
                result = rounded<T>(y[i] / (1.f + expf(-y[i]))) * y[i + 2];
            }
            if (token_of(i) < p.rows && has_item(pass))
            {
                static_cast<T*>(p.out)[static_cast<int64_t>(token_of(i)) * width + output_at(pass)]
                    = from_float<T>(result);
            }
        }
    };

    load_constants(0);
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
    load_residual(0);

    uint32_t b[2][kTiles][kPairs]; // both halves of a run
    float back[kTiles][2]; // see to_half
    float squares[kTiles][4] = {}; // of a tile's inputs with all inputs: the diagonal counts
    auto const take_inputs = [&](int run, bool is_first_pass)
    {
        wait_for_phase(own_barriers + run % 2 * 8, run / 2 % 2);
        auto const take = [&](unsigned char const* from, int pair, uint32_t (&to)[kPairs])
        {
            auto const v = *reinterpret_cast<uint4 const*>(from);
            to[pair] = v.x;
            to[pair + 1] = v.y;
            to[pair + 2] = v.z;
            to[pair + 3] = v.w;
        };
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                // Of a row of 128 bytes the part's place; a second one's are in a tile of their own.
                int const half = i / kPairs * (kInputBytes / 2);
                int const place = (part * kPairs + i % kPairs) / 4 + half % kLine / 16;
                unsigned char const* const from
                    = own_inputs + run % 2 * L::kInputs + half / kLine * (kTokens * kLine);
                take(from + swizzled(tile * 8 + quad, place), i % kPairs, b[i / kPairs][tile]);
            }
        }
        if constexpr (kNormed)
        {
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                auto& x = b[half];
                if (is_first_pass)
                {
#pragma unroll
                    for (int i = 0; i < kPairs; i += 2)
                    {
                        // Tokens as rows lie in registers as tokens as columns do.
                        uint32_t const a[4] = {x[0][i], x[kTiles - 1][i], x[0][i + 1], x[kTiles - 1][i + 1]};
#pragma unroll
                        for (int tile = 0; tile < kTiles; ++tile)
                        {
                            multiply_add<T>(squares[tile], a, x[tile][i], x[tile][i + 1]);
                        }
                    }
                }
                uint32_t weights[kPairs];
#pragma unroll
                for (int i = 0; i < kPairs; i += 4)
                {
                    unsigned char const* const from = norms + (warp * 2 + run % 2) * L::kNormBytes;
                    take(from + half * (kInputBytes / 2) + (part * kPairs + i) * 4, i, weights);
                }
#pragma unroll
                for (int i = 0; i < kPairs; ++i)
                {
                    Two weight = reinterpret_cast<Two const&>(weights[i]);
                    if constexpr (kScaled)
                    {
                        weight = __hmul2(weight, scaled_by);
                    }
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile)
                    {
                        Two const y = __hmul2(reinterpret_cast<Two const&>(x[tile][i]), weight);
                        x[tile][i] = reinterpret_cast<uint32_t const&>(y);
                    }
                }
            }
        }
        if constexpr (kToHalf)
        {
            to_half(b, back);
        }
    };
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); // the other block can be sent to

    // -- multiplying: lane l has parts of the rows l / 4 and l / 4 + 8 of a granule
    uint32_t const at = quad * kLine + (part ^ (quad % 2 * 4)) * 16;
    int slot = 0;
    struct Unit
    {
        uint4 upper[2], lower[2];
    };
    auto const read_unit = [&]
    {
        wait_for_copies<L::kUnits - 1>();
        __syncwarp();
        unsigned char const* const from = shared + (warp * L::kUnits + slot) * kUnit;
        Unit unit;
#pragma unroll
        for (int half = 0; half < 2; ++half)
        {
            unit.upper[half] = *reinterpret_cast<uint4 const*>(from + (at ^ half * 64));
            unit.lower[half] = *reinterpret_cast<uint4 const*>(from + (at ^ half * 64) + 8 * kLine);
        }
        slot = slot + 1 == L::kUnits ? 0 : slot + 1;
        __syncwarp();
        load_unit();
        return unit;
    };
    Unit ahead; // E4M3 is read one unit ahead; after the last one, whatever the ring has is read and not used
    if constexpr (kDecoded)
    {
        ahead = read_unit();
    }
    for (int pass = 0; pass < passes; ++pass)
    {
        if (pass > 0)
        {
            finish(pass - 1);
            load_constants(pass);
            load_residual(pass);
        }
        int const active = min(kGranules, count - pass * kGranules);
        float c[kGranules][kTiles][4] = {};
        for (int run = 0; run < runs; ++run)
        {
            if (runs > 1 || pass == 0)
            {
                take_inputs(pass * runs + run, pass == 0);
            }
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
                if (granule < active)
                {
                    Unit unit;
                    if constexpr (kDecoded)
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
                        for (int i = 0; i < kPairs; i += 2)
                        {
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                            {
                                uint32_t const a[4] = {u[half][i], v[half][i], u[half][i + 1], v[half][i + 1]};
#pragma unroll
                                for (int tile = 0; tile < kTiles; ++tile)
                                {
                                    multiply_add<__half>(d[half][tile], a, b[half][tile][i], b[half][tile][i + 1]);
                                }
                            }
                        }
                        ahead = read_unit(); // while the products are on their way
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
                    }
                    else
                    {
#pragma unroll
                        for (int i = 0; i < 2 * kPairs; i += 2)
                        {
                            int const half = i / kPairs, j = i % kPairs;
                            uint32_t const a[4] = {u[half][j], v[half][j], u[half][j + 1], v[half][j + 1]};
#pragma unroll
                            for (int tile = 0; tile < kTiles; ++tile)
                            {
                                multiply_add<T>(c[granule][tile], a, b[half][tile][j], b[half][tile][j + 1]);
                            }
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
        float* const mine = sums + warp % kSlots * L::kSlot;
        auto const each_sum = [&](auto const& use)
        {
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
#pragma unroll
                for (int i = 0; i < (kSwiglu ? kTiles : 2); ++i) // of a tile, or of one of the rows that the lane has
                {
                    Item here;
#pragma unroll
                    for (int j = 0; j < L::kItemNumbers; ++j)
                    {
                        here.at[j] = kSwiglu ? c[granule][i][j] : c[granule][j / 2][i * 2 + j % 2];
                        if constexpr (kScaled)
                        {
                            here.at[j] *= sum_scale;
                        }
                    }
                    int const there = (granule * (kSwiglu ? kTiles : 2) + i) * 32 + lane;
                    use(reinterpret_cast<Item*>(mine)[there], here);
                }
            }
        };
        if constexpr (kNormed)
        {
            if (pass == 0 && part == quad / 2)
            {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
                    warp_squares[warp * kTokens + tile * 8 + quad]
                        = quad % 2 ? squares[tile][tile * 2 + 1] : squares[tile][tile * 2];
                }
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
                    for (int j = 0; j < L::kItemNumbers; ++j)
                    {
                        sum.at[j] += here.at[j];
                    }
                    there = sum;
                });
        }
        __syncthreads();

        // -- and the two blocks': the other one's half goes to its shared memory
        auto const block_sum = [&](int of_rank)
        {
            Item x[kSlots];
#pragma unroll
            for (int i = 0; i < kSlots; ++i)
            {
                x[i] = load_vector<float, L::kItemNumbers>(sums + i * L::kSlot + number_at(of_rank));
            }
#pragma unroll
            for (int i = 0; i < L::kItemNumbers; ++i)
            {
                x[0].at[i] = (x[0].at[i] + x[1].at[i]) + (x[2].at[i] + x[3].at[i]);
            }
            return x[0];
        };
        uint32_t const barrier = inbox_barriers + pass % 2 * 8;
        if (item < L::kItems)
        {
            uint32_t const to = shared_address(inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
            send(address_at(to, rank ^ 1), block_sum(rank ^ 1).at, address_at(barrier, rank ^ 1));
            own = block_sum(rank); // while the other's are on their way
        }
        if constexpr (kNormed)
        {
            int const token = static_cast<int>(threadIdx.x) - (kThreads - kTokens);
            if (pass == 0 && token >= 0)
            {
                float sum[1] = {0.f};
#pragma unroll
                for (int i = 0; i < kWarps; ++i)
                {
                    sum[0] += warp_squares[i * kTokens + token];
                }
                uint32_t const to
                    = shared_address(block_squares + rank * kTokens + token);
                for (int i = 0; i < kCluster; ++i)
                {
                    send(address_at(to, i), sum, address_at(barrier, i));
                }
            }
        }
        if (pass + 1 < passes)
        {
            __syncthreads(); // the sums have been read
        }
    }
    finish(passes - 1);
}

// The tokens' inputs in tiles of kTokens rows of 128 bytes.
cudaError_t map_inputs(dflash_skinny_gemm_params const& p, int tokens, CUtensorMap& map)
{
    static void* encode = nullptr;
    static cudaError_t const found = []
    {
        cudaDriverEntryPointQueryResult result;
        cudaError_t const error
            = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess && result != cudaDriverEntryPointSuccess ? cudaErrorSymbolNotFound : error;
    }();
    if (found != cudaSuccess)
    {
        return found;
    }
    cuuint64_t const sizes[] = {static_cast<cuuint64_t>(p.inputs), static_cast<cuuint64_t>(p.rows)};
    cuuint64_t const strides[] = {static_cast<cuuint64_t>(p.inputs) * 2};
    cuuint32_t const tile[] = {kLine / 2, static_cast<cuuint32_t>(tokens)};
    cuuint32_t const steps[] = {1, 1};
    CUresult const error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map,
        CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(p.x), sizes, strides, tile, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, typename W, int kGranules, int kTokens, bool kSwiglu, bool kNormed>
cudaError_t launch_layout(dflash_skinny_gemm_params const& p, int clusters, cudaStream_t stream)
{
    constexpr int kBytes = Layout<kGranules, kTokens, kLine / sizeof(W) * sizeof(T), kSwiglu, kNormed>::kBytes;
    auto const kernel = skinny_gemm_kernel<T, W, kGranules, kTokens, kSwiglu, kNormed>;
    static cudaError_t const raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    CUtensorMap map;
    cudaError_t const error = raised ? raised : map_inputs(p, kTokens, map);
    return error ? error : launch_kernel(kernel, dim3(clusters * kCluster), kThreads, kBytes, stream, p, map);
}

template <typename T, typename W, int kTokens, bool kSwiglu, bool kNormed>
cudaError_t launch_tokens(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
    {
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess)
    {
        return error;
    }
    int const granules = p.outputs / kGranule;
    int const clusters = std::min(processors / kCluster, granules);
    switch ((granules + clusters - 1) / clusters)
    {
    case 1: return launch_layout<T, W, 1, kTokens, kSwiglu, kNormed>(p, clusters, stream);
    case 2: return launch_layout<T, W, 2, kTokens, kSwiglu, kNormed>(p, clusters, stream);
    case 3:
    case 4: return launch_layout<T, W, 4, kTokens, kSwiglu, kNormed>(p, clusters, stream);
    default: return launch_layout<T, W, 6, kTokens, kSwiglu, kNormed>(p, clusters, stream);
    }
}

template <typename T, typename W, bool kSwiglu, bool kNormed>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    return p.rows <= 8 ? launch_tokens<T, W, 8, kSwiglu, kNormed>(p, stream)
                       : launch_tokens<T, W, 16, kSwiglu, kNormed>(p, stream);
}

template <typename T, typename W>
cudaError_t launch_skinny_gemm_of(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    if (p.norm_weight)
    {
        return p.swiglu ? launch_skinny_gemm<T, W, true, true>(p, stream)
                        : launch_skinny_gemm<T, W, false, true>(p, stream);
    }
    return p.swiglu ? launch_skinny_gemm<T, W, true, false>(p, stream)
                    : launch_skinny_gemm<T, W, false, false>(p, stream);
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
        return is_fp8 ? launch_skinny_gemm_of<__half, E4M3>(*p, stream) : launch_skinny_gemm_of<__half, __half>(*p, stream);
    case DFLASH_BF16:
        return is_fp8 ? launch_skinny_gemm_of<__nv_bfloat16, E4M3>(*p, stream) : launch_skinny_gemm_of<__nv_bfloat16, __nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
