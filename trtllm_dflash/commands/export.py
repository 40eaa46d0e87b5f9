"""`export`: an engine's pair as Hugging Face folders."""

import shlex
from pathlib import Path

import click

from trtllm_dflash.commands.terminal import progress_bar


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
    words = ["trtllm-dflash", "launch", "--runtime", "vllm", "--target", str(output / TARGET)]
    words += ["--drafter", str(output / DRAFTER)] if has_drafter else ["--method", "none"]
    click.echo(f"{output}: written; serve it: {shlex.join(words)}")
