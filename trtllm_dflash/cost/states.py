"""The states of an engine's gated delta nets: tensors and bytes of a slot, however long its sequence is."""

from collections.abc import Mapping
from math import prod

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.hybrid import HybridDecoder
from trtllm_dflash.models.mixers import DeltaNet
from trtllm_dflash.models.weights import units_per_rank
from trtllm_dflash.ops.delta_states import part_shapes
from trtllm_dflash.ops.tensorrt_delta_net import plan_part_shapes


def state_tensors(config: EngineConfig) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what one slot keeps of each net, by name; nothing where the target has none.

    A TensorRT plan without our plugin has the same numbers in fewer tensors.
    """
    target = build_target(config.target)
    if not isinstance(target, HybridDecoder):
        return {}
    shapes = plan_part_shapes if copies_states(config) else part_shapes
    tensors = {}
    for i, is_net in enumerate(target.delta.layers):
        if is_net:
            layer = target.delta_layer(f"model.layers.{i}.linear_attn.", config.tp)
            for part, shape in shapes(layer, config.block_size).items():
                tensors[layer.prefix + part] = shape, config.dtype if part == "window" else torch.float32
    return tensors


def checkpoint_count(config: EngineConfig) -> int:
    """Number of states that are kept beside the slots', for prompts that begin like earlier ones; 0: it has no nets."""
    return max(4, config.max_batch // 4) if config.target.delta is not None else 0


def states_bytes(config: EngineConfig) -> int:
    """Bytes of all slots' states, and of those that are kept beside them, on one rank.

    What a TensorRT plan's own layers make of the slots' states lies beside these until it is copied.
    """
    made = config.max_batch if copies_states(config) else 0
    return (config.max_batch + checkpoint_count(config) + made) * state_bytes(config)


def copies_states(config: EngineConfig) -> bool:
    """Whether a step writes states elsewhere than it reads them: TensorRT's own layers do."""
    return config.backend == "tensorrt" and config.plugin is None


def state_bytes(config: EngineConfig) -> int:
    """Bytes of one slot's states on one rank."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in state_tensors(config).values())


def net_state_bytes(net: DeltaNet, block: int, tp: int) -> int:
    """Bytes of a slot's state of one gated delta net on one rank: its matrices, and so many rows' beside, in FP32."""
    values, keys = units_per_rank(net.value_heads, tp), units_per_rank(net.key_heads, tp)
    rows = values * net.value_size + keys * net.key_size + values  # and each row's decay
    convolved = (block + net.kernel - 1) * units_per_rank(net.key_heads, tp) * (net.channels // net.key_heads) * 2
    return 4 * (values * net.key_size * net.value_size + block * rows) + convolved
