"""`quantize`: a pair's checkpoints in fewer bits, with a report of what that costs."""

import json
from pathlib import Path
from typing import Any

import click

from trtllm_dflash.commands.settings import given, validated
from trtllm_dflash.commands.terminal import progress_bar
from trtllm_dflash.errors import SettingsError


@click.command()
@click.option("--model", help="A known pair (see `models`), its target, or another target.")
@click.option("--target", help="Target checkpoint: a folder or a Hugging Face name.")
@click.option("--drafter", help="Drafter checkpoint: a folder or a Hugging Face name.")
@click.option("--format", required=True, help="fp8 or nvfp4.")
@click.option("--kv", help="fp8: find the scales of FP8 caches too.")
@click.option("--only", help="target or drafter.  [default: both]")
@click.option("--output", type=click.Path(path_type=Path), help="Folder.  [default: quantized/NAME-FORMAT]")
@click.option(
    "--text", type=click.Path(path_type=Path), help="Calibration text: a text file or .jsonl.  [default: a shipped one]"
)
@click.option("--samples", type=int, help="Samples to calibrate with.  [default: 128]")
@click.option("--held-back", type=int, help="Samples kept apart to measure with.  [default: 8]")
@click.option("--length", type=int, help="Tokens of a sample, at most.  [default: 512]")
@click.option("--max-tokens", type=int, help="Most tokens of the replies that measure acceptance.  [default: 128]")
@click.option("--device", default="auto", help="cpu, cuda or auto.  [default: auto]")
@click.option("--force", is_flag=True, help="Replace what stands at --output.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def quantize(model: str | None, output: Path | None, force: bool, as_json: bool, **flags: Any) -> None:
    """Quantize a pair with NVIDIA ModelOpt and report what that costs."""
    from trtllm_dflash.catalog import find_entry_or_target
    from trtllm_dflash.quantize import quantizer, report

    values = given(flags)
    entry = None if model is None else find_entry_or_target(model)
    if entry is not None:
        values = {"target": entry.target, "drafter": entry.drafter, **values}
    elif model is not None:
        values.setdefault("target", model)
    if "target" not in values:
        raise SettingsError("say what to quantize: --model NAME or FOLDER, or --target with --drafter")
    settings = validated(quantizer.QuantizeSettings, values)
    name = entry.name if entry is not None else Path(str(values["target"])).resolve().name
    output = output or Path("quantized") / f"{name}-{settings.format}"
    with progress_bar() as progress:
        made = quantizer.quantize(settings, output, force, progress)
    if as_json:
        click.echo(json.dumps(report.as_json(made), indent=2))
        return
    click.echo(report.as_markdown(made))
    click.echo(f"\n{output}: written; build with --target and --drafter, and what was quantized from there")
