// RMSNorm of rows, and a small product of them: what a mixture of experts' router says.
//
// In a step of few rows both are latency. So one kernel does both, small enough to be in place, with its part of the
// weight in registers, while the product before it still fills the multiprocessors: of up to eight rows, or 3,072
// inputs. A cluster has 16 outputs of some
// rows; each of its warps has some inputs, multiplied by the norm's weights and rounded, and adds up their squares
// beside their products. The first block adds up the cluster's, and multiplies by the inverse root mean square. A row's
// sums have one order, whatever rows there are. Clusters of the first outputs store the rows normed, too.
//
// Its code comes from memory at each launch, for between two of them other kernels run. So of up to eight rows a
// cluster computes zeros before it waits, and stores nothing: the code is at hand when the rows are.
#include "dflash_kernels.h"
#include "element.cuh"
#include "instructions.cuh"
#include "launch.cuh"
#include "normed.cuh"

namespace dflash
{
namespace
{

using T = __nv_bfloat16;

constexpr int kBlocks = 8; // of a cluster
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kOutputs = 16; // of a cluster
constexpr int kVector = 8; // numbers of one access
constexpr int kChunk = 4 * kVector; // inputs that a warp multiplies at a time
constexpr int kMostChunks = 4; // of a warp
constexpr int kMostSize = kMostChunks * kBlocks * kWarps * kChunk;
constexpr int kMostRows = 65535 * 16; // of a grid

using Numbers = Vector<T, kVector>;

// Lane l has parts of the outputs l / 4 and l / 4 + 8 of a cluster, and of row l / 4 of each eight.
struct Place
{
    int const rank = static_cast<int>(__clusterRelativeBlockRank()); // of the block in its cluster
    int const warp = threadIdx.x / 32;
    int const quad = threadIdx.x % 32 / 4;
    int const part = threadIdx.x % 4;
    int const first_output = blockIdx.y * kOutputs;
    bool const stores_rows = blockIdx.y == 0;
    int first_row;

    // Of a warp's chunks: the inputs that a lane has, from here on.
    __device__ __forceinline__ int column(int chunk) const
    {
        return ((chunk * kBlocks + rank) * kWarps + warp) * kChunk + part * kVector;
    }

    __device__ __forceinline__ int row(int tile) const
    {
        return first_row + tile * 8 + quad;
    }
};

// Whether clusters of so many rows rehearse. Of more that gained nothing: few of their blocks are in place early.
template <int kRows>
constexpr bool kRehearses = kRows <= 8;

// kRows: of a cluster.
template <int kRows>
struct Shared
{
    static constexpr int kSums = kRows * kOutputs;

    // What all blocks send: the rehearsal has one of its own.
    struct Inbox
    {
        float sums[kBlocks][kSums]; // to the first block
        float squares[kBlocks][kRows]; // to each

        // The inverse root mean square of a row.
        __device__ __forceinline__ float root(dflash_router_params const& p, int row) const
        {
            float sum = 0.f;
#pragma unroll
            for (auto const& of_block : squares)
            {
                sum += of_block[row];
            }
            return rsqrtf(sum / static_cast<float>(p.size) + p.eps);
        }
    };

    float warp_sums[kWarps][kSums]; // [row, output]
    float warp_squares[kWarps][kRows];
    Inbox inboxes[kRehearses<kRows> ? 2 : 1];
};

__device__ __forceinline__ uint4 bits_of(Numbers const& x)
{
    return reinterpret_cast<uint4 const&>(x);
}

// What no kernel writes: a lane's part of the weight and of the norm's.
template <typename W, int kChunks>
struct Constants
{
    uint4 upper[kChunks] = {};
    uint4 lower[kChunks] = {};
    Vector<W, kVector> norm[kChunks] = {};

    __device__ __forceinline__ Constants(dflash_router_params const& p, Place const& place)
    {
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
        {
            int const at = place.column(i);
            if (at < p.size)
            {
                upper[i] = load_weight(p, place.first_output + place.quad, at);
                lower[i] = load_weight(p, place.first_output + place.quad + 8, at);
                norm[i] = load_weights(static_cast<W const*>(p.norm) + at);
            }
        }
    }

    // Of outputs past the last, the last again: nobody stores what becomes of them.
    static __device__ __forceinline__ uint4 load_weight(dflash_router_params const& p, int output, int at)
    {
        int64_t const row = min(output, p.outputs - 1);
        return bits_of(load_vector<T, kVector>(static_cast<T const*>(p.weight) + row * p.size + at));
    }
};

// A lane's parts of rows, with what is pending; zeros of rows that are not there.
template <int kChunks, int kTiles>
__device__ __forceinline__ void load_rows(
    dflash_router_params const& p, Place const& place, Numbers (&x)[kTiles][kChunks])
{
    auto const each = [&](auto const& use)
    {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
        {
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
            {
                if (place.row(tile) < p.rows && place.column(i) < p.size)
                {
                    use(x[tile][i], int64_t{place.row(tile)} * p.size + place.column(i));
                }
            }
        }
    };
    auto const load = [](void const* from, int64_t at)
    { return load_new(reinterpret_cast<Numbers const*>(static_cast<T const*>(from) + at)); };
    each([&](Numbers& to, int64_t at) { to = load(p.x, at); });
    if (p.pending)
    {
        each(
            [&](Numbers& to, int64_t at)
            {
                Numbers const y = load(p.pending, at);
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                {
                    to.at[j] = from_float<T>(to_float(to.at[j]) + to_float(y.at[j]));
                }
                if (place.stores_rows)
                {
                    store_vector(static_cast<T*>(p.sum) + at, to);
                }
            });
    }
}

// Leaves a warp's products and squares in the block's shared memory.
template <typename W, int kChunks, int kTiles>
__device__ __forceinline__ void multiply(Place const& place, Constants<W, kChunks> const& constants,
    Numbers const (&x)[kTiles][kChunks], Shared<kTiles * 8>& shared)
{
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
    {
        float c[4] = {};
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
        {
            Numbers scaled;
#pragma unroll
            for (int j = 0; j < kVector; ++j)
            {
                float const value = to_float(x[tile][i].at[j]);
                square = fmaf(value, value, square);
                scaled.at[j] = from_float<T>(value * to_float(constants.norm[i].at[j]));
            }
            uint4 const b = bits_of(scaled), u = constants.upper[i], l = constants.lower[i];
            multiply_add<T>(c, {u.x, l.x, u.y, l.y}, b.x, b.y);
            multiply_add<T>(c, {u.z, l.z, u.w, l.w}, b.z, b.w);
        }
        square += __shfl_xor_sync(0xffffffffu, square, 1);
        square += __shfl_xor_sync(0xffffffffu, square, 2);
        float* const to = shared.warp_sums[place.warp] + (tile * 8 + place.part * 2) * kOutputs + place.quad;
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            to[i % 2 * kOutputs + i / 2 * 8] = c[i];
        }
        if (place.part == 0)
        {
            shared.warp_squares[place.warp][tile * 8 + place.quad] = square;
        }
    }
}

__device__ __forceinline__ void send_number(float& mine, int rank, float x)
{
    uint32_t const to = address_at(shared_address(&mine), rank);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

__device__ __forceinline__ float sum_of_warps(float const* first, int apart)
{
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
    {
        sum += first[warp * apart];
    }
    return sum;
}

// Sends a block's sums of products to the first block of its cluster, and those of squares to all.
template <int kRows>
__device__ __forceinline__ void send_sums(
    Place const& place, Shared<kRows> const& shared, typename Shared<kRows>::Inbox& inbox)
{
    constexpr int kSums = Shared<kRows>::kSums;
    static_assert(kRows * kBlocks <= kThreads && kSums % kThreads == 0);
#pragma unroll
    for (int first = 0; first < kSums; first += kThreads)
    {
        int const i = first + threadIdx.x;
        send_number(inbox.sums[place.rank][i], 0, sum_of_warps(&shared.warp_sums[0][i], kSums));
    }
    if (threadIdx.x < kRows * kBlocks)
    {
        int const row = threadIdx.x / kBlocks, to = threadIdx.x % kBlocks;
        send_number(inbox.squares[place.rank][row], to, sum_of_warps(&shared.warp_squares[0][row], kRows));
    }
}

// By the first block of a cluster. bias: of all outputs that a thread has.
template <int kRows>
__device__ __forceinline__ void store_logits(
    dflash_router_params const& p, Place const& place, typename Shared<kRows>::Inbox const& inbox, int rows, float bias)
{
    static_assert(kThreads % kOutputs == 0);
    int const output = place.first_output + threadIdx.x % kOutputs;
#pragma unroll
    for (int first = 0; first < Shared<kRows>::kSums; first += kThreads)
    {
        int const i = first + threadIdx.x;
        float sum = 0.f;
#pragma unroll
        for (auto const& of_block : inbox.sums)
        {
            sum += of_block[i];
        }
        float const logit = fmaf(sum, inbox.root(p, i / kOutputs), bias);
        int const row = place.first_row + i / kOutputs;
        if (row < rows && output < p.outputs)
        {
            static_cast<T*>(p.logits)[int64_t{row} * p.outputs + output] = from_float<T>(logit);
        }
    }
}

// A lane's parts of rows, normed.
template <typename W, int kChunks, int kTiles>
__device__ __forceinline__ void store_rows(dflash_router_params const& p, Place const& place,
    Constants<W, kChunks> const& constants, Numbers const (&x)[kTiles][kChunks],
    typename Shared<kTiles * 8>::Inbox const& inbox, int rows)
{
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
    {
        float const root = inbox.root(p, tile * 8 + place.quad);
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
        {
            Numbers const h = normed(x[tile][i], root, constants.norm[i]);
            if (place.row(tile) < rows && place.column(i) < p.size)
            {
                store_vector(static_cast<T*>(p.out) + int64_t{place.row(tile)} * p.size + place.column(i), h);
            }
        }
    }
}

// What has been sent to this block before others arrived can be seen once all have.
__device__ __forceinline__ void meet_cluster()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    wait_for_cluster();
}

// kChunks: of a warp. kTiles: of eight rows.
template <typename W, int kChunks, int kTiles>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads) router_kernel(dflash_router_params const p)
{
    constexpr int kRows = kTiles * 8;
    __shared__ Shared<kRows> shared;
    trigger();
    arrive_at_cluster();
    Place place;
    place.first_row = static_cast<int>(blockIdx.z) * kRows;
    Constants<W, kChunks> const constants(p, place);
    int const output = place.first_output + threadIdx.x % kOutputs;
    float const bias = p.bias && output < p.outputs ? to_float(static_cast<T const*>(p.bias)[output]) : 0.f;
    wait_for_cluster(); // the other blocks can be sent to
#pragma unroll 1
    for (int turn = kRehearses<kRows> ? 1 : 0;; --turn)
    {
        bool const is_real = turn == 0;
        auto& inbox = shared.inboxes[turn];
        Numbers x[kTiles][kChunks] = {};
        if (is_real)
        {
            wait();
            load_rows(p, place, x);
        }
        multiply(place, constants, x, shared);
        __syncthreads();
        send_sums(place, shared, inbox);
        meet_cluster();
        int const rows = is_real ? p.rows : 0;
        if (place.rank == 0)
        {
            store_logits<kRows>(p, place, inbox, rows, bias);
        }
        if (place.stores_rows)
        {
            store_rows(p, place, constants, x, inbox, rows);
        }
        if (is_real)
        {
            return;
        }
    }
}

template <typename W, int kChunks>
cudaError_t launch(dflash_router_params const& p, cudaStream_t stream)
{
    auto const kernel = p.rows <= 8 ? router_kernel<W, kChunks, 1> : router_kernel<W, kChunks, 2>;
    int const rows = p.rows <= 8 ? 8 : 16;
    dim3 const grid(kBlocks, (p.outputs + kOutputs - 1) / kOutputs, (p.rows + rows - 1) / rows);
    return launch_kernel(kernel, grid, kThreads, 0, stream, p);
}

template <typename W>
cudaError_t launch(dflash_router_params const& p, cudaStream_t stream)
{
    static_assert(kMostChunks == 4);
    int const chunks = (p.size + kMostSize / kMostChunks - 1) / (kMostSize / kMostChunks);
    return chunks <= 2 ? launch<W, 2>(p, stream) : chunks == 3 ? launch<W, 3>(p, stream) : launch<W, 4>(p, stream);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_router(dflash_router_params const* p, cudaStream_t stream)
{
    using namespace dflash;
    bool const is_known = p->size >= kChunk && p->size % kChunk == 0 && p->size <= kMostSize && p->outputs > 0
        && p->rows >= 0 && p->rows <= kMostRows && !p->pending == !p->sum;
    if (!is_known)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    return p->is_norm_wide ? launch<float>(*p, stream) : launch<__nv_bfloat16>(*p, stream);
}
