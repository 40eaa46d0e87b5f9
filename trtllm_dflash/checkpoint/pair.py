"""A target and its drafter, opened together and known to belong together."""

from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint, open_drafter
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.errors import PairError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Pair:
    """A target, and its drafter unless it decodes plainly. All tensors are checked, none is loaded."""

    target_folder: CheckpointFolder
    target_config: DecoderConfig
    drafter: DrafterCheckpoint | None


def open_pair(target: Path, drafter: Path | None = None) -> Pair:
    """Opens both folders and checks their tensors, and that the drafter was made for this target.

    Raises:
        CheckpointError: a folder is not what its config.json says, or asks for something not supported.
        PairError: the drafter is for another target; names both values.
    """
    folder = CheckpointFolder.open(target)
    with reading_config(target):
        config = read_target_config(folder.config)
    parts = [part for weight in build_target(config).weights() for part in weight.parts]
    # Some exports of tied embeddings save the table a second time as the head.
    folder.check(parts, ["lm_head.weight"] if config.tied_embeddings else [])
    if drafter is None:
        return Pair(folder, config, None)
    opened = open_drafter(drafter, config.layers)
    _check_match(target, config, drafter, opened)
    return Pair(folder, config, opened)


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
