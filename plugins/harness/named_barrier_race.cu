// sanitizer: racecheck attend_kernel
//
// The merge of src/attention_sm90.cuh alone: two groups of 128 threads give each other numbers through shared memory
// and meet before and after, while a thread of a ninth warp runs ahead. They meet by a named barrier of 256, as the
// kernel does ("named", or no word), by the block's, with the ninth warp ("block"), or not at all ("unmet"). Prints how
// many of the numbers that were read are not those of the round, and ends with 0 if none is: "unmet" alone has a fault.
#include "instructions.cuh"

#include <cstdio>

__device__ void meet(char kind)
{
    if (kind == 'n')
        asm volatile("bar.sync 1, 256;" ::: "memory");
    else if (kind == 'b')
        __syncthreads();
}

__global__ void merge(char kind, int* wrong)
{
    __shared__ float4 boxes[2][9][128];
    __shared__ uint64_t barriers[2];
    uint32_t const full = dflash::shared_address(barriers), empty = full + 8;
    int const group = threadIdx.x / 128, lane = threadIdx.x % 128; // group 2: the ninth warp
    if (threadIdx.x == 0)
        dflash::init_barrier(full, 1), dflash::init_barrier(empty, 8);
    __syncthreads();
    for (int round = 0; round < 100; ++round)
    {
        if (group == 2 && lane == 0)
            dflash::wait_for_phase(empty, round % 2 ^ 1), dflash::arrive(full);
        else if (group < 2)
            dflash::wait_for_phase(full, round % 2);
        if (group < 2 || kind == 'b')
            meet(kind); // all have read what the last round wrote
        if (round % 2 == group)
            __nanosleep(1000);
        for (int n = 0; group < 2 && n < 9; ++n)
            boxes[group][n][lane] = make_float4(round, n, group, lane);
        if (group < 2 || kind == 'b')
            meet(kind); // all have written
        for (int n = 0; group < 2 && n < 9; ++n)
            if (float4 const x = boxes[1 - group][n][lane]; x.x != round || x.y != n || x.z == group || x.w != lane)
                atomicAdd(wrong, 1);
        if (group < 2 && lane % 32 == 0)
            dflash::arrive(empty);
    }
}

int main(int count, char** words)
{
    char const* kind = count > 1 ? words[1] : "named";
    int *on_device, wrong = -1;
    cudaMalloc(&on_device, sizeof(int)), cudaMemset(on_device, 0, sizeof(int));
    merge<<<4, 288>>>(kind[0], on_device);
    cudaError_t const error = cudaMemcpy(&wrong, on_device, sizeof(int), cudaMemcpyDeviceToHost);
    std::printf("%s: %d wrong, %s\n", kind, wrong, cudaGetErrorString(error));
    return wrong != 0;
}
