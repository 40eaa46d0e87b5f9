"""One rank's engine tensors, assembled from slices of the checkpoint's."""

from collections.abc import Mapping

import torch

from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.errors import CheckpointError, SettingsError
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import Part, Split, Weight


def read_weight(
    folder: CheckpointFolder,
    weight: Weight,
    tp: int,
    rank: int,
    dtype: torch.dtype,
    keys: Mapping[str, str] | None = None,
) -> torch.Tensor | None:
    """An engine tensor of `rank` of `tp`, in memory of its own; None where the rank holds nothing of it.

    `keys`: a part's key -> the name in this checkpoint, where the two differ.

    Raises:
        CheckpointError: a tensor cannot be read, holds NaN or infinity, or does not fit the type.
    """
    names = keys or {}
    slices = []
    for part in weight.parts:
        if part.split is Split.FIRST_RANK and rank != 0:
            return None
        slices.append(_read_part(folder, part, names.get(part.key, part.key), tp, rank, dtype))
    return torch.cat(slices)


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


def _read_part(folder: CheckpointFolder, part: Part, key: str, tp: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    if part.split in (Split.ROWS, Split.COLUMNS):
        first, last = part.bounds(tp, rank)
        stored = folder.read(key, 0 if part.split is Split.ROWS else 1, first, last)
    else:
        stored = folder.read(key)
    values = stored.to(dtype)
    if not torch.isfinite(values).all():
        if torch.isfinite(stored).all():
            raise CheckpointError(f"{folder.path}: tensor {key} does not fit {dtype}; choose another precision")
        raise CheckpointError(f"{folder.path}: tensor {key} holds NaN or infinity; download the checkpoint again")
    return values


def _indivisible(tp: int, config: DecoderConfig) -> str | None:
    """What of a model `tp` ranks cannot share evenly."""
    sizes = {
        "query heads": config.heads,
        "FFN columns": config.intermediate_size,
        "rows of the vocabulary": config.vocab_size,
    }
    if isinstance(config, DrafterConfig) and config.draft_vocab_size is not None:
        sizes["rows of the draft vocabulary"] = config.draft_vocab_size
    for name, size in sizes.items():
        if tp < 1 or size % tp:
            return f"the {size} {name}"
    if config.kv_heads % tp and tp % config.kv_heads:
        return f"the {config.kv_heads} key/value heads, nor they it"
    return None
