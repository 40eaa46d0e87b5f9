"""The flag that chooses kernels, wherever an engine is loaded."""

from collections.abc import Callable

import click

kernels_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--kernels",
    type=click.Choice(("auto", "torch")),
    help="On a GPU, torch: without our CUDA kernels, slower. auto refuses to load where they are missing.",
)
