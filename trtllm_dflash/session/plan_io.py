"""Inputs and outputs of a TensorRT plan of a step: names, shapes and types, for the builder and for the session."""

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.cost.states import state_tensors
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_delta_net import STATE_LENGTH
from trtllm_dflash.ops.tensorrt_draft_tree import IS_TREE, PATH
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.tensorrt_tree_rows import PARENTS

Shape = tuple[int, ...]

#: Optimization profiles, by index.
PREFILL, DECODE = 0, 1

TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.int32: "int32"}


@dataclass(frozen=True)
class Binding:
    """An input or output of the step; -1 is a size that each call chooses."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class IO:
    """The inputs and outputs of a network, by name."""

    inputs: dict[str, Binding]
    outputs: dict[str, Binding]


def step_io(config: EngineConfig, sampled: bool) -> IO:
    """Lists the inputs and outputs of an engine's step, which a session binds."""
    slots, row, rows = Binding((-1,), torch.int32), (-1, -1), Binding((-1, -1), torch.int32)
    inputs = {"token_ids": rows, "start": slots, "row_count": slots, "logit_rows": rows}
    if config.drafter is not None:
        inputs["block_offsets"] = Binding((1, -1), torch.int32)
    if sampled:
        inputs["temperature"] = inputs["top_p"] = Binding((-1,), torch.float32)
        inputs["top_k"] = slots
        inputs["uniform"] = Binding(row, torch.float32)
    outputs = {"target_ids": rows, "accepted": slots, "next_start": slots}
    outputs["next_tokens"] = rows if config.drafter is not None else Binding((-1, 1), torch.int32)
    if config.plan_tree:
        inputs[PARENTS], inputs[IS_TREE] = rows, Binding((1,), torch.int32)
        outputs["next_tokens"] = outputs["next_parents"] = Binding((-1, config.plan_tree + 1), torch.int32)
        outputs[PATH] = rows
    for name, (_, *shape) in cache_shapes(config).items():
        inputs[name] = outputs[name + PRESENT] = Binding((-1, *shape), config.cache_dtype)
    states = state_tensors(config)
    if states:
        inputs[STATE_LENGTH] = slots
    for name, (kept, dtype) in states.items():
        inputs[name] = outputs[name + PRESENT] = Binding((-1, *kept), dtype)
    return IO(inputs, outputs)


def check_engine(engine: Any, config: EngineConfig) -> IO:
    """Checks that an engine has the inputs and outputs that a session of this configuration binds; returns them.

    Raises:
        EngineError: names the first difference, or the cache that is not updated in place.
    """
    trt = load_tensorrt()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    io = IO({}, {})
    for name in names:
        side = io.inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else io.outputs
        side[name] = Binding(tuple(engine.get_tensor_shape(name)), torch_type(engine.get_tensor_dtype(name)))
    expected = step_io(config, sampled="uniform" in io.inputs)
    for found, wanted in ((io.inputs, expected.inputs), (io.outputs, expected.outputs)):
        wrong = [name for name in sorted(found | wanted) if found.get(name) != wanted.get(name)]
        if wrong:
            a, b = found.get(wrong[0]), wanted.get(wrong[0])
            raise EngineError(f"the plan has {wrong[0]} as {a}, config.json asks for {b}; build the engine again")
    if config.plugin is not None:  # what a plugin updates in place, the plan does not tell
        return expected
    for name in cache_shapes(config):
        if engine.get_aliased_input_tensor(name + PRESENT) != name:
            raise EngineError(f"the plan does not update {name} in place; build the engine again")
    return expected


def torch_type(dtype: Any) -> torch.dtype:
    """Converts a TensorRT type that a step binds to torch's."""
    trt = load_tensorrt()
    return next(known for known, name in TYPES.items() if getattr(trt, name) == dtype)
