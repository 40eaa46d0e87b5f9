"""The trained drafter in both formats that exist, read back and compared."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.checkpoint.folder import SINGLE_FILE
from trtllm_dflash.checkpoint.speculators import speculators_config
from trtllm_dflash.engine.directory import CONFIG_FILE
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.drafter import DrafterConfig

Tensor = torch.Tensor

#: Folders of an export: z-lab's format, and speculators'.
ZLAB, SPECULATORS = "drafter", "drafter-speculators"


def write_both(
    folder: Path,
    raw: dict[str, Any],
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    target: str,
    architectures: list[str],
) -> list[str]:
    """Writes the drafter into two folders of `folder`; returns their files.

    Args:
        raw: its configuration in z-lab's format.
        target: the target's folder or name, which speculators' format records.
        architectures: the target's.

    Raises:
        CheckpointError: what was written is not read as it is.
    """
    configs = {ZLAB: raw, SPECULATORS: speculators_config(raw, config, target, architectures)}
    for name, content in configs.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        (place / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, place / SINGLE_FILE, metadata={"format": "pt"})
        (place / SINGLE_FILE).chmod(place.stat().st_mode & 0o666)  # save_file leaves it to its owner alone
        _compare(place, config, tensors)
    return [f"{name}/{file}" for name in configs for file in (CONFIG_FILE, SINGLE_FILE)]


def _compare(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Checks that a drafter is read as it was written."""
    opened = open_drafter(folder, config.target_layers)
    if opened.config != config:
        raise CheckpointError(f"{folder}: its configuration is not read as it was written")
    for key, tensor in tensors.items():
        if not torch.equal(opened.folder.read(opened.keys[key]), tensor):
            raise CheckpointError(f"{folder}: {key} is not read as it was written")
