"""A build's settings and its folder, for the commands that build."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_dflash.commands.settings import validated

if TYPE_CHECKING:
    from trtllm_dflash.build.settings import BuildSettings

_ENGINES = Path("engines")


def build_settings(
    model: str | None, assignments: Sequence[str], flags: Mapping[str, Any], planned: bool = False
) -> "BuildSettings":
    """Check `--model`, `--set` and the flags together; make the settings of a build, or of a plan of one.

    Raises:
        SettingsError: a value is wrong, or what to build is not said.
    """
    from trtllm_dflash.build.settings import BuildSettings
    from trtllm_dflash.build.values import assigned_name, merge_values

    values = merge_values(model, assignments, flags, planned)
    return validated(BuildSettings, values, set(map(assigned_name, assignments)).difference(flags))


def engine_folder(settings: "BuildSettings", output: Path | None) -> Path:
    """Choose where the engine goes: `--output`, or engines/NAME."""
    folder = output or _ENGINES / settings.name
    # Of a folder that is not there, in which nothing is found; or "." and "..", which are no names.
    if (".." in folder.parts and not folder.parent.exists()) or folder.name in ("", ".."):
        return Path(os.path.realpath(folder))
    return folder
