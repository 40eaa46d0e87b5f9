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
        size_t const pairs = static_cast<size_t>(p.rows) * p.top_k;
        // Each expert's last group may be smaller than a tile.
        size_t const groups = std::min<size_t>(p.count, pairs) + pairs / tile;
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
    int major = 0; // of the compute capability

    cudaError_t read()
    {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        error = error ? error : cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        return error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
};

inline bool is_routed(dflash_moe_params const& p)
{
    bool const is_nvfp4 = p.format == DFLASH_MOE_NVFP4;
    int const multiple = p.format == DFLASH_MOE_INT4 ? kInt4Inputs : p.format == DFLASH_MOE_MXFP4 || is_nvfp4 ? 32 : 16;
    bool const has_scales = p.format == DFLASH_MOE_NUMBERS
        || (p.gate_up_scales && p.down_scales && (!is_nvfp4 || (p.gate_up_row_scales && p.down_row_scales)));
    return p.rows >= 0 && p.rows <= kMostRows && p.experts <= kMostExperts && p.top_k >= 1
        && p.top_k <= std::min(kMostTopK, p.experts) && p.first >= 0 && p.count >= 1 && p.first + p.count <= p.experts
        && p.hidden >= multiple && p.columns >= multiple && p.hidden % multiple == 0 && p.columns % multiple == 0
        && p.format >= DFLASH_MOE_NUMBERS && p.format <= DFLASH_MOE_NVFP4
        && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16) && p.logits_dtype >= DFLASH_FP16
        && p.logits_dtype <= DFLASH_FP32 && has_scales && !(p.gelu && p.clamped);
}

// -- the sum ----------------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 128;
constexpr int kVector = 8;

// y: the experts' outputs, [pairs, H].
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(dflash_moe_params const p, Route const route, void const* const y)
{
    using Row = Vector<T, kVector>;
    begin();
    int const row = blockIdx.x, at = (blockIdx.y * kSumThreads + threadIdx.x) * kVector;
    if (at >= p.hidden)
    {
        return;
    }
    float sum[kVector] = {};
    for (int k = 0; k < p.top_k; ++k)
    {
        int const place = route.places[row * p.top_k + k];
        float const share = route.shares[row * p.top_k + k];
        if (place >= 0)
        {
            T const* const from = static_cast<T const*>(y) + static_cast<int64_t>(place) * p.hidden;
            Row const part = load_vector<T, kVector>(from + at);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
            {
                sum[i] += share * to_float(part.at[i]);
            }
        }
    }
    Row out;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
    {
        out.at[i] = from_float<T>(sum[i]);
    }
    store_vector(static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.hidden + at, out);
}

template <typename T>
cudaError_t launch_sum(dflash_moe_params const& p, Route const& route, void const* y, cudaStream_t stream)
{
    int const blocks = (p.hidden / kVector + kSumThreads - 1) / kSumThreads;
    return launch_kernel(sum_kernel<T>, dim3(p.rows, blocks), kSumThreads, 0, stream, p, route, y);
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
    return product;
}

} // namespace moe
} // namespace dflash
