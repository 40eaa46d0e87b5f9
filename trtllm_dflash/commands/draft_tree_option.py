"""The flag that chooses trees of drafts, wherever an engine is loaded."""

from collections.abc import Callable

import click

draft_tree_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--draft-tree",
    metavar="auto|off|N",
    help="Draft a tree of N nodes, 15, 31 or 63, where a chain would be the whole block.  [default: auto]",
)
