// The inputs of prompts' attention in shared memory: a ring of tiles and the queries of two items, which the bulk copy
// engine brings.
#pragma once

#include "instructions.cuh"
#include "prompt_attention_work.cuh"
#include "tensor_copy.cuh"
#include "tensor_map.cuh"

#include <cuda.h>

namespace dflash
{
namespace prompts
{

constexpr int kConsumers = 256; // threads that compute

// What lies in shared memory: a ring of tiles, keys and values by turns, the queries of two items, barriers, the items.
template <int D>
struct Shared
{
    static constexpr int kHalfBytes = kKeys * kAtom * 2; // of a tile: 64 of its columns
    static constexpr int kTileBytes = D / kAtom * kHalfBytes; // queries of an item are as large
    static constexpr int kPlaces = 5 * 128 / D; // of the ring
    static constexpr int kQueriesAt = kPlaces * kTileBytes;
    static constexpr int kBarriersAt = kQueriesAt + 2 * kTileBytes;
    static constexpr int kItemsAt = kBarriersAt + 2 * (kPlaces + 2) * 8;
    static constexpr int kBytes = kItemsAt + kMostItems * static_cast<int>(sizeof(Item));
    static_assert(kRows == kKeys && kItemsAt % 16 == 0 && kBytes <= 227 * 1024);

    // Where a 16-byte chunk of a row of a tile lies: columns of one half together, swizzled.
    static __device__ __forceinline__ int chunk_at(int row, int chunk)
    {
        return chunk / 8 * kHalfBytes + row * (kAtom * 2) + (chunk % 8 ^ row % 8) * 16;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A place of a ring, and how often it has gone round.
template <int kPlaces>
struct Place
{
    int at = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance()
    {
        at = at + 1 == kPlaces ? 0 : at + 1;
        parity ^= at == 0;
    }
};

// Where a tile lies in the caches: in one page or two.
struct TileBoxes
{
    int count = 0; // those that begin before the segment's end
    int page[2];
    int row[2]; // of the page

    __device__ __forceinline__ TileBoxes(PromptWork const& w, Item const& item, int nth)
    {
        int const first_key = item.first_key + nth * kKeys;
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            int const key = first_key + i * w.box_rows;
            if (i * w.box_rows < kKeys && key < item.length)
            {
                int const index = key / w.p.page_rows;
                page[i] = w.p.page_table[item.slot * w.p.page_table_stride + index];
                row[i] = key - index * w.p.page_rows;
                count = i + 1;
            }
        }
    }
};

// The ring of tiles and the queries of two items in shared memory, and for each a barrier that it has come and one that
// its readers are done.
template <int D>
struct Inputs
{
    using S = Shared<D>;
    using RingPlace = Place<S::kPlaces>;

    uint32_t at;

    __device__ __forceinline__ uint32_t tile(int place) const
    {
        return at + place * S::kTileBytes;
    }

    __device__ __forceinline__ uint32_t queries(int place) const
    {
        return at + S::kQueriesAt + place * S::kTileBytes;
    }

    __device__ __forceinline__ uint32_t full(int place) const
    {
        return at + S::kBarriersAt + place * 8;
    }

    __device__ __forceinline__ uint32_t empty(int place) const
    {
        return full(S::kPlaces + place);
    }

    __device__ __forceinline__ uint32_t queries_full(int place) const
    {
        return full(2 * S::kPlaces + place);
    }

    __device__ __forceinline__ uint32_t queries_empty(int place) const
    {
        return full(2 * S::kPlaces + 2 + place);
    }

    // By one thread.
    __device__ __forceinline__ void init() const
    {
        constexpr int kReaders = kConsumers / 32; // warps
        for (int place = 0; place < S::kPlaces; ++place)
        {
            init_barrier(full(place), 1);
            init_barrier(empty(place), kReaders);
        }
        for (int place = 0; place < 2; ++place)
        {
            init_barrier(queries_full(place), 1);
            init_barrier(queries_empty(place), kReaders);
        }
        fence_barrier_inits();
    }

    // Has all that the items need brought, each as soon as there is place. By one thread.
    __device__ __forceinline__ void fill(PromptWork const& w, Item const* items, int count,
        CUtensorMap const& queries_from, CUtensorMap const& keys_from, CUtensorMap const& values_from) const
    {
        RingPlace next;
        Place<2> next_queries;
        for (int i = 0; i < count; ++i)
        {
            Item const item = items[i];
            bring_queries(w, item, queries_from, next_queries);
            TileBoxes ahead(w, item, 0);
            bring(w, item, keys_from, ahead, next);
            for (int tile = 1; tile < item.tiles; ++tile)
            {
                TileBoxes const last = ahead;
                ahead = TileBoxes(w, item, tile);
                bring(w, item, keys_from, ahead, next);
                bring(w, item, values_from, last, next);
            }
            bring(w, item, values_from, ahead, next);
        }
    }

    // Rows past the tensor's last come as zeros; those past the segment's are another's, and none sees their results.
    __device__ __forceinline__ void bring_queries(
        PromptWork const& w, Item const& item, CUtensorMap const& from, Place<2>& next) const
    {
        uint32_t const barrier = queries_full(next.at);
        wait_for_phase(queries_empty(next.at), next.parity ^ 1);
        expect_bytes(barrier, w.group * w.item_rows * D * 2);
#pragma unroll
        for (int half = 0; half < D / kAtom; ++half)
        {
            copy_box_5d(queries(next.at) + half * S::kHalfBytes, from, 0, 0, item.first_row, half, item.head, barrier);
        }
        next.advance();
    }

    __device__ __forceinline__ void bring(
        PromptWork const& w, Item const& item, CUtensorMap const& from, TileBoxes const& boxes, RingPlace& next) const
    {
        uint32_t const barrier = full(next.at);
        wait_for_phase(empty(next.at), next.parity ^ 1);
        expect_bytes(barrier, boxes.count * w.box_rows * D * 2);
#pragma unroll
        for (int i = 0; i < 2; ++i)
        {
            if (i < boxes.count)
            {
                uint32_t const to = tile(next.at) + i * w.box_rows * kAtom * 2;
#pragma unroll
                for (int half = 0; half < D / kAtom; ++half)
                {
                    copy_box_5d(
                        to + half * S::kHalfBytes, from, 0, boxes.row[i], half, item.head, boxes.page[i], barrier);
                }
            }
        }
        next.advance();
    }
};

#endif

} // namespace prompts
} // namespace dflash
