// A mixture of experts' feed-forward for few rows (tokens): bound by reading, once, the experts that any row chose.
//
// Three kernels: both products, each over the groups that the routing makes (an expert, and up to a tile of the rows
// that chose it), and the sum over each row's experts. Of up to 16 rows every block of the first product finds the
// routing for itself; of more it is a kernel of one block. How the work is divided is decided on the device: every
// multiprocessor reads equally much of the experts that were chosen, however many these are. A row that is alone has
// two kernels side by side, of weights in tiles: the second product adds up, too.
#include "dflash_kernels.h"
#include "experts_alone.cuh"
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

// most_warps: of a block. Two blocks never share a multiprocessor, where they would take twice the others' time: each
// has more than half of its shared memory.
template <typename T, Weight kWeight, int kTokens, bool kGateUp>
cudaError_t launch_product(Product const& p, Chooser<kGateUp> const& chooser, Device const& device, int blocks,
    int most_warps, cudaStream_t stream)
{
    constexpr auto kernel = product_kernel<T, kWeight, kTokens, kGateUp>;
    cudaError_t error = allow_shared_bytes<kernel>(device.shared_bytes);
    error = error ? error : share_multiprocessors<kernel>();
    if (error)
    {
        return error;
    }
    Layout const layout(p.inputs, kWeight);
    int const others = p.routes ? sizeof(OwnRoute) : 0;
    int const warps = std::min(most_warps, warps_that_fit(device, p.inputs, kWeight, p.tokens, others));
    int const needed = warps * layout.warp_bytes + p.tokens * layout.pitch + others;
    int const bytes = std::min(device.shared_bytes, std::max(needed, device.all_bytes / 2 - device.own_bytes + 16));
    return launch_kernel(kernel, dim3(blocks), warps * 32, bytes, stream, p, chooser);
}

// The warps and the shared memory of a block of `alone_kernel`, by the one with most to do.
struct AloneLayout
{
    int warps;
    int bytes;
    bool fits; // with as many warps as are worth it

    AloneLayout(dflash_moe_params const& p, Device const& device)
    {
        Layout const layout(p.columns, weight_of(p));
        int const experts = experts_of_row(p);
        int const granules = (p.hidden / kGranule + device.processors - 1) / device.processors;
        int const sums = alone_sums_bytes(granules, experts), items = granules * experts;
        warps = std::min(items, warps_that_fit(device, p.columns, weight_of(p), experts, sums));
        bytes = warps * layout.warp_bytes + experts * layout.pitch + sums;
        fits = warps >= std::min(kLeastWarps, items);
    }
};

// The second product and the sum of a row that is alone.
template <typename T, Weight kWeight>
cudaError_t launch_alone(dflash_moe_params const& p, Product const& down, AloneLayout const& layout,
    Device const& device, cudaStream_t stream)
{
    constexpr auto kernel = alone_kernel<T, kWeight>;
    cudaError_t error = allow_shared_bytes<kernel>(device.shared_bytes);
    error = error ? error : share_multiprocessors<kernel>();
    int const threads = layout.warps * 32;
    return error ? error : launch_kernel(kernel, dim3(device.processors), threads, layout.bytes, stream, down, p);
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

// Warps of the first product of a row that is alone, each with one of its block's granules: none that is idle takes the
// room of a block of the second one.
int warps_of_one(dflash_moe_params const& p, int blocks)
{
    int const granules = 2 * p.columns / kGranule, of_group = std::max(1, blocks / experts_of_row(p));
    return std::clamp((granules + of_group - 1) / of_group, kLeastWarps, kMostWarps);
}

template <typename T, Weight kWeight, int kTokens>
cudaError_t launch_products(
    dflash_moe_params const& p, Workspace const& space, Device const& device, bool routes, cudaStream_t stream)
{
    Product gate_up = gate_up_product(p, space.route, p.x, space.h);
    gate_up.routes = routes;
    Product down = down_product(p, space.route, space.h, space.y);
    gate_up.tokens = down.tokens = kTokens == 8 ? std::min(p.rows, kTokens) : kTokens; // of 16, tiles are whole
    if (p.has_shared) // it is known before the routing is
    {
        ask_for(gate_up, kWeight, p.count, 0, gate_up);
        ask_for(down, kWeight, p.count, 1, gate_up);
    }
    // The block of `route_kernel` fills a multiprocessor until it ends: nobody else would begin there before.
    bool const is_one_taken = p.rows <= kShortRows && !routes;
    int const blocks = is_one_taken ? std::max(1, device.processors - 1) : device.processors;
    AloneLayout const alone(p, device);
    // Products of other weights wait for memory, not for their instructions: side by side they gain nothing.
    bool const is_alone = is_tiled(kWeight) && p.rows == 1 && alone.fits;
    int const warps = is_alone ? warps_of_one(p, blocks) : kMostWarps;
    cudaError_t error = launch_product<T, kWeight, kTokens, true>(gate_up, p, device, blocks, warps, stream);
    if constexpr (is_tiled(kWeight))
    {
        if (is_alone)
        {
            return error ? error : launch_alone<T, kWeight>(p, down, alone, device, stream);
        }
    }
    error = error ? error
                  : launch_product<T, kWeight, kTokens, false>(down, {}, device, device.processors, kMostWarps, stream);
    return error ? error : launch_sum<T>(p, space.route, space.y, stream);
}

template <typename T, int kTokens>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    Workspace const space(p, workspace);
    bool const routes = do_blocks_route(p, device, kTokens);
    cudaError_t const error = routes ? cudaSuccess : launch_route(p, space.route, kTokens, stream);
    if (error)
    {
        return error;
    }
    switch (weight_of(p))
    {
    case Weight::kMxfp4: return launch_products<T, Weight::kMxfp4, kTokens>(p, space, device, routes, stream);
    case Weight::kFp8: return launch_products<T, Weight::kFp8, kTokens>(p, space, device, routes, stream);
    case Weight::kInt4: return launch_products<T, Weight::kInt4, kTokens>(p, space, device, routes, stream);
    case Weight::kNvfp4: return launch_products<T, Weight::kNvfp4, kTokens>(p, space, device, routes, stream);
    default: return launch_products<T, Weight::kNumbers, kTokens>(p, space, device, routes, stream);
    }
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
