// sanitizer: racecheck attention_(tails_)?sm90.cuh
//
// The merge of src/attention_sm90.cuh alone, and what it has in common with the results of exact tails, which lie in the
// same place: two groups of 128 threads give each other numbers through shared memory, and meet before and after at a
// barrier of 256. In between they multiply, and one meets at a barrier of its own, as where the last tile is its; by a
// word both do. Ends with 0 if all numbers that were read are the round's.
#include "instructions.cuh"
#include "wgmma.cuh"
using namespace dflash;
__device__ int wrong = 0;

template <int kApart> // groups that meet alone
__global__ void merge()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(1024) int4 tile[512]; // numbers of 16 bits [64, 64], all the same
    __shared__ float4 boxes[2][8][128];
    __shared__ uint64_t barriers[2];
    uint32_t const full = shared_address(barriers), empty = full + 8;
    uint64_t const matrix = sm90::matrix(shared_address(tile), 16, 1024); // its first 16 columns
    int const group = threadIdx.x / 128, lane = threadIdx.x % 128;
    if (threadIdx.x == 0)
        init_barrier(full, 1), init_barrier(empty, 8);
    __syncthreads();
    for (int round = 0; threadIdx.x == 256 && round < 100; ++round)
        wait_for_phase(empty, round % 2 ^ 1), arrive(full);
    for (int round = 0; group < 2 && round < 100; ++round)
    {
        int const one = round % 2, pair = one * 0x3c003c00; // or zero
        tile[threadIdx.x] = tile[threadIdx.x + 256] = make_int4(pair, pair, pair, pair);
        sm90::show_to_products();
        asm volatile("bar.sync 1, 256;" ::: "memory"); // all have read the boxes, and written the tile
        wait_for_phase(full, round % 2);
        float c[8][4] = {};
        sm90::begin_products(), sm90::multiply_add<__half>(c, matrix, matrix), sm90::commit_products();
        sm90::wait_for_products(c);
        if (group == 0)
            asm volatile("bar.sync 2, 128;" ::: "memory");
        else if (kApart > 1)
            asm volatile("bar.sync 3, 128;" ::: "memory");
        if (lane % 32 == 0)
            arrive(empty);
        for (int n = 0; n < 8; ++n)
            boxes[group][n][lane] = {c[n][0], c[n][1], c[n][2], c[n][3] + round};
        asm volatile("bar.sync 1, 256;" ::: "memory"); // all have multiplied, and written the boxes
        for (int n = 0; n < 8; ++n)
            if (float4 const x = boxes[1 - group][n][lane]; x.x + x.y + x.z + x.w != round + one * 64)
                atomicAdd(&wrong, 1);
    }
#endif
}

int main(int count, char**)
{
    (count > 1 ? merge<2> : merge<1>)<<<4, 288>>>();
    int found = 0;
    return cudaMemcpyFromSymbol(&found, wrong, sizeof(int)) != cudaSuccess || found != 0;
}
