"""`DraftVerifyStep` as a TensorRT network: inputs, outputs, caches updated in place, and the shapes they may have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.draft_tree import draft_tree
from trtllm_dflash.ops.tensorrt_draft_tree import IS_TREE
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps, load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import TensorRTPluginOps
from trtllm_dflash.ops.tensorrt_tree_rows import PARENTS
from trtllm_dflash.ops.transcoded import Transcoded
from trtllm_dflash.session.plan_io import DECODE, IO, PREFILL, TYPES, Binding, Shape, step_io
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs


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
    tree = draft_tree(config.plan_tree, config.block_size) if config.plan_tree else None
    most, deepest = max(config.chunk, config.slot_rows), None if tree is None else config.block_size - 1
    ops = kind(network, weights, tensors, config.tp, rank, capability, most, deepest)
    drafter = Drafter(config.drafter) if config.drafter else None
    step = DraftVerifyStep(build_target(config.target), drafter)
    out = step(ops, _step_inputs(tensors), Drafting.BLOCK if drafter else Drafting.OFF, tree)
    names = ["target_ids", "accepted", "next_start", "next_tokens"]
    for name in names if tree is None else [*names, "next_parents"]:
        tensor = getattr(out, name)
        tensor.name = name
        network.mark_output(tensor)
    profiles = (_profile(config, io, PREFILL), _profile(config, io, DECODE))
    return StepNetwork(network, io, profiles, len(weights), ops.transcoded, ops)


def _add_input(trt: Any, network: Any, name: str, binding: Binding) -> Any:
    tensor = network.add_input(name, getattr(trt, TYPES[binding.dtype]), binding.shape)
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
    """Lists the shapes of each input: a chunk of one slot with one logit row, or a block or tree of every slot."""
    slots, rows, logit_rows = (1, config.chunk, 1) if which == PREFILL else (config.max_batch, *[config.slot_rows] * 2)
    sizes = {"token_ids": rows, "logit_rows": logit_rows, "uniform": logit_rows, PARENTS: logit_rows}
    profile = {}
    for name, binding in io.inputs.items():
        if name == "block_offsets":
            block = config.block_size
            profile[name] = Range((1, 2), (1, block), (1, block))
            continue
        if name == IS_TREE:
            profile[name] = Range((1,), (1,), (1,))
            continue
        rest = (sizes[name],) if name in sizes else binding.shape[1:]
        least = (1,) if name in sizes else binding.shape[1:]
        profile[name] = Range((1, *least), (slots, *rest), (slots, *rest))
    return profile
