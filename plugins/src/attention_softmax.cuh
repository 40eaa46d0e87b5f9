// Attention's softmax over keys that come tile by tile, and the mask of the keys that a row does not see.
//
// A thread holds two rows of a fragment, r = 0 and 1: numbers 2 r and 2 r + 1 of its four.
#pragma once

#include "attention_work.cuh"
#include "dflash_kernels.h"
#include "element.cuh"

namespace dflash
{

constexpr float kLog2E = 1.4426950408889634f;

// Powers of two as CUDA has them, and by one instruction, which gives zero for results below 2^-126.
struct Exp2
{
    static __device__ __forceinline__ float of(float x)
    {
        return exp2f(x);
    }
};

struct FlushingExp2
{
    static __device__ __forceinline__ float of(float x)
    {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
};

// Logits of 8 N keys, the first of them first_key, become -inf where a row does not see the key: it sees those from its
// first to the one before its past.
template <int N>
__device__ __forceinline__ void hide_keys(
    float (&logits)[N][4], int first_key, int const (&first)[2], int const (&past)[2])
{
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r)
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
        {
#pragma unroll
            for (int c = 0; c < 2; ++c)
            {
                int const key = first_key + n * 8 + lane % 4 * 2 + c;
                if (key < first[r] || key >= past[r])
                {
                    logits[n][2 * r + c] = -INFINITY;
                }
            }
        }
    }
}

// Of a thread's two rows those that they see of their segment, where it is a tree: its ancestors and itself, a bit
// each.
struct Paths
{
    uint64_t of[2];

    __device__ __forceinline__ void load(dflash_attention_params const& p, Segment const& segment, int const (&rows)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            of[r] = p.row_path && rows[r] < segment.rows ? p.row_path[segment.first_row + rows[r]] : 0;
        }
    }

    // Logits of 8 N keys, at most a tile, become -inf where a row does not see the key. first_key is relative to the
    // segment's first row, before which a row sees those from first on.
    template <int N>
    __device__ __forceinline__ void hide_keys(float (&logits)[N][4], int first_key, int const (&first)[2]) const
    {
        int const own = first_key + static_cast<int>(threadIdx.x) % 4 * 2; // the first key of this lane
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            uint64_t const before = own <= -64 ? ~uint64_t{0} : own < 0 ? (uint64_t{1} << -own) - 1 : 0;
            uint64_t const tree = own <= -64 || own >= 64 ? 0 : own < 0 ? of[r] << -own : of[r] >> own;
            uint64_t const seen = before | tree; // a bit for each key from this lane's first on
#pragma unroll
            for (int n = 0; n < N; ++n)
            {
#pragma unroll
                for (int c = 0; c < 2; ++c)
                {
                    bool const is_seen = seen >> (n * 8 + c) & 1 && own + n * 8 + c >= first[r];
                    logits[n][2 * r + c] = is_seen ? logits[n][2 * r + c] : -INFINITY;
                }
            }
        }
    }
};

// Keys that query rows see: those up to their own where attention is causal, and at most a window of them. The block's
// own rows are a slot's last keys.
struct Mask
{
    dflash_attention_params const& p;
    Segment const& segment;

    // Logits of 8 N keys of a tile, its own_key-th and on, become -inf where a row does not see the key.
    template <int N>
    __device__ __forceinline__ void apply(
        float (&logits)[N][4], int const (&rows)[2], Paths const& paths, int first_key, int own_key = 0) const
    {
        int const length = segment.length;
        int const past_of_all = length - (p.causal ? segment.rows - 1 : 0); // keys that every row sees
        int const first_of_all = p.window > 0 ? length - p.window : 0;
        if (first_key + kTile > past_of_all || first_key < first_of_all)
        {
            int first[2];
            if (p.row_path)
            {
                // Of a segment's first row's place: a row's position is by as many further as it has ancestors.
#pragma unroll
                for (int r = 0; r < 2; ++r)
                {
                    first[r] = p.window > 0 ? __popcll(paths.of[r]) - p.window : -length;
                }
                paths.hide_keys(logits, first_key + own_key - (length - segment.rows), first);
                return;
            }
            int past[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                int const position = length - segment.rows + rows[r];
                past[r] = p.causal ? position + 1 : length;
                first[r] = p.window > 0 ? position - p.window + 1 : 0;
            }
            hide_keys(logits, first_key + own_key, first, past);
        }
    }
};

// The two rows of each fragment times what their maximum, now larger, leaves of them. By all lanes of a warp.
template <int N>
__device__ __forceinline__ void scale_rows(float (&x)[N][4], float const (&decay)[2])
{
    if (__any_sync(0xffffffffu, decay[0] != 1.f || decay[1] != 1.f))
    {
#pragma unroll
        for (auto& fragment : x)
        {
            fragment[0] *= decay[0];
            fragment[1] *= decay[0];
            fragment[2] *= decay[1];
            fragment[3] *= decay[1];
        }
    }
}

// The two rows of a fragment times what they are to be, plus those of another, of other keys.
__device__ __forceinline__ void merge_rows(
    float (&x)[4], float4 const& y, float const (&mine)[2], float const (&theirs)[2])
{
    x[0] = x[0] * mine[0] + y.x * theirs[0];
    x[1] = x[1] * mine[0] + y.y * theirs[0];
    x[2] = x[2] * mine[1] + y.z * theirs[1];
    x[3] = x[3] * mine[1] + y.w * theirs[1];
}

// Online softmax of a thread's two rows, base 2. A row that has seen no key yet keeps its maximum at -inf and all
// weights at 0.
template <typename Exponential>
struct OnlineSoftmax
{
    float maximum[2]; // of logits without their scale, until the end
    float sum[2]; // of weights; of this lane's keys alone, until the end
    float base[2]; // what the weights are relative to

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            maximum[r] = -INFINITY;
            sum[r] = 0.f;
        }
    }

    // Raises a row's maximum to top; what that leaves of its sum, and of its output.
    __device__ __forceinline__ float raise(int r, float top, float scale)
    {
        // Products rounded alike, not fused with the difference: a maximum that stays leaves exactly all, so that keys
        // which a row does not see change nothing of it.
        base[r] = top == -INFINITY ? 0.f : __fmul_rn(top, scale);
        float const decay = Exponential::of(__fmul_rn(maximum[r], scale) - base[r]);
        maximum[r] = top;
        sum[r] *= decay;
        return decay;
    }

    // Takes the maxima of further logits, [2 rows, 8 N keys], and scales the output so far. By all lanes of a warp.
    template <int N, int M>
    __device__ __forceinline__ void advance(float const (&logits)[N][4], float scale, float (&out)[M][4])
    {
        float decay[2];
        advance(logits, scale, decay);
        scale_rows(out, decay);
    }

    // The same; what is left of the output so far.
    template <int N>
    __device__ __forceinline__ void advance(float const (&logits)[N][4], float scale, float (&decay)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float top = maximum[r];
#pragma unroll
            for (int n = 0; n < N; ++n)
            {
                top = fmaxf(top, fmaxf(logits[n][2 * r], logits[n][2 * r + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            decay[r] = raise(r, top, scale);
        }
    }

    // Makes weights of a fragment's logits, and sums them.
    __device__ __forceinline__ void weigh(float (&x)[4], float scale)
    {
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            x[i] = Exponential::of(fmaf(x[i], scale, -base[i / 2]));
            sum[i / 2] += x[i];
        }
    }

    // The end: sums of all lanes' keys, and maxima with their scale. By all lanes of a warp.
    __device__ __forceinline__ void finish(float scale)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            maximum[r] *= scale;
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        }
    }

    // After the end: joins the softmax of the same rows over other keys. What the two outputs are to be multiplied by.
    __device__ __forceinline__ void merge(
        float const (&maxima)[2], float const (&sums)[2], float (&mine)[2], float (&theirs)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float const top = fmaxf(maximum[r], maxima[r]);
            float const zero = top == -INFINITY ? 0.f : top;
            mine[r] = Exponential::of(maximum[r] - zero);
            theirs[r] = Exponential::of(maxima[r] - zero);
            maximum[r] = top;
            sum[r] = sum[r] * mine[r] + sums[r] * theirs[r];
        }
    }
};

// Takes the result of a further cut of a (slot, head)'s keys, its rows' maxima and sums and a fragment of its output,
// into what the cuts before it gave. Rounded alike wherever it is compiled: of cuts that another block has computed,
// too.
struct Fold
{
    float decay[2], weights[2];

    // softmax: of the cuts before; its logits have their scale already.
    __device__ __forceinline__ Fold(OnlineSoftmax<Exp2>& softmax, float const (&maxima)[2], float const (&sums)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            float const before = softmax.sum[r];
            decay[r] = softmax.raise(r, fmaxf(softmax.maximum[r], maxima[r]), 1.f);
            weights[r] = exp2f(maxima[r] - softmax.base[r]);
            softmax.sum[r] = fmaf(sums[r], weights[r], __fmul_rn(before, decay[r]));
        }
    }

    __device__ __forceinline__ void add(float (&total)[4], float4 const& x) const
    {
        total[0] = fmaf(x.x, weights[0], __fmul_rn(total[0], decay[0]));
        total[1] = fmaf(x.y, weights[0], __fmul_rn(total[1], decay[0]));
        total[2] = fmaf(x.z, weights[1], __fmul_rn(total[2], decay[1]));
        total[3] = fmaf(x.w, weights[1], __fmul_rn(total[3], decay[1]));
    }
};

__device__ __forceinline__ float sink_of(dflash_attention_params const& p, int head)
{
    float sink;
    switch (p.sinks_dtype)
    {
    case DFLASH_FP16: sink = to_float(static_cast<__half const*>(p.sinks)[head]); break;
    case DFLASH_BF16: sink = to_float(static_cast<__nv_bfloat16 const*>(p.sinks)[head]); break;
    default: sink = static_cast<float const*>(p.sinks)[head];
    }
    return sink * kLog2E;
}

// The factor of a row's unnormalized output, from its maximum (base 2) and its sum. sink: where there are any.
__device__ __forceinline__ float normalizer(dflash_attention_params const& p, float sink, float maximum, float sum)
{
    if (sum == 0.f)
    {
        return 0.f;
    }
    if (!p.sinks)
    {
        return __fdividef(1.f, sum);
    }
    float const top = fmaxf(maximum, sink);
    float const scale = exp2f(maximum - top);
    return __fdividef(scale, sum * scale + exp2f(sink - top));
}

} // namespace dflash
