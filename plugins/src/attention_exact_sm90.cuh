// Attention for Hopper whose rows depend on nothing else in the batch: see attention_exact_work.cuh.
//
// Tails come first, while tiles of the cuts are on their way; cuts are the mainloop's, with the same products as
// elsewhere. FP8 caches become the rows' type on their way into shared memory, each finite number exactly; their scales
// meet the logits, and the results of tails and cuts.
#pragma once

#include "attention_exact_work.cuh"
#include "attention_sm90.cuh"
#include "attention_tails_sm90.cuh"
#include "element.cuh"
#include "fp8.cuh"

namespace dflash
{
namespace sm90
{

constexpr int kLoaders = 128;
constexpr int kExactThreads = kConsumers + kLoaders; // a whole warpgroup asks for tiles, and gives its registers

// Behind what the mainloop has in shared memory: the paths of a segment's rows.
template <int D>
constexpr int kExactBytes = Shared<D, false>::kBytes + DFLASH_TREE_MOST_ROWS * 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keys of cuts that a thread's two rows see: those before their tails, in their windows.
struct BeforeTails
{
    dflash_attention_params const& p;
    Segment const& segment;
    int past[2];

    __device__ __forceinline__ BeforeTails(
        dflash_attention_params const& params, Segment const& s, int const (&rows)[2], Paths const& paths)
        : p(params)
        , segment(s)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            past[r] = position_of(p, s, rows[r], paths.of[r]) - (kTail - 1);
        }
    }

    template <int N>
    __device__ __forceinline__ void operator()(float (&logits)[N][4], int first_key) const
    {
        // What every row sees.
        int const first_of_all = p.window > 0 ? segment.length - p.window : 0;
        int const past_of_all = segment.length - segment.rows - (kTail - 1);
        if (first_key + kTile > past_of_all || first_key < first_of_all)
        {
            int const between = p.window > 0 ? p.window - kTail : segment.length; // a row's first and past
            hide_keys(logits, first_key, {past[0] - between, past[1] - between}, past);
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
        Partial const partial(w, D, result, row_block * (kRows / 16) + tile);
        partial.write(total, half * (D / 16));
        if (half == 0)
        {
            partial.write_sums(softmax.maximum, softmax.sum);
        }
    }
};

// Applies the scale of values, where caches have one.
template <bool kHasScale, int N>
__device__ __forceinline__ void scale_by(float (&x)[N][4], float scale)
{
    if constexpr (kHasScale)
    {
        scale_rows(x, {scale, scale});
    }
}

// What the two warpgroups do with a range. C: of the caches. seen: tiles of the block's ranges before it.
template <typename T, typename C, int D>
__device__ __forceinline__ void attend_exactly(
    Work const& w, ExactRange const& range, int seen, char* shared, Inputs<Shared<D, false>> const& inputs)
{
    Cursor const& at = range.at;
    constexpr bool kIsFp8 = std::is_same_v<C, E4M3>;
    Mainloop<T, D, false> mainloop(w, shared, inputs, threadIdx.x / 32);
    float value_scale = 1.f;
    if constexpr (kIsFp8)
    {
        mainloop.scale *= __ldg(w.p.key_scale);
        value_scale = __ldg(w.p.value_scale);
    }
    Tails<T, D> const tails{w, shared, inputs, range, mainloop.row_block * kRows, seen, mainloop.scale};
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
            scale_by<kIsFp8>(own, value_scale);
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
        scale_by<kIsFp8>(own, value_scale);
        folded.add(own, mainloop.softmax.maximum, mainloop.softmax.sum);
        mainloop.meet(); // none reads the box any more
    }
    if (!mainloop.has_rows)
    {
        return;
    }
    if (range.is_all)
    {
        float const sink = load_sink(w, at.head, mainloop.rows.packed);
        write_rows<T, D>(w, at.segment, at.head, mainloop.rows.packed, sink, folded.softmax.maximum, folded.softmax.sum,
            folded.total, half * (D / 16));
    }
    else if (at.tile < range.past)
    {
        folded.write(w, range.cut_result(w), mainloop.row_block, half);
    }
}

// The tiles of a range, one after the other: those of its tails, then those of its cuts.
struct RangeTiles
{
    ExactRange const& range;
    Cursor at;

    __device__ __forceinline__ explicit RangeTiles(ExactRange const& of)
        : range(of)
        , at(of.at)
    {
    }

    __device__ __forceinline__ Cursor const& nth(int i)
    {
        int const tail_tiles = range.tail_tiles();
        at.tile = i < tail_tiles ? range.first_tail() + i : range.at.tile + i - tail_tiles;
        return at;
    }
};

// Asks for a range's tiles.
template <typename S>
struct CopiedTiles
{
    static constexpr int kArrivals = 1; // for a tile that has come
    static constexpr int kReaderRegisters = kMainloopRegisters;
    static constexpr int kLoaderRegisters = sm90::kLoaderRegisters;

    Work const& w;
    Inputs<S> const& inputs;
    CUtensorMap const& keys;
    CUtensorMap const& values;

    // By the loaders.
    __device__ __forceinline__ void fill(ExactRange const& range, int seen) const
    {
        if (threadIdx.x != kConsumers)
        {
            return;
        }
        RangeTiles tiles(range);
        int const count = range.tiles();
        for (int i = 0; i < count; ++i)
        {
            int const nth = seen + i;
            TilePlace const place(w, tiles.nth(i));
            inputs.ask(nth % S::kStages, 1 ^ nth / S::kStages % 2, place, range.at.head, keys, values);
        }
    }
};

// Loads a range's tiles of FP8, and writes them as T.
template <typename T, int D, typename S>
struct WidenedTiles
{
    static constexpr int kArrivals = kLoaders;
    static constexpr int kReaderRegisters = 216;
    static constexpr int kLoaderRegisters = 72;
    static constexpr int kChunks = D / 16; // of 16 numbers, of a row
    static constexpr int kOfThread = kTile * kChunks / kLoaders;

    Work const& w;
    Inputs<S> const& inputs;
    char* shared;

    // A thread's share of a tile, as it lies in the cache; zeros past the last of `real` rows.
    __device__ __forceinline__ void load(uint4 (&x)[kOfThread], E4M3 const* tile, int real) const
    {
        int const thread = threadIdx.x - kConsumers;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i)
        {
            int const at = thread + i * kLoaders;
            bool const is_real = at / kChunks < real;
            x[i] = is_real ? __ldcg(reinterpret_cast<uint4 const*>(tile) + at) : uint4{};
        }
    }

    __device__ __forceinline__ void store(uint4 const (&x)[kOfThread], char* tile) const
    {
        int const thread = threadIdx.x - kConsumers;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i)
        {
            int const at = thread + i * kLoaders;
            uint2 const words[4] = {widened(x[i].x), widened(x[i].y), widened(x[i].z), widened(x[i].w)};
#pragma unroll
            for (int half = 0; half < 2; ++half)
            {
                uint2 const &first = words[2 * half], &second = words[2 * half + 1];
                *reinterpret_cast<uint4*>(tile + S::chunk_at(at / kChunks, 2 * (at % kChunks) + half))
                    = {first.x, first.y, second.x, second.y};
            }
        }
    }

    // The four numbers of a word, in their order.
    static __device__ __forceinline__ uint2 widened(uint32_t word)
    {
        uint32_t pairs[2];
        Fp8<T>::spread(word, pairs);
        return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[0], pairs[1], 0x7632)};
    }

    // By the loaders.
    __device__ __forceinline__ void fill(ExactRange const& range, int seen) const
    {
        dflash_attention_params const& p = w.p;
        RangeTiles tiles(range);
        int const count = range.tiles();
        for (int i = 0; i < count; ++i)
        {
            int const nth = seen + i, stage = nth % S::kStages;
            Cursor const& at = tiles.nth(i);
            TilePlace const place(w, at);
            int64_t const offset
                = place.page * p.cache_slot_stride + at.head * p.cache_head_stride + int64_t{place.row} * D;
            int const real = at.segment.length - at.first_key();
            uint4 keys[kOfThread];
            uint4 values[kOfThread];
            load(keys, static_cast<E4M3 const*>(p.keys) + offset, real);
            load(values, static_cast<E4M3 const*>(p.values) + offset, real);
            wait_for_phase(inputs.empty(stage), 1 ^ nth / S::kStages % 2);
            char* const tile = shared + 2 * stage * S::kTileBytes;
            store(keys, tile);
            store(values, tile + S::kTileBytes);
            show_to_products();
            arrive(inputs.full(stage));
        }
    }
};

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

// What a block does: all of its ranges. Tiles: how they come into shared memory.
template <typename T, typename C, int D, typename Tiles>
__device__ __forceinline__ void attend_ranges(
    Work const& w, char* shared, Inputs<Shared<D, false>> const& inputs, Tiles const& tiles)
{
    if (threadIdx.x == 0)
    {
        inputs.init(4, Tiles::kArrivals);
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
        take_registers<Tiles::kReaderRegisters>();
        for (int i = block; i < division.ranges; advance(w, segments, division, range, i, seen))
        {
            attend_exactly<T, C, D>(w, range, seen, shared, inputs);
        }
    }
    else
    {
        release_registers<Tiles::kLoaderRegisters>();
        for (int i = block; i < division.ranges; advance(w, segments, division, range, i, seen))
        {
            tiles.fill(range, seen);
        }
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
    attend_ranges<T, T, D>(w, shared, inputs, CopiedTiles<Shared<D, false>>{w, inputs, keys, values});
#endif
}

template <typename T, int D>
__global__ void __launch_bounds__(kMostThreads, 1) attend_exact_fp8_kernel(Work const w)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    Inputs<Shared<D, false>> const inputs{shared_address(shared)};
    attend_ranges<T, E4M3, D>(w, shared, inputs, WidenedTiles<T, D, Shared<D, false>>{w, inputs, shared});
#endif
}

} // namespace sm90
} // namespace dflash
