"""Gated delta nets as one plugin layer each: the kernels that the torch backend has, in place of TensorRT's layers."""

from abc import ABC, abstractmethod

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.delta_states import PARTS
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_delta_net import STATE_LENGTH, TensorRTDeltaNet
from trtllm_dflash.ops.tensorrt_layers import ITensor

#: As the plugin's creator calls itself: name, version, namespace.
DELTA_PLUGIN = ("DFlashDeltaNet", "3", "dflash")


class TensorRTDeltaPlugin(TensorRTDeltaNet, ABC):
    """Emits gated delta nets as plugins. What a slot keeps has the kernels' own parts; see `part_shapes`."""

    @abstractmethod
    def _create(self, plugin: tuple[str, str, str], layer_name: str, numbers: dict[str, int], eps: float) -> ITensor:
        """Makes a plugin with these settings and `norm_eps`; None where it does not take them.

        Raises:
            EngineError: no such plugin is loaded.
        """

    def gated_delta(self, net: DeltaLayer, x: ITensor, gates: ITensor, start: ITensor) -> ITensor:
        self._scope = net.prefix.rstrip(".")
        conv = self.weights[net.prefix + "conv1d.weight"]
        wide = [self.weights[net.prefix + name].float() for name in ("A_log", "dt_bias", "norm.weight")]
        names = [net.prefix + part for part in PARTS]
        inputs = [x, gates, start, self.caches["row_count"], self.caches[STATE_LENGTH]]
        inputs += [self._constant(conv, (conv.shape[0], conv.shape[2])), *map(self._constant, wide)]
        inputs += [self.caches[name] for name in names]
        numbers = {"key_heads": net.key_heads, "value_heads": net.value_heads, "head_size": net.value_size}
        plugin = self._create(DELTA_PLUGIN, net.prefix, numbers, net.norm_eps)
        if plugin is None:
            raise EngineError(f"{net.prefix}: the plugin has no gated delta nets with heads of {net.value_size}")
        emitted = self.network.add_plugin_v3(inputs, [], plugin)
        if emitted is None:
            raise EngineError(f"{net.prefix}: TensorRT refused the plugin")
        emitted.name = self._unique("plugin")
        for i, name in enumerate(names):
            present = emitted.get_output(1 + i)
            present.name = name + PRESENT
            self.network.mark_output(present)
        return emitted.get_output(0)
