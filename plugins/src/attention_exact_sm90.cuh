// Attention for Hopper whose rows depend on nothing else in the batch: see attention_exact_work.cuh.
//
// Tails come first, while tiles of the cuts are on their way; cuts are the mainloop's, with the same products as
// elsewhere.
#pragma once

#include "attention_exact_work.cuh"
#include "attention_sm90.cuh"
#include "attention_tails_sm90.cuh"

namespace dflash
{
namespace sm90
{

constexpr int kExactThreads = kConsumers + 128; // a whole warpgroup asks for tiles, and gives its registers

// Behind what the mainloop has in shared memory: the paths of a segment's rows.
template <int D>
constexpr int kExactBytes = Shared<D, false>::kBytes + DFLASH_TREE_MOST_ROWS * 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keys of cuts that a thread's two rows see: those before their tails, in their windows.
struct BeforeTails
{
    int first[2];
    int past[2];
    int first_of_all, past_of_all; // keys that every row sees

    __device__ __forceinline__ BeforeTails(
        dflash_attention_params const& p, Segment const& s, int const (&rows)[2], Paths const& paths)
        : first_of_all(p.window > 0 ? s.length - p.window : 0)
        , past_of_all(s.length - s.rows - (kTail - 1))
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            int const position = position_of(p, s, rows[r], paths.of[r]);
            first[r] = p.window > 0 ? position - p.window + 1 : 0;
            past[r] = position - (kTail - 1);
        }
    }

    template <int N>
    __device__ __forceinline__ void operator()(float (&logits)[N][4], int first_key) const
    {
        if (first_key + kTile > past_of_all || first_key < first_of_all)
        {
            hide_keys(logits, first_key, first, past);
        }
    }
};

// The result of some of a row's cuts, or of its tail, of a half of the columns: each cut goes into those before.
template <typename T, int D>
struct Folded
{
    float total[D / 16][4];
    OnlineSoftmax<Exp2> softmax; // its logits have their scale already

    __device__ __forceinline__ void begin()
    {
        softmax.begin();
#pragma unroll
        for (auto& x : total)
        {
            x[0] = x[1] = x[2] = x[3] = 0.f;
        }
    }

    __device__ __forceinline__ void add(
        float const (&own)[D / 16][4], float const (&maxima)[2], float const (&sums)[2])
    {
        Fold const fold(softmax, maxima, sums);
#pragma unroll
        for (int n = 0; n < D / 16; ++n)
        {
            fold.add(total[n], {own[n][0], own[n][1], own[n][2], own[n][3]});
        }
    }

    __device__ __forceinline__ void write(Work const& w, int result, int row_block, int half) const
    {
        int const tile = threadIdx.x / 32 % 4;
        Partial const partial(w, 1, D, result, false, row_block, kRows / 16, tile);
        partial.write(total, half * (D / 16));
        if (half == 0)
        {
            partial.write_sums(softmax.maximum, softmax.sum);
        }
    }
};

// What the two warpgroups do with a range. seen: tiles of the block's ranges before it.
template <typename T, int D>
__device__ __forceinline__ void attend_exactly(
    Work const& w, ExactRange const& range, int seen, char* shared, Inputs<Shared<D, false>> const& inputs)
{
    Cursor const& at = range.at;
    Mainloop<T, D, false> mainloop(w, shared, inputs, threadIdx.x / 32);
    Tails<T, D> const tails{w, shared, inputs, range, mainloop.row_block * kRows, seen};
    seen += range.tail_tiles();
    // Every other tile is a warpgroup's, by its place in the text: that of the ring is then always the same one's.
    int const half = (seen + at.tile + mainloop.group) % 2;
    float own[D / 16][4];
    Folded<T, D> folded;
    folded.begin();
    tails.load_paths();
    mainloop.begin(at);
    if (range.has_tails)
    {
        tails.wait_for_tiles();
        tails.compute();
        mainloop.meet(); // after which none reads their tiles any more
        if (mainloop.group == 0 && threadIdx.x % 32 == 0)
        {
            tails.release_tiles();
        }
        if (mainloop.has_rows)
        {
            float maxima[2];
            float sums[2];
            tails.read(threadIdx.x / 32 % 4 * 16, half * (D / 16), own, maxima, sums);
            folded.add(own, maxima, sums);
            if (!range.is_all)
            {
                folded.write(w, range.tails_result(w), mainloop.row_block, half);
                folded.begin();
            }
        }
        mainloop.meet(); // none reads the box any more
    }
    BeforeTails const hide(w.p, at.segment, mainloop.rows.query, mainloop.paths);
    for (int cut = at.tile; cut < range.past; cut += kCutTiles - cut % kCutTiles)
    {
        if (cut > at.tile)
        {
            mainloop.forget();
        }
        int const past = min(cut + kCutTiles - cut % kCutTiles, range.past);
        for (int tile = cut + (cut + half) % 2; tile < past; tile += 2)
        {
            mainloop.add(seen + tile - at.tile, tile * kTile, at.segment, hide);
        }
        mainloop.softmax.finish(mainloop.scale);
        mainloop.merge(half, own);
        folded.add(own, mainloop.softmax.maximum, mainloop.softmax.sum);
        mainloop.meet(); // none reads the box any more
    }
    if (!mainloop.has_rows)
    {
        return;
    }
    if (range.is_all)
    {
        write_rows<T, D>(w, at.segment, at.head, mainloop.rows.packed, folded.softmax.maximum, folded.softmax.sum,
            folded.total, half * (D / 16));
    }
    else if (at.tile < range.past)
    {
        folded.write(w, range.cut_result(w), mainloop.row_block, half);
    }
}

// Asks for the tiles of a range's tails, then for those of its cuts. By one thread.
template <typename S>
__device__ __forceinline__ void fill_exactly(Work const& w, ExactRange const& range, int seen, Inputs<S> const& inputs,
    CUtensorMap const& keys, CUtensorMap const& values)
{
    Cursor ahead = range.at;
    int const tiles = range.tiles();
    int const tail_tiles = range.tail_tiles();
    for (int i = 0; i < tiles; ++i)
    {
        ahead.tile = i < tail_tiles ? range.first_tail() + i : range.at.tile + i - tail_tiles;
        int const nth = seen + i;
        TilePlace const place(w, ahead);
        inputs.ask(nth % S::kStages, 1 ^ nth / S::kStages % 2, place, ahead.head, keys, values);
    }
}

// Goes on to a block's next range, where there is one. By all lanes of a warp.
__device__ __forceinline__ void advance(Work const& w, Segments const& segments, ExactDivision const& division,
    ExactRange& range, int& index, int& seen)
{
    __syncwarp();
    seen += range.tiles();
    index += gridDim.x;
    if (index < division.ranges)
    {
        range = ExactRange(w, segments, division, index);
    }
}

#endif

template <typename T, int D>
__global__ void __launch_bounds__(kMostThreads, 1) attend_exact_kernel(
    Work const w, __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    Inputs<Shared<D, false>> const inputs{shared_address(shared)};
    if (threadIdx.x == 0)
    {
        inputs.init(4);
    }
    // Segments are a guess until the wait, as in attend_kernel.
    Segments segments(w.p);
    bool const can_guess = w.p.slots <= 32;
    int const block = blockIdx.x;
    ExactDivision division(w, segments);
    ExactRange range;
    if (can_guess && block < division.ranges)
    {
        range = ExactRange(w, segments, division, block);
    }
    __syncthreads();
    wait();
    trigger();
    if (segments.renew() || !can_guess)
    {
        division = ExactDivision(w, segments);
        range = block < division.ranges ? ExactRange(w, segments, division, block) : ExactRange();
    }
    // By each kind of warps in a loop of its own: the compiler then knows what registers it has.
    int seen = 0;
    if (threadIdx.x < kConsumers)
    {
        take_registers<kMainloopRegisters>();
        for (int i = block; i < division.ranges; advance(w, segments, division, range, i, seen))
        {
            attend_exactly<T, D>(w, range, seen, shared, inputs);
        }
    }
    else
    {
        release_registers<kLoaderRegisters>();
        for (int i = block; i < division.ranges; advance(w, segments, division, range, i, seen))
        {
            if (threadIdx.x == kConsumers)
            {
                fill_exactly(w, range, seen, inputs, keys, values);
            }
        }
    }
#endif
}

} // namespace sm90
} // namespace dflash
