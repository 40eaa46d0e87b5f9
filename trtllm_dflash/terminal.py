"""What commands show on a terminal: tables, and progress."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn


def show(*what: RenderableType) -> None:
    """Prints tables and lines, one below the other: as wide as the terminal, or 200 columns where there is none."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    with console.capture() as capture:  # rich would end with 1 where the reader has gone
        console.print(*what, sep="\n", highlight=False)
    click.echo(capture.get(), nl=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal, on standard error; nothing where that is no terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield update
