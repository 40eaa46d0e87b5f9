#include "delta_net_plugin.h"

#include "block_attention_plugin.h"
#include "delta_segments.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <new>

using namespace nvinfer1;

namespace dflash
{
namespace
{

enum Input : int32_t
{
    kX,
    kGates,
    kStart,
    kRowCount,
    kStateLength,
    kConv,
    kALog,
    kDtBias,
    kNorm,
    kPastState,
    kPastWrites,
    kPastKeys,
    kPastDecays,
    kPastWindow,
    kInputs
};

constexpr int32_t kParts = kInputs - kPastState; // of what is kept of a slot
constexpr int32_t kOut = 0;
constexpr int32_t kPresent = 1; // the first of the parts, among outputs
constexpr int32_t kOutputs = kPresent + kParts;

constexpr int64_t kTaps = 4;
constexpr int64_t kMostPending = 16;

// Every setting by name; `settings` may be null where only names are asked for.
DeltaNetFields fields_of(DeltaNetSettings const* s)
{
    auto const number = [&](char const* name, int32_t const DeltaNetSettings::* member)
    { return PluginField(name, s ? &(s->*member) : nullptr, PluginFieldType::kINT32, 1); };
    using S = DeltaNetSettings;
    return {number("key_heads", &S::key_heads), number("value_heads", &S::value_heads),
        number("head_size", &S::head_size),
        PluginField("norm_eps", s ? &s->norm_eps : nullptr, PluginFieldType::kFLOAT32, 1)};
}

// False where a field is unknown, of another type, or the settings make no sense.
bool read_fields(PluginFieldCollection const& from, DeltaNetSettings& to)
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
    bool const is_known_size = to.head_size == 16 || to.head_size == 32 || to.head_size == 64 || to.head_size == 128;
    return to.key_heads > 0 && to.value_heads > 0 && to.value_heads % to.key_heads == 0 && is_known_size;
}

size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

int32_t dtype_of(PluginTensorDesc const& tensor)
{
    switch (tensor.type)
    {
    case DataType::kHALF: return DFLASH_FP16;
    case DataType::kBF16: return DFLASH_BF16;
    default: return DFLASH_FP32;
    }
}

size_t bytes_of(PluginTensorDesc const& tensor)
{
    size_t bytes = tensor.type == DataType::kFLOAT ? 4 : 2;
    for (int32_t i = 0; i < tensor.dims.nbDims; ++i)
    {
        bytes *= tensor.dims.d[i];
    }
    return bytes;
}

bool is_shape(PluginTensorDesc const& tensor, std::initializer_list<int64_t> sizes)
{
    return tensor.dims.nbDims == static_cast<int32_t>(sizes.size())
        && std::equal(sizes.begin(), sizes.end(), tensor.dims.d);
}

} // namespace

// -- the object -------------------------------------------------------------------------------------------------------

DeltaNetPlugin::DeltaNetPlugin(DeltaNetSettings const& settings)
    : settings_(settings)
    , fields_(fields_of(&settings_))
    , serialized_{static_cast<int32_t>(fields_.size()), fields_.data()}
{
}

IPluginCapability* DeltaNetPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* DeltaNetPlugin::clone() noexcept
{
    return new (std::nothrow) DeltaNetPlugin(*this);
}

AsciiChar const* DeltaNetPlugin::getPluginName() const noexcept
{
    return kDeltaNetName;
}

AsciiChar const* DeltaNetPlugin::getPluginVersion() const noexcept
{
    return kDeltaNetVersion;
}

AsciiChar const* DeltaNetPlugin::getPluginNamespace() const noexcept
{
    return kPluginNamespace;
}

// -- build ------------------------------------------------------------------------------------------------------------

int32_t DeltaNetPlugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*, int32_t outputs) noexcept
{
    bool const is_right = inputs == kInputs && outputs == kOutputs && in[kX].desc.dims.nbDims == 3
        && in[kPastWrites].desc.dims.nbDims == 4 && in[kPastWrites].desc.dims.d[1] <= kMostPending;
    return is_right ? 0 : -1;
}

int32_t DeltaNetPlugin::getOutputDataTypes(
    DataType* to, int32_t outputs, DataType const* from, int32_t inputs) const noexcept
{
    if (inputs != kInputs || outputs != kOutputs)
    {
        return -1;
    }
    to[kOut] = from[kX];
    std::copy_n(from + kPastState, kParts, to + kPresent);
    return 0;
}

int32_t DeltaNetPlugin::getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const*, int32_t, DimsExprs* out,
    int32_t outputs, IExprBuilder& builder) noexcept
{
    if (inputs != kInputs || outputs != kOutputs)
    {
        return -1;
    }
    out[kOut].nbDims = 3;
    out[kOut].d[0] = in[kX].d[0];
    out[kOut].d[1] = in[kX].d[1];
    out[kOut].d[2] = builder.constant(int64_t{settings_.value_heads} * settings_.head_size);
    std::copy_n(in + kPastState, kParts, out + kPresent);
    return 0;
}

bool DeltaNetPlugin::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* in_out, int32_t inputs, int32_t outputs) noexcept
{
    if (inputs != kInputs || outputs != kOutputs || in_out[position].desc.format != TensorFormat::kLINEAR)
    {
        return false;
    }
    DataType const type = in_out[position].desc.type;
    int32_t const input = position >= kInputs + kPresent ? position - kInputs - kPresent + kPastState : position;
    switch (input)
    {
    case kX: return type == DataType::kHALF || type == DataType::kBF16 || type == DataType::kFLOAT;
    case kStart:
    case kRowCount:
    case kStateLength: return type == DataType::kINT32;
    case kGates:
    case kConv:
    case kPastWindow:
    case kInputs: return type == in_out[kX].desc.type; // the last is `out`
    default: return type == DataType::kFLOAT;
    }
}

int32_t DeltaNetPlugin::getNbOutputs() const noexcept
{
    return kOutputs;
}

// The segments, then the counters, then what nets need beside them.
size_t DeltaNetPlugin::getWorkspaceSize(
    DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*, int32_t) const noexcept
{
    if (inputs != kInputs)
    {
        return 0;
    }
    int32_t const slots = static_cast<int32_t>(in[kX].max.d[0]), rows = static_cast<int32_t>(in[kX].max.d[1]);
    size_t needed = 0;
    int32_t const pending = static_cast<int32_t>(in[kPastWrites].min.d[1]); // with fewer, more rows are a prompt's
    dflash_delta_net_params const p = sizes(slots, rows, pending);
    return dflash_delta_net_workspace(&p, &needed) == cudaSuccess ? places(slots).scratch + needed : 0;
}

// Where each lies in the workspace.
DeltaNetPlugin::Places DeltaNetPlugin::places(size_t slots) const
{
    size_t const counters = aligned(slots * 4 * sizeof(int32_t));
    return {counters, counters + aligned(slots * settings_.key_heads * sizeof(int32_t))};
}

dflash_delta_net_params DeltaNetPlugin::sizes(int32_t slots, int32_t rows, int32_t pending) const
{
    dflash_delta_net_params p = {};
    p.segment_count = slots;
    p.rows = slots * rows;
    p.key_heads = settings_.key_heads;
    p.value_heads = settings_.value_heads;
    p.head_size = settings_.head_size;
    p.kernel = kTaps;
    p.pending = pending;
    p.slots = slots;
    p.most_rows = rows;
    p.norm_eps = settings_.norm_eps;
    return p;
}

// -- run --------------------------------------------------------------------------------------------------------------

bool DeltaNetPlugin::has_shapes(PluginTensorDesc const* in) const
{
    int64_t const keys = settings_.key_heads, values = settings_.value_heads, size = settings_.head_size;
    int64_t const channels = (2 * keys + values) * size;
    if (in[kX].dims.nbDims != 3 || in[kPastWrites].dims.nbDims != 4)
    {
        return false;
    }
    int64_t const slots = in[kX].dims.d[0], rows = in[kX].dims.d[1], pending = in[kPastWrites].dims.d[1];
    bool is_right = pending > 0 && pending <= kMostPending && is_shape(in[kX], {slots, rows, channels + values * size})
        && is_shape(in[kGates], {slots, rows, 2 * values}) && is_shape(in[kConv], {channels, kTaps})
        && is_shape(in[kALog], {values}) && is_shape(in[kDtBias], {values}) && is_shape(in[kNorm], {size});
    for (int32_t i : {kStart, kRowCount, kStateLength})
    {
        is_right = is_right && is_shape(in[i], {slots});
    }
    return is_right && is_shape(in[kPastState], {slots, values, size, size})
        && is_shape(in[kPastWrites], {slots, pending, values, size})
        && is_shape(in[kPastKeys], {slots, pending, keys, size}) && is_shape(in[kPastDecays], {slots, pending, values})
        && is_shape(in[kPastWindow], {slots, kTaps - 1 + pending, channels});
}

int32_t DeltaNetPlugin::onShapeChange(
    PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*, int32_t outputs) noexcept
{
    return inputs == kInputs && outputs == kOutputs && has_shapes(in) ? 0 : -1;
}

int32_t DeltaNetPlugin::enqueue(PluginTensorDesc const* in, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    if (!has_shapes(in))
    {
        return cudaErrorInvalidValue;
    }
    // At one address in every engine of ours. Elsewhere only while TensorRT times its layers, or in a program that
    // binds other buffers: right, and as slow as a copy of all states.
    for (int32_t i = 0; i < kParts; ++i)
    {
        if (outputs[kPresent + i] != inputs[kPastState + i])
        {
            cudaError_t const error = cudaMemcpyAsync(outputs[kPresent + i], inputs[kPastState + i],
                bytes_of(in[kPastState + i]), cudaMemcpyDeviceToDevice, stream);
            if (error != cudaSuccess)
            {
                return error;
            }
        }
    }
    int32_t const slots = static_cast<int32_t>(in[kX].dims.d[0]), rows = static_cast<int32_t>(in[kX].dims.d[1]);
    dflash_delta_net_params p = sizes(slots, rows, static_cast<int32_t>(in[kPastWrites].dims.d[1]));
    size_t needed = 0;
    cudaError_t error = dflash_delta_net_workspace(&p, &needed);
    if (error != cudaSuccess)
    {
        return error;
    }
    char* const bytes = static_cast<char*>(workspace);
    int32_t* const segments = reinterpret_cast<int32_t*>(bytes);
    int32_t* const counters = reinterpret_cast<int32_t*>(bytes + places(slots).counters);
    error = make_delta_segments(static_cast<int32_t const*>(inputs[kStart]),
        static_cast<int32_t const*>(inputs[kRowCount]), slots, rows, segments, counters, slots * settings_.key_heads,
        stream);
    if (error != cudaSuccess)
    {
        return error;
    }
    p.dtype = dtype_of(in[kX]);
    p.segments = segments;
    p.lengths = static_cast<int32_t const*>(inputs[kStateLength]);
    p.x = inputs[kX];
    p.gates = inputs[kGates];
    p.conv = inputs[kConv];
    p.a_log = inputs[kALog];
    p.dt_bias = inputs[kDtBias];
    p.norm = inputs[kNorm];
    p.states = outputs[kPresent];
    p.writes = outputs[kPresent + kPastWrites - kPastState];
    p.keys = outputs[kPresent + kPastKeys - kPastState];
    p.decays = outputs[kPresent + kPastDecays - kPastState];
    p.window = outputs[kPresent + kPastWindow - kPastState];
    p.counters = counters;
    p.out = outputs[kOut];
    p.x_row_stride = in[kX].dims.d[2];
    p.gates_row_stride = in[kGates].dims.d[2];
    return dflash_delta_net(&p, bytes + places(slots).scratch, needed, stream);
}

IPluginV3* DeltaNetPlugin::attachToContext(IPluginResourceContext*) noexcept
{
    return clone();
}

PluginFieldCollection const* DeltaNetPlugin::getFieldsToSerialize() noexcept
{
    return &serialized_;
}

// -- the creator ------------------------------------------------------------------------------------------------------

DeltaNetCreator::DeltaNetCreator()
    : fields_(fields_of(nullptr))
    , names_{static_cast<int32_t>(fields_.size()), fields_.data()}
{
}

IPluginV3* DeltaNetCreator::createPlugin(AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept
{
    DeltaNetSettings settings;
    return fields && read_fields(*fields, settings) ? new (std::nothrow) DeltaNetPlugin(settings) : nullptr;
}

PluginFieldCollection const* DeltaNetCreator::getFieldNames() noexcept
{
    return &names_;
}

AsciiChar const* DeltaNetCreator::getPluginName() const noexcept
{
    return kDeltaNetName;
}

AsciiChar const* DeltaNetCreator::getPluginVersion() const noexcept
{
    return kDeltaNetVersion;
}

AsciiChar const* DeltaNetCreator::getPluginNamespace() const noexcept
{
    return kPluginNamespace;
}

} // namespace dflash
