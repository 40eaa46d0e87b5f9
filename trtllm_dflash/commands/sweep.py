"""`sweep`: throughput against latency."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.api_key import VARIABLE, read_api_key
from trtllm_dflash.commands.kernels_option import kernels_option
from trtllm_dflash.commands.settings import given, validated
from trtllm_dflash.commands.terminal import show, sweep_bars
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.output import held, writing

if TYPE_CHECKING:
    from trtllm_dflash.sweep.dataset import Dataset
    from trtllm_dflash.sweep.load import Target
    from trtllm_dflash.sweep.results import Results
    from trtllm_dflash.sweep.settings import SweepSettings


@click.command()
@click.option("--url", help="A server: HOST:PORT is Triton's gRPC, http://HOST:PORT an OpenAI API.")
@click.option("--engine", type=click.Path(path_type=Path), help="Engine directory, served in this process instead.")
@click.option(
    "--shape", help="Random weights of a model's shape in this process: qwen3-8b, tiny (smaller than the pair), ..."
)
@click.option("--model", help="Model on the server; or NAME=MODEL,...  [default: ensemble, or the only one]")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="Triton: folder whose chat template prompts go through."
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help=f"Key of every OpenAI API; or {VARIABLE} holds it."
)
@click.option("--timeout", type=float, help="Seconds in which a server may send nothing at all.  [default: 600]")
@click.option(
    "--compare", metavar="plain,draft|NAME=URL,...", help="Arms to measure by turns: plain and draft, or named servers."
)
@click.option("--metrics-url", help="Where drafts are counted; or NAME=URL,...  [default: /metrics of the API]")
@click.option("--gpus", type=int, help="GPUs of the server, or of each, for tokens/s/GPU.")
@click.option("--concurrency", metavar="N,N,...", help="Clients that each wait for their reply.  [default: 1,2,4,8]")
@click.option("--rate", metavar="R,R,...", help="Or requests per second, sent on schedule without waiting for replies.")
@click.option("--arrival", help="--rate: poisson or constant.  [default: poisson]")
@click.option("--requests", type=int, help="Requests at each point and arm.  [default: 8 a client, at least 32]")
@click.option("--seconds", type=float, help="Or seconds during which requests start, at each point and arm.")
@click.option(
    "--ramp", type=float, help="--seconds: clients start one by one in the N seconds before.  [default: at once]"
)
@click.option("--warmup", type=int, help="Requests before each round, not counted.  [default: one a client]")
@click.option("--rounds", type=int, help="Rounds of each arm at a point.  [default: 2 with two arms, 1 with one]")
@click.option(
    "--dataset", type=click.Path(path_type=Path), multiple=True, help="JSON lines.  [default: the shipped prompts]"
)
@click.option("--output-tokens", type=int, help="Tokens of each reply, exactly, past the model's end token.")
@click.option(
    "--max-tokens", type=int, help="Or tokens of a reply at most, up to the model's end token.  [default: 256]"
)
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.  [default: 0]")
@click.option("--top-k", type=int, help="0 keeps all.  [default: 0]")
@click.option("--top-p", type=float, help="[default: 1]")
@click.option("--seed", type=int, help="Seed of sampling, arrivals and the order of prompts.  [default: 0]")
@click.option("--at", metavar="X,X,...", help="Read throughput, and the arms' ratio, at these tokens/s/user.")
@click.option("--slo-tps", type=float, help="Search for the largest load with so many tokens/s/user.")
@click.option("--slo-ttft-ms", type=float, help="And a first token within this many milliseconds.")
@click.option("--slo-percentile", type=int, help="Percentile of both limits: 50, 90 or 99.  [default: 50]")
@click.option("--max-concurrency", type=int, help="Largest load of a search.  [default: 256]")
@click.option("--max-rate", type=float, help="Or search in requests per second, up to this many.")
@click.option("--device", help="In this process: cpu, cuda or auto.  [default: auto]")
@kernels_option
@click.option("--draft-length", metavar="auto|N", help="In this process: tokens to draft a step.  [default: auto]")
@click.option("--draft-tree", metavar="auto|off|N", help="In this process: nodes of a tree.  [default: auto]")
@click.option("--prompt-tokens", type=int, help="In this process: prompts of so many random tokens.")
@click.option(
    "--simulate-acceptance", type=float, help="In this process: impose this many tokens a step with the whole block."
)
@click.option("--precision", help="--shape: auto, fp32, bf16, fp16, fp8 or fp8-blocks.")
@click.option("--tp", type=int, help="--shape: tensor-parallel ranks.  [default: 1]")
@click.option("--layers", type=int, help="--shape: layers of the target, for a smaller model.")
@click.option("--drafter-precision", help="--shape: fp8: of the drafter's matrices.")
@click.option("--draft-vocab", type=int, help="--shape: tokens that can be drafted.  [default: all]")
@click.option("--label", help="Name of this sweep in plots.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for results and report.")
@click.option("--resume", is_flag=True, help="Continue what --output holds.")
@click.option("--force", is_flag=True, help="Start again, replacing what --output holds.")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON.")
def sweep(output: Path, resume: bool, force: bool, as_json: bool, api_key_file: Path | None, **flags: Any) -> None:
    """Measure throughput against latency, with and without drafting."""
    from trtllm_dflash.sweep.plots import can_plot
    from trtllm_dflash.sweep.settings import SweepSettings, check_settings

    settings = validated(SweepSettings, given(flags))
    check_settings(settings)
    if not can_plot():
        later = f"{pip_install('sweep')}, here or where you run: trtllm-dflash report SWEEP --output DIR"
        click.echo(f"warning: no plots and no page without matplotlib; {later}", err=True)
    if resume and force:
        raise SettingsError("--resume and --force: give one of them")
    store = _Store(output, resume, force, as_json)
    if settings.url is not None or settings.servers:
        _sweep_server(settings, store, api_key_file)
    elif api_key_file is not None:
        raise SettingsError("--api-key-file: an engine in this process has no keys; this goes with an http:// URL")
    else:
        _sweep_local(settings, store)


class _Store:
    """The output of a sweep: its folder, and its progress on the terminal."""

    def __init__(self, folder: Path, resume: bool, force: bool, as_json: bool) -> None:
        self.folder, self._resume, self._force, self._as_json = folder, resume, force, as_json

    def measure(
        self, settings: "SweepSettings", dataset: "Dataset", make: "Callable[[], Target]", **about: Any
    ) -> None:
        """Run the sweep on a target that is made on its event loop, and write its results even after an error."""
        from trtllm_dflash.sweep.results import Results
        from trtllm_dflash.sweep.sweep import open_results, plan_results

        fresh, is_new = plan_results(settings, dataset, **about), not self.folder.exists()
        with writing(self.folder):
            results: Results = open_results(fresh, self.folder, self._resume, self._force)
        try:
            with held(self.folder, "sweep"):
                for warning in results.warnings:
                    click.echo(f"warning: {warning}", err=True)
                self._run(settings, dataset, make, results)
        finally:
            if is_new and not results.rounds:
                with suppress(OSError):  # somebody has put something there
                    self.folder.rmdir()

    def _run(
        self, settings: "SweepSettings", dataset: "Dataset", make: "Callable[[], Target]", results: "Results"
    ) -> None:
        from trtllm_dflash.sweep.sweep import Sweep

        async def run(sweep: Callable[["Target"], Any]) -> None:
            async with make().opened() as target:
                await sweep(target)

        try:
            with sweep_bars() as progress:
                asyncio.run(run(lambda target: Sweep(settings, dataset, target, results, self.folder, progress).run()))
        finally:  # interrupted: what was finished by then
            if results.rounds:
                self._show(results)

    def _show(self, results: "Results") -> None:
        from trtllm_dflash.sweep.plots import can_plot
        from trtllm_dflash.sweep.report import fixed_speed_table, limit_lines, notes, point_table, write_reports
        from trtllm_dflash.sweep.results import CSV

        # Before files, for which there may be no room.
        if self._as_json:
            document = results.model_dump(mode="json", exclude={"rounds", "categories"})
            click.echo(json.dumps(document, indent=1))
        else:
            show(point_table(results), *notes(results), *limit_lines(results))
            if results.fixed_speed:
                show(fixed_speed_table(results.fixed_speed))
        with writing(self.folder):
            results.write_csv(self.folder / CSV)
            if can_plot():
                write_reports(results, self.folder)
        if not self._as_json:
            click.echo(f"{self.folder}: results.json, results.csv" + (", report.html, plots" if can_plot() else ""))


def _sweep_server(settings: "SweepSettings", store: _Store, api_key_file: Path | None) -> None:
    from trtllm_dflash.sweep.dataset import read_dataset
    from trtllm_dflash.sweep.servers import check_servers, server_targets

    dataset = read_dataset(settings.dataset).shuffled(settings.seed)
    check_servers(settings, dataset, has_key_file=api_key_file is not None)
    try:
        make = server_targets(settings, read_api_key(api_key_file, "--api-key-file"))
        store.measure(settings, dataset, make, gpus=settings.gpus)
    except ImportError as error:
        raise SettingsError(f"a server's sweep needs {error.name}: {pip_install('sweep')}") from None


def _sweep_local(settings: "SweepSettings", store: _Store) -> None:
    from trtllm_dflash.bench.machine import machine
    from trtllm_dflash.session.launcher import end_on_interrupt, launch_ranks, launched_rank
    from trtllm_dflash.sweep.local_engine import open_local_engine, ranks_of, with_shape_defaults
    from trtllm_dflash.sweep.local_target import LocalTarget
    from trtllm_dflash.sweep.sweep import imposed_curve

    settings = with_shape_defaults(settings)
    tp = ranks_of(settings)
    if tp > 1 and launched_rank() is None:
        launch_ranks(tp, sys.argv[1:])
    if tp > 1:
        end_on_interrupt()
    with open_local_engine(settings) as local:
        if local is None:
            return
        acceptance = local.acceptance
        store.measure(
            settings,
            local.dataset,
            lambda: LocalTarget(local.llm, local.service),
            gpus=local.gpus,
            machine=machine(local.llm.session.device),
            engine=local.about(random_weights=settings.shape is not None),
            imposed_acceptance=None if acceptance is None else imposed_curve(acceptance),
        )
