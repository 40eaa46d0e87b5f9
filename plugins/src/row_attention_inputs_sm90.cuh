// The inputs of one row's attention: keys and values tile by tile, and the row's own, normed and rotated.
#pragma once

#include "element.cuh"
#include "heads.cuh"
#include "instructions.cuh"
#include "row_attention_work.cuh"
#include "tensor_copy.cuh"

#include <cuda.h>
#include <type_traits>

namespace dflash
{
namespace row
{

constexpr int kRotated = 32; // numbers of which RoPE rotates whole multiples: two lanes' of heads of 128

template <int kNumber>
constexpr int kLog = 1 + kLog<kNumber / 2>; // base 2, of a power of two

template <>
inline constexpr int kLog<1> = 0;

template <typename T, int D>
struct Shape
{
    static constexpr int kKeys = D == 64 ? 32 : 16; // of a warp's round
    static constexpr int kKeyTiles = kKeys / 16;
    static constexpr int kRound = kWarps * kKeys;
    static constexpr int kSteps = D / 16; // of dimensions
    static constexpr int kRow = D + 8; // numbers: eight rows' chunks of sixteen bytes lie in different banks
    static constexpr int kTileBytes = kKeys * D * 2; // of a warp's keys, or values: [D / 64, kKeys, 64], swizzled
    static constexpr int kHalfBytes = kKeys * kAtom * 2;
    static constexpr int kBoxRow = D + 4;
    static constexpr int kLanes = 16; // of a head, in joining
    static constexpr int kDims = D / kLanes; // neighbouring ones of a lane
    static constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    static constexpr int kBoxBytes = kHeads * kBoxRow * 4;
    static_assert(kThreads == kHeads * kLanes && kBoxBytes <= 2 * kTileBytes);
    static_assert(kBoxBytes <= kHeads * D * 4 + kMostCluster * kHeads * 8);
};

template <typename T, int D>
struct Shared
{
    using S = Shape<T, D>;
    // Each warp's keys and values, and then its results, [heads, kBoxRow].
    alignas(1024) unsigned char tiles[kWarps][2][S::kTileBytes];
    uint4 rows[(kHeads + 2) * S::kRow / 8]; // queries, the row's own key and its value
    float own[kHeads]; // logits of the row's own key, scaled, base 2
    float sinks[kHeads]; // likewise; -inf: none
    float2 warp_sums[kWarps][kHeads]; // maximum and sum
    float4 results[kHeads * D / 4]; // [blocks, heads, the block's share of D]
    float2 sums[kMostCluster][kHeads]; // of all blocks: behind `results`, for a rehearsal writes its box over both
    uint64_t full[kWarps][2]; // barriers: keys have come, values have come
    uint64_t joined; // what all blocks sent has come
    int is_last;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- keys and values --------------------------------------------------------------------------------------------------

// A warp's keys and values of a round, in shared memory.
template <typename T, int D>
struct Tiles
{
    using S = Shape<T, D>;
    uint32_t at; // in shared memory
    uint32_t full; // barriers

    __device__ __forceinline__ Tiles(Shared<T, D>& shared)
        : at(shared_address(shared.tiles[threadIdx.x / 32]))
        , full(shared_address(shared.full[threadIdx.x / 32]))
    {
    }

    // By one lane, as `ask`.
    __device__ __forceinline__ void init() const
    {
        init_barrier(full, 1);
        init_barrier(full + 8, 1);
        fence_barrier_inits();
    }

    // Asks for the keys, or values.
    __device__ __forceinline__ void ask(int which, CUtensorMap const& from, KeyPlace const& place, int head) const
    {
        uint32_t const barrier = full + which * 8;
        expect_bytes(barrier, S::kTileBytes);
        copy_box_5d(at + which * S::kTileBytes, from, 0, place.row, 0, head, place.page, barrier, read_once_policy());
    }

    __device__ __forceinline__ void wait_for(int which, int round) const
    {
        wait_for_phase(full + which * 8, round & 1);
    }

    // Values past the last may be anything, NaN too, which no weight of zero takes away. By all lanes.
    __device__ __forceinline__ void clear_values(int past) const
    {
        int const lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = max(past, 0) * 8 + lane; i < S::kKeys * 8; i += 32)
        {
#pragma unroll
            for (int half = 0; half < D / kAtom; ++half)
            {
                uint32_t const to = at + S::kTileBytes + half * S::kHalfBytes + i * 16;
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
            }
        }
        __syncwarp();
    }

    // Where sixteen bytes of a key lie.
    static __device__ __forceinline__ int chunk_at(int key, int chunk)
    {
        return chunk / 8 * S::kHalfBytes + key * (kAtom * 2) + (chunk % 8 ^ key % 8) * 16;
    }

    // A tile of 16 keys, 16 of their dimensions, as products take it.
    __device__ __forceinline__ void load_keys(uint32_t (&x)[4], int tile, int step) const
    {
        int const lane = threadIdx.x % 32;
        load_matrices(x, at + chunk_at(tile * 16 + lane % 16, lane / 16 + step * 2));
    }

    // 16 dimensions of 16 keys' values.
    __device__ __forceinline__ void load_values(uint32_t (&x)[4], int tile, int step) const
    {
        int const lane = threadIdx.x % 32;
        int const key = tile * 16 + lane % 8 + lane / 16 * 8;
        load_matrices_transposed(x, at + S::kTileBytes + chunk_at(key, lane / 8 % 2 + step * 2));
    }
};

// -- the row's own ----------------------------------------------------------------------------------------------------

// A row's queries, its key and its value, of a KV head: in that order items of some lanes each.
template <typename T, int D>
struct OwnRow
{
    using H = Head<T, D, true, D == 64 ? 8 : 16>;
    using S = Shape<T, D>;
    static_assert(kThreads / H::kLanes >= kHeads + 2);

    // What RoPE and the norms of heads take, which no kernel of the step writes.
    typename H::Numbers cos, sin, scale;
    int rotary_lanes;

    // The lanes' item; those that are left have the last one, too.
    static __device__ __forceinline__ int item()
    {
        return min(static_cast<int>(threadIdx.x) / H::kLanes, kHeads + 1);
    }

    __device__ __forceinline__ void load_constants(dflash_append_params const& a, int row, int position)
    {
        int const rotary_size = a.rotary_size > 0 ? a.rotary_size : D;
        rotary_lanes = rotary_size / H::kVector;
        int const rotation = a.row_position ? __ldcg(a.row_position + row) : position;
        int64_t const at = int64_t{min(max(rotation, 0), a.positions - 1)} * (rotary_size / 2);
        cos = H::load_half(static_cast<T const*>(a.cos) + at, rotary_lanes);
        sin = H::load_half(static_cast<T const*>(a.sin) + at, rotary_lanes);
        if (a.q_norm && !a.is_norm_wide)
        {
            scale = H::load(static_cast<T const*>(item() < kHeads ? a.q_norm : a.k_norm));
        }
    }

    // Norms and rotates queries and key, and leaves all in shared memory. appends: in the caches, too.
    __device__ __forceinline__ void prepare(dflash_append_params const& a, T const* row, int head, int group,
        bool appends, int64_t place, Shared<T, D>& shared) const
    {
        int const nth = item();
        bool const is_query = nth < kHeads, is_value = nth == kHeads + 1;
        int const of_row = is_query ? head * group + min(nth, group - 1) : a.heads + head + (is_value ? a.kv_heads : 0);
        typename H::Numbers const raw = H::load_anew(row + of_row * D);
        H x{raw};
        void const* const weight = is_query ? a.q_norm : a.k_norm;
        if (weight && a.is_norm_wide)
        {
            x.norm(static_cast<float const*>(weight), a.norm_eps);
        }
        else if (weight)
        {
            x.norm(scale, a.norm_eps);
        }
        x.rotate(cos, sin, rotary_lanes);
#pragma unroll
        for (int i = 0; i < H::kPairs; ++i)
        {
            x.x.at[i] = is_value ? raw.at[i] : x.x.at[i];
        }
        x.store(reinterpret_cast<T*>(shared.rows) + nth * S::kRow);
        if (appends && !is_query)
        {
            x.store(static_cast<T*>(is_value ? a.values : a.keys) + place);
        }
    }
};

// Leaves the logits of the row's own key in shared memory. By all threads.
template <typename T, int D>
__device__ __forceinline__ void multiply_own(float scale, Shared<T, D>& shared)
{
    using S = Shape<T, D>;
    int const head = threadIdx.x / S::kLanes;
    int const dim = threadIdx.x % S::kLanes * S::kDims;
    T const* const rows = reinterpret_cast<T const*>(shared.rows) + dim;
    auto const query = load_vector<T, S::kDims>(rows + head * S::kRow);
    auto const key = load_vector<T, S::kDims>(rows + kHeads * S::kRow);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < S::kDims; ++i)
    {
        sum = fmaf(to_float(query.at[i]), to_float(key.at[i]), sum);
    }
#pragma unroll
    for (int step = S::kLanes / 2; step > 0; step /= 2)
    {
        sum += __shfl_xor_sync(kAll, sum, step);
    }
    if (threadIdx.x % S::kLanes == 0)
    {
        shared.own[head] = sum * scale;
    }
}

#endif

} // namespace row
} // namespace dflash
