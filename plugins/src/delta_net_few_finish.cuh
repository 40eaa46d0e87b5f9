// The end of a few heads' rows: what they write, and their outputs.
#pragma once

#include "cluster.cuh"
#include "delta_net_few_work.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

template <typename T>
struct Finish
{
    using D = Division<T>;
    using S = Shared<T>;

    Place<T> const& place;
    S const& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    // Of a warp's rows: of each a lane has one value.
    using Numbers = float[D::kRowsOfWarp];

    struct Outputs
    {
        Numbers out;
        T gates[D::kRowsOfWarp];
    };

    __device__ __forceinline__ int row_of(int i) const
    {
        return warp * D::kRowsOfWarp + i;
    }

    __device__ __forceinline__ void load_gates(Segment const& segment, Outputs& outputs) const
    {
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            T const* const from = place.row(segment.first_row + min(row_of(i), segment.count - 1)) + place.channels()
                + place.first_value();
            outputs.gates[i] = from[lane];
        }
    }

    // Sums up the parts: what the state has not of the rows' values, and what their queries read.
    __device__ __forceinline__ void sum_parts(Numbers& of_queries) const
    {
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            float sums[2] = {};
#pragma unroll
            for (int from = 0; from < D::kParts; ++from)
            {
                float const* const part = shared.parts + from * S::kPart + row_of(i) * S::kValueStride + lane;
                sums[0] += part[0];
                sums[1] += part[kDeltaRows * S::kValueStride];
            }
            float const kept = shared.kept[row_of(i)];
            float* const to = shared.values + row_of(i) * S::kValueStride + lane;
            float const left = *to - kept * sums[0];
            __syncwarp(); // or the compiler loads the next row's parts ahead, into four registers more
            *to = left;
            of_queries[i] = kept * sums[1];
        }
    }

    // sums[i] += row i of the warp's of mix [16, 16] * x [16, values]
    __device__ __forceinline__ void add_mixed(float const* mix, float const* x, Numbers& sums) const
    {
        float column[kDeltaRows];
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i)
        {
            column[i] = x[i * S::kValueStride + lane];
        }
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            float4 const* const row = reinterpret_cast<float4 const*>(mix + row_of(i) * kMixStride);
#pragma unroll
            for (int part = 0; part < kDeltaRows / 4; ++part)
            {
                float4 const by = row[part];
                sums[i] = fmaf(by.x, column[4 * part], sums[i]);
                sums[i] = fmaf(by.y, column[4 * part + 1], sums[i]);
                sums[i] = fmaf(by.z, column[4 * part + 2], sums[i]);
                sums[i] = fmaf(by.w, column[4 * part + 3], sums[i]);
            }
        }
    }

    // Keeps what the rows write.
    __device__ __forceinline__ void keep_writes(Segment const& segment, Numbers const& writes) const
    {
        float* const to = place.writes(segment.slot, row_of(0)) + lane;
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            shared.writes[row_of(i) * S::kValueStride + lane] = writes[i];
            if (row_of(i) < segment.count)
            {
                to[i * place.values_of_row()] = writes[i];
            }
        }
    }

    __device__ __forceinline__ static void copy(Numbers const& from, Numbers& to)
    {
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            to[i] = from[i];
        }
    }

    // Sums of squares over all values of the head.
    __device__ __forceinline__ void sum_squares(Numbers const& out, Numbers& sums) const
    {
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            sums[i] = warp_sum(out[i] * out[i]);
        }
        float const* const inbox = shared.squares;
        int const to = lane % D::kSplits;
        int const row = lane / D::kSplits; // of the warp's
        float own[1] = {sums[0]};
#pragma unroll
        for (int i = 1; i < D::kRowsOfWarp; ++i)
        {
            own[0] = row == i ? sums[i] : own[0];
        }
        if (row < D::kRowsOfWarp)
        {
            uint32_t const at = shared_address(inbox + place.split * kDeltaRows + row_of(row));
            send(address_at(at, to), own, address_at(shared.squares_barrier, to));
        }
        wait_for_phase(shared.squares_barrier, 0);
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            sums[i] = 0.f;
#pragma unroll
            for (int from = 0; from < D::kSplits; ++from)
            {
                sums[i] += inbox[from * kDeltaRows + row_of(i)];
            }
        }
    }

    __device__ __forceinline__ void write_out(
        Segment const& segment, Outputs const& outputs, float norm, Numbers const& squares) const
    {
        int64_t const to = int64_t{segment.first_row + row_of(0)} * place.values_of_row();
        T* const out = static_cast<T*>(place.p.out) + to + place.first_value() + lane;
#pragma unroll
        for (int i = 0; i < D::kRowsOfWarp; ++i)
        {
            float const root = rsqrtf(squares[i] / static_cast<float>(kSize) + place.p.norm_eps);
            if (row_of(i) < segment.count)
            {
                out[i * place.values_of_row()]
                    = from_float<T>(outputs.out[i] * root * norm * quick_silu(to_float(outputs.gates[i])));
            }
        }
    }

    __device__ __forceinline__ void run(Segment const& segment, float norm, Outputs& outputs) const
    {
        sum_parts(outputs.out);
        meet<kWorkersMeet, D::kWorkers>();
        float const* mix = shared.solved;
        float const* x = shared.values;
        Numbers sums = {};
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) // what rows write, then what they give
        {
            add_mixed(mix, x, sums);
            if (turn == 0)
            {
                keep_writes(segment, sums);
                meet<kWorkersMeet, D::kWorkers>();
                mix = shared.reads;
                x = shared.writes;
                copy(outputs.out, sums);
            }
        }
        copy(sums, outputs.out);
        Numbers squares;
        sum_squares(outputs.out, squares);
        write_out(segment, outputs, norm, squares);
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
