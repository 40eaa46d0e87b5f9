"""The datacenter edition's plugin layers, where TensorRT-RTX is what is installed: a network that takes them.

What a plugin layer gives are inputs of the real network, so that all layers after it are TensorRT's own, with the types
and shapes that it infers. The evaluator computes the layer from the contract in `block_attention_plugin.h`
or `delta_net_plugin.h`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_dflash.ops.tensorrt_delta_plugin import DELTA_PLUGIN
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import PLUGIN

#: What the files that tests take for the plugin's library begin with.
LIBRARY = b"the plugin's library"


@dataclass
class PluginLayer:
    """What the evaluator asks of an IPluginV3Layer."""

    inputs: list[Any]
    outputs: list[Any]
    plugin: dict[str, float]  # the settings that it was created with
    name: str = ""
    type: str = "LayerType.PLUGIN_V3"

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class PluginNetwork:
    """An INetworkDefinition of the datacenter edition over one of TensorRT-RTX."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self.plugins: list[tuple[int, PluginLayer]] = []  # how many real layers stand before it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: dict[str, float]) -> PluginLayer:
        assert not shape_inputs
        rows, kept = inputs[0], inputs[9:] if "value_heads" in plugin else inputs[2:4]
        width = int(plugin["value_heads" if "value_heads" in plugin else "heads"] * plugin["head_size"])
        shapes = [(rows.dtype, (*rows.shape[:2], width)), *((cache.dtype, cache.shape) for cache in kept)]
        stem = f"plugin{len(self.plugins)}"
        outputs = [self._network.add_input(f"{stem}.{i}", *shape) for i, shape in enumerate(shapes)]
        self.plugins.append((self._network.num_layers, PluginLayer(inputs, outputs, plugin)))
        return self.plugins[-1][1]

    def add_input(self, *arguments: Any) -> Any:
        self._inputs.append(self._network.add_input(*arguments))
        return self._inputs[-1]

    def mark_output(self, tensor: Any) -> None:
        self._outputs.append(tensor)

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    @property
    def num_layers(self) -> int:
        return int(self._network.num_layers) + len(self.plugins)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    def get_layer(self, index: int) -> Any:
        """In the order in which they were added."""
        for i, (before, layer) in enumerate(self.plugins):
            if index == before + i:
                return layer
            if index < before + i:
                return self._network.get_layer(index - i)
        return self._network.get_layer(index - len(self.plugins))


class PluginBuilder:
    """A Builder whose networks take plugins."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def create_network(self, flags: int) -> PluginNetwork:
        return PluginNetwork(self._builder.create_network(flags))


class PluginTensorRT:
    """TensorRT's module as the datacenter edition has it: with plugin layers, and a registry of its own."""

    INetworkDefinition = PluginNetwork

    def __init__(self) -> None:
        self._module = load_tensorrt()
        self.libraries: list[str] = []  # that were loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_plugin_registry(self) -> "PluginTensorRT":
        return self

    @property
    def all_creators(self) -> list[Any]:
        creators = [
            SimpleNamespace(name=name, plugin_version=version, plugin_namespace=namespace, create_plugin=create)
            for (name, version, namespace), create in (
                (PLUGIN, self.create_plugin),
                (DELTA_PLUGIN, self.create_delta_plugin),
            )
        ]
        return creators if self.libraries else []

    def load_library(self, path: str) -> None:
        with open(path, "rb") as file:
            if file.read().startswith(LIBRARY):
                self.libraries.append(path)

    def create_plugin(self, name: str, fields: Any, phase: Any) -> dict[str, float] | None:
        """As `block_attention_plugin.cpp` reads the fields."""
        values = self._settings(fields, phase)
        assert len(values) == 10
        return values if values["head_size"] in (16, 64, 128) else None  # 16: of the smallest checkpoints

    def create_delta_plugin(self, name: str, fields: Any, phase: Any) -> dict[str, float] | None:
        """As `delta_net_plugin.cpp` reads the fields."""
        values = self._settings(fields, phase)
        assert len(values) == 4
        return values if values["head_size"] in (16, 32, 64, 128) else None

    def _settings(self, fields: Any, phase: Any) -> dict[str, float]:
        kinds = self._module.PluginFieldType
        values = {}
        for field in fields:
            assert field.type == (kinds.FLOAT32 if field.name == "norm_eps" else kinds.INT32)
            (values[field.name],) = field.data.tolist()
        assert phase == self._module.TensorRTPhase.BUILD
        return values


def use_plugins(monkeypatch: pytest.MonkeyPatch) -> PluginTensorRT:
    """Makes our code find the datacenter edition."""
    trt = PluginTensorRT()
    modules = ("ops.tensorrt_ops", "ops.tensorrt_plugin", "build.tensorrt_network", "session.tensorrt_session")
    for module in (*modules, "build.planning"):
        monkeypatch.setattr(f"trtllm_dflash.{module}.load_tensorrt", lambda: trt)
    return trt
