// The end of a chunk of a gated delta net's rows where a warp has all keys of its 16 values: nothing of it leaves the
// warp's registers but what outputs are normed by.
#pragma once

#include "delta_net_rows.cuh"

namespace dflash
{
namespace delta
{

template <typename T, int kSize, int kBlockValues>
struct TileFinish
{
    using D = Division<T, kSize, kBlockValues>;
    using S = Shared<T, kSize, kBlockValues>;

    Place<T, kSize, kBlockValues> const& place;
    S const& shared;
    DeltaLane const at;
    int const first = threadIdx.x / 32 * 16; // of the warp's values

    __device__ __forceinline__ int row(int i, int j) const
    {
        return 8 * i + 2 * at.column + j % 2;
    }

    __device__ __forceinline__ int value(int j) const
    {
        return first + at.row + j / 2 * 8;
    }

    // x [values, rows] as the left operand, rows [8 tile, 8 tile + 8).
    __device__ __forceinline__ static LeftParts left(TileNumbers const& x, int tile)
    {
        return {x[tile][0], x[tile][1], x[tile][2], x[tile][3]};
    }

    // sums += x * mix^T, of mix [16 rows, 16 rows] that has nothing above its diagonal.
    __device__ __forceinline__ void add_mixed(TileNumbers const& x, float const* mix, TileNumbers& sums) const
    {
        auto const right = [&](int rows, int tile)
        {
            float const* const from = mix + (8 * rows + at.row) * kMixStride + 8 * tile + 2 * at.column;
            return RightParts(*reinterpret_cast<float2 const*>(from));
        };
        float (*const both[2])[4] = {&sums[0], &sums[1]};
        RightParts const of_first[2] = {right(0, 0), right(1, 0)};
        add_products(both, left(x, 0), of_first);
        float (*const last[1])[4] = {&sums[1]};
        RightParts const of_last[1] = {right(1, 1)};
        add_products(last, left(x, 1), of_last);
    }

    // Computes what rows write of what the state gives their keys.
    __device__ __forceinline__ void write(Segment const& segment, TileNumbers const& of_keys, TileNumbers& writes) const
    {
        TileNumbers missing;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                float const own = shared.values[row(i, j) * S::kValueStride + value(j)];
                missing[i][j] = own - shared.kept[row(i, j)] * of_keys[i][j];
                writes[i][j] = 0.f;
            }
        }
        add_mixed(missing, shared.solved, writes);
        float* const to = place.writes(segment.slot, row(0, 0)) + value(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                if (row(i, j) < segment.count)
                {
                    to[(8 * i + j % 2) * place.values_of_row() + j / 2 * 8] = writes[i][j];
                }
            }
        }
    }

    // Sums of the squares of a head's values, of the rows of a lane.
    __device__ __forceinline__ void sum_squares(TileNumbers const& out, float (&sums)[2][2]) const
    {
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                float sum = out[i][j] * out[i][j] + out[i][j + 2] * out[i][j + 2];
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2)
                {
                    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
                }
                if (at.row == 0)
                {
                    shared.squares[first + row(i, j)] = sum;
                }
                sums[i][j] = 0.f;
            }
        }
        meet<kWorkersMeet, D::kWorkers>();
#pragma unroll
        for (int warp = 0; warp < D::kWarps; ++warp)
        {
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                float2 const x = *reinterpret_cast<float2 const*>(shared.squares + 16 * warp + row(i, 0));
                sums[i][0] += x.x;
                sums[i][1] += x.y;
            }
        }
    }

    // of_keys and of_queries: what the state gives the rows.
    __device__ __forceinline__ void run(
        Segment const& segment, float const (&norm)[2], TileNumbers const& of_keys, TileNumbers const& of_queries) const
    {
        TileNumbers writes;
        write(segment, of_keys, writes);
        TileNumbers out;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 4; ++j)
            {
                out[i][j] = shared.kept[row(i, j)] * of_queries[i][j];
            }
        }
        add_mixed(writes, shared.reads, out);
        float squares[2][2];
        sum_squares(out, squares);
        T const* const gates = shared.gates;
        int64_t const begins = int64_t{segment.first_row + row(0, 0)} * place.values_of_row();
        T* const to = static_cast<T*>(place.p.out) + begins + place.first_value() + value(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int j = 0; j < 2; ++j)
            {
                int const own = row(i, j);
                float const root = rsqrtf(squares[i][j] / static_cast<float>(kSize) + place.p.norm_eps);
                if (own < segment.count)
                {
#pragma unroll
                    for (int k = j; k < 4; k += 2)
                    {
                        float const gate = to_float(gates[own * D::kValues + value(k)]);
                        to[(8 * i + j) * place.values_of_row() + k / 2 * 8]
                            = from_float<T>(out[i][k] * root * norm[k / 2] * quick_silu(gate));
                    }
                }
            }
        }
    }
};

} // namespace delta
} // namespace dflash
