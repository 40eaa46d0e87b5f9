// TensorRT plugin "DFlashBlockAttention": a layer's norm of heads, RoPE, append and attention over the cache, linear
// or in pages.
#pragma once

#include "dflash_kernels.h"

#include <NvInferRuntime.h>

#include <array>

namespace dflash
{

constexpr char const* kPluginName = "DFlashBlockAttention";
constexpr char const* kPluginVersion = "2";
constexpr char const* kPluginNamespace = "dflash";

// The plugin's attributes; each is a field of its creator, of one number.
struct BlockAttentionSettings
{
    int32_t heads = 0;
    int32_t kv_heads = 0;
    int32_t head_size = 0;
    int32_t causal = 1; // 1: a target's layer, to verify; 0: a drafter's, to draft
    int32_t window = 0; // a row at position p sees keys > p - window; 0: no window
    int32_t has_norms = 0; // with inputs q_norm and k_norm
    int32_t has_sinks = 0; // with input sinks
    int32_t has_tree = 0; // a target's layer, of rows that may be trees: with inputs positions and paths
    int32_t context_index = -1; // a drafter's layer: its place in input context; -1: without that input
    int32_t page_rows = 0; // of a page, with input page_table; 0: caches are a run of rows a slot
    float norm_eps = 0.f;
};

using BlockAttentionFields = std::array<nvinfer1::PluginField, 11>;

// Inputs, in this order (B slots, N rows, S cache length, D head size):
//   qkv         [B, N, (heads + 2 kv_heads) * D]   what the rows' projection gave
//   start       [B] int32                          the first position that is written
//   past_key    [B, kv_heads, S, D]
//   past_value  [B, kv_heads, S, D]
//   cos, sin    [positions, D / 2]
//   q_norm, k_norm  [D]                            with has_norms
//   sinks       [heads] float                      with has_sinks
//   positions   [B, N] int32                       with has_tree: where each row of a tree stands
//   paths       [B, R, 2] int32                    likewise: a bit for each row that it sees of them, low word first
//   context     [B, Q, layers * 2 * kv_heads * D]  with context_index: K, then V, of each layer
//   committed   [B] int32                          with context_index: how many of the Q rows become permanent
//   page_table  [B, width] int32                   with page_rows: where each slot's pages lie
// With page_rows the past is [pages, kv_heads, page_rows, D], and S is width * page_rows: position p of slot b is row
// p % page_rows of page page_table[b, p / page_rows]. page_rows is a multiple of 64, or width is 1.
// With has_tree, and R = N of at most 64, each slot's rows are a tree: row i lies i rows behind start, is rotated by
// its own position, and sees all keys before start and the rows whose bits are set. With R = 1 they are a prompt's run.
// Outputs:
//   attention   [B, N, heads * D]
//   present_key, present_value                     as past: bind them to the same addresses
class BlockAttentionPlugin final : public nvinfer1::IPluginV3,
                                   public nvinfer1::IPluginV3OneCore,
                                   public nvinfer1::IPluginV3OneBuild,
                                   public nvinfer1::IPluginV3OneRuntime
{
public:
    explicit BlockAttentionPlugin(BlockAttentionSettings const& settings);
    // Fields point into the object: a copy makes its own.
    BlockAttentionPlugin(BlockAttentionPlugin const& other)
        : BlockAttentionPlugin(other.settings_)
    {
    }
    BlockAttentionPlugin& operator=(BlockAttentionPlugin const&) = delete;

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
    // Places of the inputs that are not always there; -1 where they are not.
    int32_t norms_at() const;
    int32_t sinks_at() const;
    int32_t tree_at() const;
    int32_t context_at() const;
    int32_t table_at() const;
    int32_t input_count() const;
    bool has_shapes(nvinfer1::PluginTensorDesc const* in, int32_t inputs) const;
    bool has_cache_shapes(nvinfer1::PluginTensorDesc const* in) const;
    bool is_tree(nvinfer1::PluginTensorDesc const* in) const;
    dflash_attention_params attention(nvinfer1::PluginTensorDesc const* in) const;

    BlockAttentionSettings const settings_;
    BlockAttentionFields fields_;
    nvinfer1::PluginFieldCollection serialized_;
};

class BlockAttentionCreator final : public nvinfer1::IPluginCreatorV3One
{
public:
    BlockAttentionCreator();

    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

private:
    BlockAttentionFields fields_;
    nvinfer1::PluginFieldCollection names_;
};

} // namespace dflash
