"""A target and its drafter, opened together and known to belong together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint, open_drafter
from trtllm_dflash.checkpoint.drafter_config import is_drafter
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.quantized import QuantizedMatrix, check_tensors
from trtllm_dflash.checkpoint.slicing import RankReader
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.errors import CheckpointError, PairError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.stored import as_stored, beside_text, checkpoint_names

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_PIECE = 1 << 14  # rows of them that are compared at a time


@dataclass(frozen=True)
class Pair:
    """A target, and its drafter unless it decodes plainly. All tensors are checked, none is loaded."""

    target_folder: CheckpointFolder
    target_config: DecoderConfig
    drafter: DrafterCheckpoint | None
    quantized: Mapping[str, QuantizedMatrix] = field(default_factory=dict)  # of the target's tensors, by name
    keys: Mapping[str, str] = field(default_factory=dict)  # the target model's tensor name -> its checkpoint's

    @property
    def drafter_config(self) -> DrafterConfig | None:
        """The drafter's configuration, where there is one."""
        return None if self.drafter is None else self.drafter.config

    def target_reader(self, tp: int, rank: int) -> RankReader:
        """Reads the target's tensors for `rank` of `tp`."""
        return RankReader(self.target_folder, tp, rank, self.keys, self.quantized)


def open_pair(target: Path, drafter: Path | None = None) -> Pair:
    """Opens both folders and checks their tensors, and that the drafter was made for this target.

    Raises:
        CheckpointError: a folder is not what its config.json says, or asks for something not supported.
        PairError: the drafter is for another target; names both values.
    """
    folder = CheckpointFolder.open(target)
    if is_drafter(folder.config):
        raise CheckpointError(f"{target}: is a drafter's checkpoint: --drafter takes it, and --target its target's")
    with reading_config(target):
        config = as_stored(read_target_config(folder.config), folder.tensors)
    weights = build_target(config).weights()
    keys = checkpoint_names(weights, folder.tensors)
    # Some exports of tied embeddings save the table a second time as the head.
    ignored = [_HEAD] if config.tied_embeddings else []
    quantized, precision = check_tensors(folder, weights, [*ignored, *beside_text(config)], keys)
    if config.tied_embeddings:
        _check_tied(folder, keys.get(_TABLE, _TABLE))
    config = config.model_copy(update=precision)
    if drafter is None:
        return Pair(folder, config, None, quantized, keys)
    opened = open_drafter(drafter, config.layers)
    _check_match(target, config, drafter, opened)
    if config.embedding_scale is not None:
        scaled = opened.config.model_copy(update={"embedding_scale": config.embedding_scale})
        opened = replace(opened, config=scaled)
    return Pair(folder, config, opened, quantized, keys)


def _check_tied(folder: CheckpointFolder, table: str) -> None:
    """Refuses a head that is not the embedding it is tied to: some libraries would take the one, some the other."""
    head = folder.tensors.get(_HEAD)
    if head is None:
        return
    rows, *_ = folder.tensors[table].shape
    pieces = [(first, first + _PIECE) for first in range(0, rows, _PIECE)]
    if head.shape != folder.tensors[table].shape or not all(
        torch.equal(folder.read(_HEAD, 0, *piece).float(), folder.read(table, 0, *piece).float()) for piece in pieces
    ):
        raise CheckpointError(
            f"{folder.path}: {_HEAD} differs from {table}, though config.json has tie_word_embeddings true; "
            f"set that to false to keep {_HEAD}, or save the checkpoint without it"
        )


def _check_match(target: Path, config: DecoderConfig, drafter: Path, opened: DrafterCheckpoint) -> None:
    made_for = opened.config
    values = {
        "hidden size": (made_for.hidden_size, config.hidden_size),
        "vocabulary": (made_for.vocab_size, config.vocab_size),
        "number of layers": (made_for.target_layers, config.layers),
    }
    for name, (wanted, found) in values.items():
        if wanted != found:
            raise PairError(f"{drafter} was made for another target: {name} {wanted}, but {target} has {found}")
    outside = [tap for tap in made_for.tap_layers if not 0 <= tap < config.layers]
    if outside:
        raise PairError(f"{drafter} taps layer {outside[0]}, but the last layer of {target} is {config.layers - 1}")
