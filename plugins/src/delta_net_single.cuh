// A gated delta net's rows one after another: for steps that have one of each slot, where the state's way through
// memory is all that counts. A row that joins those beside the state leaves it unwritten: what these would have written
// is added to what the row reads, by how much their keys are like its own and its query.
#pragma once

#include "delta_net_rows.cuh"

namespace dflash
{
namespace delta
{

// A block has a value head of one segment, a warp 16 of its values, a lane four keys of each. Warps 0 to 2 also
// convolve the queries, keys and values, of which a lane has four channels, and warp 3 has the gates.
template <typename T>
struct SingleRows
{
    static constexpr int kSize = 128;
    static constexpr int kLane = 4; // numbers that a lane has of a row
    static constexpr int kOfWarp = 16; // values
    static constexpr int kWarps = kSize / kOfWarp;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kKeysWarp = 1; // queries: 0
    static constexpr int kValuesWarp = 2;
    static constexpr int kGatesWarp = 3;
    using OfHead = Place<T, kSize>;
    using Four = Vector<T, kLane>;

    struct Shared
    {
        // What a lane of a convolving warp has for itself, not in registers: those are the state's.
        Vector<T, kTaps> taps[3][kLane][kSize / kLane]; // of queries, keys, values
        Four before[3][kBefore][kSize / kLane];
        float4 rows[3][kSize / kLane]; // the row's queries, keys, values
        float4 pending_keys[kDeltaRows][kSize / kLane];
        float4 pending_writes[kDeltaRows][kSize / kLane];
        float pending_behind[kDeltaRows];
        float pending_reads[2][kDeltaRows]; // what the row's key and query read of what each writes
        float out[kSize];
        float squares[kWarps];
        float pending_kept;
        float decay; // the row's
        float share;
        int is_last; // of the blocks that read what value heads share
    };

    // What does not wait for the kernels before this one.
    struct Ahead
    {
        float norm;
        float rate;
        float bias;
    };

    OfHead const& place;
    Shared& shared;
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;

    __device__ __forceinline__ bool convolves() const
    {
        return warp <= kValuesWarp;
    }

    // A row's numbers that a thread has. They are asked for before the state, behind which they would wait.
    struct Inputs
    {
        Four row; // of convolving warps
        T gate; // of the output: one value's
        T share; // what the gates' warp makes the row's share and decay of
        T decay;
    };

    __device__ __forceinline__ Four& before(int i) const
    {
        return shared.before[warp][i][lane];
    }

    __device__ __forceinline__ int channel() const
    {
        int const first = warp == kValuesWarp ? place.value_channel()
            : warp == kKeysWarp               ? place.key_channel()
                                              : place.query_channel();
        return first + lane * kLane;
    }

    __device__ __forceinline__ Ahead load_ahead() const
    {
        Ahead ahead = {};
        if (convolves())
        {
#pragma unroll
            for (int i = 0; i < kLane; ++i)
            {
                shared.taps[warp][i][lane]
                    = load_vector<T, kTaps>(static_cast<T const*>(place.p.conv) + (channel() + i) * kTaps);
            }
        }
        ahead.norm = static_cast<float const*>(place.p.norm)[threadIdx.x % kSize];
        ahead.rate = static_cast<float const*>(place.p.a_log)[place.head];
        ahead.bias = static_cast<float const*>(place.p.dt_bias)[place.head];
        return ahead;
    }

    __device__ __forceinline__ void prefetch_state(int slot) const
    {
        if (threadIdx.x == 0)
        {
            prefetch_bytes(place.state(slot), 4 * kSize * kSize);
        }
    }

    __device__ __forceinline__ void run(Segment const& segment, Ahead const& ahead) const
    {
        Four window[kBefore] = {};
        if (convolves() && !segment.begins)
        {
            T const* const from = place.window_row(segment.slot, segment.accepted) + channel();
#pragma unroll
            for (int i = 0; i < kBefore; ++i)
            {
                window[i] = load_vector<T, kLane>(from + i * place.channels());
            }
        }
        Inputs inputs = load_inputs(segment.first_row);
        stage_pending(segment);
        float const decay = load_decay(segment);
        float4 state[kOfWarp] = {};
        if (!segment.is_zero)
        {
            float4 const* const from = state_of(segment.slot);
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i)
            {
                state[i] = from[i * kSize / kLane];
            }
        }
        if (convolves())
        {
#pragma unroll
            for (int i = 0; i < kBefore; ++i)
            {
                before(i) = window[i];
            }
        }
        multiply_decays(segment, decay);
#pragma unroll 1
        for (int row = 0; row < segment.count; ++row)
        {
            if (row > 0)
            {
                inputs = load_inputs(segment.first_row + row);
            }
            take(segment, ahead, row, inputs, state);
        }
    }

    __device__ __forceinline__ Inputs load_inputs(int row) const
    {
        Inputs inputs = {};
        T const* const from = place.row(row);
        if (convolves())
        {
            inputs.row = load_vector<T, kLane>(from + channel());
        }
        if (threadIdx.x < kSize)
        {
            inputs.gate = from[place.channels() + place.first_value() + threadIdx.x];
        }
        if (warp == kGatesWarp)
        {
            T const* const gates = static_cast<T const*>(place.p.gates)
                + int64_t{row} * static_cast<int>(place.p.gates_row_stride) + place.head;
            inputs.share = gates[0];
            inputs.decay = gates[place.p.value_heads];
        }
        return inputs;
    }

    __device__ __forceinline__ float4* state_of(int slot) const
    {
        return reinterpret_cast<float4*>(place.state(slot) + warp * kOfWarp * kSize) + lane;
    }

    // The keys and writes of the pending rows that were accepted.
    __device__ __forceinline__ void stage_pending(Segment const& segment) const
    {
#pragma unroll 1 // its instructions come from memory, too
        for (int item = threadIdx.x; item < segment.accepted * kSize / kLane; item += kThreads)
        {
            int const row = item / (kSize / kLane);
            int const part = item % (kSize / kLane);
            stage_16(&shared.pending_keys[row][part], place.keys(segment.slot, row) + part * kLane);
            stage_16(&shared.pending_writes[row][part], place.writes(segment.slot, row) + part * kLane);
        }
        commit_copies();
    }

    // Their decays, a lane's.
    __device__ __forceinline__ float load_decay(Segment const& segment) const
    {
        return warp == kGatesWarp && lane < segment.accepted ? *place.decay(segment.slot, lane) : 1.f;
    }

    __device__ __forceinline__ void multiply_decays(Segment const& segment, float decay) const
    {
        if (warp == kGatesWarp && segment.accepted > 0)
        {
            multiply_pending(decay, shared.pending_behind, shared.pending_kept);
        }
    }

    __device__ __forceinline__ void take(
        Segment const& segment, Ahead const& ahead, int row, Inputs const& inputs, float4 (&state)[kOfWarp]) const
    {
        bool const joins = joins_pending(place.p.keeps, segment.count, segment.accepted);
        int const pending = joins ? segment.accepted : row - segment.absorbed;
        if (convolves())
        {
            shared.rows[warp][lane] = convolve(inputs.row);
        }
        else if (warp == kGatesWarp)
        {
            weigh(segment, ahead, inputs, pending);
        }
        wait_for_copies<0>(); // of pending rows
        __syncthreads();
        if (joins)
        {
            read_pending(segment.accepted);
            __syncthreads();
        }
        else if (row == 0 && warp == kGatesWarp && lane == 0)
        {
            uint32_t const others = gridDim.x - 1; // a key head's value heads are side by side
            shared.is_last = count_reader(place.counter(segment.slot), others) == others;
        }
        if (row == 0 && segment.accepted > 0 && !joins)
        {
            absorb(segment.accepted, state);
        }
        if (row == segment.absorbed && segment.accepted + segment.absorbed > 0 && !joins)
        {
            float4* const to = state_of(segment.slot);
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i)
            {
                to[i * kSize / kLane] = state[i];
            }
        }
        read(segment.slot, pending, joins, row + 1 < segment.count, state);
        __syncthreads();
        if (threadIdx.x < kSize)
        {
            write_out(segment.first_row + row, ahead.norm, to_float(inputs.gate));
        }
        if (convolves())
        {
            if (pending >= 0)
            {
                // What value heads share, by the last that has read it; of rows that join, nobody reads their places.
                keep(segment.slot, pending, inputs.row, joins ? blockIdx.x == 0 : shared.is_last);
            }
            before(0) = before(1);
            before(1) = before(2);
            before(2) = inputs.row;
        }
    }

    __device__ __forceinline__ float4 convolve(Four const& row) const
    {
        Four const a = before(0), b = before(1), c = before(2);
        float y[kLane];
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            y[i] = mix(shared.taps[warp][i][lane], a.at[i], b.at[i], c.at[i], row.at[i]);
        }
        float by = 1.f;
        if (warp != kValuesWarp)
        {
            by = rsqrtf(warp_sum(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]) + kLengthEps);
            by *= warp == kKeysWarp ? 1.f : rsqrtf(static_cast<float>(kSize));
        }
        return {y[0] * by, y[1] * by, y[2] * by, y[3] * by};
    }

    __device__ __forceinline__ void weigh(
        Segment const& segment, Ahead const& ahead, Inputs const& inputs, int pending) const
    {
        float const a = to_float(inputs.decay) + ahead.bias;
        float const softplus = fmaxf(a, 0.f) + log1pf(expf(-fabsf(a)));
        float const decay = expf(-expf(ahead.rate) * softplus);
        if (lane == 0)
        {
            shared.decay = decay;
            shared.share = 1.f / (1.f + expf(-to_float(inputs.share)));
            if (pending >= 0)
            {
                *place.decay(segment.slot, pending) = decay;
            }
        }
    }

    __device__ __forceinline__ void absorb(int accepted, float4 (&state)[kOfWarp]) const
    {
        float const kept = shared.pending_kept;
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i)
        {
            state[i] = {state[i].x * kept, state[i].y * kept, state[i].z * kept, state[i].w * kept};
        }
#pragma unroll 1
        for (int row = 0; row < accepted; ++row)
        {
            float const behind = shared.pending_behind[row];
            float4 const key = shared.pending_keys[row][lane];
            float const* const writes = reinterpret_cast<float const*>(shared.pending_writes[row]) + warp * kOfWarp;
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i)
            {
                add(state[i], writes[i] * behind, key);
            }
        }
    }

    // How much the row's key and query are like each pending row's key, by what is left of that row.
    __device__ __forceinline__ void read_pending(int accepted) const
    {
        float4 const query = shared.rows[0][lane];
        float4 const key = shared.rows[kKeysWarp][lane];
#pragma unroll 1
        for (int row = warp; row < accepted; row += kWarps)
        {
            float4 const its_key = shared.pending_keys[row][lane];
            float const of_key = warp_sum(dot(its_key, key));
            float const of_query = warp_sum(dot(its_key, query));
            if (lane < 2)
            {
                shared.pending_reads[lane][row] = (lane == 0 ? of_key : of_query) * shared.pending_behind[row];
            }
        }
    }

    // What a value's sum over the state is with the pending rows behind it.
    __device__ __forceinline__ float with_pending(float sum, int accepted, bool is_query, int value) const
    {
        sum *= shared.pending_kept;
#pragma unroll 4
        for (int row = 0; row < accepted; ++row)
        {
            float const write = reinterpret_cast<float const*>(shared.pending_writes[row])[value];
            sum = fmaf(shared.pending_reads[is_query][row], write, sum);
        }
        return sum;
    }

    __device__ __forceinline__ static void add(float4& sum, float by, float4 const& x)
    {
        sum = {fmaf(by, x.x, sum.x), fmaf(by, x.y, sum.y), fmaf(by, x.z, sum.z), fmaf(by, x.w, sum.w)};
    }

    __device__ __forceinline__ static float dot(float4 const& a, float4 const& b)
    {
        return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
    }

    // Reads the state by the row's key and query; finds what the row writes and gives. joins: `pending` rows that the
    // state has not absorbed.
    __device__ __forceinline__ void read(
        int slot, int pending, bool joins, bool goes_on, float4 (&state)[kOfWarp]) const
    {
        float4 const query = shared.rows[0][lane];
        float4 const key = shared.rows[kKeysWarp][lane];
        float const decay = shared.decay;
        float sums[kOfWarp]; // half of a lane's: of keys below lane 16, of queries from there on
        bool const has_keys = lane < kOfWarp;
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i)
        {
            float const of_key = dot(state[i], key);
            float const of_query = dot(state[i], query);
            sums[i]
                = (has_keys ? of_key : of_query) + __shfl_xor_sync(0xffffffffu, has_keys ? of_query : of_key, kOfWarp);
        }
        float const overlap = warp_sum(dot(query, key));
        int const value = warp * kOfWarp + lane % kOfWarp;
        float sum = sum_across(sums);
        if (joins)
        {
            sum = with_pending(sum, pending, !has_keys, value);
        }
        float const left = reinterpret_cast<float const*>(shared.rows[kValuesWarp])[value] - decay * sum;
        float const write = __shfl_sync(0xffffffffu, shared.share * left, lane % kOfWarp);
        float const out = fmaf(overlap, write, decay * sum); // of the lanes that have queries' sums
        if (has_keys && pending >= 0)
        {
            place.writes(slot, pending)[value] = write;
        }
        if (!has_keys)
        {
            shared.out[value] = out;
        }
        float const squares = warp_sum(has_keys ? 0.f : out * out);
        if (lane == 0)
        {
            shared.squares[warp] = squares;
        }
        if (goes_on)
        {
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i)
            {
                state[i] = {state[i].x * decay, state[i].y * decay, state[i].z * decay, state[i].w * decay};
                add(state[i], __shfl_sync(0xffffffffu, write, i), key);
            }
        }
    }

    // Each lane of a half gets one of 16 sums over the half, that of its number. Of 2 kStep sums half are done with.
    template <int kStep = kOfWarp / 2>
    __device__ __forceinline__ float sum_across(float (&sums)[kOfWarp]) const
    {
        bool const is_upper = lane & kStep;
#pragma unroll
        for (int i = 0; i < kStep; ++i)
        {
            float const own = is_upper ? sums[i + kStep] : sums[i];
            float const others = is_upper ? sums[i] : sums[i + kStep];
            sums[i] = own + __shfl_xor_sync(0xffffffffu, others, kStep);
        }
        if constexpr (kStep > 1)
        {
            return sum_across<kStep / 2>(sums);
        }
        return sums[0];
    }

    __device__ __forceinline__ void write_out(int row, float norm, float gate) const
    {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i)
        {
            sum += shared.squares[i];
        }
        float const root = rsqrtf(sum / static_cast<float>(kSize) + place.p.norm_eps);
        T* const out = static_cast<T*>(place.p.out) + int64_t{row} * place.p.value_heads * kSize + place.first_value();
        out[threadIdx.x] = from_float<T>(shared.out[threadIdx.x] * root * norm * quick_silu(gate));
    }

    // Keeps what the next step's convolution sees, and the row's keys.
    __device__ __forceinline__ void keep(int slot, int pending, Four const& row, bool keeps_shared) const
    {
        if (warp != kValuesWarp && !keeps_shared)
        {
            return;
        }
        if (pending == 0)
        {
            T* const to = place.window_row(slot, 0) + channel();
#pragma unroll
            for (int i = 0; i < kBefore; ++i)
            {
                store_vector(to + i * place.channels(), before(i));
            }
        }
        store_vector(place.window_row(slot, kBefore + pending) + channel(), row);
        if (warp == kKeysWarp)
        {
            reinterpret_cast<float4*>(place.keys(slot, pending))[lane] = shared.rows[kKeysWarp][lane];
        }
    }
};

} // namespace delta
} // namespace dflash
