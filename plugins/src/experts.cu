// A mixture of experts' feed-forward for few rows (tokens): bound by reading, once, the experts that any row chose.
//
// Three kernels: both products, each over the groups that the routing makes (an expert, and up to a tile of the rows
// that chose it), and the sum over each row's experts. Of up to 16 rows every block of the first product finds the
// routing for itself; of more it is a kernel of one block. How the work is divided is decided on the device: every
// multiprocessor reads equally much of the experts that were chosen, however many these are.
#include "dflash_kernels.h"
#include "experts_launch.cuh"
#include "experts_product.cuh"

#include <algorithm>

namespace dflash
{
namespace
{

using namespace moe;

constexpr int kFewTokens = 4; // of an expert, on average: hardly any has more than 8

// Rows whose first product is over so soon that a block which begins late ends late.
constexpr int kShortRows = 4;

// The parts of the workspace. h: inputs of the experts' second product; y: its outputs.
struct Workspace
{
    Route route;
    void* h; // [pairs, F]
    void* y; // [pairs, H]
    size_t bytes;

    Workspace(dflash_moe_params const& p, void* start)
    {
        Scratch scratch{static_cast<unsigned char*>(start)};
        size_t const pairs = static_cast<size_t>(p.rows) * experts_of_row(p);
        route = scratch.take_route(p, 8); // tiles have 8 rows or more
        h = scratch.take(pairs * p.columns * 2);
        y = scratch.take(pairs * p.hidden * 2);
        bytes = scratch.used;
    }
};

cudaError_t launch_route(dflash_moe_params const& p, Route const& route, int tile, cudaStream_t stream)
{
    auto const kernel = p.logits_dtype == DFLASH_FP32 ? route_kernel<float>
        : p.logits_dtype == DFLASH_FP16               ? route_kernel<__half>
                                                      : route_kernel<__nv_bfloat16>;
    return launch_kernel(kernel, dim3(1), kRouteThreads, 0, stream, p, route, tile);
}

// others: bytes that a block has beside rings and inputs.
int warps_that_fit(Device const& device, int inputs, Weight weight, int tokens, int others = 0)
{
    Layout const layout(inputs, weight);
    return std::min(kMostWarps, (device.shared_bytes - tokens * layout.pitch - others) / layout.warp_bytes);
}

// Whether the blocks of the first product find the routing.
bool do_blocks_route(dflash_moe_params const& p, Device const& device, int tokens)
{
    return p.rows <= kOwnRows && p.rows * experts_of_row(p) <= kOwnPairs && are_chosen_shortly(p)
        && warps_that_fit(device, p.hidden, weight_of(p), tokens, sizeof(OwnRoute)) >= kLeastWarps;
}

template <typename T, Weight kWeight, int kTokens, bool kGateUp>
cudaError_t launch_product(
    Product const& p, Chooser<kGateUp> const& chooser, Device const& device, int blocks, cudaStream_t stream)
{
    constexpr auto kernel = product_kernel<T, kWeight, kTokens, kGateUp>;
    cudaError_t const error = allow_shared_bytes<kernel>(device.shared_bytes);
    if (error)
    {
        return error;
    }
    Layout const layout(p.inputs, kWeight);
    int const others = p.routes ? sizeof(OwnRoute) : 0;
    int const warps = warps_that_fit(device, p.inputs, kWeight, kTokens, others);
    int const bytes = warps * layout.warp_bytes + kTokens * layout.pitch + others;
    return launch_kernel(kernel, dim3(blocks), warps * 32, bytes, stream, p, chooser);
}

// Lets a kernel ask ahead for the matrix of an expert of a product.
void ask_for(Product const& product, Weight weight, int expert, int place, Product& by)
{
    size_t const bytes = is_tiled(weight)
        ? static_cast<size_t>(product.outputs / kGranule) * granule_bytes(weight, product.inputs)
        : static_cast<size_t>(product.outputs) * Layout(product.inputs, weight).row_bytes;
    by.ahead[place] = static_cast<char const*>(product.weight) + expert * bytes;
    by.ahead_bytes[place] = static_cast<uint32_t>(bytes);
}

template <typename T, Weight kWeight, int kTokens>
cudaError_t launch_products(
    dflash_moe_params const& p, Workspace const& space, Device const& device, bool routes, cudaStream_t stream)
{
    Product gate_up = gate_up_product(p, space.route, p.x, space.h);
    gate_up.routes = routes;
    Product const down = down_product(p, space.route, space.h, space.y);
    if (p.has_shared) // it is known before the routing is
    {
        ask_for(gate_up, kWeight, p.count, 0, gate_up);
        ask_for(down, kWeight, p.count, 1, gate_up);
    }
    // The block of `route_kernel` fills a multiprocessor until it ends: nobody else would begin there before.
    bool const is_one_taken = p.rows <= kShortRows && !routes;
    int const blocks = is_one_taken ? std::max(1, device.processors - 1) : device.processors;
    cudaError_t const error = launch_product<T, kWeight, kTokens, true>(gate_up, p, device, blocks, stream);
    if (error)
    {
        return error;
    }
    return launch_product<T, kWeight, kTokens, false>(down, {}, device, device.processors, stream);
}

template <typename T, int kTokens>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    Workspace const space(p, workspace);
    bool const routes = do_blocks_route(p, device, kTokens);
    cudaError_t error = routes ? cudaSuccess : launch_route(p, space.route, kTokens, stream);
    if (error)
    {
        return error;
    }
    switch (weight_of(p))
    {
    case Weight::kMxfp4: error = launch_products<T, Weight::kMxfp4, kTokens>(p, space, device, routes, stream); break;
    case Weight::kFp8: error = launch_products<T, Weight::kFp8, kTokens>(p, space, device, routes, stream); break;
    case Weight::kInt4: error = launch_products<T, Weight::kInt4, kTokens>(p, space, device, routes, stream); break;
    case Weight::kNvfp4: error = launch_products<T, Weight::kNvfp4, kTokens>(p, space, device, routes, stream); break;
    default: error = launch_products<T, Weight::kNumbers, kTokens>(p, space, device, routes, stream);
    }
    return error ? error : launch_sum<T>(p, space.route, space.y, stream);
}

bool do_fit(dflash_moe_params const& p, Device const& device, int tokens)
{
    return warps_that_fit(device, std::max(p.hidden, p.columns), weight_of(p), tokens) >= kLeastWarps;
}

// Where more than 8 rows are likely to choose an expert, it is read once for 16. Of fewer, more warps fit.
int tokens_of(dflash_moe_params const& p, Device const& device)
{
    return p.rows > 8 && p.rows * p.top_k > kFewTokens * p.experts && do_fit(p, device, 16) ? 16 : 8;
}

bool is_computed(dflash_moe_params const& p, Device const& device)
{
    return is_routed(p) && do_fit(p, device, 8);
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
