// A mixture of experts' feed-forward for few rows (tokens): bound by reading, once, the experts that any row chose.
//
// Four kernels: the routing, one block; both products, each over the groups that the routing made (an expert, and up to
// a tile of the rows that chose it); and the sum over each row's experts. How the work is divided is decided on the
// device: every multiprocessor reads equally much of the experts that were chosen, however many these are.
#include "dflash_kernels.h"
#include "element.cuh"
#include "experts_product.cuh"
#include "experts_route.cuh"
#include "launch.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

using namespace moe;

// The parts of the workspace. h: inputs of the experts' second product; y: its outputs.
struct Workspace
{
    Route route;
    void* h; // [pairs, F]
    void* y; // [pairs, H]
    size_t bytes;

    Workspace(dflash_moe_params const& p, void* start)
    {
        auto* at = static_cast<unsigned char*>(start);
        size_t used = 0;
        auto const take = [&](size_t size)
        {
            void* const taken = at + used;
            used += (size + 15) / 16 * 16;
            return taken;
        };
        size_t const pairs = static_cast<size_t>(p.rows) * p.top_k;
        // Tiles have 8 rows or more, and each expert's last one may be smaller.
        size_t const groups = std::min<size_t>(p.count, pairs) + pairs / 8;
        route.group_count = static_cast<int32_t*>(take(sizeof(int32_t)));
        route.groups = static_cast<Group*>(take(groups * sizeof(Group)));
        route.rows = static_cast<int32_t*>(take(pairs * sizeof(int32_t)));
        route.places = static_cast<int32_t*>(take(pairs * sizeof(int32_t)));
        route.shares = static_cast<float*>(take(pairs * sizeof(float)));
        h = take(pairs * p.columns * 2);
        y = take(pairs * p.hidden * 2);
        bytes = used;
    }
};

// -- the sum ----------------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 128;
constexpr int kVector = 8;

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

// -- launching --------------------------------------------------------------------------------------------------------

struct Device
{
    int processors = 0;
    int shared_bytes = 0; // that a block can have

    cudaError_t read()
    {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess)
        {
            error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        }
        if (error == cudaSuccess)
        {
            error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        }
        return error;
    }
};

int warps_that_fit(Device const& device, int inputs, bool is_packed, int tokens)
{
    Layout const layout(inputs, is_packed);
    return std::min(kMostWarps, (device.shared_bytes - tokens * layout.pitch) / layout.warp_bytes);
}

template <typename T, bool kPacked, int kTokens, bool kGateUp>
cudaError_t launch_product(Product const& p, Device const& device, cudaStream_t stream)
{
    constexpr auto kernel = product_kernel<T, kPacked, kTokens, kGateUp>;
    cudaError_t const error = allow_shared_bytes<kernel>(device.shared_bytes);
    if (error)
    {
        return error;
    }
    Layout const layout(p.inputs, kPacked);
    int const warps = warps_that_fit(device, p.inputs, kPacked, kTokens);
    int const bytes = warps * layout.warp_bytes + kTokens * layout.pitch;
    return launch_kernel(kernel, dim3(device.processors), warps * 32, bytes, stream, p);
}

template <typename T, bool kPacked, int kTokens>
cudaError_t launch_products(
    dflash_moe_params const& p, Workspace const& space, Device const& device, cudaStream_t stream)
{
    Product product = {};
    product.route = space.route;
    product.weight = p.gate_up;
    product.scales = p.gate_up_scales;
    product.bias = p.gate_up_bias;
    product.x = p.x;
    product.out = space.h;
    product.inputs = p.hidden;
    product.outputs = 2 * p.columns;
    product.is_clamped = p.clamped != 0;
    product.alpha = p.alpha;
    product.limit = p.limit;
    cudaError_t const error = launch_product<T, kPacked, kTokens, true>(product, device, stream);
    if (error)
    {
        return error;
    }
    product.weight = p.down;
    product.scales = p.down_scales;
    product.bias = p.down_bias;
    product.x = space.h;
    product.out = space.y;
    product.inputs = p.columns;
    product.outputs = p.hidden;
    return launch_product<T, kPacked, kTokens, false>(product, device, stream);
}

template <typename T, int kTokens>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    Workspace const space(p, workspace);
    auto const route = p.logits_dtype == DFLASH_FP32 ? route_kernel<float>
        : p.logits_dtype == DFLASH_FP16              ? route_kernel<__half>
                                                     : route_kernel<__nv_bfloat16>;
    cudaError_t error = launch_kernel(route, dim3(1), kRouteThreads, 0, stream, p, space.route, kTokens);
    if (error == cudaSuccess)
    {
        error = p.packed ? launch_products<T, true, kTokens>(p, space, device, stream)
                         : launch_products<T, false, kTokens>(p, space, device, stream);
    }
    if (error == cudaSuccess)
    {
        int const blocks = (p.hidden / kVector + kSumThreads - 1) / kSumThreads;
        error = launch_kernel(sum_kernel<T>, dim3(p.rows, blocks), kSumThreads, 0, stream, p, space.route,
            static_cast<void const*>(space.y));
    }
    return error;
}

bool do_fit(dflash_moe_params const& p, Device const& device, int tokens)
{
    return warps_that_fit(device, std::max(p.hidden, p.columns), p.packed, tokens) >= kLeastWarps;
}

// More than 8 rows may choose one expert, whose weight is then read once for 16.
int tokens_of(dflash_moe_params const& p, Device const& device)
{
    return p.rows > 8 && do_fit(p, device, 16) ? 16 : 8;
}

bool is_computed(dflash_moe_params const& p, Device const& device)
{
    int const multiple = p.packed ? 32 : 16;
    return p.rows <= kMostRows && p.experts <= kMostExperts && p.top_k >= 1 && p.top_k <= std::min(kMostTopK, p.experts)
        && p.first >= 0 && p.count >= 1 && p.first + p.count <= p.experts && p.hidden >= multiple
        && p.columns >= multiple && p.hidden % multiple == 0 && p.columns % multiple == 0
        && (p.dtype == DFLASH_FP16 || p.dtype == DFLASH_BF16) && p.logits_dtype >= DFLASH_FP16
        && p.logits_dtype <= DFLASH_FP32 && do_fit(p, device, 8);
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_moe_workspace(dflash_moe_params const* p, size_t* bytes)
{
    dflash::Device device;
    cudaError_t const error = device.read();
    if (error)
    {
        return error;
    }
    if (!dflash::is_computed(*p, device))
    {
        return cudaErrorInvalidValue;
    }
    *bytes = dflash::Workspace(*p, nullptr).bytes;
    return cudaSuccess;
}

extern "C" cudaError_t dflash_moe(
    dflash_moe_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    Device device;
    cudaError_t const error = device.read();
    if (error)
    {
        return error;
    }
    if (!is_computed(*p, device) || workspace_bytes < Workspace(*p, nullptr).bytes)
    {
        return cudaErrorInvalidValue;
    }
    if (p->rows == 0)
    {
        return cudaSuccess;
    }
    if (p->dtype == DFLASH_FP16)
    {
        return tokens_of(*p, device) == 8 ? launch_moe<__half, 8>(*p, workspace, device, stream)
                                          : launch_moe<__half, 16>(*p, workspace, device, stream);
    }
    return tokens_of(*p, device) == 8 ? launch_moe<__nv_bfloat16, 8>(*p, workspace, device, stream)
                                      : launch_moe<__nv_bfloat16, 16>(*p, workspace, device, stream);
}
