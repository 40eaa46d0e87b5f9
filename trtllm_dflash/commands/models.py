"""`models`: the known pairs."""

import json

import click
from rich.table import Table

from trtllm_dflash.commands.terminal import show


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the known pairs, and which can be built today."""
    from trtllm_dflash.catalog import load_catalog

    entries = load_catalog()
    if as_json:
        rows = [{**entry.model_dump(mode="json"), "buildable": entry.buildable} for entry in entries.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(
        "name", "family", "target", "drafter", "block", "tap layers / target layers", "architecture supported"
    )
    for entry in entries.values():
        taps = ",".join(map(str, entry.tap_layers)) if entry.tap_layers else "from checkpoint"
        layers = f"{taps} / {entry.target_layers}" + (", deduced" if entry.deduced else "")
        block = str(entry.block_size) if entry.block_size else "?"
        built = "yes" if entry.buildable else "no"
        table.add_row(entry.name, entry.family, entry.target, entry.drafter, block, layers, built)
    show(table)
