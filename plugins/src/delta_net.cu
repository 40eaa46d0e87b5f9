// Gated delta nets: convolution, gates, the state's pending rows, and what new rows read, write and give, in one kernel
// that reads a state once and writes it at most once.
//
// A block has one value head of one segment. 16 rows at a time are taken by products alone (the delta rule's chunk
// form): with k, q, v of rows i and j, the decays d, D_ij = d_j+1 * ... * d_i and E_i = d_0 * ... * d_i,
//
//     A_ij = b_i D_ij (k_i k_j) below the diagonal;  U = (I + A)^-1 (b (v - E (k S)));  o = E (q S) + (D (q k)) U
//     S <- E_n S + sum of D_nj k_j u_j, of as many rows as stay.
//
// Decays are multiplied, never divided: one of 0 is as good as any.
//
// The value heads of one key head share its keys, the pending ones too, and the window's rows. Who writes those is the
// last block that has read them.
#include "delta_net_products.cuh"
#include "dflash_kernels.h"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

constexpr int kTaps = 4;
constexpr int kBefore = kTaps - 1; // rows in front of a row that its convolution sees
constexpr int kLane = 4; // numbers that a lane has of a row
constexpr float kLengthEps = 1e-6f; // of keys and queries
constexpr int kMixStride = 24; // of 16 x 16 numbers: rows apart begin in other banks

template <typename T>
__device__ __forceinline__ float4 load_four(T const* from)
{
    auto const x = load_vector<T, kLane>(from);
    return {to_float(x.at[0]), to_float(x.at[1]), to_float(x.at[2]), to_float(x.at[3])};
}

template <typename T>
__device__ __forceinline__ void store_four(T* to, float4 x)
{
    store_vector(to, Vector<T, kLane>{from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)});
}

// Without what numbers below 2^-126 would take: exp(-x) of a large x is 0, of a small one infinite.
__device__ __forceinline__ float quick_silu(float x)
{
    float power = 0.f;
    float inverse = 0.f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
    return x * inverse;
}

// What a block works on.
struct Work
{
    int head; // value head
    int key_head;
    int slot;
    int first_row; // among all rows
    int count;
    int absorbed; // rows that the state absorbs at once; those behind them stay beside it
    int accepted; // pending rows of the step before that the state absorbs first
    bool begins; // at position 0: there is nothing before
    bool is_zero; // the state: what lies there is another sequence's

    __device__ __forceinline__ explicit Work(dflash_delta_net_params const& p, int4 segment)
        : head(blockIdx.x)
        , key_head(blockIdx.x / (p.value_heads / p.key_heads))
        , slot(segment.x)
        , first_row(segment.z)
        , count(segment.w)
        , absorbed(max(segment.w - p.pending, 0))
        , begins(segment.y == 0)
    {
        int const length = count > 0 ? p.lengths[slot] : 0;
        accepted = begins ? 0 : min(max(segment.y - length, 0), p.pending);
        is_zero = begins || length == 0;
    }

    // Rows from `row` on that are taken together.
    __device__ __forceinline__ int rows_at(int row) const
    {
        return row < absorbed ? min(kDeltaRows, absorbed - row) : count - row;
    }
};

// 16 rows in shared memory that a state absorbs.
template <int kSize>
struct Rows
{
    static constexpr int kWords = SplitPairs<kSize>::kWords + 3 * kDeltaRows;

    SplitPairs<kSize> keys;
    float* decays; // [16] each
    float* kept; // E
    float* behind; // what is left of a row behind the last

    __device__ __forceinline__ explicit Rows(float* at)
        : keys{reinterpret_cast<uint32_t*>(at)}
        , decays(at + SplitPairs<kSize>::kWords)
        , kept(decays + kDeltaRows)
        , behind(kept + kDeltaRows)
    {
    }
};

template <int kSize>
struct Shared
{
    static constexpr int kValueStride = kSize + 4;
    static constexpr int kMix = kDeltaRows * kMixStride;

    float* at;
    SplitRows<kSize> keys;
    SplitRows<kSize> queries;
    float* values; // [16, kSize]: v, and then what rows read
    float* products; // [2 halves of the keys, k k and q k, 16, 16]
    float* lower; // [16, 16]: A
    float* writes; // [16, 16]: (I + A)^-1 with the rows' shares
    float* reads; // [16, 16]: D (q k)
    float* shares; // [16]
    int* is_last; // [1]

    static constexpr int kBytes = 4
        * (2 * (Rows<kSize>::kWords + SplitRows<kSize>::kWords) + kDeltaRows * kValueStride + 7 * kMix + kDeltaRows + 4);

    __device__ __forceinline__ explicit Shared(float* memory)
        : at(memory)
        , keys{reinterpret_cast<uint32_t*>(at + 2 * Rows<kSize>::kWords)}
        , queries{keys.words + SplitRows<kSize>::kWords}
        , values(at + 2 * Rows<kSize>::kWords + 2 * SplitRows<kSize>::kWords)
        , products(values + kDeltaRows * kValueStride)
        , lower(products + 4 * kMix)
        , writes(lower + kMix)
        , reads(writes + kMix)
        , shares(reads + kMix)
        , is_last(reinterpret_cast<int*>(shares + kDeltaRows))
    {
    }

    // Two of them, by turns: the rows that are computed, and those before them.
    __device__ __forceinline__ Rows<kSize> rows(int turn) const
    {
        return Rows<kSize>(at + turn * Rows<kSize>::kWords);
    }
};

template <typename T, int kSize>
struct DeltaNet
{
    static constexpr int kWarps = kSize / 16;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRowsOfWarp = kDeltaRows / kWarps;

    dflash_delta_net_params const& p;
    Work const& work;
    Shared<kSize> const& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    __device__ __forceinline__ int channels() const
    {
        return (2 * p.key_heads + p.value_heads) * kSize;
    }

    __device__ __forceinline__ int query_channel() const
    {
        return work.key_head * kSize;
    }

    __device__ __forceinline__ int key_channel() const
    {
        return (p.key_heads + work.key_head) * kSize;
    }

    __device__ __forceinline__ int value_channel() const
    {
        return (2 * p.key_heads + work.head) * kSize;
    }

    __device__ __forceinline__ T const* row_of(int row) const
    {
        return static_cast<T const*>(p.x) + int64_t{work.first_row + row} * p.x_row_stride;
    }

    __device__ __forceinline__ T* window_row(int row) const
    {
        return static_cast<T*>(p.window) + (int64_t{work.slot} * (kBefore + p.pending) + row) * channels();
    }

    // Of a slot's pending row, in tensors [slots, pending, heads, kSize].
    __device__ __forceinline__ float* pending_of(void* of, int row, int heads, int head) const
    {
        return static_cast<float*>(of) + ((int64_t{work.slot} * p.pending + row) * heads + head) * kSize;
    }

    __device__ __forceinline__ float* state() const
    {
        return static_cast<float*>(p.states) + (int64_t{work.slot} * p.value_heads + work.head) * kSize * kSize
            + warp * 16 * kSize;
    }

    // A lane's output gates, of its warp's rows.
    struct OutputGates
    {
        Vector<T, kLane> at[kRowsOfWarp];
        float4 weight; // of the norm
    };

    // What a lane's four channels of kRows rows are convolved from: on its way from memory while others are computed.
    template <int kRows>
    struct Window
    {
        Vector<T, kTaps> taps[kLane];
        Vector<T, kLane> rows[kRows + kBefore];
    };

    // Loads it for rows from `row` on; those from `end` on are zeros.
    template <int kRows>
    __device__ __forceinline__ void load_window(int channel, int row, int end, Window<kRows>& x) const
    {
        T const* const weights = static_cast<T const*>(p.conv) + channel * kTaps;
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            x.taps[i] = load_vector<T, kTaps>(weights + i * kTaps);
        }
        T const* const first = row_of(row - kBefore) + channel;
#pragma unroll
        for (int i = 0; i < kRows + kBefore; ++i)
        {
            int const own = row + i - kBefore;
            bool const is_there = own < end && (own >= 0 || !work.begins);
            T const* const from
                = own >= 0 ? first + i * p.x_row_stride : window_row(work.accepted + kBefore + own) + channel;
            x.rows[i] = is_there ? load_vector<T, kLane>(from) : Vector<T, kLane>{};
        }
    }

    template <int kRows>
    __device__ __forceinline__ void convolve(Window<kRows> const& x, int row, int end, float4 (&y)[kRows]) const
    {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
        {
            float out[kLane];
#pragma unroll
            for (int j = 0; j < kLane; ++j)
            {
                auto const& taps = x.taps[j];
                out[j] = mix(taps, x.rows[i].at[j], x.rows[i + 1].at[j], x.rows[i + 2].at[j], x.rows[i + 3].at[j]);
            }
            y[i] = row + i < end ? float4{out[0], out[1], out[2], out[3]} : float4{};
        }
    }

    __device__ __forceinline__ static float mix(Vector<T, kTaps> const& taps, T a, T b, T c, T d)
    {
        float const before = fmaf(to_float(taps.at[1]), to_float(b), to_float(taps.at[0]) * to_float(a));
        return quick_silu(fmaf(to_float(taps.at[3]), to_float(d), fmaf(to_float(taps.at[2]), to_float(c), before)));
    }

    // Fills in keys and queries of rows from `row` on, normed, and values: by items of four rows of keys or queries, and
    // of two of values.
    __device__ __forceinline__ void fill_rows(Rows<kSize> const& rows, int row, int end) const
    {
        bool const has_numbers = lane * kLane < kSize;
        for (int item = warp; item < 8; item += kWarps)
        {
            bool const is_query = item >= 4;
            int const own = item % 4 * 4;
            Window<4> keys = {};
            Window<2> values = {};
            if (has_numbers)
            {
                load_window<4>((is_query ? query_channel() : key_channel()) + lane * kLane, row + own, end, keys);
                load_window<2>(value_channel() + lane * kLane, row + 2 * item, end, values);
            }
            store_keys(rows, keys, row, own, end, is_query);
            float4 y[2];
            convolve<2>(values, row + 2 * item, end, y);
#pragma unroll
            for (int i = 0; i < 2; ++i)
            {
                if (has_numbers)
                {
                    float* const to = shared.values + (2 * item + i) * Shared<kSize>::kValueStride + lane * kLane;
                    *reinterpret_cast<float4*>(to) = y[i];
                }
            }
        }
    }

    __device__ __forceinline__ void store_keys(
        Rows<kSize> const& rows, Window<4> const& window, int row, int own, int end, bool is_query) const
    {
        float4 y[4];
        convolve<4>(window, row + own, end, y);
        float const scale = is_query ? rsqrtf(static_cast<float>(kSize)) : 1.f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            float const sum = warp_sum(y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w);
            float const by = rsqrtf(sum + kLengthEps) * scale;
            y[i] = {y[i].x * by, y[i].y * by, y[i].z * by, y[i].w * by};
        }
        if (lane * kLane < kSize)
        {
            SplitRows<kSize> const to = is_query ? shared.queries : shared.keys;
#pragma unroll
            for (int i = 0; i < 4; i += 2)
            {
                FourParts const first(y[i]);
                FourParts const second(y[i + 1]);
                to.store(own + i, lane * kLane, first);
                to.store(own + i + 1, lane * kLane, second);
                if (!is_query)
                {
                    rows.keys.store((own + i) / 2, lane * kLane, first, second);
                }
            }
        }
    }

    // A lane's row's share and decay, as projected.
    struct Gates
    {
        T share;
        T decay;
        float rate;
        float bias;
    };

    __device__ __forceinline__ Gates load_gates(int row, int count) const
    {
        int const own = min(lane, count - 1);
        T const* const gates = static_cast<T const*>(p.gates)
            + int64_t{work.first_row + row + own} * p.gates_row_stride + work.head;
        return {gates[0], gates[p.value_heads], static_cast<float const*>(p.a_log)[work.head],
            static_cast<float const*>(p.dt_bias)[work.head]};
    }

    // Fills in the numbers that rows have of the head. By one warp, each lane with a row.
    __device__ __forceinline__ void fill_gates(Rows<kSize> const& rows, Gates const& gates, int count) const
    {
        float const a = to_float(gates.decay) + gates.bias;
        float const decay = expf(-expf(gates.rate) * (fmaxf(a, 0.f) + log1pf(expf(-fabsf(a)))));
        fill_decays(rows, lane < count ? decay : 1.f);
        if (lane < kDeltaRows)
        {
            shared.shares[lane] = lane < count ? 1.f / (1.f + expf(-to_float(gates.share))) : 0.f;
        }
    }

    __device__ __forceinline__ void fill_decays(Rows<kSize> const& rows, float decay) const
    {
        float const kept = product_to(decay);
        float const behind = product_behind(decay);
        if (lane < kDeltaRows)
        {
            rows.decays[lane] = decay;
            rows.kept[lane] = kept;
            rows.behind[lane] = behind;
        }
    }

    // The i-th of a warp's pending rows: they are pairs.
    __device__ __forceinline__ int row_of_pending(int i) const
    {
        return 2 * (warp + i / 2 * kWarps) + i % 2;
    }

    // Loads the keys of the pending rows that the state absorbs: a warp's.
    __device__ __forceinline__ void load_pending_keys(float4 (&keys)[kRowsOfWarp]) const
    {
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
        {
            int const row = row_of_pending(i);
            keys[i] = row < work.accepted && lane * kLane < kSize
                ? load_four(pending_of(p.keys, row, p.key_heads, work.key_head) + lane * kLane)
                : float4{};
        }
    }

    // Fills in those keys, and what is left of each row. By all warps.
    __device__ __forceinline__ void fill_pending(Rows<kSize> const& rows, float4 const (&keys)[kRowsOfWarp]) const
    {
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i += 2)
        {
            if (lane * kLane < kSize)
            {
                rows.keys.store(row_of_pending(i) / 2, lane * kLane, FourParts(keys[i]), FourParts(keys[i + 1]));
            }
        }
        if (warp == kWarps - 1)
        {
            float const* const decays = static_cast<float const*>(p.decays);
            int64_t const at = (int64_t{work.slot} * p.pending + lane) * p.value_heads + work.head;
            fill_decays(rows, lane < work.accepted ? decays[at] : 1.f);
        }
    }

    // Products of what the first lanes have, up to a lane's own, and behind it up to row 15.
    __device__ __forceinline__ float product_to(float x) const
    {
#pragma unroll
        for (int step = 1; step < kDeltaRows; step *= 2)
        {
            float const before = __shfl_up_sync(0xffffffffu, x, step, kDeltaRows);
            x *= lane % kDeltaRows >= step ? before : 1.f;
        }
        return x;
    }

    __device__ __forceinline__ float product_behind(float x) const
    {
        float const next = __shfl_down_sync(0xffffffffu, x, 1, kDeltaRows);
        x = lane % kDeltaRows < kDeltaRows - 1 ? next : 1.f;
#pragma unroll
        for (int step = 1; step < kDeltaRows; step *= 2)
        {
            float const after = __shfl_down_sync(0xffffffffu, x, step, kDeltaRows);
            x *= lane % kDeltaRows + step < kDeltaRows ? after : 1.f;
        }
        return x;
    }

    // Loads what the pending rows write, [16 values of the warp, 16 rows] as accumulators have it.
    __device__ __forceinline__ void load_pending(float (&writes)[2][4]) const
    {
        DeltaLane const at;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const row = 8 * tile + 2 * at.column + i % 2;
                float const* const from = pending_of(p.writes, row, p.value_heads, work.head);
                writes[tile][i] = row < work.accepted ? from[warp * 16 + at.row + i / 2 * 8] : 0.f;
            }
        }
    }

    // Keeps what rows write beside the state.
    __device__ __forceinline__ void keep_writes(
        Rows<kSize> const& rows, float const (&writes)[2][4], int count) const
    {
        DeltaLane const at;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const row = 8 * tile + 2 * at.column + i % 2;
                if (row < count)
                {
                    pending_of(p.writes, row, p.value_heads, work.head)[warp * 16 + at.row + i / 2 * 8]
                        = writes[tile][i];
                }
            }
        }
        if (warp == 0 && lane < count)
        {
            int64_t const to = (int64_t{work.slot} * p.pending + lane) * p.value_heads + work.head;
            static_cast<float*>(p.decays)[to] = rows.decays[lane];
        }
    }

    // Multiplies keys and queries by keys. By items of 8 columns of one of both, over half of the numbers.
    __device__ __forceinline__ void multiply_keys() const
    {
        DeltaLane const at;
        for (int item = warp; item < 8; item += kWarps)
        {
            int const tile = item % 2;
            bool const is_query = item / 2 % 2;
            int const part = item / 4;
            SplitRows<kSize> const& left = is_query ? shared.queries : shared.keys;
            float sums[3][4] = {}; // each of one of the three products
#pragma unroll
            for (int group = 0; group < kSize / 16; group += 2)
            {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                {
                    if (group + part < kSize / 16)
                    {
                        uint4 const above = left.pair(at.row, group + part, half, at.column);
                        uint4 const below = left.pair(at.row + 8, group + part, half, at.column);
                        uint4 const right = shared.keys.pair(8 * tile + at.row, group + part, half, at.column);
                        uint32_t const high[4] = {above.x, below.x, above.y, below.y};
                        uint32_t const low[4] = {above.z, below.z, above.w, below.w};
                        multiply_tf32(sums[0], low, right.x, right.y);
                        multiply_tf32(sums[1], high, right.z, right.w);
                        multiply_tf32(sums[2], high, right.x, right.y);
                    }
                }
            }
            float* const to = shared.products + (2 * part + is_query) * Shared<kSize>::kMix + at.row * kMixStride
                + 8 * tile + 2 * at.column;
#pragma unroll
            for (int below = 0; below < 2; ++below)
            {
                float const first = sums[0][2 * below] + sums[1][2 * below] + sums[2][2 * below];
                float const second = sums[0][2 * below + 1] + sums[1][2 * below + 1] + sums[2][2 * below + 1];
                *reinterpret_cast<float2*>(to + below * 8 * kMixStride) = {first, second};
            }
        }
    }

    // Weighs the products of keys by what is left of each row at another. By all threads: each has some pairs of rows.
    __device__ __forceinline__ void weigh_products(Rows<kSize> const& rows) const
    {
        constexpr int kMix = Shared<kSize>::kMix;
        for (int pair = threadIdx.x; pair < kDeltaRows * kDeltaRows; pair += kThreads)
        {
            int const row = pair / kDeltaRows;
            int const column = pair % kDeltaRows;
            float left = row >= column ? 1.f : 0.f; // D
#pragma unroll
            for (int i = 1; i < kDeltaRows; ++i)
            {
                left *= i > column && i <= row ? rows.decays[i] : 1.f;
            }
            float const* const keys = shared.products + row * kMixStride + column;
            float const key = keys[0] + keys[2 * kMix];
            float const query = keys[kMix] + keys[3 * kMix];
            int const to = row * kMixStride + column;
            shared.lower[to] = row > column ? shared.shares[row] * left * key : 0.f;
            shared.reads[to] = left * query;
        }
    }

    // Inverts I + A, with the rows' shares. By one warp: each lane has a column.
    __device__ __forceinline__ void invert() const
    {
        int const column = lane % kDeltaRows;
        float inverse[kDeltaRows];
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i)
        {
            float4 const* const row = reinterpret_cast<float4 const*>(shared.lower + i * kMixStride);
            float sum = i == column ? 1.f : 0.f;
#pragma unroll
            for (int part = 0; part < (i + 3) / 4; ++part)
            {
                float4 const x = row[part];
                float const numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                {
                    if (4 * part + j < i)
                    {
                        sum = fmaf(-numbers[j], inverse[4 * part + j], sum);
                    }
                }
            }
            inverse[i] = sum;
        }
        float const share = shared.shares[column];
        if (lane < kDeltaRows)
        {
#pragma unroll
            for (int i = 0; i < kDeltaRows; ++i)
            {
                shared.writes[i * kMixStride + column] = inverse[i] * share;
            }
        }
    }

    // sums[i] += left * mix, both [.., 16 rows]: mix is zero above its diagonal.
    __device__ __forceinline__ void add_mixed(
        float (&sums)[2][4], LeftParts const& first, LeftParts const& second, float const* mix) const
    {
        DeltaLane const at;
        auto const right = [&](int tile, int before)
        {
            float const* const from = mix + (8 * tile + at.row) * kMixStride + 8 * before + 2 * at.column;
            return RightParts(*reinterpret_cast<float2 const*>(from));
        };
        RightParts const of_first[2] = {right(0, 0), right(1, 0)};
        float(*const both[2])[4] = {&sums[0], &sums[1]};
        add_products(both, first, of_first);
        add_product(sums[1], second, right(1, 1));
    }

    // Computes what rows write into the state, and, into shared memory, what they read out of it.
    __device__ __forceinline__ void compute(Rows<kSize> const& rows, StateTile<kSize> const& state,
        float (&writes)[2][4], int row, int count, OutputGates& output) const
    {
        DeltaLane const at;
        float of_keys[2][4] = {};
        float of_queries[2][4] = {};
        state.read(shared.keys, shared.queries, of_keys, of_queries);
        load_output_gates(row, count, output);
        __syncthreads(); // for the matrices
        float* const values = shared.values + warp * 16 + at.row;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const own = 8 * tile + 2 * at.column + i % 2;
                float const value = values[own * Shared<kSize>::kValueStride + i / 2 * 8];
                of_keys[tile][i] = value - rows.kept[own] * of_keys[tile][i];
                of_queries[tile][i] *= rows.kept[own];
                writes[tile][i] = 0.f;
            }
        }
        add_mixed(writes, left_of(of_keys[0]), left_of(of_keys[1]), shared.writes);
        add_mixed(of_queries, left_of(writes[0]), left_of(writes[1]), shared.reads);
        __syncwarp(); // v is read
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                int const own = 8 * tile + 2 * at.column + i % 2;
                values[own * Shared<kSize>::kValueStride + i / 2 * 8] = of_queries[tile][i];
            }
        }
    }

    __device__ __forceinline__ static LeftParts left_of(float const (&x)[4])
    {
        return {x[0], x[1], x[2], x[3]};
    }

    // Multiplies what rows write by what is left of each behind the last.
    __device__ __forceinline__ static void weigh(float (&writes)[2][4], float const* left)
    {
        DeltaLane const at;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
        {
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                writes[tile][i] *= left[8 * tile + 2 * at.column + i % 2];
            }
        }
    }

    __device__ __forceinline__ void load_output_gates(int row, int count, OutputGates& gates) const
    {
        int const first = min(lane * kLane, kSize - kLane);
        gates.weight = load_four(static_cast<float const*>(p.norm) + first);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
        {
            int const own = min(warp + i * kWarps, count - 1);
            gates.at[i] = load_vector<T, kLane>(row_of(row + own) + channels() + work.head * kSize + first);
        }
    }

    // Norms what rows read, multiplies it by their output gates, and writes it out: a warp a row.
    __device__ __forceinline__ void write_out(int row, int count, OutputGates const& gates) const
    {
        bool const has_numbers = lane * kLane < kSize;
        float4 const weight = gates.weight;
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
        {
            int const own = warp + i * kWarps;
            float4 y = {};
            if (has_numbers)
            {
                y = *reinterpret_cast<float4 const*>(shared.values + own * Shared<kSize>::kValueStride + lane * kLane);
            }
            float const sum = warp_sum(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
            float const root = rsqrtf(sum / static_cast<float>(kSize) + p.norm_eps);
            if (own < count && has_numbers)
            {
                int64_t const to = int64_t{work.first_row + row + own} * p.value_heads + work.head;
                auto const gate = [&](int j) { return quick_silu(to_float(gates.at[i].at[j])); };
                float4 const out = {y.x * root * weight.x * gate(0), y.y * root * weight.y * gate(1),
                    y.z * root * weight.z * gate(2), y.w * root * weight.w * gate(3)};
                store_four(static_cast<T*>(p.out) + to * kSize + lane * kLane, out);
            }
        }
    }

    // Counts the blocks that have read what the value heads of a key head share: returns how many had before this one.
    // Relaxed: nothing was written, and what was read has come, for it lies in shared memory.
    __device__ __forceinline__ int leave() const
    {
        return atomicAdd(p.counters + int64_t{work.slot} * p.key_heads + work.key_head, 1);
    }

    // The last of them writes it. By one thread.
    __device__ __forceinline__ void note_last(int left) const
    {
        bool const is_last = left == p.value_heads / p.key_heads - 1;
        if (is_last)
        {
            p.counters[int64_t{work.slot} * p.key_heads + work.key_head] = 0;
        }
        *shared.is_last = is_last;
    }

    // Writes the rows that the next step's convolution sees, and the pending rows' keys.
    __device__ __forceinline__ void keep_rows() const
    {
        constexpr int kParts = kSize / kLane;
        bool const is_last = *shared.is_last;
        int const count = work.count - work.absorbed;
        int const old = max(kBefore - work.absorbed, 0); // rows of the window that stay in it
        auto const first_of = [&](int section)
        { return section == 0 ? value_channel() : section == 1 ? key_channel() : query_channel(); };
        int const sections = is_last ? 3 : 1;
        for (int part = threadIdx.x; part < sections * kParts; part += kThreads)
        {
            int const channel = first_of(part / kParts) + part % kParts * kLane;
            Vector<T, kLane> x[kBefore];
#pragma unroll
            for (int row = 0; row < kBefore; ++row)
            {
                bool const is_there = row < old && !work.begins;
                x[row] = is_there ? load_vector<T, kLane>(window_row(work.accepted + work.absorbed + row) + channel)
                                  : Vector<T, kLane>{};
            }
#pragma unroll
            for (int row = 0; row < kBefore; ++row)
            {
                if (row < old)
                {
                    store_vector(window_row(row) + channel, x[row]);
                }
            }
        }
        __syncthreads();
        for (int section = 0; section < sections; ++section)
        {
            for (int item = threadIdx.x; item < kParts * (kBefore - old + count); item += kThreads)
            {
                int const row = old + item / kParts;
                int const channel = first_of(section) + item % kParts * kLane;
                T const* const from = row_of(work.absorbed + row - kBefore) + channel;
                store_vector(window_row(row) + channel, load_vector<T, kLane>(from));
            }
        }
        for (int item = threadIdx.x; is_last && item < kParts * count; item += kThreads)
        {
            int const row = item / kParts;
            int const first = item % kParts * kLane;
            store_four(pending_of(p.keys, row, p.key_heads, work.key_head) + first, shared.keys.load(row, first));
        }
    }

    __device__ __forceinline__ void run() const
    {
        StateTile<kSize> tile;
        float writes[2][4];
        float4 keys[kRowsOfWarp];
        if (work.is_zero)
        {
            tile.clear();
        }
        else
        {
            tile.load(state());
        }
        load_pending(writes);
        load_pending_keys(keys);
        int turn = 1;
        for (int row = 0; row < work.count; turn = 1 - turn)
        {
            int const count = work.rows_at(row);
            bool const is_pending = row == work.absorbed;
            Rows<kSize> const rows = shared.rows(turn);
            Rows<kSize> const before = shared.rows(1 - turn);
            Gates const gates = load_gates(row, count);
            fill_rows(rows, row, row + count);
            if (warp == 0)
            {
                fill_gates(rows, gates, count);
            }
            if (row == 0)
            {
                fill_pending(before, keys);
            }
            __syncthreads();
            int left = 0;
            if (is_pending && threadIdx.x == 0)
            {
                left = leave();
            }
            multiply_keys();
            if (row > 0 || work.accepted > 0)
            {
                weigh(writes, before.behind);
                tile.absorb(before.kept[kDeltaRows - 1], writes, before.keys);
            }
            if (is_pending && (work.accepted > 0 || work.absorbed > 0))
            {
                tile.store(state());
            }
            __syncthreads();
            weigh_products(rows);
            __syncthreads();
            if (warp == 0)
            {
                invert();
            }
            OutputGates output;
            compute(rows, tile, writes, row, count, output);
            if (is_pending)
            {
                keep_writes(rows, writes, count);
                if (threadIdx.x == 0)
                {
                    note_last(left);
                }
            }
            __syncthreads();
            write_out(row, count, output);
            row += count;
            if (is_pending)
            {
                keep_rows();
            }
            else
            {
                __syncthreads();
            }
        }
    }
};

// Fills the output of rows between a segment's and the next one's with zeros: they belong to nobody.
template <typename T, int kSize>
__device__ __forceinline__ void clear_padding(dflash_delta_net_params const& p, int4 segment, int end)
{
    constexpr int kParts = kSize / kLane;
    int const first = segment.z + max(segment.w, 0);
    for (int item = threadIdx.x; item < (end - first) * kParts; item += blockDim.x)
    {
        int64_t const to = int64_t{first + item / kParts} * p.value_heads + blockIdx.x;
        store_four(static_cast<T*>(p.out) + to * kSize + item % kParts * kLane, float4{});
    }
}

// One block a value head (x) and segment (y).
template <typename T, int kSize>
__global__ void __launch_bounds__(2 * kSize, kSize == 128 ? 2 : 1) delta_net_kernel(dflash_delta_net_params const p)
{
    begin();
    extern __shared__ float4 memory[];
    int4 const* const segments = reinterpret_cast<int4 const*>(p.segments) + blockIdx.y;
    int const end = blockIdx.y + 1 < gridDim.y ? segments[1].z : p.rows;
    int4 const segment = segments[0];
    Work const work(p, segment);
    clear_padding<T, kSize>(p, segment, end);
    if (work.count > 0)
    {
        Shared<kSize> const shared(reinterpret_cast<float*>(memory));
        DeltaNet<T, kSize>{p, work, shared}.run();
    }
}

// One thread a segment.
__global__ void advance_states_kernel(dflash_advance_states_params const p)
{
    begin();
    int const index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < p.segment_count)
    {
        int4 const segment = reinterpret_cast<int4 const*>(p.segments)[index]; // slot, start, first row, count
        if (segment.w > 0)
        {
            p.lengths[segment.x] = segment.y + max(segment.w - p.pending, 0);
        }
    }
}

template <typename T, int kSize>
cudaError_t launch_delta_net(dflash_delta_net_params const& p, cudaStream_t stream)
{
    constexpr auto kKernel = delta_net_kernel<T, kSize>;
    constexpr int kBytes = Shared<kSize>::kBytes;
    cudaError_t const error = allow_shared_bytes<kKernel>(kBytes);
    dim3 const grid(p.value_heads, p.segment_count);
    return error == cudaSuccess ? launch_kernel(kKernel, grid, 2 * kSize, kBytes, stream, p) : error;
}

template <typename T>
cudaError_t launch_of_size(dflash_delta_net_params const& p, cudaStream_t stream)
{
    switch (p.head_size)
    {
    case 16: return launch_delta_net<T, 16>(p, stream);
    case 32: return launch_delta_net<T, 32>(p, stream);
    case 64: return launch_delta_net<T, 64>(p, stream);
    case 128: return launch_delta_net<T, 128>(p, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_delta_net(dflash_delta_net_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->key_heads > 0 && p->value_heads > 0 && p->value_heads % p->key_heads == 0
        && p->kernel == kTaps && p->pending > 0 && p->pending <= kDeltaRows && p->segment_count <= 65535
        && p->x_row_stride % kLane == 0;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->segment_count == 0 || p->rows == 0)
    {
        return cudaSuccess;
    }
    switch (p->dtype)
    {
    case DFLASH_FP16: return launch_of_size<__half>(*p, stream);
    case DFLASH_BF16: return launch_of_size<__nv_bfloat16>(*p, stream);
    case DFLASH_FP32: return launch_of_size<float>(*p, stream);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t dflash_advance_states(dflash_advance_states_params const* p, cudaStream_t stream)
{
    constexpr int kThreads = 128;
    if (p->segment_count == 0)
    {
        return cudaSuccess;
    }
    dim3 const grid((p->segment_count + kThreads - 1) / kThreads);
    return dflash::launch_kernel(dflash::advance_states_kernel, grid, kThreads, 0, stream, *p);
}
