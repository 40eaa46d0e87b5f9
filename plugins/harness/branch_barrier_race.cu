// sanitizer: racecheck delta_net_few(_rows|_solver)?
//
// The barriers of src/delta_net_few.cuh alone: all threads meet where two branches of the code have it, and one warp
// waits for what the four others write before they arrive. By a word the arrivals are no barriers that those pass: if
// they pass one more, by pairs of warps, nothing is reported. Ends with 0 if all numbers that were read are the
// round's.
#include <cuda_runtime.h>
__device__ int wrong = 0;
constexpr int kWorkers = 128;
constexpr int kThreads = kWorkers + 32;
constexpr int kRounds = 100;

template <int kBarrier>
__device__ __forceinline__ void meet()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

template <bool kApart> // pairs of warps meet alone
__global__ void exchange()
{
    __shared__ float products[kWorkers], staged[kThreads];
    bool const is_solver = threadIdx.x >= kWorkers;
    for (int round = 0; is_solver && round < kRounds; ++round)
    {
        staged[threadIdx.x] = round;
        meet<0>(); // rows are staged
        meet<2>(); // products are there
        for (int i = threadIdx.x % 32; i < kWorkers; i += 32)
            if (products[i] != round + i)
                atomicAdd(&wrong, 1);
        meet<0>(); // products have been read
    }
    for (int round = 0; !is_solver && round < kRounds; ++round)
    {
        staged[threadIdx.x] = round;
        meet<0>();
        float const of_solver = staged[kWorkers + threadIdx.x % 32], of_worker = staged[threadIdx.x ^ 1];
        if (of_solver != round || of_worker != round)
            atomicAdd(&wrong, 1);
        products[threadIdx.x] = round + threadIdx.x;
        asm volatile("barrier.arrive 2, %0;" ::"n"(kThreads) : "memory");
        if (kApart)
            asm volatile("bar.sync %0, 64;" ::"r"(3 + threadIdx.x / 64) : "memory");
        meet<0>();
    }
}

int main(int count, char**)
{
    (count > 1 ? exchange<true> : exchange<false>)<<<4, kThreads>>>();
    int found = 0;
    return cudaMemcpyFromSymbol(&found, wrong, sizeof(int)) != cudaSuccess || found != 0;
}
