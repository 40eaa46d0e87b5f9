// sanitizer: racecheck experts_many_loading_sm90.cuh
//
// The ring of src/experts_many_sm90.cuh alone, as tiles come and are read: a thread has bulk copies bring them, all
// lanes of four warps read and multiply, and one lane of each arrives for all, behind __syncwarp(), of which a NOP is
// left. By a word every lane arrives, by two one does behind a WARPSYNC, by three behind nothing but its warpgroup's
// products. Ends with 0 if all numbers that were read are the round's.
#include "experts_many_loading_sm90.cuh"
#include "experts_tiles.cuh"
#include "wgmma.cuh"
using namespace dflash;
__device__ int wrong = 0;
constexpr int kReaders = 128;
constexpr int kRounds = 100;
__device__ uint4 tiles[kRounds][kReaders]; // numbers of 16 bits, each its round

enum class Arrival
{
    kLane, // as in Mainloop::multiply_alone
    kEveryLane,
    kLaneBehindWarpsync,
    kLaneBehindProducts // as in Mainloop::multiply
};

__global__ void fill()
{
    __half2 const pair = __float2half2_rn(blockIdx.x);
    uint32_t const x = reinterpret_cast<uint32_t const&>(pair);
    tiles[blockIdx.x][threadIdx.x] = make_uint4(x, x, x, x);
}

template <Arrival kArrival>
__global__ void ring()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kStages = 2;
    constexpr uint32_t kOnes = 0x3c003c00;
    constexpr bool kIsEvery = kArrival == Arrival::kEveryLane;
    __shared__ __align__(1024) uint4 ones[kReaders]; // numbers of 16 bits [16, 64]
    __shared__ uint4 stages[kStages][kReaders];
    __shared__ uint64_t barriers[2 * kStages];
    uint32_t const full = shared_address(barriers), empty = full + kStages * 8;
    moe::many::Place next;
    for (int i = 0; threadIdx.x == 0 && i < kStages; ++i)
        init_barrier(full + i * 8, 1), init_barrier(empty + i * 8, kIsEvery ? kReaders : kReaders / 32);
    fence_barrier_inits();
    if (threadIdx.x < kReaders)
        ones[threadIdx.x] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    sm90::show_to_products();
    __syncthreads();
    if (__shfl_sync(~0u, threadIdx.x / 32, 0) == kReaders / 32) // which says that it is a warp's
    {
        for (int round = 0; threadIdx.x == kReaders && round < kRounds; ++round, next.advance(kStages))
        {
            uint32_t const barrier = full + next.at * 8, to = shared_address(stages[next.at]);
            wait_for_phase(empty + next.at * 8, next.phase ^ 1);
            expect_bytes(barrier, sizeof(stages[0]));
            moe::many::copy_bytes_once(to, tiles[round], sizeof(stages[0]), barrier, read_once_policy());
        }
        return;
    }
    int others = 0;
    for (int round = 0; round < kRounds; ++round, next.advance(kStages))
    {
        wait_for_phase(full + next.at * 8, next.phase);
        uint4 const x = moe::read_16(shared_address(stages[next.at] + threadIdx.x));
        uint32_t const a[4] = {x.x, x.y, x.z, x.w};
        float c[2][4] = {};
        if constexpr (kArrival == Arrival::kLaneBehindProducts)
        {
            sm90::begin_products();
            sm90::multiply_add_rows<__half>(c, a, sm90::matrix(shared_address(ones), 16, 1024));
            sm90::commit_products();
            sm90::wait_for_products(c);
        }
        else
            multiply_add<__half>(c[0], a, kOnes, kOnes);
        for (float sum : c[0])
            others += sum != 16 * round;
        if (kArrival == Arrival::kLaneBehindWarpsync && others > 0)
            __trap(); // or not: the compiler does not know that lanes are together now
        if constexpr (kArrival == Arrival::kLane || kArrival == Arrival::kLaneBehindWarpsync)
            __syncwarp();
        if ((kIsEvery || threadIdx.x % 32 == 0) && c[0][0] >= 0) // always: not before the numbers are there
            arrive(empty + next.at * 8);
    }
    atomicAdd(&wrong, others);
#endif
}

int main(int count, char**)
{
    fill<<<kRounds, kReaders>>>();
    auto const run = count == 1 ? ring<Arrival::kLane>
        : count == 2            ? ring<Arrival::kEveryLane>
        : count == 3            ? ring<Arrival::kLaneBehindWarpsync>
                                : ring<Arrival::kLaneBehindProducts>;
    run<<<4, kReaders + 32>>>();
    int found = 0;
    return cudaMemcpyFromSymbol(&found, wrong, sizeof(int)) != cudaSuccess || found != 0;
}
