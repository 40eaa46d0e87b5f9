// A mixture of experts' feed-forward for many rows (tokens), on Hopper: each expert is read once for up to 64 of the
// rows that chose it.
//
// Five kernels: the choice of each row's experts; the groups of each expert's rows, with the rows laid out by expert in
// the order in which products take them; both products; and the sum, as for few rows.
#include "dflash_kernels.h"
#include "experts_launch.cuh"
#include "experts_many_sm90.cuh"
#include "tensor_map.cuh"

namespace dflash
{
namespace
{

using namespace moe;
using many::Lines;

// The parts of the workspace: inputs of both products, as they lie, the outputs of the second, and who computes what of
// each.
struct Workspace
{
    Route route;
    int blocks; // of a product
    int units[2]; // of a group, of each product
    int32_t* begins[2] = {}; // [blocks + 1], of each product, where units' costs differ: see `Launch`
    void* x; // [pairs, pitch of H]
    void* h; // [pairs, pitch of F]
    void* y; // [pairs, H]
    int x_pitch;
    int h_pitch;
    size_t bytes;

    Workspace(dflash_moe_params const& p, Device const& device, void* start)
        : blocks(device.processors)
        , units{units_of(2 * p.columns), units_of(p.hidden)}
        , x_pitch(many::pitch_of(weight_of(p), p.hidden))
        , h_pitch(many::pitch_of(weight_of(p), p.columns))
    {
        Scratch scratch{static_cast<unsigned char*>(start)};
        size_t const pairs = static_cast<size_t>(p.rows) * experts_of_row(p);
        route = scratch.take_route(p, many::kTokens);
        route.experts = scratch.take_numbers<int32_t>(pairs);
        if (p.has_shared || is_tiled(weight_of(p)))
        {
            begins[0] = scratch.take_numbers<int32_t>(blocks + 1);
            begins[1] = scratch.take_numbers<int32_t>(blocks + 1);
        }
        x = scratch.take(pairs * x_pitch * 2);
        h = scratch.take(pairs * h_pitch * 2);
        y = scratch.take(pairs * p.hidden * 2);
        bytes = scratch.used;
    }

    static int units_of(int outputs)
    {
        return (outputs + many::kUnitRows - 1) / many::kUnitRows;
    }
};

// -- the choice -------------------------------------------------------------------------------------------------------

constexpr int kChoiceWarps = 8; // a row each

template <typename L>
__global__ void __launch_bounds__(kChoiceWarps * 32) choice_kernel(dflash_moe_params const p, Route const route)
{
    trigger();
    int const row = blockIdx.x * kChoiceWarps + threadIdx.x / 32;
#pragma unroll 1
    for (bool stores : {false, true}) // first for its code, as few rows' routing
    {
        if (stores)
        {
            wait();
        }
        if (row < p.rows)
        {
            choose_experts<L>(p, route, row, stores);
        }
    }
}

cudaError_t launch_choice(dflash_moe_params const& p, Route const& route, cudaStream_t stream)
{
    auto const kernel = p.logits_dtype == DFLASH_FP32 ? choice_kernel<float>
        : p.logits_dtype == DFLASH_FP16               ? choice_kernel<__half>
                                                      : choice_kernel<__nv_bfloat16>;
    return launch_kernel(
        kernel, dim3((p.rows + kChoiceWarps - 1) / kChoiceWarps), kChoiceWarps * 32, 0, stream, p, route);
}

// -- laying out -------------------------------------------------------------------------------------------------------

// 32 inputs of a row, to be stored in the order of a place: a thread's work.
template <Lines kLines>
struct Run
{
    uint4 parts[4] = {};

    __device__ __forceinline__ void load(dflash_moe_params const& p, int row, int run)
    {
        auto const* const from = static_cast<uint16_t const*>(p.x) + static_cast<int64_t>(row) * p.hidden;
#pragma unroll
        for (int part = 0; part < 4; ++part)
        {
            int const column = kLines == Lines::kE2m1 ? run / 4 * 128 + part * 32 + run % 4 * 8
                : kLines == Lines::kE4m3              ? run / 2 * 64 + part * 16 + run % 2 * 8
                                                      : run * 32 + part * 8;
            parts[part] = column < p.hidden ? *reinterpret_cast<uint4 const*>(from + column) : uint4{};
        }
    }

    // Sixteen bytes of four parts become one of each. Lanes store pairs of runs together, 32 bytes side by side: a
    // sector of the L2 cache is written once. All lanes call together; those of a pair have neighbouring runs, or none.
    __device__ __forceinline__ void store(uint4* to, bool stores) const
    {
        uint4 x[4];
#pragma unroll
        for (int part = 0; part < 4; ++part)
        {
            uint4 const& from = parts[part];
            x[part] = kLines == Lines::kE2m1 ? paired(from) : kLines == Lines::kE4m3 ? paired_in_words(from) : from;
        }
        uint4* const first = to - threadIdx.x % 2 * 4; // of the pair
        store_pair(first, {x[0].x, x[1].x, x[2].x, x[3].x}, {x[0].y, x[1].y, x[2].y, x[3].y}, stores);
        store_pair(first + 2, {x[0].z, x[1].z, x[2].z, x[3].z}, {x[0].w, x[1].w, x[2].w, x[3].w}, stores);
    }

    // 32 bytes of either lane's run: each lane stores half of both.
    __device__ __forceinline__ static void store_pair(uint4* to, uint4 const& lower, uint4 const& upper, bool stores)
    {
        bool const is_odd = threadIdx.x % 2;
        uint4 const own = selected(is_odd, upper, lower), given = selected(is_odd, lower, upper);
        uint4 const taken = {__shfl_xor_sync(kAll, given.x, 1), __shfl_xor_sync(kAll, given.y, 1),
            __shfl_xor_sync(kAll, given.z, 1), __shfl_xor_sync(kAll, given.w, 1)};
        if (stores)
        {
            store_kept(to + is_odd, selected(is_odd, taken, own));
            store_kept(to + 4 + is_odd, selected(is_odd, own, taken));
        }
    }

    __device__ __forceinline__ static uint4 selected(bool first, uint4 const& x, uint4 const& y)
    {
        return {first ? x.x : y.x, first ? x.y : y.y, first ? x.z : y.z, first ? x.w : y.w};
    }
};

// The second product's inputs get zeros in the stage of their last columns: the first product writes the others over
// them.
template <Lines kLines>
__device__ __forceinline__ void clear_end(Workspace const& space, int place, int chunk)
{
    int64_t const end = (static_cast<int64_t>(place) + 1) * space.h_pitch;
    auto* const to = static_cast<uint16_t*>(space.h) + end - many::Stage<kLines>::kColumns;
    reinterpret_cast<uint4*>(to)[chunk] = {};
}

// Where experts begin, for the division of products among their blocks.
struct Spans
{
    int cost_before[kMostExperts + 1]; // of a unit of each group of the experts before
    OwnGroups groups[kMostExperts + 1];
};

// Divides both products among their blocks, by a thread for each: it finds the unit that its block begins with. own: of
// the thread's expert.
template <Lines kLines>
__device__ __forceinline__ void divide(
    dflash_moe_params const& p, Workspace const& space, OwnGroups const& own, Spans& spans, uint32_t* sums, bool writes)
{
    int const whole = many::cost_of<kLines>(many::kTokens), experts = own_experts(p), blocks = space.blocks;
    auto const cost_of_rest
        = [](int rows) { return rows % many::kTokens ? many::cost_of<kLines>(rows % many::kTokens) : 0; };
    uint32_t total = 0;
    int const before = scan(own.rows / many::kTokens * whole + cost_of_rest(own.rows), sums, total);
    if (static_cast<int>(threadIdx.x) < experts)
    {
        spans.cost_before[threadIdx.x] = before;
        spans.groups[threadIdx.x] = own;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * blocks; i += kRouteThreads)
    {
        bool const is_down = i >= blocks; // which is no index: Workspace would be copied to local memory for it
        int const units = is_down ? space.units[1] : space.units[0], block = is_down ? i - blocks : i;
        int const place = share_begin(total * units, block, blocks); // in the costs of all units
        // The last expert that begins there or before. Those without rows begin where the next one does.
        int expert = 0, past = experts;
        while (past - expert > 1)
        {
            int const middle = (expert + past) / 2;
            (spans.cost_before[middle] * units <= place ? expert : past) = middle;
        }
        OwnGroups const groups = spans.groups[expert];
        int const place_of_expert = place - spans.cost_before[expert] * units, full = groups.rows / many::kTokens;
        int const group = min(place_of_expert / (whole * units), full);
        int const each = group < full ? whole : max(1, cost_of_rest(groups.rows)); // 1: nobody has rows
        int const unit = (place_of_expert - group * whole * units + each - 1) / each;
        if (writes)
        {
            int32_t* const begins = is_down ? space.begins[1] : space.begins[0];
            begins[block] = (groups.first + group) * units + unit;
        }
    }
    if (writes && threadIdx.x == 0)
    {
        space.begins[0][blocks] = *space.route.group_count * space.units[0];
        space.begins[1][blocks] = *space.route.group_count * space.units[1];
    }
}

// Groups the rows by expert, every block for itself, and lays a block's rows out: a thread's task is a run of a pair,
// or a chunk of the end of its inputs of the second product. The next kernel may begin once it can read the groups.
template <Lines kLines>
__global__ void __launch_bounds__(kRouteThreads)
    lay_out_kernel(dflash_moe_params const p, Workspace const space, int const block_rows)
{
    __shared__ Members members;
    __shared__ Spans spans;
    __shared__ uint32_t sums[kRouteThreads / 32];
    Route const& route = space.route;
    members.clear(own_experts(p));
    int const chosen = experts_of_row(p), pairs = p.rows * chosen;
    int const first = blockIdx.x * block_rows * chosen, past = min(p.rows, (blockIdx.x + 1) * block_rows) * chosen;
    constexpr int kColumns = many::Stage<kLines>::kColumns;
    static_assert(
        kColumns % 64 == 0); // runs and chunks are even: two neighbouring lanes have tasks of one kind and pair
    int const runs = space.x_pitch / 32, chunks = p.columns < space.h_pitch ? kColumns / 8 : 0;
    int const tasks = runs + chunks, count = (past - first) * tasks;
    bool const is_first_block = blockIdx.x == 0, has_all_experts = p.count == p.experts;
#pragma unroll 1
    for (bool is_real : {false, true}) // first for its code, without rows
    {
        if (is_real)
        {
            wait();
        }
        __syncthreads();
        for (int pair = threadIdx.x; is_real && pair < pairs; pair += kRouteThreads)
        {
            int const expert = route.experts[pair];
            if (expert >= 0)
            {
                members.add(expert, pair / chosen);
            }
        }
        __syncthreads();
        OwnGroups const own = make_groups(p, route, many::kTokens, members, sums, is_real && is_first_block);
        if (is_first_block && space.begins[0])
        {
            __syncthreads(); // sums have been read
            divide<kLines>(p, space, own, spans, sums, is_real);
        }
    }
    if (is_first_block)
    {
        __threadfence();
    }
    __syncthreads();
    trigger();
    for (int from = 0; from < count; from += kRouteThreads)
    {
        int const i = from + static_cast<int>(threadIdx.x), pair = min(first + i / tasks, past - 1), task = i % tasks;
        int const row = pair / chosen, expert = route.experts[pair];
        Run<kLines> run; // on its way while its place is counted, where the rank has all experts
        if (i < count && task < runs && (has_all_experts || expert >= 0))
        {
            run.load(p, row, task);
        }
        int const place = i >= count || expert < 0 ? -1 : members.place(expert, row);
        if (i < count && task == 0)
        {
            route.places[pair] = place;
        }
        auto* const to = static_cast<uint16_t*>(space.x) + static_cast<int64_t>(place) * space.x_pitch + task * 32;
        run.store(reinterpret_cast<uint4*>(to), place >= 0 && task < runs);
        if (place >= 0 && task >= runs)
        {
            clear_end<kLines>(space, place, task - runs);
        }
    }
}

template <Lines kLines>
cudaError_t launch_lay_out(
    dflash_moe_params const& p, Workspace const& space, Device const& device, cudaStream_t stream)
{
    int const block_rows = (p.rows + device.processors - 1) / device.processors;
    int const blocks = (p.rows + block_rows - 1) / block_rows;
    return launch_kernel(lay_out_kernel<kLines>, dim3(blocks), kRouteThreads, 0, stream, p, space, block_rows);
}

// -- the products -----------------------------------------------------------------------------------------------------

// Stages that fit in a block's shared memory.
int stages_that_fit(Device const& device, Weight weight)
{
    int stages = many::kMostStages;
    while (stages > 0 && many::SharedLayout(weight, stages).bytes > device.shared_bytes)
    {
        --stages;
    }
    return stages;
}

// A weight's lines: boxes of one line of some units' halves.
template <Lines kLines>
cudaError_t map_weight(Product const& p, int experts, int units, CUtensorMap& map)
{
    using S = many::Stage<kLines>;
    cuuint64_t const row_bytes = p.inputs * (kLines == Lines::kE4m3 ? 1 : 2), outputs = p.outputs;
    return map_tiles<3>(CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, p.weight,
        {row_bytes, outputs, static_cast<cuuint64_t>(experts)}, {row_bytes, row_bytes * outputs},
        {S::kLineBytes, static_cast<cuuint32_t>(units * many::kHalfRows), 1}, map);
}

// Inputs as they lie: boxes of a stage's, of some tokens.
template <Lines kLines>
cudaError_t map_inputs(void const* x, int pitch, size_t pairs, int tokens, CUtensorMap& map)
{
    constexpr cuuint64_t kAtomBytes = kAtom * 2;
    cuuint64_t const row_bytes = 2 * static_cast<cuuint64_t>(pitch);
    return map_tiles<3>(CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, x,
        {kAtom, pairs, row_bytes / kAtomBytes}, {row_bytes, kAtomBytes},
        {kAtom, static_cast<cuuint32_t>(tokens), many::Stage<kLines>::kAtoms}, map);
}

template <Lines kLines>
cudaError_t map_all(dflash_moe_params const& p, many::Launch& launch, int pitch)
{
    cudaError_t error = cudaSuccess;
    if constexpr (kLines != Lines::kE2m1)
    {
        for (int units = 1; error == cudaSuccess && units <= many::Crew<kLines>::kItemUnits; ++units)
        {
            error = map_weight<kLines>(launch.p, own_experts(p), units, launch.weight[units - 1]);
        }
    }
    size_t const pairs = static_cast<size_t>(p.rows) * experts_of_row(p);
    for (int boxes = 1; error == cudaSuccess && boxes <= many::kBoxes; ++boxes)
    {
        error = map_inputs<kLines>(launch.p.x, pitch, pairs, boxes * many::kBoxTokens, launch.inputs[boxes - 1]);
    }
    return error;
}

template <typename T, Weight kWeight, bool kGateUp>
cudaError_t launch_product(
    dflash_moe_params const& p, many::Launch& launch, int pitch, Device const& device, cudaStream_t stream)
{
    constexpr Lines kLines = many::lines_of(kWeight);
    constexpr auto kernel = many::many_product_kernel<T, kWeight, kGateUp>;
    launch.units = Workspace::units_of(launch.p.outputs);
    launch.steps = pitch / many::Stage<kLines>::kColumns;
    launch.stages = stages_that_fit(device, kWeight);
    cudaError_t error = map_all<kLines>(p, launch, pitch);
    error = error ? error : allow_shared_bytes<kernel>(device.shared_bytes);
    if (error != cudaSuccess)
    {
        return error;
    }
    int const bytes = many::SharedLayout(kWeight, launch.stages).bytes;
    return launch_kernel(kernel, dim3(device.processors), many::Crew<kLines>::kThreads, bytes, stream, launch);
}

template <typename T, Weight kWeight>
cudaError_t launch_products(
    dflash_moe_params const& p, Workspace const& space, Device const& device, cudaStream_t stream)
{
    many::Launch launch = {};
    launch.p = gate_up_product(p, space.route, space.x, space.h);
    launch.begins = space.begins[0];
    launch.pitch = space.h_pitch;
    cudaError_t const error = launch_product<T, kWeight, true>(p, launch, space.x_pitch, device, stream);
    if (error != cudaSuccess)
    {
        return error;
    }
    launch.p = down_product(p, space.route, space.h, space.y);
    launch.begins = space.begins[1];
    launch.pitch = p.hidden;
    return launch_product<T, kWeight, false>(p, launch, space.h_pitch, device, stream);
}

template <typename T, Weight kWeight>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    Workspace const space(p, device, workspace);
    cudaError_t error = launch_choice(p, space.route, stream);
    error = error ? error : launch_lay_out<many::lines_of(kWeight)>(p, space, device, stream);
    error = error ? error : launch_products<T, kWeight>(p, space, device, stream);
    return error ? error : launch_sum<T>(p, space.route, space.y, stream);
}

template <typename T>
cudaError_t launch_moe(dflash_moe_params const& p, void* workspace, Device const& device, cudaStream_t stream)
{
    switch (weight_of(p))
    {
    case Weight::kMxfp4: return launch_moe<T, Weight::kMxfp4>(p, workspace, device, stream);
    case Weight::kNvfp4: return launch_moe<T, Weight::kNvfp4>(p, workspace, device, stream);
    case Weight::kFp8: return launch_moe<T, Weight::kFp8>(p, workspace, device, stream);
    default: return launch_moe<T, Weight::kNumbers>(p, workspace, device, stream);
    }
}

cudaError_t check(dflash_moe_params const& p, Device& device)
{
    cudaError_t const error = device.read();
    if (error != cudaSuccess)
    {
        return error;
    }
#ifdef DFLASH_SM90A
    bool const is_sm90 = device.major == 9;
#else
    bool const is_sm90 = false;
#endif
    if (!is_sm90)
    {
        return cudaErrorNotSupported;
    }
    Weight const weight = weight_of(p);
    bool const does_fit = stages_that_fit(device, weight) >= many::kLeastStages;
    return is_routed(p) && weight != Weight::kInt4 && does_fit ? cudaSuccess : cudaErrorInvalidValue;
}

} // namespace
} // namespace dflash

extern "C" cudaError_t dflash_moe_many_workspace(dflash_moe_params const* p, size_t* bytes)
{
    dflash::Device device;
    cudaError_t const error = dflash::check(*p, device);
    if (error == cudaSuccess)
    {
        *bytes = dflash::Workspace(*p, device, nullptr).bytes;
    }
    return error;
}

extern "C" cudaError_t dflash_moe_many(
    dflash_moe_params const* p, void* workspace, size_t workspace_bytes, cudaStream_t stream)
{
    using namespace dflash;
    Device device;
    cudaError_t const error = check(*p, device);
    if (error != cudaSuccess || p->rows == 0)
    {
        return error;
    }
    if (workspace_bytes < Workspace(*p, device, nullptr).bytes)
    {
        return cudaErrorInvalidValue;
    }
    return p->dtype == DFLASH_FP16 ? launch_moe<__half>(*p, workspace, device, stream)
                                   : launch_moe<__nv_bfloat16>(*p, workspace, device, stream);
}
