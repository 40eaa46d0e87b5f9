"""Values of a build's settings: a known pair's, then those assigned by name, then flags."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trtllm_dflash.catalog import find_entry_or_target
from trtllm_dflash.checkpoint.hub import looks_like_a_path
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import FAMILIES


def merge_values(
    model: str | None, assignments: Sequence[str], flags: Mapping[str, Any], planned: bool = False
) -> dict[str, Any]:
    """Merge a build's values for `BuildSettings` to check; each source overrides the one before.

    Args:
        model: a known pair by its name or its target's, a build configuration file, or another target.
        assignments: `KEY=VALUE` each, the value in YAML.
        flags: by the name of their setting.
        planned: nothing is built, so that any known pair will do.

    Raises:
        SettingsError: the pair is unknown or cannot be built, an assignment cannot be read, or there is no target.
    """
    entry = None if model is None else find_entry_or_target(model)
    values: dict[str, Any] = {} if entry is None else entry.build_values()
    values.update(_read_assignment(assignment) for assignment in assignments)
    values.update(flags)
    if model is not None and entry is None:
        _take_as_target(model, values)
    if entry is not None and (values["target"], values["drafter"]) != (entry.target, entry.drafter):
        values.pop("facts")  # these are other checkpoints
    if entry is not None and values["target"] == entry.target and not (entry.buildable or planned):
        raise SettingsError(f"--model {model}: family {entry.family} cannot be built yet; can: {', '.join(FAMILIES)}")
    if "target" not in values:
        raise SettingsError("say what to build: --model NAME or FOLDER, or --target with --drafter")
    values.setdefault("name", Path(str(values["target"])).resolve().name)
    return values


def _take_as_target(model: str, values: dict[str, Any]) -> None:
    """Make a model of no known pair the target; nobody but the user knows its drafter."""
    if "target" in values:
        raise SettingsError(f"--target {values['target']}: --model {model} names the target already")
    if "drafter" not in values:
        is_folder = os.path.isdir(os.path.expanduser(model))  # False of a name that is too long, too
        if looks_like_a_path(model) and not is_folder:
            raise SettingsError(f"--model {model}: there is no such folder")
        raise SettingsError(
            f"--model {model}: {'is' if is_folder else 'is no folder here and'} in no known pair, so say its drafter "
            f"too: --drafter FOLDER or NAME; or build it without one: --target {model}"
        )
    values["target"] = model


def assigned_name(assignment: str) -> str:
    """Name the setting that `KEY=VALUE` assigns."""
    return assignment.partition("=")[0].replace("-", "_")


def _read_assignment(assignment: str) -> tuple[str, Any]:
    _, equals, text = assignment.partition("=")
    if not equals:
        raise SettingsError(f"--set {assignment}: write KEY=VALUE")
    try:
        return assigned_name(assignment), yaml.safe_load(text)
    # ValueError: a day that no month has, or thousands of digits. RecursionError: nested without end.
    except (yaml.YAMLError, ValueError, RecursionError):
        raise SettingsError(f"--set {assignment}: the value is not valid YAML") from None
