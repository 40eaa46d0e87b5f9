"""`demo`: a pair built, then decoding plainly and drafting side by side."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtllm_dflash.commands.build_settings import build_settings, engine_folder
from trtllm_dflash.commands.draft_tree_option import draft_tree_option
from trtllm_dflash.commands.kernels_option import kernels_option
from trtllm_dflash.commands.terminal import progress_bar

if TYPE_CHECKING:
    from trtllm_dflash.session.kernels import Kernels

_GPU = "sm120"  # what the demo compiles for, where TensorRT-RTX is installed


@click.command()
@click.option("--model", default="tiny", help="A known pair.  [default: tiny]")
@click.option("--prompts-per-kind", type=click.IntRange(min=1), default=6, help="Prompts of each kind.  [default: 6]")
@click.option(
    "--max-tokens", type=click.IntRange(1, 2**31 - 1), default=256, help="Most tokens a reply.  [default: 256]"
)
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@kernels_option
@draft_tree_option
@click.option("--output", type=click.Path(path_type=Path), help="Engine directory.  [default: engines/NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
def demo(
    model: str,
    prompts_per_kind: int,
    max_tokens: int,
    device: str,
    kernels: "Kernels | None",
    draft_tree: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Watch the drafter speed up the model without changing a token."""
    from trtllm_dflash.build import builder
    from trtllm_dflash.demo import run_demo
    from trtllm_dflash.engine.directory import check_replaced, read_config
    from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

    settings = build_settings(model, (), {"precision": "fp32"})
    engine = engine_folder(settings, output)
    with progress_bar() as progress:
        builder.build(settings, engine, refresh=True, progress=progress)
    plan = None
    if (
        not as_json
        and read_config(engine).target.delta is None
        and find_spec("tensorrt_rtx")
        and load_tensorrt().__name__ == "tensorrt_rtx"
    ):
        plan = engine.with_name(f"{engine.name}-{_GPU}")
        check_replaced(plan, has_force=False)  # now, and not where the demo has ended
    result = run_demo(
        engine, prompts_per_kind, max_tokens, device, kernels or "auto", not as_json, draft_tree or "auto"
    )
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    if plan is not None:
        compiled = build_settings(model, (), {"backend": "tensorrt", "gpu": _GPU})
        with progress_bar() as progress:
            builder.build(compiled, plan, refresh=True, progress=progress)
        summary = read_config(plan).plans[0]
        click.echo(
            f"\n{plan}: the same step compiled by TensorRT-RTX for {_GPU.upper()}, not run here: "
            f"{summary.layers} layers, {summary.bytes / 1e6:.0f} MB, {summary.seconds:.1f} s"
        )
    if not result.identical:
        sys.exit(1)
