// The kernel of one row a slot: append and attention.
//
// A lane is the g-th (0 to 7) of those with the same two heads, the j-th (0 to 3) pair of the eight.
#pragma once

#include "launch.cuh"
#include "row_attention_join_sm90.cuh"

namespace dflash
{
namespace row
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- main loop --------------------------------------------------------------------------------------------------------

// A transposed matrix of eight by eight numbers.
__device__ __forceinline__ uint32_t transposed(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// What a warp has of its own keys.
template <typename T, int D>
struct Mainloop
{
    using S = Shape<T, D>;
    uint32_t queries[S::kSteps / 2][4];
    float out[S::kSteps][4]; // [dimensions g and g + 8 of a step, the two heads]
    float total[4]; // weights, in [0] and [1]
    float maximum[2];

    __device__ __forceinline__ void begin(Shared<T, D> const& shared)
    {
        int const lane = threadIdx.x % 32;
        uint32_t const at = shared_address(shared.rows) + (lane % 8 * S::kRow + lane / 8 * 8) * 2;
#pragma unroll
        for (int k = 0; k < S::kSteps / 2; ++k)
        {
            load_matrices(queries[k], at + k * 64);
        }
#pragma unroll
        for (auto& x : out)
        {
            x[0] = x[1] = x[2] = x[3] = 0.f;
        }
        total[0] = total[1] = total[2] = total[3] = 0.f;
        maximum[0] = maximum[1] = -INFINITY;
    }

    __device__ __forceinline__ void multiply_keys(float (&logits)[S::kKeyTiles][4], Tiles<T, D> const& tiles) const
    {
#pragma unroll
        for (int t = 0; t < S::kKeyTiles; ++t)
        {
            float other[4] = {};
#pragma unroll
            for (int k = 0; k < S::kSteps; ++k)
            {
                uint32_t keys[4];
                tiles.load_keys(keys, t, k);
                auto const& q = queries[k / 2];
                multiply_add<T>(k % 2 ? other : logits[t], keys, q[k % 2 * 2], q[k % 2 * 2 + 1]);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                logits[t][c] += other[c];
            }
        }
    }

    // Makes weights of logits. first, past: keys that the row sees, from the warp's first on.
    __device__ __forceinline__ void weigh(
        float const (&logits)[S::kKeyTiles][4], float scale, int first, int past, uint32_t (&weights)[S::kKeyTiles][2])
    {
        int const key = threadIdx.x % 32 / 4;
        float x[S::kKeyTiles][4];
        float top[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int t = 0; t < S::kKeyTiles; ++t)
        {
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                int const nth = key + t * 16 + c / 2 * 8;
                x[t][c] = nth >= first && nth < past ? logits[t][c] * scale : -INFINITY;
                top[c % 2] = fmaxf(top[c % 2], x[t][c]);
            }
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
        {
            top[0] = fmaxf(top[0], __shfl_xor_sync(kAll, top[0], step));
            top[1] = fmaxf(top[1], __shfl_xor_sync(kAll, top[1], step));
        }
        float const base[2] = {top[0] == -INFINITY ? 0.f : top[0], top[1] == -INFINITY ? 0.f : top[1]};
#pragma unroll
        for (int t = 0; t < S::kKeyTiles; ++t)
        {
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                float const low = FlushingExp2::of(x[t][2 * r] - base[0]);
                weights[t][r] = transposed(packed<T>(low, FlushingExp2::of(x[t][2 * r + 1] - base[1])));
            }
        }
        float const decay[2] = {FlushingExp2::of(maximum[0] - base[0]), FlushingExp2::of(maximum[1] - base[1])};
#pragma unroll
        for (auto& y : out)
        {
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                y[c] *= decay[c % 2];
            }
        }
        total[0] *= decay[0];
        total[1] *= decay[1];
        maximum[0] = top[0];
        maximum[1] = top[1];
    }

    __device__ __forceinline__ void multiply_values(
        uint32_t const (&weights)[S::kKeyTiles][2], Tiles<T, D> const& tiles)
    {
#pragma unroll
        for (int t = 0; t < S::kKeyTiles; ++t)
        {
#pragma unroll
            for (int k = 0; k < S::kSteps; ++k)
            {
                uint32_t values[4];
                tiles.load_values(values, t, k);
                multiply_add<T>(out[k], values, weights[t][0], weights[t][1]);
            }
            multiply_add<T>(total, {S::kOnes, S::kOnes, S::kOnes, S::kOnes}, weights[t][0], weights[t][1]);
        }
    }

    // Leaves what the warp has in a box, [heads, kBoxRow].
    __device__ __forceinline__ void store(float* box, Shared<T, D>& shared) const
    {
        int const lane = threadIdx.x % 32;
        int const warp = threadIdx.x / 32;
        box += lane % 4 * 2 * S::kBoxRow + lane / 4;
#pragma unroll
        for (int k = 0; k < S::kSteps; ++k)
        {
#pragma unroll
            for (int c = 0; c < 4; ++c)
            {
                box[c % 2 * S::kBoxRow + k * 16 + c / 2 * 8] = out[k][c];
            }
        }
        if (lane < 4)
        {
            shared.warp_sums[warp][2 * lane] = {maximum[0], total[0]};
            shared.warp_sums[warp][2 * lane + 1] = {maximum[1], total[1]};
        }
    }
};

#endif

// Writes zeros where no segment's row is.
template <typename T, int D>
__device__ __forceinline__ void write_padding(dflash_attention_params const& p, int row)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < p.heads * (D / 8); i += kThreads)
    {
        store_vector(static_cast<T*>(p.out) + int64_t{row} * p.heads * D + i * 8, Vector<T, 8>{});
    }
}

// -- the kernel -------------------------------------------------------------------------------------------------------

template <typename T, int D, int kCluster>
__global__ void __launch_bounds__(kThreads, 4) row_attention_kernel(__grid_constant__ dflash_append_params const a,
    __grid_constant__ dflash_attention_params const p, __grid_constant__ RowWork const w,
    __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = Shape<T, D>;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<T, D>*>(memory);
    int const cluster = blockIdx.x / kCluster;
    int const rank = blockIdx.x % kCluster;
    int const group = w.group;
    bool const is_padding = static_cast<int>(blockIdx.x) < a.rows && __ldcg(a.row_segment + blockIdx.x) < 0;
    Part const part = find_part(p, w, cluster);
    Tiles<T, D> const tiles(shared);
    if (!part.is_there)
    {
        trigger();
        if (is_padding)
        {
            wait();
            write_padding<T, D>(p, blockIdx.x);
        }
        return; // others wait for the kernel before this one
    }
    Range<kCluster> const range(p, part, rank, S::kKeys);
    // The next kernel asks for its weights as soon as it begins: memory gives this one's keys first. The round in which
    // it may begin, by the block's warp with the fewest; one with a single round asks for all it reads right away.
    int const lets_next = w.reads_first && range.rounds > 1 ? max(range.rounds - 3, 0) : -1;
    if (lets_next < 0)
    {
        trigger();
    }
    if (threadIdx.x % 32 == 0)
    {
        tiles.init();
        if (range.rounds > 0)
        {
            KeyPlace const place(p, w, part.slot, range.begin);
            tiles.ask(0, keys, place, part.head);
            tiles.ask(1, values, place, part.head);
        }
    }
    __syncwarp();
    if (threadIdx.x == 0)
    {
        uint32_t const joined = shared_address(&shared.joined);
        init_barrier(joined, 1);
        fence_barrier_inits();
        expect_bytes(joined, kHeads * (D * 4 + kCluster * static_cast<int>(sizeof(float2))));
    }
    OwnRow<T, D> own;
    own.load_constants(a, part.row, part.start);
    T const* const row = static_cast<T const*>(a.qkv) + part.row * a.qkv_row_stride;
    bool const appends = part.nth == 0 && rank == 0 && part.start >= 0 && part.start < p.cache_rows;
    KeyPlace const of_row(p, w, part.slot, appends ? part.start : 0);
    int64_t const place = of_row.page * p.cache_slot_stride + part.head * p.cache_head_stride + int64_t{of_row.row} * D;
    if (threadIdx.x < kHeads)
    {
        bool const has_sink = p.sinks && static_cast<int>(threadIdx.x) < group;
        shared.sinks[threadIdx.x] = has_sink ? sink_of(p, part.head * group + threadIdx.x) : -INFINITY;
    }
    float const scale = p.scale * kLog2E;
    int const first_seen = p.window > 0 ? part.start - p.window + 1 : 0;
    // The code comes from memory at each launch. So a block that has time runs through all of it before it waits, of
    // whatever lies there, and leaves nothing.
#pragma unroll 1
    for (bool is_real = cluster >= w.early;; is_real = true)
    {
        if (is_real)
        {
            __syncthreads();
            arrive_behind_writes(); // what is sent to this block is not written over by a rehearsal
            wait();
        }
        own.prepare(a, row, part.head, group, is_real && appends, place, shared);
        __syncthreads();
        Mainloop<T, D> mainloop;
        mainloop.begin(shared);
        int const rounds = is_real ? range.rounds : 1;
#pragma unroll 1
        for (int round = 0; round < rounds; ++round)
        {
            int const key = range.begin + round * S::kRound;
            bool const asks = round + 1 < rounds && threadIdx.x % 32 == 0;
            KeyPlace const next = asks ? KeyPlace(p, w, part.slot, key + S::kRound) : KeyPlace();
            float logits[S::kKeyTiles][4] = {};
            if (is_real)
            {
                tiles.wait_for(0, round);
            }
            mainloop.multiply_keys(logits, tiles);
            __syncwarp();
            if (asks)
            {
                tiles.ask(0, keys, next, part.head);
            }
            uint32_t weights[S::kKeyTiles][2];
            mainloop.weigh(logits, scale, first_seen - key, range.past - key, weights);
            if (is_real)
            {
                tiles.wait_for(1, round);
                if (range.past - key < S::kKeys)
                {
                    tiles.clear_values(range.past - key);
                }
            }
            mainloop.multiply_values(weights, tiles);
            __syncwarp();
            if (asks)
            {
                tiles.ask(1, values, next, part.head);
            }
            if (is_real && round == lets_next)
            {
                trigger();
            }
        }
        if (is_real || threadIdx.x < 32)
        {
            void* const box = is_real ? static_cast<void*>(shared.tiles[threadIdx.x / 32]) : shared.results;
            mainloop.store(static_cast<float*>(box), shared);
        }
        if (is_real)
        {
            wait_for_cluster(); // the others can be sent to
        }
        __syncthreads();
        send_all<T, D, kCluster>(rank, is_real, shared);
        multiply_own(scale, shared); // while the others send
        if (is_real)
        {
            wait_for_phase(shared_address(&shared.joined), 0);
        }
        __syncthreads();
        join<T, D, kCluster>(p, w, part, group, cluster, rank, is_real, shared);
        if (is_real)
        {
            break;
        }
    }
    if (is_padding)
    {
        write_padding<T, D>(p, blockIdx.x);
    }
    if (part.count > 1)
    {
        join_parts<T, D, kCluster>(p, w, part, cluster, rank, shared);
    }
#endif
}

} // namespace row
} // namespace dflash
