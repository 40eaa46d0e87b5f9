"""`build --plan`: memory and speed of an engine, predicted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.commands.build_settings import build_settings
from trtllm_dflash.commands.settings import flag_of, validated
from trtllm_dflash.commands.terminal import command_line, show
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.output import writing

if TYPE_CHECKING:
    from trtllm_dflash.build.plan import PlanSettings
    from trtllm_dflash.build.settings import BuildSettings


def show_plan(
    model: str | None,
    assignments: Sequence[str],
    flags: Mapping[str, Any],
    planned: Mapping[str, Any],
    operating: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Print the plan for `--gpu`, or without one a comparison of GPUs.

    Args:
        flags: of the build.
        planned: of the plan alone, by the names of its settings.
        operating: of a plan at fixed speeds, likewise.
        as_json: everything in it as JSON, not tables.

    Raises:
        SettingsError: a flag is wrong.
    """
    from trtllm_dflash.build.plan import BuildPlan, PlanSettings, compare_gpus, make_plan
    from trtllm_dflash.commands.plan_table import comparison_lines, plan_lines

    without_gpu = {name: value for name, value in flags.items() if name != "gpu"}
    settings = build_settings(model, assignments, without_gpu, planned=True)
    gpu = flags.get("gpu", settings.gpu)
    wanted = validated(PlanSettings, {**planned, **({} if gpu is None else {"gpu": gpu.lower()})})
    settings = settings.model_copy(update={"gpu": None})
    if operating:
        _show_operation(settings, wanted, operating, as_json)
        return
    found = compare_gpus(settings, wanted) if gpu is None else make_plan(settings, wanted)
    if as_json:
        click.echo(found.model_copy(update={"command": command_line()}).model_dump_json(indent=2))
        return
    show(*(plan_lines(found) if isinstance(found, BuildPlan) else comparison_lines(found)))


def _show_operation(
    settings: "BuildSettings", wanted: "PlanSettings", operating: Mapping[str, Any], as_json: bool
) -> None:
    from trtllm_dflash.bench.plot import check_plot
    from trtllm_dflash.build.operating import OperatingPlan, OperatingSettings, compare_operations, plan_operation
    from trtllm_dflash.commands.operating_plot import plot_operation
    from trtllm_dflash.commands.operating_table import operating_comparison_lines, operating_lines
    from trtllm_dflash.sweep.settings import positive_numbers

    at, plot = operating.get("at"), operating.get("plot")
    if at is None:
        raise SettingsError(f"{flag_of(next(iter(operating)))}: goes with --at, the tokens/s of each user")
    if operating.get("eagle3_drafts") is not None and operating.get("eagle3_acceptance") is None:
        raise SettingsError("--eagle3-drafts: say with --eagle3-acceptance how many tokens a step commits with them")
    if plot is not None:
        check_plot(plot)
        if wanted.gpu is None:
            raise SettingsError("--plot: is drawn for one GPU; name it with --gpu")
    values = {name: value for name, value in operating.items() if name.startswith("eagle3")}
    speeds = validated(OperatingSettings, {**values, "at": positive_numbers("at", at)})
    plan = plan_operation if wanted.gpu is not None else compare_operations
    found = plan(settings, wanted, speeds)
    if plot is not None and isinstance(found, OperatingPlan):
        with writing(plot, "--plot"):
            plot_operation(found, plot)
    if as_json:
        click.echo(found.model_copy(update={"command": command_line()}).model_dump_json(indent=2))
        return
    show(*(operating_lines(found) if isinstance(found, OperatingPlan) else operating_comparison_lines(found)))
