#include "block_attention_plugin.h"

#include "tree_segments.h"

#include <algorithm>
#include <cstring>
#include <new>

using namespace nvinfer1;

namespace dflash
{
namespace
{

enum Input : int32_t
{
    kQkv,
    kStart,
    kPastKey,
    kPastValue,
    kCos,
    kSin,
    kAlwaysThere,
    kMostInputs = kAlwaysThere + 8
};

enum Output : int32_t
{
    kAttention,
    kPresentKey,
    kPresentValue,
    kOutputs
};

constexpr int64_t kPageTile = 64; // rows of which a page has a whole number, where a slot has several

// Every setting by name; `settings` may be null where only names are asked for.
BlockAttentionFields fields_of(BlockAttentionSettings const* s)
{
    auto const number = [&](char const* name, int32_t const BlockAttentionSettings::* member)
    { return PluginField(name, s ? &(s->*member) : nullptr, PluginFieldType::kINT32, 1); };
    using S = BlockAttentionSettings;
    return {number("heads", &S::heads), number("kv_heads", &S::kv_heads), number("head_size", &S::head_size),
        number("causal", &S::causal), number("window", &S::window), number("has_norms", &S::has_norms),
        number("has_sinks", &S::has_sinks), number("has_tree", &S::has_tree),
        number("context_index", &S::context_index), number("page_rows", &S::page_rows),
        PluginField("norm_eps", s ? &s->norm_eps : nullptr, PluginFieldType::kFLOAT32, 1)};
}

// False where a field is unknown, of another type, or the settings make no sense.
bool read_fields(PluginFieldCollection const& from, BlockAttentionSettings& to)
{
    auto const known = fields_of(&to);
    for (int32_t i = 0; i < from.nbFields; ++i)
    {
        PluginField const& field = from.fields[i];
        auto const found = std::find_if(
            known.begin(), known.end(), [&](PluginField const& k) { return std::strcmp(k.name, field.name) == 0; });
        if (found == known.end() || found->type != field.type || field.length != 1 || !field.data)
        {
            return false;
        }
        std::memcpy(const_cast<void*>(found->data), field.data, sizeof(int32_t));
    }
    return to.heads > 0 && to.kv_heads > 0 && to.heads % to.kv_heads == 0 && to.window >= 0 && to.page_rows >= 0
        && (to.head_size == 64 || to.head_size == 128) && (!to.has_tree || (to.causal && to.context_index < 0));
}

size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

// Of a tree's segments, and of the segment of each row; a call's rows are not one where they are more.
size_t segments_bytes(int32_t slots, int32_t rows)
{
    return aligned(size_t{16} * slots) + aligned(size_t{4} * slots * std::min(rows, DFLASH_TREE_MOST_ROWS));
}

int32_t dtype_of(PluginTensorDesc const& tensor)
{
    return tensor.type == DataType::kHALF ? DFLASH_FP16 : DFLASH_BF16;
}

int64_t volume(Dims const& dims)
{
    int64_t size = 1;
    for (int32_t i = 0; i < dims.nbDims; ++i)
    {
        size *= dims.d[i];
    }
    return size;
}

} // namespace

// -- the object -------------------------------------------------------------------------------------------------------

BlockAttentionPlugin::BlockAttentionPlugin(BlockAttentionSettings const& settings)
    : settings_(settings)
    , fields_(fields_of(&settings_))
    , serialized_{static_cast<int32_t>(fields_.size()), fields_.data()}
{
}

IPluginCapability* BlockAttentionPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* BlockAttentionPlugin::clone() noexcept
{
    return new (std::nothrow) BlockAttentionPlugin(*this);
}

AsciiChar const* BlockAttentionPlugin::getPluginName() const noexcept
{
    return kPluginName;
}

AsciiChar const* BlockAttentionPlugin::getPluginVersion() const noexcept
{
    return kPluginVersion;
}

AsciiChar const* BlockAttentionPlugin::getPluginNamespace() const noexcept
{
    return kPluginNamespace;
}

int32_t BlockAttentionPlugin::norms_at() const
{
    return settings_.has_norms ? static_cast<int32_t>(kAlwaysThere) : -1;
}

int32_t BlockAttentionPlugin::sinks_at() const
{
    return settings_.has_sinks ? kAlwaysThere + 2 * (settings_.has_norms != 0) : -1;
}

int32_t BlockAttentionPlugin::tree_at() const
{
    return settings_.has_tree ? kAlwaysThere + 2 * (settings_.has_norms != 0) + (settings_.has_sinks != 0) : -1;
}

int32_t BlockAttentionPlugin::context_at() const
{
    return settings_.context_index >= 0 ? kAlwaysThere + 2 * (settings_.has_norms != 0) + (settings_.has_sinks != 0)
                                        : -1;
}

int32_t BlockAttentionPlugin::table_at() const
{
    return settings_.page_rows > 0 ? input_count() - 1 : -1;
}

int32_t BlockAttentionPlugin::input_count() const
{
    return kAlwaysThere + 2 * (settings_.has_norms != 0) + (settings_.has_sinks != 0) + 2 * (settings_.has_tree != 0)
        + 2 * (settings_.context_index >= 0) + (settings_.page_rows > 0);
}

// -- build ------------------------------------------------------------------------------------------------------------

int32_t BlockAttentionPlugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*, int32_t outputs) noexcept
{
    bool const is_right = inputs == input_count() && outputs == kOutputs && in[kQkv].desc.dims.nbDims == 3
        && in[kPastKey].desc.dims.nbDims == 4 && (table_at() < 0 || in[table_at()].desc.dims.nbDims == 2);
    return is_right ? 0 : -1;
}

int32_t BlockAttentionPlugin::getOutputDataTypes(
    DataType* to, int32_t outputs, DataType const* from, int32_t inputs) const noexcept
{
    if (inputs != input_count() || outputs != kOutputs)
    {
        return -1;
    }
    to[kAttention] = from[kQkv];
    to[kPresentKey] = from[kPastKey];
    to[kPresentValue] = from[kPastValue];
    return 0;
}

int32_t BlockAttentionPlugin::getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const*, int32_t,
    DimsExprs* out, int32_t outputs, IExprBuilder& builder) noexcept
{
    if (inputs != input_count() || outputs != kOutputs)
    {
        return -1;
    }
    out[kAttention].nbDims = 3;
    out[kAttention].d[0] = in[kQkv].d[0];
    out[kAttention].d[1] = in[kQkv].d[1];
    out[kAttention].d[2] = builder.constant(int64_t{settings_.heads} * settings_.head_size);
    out[kPresentKey] = in[kPastKey];
    out[kPresentValue] = in[kPastValue];
    return 0;
}

bool BlockAttentionPlugin::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* in_out, int32_t inputs, int32_t outputs) noexcept
{
    if (inputs != input_count() || outputs != kOutputs || in_out[position].desc.format != TensorFormat::kLINEAR)
    {
        return false;
    }
    DataType const type = in_out[position].desc.type;
    bool const is_of_tree = tree_at() >= 0 && (position == tree_at() || position == tree_at() + 1);
    if (position == kStart || position == table_at() || is_of_tree
        || (context_at() >= 0 && position == context_at() + 1))
    {
        return type == DataType::kINT32;
    }
    if (position == sinks_at())
    {
        return type == DataType::kFLOAT;
    }
    return position == kQkv ? type == DataType::kHALF || type == DataType::kBF16 : type == in_out[kQkv].desc.type;
}

int32_t BlockAttentionPlugin::getNbOutputs() const noexcept
{
    return kOutputs;
}

dflash_attention_params BlockAttentionPlugin::attention(PluginTensorDesc const* in) const
{
    Dims const& qkv = in[kQkv].dims;
    Dims const& cache = in[kPastKey].dims;
    int64_t const size = settings_.head_size;
    dflash_attention_params p = {};
    p.dtype = dtype_of(in[kQkv]);
    p.slots = static_cast<int32_t>(qkv.d[0]);
    p.rows = static_cast<int32_t>(qkv.d[1]);
    p.heads = settings_.heads;
    p.kv_heads = settings_.kv_heads;
    p.head_size = settings_.head_size;
    p.cache_rows = static_cast<int32_t>(cache.d[2]);
    p.causal = settings_.causal;
    p.window = settings_.window;
    p.length_offset = p.rows;
    p.sinks_dtype = DFLASH_FP32;
    p.scale = size == 64 ? 0.125f : 0.08838834764831845f; // 1 / sqrt(D)
    p.q_slot_stride = int64_t{p.rows} * p.heads * size;
    p.q_row_stride = p.heads * size;
    p.q_head_stride = size;
    p.cache_slot_stride = int64_t{p.kv_heads} * cache.d[2] * size;
    p.cache_head_stride = cache.d[2] * size;
    if (table_at() >= 0)
    {
        p.page_table_stride = in[table_at()].dims.d[1];
        p.page_rows = settings_.page_rows;
        p.pages = static_cast<int32_t>(cache.d[0]);
        p.cache_rows = static_cast<int32_t>(p.page_table_stride) * p.page_rows;
    }
    return p;
}

// The rotated queries, then what attention needs for any number of rows up to the largest: fewer rows are divided
// differently, and may need more.
size_t BlockAttentionPlugin::getWorkspaceSize(
    DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*, int32_t) const noexcept
{
    if (inputs != input_count())
    {
        return 0;
    }
    PluginTensorDesc largest[kMostInputs];
    for (int32_t i = 0; i < inputs; ++i)
    {
        largest[i] = in[i].desc;
        largest[i].dims = in[i].max;
    }
    dflash_attention_params p = attention(largest);
    size_t const queries = aligned(size_t{2} * p.slots * p.q_slot_stride);
    size_t most = 0;
    for (int32_t rows = p.rows; rows > 0; --rows)
    {
        p.rows = rows;
        size_t bytes = 0;
        if (dflash_attention_workspace(&p, &bytes) != cudaSuccess)
        {
            return 0;
        }
        most = std::max(most, bytes);
    }
    auto const rows = static_cast<int32_t>(largest[kQkv].dims.d[1]);
    return queries + most + (settings_.has_tree ? segments_bytes(p.slots, rows) : 0);
}

// -- run --------------------------------------------------------------------------------------------------------------

bool BlockAttentionPlugin::has_shapes(PluginTensorDesc const* in, int32_t inputs) const
{
    BlockAttentionSettings const& s = settings_;
    Dims const& qkv = in[kQkv].dims;
    Dims const& cos = in[kCos].dims;
    bool is_right = inputs == input_count() && qkv.nbDims == 3 && cos.nbDims == 2
        && qkv.d[2] == int64_t{s.heads + 2 * s.kv_heads} * s.head_size && cos.d[1] * 2 == s.head_size
        && volume(cos) == volume(in[kSin].dims) && volume(in[kStart].dims) == qkv.d[0] && has_cache_shapes(in);
    if (is_right && context_at() >= 0)
    {
        Dims const& context = in[context_at()].dims;
        int64_t const layer = int64_t{2} * s.kv_heads * s.head_size;
        is_right = context.nbDims == 3 && context.d[0] == qkv.d[0] && context.d[2] % layer == 0
            && context.d[2] / layer > s.context_index && volume(in[context_at() + 1].dims) == qkv.d[0];
    }
    if (is_right && tree_at() >= 0)
    {
        Dims const& paths = in[tree_at() + 1].dims;
        is_right = volume(in[tree_at()].dims) == qkv.d[0] * qkv.d[1] && paths.nbDims == 3 && paths.d[0] == qkv.d[0]
            && paths.d[2] == 2 && (paths.d[1] == 1 || is_tree(in));
    }
    return is_right;
}

// Whether a call's rows are trees: a prompt has one path, of its last row.
bool BlockAttentionPlugin::is_tree(PluginTensorDesc const* in) const
{
    int64_t const rows = in[kQkv].dims.d[1];
    return tree_at() >= 0 && in[tree_at() + 1].dims.d[1] == rows && rows <= DFLASH_TREE_MOST_ROWS;
}

bool BlockAttentionPlugin::has_cache_shapes(PluginTensorDesc const* in) const
{
    int64_t const slots = in[kQkv].dims.d[0];
    Dims const& key = in[kPastKey].dims;
    if (key.nbDims != 4 || key.d[1] != settings_.kv_heads || key.d[3] != settings_.head_size
        || volume(key) != volume(in[kPastValue].dims))
    {
        return false;
    }
    if (table_at() < 0)
    {
        return key.d[0] == slots;
    }
    Dims const& table = in[table_at()].dims;
    int64_t const rows = settings_.page_rows;
    return table.nbDims == 2 && table.d[0] == slots && key.d[0] > 0 && key.d[2] == rows
        && (rows % kPageTile == 0 || table.d[1] == 1);
}

int32_t BlockAttentionPlugin::onShapeChange(
    PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*, int32_t outputs) noexcept
{
    return outputs == kOutputs && has_shapes(in, inputs) ? 0 : -1;
}

int32_t BlockAttentionPlugin::enqueue(PluginTensorDesc const* in, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    if (!has_shapes(in, input_count()))
    {
        return cudaErrorInvalidValue;
    }
    // At one address in every engine of ours. Elsewhere only while TensorRT times its layers, or in a program that
    // binds other buffers: right, and as slow as a copy of the whole cache.
    for (int32_t i = 0; i < 2; ++i)
    {
        if (outputs[kPresentKey + i] != inputs[kPastKey + i])
        {
            size_t const bytes = size_t{2} * volume(in[kPastKey + i].dims);
            cudaError_t const error = cudaMemcpyAsync(
                outputs[kPresentKey + i], inputs[kPastKey + i], bytes, cudaMemcpyDeviceToDevice, stream);
            if (error != cudaSuccess)
            {
                return error;
            }
        }
    }

    dflash_attention_params p = attention(in);
    int32_t const* start = static_cast<int32_t const*>(inputs[kStart]);
    int32_t const* committed = nullptr;

    dflash_append_params append = {};
    append.dtype = p.dtype;
    append.slots = p.slots;
    append.rows = p.rows;
    append.heads = p.heads;
    append.kv_heads = p.kv_heads;
    append.head_size = p.head_size;
    append.cache_rows = p.cache_rows;
    append.positions = static_cast<int32_t>(in[kCos].dims.d[0]);
    append.norm_eps = settings_.norm_eps;
    append.qkv = inputs[kQkv];
    append.qkv_row_stride = in[kQkv].dims.d[2];
    append.qkv_slot_stride = append.qkv_row_stride * p.rows;
    if (norms_at() >= 0)
    {
        append.q_norm = inputs[norms_at()];
        append.k_norm = inputs[norms_at() + 1];
    }
    append.cos = inputs[kCos];
    append.sin = inputs[kSin];
    append.start = start;
    if (context_at() >= 0)
    {
        Dims const& context = in[context_at()].dims;
        int64_t const half = int64_t{p.kv_heads} * p.head_size;
        uint16_t const* first
            = static_cast<uint16_t const*>(inputs[context_at()]) + 2 * half * settings_.context_index; // of K, then V
        append.context_rows = static_cast<int32_t>(context.d[1]);
        append.context_k = first;
        append.context_v = first + half;
        append.context_row_stride = context.d[2];
        append.context_slot_stride = context.d[1] * context.d[2];
        committed = static_cast<int32_t const*>(inputs[context_at() + 1]);
        append.committed = committed;
    }
    cudaError_t error = cudaSuccess;
    char* scratch = static_cast<char*>(workspace) + aligned(size_t{2} * p.slots * p.q_slot_stride);
    if (is_tree(in))
    {
        // As flat rows, of a segment a slot.
        auto* const segments = reinterpret_cast<int32_t*>(scratch);
        int32_t* const row_segment = segments + aligned(size_t{16} * p.slots) / sizeof(int32_t);
        scratch += segments_bytes(p.slots, p.rows);
        error = make_tree_segments(start, p.slots, p.rows, segments, row_segment, stream);
        append.segments = p.segments = segments;
        append.row_segment = row_segment;
        append.row_position = static_cast<int32_t const*>(inputs[tree_at()]);
        append.rows = p.slots * p.rows;
        append.out = outputs[kAttention];
        p.row_path = static_cast<uint64_t const*>(inputs[tree_at() + 1]);
        p.pages = table_at() >= 0 ? p.pages : p.slots;
    }
    append.q_out = workspace;
    append.keys = outputs[kPresentKey];
    append.values = outputs[kPresentValue];
    append.cache_slot_stride = p.cache_slot_stride;
    append.cache_head_stride = p.cache_head_stride;
    if (table_at() >= 0)
    {
        p.page_table = static_cast<int32_t const*>(inputs[table_at()]);
        append.page_table = p.page_table;
        append.page_table_stride = p.page_table_stride;
        append.page_rows = p.page_rows;
    }
    error = error == cudaSuccess ? dflash_append(&append, stream) : error;
    if (error != cudaSuccess)
    {
        return error;
    }

    p.q = workspace;
    p.keys = outputs[kPresentKey];
    p.values = outputs[kPresentValue];
    p.lengths = start;
    p.added = committed;
    p.sinks = sinks_at() >= 0 ? inputs[sinks_at()] : nullptr;
    p.out = outputs[kAttention];
    size_t bytes = 0;
    error = dflash_attention_workspace(&p, &bytes);
    if (error != cudaSuccess)
    {
        return error;
    }
    return dflash_attention(&p, scratch, bytes, stream);
}

IPluginV3* BlockAttentionPlugin::attachToContext(IPluginResourceContext*) noexcept
{
    return clone();
}

PluginFieldCollection const* BlockAttentionPlugin::getFieldsToSerialize() noexcept
{
    return &serialized_;
}

// -- the creator ------------------------------------------------------------------------------------------------------

BlockAttentionCreator::BlockAttentionCreator()
    : fields_(fields_of(nullptr))
    , names_{static_cast<int32_t>(fields_.size()), fields_.data()}
{
}

IPluginV3* BlockAttentionCreator::createPlugin(
    AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept
{
    BlockAttentionSettings settings;
    return fields && read_fields(*fields, settings) ? new (std::nothrow) BlockAttentionPlugin(settings) : nullptr;
}

PluginFieldCollection const* BlockAttentionCreator::getFieldNames() noexcept
{
    return &names_;
}

AsciiChar const* BlockAttentionCreator::getPluginName() const noexcept
{
    return kPluginName;
}

AsciiChar const* BlockAttentionCreator::getPluginVersion() const noexcept
{
    return kPluginVersion;
}

AsciiChar const* BlockAttentionCreator::getPluginNamespace() const noexcept
{
    return kPluginNamespace;
}

} // namespace dflash
