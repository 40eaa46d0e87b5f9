"""`build --plan`: memory and speed of an engine, predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from trtllm_dflash.commands.build_settings import build_settings
from trtllm_dflash.commands.settings import validated
from trtllm_dflash.commands.terminal import command_line, show


def show_plan(
    model: str | None, assignments: Sequence[str], flags: Mapping[str, Any], planned: Mapping[str, Any], as_json: bool
) -> None:
    """Print the plan for `--gpu`, or without one a comparison of GPUs.

    Args:
        flags: of the build.
        planned: of the plan alone, by the names of its settings.
        as_json: everything in it as JSON, not tables.

    Raises:
        SettingsError: a flag is wrong.
    """
    from trtllm_dflash.build.plan import BuildPlan, PlanSettings, compare_gpus, make_plan
    from trtllm_dflash.commands.plan_table import comparison_lines, plan_lines

    without_gpu = {name: value for name, value in flags.items() if name != "gpu"}
    settings = build_settings(model, assignments, without_gpu, planned=True)
    gpu = flags.get("gpu") or settings.gpu
    wanted = validated(PlanSettings, {**planned, **({"gpu": gpu.lower()} if gpu else {})})
    settings = settings.model_copy(update={"gpu": None})
    found = make_plan(settings, wanted) if gpu else compare_gpus(settings, wanted)
    if as_json:
        click.echo(found.model_copy(update={"command": command_line()}).model_dump_json(indent=2))
        return
    show(*(plan_lines(found) if isinstance(found, BuildPlan) else comparison_lines(found)))
