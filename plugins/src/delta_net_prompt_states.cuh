// The states of a gated delta net's prompts, which go through chunk after chunk; and the rows' outputs.
#pragma once

#include "delta_net_products.cuh"
#include "delta_net_prompt.cuh"

namespace dflash
{
namespace delta
{

// A block has some values of a head, of one segment. A warp has 16 of them and a part of the keys: the warps of the
// same values exchange what rows read. So there are enough of them to wait for different things.
template <int kSize>
struct PromptStates
{
    using Range = PromptRange<kSize>;

    static constexpr int kValues = kSize < 64 ? kSize : 64;
    static constexpr int kTiles = kValues / 16; // of values
    static constexpr int kParts = kSize < 32 ? 1 : 2; // of keys
    static constexpr int kThreads = 32 * kTiles * kParts;
    using State = StateTile<kSize, kSize / kParts>;
    static constexpr int kMostStages = 3;

    // What a chunk brings, in the order of its copies.
    struct Stage
    {
        uint32_t queries[Range::kRowNumbers];
        float keys[Range::kRowNumbers];
        uint32_t lacking[Range::kRowNumbers]; // W
        float mix[kMixNumbers];
        float kept[kDeltaRows];
        float behind[kDeltaRows];
        float values[kValues * kDeltaRows];
    };

    // What a part of the keys gives 16 values, of eight rows each: sums of W, and the queries'.
    struct Exchange
    {
        float4 of_lacking[2][32];
        float4 of_queries[2][32];
    };

    __host__ __device__ static constexpr int bytes(int stages)
    {
        int const of_exchanges = kParts == 1 ? 0 : kTiles * kParts * static_cast<int>(sizeof(Exchange));
        return of_exchanges + stages * static_cast<int>(sizeof(Stage) + sizeof(uint64_t));
    }

    dflash_delta_net_params const& p;
    Range const& range;
    Segment const& segment;
    int const head;
    int const first_value; // of the head's
    int const stage_count; // chunks in shared memory at once
    Stage* const stages;
    Exchange* const exchanges = reinterpret_cast<Exchange*>(stages + stage_count);
    uint32_t const barriers = shared_address(exchanges + (kParts == 1 ? 0 : kTiles * kParts));
    DeltaLane const at;
    int const lane = threadIdx.x % 32;
    int const tile = threadIdx.x / 32 % kTiles;
    int const part = threadIdx.x / 32 / kTiles;
    int const own = tile * 16 + at.row; // of the block's values, and 8 behind it

    __device__ __forceinline__ float* state() const
    {
        int64_t const first = (int64_t{segment.slot} * p.value_heads + head) * kSize + first_value;
        return static_cast<float*>(p.states) + (first + tile * 16) * kSize + part * State::kGroups * 16;
    }

    __device__ __forceinline__ int key_head() const
    {
        return head / (p.value_heads / p.key_heads);
    }

    __device__ __forceinline__ void make_barriers() const
    {
        if (threadIdx.x == 0)
        {
            for (int i = 0; i < stage_count; ++i)
            {
                init_barrier(barriers + 8 * i, 1);
            }
            fence_barrier_inits();
        }
        __syncthreads();
    }

    // Begins to copy what a chunk brings. By one thread.
    __device__ __forceinline__ void stage(int place, int index) const
    {
        Stage const& to = stages[index];
        uint32_t const barrier = barriers + 8 * index;
        expect_bytes(barrier, sizeof(Stage));
        copy_bytes(shared_address(to.queries), range.of_keys(place, key_head()), 4 * Range::kOfKeys, barrier);
        copy_bytes(shared_address(to.lacking), range.of_values(place, head), 4 * Range::kOfValues, barrier);
        float const* const values = range.values(place, head) + first_value * kDeltaRows;
        copy_bytes(shared_address(to.values), values, 4 * kValues * kDeltaRows, barrier);
    }

    // Rows of the step before, one after another.
    __device__ __forceinline__ void absorb_pending(State& state) const
    {
        int64_t const first = int64_t{segment.slot} * p.pending;
        for (int row = 0; row < segment.accepted; ++row)
        {
            float const* const keys = static_cast<float const*>(p.keys)
                + ((first + row) * p.key_heads + key_head()) * kSize + part * State::kGroups * 16;
            int64_t const of_row = (first + row) * p.value_heads + head;
            float const decay = static_cast<float const*>(p.decays)[of_row];
            float const* const writes = static_cast<float const*>(p.writes) + of_row * kSize + first_value + own;
            float const both[2] = {writes[0], writes[8]};
#pragma unroll
            for (int group = 0; group < State::kGroups; ++group)
            {
                float4 const key = *reinterpret_cast<float4 const*>(keys + 16 * group + 4 * at.column);
                float const numbers[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                {
                    float& x = state.at[group][i / 4][i % 4];
                    x = fmaf(both[i / 4], numbers[i % 4], x * decay);
                }
            }
        }
    }

    // Three products of each sum, which wait for none of the others.
    using Sums = float[3][2][4];

    __device__ __forceinline__ static void multiply(LeftParts const& left, float2 const (&rows)[2], Sums& sums)
    {
        RightParts const right[2] = {RightParts(rows[0]), RightParts(rows[1])};
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            multiply_tf32(sums[0][i], left.low, right[i].high[0], right[i].high[1]);
            multiply_tf32(sums[1][i], left.high, right[i].low[0], right[i].low[1]);
            multiply_tf32(sums[2][i], left.high, right[i].high[0], right[i].high[1]);
        }
    }

    __device__ __forceinline__ static float sum(Sums const& sums, int i, int j)
    {
        return (sums[0][i][j] + sums[1][i][j]) + sums[2][i][j];
    }

    // A chunk's four numbers of each of the warp's groups of 16 keys: as many apart as 16 rows have.
    template <typename Four>
    __device__ __forceinline__ Four const* of_part(void const* from) const
    {
        return static_cast<Four const*>(from) + part * State::kGroups * 64 + lane;
    }

    // Multiplies the state by both of a chunk's: W, whose rows are scaled, and the queries.
    __device__ __forceinline__ void read(
        State const& state, Stage const& stage, TileNumbers& of_lacking, TileNumbers& of_queries) const
    {
        uint4 const* const lacking = of_part<uint4>(stage.lacking);
        uint4 const* const queries = of_part<uint4>(stage.queries);
        HalfScale const scales[2] = {state.scale(0), state.scale(1)};
        Sums sums[2] = {};
#pragma unroll
        for (int group = 0; group < State::kGroups; ++group)
        {
            uint32_t high[4];
            uint32_t low[4];
            state.split(group, scales, high, low);
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                uint4 const right = (i < 2 ? lacking : queries)[64 * group + i % 2 * 32];
                multiply_add<__half>(sums[i / 2][0][i % 2], low, right.x, right.y);
                multiply_add<__half>(sums[i / 2][1][i % 2], high, right.z, right.w);
                multiply_add<__half>(sums[i / 2][2][i % 2], high, right.x, right.y);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
        {
            float const back = scales[i % 4 / 2].back * (1.f / kRowScale);
            float const of_row = power_of_two(stage.kept[8 * (i / 4) + 2 * at.column + i % 2]);
            of_lacking[i / 4][i % 4] = sum(sums[0], i / 4, i % 4) * back * of_row;
            of_queries[i / 4][i % 4] = sum(sums[1], i / 4, i % 4) * back;
        }
    }

    // state <- kept * state + writes * keys.
    __device__ __forceinline__ void absorb(State& state, Stage const& stage, LeftParts const (&left)[2]) const
    {
        float const kept = stage.kept[kDeltaRows - 1];
        float4 const* const keys = of_part<float4>(stage.keys);
#pragma unroll
        for (int group = 0; group < State::kGroups; ++group)
        {
            Sums sums = {}; // [][half of the group's keys][]
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) // rows
            {
                float4 const x = keys[64 * group + 32 * eight];
                float2 const rows[2] = {{x.x, x.z}, {x.y, x.w}};
                multiply(left[eight], rows, sums);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
            {
                float& x = state.at[group][i % 4 / 2][i / 4 * 2 + i % 2];
                x = fmaf(x, kept, sum(sums, i / 4, i % 4));
            }
        }
    }

    // Sums up what all parts of the keys give: of the queries to the rows whose outputs this warp makes.
    __device__ __forceinline__ void exchange(TileNumbers& of_lacking, TileNumbers& of_queries) const
    {
        Exchange& mine = exchanges[tile * kParts + part];
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            mine.of_lacking[i][lane] = four(of_lacking[i]);
            mine.of_queries[i][lane] = four(of_queries[i]);
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + tile), "n"(32 * kParts) : "memory");
        // In one order, that all parts' warps have the same bits.
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            float4 all[kParts];
#pragma unroll
            for (int from = 0; from < kParts; ++from)
            {
                all[from] = exchanges[tile * kParts + from].of_lacking[i][lane];
            }
            add_up(all, of_lacking[i]);
            if (part == i)
            {
#pragma unroll
                for (int from = 0; from < kParts; ++from)
                {
                    all[from] = exchanges[tile * kParts + from].of_queries[i][lane];
                }
                add_up(all, of_queries[i]);
            }
        }
    }

    __device__ __forceinline__ static float4 four(float const (&x)[4])
    {
        return {x[0], x[1], x[2], x[3]};
    }

    __device__ __forceinline__ static void add_up(float4 const (&all)[kParts], float (&to)[4])
    {
        float4 sum = all[0];
#pragma unroll
        for (int i = 1; i < kParts; ++i)
        {
            sum = {sum.x + all[i].x, sum.y + all[i].y, sum.z + all[i].z, sum.w + all[i].w};
        }
        to[0] = sum.x;
        to[1] = sum.y;
        to[2] = sum.z;
        to[3] = sum.w;
    }

    // Takes the state through a chunk; leaves the rows' outputs where their values lay.
    __device__ __forceinline__ void run_chunk(State& state, Stage const& stage, int place) const
    {
        TileNumbers of_lacking;
        TileNumbers of_queries;
        read(state, stage, of_lacking, of_queries);
        if (kParts > 1)
        {
            exchange(of_lacking, of_queries);
        }
        TileNumbers writes;
        TileNumbers left_over;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            int const row = 8 * i + 2 * at.column;
            float2 const behind = *reinterpret_cast<float2 const*>(stage.behind + row);
#pragma unroll
            for (int j = 0; j < 4; j += 2)
            {
                float2 const value
                    = *reinterpret_cast<float2 const*>(stage.values + (own + j / 2 * 8) * kDeltaRows + row);
                writes[i][j] = value.x - of_lacking[i][j];
                writes[i][j + 1] = value.y - of_lacking[i][j + 1];
                left_over[i][j] = writes[i][j] * behind.x;
                left_over[i][j + 1] = writes[i][j + 1] * behind.y;
            }
        }
        LeftParts const left[2] = {parts(left_over[0]), parts(left_over[1])};
        absorb(state, stage, left);
        float* const to = range.values(place, head) + first_value * kDeltaRows;
        if (kParts == 1 || part == 0)
        {
            give<0>(stage, writes, of_queries, to);
        }
        if (kParts == 1 || part == 1)
        {
            give<1>(stage, writes, of_queries, to);
        }
    }

    __device__ __forceinline__ static LeftParts parts(float const (&x)[4])
    {
        return {x[0], x[1], x[2], x[3]};
    }

    // Outputs of the first or the last eight rows, which see writes of those up to them.
    template <int kEight>
    __device__ __forceinline__ void give(
        Stage const& stage, TileNumbers const& writes, TileNumbers const& of_queries, float* to) const
    {
        float seen[4] = {};
        float (*const sums[1])[4] = {&seen};
#pragma unroll
        for (int i = 0; i <= kEight; ++i)
        {
            float const* const mix = stage.mix + (8 * kEight + at.row) * kDeltaRows + 8 * i + 2 * at.column;
            RightParts const right[1] = {RightParts(*reinterpret_cast<float2 const*>(mix))};
            add_products(sums, parts(writes[i]), right);
        }
        int const row = 8 * kEight + 2 * at.column;
        float2 const kept = *reinterpret_cast<float2 const*>(stage.kept + row);
#pragma unroll
        for (int j = 0; j < 4; j += 2)
        {
            float2 const out
                = {fmaf(kept.x, of_queries[kEight][j], seen[j]), fmaf(kept.y, of_queries[kEight][j + 1], seen[j + 1])};
            *reinterpret_cast<float2*>(to + (own + j / 2 * 8) * kDeltaRows + row) = out;
        }
    }

    // Places [first, end) are this segment's, the chunk-th of its chunks and on.
    __device__ __forceinline__ void run(int first, int end, int chunk) const
    {
        make_barriers();
        if (threadIdx.x == 0)
        {
            for (int i = 0; i < min(stage_count - 1, end - first); ++i)
            {
                stage(first + i, i);
            }
        }
        State state;
        if (chunk == 0 && segment.is_zero)
        {
            state.clear();
        }
        else
        {
            state.load(State::of_lane(this->state()));
        }
        if (chunk == 0)
        {
            absorb_pending(state);
        }
        int index = 0; // of the turn's stage
        int before = stage_count - 1; // of that before it
        uint32_t phase = 0;
        for (int place = first; place < end; ++place)
        {
            __syncthreads(); // the stage of the turn before has been read
            if (threadIdx.x == 0 && place + stage_count - 1 < end)
            {
                stage(place + stage_count - 1, before);
            }
            wait_for_phase(barriers + 8 * index, phase);
            run_chunk(state, stages[index], place);
            before = index;
            ++index;
            if (index == stage_count)
            {
                index = 0;
                phase ^= 1;
            }
        }
        state.store(State::of_lane(this->state()));
    }
};

// Norms and gates the outputs of a chunk of one value head.
template <typename T, int kSize>
struct PromptOutputs
{
    static constexpr int kThreads = 128;
    static constexpr int kStride = kSize + 4;
    static constexpr int kOfLane = (kSize + 31) / 32; // values side by side
    static constexpr int kRowsOfWarp = kDeltaRows * 32 / kThreads;

    dflash_delta_net_params const& p;
    PromptChunk const& chunk;
    int const head;
    float* const shared; // [16, kSize]
    int const value = threadIdx.x % 32 * kOfLane;

    using Numbers = Vector<T, kOfLane>;

    __device__ __forceinline__ int row_of(int i) const
    {
        return threadIdx.x / 32 * kRowsOfWarp + i;
    }

    __device__ __forceinline__ bool has(int i) const
    {
        return row_of(i) < chunk.count && value < kSize;
    }

    __device__ __forceinline__ int64_t row(int i) const
    {
        return chunk.segment.z + chunk.row + row_of(i);
    }

    __device__ __forceinline__ void run(float const* from) const
    {
        Numbers gates[kRowsOfWarp];
        T const* const first_gate
            = static_cast<T const*>(p.x) + (2 * p.key_heads + p.value_heads + head) * kSize + value;
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
        {
            gates[i] = has(i) ? load_vector<T, kOfLane>(first_gate + row(i) * p.x_row_stride) : Numbers{};
        }
#pragma unroll
        for (int item = threadIdx.x; item < kSize * kDeltaRows / 4; item += kThreads)
        {
            float4 const x = load_new(reinterpret_cast<float4 const*>(from) + item); // another range's lay there
            float const numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
            {
                shared[(item % 4 * 4 + i) * kStride + item / 4] = numbers[i];
            }
        }
        __syncthreads();
        Vector<float, kOfLane> norm = {};
        if (value < kSize)
        {
            norm = load_vector<float, kOfLane>(static_cast<float const*>(p.norm) + value);
        }
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
        {
            Vector<float, kOfLane> x = {};
            if (has(i))
            {
                x = load_vector<float, kOfLane>(shared + row_of(i) * kStride + value);
            }
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kOfLane; ++j)
            {
                sum += x.at[j] * x.at[j];
            }
            float const root = rsqrtf(warp_sum(sum) / static_cast<float>(kSize) + p.norm_eps);
            Numbers out;
#pragma unroll
            for (int j = 0; j < kOfLane; ++j)
            {
                out.at[j] = from_float<T>(x.at[j] * root * norm.at[j] * quick_silu(to_float(gates[i].at[j])));
            }
            if (has(i))
            {
                store_vector(static_cast<T*>(p.out) + (row(i) * p.value_heads + head) * kSize + value, out);
            }
        }
    }
};

} // namespace delta
} // namespace dflash
