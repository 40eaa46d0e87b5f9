// Sums that wait in device memory.
#pragma once

#include <cstdint>

namespace dflash
{

// A thread's place in memory for sums of which it has no registers: of all threads' numbers whole lines.
template <int kThreads>
struct Parking
{
    float4* const place;

    // all: of the grid. of_a_thread: fours of numbers.
    __device__ __forceinline__ Parking(void* all, int of_a_thread)
        : place(static_cast<float4*>(all) + int64_t{blockIdx.x} * of_a_thread * kThreads + threadIdx.x)
    {
    }

    template <int N>
    __device__ __forceinline__ void put(float const (&sums)[N][4]) const
    {
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            __stcg(place + i * kThreads, make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
        }
    }

    template <int N>
    __device__ __forceinline__ void add_to(float (&sums)[N][4]) const
    {
        constexpr int kBatch = N / 2; // on their way at once
#pragma unroll
        for (int first = 0; first < N; first += kBatch)
        {
            float4 x[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                x[i] = __ldcg(place + (first + i) * kThreads);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
            {
                float (&sum)[4] = sums[first + i];
                sum[0] += x[i].x, sum[1] += x[i].y, sum[2] += x[i].z, sum[3] += x[i].w;
            }
        }
    }
};

} // namespace dflash
