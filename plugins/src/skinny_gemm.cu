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
#include "launch.cuh"

#include <algorithm>
#include <cooperative_groups.h>
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

using E4M3 = uint8_t;

// How a block goes about a pass: kGranules of its rows, for at most kTokens tokens, of whose inputs a unit meets
// kInputBytes each.
template <int kGranules, int kTokens, int kInputBytes>
struct Layout
{
    static constexpr int kRows = kGranules * kGranule;

    // Shared memory: each warp's ring of units and inputs, the sums, and what the other block sends. It is more than
    // half of a multiprocessor's: two blocks of one product must not share one, or they would take twice the others'
    // time.
    static constexpr int kLimit = 200 * 1024;
    static constexpr int kPitch = kInputBytes + 64; // from one token's inputs to the next one's: few meet in one bank
    static constexpr int kInputs = kTokens * kPitch; // bytes of a run; a warp has two, used by turns
    static constexpr int kInputsBytes = kWarps * 2 * kInputs;
    static constexpr int kPadded = kTokens + 2; // of a row of sums; likewise
    static constexpr int kSumBytes = kSlots * kRows * kPadded * static_cast<int>(sizeof(float));
    static constexpr int kInbox = kRows / 2 * kTokens; // numbers; there are two, used by turns
    static constexpr int kInboxBytes = 2 * kInbox * static_cast<int>(sizeof(float));
    static constexpr int kBarrierBytes = kWarps * 2 * 8;
    static constexpr int kOther = kInputsBytes + kSumBytes + kInboxBytes + kBarrierBytes;
    static constexpr int kUnits = (kLimit - kOther) / (kWarps * kUnit); // of a warp's ring
    static constexpr int kRingBytes = kWarps * kUnits * kUnit;
    static constexpr int kBytes = kRingBytes + kOther;
};

__device__ __forceinline__ void copy_async(uint32_t to, void const* from)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier in shared memory that counts the bytes of bulk copies.
__device__ __forceinline__ void init_barrier(uint32_t barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_bulk(uint32_t to, void const* from, int bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity)
{
    uint32_t is_done = 0;
    while (!is_done)
    {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(is_done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(
    float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sixteen bytes of a weight's row as registers of pairs: eight 16-bit numbers, or sixteen E4M3 ones made 16-bit.
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

// E4M3 has 4 bits of exponent with bias 7 and 3 of fraction. Put where the wider type has its exponent's low bits, they
// are the number times a power of two, subnormal ones too; one exact product takes that away.
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
            pairs[2 * i] = widen(__byte_perm(words[i], 0, 0x1404)); // bytes 0 and 1, each the high one of its half
            pairs[2 * i + 1] = widen(__byte_perm(words[i], 0, 0x3424));
        }
    }

    static __device__ __forceinline__ uint32_t widen(uint32_t x)
    {
        using Two = typename Pair<T>::type;
        constexpr bool kIsHalf = sizeof(T) == 2 && !std::is_same_v<T, __nv_bfloat16>;
        constexpr int kShift = kIsHalf ? 1 : 4;
        constexpr uint32_t kMagnitude = (0x7f00u >> kShift) * 0x10001u;
        uint32_t const bits = (x & 0x80008000u) | (x >> kShift & kMagnitude);
        // 2^(15 - 7), and 2^(127 - 7), in both halves.
        uint32_t const factor = kIsHalf ? 0x5c005c00u : 0x7b807b80u;
        Two const y = __hmul2(reinterpret_cast<Two const&>(bits), reinterpret_cast<Two const&>(factor));
        return reinterpret_cast<uint32_t const&>(y);
    }
};

// The share of `count` that is the index-th of `parts`: first and last + 1.
__device__ __forceinline__ int share_begin(int count, int index, int parts)
{
    return static_cast<int>(static_cast<int64_t>(count) * index / parts);
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

// W: the weight's type. kSwiglu: a granule is 8 rows of the gate and the 8 rows of up that belong to them.
template <typename T, typename W, int kGranules, int kTokens, bool kSwiglu>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    skinny_gemm_kernel(dflash_skinny_gemm_params const p)
{
    namespace cg = cooperative_groups;
    constexpr int kColumns = kLine / static_cast<int>(sizeof(W)); // inputs in one unit
    constexpr int kInputBytes = kColumns * static_cast<int>(sizeof(T));
    using L = Layout<kGranules, kTokens, kInputBytes>;
    constexpr int kRunWarps = kWarps * kCluster; // that share the inputs of a row
    constexpr int kTiles = kTokens / 8;
    constexpr int kPairs = Fragment<T, W>::kPairs;
    constexpr int kOwn = (L::kInbox + kThreads - 1) / kThreads; // results that a thread finishes
    constexpr int kFirstRows = kSwiglu ? kGranule / 2 : kGranule; // of a granule that lie together

    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* const inputs = shared + L::kRingBytes;
    float* const sums = reinterpret_cast<float*>(inputs + L::kInputsBytes);
    float* const inbox = sums + L::kSumBytes / sizeof(float);
    unsigned char* const barriers = reinterpret_cast<unsigned char*>(inbox) + L::kInboxBytes;

    trigger();
    cg::cluster_group const cluster = cg::this_cluster();
    int const rank = static_cast<int>(cluster.block_rank());
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const column_warp = rank * kWarps + warp;

    // The cluster's share of the granules, and the warp's of the inputs.
    int const clusters = gridDim.x / kCluster, index = blockIdx.x / kCluster;
    int const granules = p.outputs / kGranule;
    int const first = share_begin(granules, index, clusters);
    int const count = share_begin(granules, index + 1, clusters) - first;
    int const lines = p.inputs / kColumns;
    int const runs = lines > column_warp ? (lines - column_warp - 1) / kRunWarps + 1 : 0;

    // -- loading: four rows of 128 bytes at a time, each second row's halves swapped
    int64_t const row_bytes = static_cast<int64_t>(p.inputs) * sizeof(W);
    int64_t const up_bytes = kSwiglu ? (p.outputs / 2 - kGranule / 2) * row_bytes : 0; // to up's row from where it were
    Cursor load{(static_cast<int64_t>(first) * kFirstRows + lane / 8) * row_bytes + column_warp * kLine
            + lane % 8 * 16,
        kFirstRows * row_bytes, kGranules, runs, kRunWarps * kLine, 0, runs, runs > 0 ? count : 0};
    load.granules_left = min(load.most, load.left);
    uint32_t const ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * L::kUnits * kUnit
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
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); // this block has begun
    uint32_t const own_barriers = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)) + warp * 16;
    if (lane == 0)
    {
        init_barrier(own_barriers);
        init_barrier(own_barriers + 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    wait();

    // -- the tokens' inputs, run by run, two runs ahead: lane l takes those of token l / 4 that meet its part of a row
    int const quad = lane / 4, part = lane % 4;
    int const passes = (count + kGranules - 1) / kGranules;
    int const input_runs = runs > 1 ? runs * passes : runs; // a single one stays in registers
    unsigned char* const own_inputs = inputs + warp * 2 * L::kInputs;
    int load_run = 0;
    auto const load_inputs = [&](int run) // of input_runs
    {
        uint32_t const barrier = own_barriers + run % 2 * 8;
        if (lane == 0)
        {
            expect_bytes(barrier, p.rows * kInputBytes);
        }
        __syncwarp();
        if (lane < p.rows)
        {
            char const* from = static_cast<char const*>(p.x) + static_cast<int64_t>(lane) * p.inputs * sizeof(T)
                + (column_warp + load_run * kRunWarps) * kInputBytes;
            uint32_t const to = static_cast<uint32_t>(__cvta_generic_to_shared(own_inputs)) + run % 2 * L::kInputs
                + lane * L::kPitch;
            copy_bulk(to, from, kInputBytes, barrier);
        }
        load_run = load_run + 1 == runs ? 0 : load_run + 1;
    };
    for (int run = 0; run < min(input_runs, 2); ++run)
    {
        load_inputs(run);
    }
    uint32_t b[2][kTiles][kPairs]; // both halves of a run
    auto const take_inputs = [&](int run)
    {
        wait_for_phase(own_barriers + run % 2 * 8, run / 2 % 2);
        unsigned char const* const from = own_inputs + run % 2 * L::kInputs + quad * L::kPitch + part * (kPairs * 4);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; i += 4)
            {
                int const half = i / kPairs, pair = i % kPairs;
                auto const v = *reinterpret_cast<uint4 const*>(
                    from + tile * 8 * L::kPitch + half * (kInputBytes / 2) + pair * 4);
                b[half][tile][pair] = v.x;
                b[half][tile][pair + 1] = v.y;
                b[half][tile][pair + 2] = v.z;
                b[half][tile][pair + 3] = v.w;
            }
        }
    };

    // -- results: of each granule of a pass, each block of the cluster finishes half of the rows
    float own[kOwn];
    struct Result
    {
        bool is_one;
        int token;
        int sum_row;
        int output;
    };
    auto const result_at = [&](int pass, int result, int of_rank)
    {
        int const token = result / (L::kRows / 2), granule = result % (L::kRows / 2) / 8, within = result % 8;
        // Gates and ups alternate by four, so that a warp has both of each.
        int const row = kSwiglu ? within % 4 + of_rank * 4 + within / 4 * 8 : within + of_rank * 8;
        int const global = first + pass * kGranules + granule;
        int const output = kSwiglu ? within / 4 * (p.outputs / 2) + global * 8 + row % 8 : global * kGranule + row;
        bool const is_one = token < p.rows && pass * kGranules + granule < count;
        return Result{is_one, token, granule * kGranule + row, output};
    };
    auto const finish = [&](int pass)
    {
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const result = threadIdx.x + i * kThreads;
            Result const at = result_at(pass, result, rank);
            float y = 0.f;
            if (at.is_one)
            {
                y = own[i] + inbox[pass % 2 * L::kInbox + result];
                if constexpr (std::is_same_v<W, E4M3>)
                {
                    y *= p.scale[at.output];
                }
                y = rounded<T>(y);
                if (p.bias)
                {
                    y = rounded<T>(y + to_float(static_cast<T const*>(p.bias)[at.output]));
                }
            }
            T* const out = static_cast<T*>(p.out);
            if constexpr (kSwiglu)
            {
                float const up = __shfl_down_sync(0xffffffffu, y, 4);
                if (at.is_one && result % 8 < 4)
                {
                    float const silu = rounded<T>(y / (1.f + expf(-y)));
                    out[static_cast<int64_t>(at.token) * (p.outputs / 2) + at.output] = from_float<T>(silu * up);
                }
            }
            else if (at.is_one)
            {
                out[static_cast<int64_t>(at.token) * p.outputs + at.output] = from_float<T>(y);
            }
        }
    };

    // -- multiplying: lane l has parts of the rows l / 4 and l / 4 + 8 of a granule
    uint32_t const at = quad * kLine + (part ^ (quad % 2 * 4)) * 16;
    int slot = 0;
    for (int pass = 0; pass < passes; ++pass)
    {
        int const active = min(kGranules, count - pass * kGranules);
        float c[kGranules][kTiles][4] = {};
        for (int run = 0; run < runs; ++run)
        {
            if (runs > 1 || pass == 0)
            {
                take_inputs(pass * runs + run);
            }
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
                if (granule < active)
                {
                    wait_for_copies<L::kUnits - 1>();
                    __syncwarp();
                    unsigned char const* const unit = shared + (warp * L::kUnits + slot) * kUnit;
                    uint4 upper[2], lower[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                    {
                        upper[half] = *reinterpret_cast<uint4 const*>(unit + (at ^ half * 64));
                        lower[half] = *reinterpret_cast<uint4 const*>(unit + (at ^ half * 64) + 8 * kLine);
                    }
                    slot = slot + 1 == L::kUnits ? 0 : slot + 1;
                    __syncwarp();
                    load_unit();
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                    {
                        uint32_t u[kPairs], v[kPairs];
                        Fragment<T, W>::decode(upper[half], u);
                        Fragment<T, W>::decode(lower[half], v);
#pragma unroll
                        for (int i = 0; i < kPairs; i += 2)
                        {
                            uint32_t const a[4] = {u[i], v[i], u[i + 1], v[i + 1]};
#pragma unroll
                            for (int tile = 0; tile < kTiles; ++tile)
                            {
                                multiply_add<T>(c[granule][tile], a, b[half][tile][i], b[half][tile][i + 1]);
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
                load_inputs(next_run);
            }
        }

        // -- adding up the warps' sums, in one order whatever the tokens are
        float* const mine = sums + warp % kSlots * L::kRows * L::kPadded;
        auto const each_sum = [&](auto const& use)
        {
#pragma unroll
            for (int granule = 0; granule < kGranules; ++granule)
            {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
#pragma unroll
                    for (int i = 0; i < 4; i += 2)
                    {
                        int const row = granule * kGranule + quad + i / 2 * 8;
                        float2& there = *reinterpret_cast<float2*>(mine + row * L::kPadded + tile * 8 + part * 2);
                        use(there, float2{c[granule][tile][i], c[granule][tile][i + 1]});
                    }
                }
            }
        };
        __syncthreads(); // the sums of the pass before have been read
        if (warp >= kSlots)
        {
            each_sum([](float2& there, float2 here) { there = here; });
        }
        __syncthreads();
        if (warp < kSlots)
        {
            each_sum([](float2& there, float2 here) { there = {there.x + here.x, there.y + here.y}; });
        }
        __syncthreads();

        // -- and the two blocks': the other one's half goes to its shared memory
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (pass > 0)
        {
            finish(pass - 1);
        }
        auto const block_sum = [&](int row, int token)
        {
            float const* from = sums + row * L::kPadded + token;
            constexpr int kStride = L::kRows * L::kPadded;
            return (from[0] + from[kStride]) + (from[2 * kStride] + from[3 * kStride]);
        };
        float* const other = cluster.map_shared_rank(inbox, rank ^ 1) + pass % 2 * L::kInbox;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
        {
            int const result = threadIdx.x + i * kThreads;
            Result const at = result_at(pass, result, rank);
            if (at.is_one)
            {
                own[i] = block_sum(at.sum_row, at.token);
                other[result] = block_sum(result_at(pass, result, rank ^ 1).sum_row, at.token);
            }
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    finish(passes - 1);
}

template <typename T, typename W, int kGranules, int kTokens, bool kSwiglu>
cudaError_t launch_layout(dflash_skinny_gemm_params const& p, int clusters, cudaStream_t stream)
{
    constexpr int kBytes = Layout<kGranules, kTokens, kLine / sizeof(W) * sizeof(T)>::kBytes;
    auto const kernel = skinny_gemm_kernel<T, W, kGranules, kTokens, kSwiglu>;
    static cudaError_t const raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    return raised ? raised : launch_kernel(kernel, dim3(clusters * kCluster), kThreads, kBytes, stream, p);
}

template <typename T, typename W, int kTokens, bool kSwiglu>
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
    case 1: return launch_layout<T, W, 1, kTokens, kSwiglu>(p, clusters, stream);
    case 2: return launch_layout<T, W, 2, kTokens, kSwiglu>(p, clusters, stream);
    case 3:
    case 4: return launch_layout<T, W, 4, kTokens, kSwiglu>(p, clusters, stream);
    default: return launch_layout<T, W, 6, kTokens, kSwiglu>(p, clusters, stream);
    }
}

template <typename T, typename W, bool kSwiglu>
cudaError_t launch_skinny_gemm(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    return p.rows <= 8 ? launch_tokens<T, W, 8, kSwiglu>(p, stream) : launch_tokens<T, W, 16, kSwiglu>(p, stream);
}

template <typename T>
cudaError_t launch_skinny_gemm_of(dflash_skinny_gemm_params const& p, cudaStream_t stream)
{
    if (p.weight_dtype == DFLASH_FP8)
    {
        return p.swiglu ? launch_skinny_gemm<T, E4M3, true>(p, stream) : launch_skinny_gemm<T, E4M3, false>(p, stream);
    }
    return p.swiglu ? launch_skinny_gemm<T, T, true>(p, stream) : launch_skinny_gemm<T, T, false>(p, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_skinny_gemm(dflash_skinny_gemm_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_fp8 = p->weight_dtype == DFLASH_FP8;
    int const columns = kLine / (is_fp8 ? 1 : 2);
    if (p->rows > DFLASH_SKINNY_ROWS || p->inputs < columns || p->inputs % columns || p->outputs < kGranule
        || p->outputs % kGranule || (is_fp8 ? p->scale == nullptr : p->weight_dtype != p->dtype))
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_skinny_gemm_of<__half>(*p, stream);
    case DFLASH_BF16: return launch_skinny_gemm_of<__nv_bfloat16>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}
