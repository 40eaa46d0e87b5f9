// A few heads' rows: staged in shared memory, convolved, normed, multiplied by each other's keys, and kept for the next
// step.
#pragma once

#include "delta_net_few_work.cuh"

namespace dflash
{
namespace delta
{
namespace few
{

template <typename T>
struct Rows
{
    using D = Division<T>;
    using S = Shared<T>;
    static constexpr int kNumbers = 16 / static_cast<int>(sizeof(T)); // of 16 bytes
    static constexpr int kCopies = S::kRawStride / kNumbers; // of a staged row
    static constexpr int kPairs = D::kValues / 2; // of a row's values

    Place<T> const& place;
    S const& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    // A channel's weights, of four channels of keys or queries and of two of values: a thread's.
    struct Weights
    {
        Vector<T, kTaps> keys[kLane];
        Vector<T, kTaps> values[2];
    };

    __device__ __forceinline__ void load_weights(int item, Weights& weights) const
    {
        int const first = (item >= 4 ? place.query_channel() : place.key_channel()) + lane * kLane;
        T const* const conv = static_cast<T const*>(place.p.conv);
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            weights.keys[i] = load_vector<T, kTaps>(conv + (first + i) * kTaps);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            int const channel = place.value_channel() + threadIdx.x % kPairs * 2 + i;
            weights.values[i] = load_vector<T, kTaps>(conv + channel * kTaps);
        }
    }

    // The channel of a number of a staged row.
    __device__ __forceinline__ int channel_of(int number) const
    {
        return number < kSize    ? place.query_channel() + number
            : number < 2 * kSize ? place.key_channel() + number - kSize
                                 : place.value_channel() + number - 2 * kSize;
    }

    // Stages the segment's rows, with those that their convolution sees. By all threads. Loops that stay loops: their
    // instructions come from memory, too.
    __device__ __forceinline__ void stage(Segment const& segment) const
    {
#pragma unroll 1
        for (int item = threadIdx.x; item < (kBefore + segment.count) * kCopies; item += D::kThreads)
        {
            stage_16(segment, item / kCopies, item % kCopies * kNumbers);
        }
    }

    // 16 bytes of the index-th row of those that the rows see.
    __device__ __forceinline__ void stage_16(Segment const& segment, int index, int number) const
    {
        int const own = index - kBefore;
        bool const is_row = own + segment.before >= 0;
        T const* const from = is_row ? place.row(segment.first_row + own)
                                     : place.window_row(segment.slot, segment.window + index + segment.before);
        delta::stage_16(
            shared.raw + index * S::kRawStride + number, from + channel_of(number), is_row || !segment.begins);
    }

    // Stages the keys of the pending rows that the state absorbs, and what they write.
    __device__ __forceinline__ void stage_pending(Segment const& segment) const
    {
        constexpr int kPending = (kSize + D::kValues) / 4;
#pragma unroll 1
        for (int item = threadIdx.x; item < kDeltaRows * kPending; item += D::kThreads)
        {
            int const row = item / kPending;
            int const number = item % kPending * 4;
            bool const is_there = row < segment.accepted;
            int const from = is_there ? row : 0;
            if (number < kSize)
            {
                float* const to = shared.parts + number / D::kPartKeys * S::kPart + row * S::kKeyStride;
                delta::stage_16(to + number % D::kPartKeys, place.keys(segment.slot, from) + number, is_there);
            }
            else
            {
                delta::stage_16(shared.writes + row * S::kValueStride + number - kSize,
                    place.writes(segment.slot, from) + number - kSize, is_there);
            }
        }
    }

    __device__ __forceinline__ static float mix(Vector<T, kTaps> const& taps, T a, T b, T c, T d)
    {
        float const before = fmaf(to_float(taps.at[1]), to_float(b), to_float(taps.at[0]) * to_float(a));
        return quick_silu(fmaf(to_float(taps.at[3]), to_float(d), fmaf(to_float(taps.at[2]), to_float(c), before)));
    }

    // Convolves `count` staged rows into keys and queries, normed, and values; rows behind them become zeros.
    __device__ __forceinline__ void convolve(Weights const& weights, int count) const
    {
        convolve_keys(weights, warp, count);
#pragma unroll 1
        for (int item = threadIdx.x; item < kDeltaRows * kPairs; item += D::kWorkers)
        {
            int const row = item / kPairs;
            int const pair = item % kPairs;
            T const* const from = shared.raw + row * S::kRawStride + 2 * kSize + 2 * pair;
            Vector<T, 2> x[kTaps];
#pragma unroll
            for (int i = 0; i < kTaps; ++i)
            {
                x[i] = load_vector<T, 2>(from + i * S::kRawStride);
            }
            float2 const y = {mix(weights.values[0], x[0].at[0], x[1].at[0], x[2].at[0], x[3].at[0]),
                mix(weights.values[1], x[0].at[1], x[1].at[1], x[2].at[1], x[3].at[1])};
            *reinterpret_cast<float2*>(shared.values + row * S::kValueStride + 2 * pair)
                = row < count ? y : float2{0.f, 0.f};
        }
    }

    // The item is four rows of the keys or of the queries; a lane has four channels.
    __device__ __forceinline__ void convolve_keys(Weights const& weights, int item, int count) const
    {
        bool const is_query = item >= 4;
        int const first = item % 4 * 4;
        int const number = lane * kLane;
        T const* const from = shared.raw + first * S::kRawStride + (is_query ? 0 : kSize) + number;
        float const scale = is_query ? rsqrtf(static_cast<float>(kSize)) : 1.f;
        SplitRows<kSize> const to = shared.rows(is_query);
        float sums[4] = {}; // those of the rows so far stand last
#pragma unroll 1
        for (int i = 0; i < 4; ++i)
        {
            Vector<T, kLane> x[kTaps];
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap)
            {
                x[tap] = load_vector<T, kLane>(from + (i + tap) * S::kRawStride);
            }
            float y[kLane];
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kLane; ++j)
            {
                float const out = mix(weights.keys[j], x[0].at[j], x[1].at[j], x[2].at[j], x[3].at[j]);
                y[j] = first + i < count ? out : 0.f;
                sum += y[j] * y[j];
            }
            to.keep(first + i, number, {y[0], y[1], y[2], y[3]});
#pragma unroll
            for (int j = 0; j < 3; ++j)
            {
                sums[j] = sums[j + 1];
            }
            sums[3] = sum;
        }
#pragma unroll 1
        for (int step = 16; step > 0; step /= 2)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
            }
        }
#pragma unroll 1
        for (int i = 0; i < 4; ++i)
        {
            float const by = rsqrtf(sums[0] + kLengthEps) * scale;
            float4 const y = to.kept(first + i, number);
            to.store(first + i, number, FourParts(float4{y.x * by, y.y * by, y.z * by, y.w * by}));
#pragma unroll
            for (int j = 0; j < 3; ++j)
            {
                sums[j] = sums[j + 1];
            }
        }
    }

    // Multiplies keys and queries by keys. By items of 8 columns of one of both, over half of the numbers.
    __device__ __forceinline__ void multiply_keys() const
    {
        for (int item = warp; item < 8; item += D::kWarps)
        {
            int const columns = item % 2 * 8;
            bool const is_query = item / 2 % 2;
            float* const to = shared.products + (item / 4 * 2 + is_query) * S::kMix + columns;
            multiply_rows<kSize, 1>(shared.rows(is_query), shared.keys, columns, item / 4, to, kMixStride);
        }
    }

    // Writes the rows that the next step's convolution sees: the rows and those before them. The keys' and the
    // queries' are the last block's to write, as are the pending rows' keys.
    __device__ __forceinline__ void keep(Segment const& segment, bool is_last) const
    {
        constexpr int kOfValues = D::kValues / kNumbers;
        int const copies = is_last ? kCopies : kOfValues; // the last ones of a row
#pragma unroll 1
        for (int item = threadIdx.x; item < (kBefore + segment.count) * copies; item += D::kWorkers)
        {
            int const row = is_last ? item / kCopies : item / kOfValues;
            int const number = (kCopies - copies + item - row * copies) * kNumbers;
            store_vector(place.window_row(segment.slot, row) + channel_of(number),
                load_vector<T, kNumbers>(shared.raw + row * S::kRawStride + number));
        }
#pragma unroll 1
        for (int item = threadIdx.x; is_last && item < kSize / kLane * segment.count; item += D::kWorkers)
        {
            int const row = item / (kSize / kLane);
            int const number = item % (kSize / kLane) * kLane;
            *reinterpret_cast<float4*>(place.keys(segment.slot, row) + number) = shared.keys.load(row, number);
        }
    }
};

} // namespace few
} // namespace delta
} // namespace dflash
