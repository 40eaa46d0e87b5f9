// Sums of small tensors over the GPUs of one host: each rank reads all the others' numbers where they lie.
//
// A block puts its share of x into its own place in this rank's shared memory, tells the same block of every rank so,
// waits until all of them have, and sums. It has two such places and takes them by turns: a rank that writes the first
// one again has passed the call in between, which every rank must have begun, and so has ended the call before that.
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

namespace dflash
{
namespace
{

constexpr int kBlocks = 64; // at most
constexpr int kThreads = 256;
constexpr int kMostRanks = DFLASH_ALL_REDUCE_MOST_RANKS;
constexpr int64_t kPlace = DFLASH_ALL_REDUCE_MOST_BYTES / kBlocks; // bytes of a block's place

// Shared memory: places [2, blocks], the calls that each rank has told of [blocks, ranks], the calls so far [blocks].
constexpr int64_t kToldAt = 2 * kBlocks * kPlace;
constexpr int64_t kCallsAt = kToldAt + kBlocks * kMostRanks * sizeof(uint32_t);
static_assert(kCallsAt + kBlocks * sizeof(uint32_t) <= DFLASH_ALL_REDUCE_SHARED_BYTES, "shared memory is too small");

__device__ __forceinline__ void tell(uint32_t* to, uint32_t call)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(call) : "memory");
}

__device__ __forceinline__ uint32_t told(uint32_t const* from)
{
    uint32_t call;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(call) : "l"(from) : "memory");
    return call;
}

// Loads past this GPU's L1, which may hold older numbers of another rank.
__device__ __forceinline__ uint4 load_shared(char const* from)
{
    uint4 x;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from)
        : "memory");
    return x;
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads)
    all_reduce_kernel(__grid_constant__ dflash_all_reduce_params const p, int const per_block, int const vectors)
{
    constexpr int kPerVector = 16 / sizeof(T);
    using Numbers = Vector<T, kPerVector>;
    begin();
    int const block = blockIdx.x;
    int const first = block * per_block;
    int const past = min(first + per_block, vectors);
    char* const own = static_cast<char*>(p.shared[p.rank]);
    uint32_t* const calls = reinterpret_cast<uint32_t*>(own + kCallsAt) + block;
    uint32_t const call = __ldcg(calls) + 1;
    int64_t const place = (call % 2 * kBlocks + block) * kPlace;

    uint4 const* x = static_cast<uint4 const*>(p.x);
    for (int i = first + threadIdx.x; i < past; i += kThreads)
    {
        *reinterpret_cast<uint4*>(own + place + int64_t{i - first} * 16) = x[i];
    }
    __syncthreads();
    if (threadIdx.x < kRanks)
    {
        int const other = threadIdx.x;
        __threadfence_system();
        tell(reinterpret_cast<uint32_t*>(static_cast<char*>(p.shared[other]) + kToldAt) + block * kMostRanks + p.rank,
            call);
        uint32_t const* from = reinterpret_cast<uint32_t const*>(own + kToldAt) + block * kMostRanks + other;
        // A rank may be one call ahead already.
        while (static_cast<int32_t>(told(from) - call) < 0)
        {
        }
    }
    if (threadIdx.x == 0)
    {
        *calls = call;
    }
    __syncthreads();

    for (int i = first + threadIdx.x; i < past; i += kThreads)
    {
        uint4 loaded[kRanks];
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
        {
            loaded[rank] = load_shared(static_cast<char const*>(p.shared[rank]) + place + int64_t{i - first} * 16);
        }
        float sum[kPerVector] = {};
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
        {
            Numbers const& numbers = reinterpret_cast<Numbers const&>(loaded[rank]);
#pragma unroll
            for (int j = 0; j < kPerVector; ++j)
            {
                sum[j] += to_float(numbers.at[j]);
            }
        }
        Numbers out;
#pragma unroll
        for (int j = 0; j < kPerVector; ++j)
        {
            out.at[j] = from_float<T>(sum[j]);
        }
        store_vector(static_cast<T*>(p.out) + int64_t{i} * kPerVector, out);
    }
}

template <typename T>
cudaError_t launch_all_reduce(dflash_all_reduce_params const& p, cudaStream_t stream)
{
    int const vectors = static_cast<int>(p.count * sizeof(T) / 16);
    int const blocks = min((vectors + kThreads - 1) / kThreads, kBlocks);
    int const per_block = (vectors + blocks - 1) / blocks;
    auto const kernel = p.ranks == 2 ? all_reduce_kernel<T, 2>
        : p.ranks == 4               ? all_reduce_kernel<T, 4>
                                     : all_reduce_kernel<T, 8>;
    return launch_kernel(kernel, dim3(blocks), kThreads, 0, stream, p, per_block, vectors);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_all_reduce(dflash_all_reduce_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    if (p->dtype < DFLASH_FP16 || p->dtype > DFLASH_FP32 || p->count < 0)
    {
        return cudaErrorInvalidValue;
    }
    int64_t const bytes = p->count * (p->dtype == DFLASH_FP32 ? 4 : 2);
    bool const is_known = (p->ranks == 2 || p->ranks == 4 || p->ranks == 8) && p->rank >= 0 && p->rank < p->ranks;
    if (!is_known || bytes % 16 != 0 || bytes > DFLASH_ALL_REDUCE_MOST_BYTES)
    {
        return cudaErrorInvalidValue;
    }
    if (bytes == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_all_reduce<__half>(*p, stream);
    case DFLASH_BF16: return launch_all_reduce<__nv_bfloat16>(*p, stream);
    default: return launch_all_reduce<float>(*p, stream);
    }
}
