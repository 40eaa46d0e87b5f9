"""`report`: sweeps shown again, and compared."""

from pathlib import Path

import click

from trtllm_dflash.commands.terminal import show
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.output import writing


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUNS...")
@click.option("--at", metavar="X,X,...", help="Read throughput, and the ratio of two, at these tokens/s/user.")
@click.option(
    "--plan", type=click.Path(path_type=Path), help="What `build --plan` predicted (JSON), drawn over one sweep."
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for report.html and plots.")
@click.option("--force", is_flag=True, help="Replace the files in the folder.")
def report(runs: tuple[Path, ...], at: str | None, plan: Path | None, output: Path | None, force: bool) -> None:
    """Show sweeps again, and compare them (folders or results.json)."""
    from trtllm_dflash.sweep.plots import can_plot
    from trtllm_dflash.sweep.report import (
        compare_runs,
        differences,
        fixed_speed_table,
        limit_lines,
        notes,
        point_table,
        read_plan,
        write_comparison,
    )
    from trtllm_dflash.sweep.results import ACCEPTANCE, PARETO, REPORT, check_free, read_results
    from trtllm_dflash.sweep.settings import positive_numbers

    if output is not None and not can_plot():
        raise SettingsError(f"--output: plots need matplotlib: {pip_install('sweep')}")
    if output is not None and not force:
        check_free(output, (PARETO, ACCEPTANCE, REPORT))
    if plan is not None and len(runs) > 1:
        raise SettingsError("--plan: it is drawn over one sweep; give one")
    found = [read_results(run) for run in runs]
    predicted = read_plan(plan) if plan is not None else []
    if predicted and not found[0].gpus:
        raise SettingsError("--plan: it predicts tokens/s/GPU, and the sweep was not told its --gpus")
    if len({run.load_unit for run in found}) > 1:
        raise SettingsError("one sweep counts clients and another requests/s; their points cannot be shown together")
    speeds = () if at is None else positive_numbers("at", at)
    readings = compare_runs(found, speeds)
    for run in found:
        show(f"{run.label}: {run.device}", point_table(run), *notes(run), *limit_lines(run))
    if readings:
        show(fixed_speed_table(readings))
    for note in differences(found):
        click.echo(f"warning: {note}", err=True)
    if output is not None:
        with writing(output):
            write_comparison(found, readings, output, predicted)
        click.echo(f"{output}: report.html, plots")
