"""One rank's engine tensors, assembled from slices of the checkpoint's."""

from collections.abc import Mapping
from typing import Literal

import torch

from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.errors import CheckpointError, SettingsError
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import Content, Part, Split, Weight
from trtllm_dflash.ops.mxfp4 import NAN


def read_weight(
    folder: CheckpointFolder,
    weight: Weight,
    tp: int,
    rank: int,
    dtype: torch.dtype,
    keys: Mapping[str, str] | None = None,
) -> torch.Tensor | None:
    """Reads an engine tensor of `rank` of `tp`, in memory of its own; None where the rank holds nothing of it.

    `keys`: a part's key -> the name in this checkpoint, where the two differ.

    Raises:
        CheckpointError: a tensor cannot be read, holds NaN or infinity, or does not fit the type.
    """
    names = keys or {}
    slices = []
    for part in weight.parts_of(tp, rank):
        if part.split is Split.FIRST_RANK and rank != 0:
            return None
        slices.append(_read_part(folder, part, names.get(part.key, part.key), tp, rank, dtype))
    return torch.cat(slices).reshape(weight.shape(tp, rank))


def check_tp(tp: int, target: DecoderConfig, drafter: DrafterConfig | None = None) -> None:
    """Refuses a number of ranks that does not divide the models.

    Raises:
        SettingsError: names `--tp`, what it does not divide, and the values that would do.
    """
    configs = (target,) if drafter is None else (target, drafter)
    for config in configs:
        trouble = _indivisible(tp, config)
        if trouble:
            most = max(config.heads for config in configs)
            fitting = [str(n) for n in range(1, most + 1) if not any(_indivisible(n, config) for config in configs)]
            raise SettingsError(f"--tp {tp} does not divide {trouble}; possible: {', '.join(fitting)}")


def unshared_heads(tp: int, heads: int, kv_heads: int) -> Literal["query", "key/value"] | None:
    """Names the heads of a layer that `tp` ranks cannot share evenly; None: they can share both kinds.

    Query heads are divided; a key/value head may be held by several neighbouring ranks.
    """
    if tp < 1 or heads % tp:
        return "query"
    return "key/value" if kv_heads % tp and tp % kv_heads else None


def _read_part(folder: CheckpointFolder, part: Part, key: str, tp: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    axis = part.split.axis
    stored = folder.read(key) if axis is None else folder.read(key, axis, *part.bounds(tp, rank))
    if part.content is Content.NUMBERS:
        values = _as_numbers(folder, key, stored, dtype)
    else:
        values = stored
        if part.content is Content.E8M0 and bool((stored == NAN).any()):
            raise CheckpointError(f"{folder.path}: tensor {key} holds NaN; download the checkpoint again")
    if axis is not None:
        values = _pad(values, axis, part.held(tp, rank)[axis], part.content.padding)
    if part.transposed:
        values = values.transpose(1, 2)
    if part.interleaved:
        # Padding is whole blocks of pairs, so that it stands behind the gates as behind the ups.
        values = values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return values


def _as_numbers(folder: CheckpointFolder, key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = stored.to(dtype)
    if not torch.isfinite(values).all():
        if torch.isfinite(stored).all():
            raise CheckpointError(f"{folder.path}: tensor {key} does not fit {dtype}; choose another precision")
        raise CheckpointError(f"{folder.path}: tensor {key} holds NaN or infinity; download the checkpoint again")
    return values


def _pad(x: torch.Tensor, axis: int, size: int, padding: int) -> torch.Tensor:
    """Pads dimension `axis` of x to `size`."""
    if x.shape[axis] == size:
        return x
    rest = x.new_full((*x.shape[:axis], size - x.shape[axis], *x.shape[axis + 1 :]), padding)
    return torch.cat([x, rest], dim=axis)


def _indivisible(tp: int, config: DecoderConfig) -> str | None:
    """Names the part of a model that `tp` ranks cannot share evenly; None: they can share all of it."""
    heads = unshared_heads(tp, config.heads, config.kv_heads)
    if heads == "query":
        return f"the {config.heads} query heads"
    moe = config.moe
    sizes = {"rows of the vocabulary": config.vocab_size}
    if moe is None:
        sizes["FFN columns"] = config.intermediate_size
    elif moe.expert_parallel:
        sizes["experts"] = moe.experts
    elif not moe.mxfp4:  # whose blocks are padded
        sizes["FFN columns of an expert"] = moe.intermediate_size
    if isinstance(config, DrafterConfig) and config.draft_vocab_size is not None:
        sizes["rows of the draft vocabulary"] = config.draft_vocab_size
    for name, size in sizes.items():
        if size % tp:
            return f"the {size} {name}"
    return None if heads is None else f"the {config.kv_heads} key/value heads, nor they it"
