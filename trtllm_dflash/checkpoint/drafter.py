"""Drafter checkpoints: DFlash, DFlash 2 and DSpark, in the formats of `drafter_config`.

All name their tensors alike. z-lab's have no embedding and no LM head; the others' have copies of the target's, and
speculators' perhaps a reduced vocabulary with a head of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.drafter_config import is_deepspec, read_drafter_config
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.quantized import QuantizedMatrix, check_tensors
from trtllm_dflash.checkpoint.slicing import RankReader
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.drafter import Drafter, DrafterConfig

#: What a checkpoint may carry besides: copies of the target's tensors, and the vocabulary maps.
_COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True, eq=False)
class DrafterCheckpoint:
    """An opened and checked drafter."""

    config: DrafterConfig
    folder: CheckpointFolder
    keys: Mapping[str, str]  # the model's tensor name -> this checkpoint's
    draft_to_target: torch.Tensor | None  # int32 [draft vocabulary]: the target's id of each draft id
    borrows_head: bool = False  # the reduced vocabulary's head is those rows of the target's
    quantized: Mapping[str, QuantizedMatrix] = field(default_factory=dict)  # of its tensors, by name

    def reader(self, tp: int, rank: int) -> RankReader:
        """Reads its tensors for `rank` of `tp`."""
        return RankReader(self.folder, tp, rank, self.keys, self.quantized)


def open_drafter(path: Path, target_layers: int | None = None) -> DrafterCheckpoint:
    """Reads a drafter's configuration and vocabulary map, and checks its tensors against them.

    `target_layers`: layers of the target, for speculators checkpoints, which do not record them.

    Raises:
        CheckpointError: not a DFlash drafter, a setting that is missing, unsupported or contradicts another, or
            tensors that do not fit.
    """
    folder = CheckpointFolder.open(path)
    if (path / "mask_embedding.pt").exists():
        # Drafting with the target's row for the mask instead would cost acceptance without any error.
        raise CheckpointError(f"{path}: a mask embedding of its own (mask_embedding.pt) is not supported")
    # NVIDIA NeMo's trainer saves the drafter as a submodule.
    prefix = "model." if "fc.weight" not in folder.tensors and "model.fc.weight" in folder.tensors else ""
    with reading_config(path):
        config = read_drafter_config(folder.config, target_layers)
        _check_taps(config, folder, prefix + "fc.weight")
    weights = Drafter(config).weights()
    keys = {part.key: prefix + part.key for weight in weights for part in weight.parts}
    quantized, precision = check_tensors(folder, weights, _ignored(folder, config), keys)
    config = config.model_copy(update=precision)
    draft_to_target = None if config.draft_vocab_size is None else _read_map(folder, config)
    return DrafterCheckpoint(config, folder, keys, draft_to_target, quantized=quantized)


def _check_taps(config: DrafterConfig, folder: CheckpointFolder, fc: str) -> None:
    taps, size = config.tap_layers, config.hidden_size
    info = folder.tensors.get(fc)
    # Of bytes that hold two numbers each, `check_tensors` knows the shape.
    shape = info.shape if info is not None and info.dtype != "U8" else ()
    if len(shape) == 2 and shape[1] != len(taps) * size:
        raise CheckpointError(
            f"config.json: {len(taps)} tap layers of {size} make {len(taps) * size} columns, but {fc} has {shape[1]}"
        )
    outside = [tap for tap in taps if not 0 <= tap < config.target_layers]
    # Where the format does not record the target's layers, `open_pair` compares the taps with the target itself.
    if outside and "speculators_model_type" not in folder.config:
        raise CheckpointError(
            f"config.json: tap layer {outside[0]} is outside the target's {config.target_layers} layers"
        )


# -- tensors ---------------------------------------------------------------------------------------------------------


def _ignored(folder: CheckpointFolder, config: DrafterConfig) -> tuple[str, ...]:
    """Lists tensors that are not read, and checks their shapes: the target's, and DSpark's confidence head.

    That head predicts which drafts are accepted; how many a slot verifies is chosen by what is accepted instead.
    """
    raw = folder.config
    if "speculators_model_type" not in raw and not is_deepspec(raw):
        return ()
    table = (config.vocab_size, config.hidden_size)
    copies = ["embed_tokens.weight"]
    if config.draft_vocab_size is None:
        copies.append("lm_head.weight")
    for name in copies:
        info = folder.tensors.get(name)
        if info is not None and info.shape != table:
            raise CheckpointError(f"{folder.path}: {name} is {list(info.shape)}, but the target's is {list(table)}")
    confidence = _check_confidence(folder, config) if raw.get("enable_confidence_head") else ()
    return (*_COPIES, *_MAPS, *copies, *confidence)


def _check_confidence(folder: CheckpointFolder, config: DrafterConfig) -> tuple[str, ...]:
    """Checks the shapes of a confidence head; returns its tensors' names."""
    seen = config.selector.rank if config.selector and folder.config.get("confidence_head_with_markov") else 0
    shapes = {"confidence_head.proj.weight": (1, config.hidden_size + seen), "confidence_head.proj.bias": (1,)}
    for name, shape in shapes.items():
        info = folder.tensors.get(name)
        if info is not None and info.shape != shape:
            raise CheckpointError(f"{folder.path}: {name} is {list(info.shape)} instead of {list(shape)}")
    return tuple(shapes)


def _read_map(folder: CheckpointFolder, config: DrafterConfig) -> torch.Tensor:
    """Reads target ids, int32 [draft vocabulary], from `d2t` (target id - draft id); `t2d`, a mask, must agree."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    for name, shape, dtypes in (("d2t", (size,), ("I64", "I32")), ("t2d", (vocab,), ("BOOL",))):
        info = folder.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{folder.path}: {name} is missing, but draft_vocab_size {size} needs it")
        if info.shape != shape or info.dtype not in dtypes:
            raise CheckpointError(
                f"{folder.path}: {name} is {list(info.shape)} {info.dtype} instead of {list(shape)} {dtypes[0]}"
            )
    offsets = folder.read("d2t").long()
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise CheckpointError(f"{folder.path}: d2t leads outside the vocabulary of {vocab}")
    reached = torch.zeros(vocab, dtype=torch.bool)
    reached[ids] = True
    if not torch.equal(reached, folder.read("t2d")):
        raise CheckpointError(f"{folder.path}: d2t and t2d do not name the same target ids")
    return ids.int()
