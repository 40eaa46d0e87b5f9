"""`DraftVerifyStep` as a TensorRT network: inputs, outputs, caches updated in place, and the shapes they may have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.nvfp4 import Transcoded
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps, load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import TensorRTPluginOps
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs

Shape = tuple[int, ...]

#: Optimization profiles, by index.
PREFILL, DECODE = 0, 1

_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.int32: "int32"}


@dataclass(frozen=True)
class Binding:
    """An input or output of the step; -1 is a size that each call chooses."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class IO:
    """What a network takes and gives, by name."""

    inputs: dict[str, Binding]
    outputs: dict[str, Binding]


@dataclass(frozen=True)
class Range:
    """The least, the usual and the largest shape of an input."""

    least: Shape
    usual: Shape
    largest: Shape


@dataclass(frozen=True)
class StepNetwork:
    """A network ready to be compiled. Keep it until then: TensorRT reads the weights where they lie."""

    network: Any  # INetworkDefinition
    io: IO
    profiles: tuple[dict[str, Range], dict[str, Range]]  # by PREFILL, DECODE: input -> shapes
    weight_count: int
    transcoded: Transcoded  # what became of MXFP4 blocks that were made NVFP4
    keeps: Any = field(repr=False)  # what owns the weights' memory


def step_io(config: EngineConfig, sampled: bool) -> IO:
    """The inputs and outputs that an engine's step has: what a session binds."""
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
    for name, (_, *shape) in cache_shapes(config).items():
        inputs[name] = outputs[name + PRESENT] = Binding((-1, *shape), config.cache_dtype)
    return IO(inputs, outputs)


def build_network(
    builder: Any, config: EngineConfig, weights: Mapping[str, torch.Tensor], rank: int, capability: int | None = None
) -> StepNetwork:
    """Emits a rank's step into a new network of `builder`.

    Without `config.sampling` it is greedy, and saves the search for the cuts of top-k and top-p. With `config.plugin`
    its attention is the plugin, whose library is to be loaded before (`load_plugin`).

    Args:
        weights: the rank's tensors with RoPE tables (`complete_weights`), on CPU.
        capability: of the GPU that it is for, such as 120; None: any that there is.

    Raises:
        EngineError: TensorRT refused a layer, or the plugin's library is not loaded.
    """
    # The cache update must be shorter than the cache, and the drafter's is a chunk and a block long.
    assert config.chunk + config.block_size < config.cache_length
    trt = load_tensorrt()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.name = f"{config.name} rank {rank}"
    io = step_io(config, config.sampling)
    tensors = {name: _add_input(trt, network, name, binding) for name, binding in io.inputs.items()}
    kind = TensorRTOps if config.plugin is None else TensorRTPluginOps
    ops = kind(network, weights, tensors, config.tp, rank, capability)
    drafter = Drafter(config.drafter) if config.drafter else None
    step = DraftVerifyStep(build_target(config.target), drafter)
    out = step(ops, _step_inputs(tensors), Drafting.BLOCK if drafter else Drafting.OFF)
    for name in ("target_ids", "accepted", "next_start", "next_tokens"):
        tensor = getattr(out, name)
        tensor.name = name
        network.mark_output(tensor)
    profiles = (_profile(config, io, PREFILL), _profile(config, io, DECODE))
    return StepNetwork(network, io, profiles, len(weights), ops.transcoded, ops)


def io_of(network: Any) -> IO:
    """What a network takes and gives, read from the network itself."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return IO({x.name: _binding(x) for x in inputs}, {x.name: _binding(x) for x in outputs})


def check_engine(engine: Any, config: EngineConfig) -> IO:
    """The engine's inputs and outputs, once they are what a session of this configuration binds.

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
    """The torch type of a TensorRT type that a step binds."""
    trt = load_tensorrt()
    return next(known for known, name in _TYPES.items() if getattr(trt, name) == dtype)


def _binding(tensor: Any) -> Binding:
    return Binding(tuple(tensor.shape), torch_type(tensor.dtype))


def _add_input(trt: Any, network: Any, name: str, binding: Binding) -> Any:
    tensor = network.add_input(name, getattr(trt, _TYPES[binding.dtype]), binding.shape)
    if binding.shape[0] == -1:
        tensor.set_dimension_name(0, "slots")  # the same for all inputs
    return tensor


def _step_inputs(tensors: dict[str, Any]) -> StepInputs[Any]:
    sampling = None
    if "uniform" in tensors:
        sampling = SamplingInputs(*(tensors[name] for name in ("temperature", "top_k", "top_p", "uniform")))
    return StepInputs(
        token_ids=tensors["token_ids"],
        start=tensors["start"],
        row_count=tensors["row_count"],
        logit_rows=tensors["logit_rows"],
        block_offsets=tensors.get("block_offsets"),
        sampling=sampling,
    )


def _profile(config: EngineConfig, io: IO, which: int) -> dict[str, Range]:
    """The shapes of each input: a chunk of one slot with one logit row, or a block of every slot."""
    slots, rows, logit_rows = (1, config.chunk, 1) if which == PREFILL else (config.max_batch, *[config.block_size] * 2)
    sizes = {"token_ids": rows, "logit_rows": logit_rows, "uniform": logit_rows}
    profile = {}
    for name, binding in io.inputs.items():
        if name == "block_offsets":
            block = config.block_size
            profile[name] = Range((1, 2), (1, block), (1, block))
            continue
        rest = (sizes[name],) if name in sizes else binding.shape[1:]
        least = (1,) if name in sizes else binding.shape[1:]
        profile[name] = Range((1, *least), (slots, *rest), (slots, *rest))
    return profile
