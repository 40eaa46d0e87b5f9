"""`deploy`: a Triton model repository."""

import shlex
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.commands.deploy_options import deploy_options, deploy_settings
from trtllm_dflash.commands.pair_options import PAIR_FLAGS, launch_settings, pair_options
from trtllm_dflash.commands.settings import flag_of, given
from trtllm_dflash.errors import SettingsError


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), help="Engine directory.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Model repository to write.")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@deploy_options
@pair_options
def deploy(engine: Path | None, output: Path, force: bool, no_draft: bool, **flags: Any) -> None:
    """Write a Triton model repository: of an engine, or of a pair (--runtime)."""
    pair = {name: flags.pop(name) for name in PAIR_FLAGS}
    if pair["runtime"] is not None:
        _deploy_runtime(output, force, pair, {"engine": engine, "no_draft": no_draft or None, **flags})
        return
    for name in given(pair):
        raise SettingsError(f"{flag_of(name)}: belongs to --runtime tensorrt-llm; an engine has its own")
    if engine is None:
        raise SettingsError("--engine: say which engine to deploy, or a pair: --runtime tensorrt-llm --model NAME")
    from trtllm_dflash.serving import repository

    repository.deploy(engine, output, deploy_settings(no_draft, flags), force)
    serve = shlex.join(["trtllm-dflash", "serve", "--engine", str(engine), "--repository", str(output)])
    click.echo(f"{output}: written; serve it: {serve}")
    _warn_of_shells(output)


def _deploy_runtime(output: Path, force: bool, pair: dict[str, Any], others: dict[str, Any]) -> None:
    """Write the model repository of a pair on TensorRT-LLM.

    Args:
        others: flags that only an engine of ours takes.

    Raises:
        SettingsError: another runtime, or a flag that is an engine's.
        EngineError: see `deploy_llmapi`.
    """
    from trtllm_dflash.foreign.registry import plan_for
    from trtllm_dflash.foreign.triton import deploy_llmapi

    if pair["runtime"] != "tensorrt-llm":
        raise SettingsError(f"--runtime {pair['runtime']}: Triton serves tensorrt-llm; for another runtime use launch")
    text = others.pop("draft_length", None)
    for name in given(others):
        raise SettingsError(f"{flag_of(name)}: is for an engine of ours, not for --runtime")
    if text is not None:
        length = deploy_settings(False, {"draft_length": text}).draft_length
        if length == "auto":
            raise SettingsError("--draft-length auto: TensorRT-LLM takes a number")
        pair = {**pair, "draft_length": length}
    deploy_llmapi(plan_for(launch_settings(pair)), output, force)
    serve = shlex.join(["tritonserver", f"--model-repository={output}"])
    click.echo(f"{output}: written; serve it in tritonserver:YY.MM-trtllm-python-py3: {serve}")
    _warn_of_shells(output)


def _warn_of_shells(repository: Path) -> None:
    """Warn of a path that Triton, which names it to a shell without quotes, would not find; `serve` goes round it."""
    from trtllm_dflash.serving.repository import is_found

    place = repository.absolute()
    if not is_found(place):
        click.echo(
            f"warning: {place}: a Triton of your own does not load Python models from there, for its shell reads the "
            "name otherwise; give --output a path without spaces or signs, or use trtllm-dflash serve",
            err=True,
        )
