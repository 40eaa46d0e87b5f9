// TensorRT plugin "DFlashDeltaNet": a layer's gated delta net, from its convolution to its gated norm.
#pragma once

#include "dflash_kernels.h"

#include <NvInferRuntime.h>

#include <array>

namespace dflash
{

constexpr char const* kDeltaNetName = "DFlashDeltaNet";
constexpr char const* kDeltaNetVersion = "3";

// The plugin's attributes; each is a field of its creator, of one number.
struct DeltaNetSettings
{
    int32_t key_heads = 0; // Hk
    int32_t value_heads = 0; // Hv, a multiple of Hk
    int32_t head_size = 0; // D, of keys and values
    float norm_eps = 0.f;
};

using DeltaNetFields = std::array<nvinfer1::PluginField, 4>;

// Inputs, in this order (B slots, N rows, C = (2 Hk + Hv) * D channels, P rows that may be pending):
//   x             [B, N, C + Hv * D]      queries, keys and values, then output gates
//   gates         [B, N, 2 Hv]            how much each value head writes, then how much it forgets
//   start         [B] int32               position of row 0
//   row_count     [B] int32               rows that are real; 0: the slot takes no part, and keeps all as it is
//   state_length  [B] int32               position in front of which the slot's state stands
//   conv          [C, 4]
//   a_log, dt_bias  [Hv] float
//   norm          [D] float
//   past_state    [B, Hv, D values, D keys] float
//   past_writes   [B, P, Hv, D] float
//   past_keys     [B, P, Hk, D] float
//   past_decays   [B, P, Hv] float
//   past_window   [B, 3 + P, C]
// x, gates, conv and the window are of one type: FP16, BF16 or FP32.
// Outputs:
//   out           [B, N, Hv * D]          of rows that are not real zeros
//   present_...   as the five of the past: bind them to the same addresses
class DeltaNetPlugin final : public nvinfer1::IPluginV3,
                             public nvinfer1::IPluginV3OneCore,
                             public nvinfer1::IPluginV3OneBuild,
                             public nvinfer1::IPluginV3OneRuntime
{
public:
    explicit DeltaNetPlugin(DeltaNetSettings const& settings);
    // Fields point into the object: a copy makes its own.
    DeltaNetPlugin(DeltaNetPlugin const& other)
        : DeltaNetPlugin(other.settings_)
    {
    }
    DeltaNetPlugin& operator=(DeltaNetPlugin const&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* to, int32_t outputs, nvinfer1::DataType const* from,
        int32_t inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* in, int32_t inputs, nvinfer1::DimsExprs const* shape_inputs,
        int32_t shape_input_count, nvinfer1::DimsExprs* out, int32_t outputs,
        nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* in_out, int32_t inputs,
        int32_t outputs) noexcept override;
    int32_t getNbOutputs() const noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) const noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t inputs, nvinfer1::PluginTensorDesc const* out,
        int32_t outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    // Bytes of the workspace in front of each.
    struct Places
    {
        size_t counters;
        size_t scratch;
    };

    bool has_shapes(nvinfer1::PluginTensorDesc const* in) const;
    Places places(size_t slots) const;
    dflash_delta_net_params sizes(int32_t slots, int32_t rows, int32_t pending) const;

    DeltaNetSettings const settings_;
    DeltaNetFields fields_;
    nvinfer1::PluginFieldCollection serialized_;
};

class DeltaNetCreator final : public nvinfer1::IPluginCreatorV3One
{
public:
    DeltaNetCreator();

    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

private:
    DeltaNetFields fields_;
    nvinfer1::PluginFieldCollection names_;
};

} // namespace dflash
