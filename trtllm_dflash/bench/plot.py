"""A step report as a picture: a step's time by batch, with its floor."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.step import Arm, StepReport
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install


def check_plot(file: Path) -> None:
    """Refuses a file that could not be drawn, before anything is measured.

    Raises:
        SettingsError: matplotlib is not installed, or it does not know the file's ending.
    """
    if find_spec("matplotlib") is None:
        raise SettingsError(f"--plot needs matplotlib: {pip_install('plots')}")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise SettingsError(f"--plot {file}: end its name in .png, .pdf or .svg")


def plot_steps(report: StepReport, file: Path) -> None:
    """Plots step time in ms against batch, one line per arm, with its floor dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.ticker import NullLocator, ScalarFormatter  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    arms: dict[Arm, None] = dict.fromkeys(line.arm for line in report.lines)
    for color, arm in enumerate(arms):
        lines = [line for line in report.lines if line.arm == arm]
        batch = [line.batch for line in lines]
        label = f"drafted, {arm.rows} rows" if arm.name == "drafted" else arm.name
        style: dict[str, Any] = {"color": f"C{color}", "linewidth": 1.8}
        axes.plot(batch, [line.seconds * 1e3 for line in lines], "o-", markersize=5, label=label, **style)
        axes.plot(batch, [report.floor(line) * 1e3 for line in lines], "_--", markersize=9, alpha=0.7, **style)
    axes.plot([], [], "_--", color="gray", label="floor of each")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({line.batch for line in report.lines}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch (slots)")
    axes.set_ylabel("time of a step (ms)")
    device = report.machine["gpu"] or report.machine["cpu"]
    length = report.lines[0].cache_length
    axes.set_title(f"{report.name}, {report.config.precision}, {length} tokens in each slot\n{device}", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9, ncols=min(len(arms) + 1, 6))
    figure.savefig(file)
