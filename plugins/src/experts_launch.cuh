// What experts' products of few rows and of many have in common on the host: scratch, the routing's launch and the
// sum's.
#pragma once

#include "dflash_kernels.h"
#include "element.cuh"
#include "experts_route.cuh"
#include "experts_work.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace moe
{

// Divides a workspace into parts of 16 bytes and more. From null on it only counts.
struct Scratch
{
    unsigned char* start;
    size_t used = 0;

    void* take(size_t size)
    {
        void* const taken = start + used;
        used += (size + 15) / 16 * 16;
        return taken;
    }

    template <typename Number>
    Number* take_numbers(size_t count)
    {
        return static_cast<Number*>(take(count * sizeof(Number)));
    }

    // `tile`: rows of a group.
    Route take_route(dflash_moe_params const& p, int tile)
    {
        size_t const pairs = static_cast<size_t>(p.rows) * experts_of_row(p);
        // Each expert's last group may be smaller than a tile.
        size_t const groups = std::min<size_t>(own_experts(p), pairs) + pairs / tile;
        Route route = {};
        route.group_count = take_numbers<int32_t>(1);
        route.groups = take_numbers<Group>(groups);
        route.rows = take_numbers<int32_t>(pairs);
        route.places = route.experts = take_numbers<int32_t>(pairs);
        route.shares = take_numbers<float>(pairs);
        return route;
    }
};

struct Device
{
    int processors = 0;
    int shared_bytes = 0; // that a block can have
    int own_bytes = 0; // that each block takes besides
    int all_bytes = 0; // of a multiprocessor
    int major = 0; // of the compute capability

    cudaError_t read()
    {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        error = error ? error : cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        error = error ? error : cudaDeviceGetAttribute(&own_bytes, cudaDevAttrReservedSharedMemoryPerBlock, device);
        error = error ? error : cudaDeviceGetAttribute(&all_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        return error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
};

inline bool is_routed(dflash_moe_params const& p)
{
    bool const is_nvfp4 = p.format == DFLASH_MOE_NVFP4;
    bool const has_tiles = is_tiled(weight_of(p)); // scales lie in them, too
    int const multiple = p.format == DFLASH_MOE_INT4 ? kInt4Inputs : has_tiles ? 32 : 16;
    bool const has_none = !p.gate_up_scales && !p.down_scales;
    bool const has_scales
        = has_tiles ? has_none : p.format == DFLASH_MOE_NUMBERS || (p.gate_up_scales && p.down_scales);
    bool const has_row_scales = !is_nvfp4 || (p.gate_up_row_scales && p.down_row_scales);
    bool const is_shared = p.has_shared == 1, is_alone = p.has_shared == 0 && !p.shared_gate;
    return (is_shared || is_alone) && p.rows >= 0 && p.rows <= kMostRows && p.experts <= kMostExperts && p.top_k >= 1
        && p.top_k <= p.experts && experts_of_row(p) <= kMostTopK && p.logits_row_stride >= p.experts && p.first >= 0
        && p.count >= 1 && p.first + p.count <= p.experts && p.hidden >= multiple && p.columns >= multiple
        && p.hidden % multiple == 0 && p.columns % multiple == 0 && p.format >= DFLASH_MOE_NUMBERS
        && p.format <= DFLASH_MOE_NVFP4 && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16)
        && p.logits_dtype >= DFLASH_FP16 && p.logits_dtype <= DFLASH_FP32 && has_scales && has_row_scales
        && !(p.gelu && p.clamped);
}

// -- the sum ----------------------------------------------------------------------------------------------------------

constexpr int kVector = 8;
constexpr int kSumColumns = 32 * kVector; // of a block
constexpr int kLeastSumWarps = kSumColumns / 64; // a pair of columns a thread

// A warp loads what one of a row's experts gave, and each thread adds up two columns: nobody waits for one load after
// another. y: the experts' outputs, [pairs, H].
template <typename T>
__global__ void __launch_bounds__(32 * kMostTopK)
    sum_kernel(dflash_moe_params const p, Route const route, T const* const y)
{
    using Part = Vector<T, kVector>;
    using Pair = Vector<T, 2>;
    extern __shared__ uint4 memory[];
    __shared__ float shares[kMostTopK];
    Part* const parts = reinterpret_cast<Part*>(memory); // [experts of a row, kSumColumns]
    int const lane = threadIdx.x % 32, own = threadIdx.x / 32, chosen = experts_of_row(p);
    int const row = blockIdx.x, first = blockIdx.y * kSumColumns;
    int const column = first + lane * kVector, pair = first + threadIdx.x * 2;
    bool const sums = threadIdx.x < kSumColumns / 2 && pair < p.hidden;
    int64_t const at = static_cast<int64_t>(row) * p.hidden + pair;
    trigger();
#pragma unroll 1
    for (int turn = p.rows <= kRehearsedRows ? 0 : 1; turn < 2; ++turn)
    {
        bool const stores = turn == 1;
        if (stores)
        {
            wait();
        }
        auto const* const stream = reinterpret_cast<Pair const*>(static_cast<T const*>(p.residual) + at);
        Pair const residual = p.residual && sums ? load_new(stream) : Pair{};
        if (own < chosen)
        {
            int const place = stores ? load_new(route.places + row * chosen + own) : 0;
            float const share = stores ? load_new(route.shares + row * chosen + own) : 0.f;
            bool const is_there = place >= 0 && column < p.hidden;
            T const* const from = y + static_cast<int64_t>(place) * p.hidden + column;
            parts[own * 32 + lane] = is_there ? load_new(reinterpret_cast<Part const*>(from)) : Part{};
            if (lane == 0)
            {
                shares[own] = place >= 0 ? share : 0.f;
            }
        }
        __syncthreads();
        float sum[2] = {};
#pragma unroll 4
        for (int k = 0; k < chosen && sums; ++k)
        {
            Pair const x = reinterpret_cast<Pair const*>(parts + k * 32)[threadIdx.x % (kSumColumns / 2)];
            sum[0] = fmaf(shares[k], to_float(x.at[0]), sum[0]);
            sum[1] = fmaf(shares[k], to_float(x.at[1]), sum[1]);
        }
        if (stores && sums)
        {
            Pair const out
                = {from_float<T>(sum[0] + to_float(residual.at[0])), from_float<T>(sum[1] + to_float(residual.at[1]))};
            store_kept(reinterpret_cast<Pair*>(static_cast<T*>(p.out) + at), out);
        }
        __syncthreads(); // the next turn stores where this one read
    }
}

template <typename T>
cudaError_t launch_sum(dflash_moe_params const& p, Route const& route, void const* y, cudaStream_t stream)
{
    dim3 const grid(p.rows, (p.hidden + kSumColumns - 1) / kSumColumns);
    int const threads = 32 * std::max(experts_of_row(p), kLeastSumWarps);
    int const bytes = experts_of_row(p) * kSumColumns * static_cast<int>(sizeof(T));
    return launch_kernel(sum_kernel<T>, grid, threads, bytes, stream, p, route, static_cast<T const*>(y));
}

// Gate and up of all tokens x [N, or as laid out, hidden] into h [pairs, columns].
inline Product gate_up_product(dflash_moe_params const& p, Route const& route, void const* x, void* h)
{
    Product product = {};
    product.route = route;
    product.weight = p.gate_up;
    product.scales = p.gate_up_scales;
    product.row_scales = p.gate_up_row_scales;
    product.bias = p.gate_up_bias;
    product.x = x;
    product.out = h;
    product.inputs = p.hidden;
    product.outputs = 2 * p.columns;
    product.is_by_block = p.format == DFLASH_MOE_FP8_BLOCKS;
    product.is_clamped = p.clamped != 0;
    product.has_gelu = p.gelu != 0;
    product.alpha = p.alpha;
    product.limit = p.limit;
    return product;
}

// Rows from which steps are shorter where the next kernel's weights come behind most of down's.
constexpr int kReadingFirst = 4;

// Down of h [pairs, columns] into y [pairs, hidden].
inline Product down_product(dflash_moe_params const& p, Route const& route, void const* h, void* y)
{
    Product product = {};
    product.route = route;
    product.weight = p.down;
    product.scales = p.down_scales;
    product.row_scales = p.down_row_scales;
    product.bias = p.down_bias;
    product.x = h;
    product.out = y;
    product.inputs = p.columns;
    product.outputs = p.hidden;
    product.is_by_block = p.format == DFLASH_MOE_FP8_BLOCKS;
    product.reads_first = p.rows >= kReadingFirst;
    return product;
}

} // namespace moe
} // namespace dflash
