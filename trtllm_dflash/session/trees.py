"""The choice of a session's trees of drafts: chains, or trees of so many nodes, where it can verify them."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.ops.draft_tree import TREE_SIZES, listed_nodes
from trtllm_dflash.session.kernels import Kernels

if TYPE_CHECKING:  # seconds of a process that computes nothing
    import torch

_CHOICES = f"choose auto, off, {', '.join(map(str, TREE_SIZES[:-1]))} or {TREE_SIZES[-1]}"


def _read(value: object) -> object:
    value = int(value) if isinstance(value, str) and value.isdecimal() else value
    if value in ("auto", "off") or (type(value) is int and value in TREE_SIZES):
        return value
    raise PydanticCustomError("draft_tree", _CHOICES)


#: Nodes of the trees to draft, "off" for chains, or "auto": a field of settings, read from texts too.
DraftTreeChoice: TypeAlias = Annotated[int | Literal["auto", "off"], BeforeValidator(_read)]

_READER: TypeAdapter[int | str] = TypeAdapter(DraftTreeChoice)


#: What auto drafts where trees are known to be faster than chains, of blocks that this was measured for: no more rows.
_AUTO_NODES, _AUTO_BLOCK = 15, 16


def with_trees(
    config: EngineConfig, choice: int | str, device: "torch.device", kernels: Kernels = "auto"
) -> EngineConfig:
    """Makes an engine's configuration with the trees that its session is to draft.

    Args:
        choice: a `DraftTreeChoice`; auto drafts trees on one GPU where our kernels compute a dense target, and those
            that a TensorRT plan was built for; chains elsewhere.
        kernels: that compute it.

    Raises:
        SettingsError: there is no such choice, or the engine or the device cannot verify such trees.
    """
    nodes = check_trees(config, choice, device.type != "cpu")
    if nodes is None and config.backend == "tensorrt":
        nodes = config.plan_tree
    elif nodes is None:
        nodes = _AUTO_NODES if _are_faster(config, device, kernels) else 0
    return config.model_copy(update={"draft_tree": nodes})


def check_trees(config: EngineConfig, choice: int | str, on_gpu: bool) -> int | None:
    """Checks a choice of trees, and looks at no device: their nodes, None for auto. Errors as in `with_trees`."""
    try:
        read = _READER.validate_python(choice)
    except ValidationError:
        raise SettingsError(f"--draft-tree {choice}: {_CHOICES}") from None
    nodes = read if isinstance(read, int) else 0
    reason = _why_not(config, nodes, on_gpu) if nodes else None
    if reason is not None:
        raise SettingsError(f"--draft-tree {choice}: {reason}")
    return None if read == "auto" else nodes


def tree_beside(choice: int | str, draft_length: int | str, block_size: int) -> int | str:
    """Takes the choice of trees that goes with one of draft lengths: auto drafts none where blocks are never whole."""
    is_short = isinstance(draft_length, int) and draft_length < block_size - 1
    return "off" if choice == "auto" and is_short else choice


def _are_faster(config: EngineConfig, device: "torch.device", kernels: Kernels) -> bool:
    """Whether trees are known to commit more tokens a second than chains of as many rows (benchmarks/results).

    With exact kernels they are taken to: attention of 16 rows takes as long in a tree as in a chain there.
    """
    import torch

    from trtllm_dflash.engine.flat_rows import why_not_flat

    if device.type != "cuda" or kernels == "torch" or not torch.cuda.is_available():
        return False
    drafter = config.drafter
    is_measured = drafter is not None and not drafter.is_second and drafter.windows is None
    is_measured = is_measured and config.block_size == _AUTO_BLOCK and config.tp == 1 and config.target.moe is None
    if not is_measured or _why_not(config, _AUTO_NODES, on_gpu=True) is not None:
        return False
    return why_not_flat(config, torch.cuda.get_device_capability(device)) is None


def _why_not(config: EngineConfig, nodes: int, on_gpu: bool) -> str | None:
    """Explains why an engine cannot verify trees of so many nodes there; None where it can."""
    reason = why_no_trees(config, nodes)
    if reason is not None:
        return reason
    if config.backend == "tensorrt":
        built = f"trees of {config.plan_tree}" if config.plan_tree else "chains"
        return None if nodes == config.plan_tree else f"this plan drafts {built}; leave it out, or build with it"
    return _why_not_on_gpu(config) if on_gpu else None


def _why_not_on_gpu(config: EngineConfig) -> str | None:
    """Explains why our kernels cannot verify trees of these models; None where they can."""
    from trtllm_dflash.kernels import MOST_JOINED

    if config.precision == "fp32":
        return "on a GPU trees need our CUDA kernels, which compute bf16 and fp16; leave it out"
    shortest = min((window for window in config.target.windows or () if window is not None), default=None)
    if shortest is not None and shortest < config.block_size:
        return f"on a GPU trees need windows of at least a block; this target's is {shortest}"
    assert config.drafter is not None
    taps = len(config.drafter.tap_layers)
    if taps > MOST_JOINED:
        return f"on a GPU trees need a drafter of at most {MOST_JOINED} taps; this one has {taps}"
    return None


def why_no_trees(config: EngineConfig, nodes: int) -> str | None:
    """Explains why nothing verifies trees of so many nodes with these models; None where it can be done."""
    if config.drafter is None:
        return "this engine has no drafter"
    if config.drafter.selector is not None:
        return "DFlash 2 and DSpark draft chains alone; leave it out"
    if config.target.delta is not None:
        return "gated delta nets would need a state for each branch; leave it out"
    if config.target.latent_attention is not None:
        return "latent attention verifies chains alone so far; leave it out"
    if listed_nodes(nodes, config.block_size) < 2 * nodes:
        fitting = [size for size in TREE_SIZES if listed_nodes(size, config.block_size) >= 2 * size]
        advice = f"use {fitting[-1]}" if fitting else "leave it out"
        return f"blocks of {config.block_size} have not so many nodes to choose from; {advice}"
    return None
