// Sums over the inputs of a row: of a block's warps, then of the cluster's two blocks.
#pragma once

#include "skinny_gemm_layout.cuh"

namespace dflash
{
namespace skinny
{

// Two warps wait for each other. Both at the same call: `bar.sync` is the aligned form of a barrier, all threads of
// which execute the same instruction.
__device__ __forceinline__ void meet(int pair)
{
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet_all()
{
    asm volatile("bar.sync %0, %1;" ::"n"(kSlots + 1), "n"(kThreads) : "memory");
}

// Adds in one order whatever the tokens are: the warps' sums one after the other, as `product_order.cuh` says, or by
// pairs of warps; then the two blocks'.
template <typename L>
struct Reduce
{
    static constexpr int kGranules = L::kGranules, kTiles = L::kTiles;
    using Item = typename L::Item;

    Place const& place;
    Shared<L> const& shared;

    // Says what the blocks of the cluster send here in the first two passes. It may be on its way already: a barrier's
    // phase does not end without this arrival.
    __device__ __forceinline__ void expect_first(bool is_normed)
    {
        if (threadIdx.x == 0)
        {
            if (!place.is_alone)
            {
                expect_bytes(shared.inbox_barriers, L::kInboxBytes / 2);
                expect_bytes(shared.inbox_barriers + kBarrier, L::kInboxBytes / 2);
            }
            if (is_normed)
            {
                int const blocks = place.is_alone ? 1 : kCluster;
                expect_bytes(shared.squares_barrier, blocks * L::kTokens * static_cast<int>(sizeof(float)));
            }
        }
        __syncwarp();
    }

    // Calls `use` with the place of each item of the warp's sums in its slot.
    template <typename Use>
    __device__ __forceinline__ void each_item(int active, Use const& use)
    {
        Item* const slot = reinterpret_cast<Item*>(shared.sums + place.warp % kSlots * L::kSlot) + place.lane;
#pragma unroll
        for (int granule = 0; granule < kGranules; ++granule)
        {
            if (granule < active)
            {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                {
                    use(slot[(granule * kTiles + tile) * 32], granule, tile);
                }
            }
        }
    }

    // Adds up the warps' sums of the first `active` granules. Of an item of either half a thread has the block's sum
    // then, first that of the half that is another block's, if two share a row.
    template <bool kScaled>
    __device__ __forceinline__ void add_warps(
        float const (&c)[kGranules][kTiles][4], int active, float scale, Item (&sums)[kCluster])
    {
        auto const own
            = [&](int granule, int tile, int i) { return kScaled ? c[granule][tile][i] * scale : c[granule][tile][i]; };
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            sums[0].at[i] = sums[1].at[i] = -0.f; // which added to any number is that number
        }
        if constexpr (!L::kOrdered)
        {
            add_pairs(active, own);
            meet_all();
            sum_halves(sums, [&](int rank, Item& sum) { take_slots(rank, sum); });
        }
        else
        {
            // In two halves: there are slots for four warps.
#pragma unroll 1
            for (int half = 0; half < kWarps / kSlots; ++half)
            {
                if (place.warp / kSlots == half)
                {
                    put(active, own);
                }
                meet_all();
                sum_halves(sums, [&](int rank, Item& sum) { add_slots(rank, sum); });
                if (half == 0)
                {
                    meet_all(); // they have been read
                }
            }
        }
    }

    // Calls `use` with the rank of the block that finishes a half of the items, and the thread's sum of that half: the
    // other block's first, in a loop, for code is read from far away in every step.
    template <typename Use>
    __device__ __forceinline__ void sum_halves(Item (&sums)[kCluster], Use const& use)
    {
        if (threadIdx.x < L::kItems)
        {
#pragma unroll 1
            for (int own = 0; own < kCluster; ++own)
            {
                Item sum = sums[0];
                use(own ? place.rank : place.rank ^ 1, sum);
                sums[0] = sums[1];
                sums[1] = sum;
            }
        }
    }

    // Puts the warp's sums into its slot.
    template <typename Own>
    __device__ __forceinline__ void put(int active, Own const& own)
    {
        each_item(active,
            [&](Item& there, int granule, int tile)
            {
                Item here;
#pragma unroll
                for (int i = 0; i < L::kItemNumbers; ++i)
                {
                    here.at[i] = own(granule, tile, i);
                }
                there = here;
            });
    }

    // Puts the sums of pairs of warps into the slots.
    template <typename Own>
    __device__ __forceinline__ void add_pairs(int active, Own const& own)
    {
        if (place.warp >= kSlots)
        {
            put(active, own);
        }
        meet(place.warp % kSlots);
        if (place.warp < kSlots)
        {
            each_item(active,
                [&](Item& there, int granule, int tile)
                {
                    Item sum = there;
#pragma unroll
                    for (int i = 0; i < L::kItemNumbers; ++i)
                    {
                        sum.at[i] += own(granule, tile, i);
                    }
                    there = sum;
                });
        }
    }

    __device__ __forceinline__ void load_slots(int rank, Item (&x)[kSlots])
    {
        int const item = threadIdx.x, at = (item / 16 * 32 + item % 16 + rank * 16) * L::kItemNumbers;
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
        {
            x[i] = load_vector<float, L::kItemNumbers>(shared.sums + i * L::kSlot + at);
        }
    }

    // Gives the slots' sum of the thread's item of a half, by pairs.
    __device__ __forceinline__ void take_slots(int rank, Item& sum)
    {
        Item x[kSlots];
        load_slots(rank, x);
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            sum.at[i] = (x[0].at[i] + x[1].at[i]) + (x[2].at[i] + x[3].at[i]);
        }
    }

    // Adds the slots to a sum, one after the other.
    __device__ __forceinline__ void add_slots(int rank, Item& sum)
    {
        Item x[kSlots];
        load_slots(rank, x);
#pragma unroll
        for (int i = 0; i < L::kItemNumbers; ++i)
        {
            sum.at[i] = (((sum.at[i] + x[0].at[i]) + x[1].at[i]) + x[2].at[i]) + x[3].at[i];
        }
    }

    // Sends the other block its half of the items.
    __device__ __forceinline__ void send_items(int pass, Item const& sum)
    {
        int const item = threadIdx.x;
        if (item < L::kItems)
        {
            int const other = place.rank ^ 1;
            uint32_t const barrier = shared.inbox_barriers + pass % 2 * kBarrier;
            uint32_t const to = shared_address(shared.inbox + pass % 2 * L::kInbox + item * L::kItemNumbers);
            send(address_at(to, other), sum.at, address_at(barrier, other));
        }
    }

    // Puts the warp's sums of squares where `send_squares` finds them.
    __device__ __forceinline__ void store_squares(float const (&squares)[kTiles][4])
    {
        if (place.part == place.quad / 2)
        {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
            {
                shared.warp_squares[place.warp * L::kTokens + tile * 8 + place.quad]
                    = place.quad % 2 ? squares[tile][tile * 2 + 1] : squares[tile][tile * 2];
            }
        }
    }

    // Sends the block's sums of squares to the blocks that share a row: the last threads' work, one a token.
    __device__ __forceinline__ void send_squares()
    {
        int const token = static_cast<int>(threadIdx.x) - (kThreads - L::kTokens);
        if (token >= 0)
        {
            float sum[1] = {0.f};
#pragma unroll
            for (int i = 0; i < kWarps; ++i)
            {
                sum[0] += shared.warp_squares[i * L::kTokens + token];
            }
            uint32_t const to = shared_address(shared.block_squares + place.rank * L::kTokens + token);
            for (int i = 0; i < kCluster; ++i)
            {
                if (!place.is_alone || i == place.rank)
                {
                    send(address_at(to, i), sum, address_at(shared.squares_barrier, i));
                }
            }
        }
    }
};

} // namespace skinny
} // namespace dflash
