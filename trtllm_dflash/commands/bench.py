"""`bench`: times an engine on this machine."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.commands.kernels_option import kernels_option
from trtllm_dflash.commands.settings import given, validated
from trtllm_dflash.commands.terminal import command_line, progress_bar, show
from trtllm_dflash.output import check_writable, writing

if TYPE_CHECKING:
    from trtllm_dflash.bench.step import StepReport


@click.group()
def bench() -> None:
    """Benchmark the decoding steps of an engine or of a model's shape."""


@bench.command("step")
@click.option("--engine", type=click.Path(path_type=Path), help="Engine directory.")
@click.option("--shape", help="Random weights of a model's shape instead: qwen3-8b, tiny (smaller than the pair), ...")
@click.option(
    "--precision",
    help="--shape: auto (bf16 with a GPU, fp32 without), fp32, bf16, fp16, fp8 (as `build` rounds to it) or "
    "fp8-blocks (as FP8 checkpoints are published: experts too).",
)
@click.option("--tp", type=int, help="--shape: tensor-parallel ranks.  [default: 1]")
@click.option("--layers", type=int, help="--shape: layers of the target, for a smaller model.  [default: the shape's]")
@click.option("--drafter-precision", help="--shape: fp8: of the drafter's matrices.  [default: the target's]")
@click.option("--kv", help="--shape: fp8: of the caches.  [default: --precision's own type]")
@click.option("--draft-vocab", type=int, help="--shape: tokens that can be drafted.  [default: all]")
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@kernels_option
@click.option("--batch", metavar="N,N,...", help="Slots that decode together.  [default: 1,8,32]")
@click.option("--rows", metavar="N,N,...", help="Rows a step verifies; 1: no drafts.  [default: 1, half a block, all]")
@click.option("--cache-length", type=int, help="Tokens that each slot holds.  [default: 1024, or less where less fits]")
@click.option(
    "--simulate-acceptance", type=float, help="Impose this many tokens a step with the whole block, for tokens/s."
)
@click.option(
    "--draft-tree",
    metavar="auto|off|N",
    help="Also time steps that draft a tree of N nodes: 15, 31 or 63.  [default: off]",
)
@click.option("--share-rows", is_flag=True, default=None, help="Also time drafted steps whose slots share their rows.")
@click.option("--rounds", type=int, help="Rounds; the median counts.  [default: 7]")
@click.option("--steps", type=int, help="Steps in a round.  [default: 20]")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON to this file.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result into a .png, .pdf or .svg file."
)
def bench_step(json_file: Path | None, plot: Path | None, **flags: Any) -> None:
    """Time plain and drafted steps against the least that they could take."""
    from trtllm_dflash.bench.plot import check_plot, plot_steps
    from trtllm_dflash.bench.step import StepBenchSettings, open_bench, ranks_of
    from trtllm_dflash.session.launcher import end_on_interrupt, launch_ranks, launched_rank

    settings = validated(StepBenchSettings, given(flags))
    for flag, file in {"--json": json_file, "--plot": plot}.items():
        if file is not None:
            check_writable(file, flag)
    if plot is not None:
        check_plot(plot)
    tp = ranks_of(settings)
    if tp > 1 and launched_rank() is None:
        launch_ranks(tp, sys.argv[1:])
    end_on_interrupt()
    with open_bench(settings) as steps:
        if steps is None:
            return
        try:
            with progress_bar() as progress:
                steps.run(progress)
        finally:  # interrupted: what was finished by then
            if steps.report.lines:
                _show_steps(steps.report)
                if json_file is not None:
                    _write_json(json_file, {"command": command_line(), **steps.report.as_json()})
        if plot is not None:
            with writing(plot, "--plot"):
                plot_steps(steps.report, plot)


def _show_steps(report: "StepReport") -> None:
    from trtllm_dflash.commands.step_table import foot_lines, head_lines, step_table

    show(*head_lines(report), step_table(report), *foot_lines(report))


def _write_json(file: Path, value: dict[str, Any]) -> None:
    with writing(file, "--json"):
        file.write_text(json.dumps(value, indent=2) + "\n")
