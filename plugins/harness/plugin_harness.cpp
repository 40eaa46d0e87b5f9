// Runs the plugins as TensorRT would, without TensorRT: loads the library, asks its creator for a plugin, serializes
// its fields and makes it again from them, then calls the clone's own enqueue on the GPU. Everything is compared with a
// float64 computation on the host.
//
//   plugin_harness build/libdflash_plugin.so
#include "delta_net_cases.h"
#include "plugin_host.h"

#include <dlfcn.h>

#include <numeric>

using namespace host;

namespace
{

using host::compared;

struct Case
{
    char const* name;
    DataType type;
    int heads;
    int kv_heads;
    int size;
    int rows; // N
    int context_rows; // 0: a target's layer
    int window;
    bool has_norms;
    bool has_sinks;
    bool is_in_place;
    int page_rows = 0; // 0: linear caches
    int paths = 0; // R of a layer whose rows may be trees: as many as rows where they are; 0: of another
};

// The row of a row's parent in a slot's tree, which has branches on every level; of a run the row before.
int parent_of(Case const& c, int slot, int row)
{
    return c.paths == c.rows ? (row - 1) / (2 + slot % 2) : row - 1;
}

// The rows from the root to this one, itself included.
std::vector<int> path_of(Case const& c, int slot, int row)
{
    std::vector<int> path;
    for (; row > 0; row = parent_of(c, slot, row))
    {
        path.push_back(row);
    }
    path.push_back(0);
    std::reverse(path.begin(), path.end());
    return path;
}

// -- float64 ----------------------------------------------------------------------------------------------------------

struct Inputs
{
    int slots, length, positions, layers, index;
    std::vector<int32_t> start, committed;
    Bits qkv, keys, values, cos, sin, q_norm, k_norm, context;
    std::vector<float> sinks;
};

struct Expected
{
    std::vector<double> out, keys, values;
    std::vector<bool> is_written; // of cache rows [B, S]
};

constexpr double kEps = 1e-5;

std::vector<double> normed_and_rotated(
    std::vector<double> x, std::vector<double> const* weight, Inputs const& in, int position, DataType type)
{
    int const size = static_cast<int>(x.size());
    if (weight)
    {
        double squares = 0;
        for (double each : x)
        {
            squares += each * each;
        }
        double const root = std::sqrt(squares / size + kEps);
        for (int i = 0; i < size; ++i)
        {
            x[i] = x[i] / root * (*weight)[i];
        }
    }
    std::vector<double> y(size);
    for (int i = 0; i < size / 2; ++i)
    {
        double const c = decoded(in.cos[position * (size / 2) + i], type);
        double const s = decoded(in.sin[position * (size / 2) + i], type);
        y[i] = x[i] * c - x[i + size / 2] * s;
        y[i + size / 2] = x[i + size / 2] * c + x[i] * s;
    }
    return y;
}

Expected computed(Case const& c, Inputs const& in)
{
    Expected e{std::vector<double>(size_t(in.slots) * c.rows * c.heads * c.size), decoded(in.keys, c.type),
        decoded(in.values, c.type), std::vector<bool>(size_t(in.slots) * in.length)};
    auto const q_norm = decoded(in.q_norm, c.type);
    auto const k_norm = decoded(in.k_norm, c.type);
    auto const row_of = [&](Bits const& from, size_t first)
    { return decoded(Bits(from.begin() + first, from.begin() + first + c.size), c.type); };
    auto const cache_row = [&](int slot, int head, int position)
    { return ((size_t(slot) * c.kv_heads + head) * in.length + position) * c.size; };
    int const group = c.heads / c.kv_heads;
    for (int b = 0; b < in.slots; ++b)
    {
        auto const write = [&](int head, int position, std::vector<double> const& k, std::vector<double> const& v)
        {
            std::copy(k.begin(), k.end(), e.keys.begin() + cache_row(b, head, position));
            std::copy(v.begin(), v.end(), e.values.begin() + cache_row(b, head, position));
            e.is_written[size_t(b) * in.length + position] = true;
        };
        int const committed = c.context_rows ? in.committed[b] : 0;
        int const first = in.start[b] + committed;
        for (int i = 0; i < committed; ++i)
        {
            for (int h = 0; h < c.kv_heads; ++h)
            {
                size_t const row = (size_t(b) * c.context_rows + i) * in.layers * 2 * c.kv_heads * c.size
                    + size_t(in.index) * 2 * c.kv_heads * c.size;
                auto const k = row_of(in.context, row + size_t(h) * c.size);
                auto const v = row_of(in.context, row + size_t(c.kv_heads + h) * c.size);
                int const position = in.start[b] + i;
                write(h, position, normed_and_rotated(k, c.has_norms ? &k_norm : nullptr, in, position, c.type), v);
            }
        }
        for (int i = 0; i < c.rows; ++i)
        {
            size_t const row = (size_t(b) * c.rows + i) * (c.heads + 2 * c.kv_heads) * c.size;
            for (int h = 0; h < c.kv_heads; ++h)
            {
                auto const k = row_of(in.qkv, row + size_t(c.heads + h) * c.size);
                auto const v = row_of(in.qkv, row + size_t(c.heads + c.kv_heads + h) * c.size);
                int const position = first + static_cast<int>(path_of(c, b, i).size()) - 1;
                write(h, first + i, normed_and_rotated(k, c.has_norms ? &k_norm : nullptr, in, position, c.type), v);
            }
        }
        for (int i = 0; i < c.rows; ++i)
        {
            std::vector<int> const path = path_of(c, b, i);
            int const position = first + static_cast<int>(path.size()) - 1;
            for (int h = 0; h < c.heads; ++h)
            {
                size_t const row = (size_t(b) * c.rows + i) * (c.heads + 2 * c.kv_heads) * c.size;
                auto const q = normed_and_rotated(
                    row_of(in.qkv, row + size_t(h) * c.size), c.has_norms ? &q_norm : nullptr, in, position, c.type);
                // Of a tree the nth key behind the first row is the path's nth row.
                int const past = c.context_rows ? first + c.rows : position + 1;
                int const oldest = c.window ? std::max(0, (c.context_rows ? first + i : position) - c.window + 1) : 0;
                auto const place
                    = [&](int key) { return c.context_rows || key < first ? key : first + path[key - first]; };
                std::vector<double> weights(past);
                double top = c.has_sinks ? in.sinks[h] : -INFINITY;
                for (int key = oldest; key < past; ++key)
                {
                    double const* k = e.keys.data() + cache_row(b, h / group, place(key));
                    for (int d = 0; d < c.size; ++d)
                    {
                        weights[key] += q[d] * k[d];
                    }
                    weights[key] /= std::sqrt(double(c.size));
                    top = std::max(top, weights[key]);
                }
                double sum = c.has_sinks ? std::exp(in.sinks[h] - top) : 0;
                for (int key = oldest; key < past; ++key)
                {
                    weights[key] = std::exp(weights[key] - top);
                    sum += weights[key];
                }
                double* out = e.out.data() + ((size_t(b) * c.rows + i) * c.heads + h) * c.size;
                for (int key = oldest; key < past; ++key)
                {
                    double const* v = e.values.data() + cache_row(b, h / group, place(key));
                    for (int d = 0; d < c.size; ++d)
                    {
                        out[d] += weights[key] / sum * v[d];
                    }
                }
            }
        }
    }
    return e;
}

IPluginV3* created(IPluginCreatorV3One& creator, Case const& c, int index)
{
    int32_t const numbers[] = {c.heads, c.kv_heads, c.size, c.context_rows == 0, c.window, c.has_norms, c.has_sinks,
        c.paths > 0, c.context_rows ? index : -1, c.page_rows};
    char const* const names[] = {"heads", "kv_heads", "head_size", "causal", "window", "has_norms", "has_sinks",
        "has_tree", "context_index", "page_rows"};
    float const eps = static_cast<float>(kEps);
    std::vector<PluginField> fields;
    for (size_t i = 0; i < std::size(names); ++i)
    {
        fields.emplace_back(names[i], &numbers[i], PluginFieldType::kINT32, 1);
    }
    fields.emplace_back("norm_eps", &eps, PluginFieldType::kFLOAT32, 1);
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    return creator.createPlugin("layer", &collection, TensorRTPhase::kBUILD);
}

void check_output_shapes(IPluginCreatorV3One& creator)
{
    Case const c{"", DataType::kBF16, 6, 2, 64, 0, 0, 0, false, false, true};
    std::unique_ptr<IPluginV3> const plugin(created(creator, c, 0));
    auto* const build = static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    Sizes sizes;
    DimsExprs in[6] = {};
    DimsExprs out[3] = {};
    for (int i = 0; i < 6; ++i)
    {
        in[i].nbDims = i == 0 ? 3 : 4;
        for (int d = 0; d < in[i].nbDims; ++d)
        {
            in[i].d[d] = sizes.constant(10 * i + d);
        }
    }
    require(build->getOutputShapes(in, 6, nullptr, 0, out, 3, sizes) == 0, "getOutputShapes");
    require(out[0].nbDims == 3 && out[0].d[0] == in[0].d[0] && out[0].d[1] == in[0].d[1]
            && out[0].d[2]->getConstantValue() == 6 * 64,
        "the shape of attention's output");
    require(std::memcmp(&out[1], &in[2], sizeof in[2]) == 0 && std::memcmp(&out[2], &in[3], sizeof in[3]) == 0,
        "the shapes of the caches");
}

// -- a case -----------------------------------------------------------------------------------------------------------

Inputs inputs_of(Case const& c)
{
    Inputs in{};
    in.slots = 3;
    in.length = c.page_rows ? (400 + c.page_rows - 1) / c.page_rows * c.page_rows : 400;
    in.positions = 512;
    in.layers = 3;
    in.index = 1;
    in.start = {0, 65, 300};
    in.committed = {1, (c.context_rows + 1) / 2, c.context_rows};
    in.qkv = random_bits(size_t(in.slots) * c.rows * (c.heads + 2 * c.kv_heads) * c.size, c.type);
    in.keys = random_bits(size_t(in.slots) * c.kv_heads * in.length * c.size, c.type);
    in.values = random_bits(in.keys.size(), c.type);
    in.context = random_bits(size_t(in.slots) * c.context_rows * in.layers * 2 * c.kv_heads * c.size, c.type);
    in.q_norm = random_bits(c.size, c.type);
    in.k_norm = random_bits(c.size, c.type);
    for (int i = 0; i < in.positions * c.size / 2; ++i)
    {
        in.cos.push_back(encoded(std::cos(i * 0.37), c.type));
        in.sin.push_back(encoded(std::sin(i * 0.37), c.type));
    }
    for (int i = 0; i < c.heads; ++i)
    {
        in.sinks.push_back(0.5f * static_cast<float>(i % 5));
    }
    return in;
}

// Where the rows of linear caches [B, S] lie in those that the plugin is given: of slots, or of pages.
struct Layout
{
    int count; // slots, or pages: the first and the last are nobody's
    int rows; // of one
    int width; // of the table
    std::vector<int32_t> table; // [B, width]; past a slot's length no page that there is
};

Layout layout_of(Case const& c, Inputs const& in)
{
    if (c.page_rows == 0)
    {
        return {in.slots, in.length, 1, {0, 1, 2}};
    }
    int const width = in.length / c.page_rows;
    Layout layout{in.slots * width + 2, c.page_rows, width, std::vector<int32_t>(in.slots * width, -1)};
    std::vector<int32_t> pages(in.slots * width);
    std::iota(pages.begin(), pages.end(), 1);
    std::shuffle(pages.begin(), pages.end(), generator);
    for (int b = 0; b < in.slots; ++b)
    {
        int const length = in.start[b] + (c.context_rows ? in.committed[b] : 0) + c.rows;
        for (int nth = 0; nth * c.page_rows < length; ++nth)
        {
            layout.table[b * width + nth] = pages[b * width + nth];
        }
    }
    return layout;
}

// Calls copy(linear, placed, size) for each head's row that has a place: where its numbers begin in both.
template <typename Copy>
void for_rows(Case const& c, Inputs const& in, Layout const& layout, Copy copy)
{
    for (int b = 0; b < in.slots; ++b)
    {
        for (int position = 0; position < in.length; ++position)
        {
            int32_t const page = layout.table[b * layout.width + position / layout.rows];
            for (int h = 0; h < c.kv_heads && page >= 0; ++h)
            {
                size_t const linear = (size_t(b) * c.kv_heads + h) * in.length + position;
                size_t const placed = (size_t(page) * c.kv_heads + h) * layout.rows + position % layout.rows;
                copy(linear * c.size, placed * c.size, size_t(c.size));
            }
        }
    }
}

// A cache as the plugin is given it: what is nobody's are other numbers.
Bits placed(Case const& c, Inputs const& in, Layout const& layout, Bits const& linear)
{
    Bits cache = random_bits(size_t(layout.count) * c.kv_heads * layout.rows * c.size, c.type);
    for_rows(c, in, layout,
        [&](size_t from, size_t to, size_t size) { std::copy_n(linear.begin() + from, size, cache.begin() + to); });
    return cache;
}

std::vector<Tensor> tensors_of(Case const& c, Inputs const& in, Layout const& layout)
{
    std::vector<int64_t> const cache{layout.count, c.kv_heads, layout.rows, c.size};
    std::vector<Tensor> tensors{tensor(in.qkv, {in.slots, c.rows, int64_t(c.heads + 2 * c.kv_heads) * c.size}, c.type),
        tensor(in.start, {in.slots}, DataType::kINT32), tensor(placed(c, in, layout, in.keys), cache, c.type),
        tensor(placed(c, in, layout, in.values), cache, c.type), tensor(in.cos, {in.positions, c.size / 2}, c.type),
        tensor(in.sin, {in.positions, c.size / 2}, c.type)};
    if (c.has_norms)
    {
        tensors.push_back(tensor(in.q_norm, {c.size}, c.type));
        tensors.push_back(tensor(in.k_norm, {c.size}, c.type));
    }
    if (c.has_sinks)
    {
        tensors.push_back(tensor(in.sinks, {c.heads}, DataType::kFLOAT));
    }
    if (c.paths)
    {
        std::vector<int32_t> positions, words;
        for (int b = 0; b < in.slots; ++b)
        {
            for (int i = 0; i < c.rows; ++i)
            {
                positions.push_back(in.start[b] + static_cast<int>(path_of(c, b, i).size()) - 1);
            }
            for (int i = 0; i < c.paths; ++i)
            {
                uint64_t bits = 0;
                for (int row : path_of(c, b, i))
                {
                    bits |= uint64_t{1} << row;
                }
                words.push_back(static_cast<int32_t>(bits));
                words.push_back(static_cast<int32_t>(bits >> 32));
            }
        }
        tensors.push_back(tensor(positions, {in.slots, c.rows}, DataType::kINT32));
        tensors.push_back(tensor(words, {in.slots, c.paths, 2}, DataType::kINT32));
    }
    if (c.context_rows)
    {
        int64_t const width = int64_t(in.layers) * 2 * c.kv_heads * c.size;
        tensors.push_back(tensor(in.context, {in.slots, c.context_rows, width}, c.type));
        tensors.push_back(tensor(in.committed, {in.slots}, DataType::kINT32));
    }
    if (c.page_rows)
    {
        tensors.push_back(tensor(layout.table, {in.slots, layout.width}, DataType::kINT32));
    }
    return tensors;
}

// All that a case gives the plugin.
struct Call
{
    Case c;
    Inputs in;
    Layout layout;
    std::vector<Tensor> tensors;
    std::vector<PluginTensorDesc> descs;
    std::vector<PluginTensorDesc> out_descs;

    explicit Call(Case const& from)
        : c(from)
        , in(inputs_of(c))
        , layout(layout_of(c, in))
        , tensors(tensors_of(c, in, layout))
    {
        for (auto const& each : tensors)
        {
            descs.push_back(each.desc);
        }
        out_descs = {described({in.slots, c.rows, int64_t(c.heads) * c.size}, c.type), descs[2], descs[3]};
    }

    int32_t inputs() const
    {
        return static_cast<int32_t>(descs.size());
    }

    // Of inputs, then of outputs, as they are while a network is built.
    std::vector<DynamicPluginTensorDesc> dynamic() const
    {
        std::vector<DynamicPluginTensorDesc> all;
        for (std::vector<PluginTensorDesc> const& each : {descs, out_descs})
        {
            for (auto const& desc : each)
            {
                all.push_back({desc, desc.dims, desc.dims, desc.dims});
            }
        }
        return all;
    }
};

// Asks a plugin what TensorRT asks while it builds.
void check_build(IPluginV3& plugin, Call const& call)
{
    auto& build = capability_of<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
    int32_t const inputs = call.inputs();
    std::vector<DynamicPluginTensorDesc> dynamic = call.dynamic();
    for (int32_t i = 0; i < inputs + 3; ++i)
    {
        require(build.supportsFormatCombination(i, dynamic.data(), inputs, 3), "a format is refused");
        DataType const type = dynamic[i].desc.type;
        dynamic[i].desc.type = DataType::kINT8;
        require(!build.supportsFormatCombination(i, dynamic.data(), inputs, 3), "INT8 is accepted");
        dynamic[i].desc.type = type;
    }
    std::vector<DataType> types;
    for (auto const& desc : call.descs)
    {
        types.push_back(desc.type);
    }
    DataType out_types[3];
    require(build.getNbOutputs() == 3 && build.getOutputDataTypes(out_types, 3, types.data(), inputs) == 0
            && out_types[0] == call.c.type && out_types[1] == call.c.type,
        "output types");
    require(build.configurePlugin(dynamic.data(), inputs, dynamic.data() + inputs, 3) == 0, "configurePlugin");
    require(build.configurePlugin(dynamic.data(), inputs - 1, dynamic.data() + inputs, 3) != 0, "an input too few");
}

// Asks a plugin in an execution context for shapes: takes the call's, and no others.
void check_shapes(IPluginV3& attached, Call const& call)
{
    auto& runtime = capability_of<IPluginV3OneRuntime>(attached, PluginCapabilityType::kRUNTIME);
    auto const takes = [&](std::vector<PluginTensorDesc> const& descs)
    { return runtime.onShapeChange(descs.data(), call.inputs(), call.out_descs.data(), 3) == 0; };
    require(takes(call.descs), "onShapeChange");
    for (int32_t i : {2, call.inputs() - 1}) // keys; the last, which a page table is
    {
        for (int32_t d = 0; d < call.descs[i].dims.nbDims - 1; ++d)
        {
            std::vector<PluginTensorDesc> other = call.descs;
            ++other[i].dims.d[d];
            require(!takes(other), "input " + std::to_string(i) + " of another shape is accepted");
        }
    }
}

// -- on a GPU ---------------------------------------------------------------------------------------------------------

struct Found
{
    Bits out;
    Bits keys; // as they lie
    Bits values;
};

// Runs enqueue twice: as it is, and captured, as a session does: the same rows are written over themselves.
Found enqueued(IPluginV3& attached, Call const& call, size_t scratch)
{
    auto& runtime = capability_of<IPluginV3OneRuntime>(attached, PluginCapabilityType::kRUNTIME);
    std::vector<Buffer> buffers;
    std::vector<void const*> in_at;
    for (auto const& each : call.tensors)
    {
        buffers.push_back(on_device(each.bytes));
        in_at.push_back(buffers.back().get());
    }
    size_t const out_size = size_t(call.in.slots) * call.c.rows * call.c.heads * call.c.size;
    size_t const cache_bytes = call.tensors[2].bytes.size();
    Buffer const out = poisoned(out_size * 2);
    Buffer const other_keys = poisoned(cache_bytes);
    Buffer const other_values = poisoned(cache_bytes);
    void* const present_keys = call.c.is_in_place ? buffers[2].get() : other_keys.get();
    void* const present_values = call.c.is_in_place ? buffers[3].get() : other_values.get();
    void* const out_at[] = {out.get(), present_keys, present_values};
    Buffer const workspace = poisoned(scratch);
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    auto const enqueue = [&]()
    {
        return runtime.enqueue(call.descs.data(), call.out_descs.data(), in_at.data(), out_at, workspace.get(), stream);
    };
    require(enqueue() == 0, "enqueue");
    check(cudaStreamSynchronize(stream), "enqueue's kernels");

    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    require(enqueue() == 0, "enqueue while capturing");
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    Bits const eager = on_host(out.get(), out_size);
    check(cudaMemset(out.get(), 0xff, out_size * 2), "cudaMemset");
    check(cudaGraphLaunch(executable, stream), "replay");
    check(cudaStreamSynchronize(stream), "replay");
    require(on_host(out.get(), out_size) == eager, "the captured run differs");
    check(cudaGraphExecDestroy(executable), "destroy");
    check(cudaGraphDestroy(graph), "destroy");
    check(cudaStreamDestroy(stream), "destroy");
    return {eager, on_host(present_keys, cache_bytes / 2), on_host(present_values, cache_bytes / 2)};
}

// A cache as a linear one, in which rows that have no place are as before; what is nobody's must be so too.
Bits gathered(Call const& call, Tensor const& given, Bits const& linear, Bits cache)
{
    Bits before(cache.size());
    std::memcpy(before.data(), given.bytes.data(), given.bytes.size());
    Bits found = linear;
    for_rows(call.c, call.in, call.layout,
        [&](size_t to, size_t from, size_t size)
        {
            std::copy_n(cache.begin() + from, size, found.begin() + to);
            std::copy_n(before.begin() + from, size, cache.begin() + from);
        });
    require(cache == before, "a row that is nobody's was touched");
    return found;
}

// The relative error of attention.
double compared(Call const& call, Found const& found)
{
    Case const& c = call.c;
    Inputs const& in = call.in;
    Expected const expected = computed(c, in);
    double const tolerance = c.type == DataType::kHALF ? 2e-3 : 1.6e-2;
    double const error = compared(decoded(found.out, c.type), expected.out, tolerance, "attention");
    Bits const keys = gathered(call, call.tensors[2], in.keys, found.keys);
    Bits const values = gathered(call, call.tensors[3], in.values, found.values);
    compared(decoded(keys, c.type), expected.keys, tolerance, "keys");
    for (size_t i = 0; i < keys.size(); ++i)
    {
        size_t const row = i / c.size;
        size_t const slot = row / in.length / c.kv_heads;
        bool const is_written = expected.is_written[slot * in.length + row % in.length];
        require(is_written || (keys[i] == in.keys[i] && values[i] == in.values[i]), "a row was touched");
        require(values[i] == encoded(expected.values[i], c.type), "a value was not copied");
    }
    return error;
}

void check_case(IPluginCreatorV3One& creator, Case const& c, bool has_gpu)
{
    Call const call(c);
    std::unique_ptr<IPluginV3> const built(created(creator, c, call.in.index));
    require(built != nullptr, "no plugin was created");
    check_build(*built, call);
    std::unique_ptr<IPluginV3> const attached = loaded(creator, *built);
    check_shapes(*attached, call);
    if (!has_gpu)
    {
        return;
    }
    auto& build = capability_of<IPluginV3OneBuild>(*built, PluginCapabilityType::kBUILD);
    std::vector<DynamicPluginTensorDesc> const dynamic = call.dynamic();
    size_t const scratch = build.getWorkspaceSize(dynamic.data(), call.inputs(), dynamic.data() + call.inputs(), 3);
    require(scratch > 0, "getWorkspaceSize");
    double const error = compared(call, enqueued(*attached, call, scratch));
    std::printf("%-44s relative error %.1e, workspace %zu KB\n", c.name, error, scratch >> 10);
}

} // namespace

int main(int count, char** arguments)
{
    require(count == 2, "usage: plugin_harness libdflash_plugin.so");
    void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, library ? "" : dlerror());
    using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
    auto const get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    require(get_creators != nullptr && dlsym(library, "setLoggerFinder") != nullptr, "the library has no creators");
    int32_t count_of_creators = 0;
    IPluginCreatorInterface* const* const creators = get_creators(count_of_creators);
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[0]);
    require(count_of_creators == 2 && std::string(creator->getPluginName()) == "DFlashBlockAttention"
            && std::string(creator->getPluginVersion()) == "2" && std::string(creator->getPluginNamespace()) == "dflash"
            && creator->getFieldNames()->nbFields == 11,
        "the creator is another");
    int32_t const wrong = 5;
    PluginField const field("heads", &wrong, PluginFieldType::kINT32, 1);
    PluginFieldCollection const incomplete{1, &field};
    require(creator->createPlugin("layer", &incomplete, TensorRTPhase::kBUILD) == nullptr, "one field is enough");

    check_output_shapes(*creator);
    int gpus = 0;
    bool const has_gpu = cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0;
    constexpr DataType kBf16 = DataType::kBF16;
    constexpr DataType kHalf = DataType::kHALF;
    Case const cases[] = {
        {"verify, BF16, 32 heads on 8 of 128", kBf16, 32, 8, 128, 16, 0, 0, true, false, true},
        {"verify, FP16, 8 heads on 4 of 64", kHalf, 8, 4, 64, 8, 0, 0, true, false, true},
        {"verify, no norms (Llama)", kBf16, 8, 2, 128, 16, 0, 0, false, false, true},
        {"verify, window and sinks (gpt-oss)", kBf16, 16, 2, 64, 10, 0, 128, false, true, true},
        {"one row", kHalf, 8, 2, 128, 1, 0, 0, true, false, true},
        {"a chunk of 90 rows", kBf16, 8, 2, 64, 90, 0, 0, true, false, true},
        {"a chunk of 90 rows, window and sinks", kBf16, 16, 2, 64, 90, 0, 32, false, true, true},
        {"draft, BF16, 16 context rows", kBf16, 32, 8, 128, 16, 16, 0, true, false, true},
        {"draft, FP16, 70 context rows", kHalf, 8, 4, 64, 16, 70, 0, true, false, true},
        {"draft, window", kBf16, 8, 2, 64, 16, 16, 100, true, false, true},
        {"draft, present elsewhere than past", kBf16, 8, 2, 128, 16, 16, 0, true, false, false},
        {"verify, pages of 64", kBf16, 32, 8, 128, 16, 0, 0, true, false, true, 64},
        {"verify, pages of 128, window and sinks", kHalf, 16, 2, 64, 10, 0, 128, false, true, true, 128},
        {"verify, a page of 407 a slot", kBf16, 8, 2, 128, 16, 0, 0, true, false, true, 407},
        {"a chunk of 90 rows, pages of 64", kBf16, 8, 2, 64, 90, 0, 0, true, false, true, 64},
        {"draft, 16 context rows, pages of 64", kBf16, 8, 2, 128, 16, 16, 0, true, false, true, 64},
        {"draft, pages of 128, present elsewhere", kHalf, 8, 4, 64, 16, 70, 0, true, false, false, 128},
        {"a tree of 15", kBf16, 32, 8, 128, 16, 0, 0, true, false, true, 0, 16},
        {"a tree of 63, window and sinks", kHalf, 16, 2, 64, 64, 0, 128, false, true, true, 0, 64},
        {"a tree of 31, pages of 64", kBf16, 8, 2, 128, 32, 0, 0, true, false, true, 64, 32},
        {"a chunk of 90 rows, where rows may be trees", kBf16, 8, 2, 64, 90, 0, 0, true, false, true, 0, 1},
    };
    for (auto const& each : cases)
    {
        check_case(*creator, each, has_gpu);
    }
    size_t const all = std::size(cases) + check_delta_nets(*static_cast<IPluginCreatorV3One*>(creators[1]), has_gpu);
    if (!has_gpu)
    {
        std::printf("no GPU: %zu plugins were created, not run\n", all);
        return 0;
    }
    std::printf("all %zu cases equal float64\n", all);
    return 0;
}
