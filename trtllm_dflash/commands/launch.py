"""`launch`: a pair on another runtime."""

import sys
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.commands.pair_options import launch_settings, pair_options
from trtllm_dflash.errors import SettingsError


@click.command()
@pair_options
@click.option("--draft-length", type=int, help="Tokens to draft a step.  [default: the block; EAGLE-3: 3]")
@click.option("--pp", type=int, help="Pipeline-parallel stages; only without drafting.  [default: 1]")
@click.option("--nodes", type=int, help="Machines that the GPUs are spread over.  [default: 1]")
@click.option("--node-rank", type=int, help="sglang: number of this machine, from 0.  [default: 0]")
@click.option("--head", help="vllm, sglang: address of the first machine, with several.")
@click.option("--host", help="Address to listen at.  [default: 127.0.0.1, this machine only]")
@click.option("--port", type=int, help="Port of its OpenAI API.  [default: 8000]")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for its files.  [default: a temporary one]")
@click.option("--dry-run", is_flag=True, help="Print the command and files, each choice with its reason.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORDS...]")
def launch(output: Path | None, dry_run: bool, words: tuple[str, ...], **flags: Any) -> None:
    """Serve a pair with TensorRT-LLM, vLLM or SGLang, until Ctrl-C.

    What follows -- goes to the runtime's command as it is.
    """
    from trtllm_dflash.foreign.launch import start
    from trtllm_dflash.foreign.registry import launch_of

    if dry_run and output is not None:
        raise SettingsError("--output: --dry-run writes nothing")
    found = launch_of(launch_settings(flags)).with_words(words)
    if dry_run:
        click.echo(found.script(), nl=False)
        return
    sys.exit(start(found, output))
