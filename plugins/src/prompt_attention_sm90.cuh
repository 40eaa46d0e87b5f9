// Attention of many rows of prompts, for Hopper: a loop over items of 128 packed rows and all keys that they see.
//
// One block an SM. One warp has queries and tiles of keys and values brought, as many ahead as fit; two warpgroups of
// 64 packed rows each compute. A warpgroup begins the products of the next keys, and of the last weights with their
// values, before the softmax of what it has; the two take turns, so that one's softmax runs beside the products of the
// other.
#pragma once

#include "attention_softmax.cuh"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "prompt_attention_inputs.cuh"
#include "prompt_attention_work.cuh"
#include "wgmma.cuh"

namespace dflash
{
namespace prompts
{

constexpr int kGroupRows = 64; // packed rows of a warpgroup
constexpr int kThreads = kConsumers + 128; // registers are given to warpgroups
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using namespace sm90;

// -- instructions -----------------------------------------------------------------------------------------------------

// Both warpgroups.
__device__ __forceinline__ void meet_all()
{
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Waits for a warpgroup's turn to begin products, which the other gives it.
__device__ __forceinline__ void wait_for_turn(int group)
{
    asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
}

__device__ __forceinline__ void give_turn_to(int group)
{
    asm volatile("bar.arrive %0, 256;" ::"r"(2 + group) : "memory");
}

// -- main loop --------------------------------------------------------------------------------------------------------

// Attention of a warpgroup's 64 packed rows of each item.
template <typename T, int D>
struct Mainloop
{
    using S = Shared<D>;
    static constexpr int kKeyFragments = kKeys / 8;

    PromptWork const& w;
    char* shared;
    Inputs<D> inputs;
    int group; // the warpgroup
    int row[2]; // of this thread's packed rows the query row, from the item's first
    float scale; // of the logits, base 2
    typename Inputs<D>::RingPlace next;
    Place<2> next_queries;
    float logits[kKeyFragments][4];
    uint32_t weights[kKeyFragments / 2][4];
    float out[D / 8][4]; // unnormalized
    OnlineSoftmax<FlushingExp2> softmax;

    __device__ __forceinline__ Mainloop(PromptWork const& work, char* shared_memory, Inputs<D> const& from)
        : w(work)
        , shared(shared_memory)
        , inputs(from)
        , group(threadIdx.x / 128)
        , scale(work.p.scale * kLog2E)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            row[r] = packed_row(r) / w.group;
        }
        if (group == 1)
        {
            give_turn_to(0);
        }
    }

    // After the last item: takes the turn that the other gave.
    __device__ __forceinline__ void end() const
    {
        if (group == 0)
        {
            wait_for_turn(0);
        }
    }

    __device__ __forceinline__ int packed_row(int r) const
    {
        return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r * 8;
    }

    // Attends from an item's rows to all of its keys. Of all but the last tile the values are multiplied beside the
    // next one's keys.
    __device__ __forceinline__ void attend(Item const& item)
    {
        softmax.begin();
#pragma unroll
        for (auto& fragment : out)
        {
            fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.f;
        }
        wait_for_phase(inputs.queries_full(next_queries.at), next_queries.parity);
        wait_for_phase(inputs.full(next.at), next.parity);
        begin_products();
        multiply_keys(inputs.tile(next.at));
        commit_products();
        wait_for_products(logits);
        leave(inputs.empty(next.at));
        next.advance();
        float decay[2];
        weigh(item, 0, decay);
        pack_weights();

        for (int tile = 1; tile < item.tiles; ++tile)
        {
            auto const keys = next;
            next.advance();
            auto const values = next;
            next.advance();
            wait_for_phase(inputs.full(keys.at), keys.parity);
            wait_for_phase(inputs.full(values.at), values.parity);
            wait_for_turn(group);
            begin_products();
            multiply_keys(inputs.tile(keys.at));
            commit_products();
            multiply_values(inputs.tile(values.at));
            commit_products();
            give_turn_to(1 - group);
            wait_for_products<1>(logits);
            leave(inputs.empty(keys.at));
            weigh(item, tile, decay);
            wait_for_products(out);
            leave(inputs.empty(values.at));
            scale_rows(out, decay);
            pack_weights();
        }

        leave(inputs.queries_empty(next_queries.at));
        next_queries.advance();
        wait_for_phase(inputs.full(next.at), next.parity);
        clear_values(item, next.at);
        begin_products();
        multiply_values(inputs.tile(next.at));
        commit_products();
        wait_for_products(out);
        leave(inputs.empty(next.at));
        next.advance();
        softmax.finish(scale);
    }

    // Says that this warp is done with what it read.
    __device__ __forceinline__ void leave(uint32_t barrier) const
    {
        if (threadIdx.x % 32 == 0)
        {
            arrive(barrier);
        }
    }

    // logits [64, 128] = q k^T
    __device__ __forceinline__ void multiply_keys(uint32_t keys)
    {
        uint32_t const queries = inputs.queries(next_queries.at) + group * kGroupRows * kAtom * 2;
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
        {
            int const column = k / 4 * S::kHalfBytes + k % 4 * 32;
            multiply<T>(
                logits, matrix(queries + column, 16, 8 * kAtom * 2), matrix(keys + column, 16, 8 * kAtom * 2), k > 0);
        }
    }

    // out [64, D] += weights v
    __device__ __forceinline__ void multiply_values(uint32_t values)
    {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
        {
            multiply_add<T>(out, weights[k], matrix(values + k * 16 * kAtom * 2, S::kHalfBytes, 8 * kAtom * 2));
        }
    }

    // Makes weights of a tile's logits; what they leave of the output so far.
    __device__ __forceinline__ void weigh(Item const& item, int tile, float (&decay)[2])
    {
        int const first_key = item.first_key + tile * kKeys;
        int const window = w.p.window;
        // Keys that every row sees: up to the first row's own, and from the first that the last row sees.
        if (first_key + kKeys > item.start + 1 || (window > 0 && first_key < item.start + item.rows - window))
        {
            int first[2];
            int past[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
            {
                past[r] = item.start + row[r] + 1;
                first[r] = window > 0 ? past[r] - window : 0;
            }
            hide_keys(logits, first_key, first, past);
        }
        softmax.advance(logits, scale, decay);
#pragma unroll
        for (auto& fragment : logits)
        {
            softmax.weigh(fragment, scale);
        }
    }

    __device__ __forceinline__ void pack_weights()
    {
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n)
        {
            float const(&x)[4] = logits[n];
            weights[n / 2][n % 2 * 2] = packed<T>(x[0], x[1]);
            weights[n / 2][n % 2 * 2 + 1] = packed<T>(x[2], x[3]);
        }
    }

    // Values of an item's last tile that lie past the segment's end may be anything, NaN too, which no weight of zero
    // takes away: their rows become zeros. By all threads of both warpgroups.
    __device__ __forceinline__ void clear_values(Item const& item, int place) const
    {
        int const past = item.length - item.first_key - (item.tiles - 1) * kKeys;
        if (past >= kKeys)
        {
            return;
        }
        char* const values = shared + place * S::kTileBytes;
        for (int i = threadIdx.x; i < (kKeys - past) * (D / 8); i += kConsumers)
        {
            *reinterpret_cast<int4*>(values + S::chunk_at(past + i / (D / 8), i % (D / 8))) = {};
        }
        show_to_products();
        meet_all();
    }

    // Writes the item's rows of the output, four neighbouring fragments at a time.
    __device__ __forceinline__ void write(Item const& item) const
    {
        dflash_attention_params const& p = w.p;
        int const lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r)
        {
            int const head = item.head * w.group + packed_row(r) - row[r] * w.group;
            bool const is_there = row[r] < item.rows;
            float const sink = is_there && p.sinks ? sink_of(p, head) : 0.f;
            float const factor = is_there ? normalizer(p, sink, softmax.maximum[r], softmax.sum[r]) : 0.f;
            T* const to = static_cast<T*>(p.out) + ((int64_t{item.first_row} + row[r]) * p.heads + head) * D;
#pragma unroll
            for (int n = 0; n < D / 8; n += 4)
            {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                {
                    x[i] = packed<T>(out[n + i][2 * r] * factor, out[n + i][2 * r + 1] * factor);
                }
                transpose(x);
                if (is_there)
                {
                    *reinterpret_cast<uint4*>(to + (n + lane % 4) * 8) = {x[0], x[1], x[2], x[3]};
                }
            }
        }
    }

    // Of four lanes, each with four registers, the ith gets the ith of each. By all lanes of a warp.
    static __device__ __forceinline__ void transpose(uint32_t (&x)[4])
    {
        int const lane = threadIdx.x % 4;
#pragma unroll
        for (int step = 1; step <= 2; step *= 2)
        {
            bool const is_upper = (lane & step) != 0;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
            {
                int const low = step == 1 ? 2 * pair : pair;
                int const high = low + step;
                uint32_t const got = __shfl_xor_sync(0xffffffffu, is_upper ? x[low] : x[high], step);
                x[low] = is_upper ? got : x[low];
                x[high] = is_upper ? x[high] : got;
            }
        }
    }
};

#endif

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    prompt_kernel(PromptWork const w, __grid_constant__ CUtensorMap const queries,
        __grid_constant__ CUtensorMap const keys, __grid_constant__ CUtensorMap const values)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    Inputs<D> const inputs{shared_address(shared)};
    auto* const items = reinterpret_cast<Item*>(shared + Shared<D>::kItemsAt);
    if (threadIdx.x == 0)
    {
        inputs.init();
    }
    wait();
    trigger();
    // Until the first tiles come, their place is free.
    int const count = list_items(w, reinterpret_cast<int4*>(shared), items);
    show_to_products();
    __syncthreads();
    if (threadIdx.x >= kConsumers)
    {
        release_registers<kProducerRegisters>();
        if (threadIdx.x == kConsumers)
        {
            inputs.fill(w, items, count, queries, keys, values);
        }
    }
    else
    {
        take_registers<kConsumerRegisters>();
        Mainloop<T, D> mainloop(w, shared, inputs);
        for (int i = 0; i < count; ++i)
        {
            Item const item = items[i];
            mainloop.attend(item);
            mainloop.write(item);
        }
        mainloop.end();
    }
#endif
}

} // namespace prompts
} // namespace dflash
