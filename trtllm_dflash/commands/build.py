"""`build`: an engine directory, or with `--plan` a prediction of one."""

from pathlib import Path
from typing import Any

import click

from trtllm_dflash.commands.build_settings import build_settings, engine_folder
from trtllm_dflash.commands.plan import show_plan
from trtllm_dflash.commands.settings import flag_of, given
from trtllm_dflash.commands.terminal import progress_bar
from trtllm_dflash.errors import SettingsError

_PLUGIN = Path(__file__).parents[2] / "plugins" / "build" / "libdflash_plugin.so"  # where `make plugin` puts it


@click.command()
@click.option(
    "--model", help="A known pair (see `models`), its target, a folder, or a build configuration file (.yaml)."
)
@click.option("--target", help="Target checkpoint: a folder or a Hugging Face name.")
@click.option("--drafter", help="Drafter checkpoint: a folder or a Hugging Face name.")
@click.option("--output", type=click.Path(path_type=Path), help="Engine directory.  [default: engines/NAME]")
@click.option(
    "--precision",
    help="fp32, bf16, fp16, fp8 or nvfp4; auto: the fewest bits that the GPU multiplies and the checkpoint allows.  "
    "[default: a quantized checkpoint's own, else bf16 with a GPU, fp32 without]",
)
@click.option("--tp", type=int, help="Tensor-parallel ranks.  [default: 1]")
@click.option("--ep", is_flag=True, default=None, help="Whole experts on each rank, not a slice of each.")
@click.option("--max-batch", type=int, help="Slots: sequences at a time.  [default: the pair's, or what fits]")
@click.option(
    "--max-seq-len",
    type=int,
    help="Most tokens of a prompt and its reply together.  [default: the pair's, or what fits]",
)
@click.option("--chunk", type=int, help="Most prompt tokens in a step.  [default: 512]")
@click.option(
    "--block-size", type=int, help="Rows of a block: the bonus token and the drafts.  [default: the drafter's]"
)
@click.option("--draft-vocab", type=int, help="Draft among the N most frequent tokens only; the text stays the same.")
@click.option("--draft-window", type=int, help="The drafter sees the last N tokens only; the text stays the same.")
@click.option(
    "--draft-text",
    help="Text in which --draft-vocab counts tokens: a text file or .jsonl.  [default for tiny: its prompts]",
)
@click.option("--drafter-precision", help="auto, fp8 or nvfp4: of the drafter's matrices; the text stays the same.")
@click.option(
    "--kv",
    help="fp8: caches in half the bytes; engine: in the engine's own type.  [default: auto, as the target's says]",
)
@click.option(
    "--kv-memory",
    type=float,
    help="torch: GB of K/V caches on each GPU.  [default: enough for every slot at full length]",
)
@click.option("--page-size", type=int, help="torch: tokens in a page.  [default: 64 with our kernels or --kv-memory]")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any of these settings by its name.")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@click.option("--backend", help="torch or tensorrt.  [default: tensorrt where it is here for the GPU, else torch]")
@click.option("--gpu", help="GPU to build for: its name, or sm89, sm120, ... to compile.  [default: the one present]")
@click.option("--sampling/--greedy", default=None, help="tensorrt: whether the plan can sample.  [default: --sampling]")
@click.option("--optimization-level", type=int, help="tensorrt: 0 (fast to build) to 5.  [default: 3]")
@click.option("--workspace", type=int, help="tensorrt: MiB of scratch that a kernel may use.  [default: all there is]")
@click.option("--workers", type=int, help="tensorrt: ranks compiled at a time.  [default: 1]")
@click.option("--draft-tree", type=int, help="tensorrt: drafts are trees of 15, 31 or 63 nodes.  [default: chains]")
@click.option(
    "--plugin",
    is_flag=False,
    flag_value=str(_PLUGIN),
    metavar="[FILE]",
    help="tensorrt, datacenter edition: attention is our plugin.  [FILE: plugins/build/libdflash_plugin.so]",
)
@click.option("--plan", is_flag=True, help="Build nothing: print memory and speed on --gpu. Needs no checkpoint.")
@click.option("--acceptance", type=float, help="--plan: tokens a step with the whole block, for tokens/s.")
@click.option(
    "--cache-length", type=int, help="--plan: tokens that each slot holds in a step.  [default: 1024, or less]"
)
@click.option("--at", metavar="X,X,...", help="--plan: throughput of 8 GPUs at these tokens/s for each user.")
@click.option("--eagle3-acceptance", type=float, help="--at: also plan EAGLE-3 at this many tokens a step.")
@click.option(
    "--eagle3-drafts", help="--at: EAGLE-3's chain (3), or its tree: passes, the best of each, drafts (8x10x60)."
)
@click.option("--plot", type=click.Path(path_type=Path), help="--at: draw throughput over speed (.png, .pdf, .svg).")
@click.option("--json", "as_json", is_flag=True, help="--plan: print JSON.")
def build(
    model: str | None,
    output: Path | None,
    assignments: tuple[str, ...],
    force: bool,
    plan: bool,
    acceptance: float | None,
    cache_length: int | None,
    at: str | None,
    eagle3_acceptance: float | None,
    eagle3_drafts: str | None,
    plot: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Build an engine directory from a target and its drafter."""
    planned = given({"acceptance": acceptance, "cache_length": cache_length})
    operating = given({"at": at, "eagle3_acceptance": eagle3_acceptance, "eagle3_drafts": eagle3_drafts, "plot": plot})
    if plan:
        for name in given({"output": output, "force": force or None}):
            raise SettingsError(f"--{name}: --plan writes nothing")
        show_plan(model, assignments, given(flags), planned, operating, as_json)
        return
    for name in given({**planned, **operating, "json": as_json or None}):
        raise SettingsError(f"{flag_of(name)}: goes with --plan")
    _build(model, assignments, given(flags), output, force)


def _build(
    model: str | None, assignments: tuple[str, ...], flags: dict[str, Any], output: Path | None, force: bool
) -> None:
    from trtllm_dflash.build import builder
    from trtllm_dflash.engine.directory import read_config

    settings = build_settings(model, assignments, flags)
    folder = engine_folder(settings, output)
    notes: list[str] = []
    with progress_bar() as progress:
        built = builder.build(settings, folder, force, progress=progress, say=notes.append)
    for note in notes:
        click.echo(note)
    click.echo(f"{folder}: {'built' if built else 'up to date'}")
    if transcoded := read_config(folder).transcoded:
        click.echo(f"{folder}: {transcoded}")
