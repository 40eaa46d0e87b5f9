"""The choice of a session's trees of drafts: chains, or trees of so many nodes, where it can verify them."""

from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.kernels import MOST_JOINED
from trtllm_dflash.ops.draft_tree import TREE_SIZES, listed_nodes

_CHOICES = f"choose auto, off, {', '.join(map(str, TREE_SIZES[:-1]))} or {TREE_SIZES[-1]}"


def _read(value: object) -> object:
    value = int(value) if isinstance(value, str) and value.isdecimal() else value
    if value in ("auto", "off") or (type(value) is int and value in TREE_SIZES):
        return value
    raise PydanticCustomError("draft_tree", _CHOICES)


#: Nodes of the trees to draft, "off" for chains, or "auto": a field of settings, read from texts too.
DraftTreeChoice: TypeAlias = Annotated[int | Literal["auto", "off"], BeforeValidator(_read)]

_READER: TypeAdapter[int | str] = TypeAdapter(DraftTreeChoice)


def with_trees(config: EngineConfig, choice: int | str, device: torch.device) -> EngineConfig:
    """Makes an engine's configuration with the trees that its session is to draft.

    Args:
        choice: a `DraftTreeChoice`; auto drafts chains: nowhere are trees known to be faster.

    Raises:
        SettingsError: there is no such choice, or the engine or the device cannot verify such trees.
    """
    try:
        read = _READER.validate_python(choice)
    except ValidationError:
        raise SettingsError(f"--draft-tree {choice}: {_CHOICES}") from None
    nodes = read if isinstance(read, int) else 0
    reason = _why_not(config, nodes, device) if nodes else None
    if reason is not None:
        raise SettingsError(f"--draft-tree {choice}: {reason}")
    return config.model_copy(update={"draft_tree": nodes})


def _why_not(config: EngineConfig, nodes: int, device: torch.device) -> str | None:
    """Explains why an engine cannot verify trees of so many nodes there; None where it can."""
    if config.drafter is None:
        return "this engine has no drafter"
    if config.drafter.selector is not None:
        return "DFlash 2 and DSpark draft chains alone; leave it out"
    if config.target.delta is not None:
        return "gated delta nets would need a state for each branch; leave it out"
    if config.target.latent_attention is not None:
        return "latent attention verifies chains alone so far; leave it out"
    if config.backend == "tensorrt":
        return "TensorRT plans verify chains alone; leave it out"
    if device.type != "cpu" and config.dtype == torch.float32:
        return "on a GPU trees need our CUDA kernels, which compute bf16 and fp16; leave it out"
    shortest = min((window for window in config.target.windows or () if window is not None), default=None)
    if device.type != "cpu" and shortest is not None and shortest < config.block_size:
        return f"on a GPU trees need windows of at least a block; this target's is {shortest}"
    taps = len(config.drafter.tap_layers)
    if device.type != "cpu" and taps > MOST_JOINED:
        return f"on a GPU trees need a drafter of at most {MOST_JOINED} taps; this one has {taps}"
    if listed_nodes(nodes, config.block_size) < 2 * nodes:
        return f"blocks of {config.block_size} have not so many nodes to choose from; give a smaller one"
    return None
