"""The flag that chooses kernels, wherever an engine is loaded."""

from collections.abc import Callable

import click

kernels_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--kernels",
    type=click.Choice(("auto", "exact", "torch")),
    help="On a GPU, torch: without our CUDA kernels, slower. auto refuses to load where they are missing. exact: a row "
    "gets the same bits whatever else is in the batch, so that text is the same to the token, drafted or not.",
)
