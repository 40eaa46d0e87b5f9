"""`TensorRTOps` with the attention of target and drafter as our plugin: the datacenter edition of TensorRT alone."""

import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import AttentionLayer, Context
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_delta_plugin import TensorRTDeltaPlugin
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps, load_tensorrt

#: As the plugin's creator calls itself: name, version, namespace.
PLUGIN = ("DFlashBlockAttention", "2", "dflash")


def has_plugin_layers(trt: Any) -> bool:
    """Whether this TensorRT's networks can have plugins. TensorRT-RTX has the registry, but not the layer."""
    return hasattr(trt.INetworkDefinition, "add_plugin_v3")


def load_plugin(library: Path) -> None:
    """Registers the plugin with TensorRT, before a network with it is built, or a plan with it deserialized.

    Once a process: the first library serves all engines, since what a plan holds of the plugin goes by its version.

    Raises:
        EngineError: the library has not the plugin, or not in this version.
    """
    registry = load_tensorrt().get_plugin_registry()
    if _find_creator(registry, PLUGIN) is None:
        registry.load_library(str(library))
    if _find_creator(registry, PLUGIN) is None:
        name, version, _ = PLUGIN
        raise EngineError(f"{library}: has no plugin {name} of version {version}; build it with `make plugin`")


def _find_creator(registry: Any, plugin: tuple[str, str, str]) -> Any:
    # Not by get_creator, which logs an error where there is none.
    for creator in registry.all_creators:
        if (creator.name, creator.plugin_version, creator.plugin_namespace) == plugin:
            return creator
    return None


class TensorRTPluginOps(TensorRTDeltaPlugin, TensorRTOps):
    """Emits one plugin layer for norm of heads, RoPE, append and attention; all else as TensorRTOps.

    A call's rows may be any number: a block, or a prompt's chunk. The caches' inputs and outputs are not aliased in the
    plan: a session binds each `NAME.present` to its input's address, and loads the same library before it deserializes
    the plan. Windows and sinks are the plugin's too: caches have the model's own shapes. A target with gated delta nets
    has them as plugins; its attention, of whose heads RoPE rotates a part alone, is of TensorRT's own layers.

    Args: as TensorRTOps.

    Raises:
        EngineError: the plugin is not loaded; see `load_plugin`.
    """

    def __init__(
        self,
        network: object,
        weights: Mapping[str, torch.Tensor],
        caches: Mapping[str, ITensor],
        tp: int = 1,
        rank: int = 0,
        capability: int | None = None,
        most_rows: int = 1,
        deepest: int | None = None,
    ) -> None:
        super().__init__(network, weights, caches, tp, rank, capability, most_rows, deepest)
        self._creator_of(PLUGIN)

    def _creator_of(self, plugin: tuple[str, str, str]) -> Any:
        creator = _find_creator(self.trt.get_plugin_registry(), plugin)
        if creator is None:
            raise EngineError(f"the plugin {plugin[0]} is not loaded")
        return creator

    def self_attention(self, attention: AttentionLayer, qkv: ITensor, start: ITensor) -> ITensor:
        if 2 * self.weights[attention.rope + ".cos"].shape[1] != attention.head_size:
            return TensorRTOps.self_attention(self, attention, qkv, start)  # the plugin rotates whole heads
        tree = [] if self.deepest is None else [self._tree_positions(start, qkv), self._tree_paths()]
        return self._emit(attention, qkv, start, causal=True, context_index=-1, more=tree)

    def context_rows(self, layer: AttentionLayer, kv: ITensor, index: int, start: ITensor) -> Context[ITensor]:
        return Context((kv,), index)  # as projected, of all layers: the plugin takes its layer's part

    def keep_context(self, layer: AttentionLayer, context: Context[ITensor], start: ITensor) -> None:
        raise EngineError("a plan with the plugin has no step that only keeps context")

    def block_attention(
        self, layer: AttentionLayer, context: Context[ITensor], qkv: ITensor, start: ITensor, committed: ITensor
    ) -> ITensor:
        rows = context
        inputs = [*rows.tensors, committed]
        return self._emit(layer, qkv, start, causal=False, context_index=rows.index, more=inputs)

    def _emit(
        self,
        attention: AttentionLayer,
        qkv: ITensor,
        start: ITensor,
        causal: bool,
        context_index: int,
        more: list[ITensor],
    ) -> ITensor:
        """Emits a layer; `more` inputs are a tree's or a context's."""
        self._scope = attention.prefix + "self_attn"
        names = [attention.prefix + "key", attention.prefix + "value"]
        inputs = [qkv, start, *(self.caches[name] for name in names)]
        inputs += [self._weight(f"{attention.rope}.{table}") for table in ("cos", "sin")]
        if attention.norm_eps is not None:
            inputs += [self._weight(f"{attention.prefix}self_attn.{which}_norm.weight") for which in ("q", "k")]
        if attention.sinks is not None:
            inputs.append(self._constant(self.weights[attention.sinks].float()))
        plugin = self._plugin(attention, causal, context_index, causal and bool(more))
        emitted = self.network.add_plugin_v3(inputs + more, [], plugin)
        if emitted is None:
            raise EngineError(f"{attention.prefix}: TensorRT refused the plugin")
        emitted.name = self._unique("plugin")
        for i, name in enumerate(names):
            present = emitted.get_output(1 + i)
            present.name = name + PRESENT
            self.network.mark_output(present)
        return emitted.get_output(0)

    def _plugin(self, attention: AttentionLayer, causal: bool, context_index: int, has_tree: bool) -> ITensor:
        numbers = {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_size": attention.head_size,
            "causal": int(causal),
            "window": attention.window or 0,
            "has_norms": int(attention.norm_eps is not None),
            "has_sinks": int(attention.has_sinks),
            "has_tree": int(has_tree),
            "context_index": context_index,
        }
        plugin = self._create(PLUGIN, attention.prefix, numbers, attention.norm_eps or 0.0)
        if plugin is None:
            raise EngineError(f"{attention.prefix}: the plugin has no {attention.heads} heads of {attention.head_size}")
        return plugin

    def _create(self, plugin: tuple[str, str, str], layer_name: str, numbers: dict[str, int], eps: float) -> ITensor:
        integer, real = self.trt.PluginFieldType.INT32, self.trt.PluginFieldType.FLOAT32
        fields = [self.trt.PluginField(name, array.array("i", [n]), integer) for name, n in numbers.items()]
        fields.append(self.trt.PluginField("norm_eps", array.array("f", [eps]), real))
        collection = self.trt.PluginFieldCollection(fields)
        creator = self._creator_of(plugin)
        return creator.create_plugin(layer_name, collection, self.trt.TensorRTPhase.BUILD)
