"""`TensorRTOps` with the attention of target and drafter as our plugin: the datacenter edition of TensorRT alone."""

import array
from collections.abc import Mapping
from pathlib import Path

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import AttentionLayer
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps

#: As the plugin's creator calls itself: name, version, namespace.
PLUGIN = ("DFlashBlockAttention", "1", "dflash")


class TensorRTPluginOps(TensorRTOps):
    """Emits one plugin layer for norm of heads, RoPE, append and attention; all else as TensorRTOps.

    The caches' inputs and outputs are not aliased in the plan: a session binds each `NAME.present` to its input's
    address, and loads the same library before it deserializes the plan.

    Args: as TensorRTOps, and `library`: libdflash_plugin.so.

    Raises:
        EngineError: this edition of TensorRT has no plugins, or the library cannot be loaded.
    """

    def __init__(
        self,
        network: object,
        weights: Mapping[str, torch.Tensor],
        caches: Mapping[str, ITensor],
        library: Path,
        tp: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(network, weights, caches, tp, rank)
        if not hasattr(self.trt, "get_plugin_registry"):
            raise EngineError("--plugin needs the datacenter edition of TensorRT: TensorRT-RTX has no plugins")
        registry = self.trt.get_plugin_registry()
        self._creator = registry.get_creator(*PLUGIN)
        if self._creator is None:  # loaded once a process
            registry.load_library(str(library))
            self._creator = registry.get_creator(*PLUGIN)
        if self._creator is None:
            raise EngineError(f"{library} has no plugin {PLUGIN[0]}: build it with `make plugin`")

    def self_attention(
        self, layer: AttentionLayer, qkv: ITensor, positions: ITensor, start: ITensor, lengths: ITensor
    ) -> ITensor:
        return self._emit(layer, qkv, start, causal=True, context_index=-1, context=[])

    def context_rows(
        self, layer: AttentionLayer, kv: ITensor, index: int, positions: ITensor
    ) -> tuple[ITensor, ITensor]:
        return kv, index  # as projected: the plugin takes its layer's part

    def keep_context(self, layer: AttentionLayer, context: tuple[ITensor, ITensor], start: ITensor) -> None:
        raise EngineError("a plan with the plugin has no step that only keeps context")

    def block_attention(
        self,
        layer: AttentionLayer,
        context: tuple[ITensor, ITensor],
        qkv: ITensor,
        positions: ITensor,
        start: ITensor,
        committed: ITensor,
        lengths: ITensor,
    ) -> ITensor:
        kv, index = context
        return self._emit(layer, qkv, start, causal=False, context_index=index, context=[kv, committed])

    def _emit(
        self,
        layer: AttentionLayer,
        qkv: ITensor,
        start: ITensor,
        causal: bool,
        context_index: int,
        context: list[ITensor],
    ) -> ITensor:
        names = [layer.prefix + "key", layer.prefix + "value"]
        inputs = [qkv, start, *(self.caches[name] for name in names)]
        inputs += [self._weight(f"{layer.rope}.{table}") for table in ("cos", "sin")]
        if layer.norm_eps is not None:
            inputs += [self._weight(f"{layer.prefix}self_attn.{which}_norm.weight") for which in ("q", "k")]
        plugin = self._plugin(layer, causal, context_index)
        emitted = self.network.add_plugin_v3(inputs + context, [], plugin)
        if emitted is None:
            raise EngineError(f"{layer.prefix}: TensorRT refused the plugin")
        emitted.name = self._unique_name(layer.prefix + "self_attn.plugin")
        for i, name in enumerate(names):
            present = emitted.get_output(1 + i)
            present.name = name + PRESENT
            self.network.mark_output(present)
        return emitted.get_output(0)

    def _plugin(self, layer: AttentionLayer, causal: bool, context_index: int) -> ITensor:
        numbers = {
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_size": layer.head_size,
            "causal": int(causal),
            "has_norms": int(layer.norm_eps is not None),
            "context_index": context_index,
        }
        kinds = self.trt.PluginFieldType
        fields = [self.trt.PluginField(name, array.array("i", [n]), kinds.INT32) for name, n in numbers.items()]
        fields.append(self.trt.PluginField("norm_eps", array.array("f", [layer.norm_eps or 0.0]), kinds.FLOAT32))
        collection = self.trt.PluginFieldCollection(fields)
        plugin = self._creator.create_plugin(layer.prefix, collection, self.trt.TensorRTPhase.BUILD)
        if plugin is None:
            raise EngineError(f"{layer.prefix}: the plugin has no {layer.heads} heads of {layer.head_size}")
        return plugin
