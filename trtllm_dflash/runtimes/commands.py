"""`launch`, and the flags of a pair on another runtime that `deploy` shares with it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.errors import SettingsError

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
    from trtllm_dflash.runtimes.plan import LaunchSettings

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
    from trtllm_dflash.runtimes.launch import start
    from trtllm_dflash.runtimes.registry import launch_of

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
    from trtllm_dflash.runtimes.registry import plan_for
    from trtllm_dflash.runtimes.triton import deploy_llmapi

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
