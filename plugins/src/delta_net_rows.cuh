// A chunk of a segment's rows, of one key head and its value heads: convolved, normed, and what lies between them by a
// value head's decays and shares.
#pragma once

#include "delta_net_products.cuh"
#include "delta_net_work.cuh"

namespace dflash
{
namespace delta
{

constexpr int kMixNumbers = kDeltaRows * kDeltaRows;
constexpr int kMixStride = kDeltaRows + 4; // where rows apart begin in other banks
constexpr int kMix = kDeltaRows * kMixStride;
constexpr float kLengthEps = 1e-6f; // of keys and queries

// Of a number that is not below 2^-126, to within 1 ulp.
__device__ __forceinline__ float quick_inverse(float x)
{
    float inverse = 0.f;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Without what numbers below 2^-126 would take: exp(-x) of a large x is 0, of a small one infinite.
__device__ __forceinline__ float quick_silu(float x)
{
    float power = 0.f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    return x * quick_inverse(1.f + power);
}

// A channel's convolution, of a row and those before it.
template <typename T>
__device__ __forceinline__ float mix(Vector<T, kTaps> const& taps, T a, T b, T c, T d)
{
    float const before = fmaf(to_float(taps.at[1]), to_float(b), to_float(taps.at[0]) * to_float(a));
    return quick_silu(fmaf(to_float(taps.at[3]), to_float(d), fmaf(to_float(taps.at[2]), to_float(c), before)));
}

// x, or 0: without a branch around what makes x.
__device__ __forceinline__ float kept_if(bool is_kept, float x)
{
    return __int_as_float(__float_as_int(x) & (is_kept ? -1 : 0));
}

// Begins to copy 16 bytes.
__device__ __forceinline__ void stage_16(void* to, void const* from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The same, or writes zeros.
__device__ __forceinline__ void stage_16(void* to, void const* from, bool is_there)
{
    int const bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
        : "memory");
}

// Products of what the first 16 lanes have, up to a lane's own.
__device__ __forceinline__ float product_to(float x)
{
    int const lane = threadIdx.x % kDeltaRows;
#pragma unroll
    for (int step = 1; step < kDeltaRows; step *= 2)
    {
        float const before = __shfl_up_sync(0xffffffffu, x, step, kDeltaRows);
        x *= lane >= step ? before : 1.f;
    }
    return x;
}

// Likewise, of what is behind it up to row 15.
__device__ __forceinline__ float product_behind(float x)
{
    int const lane = threadIdx.x % kDeltaRows;
    float const next = __shfl_down_sync(0xffffffffu, x, 1, kDeltaRows);
    x = lane < kDeltaRows - 1 ? next : 1.f;
#pragma unroll
    for (int step = 1; step < kDeltaRows; step *= 2)
    {
        float const after = __shfl_down_sync(0xffffffffu, x, step, kDeltaRows);
        x *= lane + step < kDeltaRows ? after : 1.f;
    }
    return x;
}

// By a warp whose lanes have the pending rows' decays: what is left of each row behind the last [16], and of the state.
__device__ __forceinline__ void multiply_pending(float decay, float* behind_last, float& of_state)
{
    int const lane = threadIdx.x % 32;
    float const behind = product_behind(decay);
    float const kept = product_to(decay);
    if (lane < kDeltaRows)
    {
        behind_last[lane] = behind;
    }
    if (lane == kDeltaRows - 1)
    {
        of_state = kept;
    }
}

// kOfThread: rows.
template <typename T, int kSize, int kOfThread = 4>
struct ChunkRows
{
    static constexpr int kLane = 4; // channels of a thread
    static constexpr int kLanes = kSize / kLane; // threads of a head's row
    static constexpr int kRows = kOfThread;
    static constexpr int kItems = kLanes * kDeltaRows / kRows; // of a head: threads that have all of its numbers
    using Four = Vector<T, kLane>;

    dflash_delta_net_params const& p;
    Segment const segment;
    int const first; // of the segment's rows
    int const count;
    int const key_head;
    int const lane = threadIdx.x % 32;
    int const column = threadIdx.x % kDeltaRows;

    // The rows of a segment that stay pending.
    __device__ __forceinline__ static ChunkRows pending(
        dflash_delta_net_params const& p, Segment const& whole, int key_head)
    {
        return {p, whole, whole.absorbed, whole.count - whole.absorbed, key_head};
    }

    __device__ __forceinline__ T* window(int at) const
    {
        return window_row<T, kSize>(p, segment.slot, at);
    }

    // Which four channels of which four rows a thread has.
    struct Item
    {
        int head; // of the key head: its queries, its keys, then its value heads
        int row;
        int number; // of the head
        int channel;
    };

    __device__ __forceinline__ static Item item_of(dflash_delta_net_params const& p, int key_head, int heads, int index)
    {
        Item item;
        item.head = index / kItems;
        item.row = index / kLanes % (kDeltaRows / kRows) * kRows;
        item.number = index % kLanes * kLane;
        int const values = 2 * p.key_heads + key_head * heads - 2;
        int const head = item.head == 0 ? key_head : item.head == 1 ? p.key_heads + key_head : values + item.head;
        item.channel = head * kSize + item.number;
        return item;
    }

    // The convolution's weights of four channels.
    struct Taps
    {
        Vector<T, kTaps> at[kLane];
    };

    __device__ __forceinline__ static Taps load_taps(dflash_delta_net_params const& p, Item const& item)
    {
        Taps taps;
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            T const* const from = static_cast<T const*>(p.conv) + int64_t{item.channel} * kTaps;
            taps.at[i] = load_vector<T, kTaps>(from + i * kTaps);
        }
        return taps;
    }

    // The same by way of shared memory, where each thread has a place of its own: a load that nothing needs yet would
    // be waited for at the next branch.
    struct alignas(16) StagedTaps
    {
        T numbers[kLane * kTaps];
    };

    __device__ __forceinline__ static void stage_taps(
        dflash_delta_net_params const& p, Item const& item, StagedTaps& staged)
    {
        constexpr int kNumbers = 16 / static_cast<int>(sizeof(T));
        T const* const from = static_cast<T const*>(p.conv) + int64_t{item.channel} * kTaps;
#pragma unroll
        for (int i = 0; i < kLane * kTaps; i += kNumbers)
        {
            stage_16(staged.numbers + i, from + i);
        }
    }

    // Once its copies have come.
    __device__ __forceinline__ static Taps take_taps(StagedTaps const& staged)
    {
        Taps taps;
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            taps.at[i] = load_vector<T, kTaps>(staged.numbers + i * kTaps);
        }
        return taps;
    }

    // Where all rows lie of an item's channels, and all windows' rows.
    struct Places
    {
        char const* rows;
        char const* windows;
        int row_bytes; // between one and the next
        int window_bytes;

        __device__ __forceinline__ Places(dflash_delta_net_params const& p, Item const& item)
            : rows(reinterpret_cast<char const*>(static_cast<T const*>(p.x) + item.channel))
            , windows(reinterpret_cast<char const*>(static_cast<T const*>(p.window) + item.channel))
            , row_bytes(static_cast<int>(p.x_row_stride) * static_cast<int>(sizeof(T)))
            , window_bytes(channels_of<kSize>(p) * static_cast<int>(sizeof(T)))
        {
            delta::settle(rows);
            delta::settle(windows);
        }
    };

    // Where the rows lie, and those before them.
    struct Sources
    {
        char const* at[kBefore + kRows];
    };

    __device__ __forceinline__ Sources find(Item const& item) const
    {
        return find(item, Places(p, item));
    }

    __device__ __forceinline__ Sources find(Item const& item, Places const& places) const
    {
        Sources sources;
        int const begin = first + item.row; // of the segment's rows
        int const last = max(count, 1) - 1 - item.row; // past it that one again
        int const row = segment.first_row + begin;
        int const before = segment.slot * (kBefore + p.pending) + segment.window + begin; // row of all windows
#pragma unroll
        for (int i = 0; i < kBefore + kRows; ++i)
        {
            bool const is_before = i < kBefore && begin + i < kBefore;
            sources.at[i]
                = moved(is_before ? places.windows : places.rows, is_before ? before + i : row + min(i - kBefore, last),
                    is_before ? places.window_bytes : places.row_bytes);
        }
        return sources;
    }

    // The rows, and those before them.
    struct Inputs
    {
        Four at[kBefore + kRows];
    };

    // Past the L1 cache: a kernel that has not waited yet may find there what was before.
    __device__ __forceinline__ static Inputs load(Sources const& sources)
    {
        Inputs inputs;
#pragma unroll
        for (int i = 0; i < kBefore + kRows; ++i)
        {
            inputs.at[i] = load_new(reinterpret_cast<Four const*>(sources.at[i]));
        }
        return inputs;
    }

    __device__ __forceinline__ Inputs load(Item const& item) const
    {
        Inputs inputs = load(find(item));
        clear_before(item, inputs);
        return inputs;
    }

    // Zeros where a sequence has no rows before these.
    __device__ __forceinline__ void clear_before(Item const& item, Inputs& inputs) const
    {
#pragma unroll
        for (int i = 0; i < kBefore; ++i)
        {
            if (segment.begins && first + item.row + i < kBefore)
            {
                inputs.at[i] = {};
            }
        }
    }

    // Has what was loaded be needed here, not before: parted earlier into single numbers, it would be waited for.
    __device__ __forceinline__ static void settle(Four& x)
    {
        uint32_t* const words = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
        for (size_t i = 0; i < sizeof(x) / sizeof(uint32_t); ++i)
        {
            asm volatile("" : "+r"(words[i]));
        }
    }

    __device__ __forceinline__ static void settle(Inputs& inputs)
    {
#pragma unroll
        for (Four& x : inputs.at)
        {
            settle(x);
        }
    }

    // Waits for the kernels before this one, and loads the rows that stay pending of the guessed segment, or of another
    // that it has become; returns that. What is before a sequence is not cleared.
    template <typename Wait, typename Source>
    __device__ __forceinline__ static Segment load_pending(Guess const& guess, Wait const& wait_for_all,
        Source const& source, int key_head, Item const& item, Inputs& inputs)
    {
        Places const places(guess.p, item);
        Sources sources;
        Segment const segment = guess.load(
            wait_for_all,
            [&](Segment const& segment) { sources = find_pending(guess.p, segment, key_head, item, places); },
            [&] { inputs = load(sources); }, source);
        settle(inputs);
        return segment;
    }

    // Where the rows lie that stay pending; worked out where it is called.
    __device__ __forceinline__ static Sources find_pending(
        dflash_delta_net_params const& p, Segment const& segment, int key_head, Item const& item, Places const& places)
    {
        Sources sources = pending(p, segment, key_head).find(item, places);
#pragma unroll
        for (auto& from : sources.at)
        {
            delta::settle(from);
        }
        return sources;
    }

    // What the next step's convolution sees, where what this one's saw lay; all of that must have been loaded.
    __device__ __forceinline__ void keep(Item const& item, Inputs const& inputs) const
    {
        char* const to = reinterpret_cast<char*>(window(item.row) + item.channel);
        int const window_bytes = channels_of<kSize>(p) * static_cast<int>(sizeof(T));
        int const begin = item.row == 0 ? 0 : kBefore; // the first ones have those before them
        int const end = kBefore + count - item.row;
#pragma unroll
        for (int i = 0; i < kBefore + kRows; ++i)
        {
            if (i >= begin && i < end)
            {
                // As words: of what was just loaded, the compiler would store one number at a time.
                using Words = std::conditional_t<sizeof(Four) == sizeof(uint4), uint4, uint2>;
                *reinterpret_cast<Words*>(to + int64_t{i} * window_bytes)
                    = reinterpret_cast<Words const&>(inputs.at[i]);
            }
        }
    }

    // The convolution of one of the rows, in order.
    __device__ __forceinline__ static float4 convolve(Taps const& taps, Inputs const& inputs, int row)
    {
        float y[kLane];
#pragma unroll
        for (int i = 0; i < kLane; ++i)
        {
            Four const* const x = inputs.at + row;
            y[i] = mix(taps.at[i], x[0].at[i], x[1].at[i], x[2].at[i], x[3].at[i]);
        }
        return {y[0], y[1], y[2], y[3]};
    }

    // Likewise; those that the chunk has not are zeros.
    __device__ __forceinline__ float4 convolve(Item const& item, Taps const& taps, Inputs const& inputs, int row) const
    {
        return masked(item, row, convolve(taps, inputs, row));
    }

    __device__ __forceinline__ float4 masked(Item const& item, int row, float4 const& y) const
    {
        bool const is_there = item.row + row < count;
        return {kept_if(is_there, y.x), kept_if(is_there, y.y), kept_if(is_there, y.z), kept_if(is_there, y.w)};
    }

    // The convolution of a thread's rows of queries or keys, normed, and scaled as they are parted; zeros for those
    // that the chunk has not. By whole warps: each lane of four adds up a row's squares for all of them.
    __device__ __forceinline__ void convolve_normed(
        Item const& item, Taps const& taps, Inputs const& inputs, float4 (&y)[kRows]) const
    {
        static_assert(kRows == 4 && kLanes >= kRows);
        float sums[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
        {
            y[i] = convolve(taps, inputs, i);
            sums[i] = y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w;
        }
        bool const has_last = lane & 2; // two of the rows
        bool const has_second = lane & 1; // of these
        float const first = (has_last ? sums[2] : sums[0]) + shuffled(has_last ? sums[0] : sums[2], 2);
        float const second = (has_last ? sums[3] : sums[1]) + shuffled(has_last ? sums[1] : sums[3], 2);
        float sum = (has_second ? second : first) + shuffled(has_second ? first : second, 1);
#pragma unroll
        for (int step = kRows; step < kLanes; step *= 2)
        {
            sum += shuffled(sum, step);
        }
        float const whole = item.head == 0 ? kRowScale * rsqrtf(static_cast<float>(kSize)) : kRowScale;
        float const of_lane = rsqrtf(sum + kLengthEps) * whole;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
        {
            float const by = __shfl_sync(0xffffffffu, of_lane, i, kRows);
            y[i] = masked(item, i, {y[i].x * by, y[i].y * by, y[i].z * by, y[i].w * by});
        }
    }

    // What lane ^ mask has.
    __device__ __forceinline__ static float shuffled(float x, int mask)
    {
        return __shfl_xor_sync(0xffffffffu, x, mask);
    }

    // Norms a row of queries or keys. By whole warps.
    __device__ __forceinline__ static float4 normed(Item const& item, float4 const& y)
    {
        float sum = y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2)
        {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        float const by = rsqrtf(sum + kLengthEps) * (item.head == 0 ? rsqrtf(static_cast<float>(kSize)) : 1.f);
        return {y.x * by, y.y * by, y.z * by, y.w * by};
    }

    // Of a lane's row, as projected.
    struct Projected
    {
        T share;
        T decay;
    };

    // Where these lie.
    struct ProjectedAt
    {
        T const* share = nullptr;
        T const* decay = nullptr;
    };

    __device__ __forceinline__ ProjectedAt find_projected(int head) const
    {
        int const row = segment.first_row + first + min(column, max(count, 1) - 1);
        T const* share = moved(static_cast<T const*>(p.gates) + head, row,
            static_cast<int>(p.gates_row_stride) * static_cast<int>(sizeof(T)));
        T const* decay = share + p.value_heads;
        delta::settle(share);
        delta::settle(decay);
        return {share, decay};
    }

    __device__ __forceinline__ static Projected load_projected(ProjectedAt const& at)
    {
        return {load_new(at.share), load_new(at.decay)};
    }

    __device__ __forceinline__ Projected load_projected(int head) const
    {
        return load_projected(find_projected(head));
    }

    // Of a lane's row.
    struct Gates
    {
        float share;
        float decay;
    };

    // A value head's.
    struct Rate
    {
        float log;
        float bias;
    };

    __device__ __forceinline__ static Rate load_rate(dflash_delta_net_params const& p, int head)
    {
        return {static_cast<float const*>(p.a_log)[head], static_cast<float const*>(p.dt_bias)[head]};
    }

    __device__ __forceinline__ Gates gates_of(Rate const& of_head, Projected const& projected) const
    {
        float const a = to_float(projected.decay) + of_head.bias;
        float const softplus = fmaxf(a, 0.f) + log1pf(expf(-fabsf(a)));
        float const rate = expf(of_head.log);
        bool const is_there = column < count;
        return {is_there ? quick_inverse(1.f + expf(-to_float(projected.share))) : 0.f,
            is_there ? expf(-rate * softplus) : 1.f};
    }

    // By what a row's write is weighed before another row sees it: of a column, a lane has the first or the last eight
    // rows' D, and these with the rows' shares.
    struct Weights
    {
        float left[kDeltaRows / 2];
        float shared[kDeltaRows / 2];
    };

    __device__ __forceinline__ static void load_half(float const* from, float (&to)[kDeltaRows / 2])
    {
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; i += 4)
        {
            *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<float4 const*>(from + i);
        }
    }

    // numbers: of the warp's, for what all lanes have.
    __device__ __forceinline__ Weights weigh(Gates const& gates, float* numbers) const
    {
        float* const decays = numbers;
        float* const shares = numbers + kDeltaRows;
        if (lane < kDeltaRows)
        {
            decays[lane] = gates.decay;
            shares[lane] = gates.share;
        }
        __syncwarp();
        int const first = first_weighed();
        float before[kDeltaRows / 2]; // decays of the first rows
        float own[kDeltaRows / 2]; // of the lane's
        float own_shares[kDeltaRows / 2];
        load_half(decays, before);
        load_half(decays + first, own);
        load_half(shares + first, own_shares);
        float left = 1.f;
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            left *= first > 0 && i > column ? before[i] : 1.f;
        }
        Weights weights;
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            left *= first + i > column ? own[i] : 1.f;
            weights.left[i] = first + i >= column ? left : 0.f;
            weights.shared[i] = first + i > column ? left * own_shares[i] : 0.f;
        }
        __syncwarp(); // they may be written anew
        return weights;
    }

    // The first row whose weights a lane has.
    __device__ __forceinline__ int first_weighed() const
    {
        return lane / kDeltaRows * (kDeltaRows / 2);
    }

    // Products of keys, and of queries by keys, of half of the numbers each.
    using Products = float[2][2][kMix];

    // By a warp: how a value head's rows read each other, D (q k).
    __device__ __forceinline__ void weigh_reads(Weights const& weights, Products const& products, float* reads) const
    {
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            int const at = (first_weighed() + i) * kMixStride + column;
            reads[at] = weights.left[i] * (products[0][1][at] + products[1][1][at]);
        }
    }

    // By a warp: what a value head's rows write of what they miss, (I + A)^-1 b. lower: for A transposed.
    __device__ __forceinline__ void solve(
        Weights const& weights, float share, Products const& products, float* lower, float* solved) const
    {
        float column_of_a[kDeltaRows / 2];
#pragma unroll
        for (int i = 0; i < kDeltaRows / 2; ++i)
        {
            int const at = (first_weighed() + i) * kMixStride + column;
            column_of_a[i] = weights.shared[i] * (products[0][0][at] + products[1][0][at]);
        }
        float4* const to = reinterpret_cast<float4*>(lower + column * kMixStride + first_weighed());
        to[0] = {column_of_a[0], column_of_a[1], column_of_a[2], column_of_a[3]};
        to[1] = {column_of_a[4], column_of_a[5], column_of_a[6], column_of_a[7]};
        __syncwarp();
        float inverse[kDeltaRows];
        invert(lower, inverse);
        if (lane < kDeltaRows)
        {
#pragma unroll
            for (int i = 0; i < kDeltaRows; ++i)
            {
                solved[i * kMixStride + lane] = inverse[i] * share;
            }
        }
    }

    // (I + A)^-1, of which a lane has a column. Each row that is known is taken from all behind it.
    __device__ __forceinline__ void invert(float const* lower, float (&inverse)[kDeltaRows]) const
    {
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i)
        {
            inverse[i] = i == column ? 1.f : 0.f;
        }
#pragma unroll
        for (int known = 0; known < kDeltaRows - 1; ++known)
        {
#pragma unroll
            for (int part = (known + 1) / 4; part < kDeltaRows / 4; ++part)
            {
                float4 const x = reinterpret_cast<float4 const*>(lower + known * kMixStride)[part];
                float const numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
                    if (4 * part + i > known)
                    {
                        inverse[4 * part + i] = fmaf(-numbers[i], inverse[known], inverse[4 * part + i]);
                    }
                }
            }
        }
    }
};

} // namespace delta
} // namespace dflash
