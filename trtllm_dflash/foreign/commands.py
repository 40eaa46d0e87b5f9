"""The commands for other runtimes: `launch`, `compare`, `export`, and what `deploy` takes for a pair on one of them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash import api_key
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.terminal import progress_bar

if TYPE_CHECKING:
    from trtllm_dflash.foreign.compare import Comparison

#: The exit code of `compare` where the swap is not safe; 1 and 2 are errors, as everywhere.
UNSAFE = 3

#: The parameters that `pair_options` and RUNTIME add to a command.
PAIR_FLAGS = ("runtime", "model", "target", "drafter", "method", "gpu", "tp", "max_batch", "max_seq_len")

RUNTIME = click.option("--runtime", help="tensorrt-llm, vllm or sglang.")


def pair_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags that say which pair runs where."""
    options = (
        click.option("--model", help="A known pair (see `models`)."),
        click.option("--target", help="Target: a folder or a Hugging Face name."),
        click.option("--drafter", help="Drafter: a folder or a Hugging Face name."),
        click.option("--method", help="dflash, eagle3 or none.  [default: dflash]"),
        click.option("--gpu", help="What to plan for: b300, h200, ...  [default: the one present]"),
        click.option("--tp", type=int, help="GPUs that share every layer.  [default: 1]"),
        click.option("--max-batch", type=int, help="Sequences at a time.  [default: what fits, at most 64]"),
        click.option("--max-seq-len", type=int, help="Prompt and reply together.  [default: 16384, or what is taken]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def launch_settings(given: dict[str, Any]) -> Any:
    """`LaunchSettings` from flags; those that are None keep their defaults.

    Raises:
        SettingsError: one is wrong, or there is no runtime.
    """
    from trtllm_dflash.cli import validated
    from trtllm_dflash.foreign.plan import LaunchSettings

    values = {name: value for name, value in given.items() if value is not None}
    if "runtime" not in values:
        raise SettingsError("--runtime: say which: tensorrt-llm, vllm or sglang")
    return validated(LaunchSettings, values, "--")


@click.command()
@RUNTIME
@pair_options
@click.option("--draft-length", type=int, help="Tokens to draft a step.  [default: the block; EAGLE-3: 3]")
@click.option("--pp", type=int, help="Stages of layers; without drafting alone.  [default: 1]")
@click.option("--nodes", type=int, help="Machines that the GPUs are spread over.  [default: 1]")
@click.option("--node-rank", type=int, help="sglang: which of them this is.  [default: 0]")
@click.option("--head", help="vllm, sglang: the first node's address, with several.")
@click.option("--host", help="Address to listen at.  [default: 127.0.0.1, this machine only]")
@click.option("--port", type=int, help="Port of its OpenAI API.  [default: 8000]")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for its files.  [default: a temporary one]")
@click.option("--dry-run", is_flag=True, help="Print the command and files, each choice with its reason.")
def launch(output: Path | None, dry_run: bool, **flags: Any) -> None:
    """Serve a pair with TensorRT-LLM, vLLM or SGLang, until Ctrl-C."""
    from trtllm_dflash.foreign.launch import start
    from trtllm_dflash.foreign.registry import launch_of

    if dry_run and output is not None:
        raise SettingsError("--output: --dry-run writes nothing")
    found = launch_of(launch_settings(flags))
    if dry_run:
        click.echo(found.script(), nl=False)
        return
    sys.exit(start(found, output))


def deploy_runtime(output: Path, force: bool, pair: dict[str, Any], others: dict[str, Any]) -> None:
    """`deploy --runtime`: the model repository of a pair on TensorRT-LLM; `others` are flags that engines have.

    Raises:
        SettingsError: another runtime, or a flag that is an engine's.
        EngineError: see `deploy_llmapi`.
    """
    from trtllm_dflash.foreign.registry import plan_for
    from trtllm_dflash.foreign.triton import deploy_llmapi

    if pair["runtime"] != "tensorrt-llm":
        raise SettingsError(f"--runtime {pair['runtime']}: Triton serves tensorrt-llm; for another runtime use launch")
    length = others.pop("draft_length", None)
    engine_flag = next((name for name, value in others.items() if value is not None), None)
    if engine_flag is not None:
        raise SettingsError(f"--{engine_flag.replace('_', '-')}: is for an engine of ours, not for --runtime")
    if length is not None:
        if not length.isdecimal():
            raise SettingsError(f"--draft-length {length}: TensorRT-LLM takes a number")
        pair = {**pair, "draft_length": int(length)}
    deploy_llmapi(plan_for(launch_settings(pair)), output, force)
    click.echo(
        f"{output}: written; serve it in tritonserver:YY.MM-trtllm-python-py3: tritonserver --model-repository={output}"
    )


@click.command(
    epilog="Exit code 0: safe. Every greedy text is the same, or each first difference is a near-tie by the "
    f"log-probabilities that the servers offer. {UNSAFE}: unsafe. \n\n"
    f"{api_key.VARIABLE}, where it is set, is sent to both."
)
@click.option("--a", required=True, metavar="URL", help="A server with OpenAI's API: http://HOST:PORT.")
@click.option("--b", required=True, metavar="URL", help="The one that would take its place.")
@click.option("--prompts", type=click.Path(path_type=Path), help="As for generate.  [default: some that are shipped]")
@click.option("--number", type=click.IntRange(min=1), default=16, help="Shipped prompts to send.  [default: 16]")
@click.option("--max-tokens", type=int, help="Most tokens a reply.  [default: 128]")
@click.option("--near-tie", type=float, help="Log-probability that near-tied tokens are apart.  [default: 0.25]")
@click.option("--chat/--raw", default=True, help="As a chat, or as a text to go on with.  [default: --chat]")
@click.option("--model-a", help="A's model.  [default: its only one]")
@click.option("--model-b", help="B's model.  [default: its only one]")
@click.option("--body-a", metavar="JSON", help='Further fields of A\'s requests, such as {"draft": false}.')
@click.option("--body-b", metavar="JSON", help="Likewise of B's.")
@click.option("--metrics-a", metavar="URL", help="A's metrics.  [default: URL/metrics]")
@click.option("--metrics-b", metavar="URL", help="B's metrics.  [default: URL/metrics]")
@click.option("--timeout", type=float, help="Seconds for a reply.  [default: 300]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(prompts: Path | None, number: int, as_json: bool, **flags: Any) -> None:
    """Send the same prompts to two servers: may B take A's place?"""
    from trtllm_dflash.cli import read_prompts, validated
    from trtllm_dflash.foreign.compare import CompareSettings, shipped_prompts
    from trtllm_dflash.foreign.compare import compare as run

    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("body_a", "body_b"):
        if name in given:
            given[name] = _json_object(f"--{name.replace('_', '-')}", given[name])
    given["prompts"] = tuple(read_prompts(None, prompts)) if prompts is not None else shipped_prompts(number)
    given["api_key"] = os.environ.get(api_key.VARIABLE) or None
    found = run(validated(CompareSettings, given, "--"))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    sys.exit(0 if found.safe else UNSAFE)


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine directory of the torch backend.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace an export that stands at --output.")
def export(engine: Path, output: Path, force: bool) -> None:
    """Write an engine's pair as Hugging Face folders: target and drafter."""
    from trtllm_dflash.build.export import DRAFTER, TARGET
    from trtllm_dflash.build.export import export as run

    with progress_bar() as progress:
        has_drafter = run(engine, output, force, progress)
    pair = f"--target {output / TARGET}" + (f" --drafter {output / DRAFTER}" if has_drafter else " --method none")
    click.echo(f"{output}: written; serve it: trtllm-dflash launch --runtime vllm {pair}")


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingsError(f"{flag} {text}: is not a JSON object")
    return value


def _show(found: "Comparison") -> None:
    report = found.as_json()
    rows = {
        "server": lambda side: side["url"],
        "model": lambda side: side["model"],
        "acceptance length": lambda side: _number(side["acceptance_length"]),
        "acceptance rate": lambda side: _number(side["acceptance_rate"]),
        "first text, median": lambda side: f"{side['time_to_first_text_s']['median']:.3f} s",
        "reply, median": lambda side: f"{side['reply_s']['median']:.3f} s",
        "tokens/s": lambda side: _number(side["tokens_per_second"]),
        "log-probabilities": lambda side: "offered" if side["logprobs"] else "not offered",
    }
    width = max(len(report["a"]["url"]), len(report["a"]["model"]), 12)
    for name, cell in rows.items():
        click.echo(f"{name:<20} {cell(report['a']):<{width}}  {cell(report['b'])}")
    for difference in report["differences"]:
        margins = ", ".join(f"{side.upper()} by {margin:.3f}" for side, margin in difference["margins"].items())
        kind = (
            f"near-tie ({margins})" if difference["near_tie"] else f"differs ({margins or 'nobody says by how much'})"
        )
        place = "" if difference["token"] is None else f", token {difference['token']}"
        click.echo(f"\n{kind}: {difference['prompt'][:80]!r}, character {difference['position']}{place}")
        click.echo(f"  A: {difference['a']!r}\n  B: {difference['b']!r}")
    verdict = "safe" if found.safe else "unsafe"
    click.echo(f"\n{verdict}: {report['equal']} of {report['prompts']} texts equal, {report['near_ties']} near-ties")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
