"""The terminal: tables, progress bars and the log, and the command that runs."""

import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


def show(*what: RenderableType) -> None:
    """Print tables and lines, one below the other: as wide as the terminal, or 200 columns where there is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed before we began
    console = Console(width=None if is_terminal else 200, markup=False, emoji=False)  # texts may hold any [/word]
    with console.capture() as capture:  # rich would end with 1 where the reader has gone
        console.print(*what, sep="\n", highlight=False)
    click.echo(capture.get(), nl=False)


def command_line() -> str:
    """Spell the command that is running, for reports that say how they were made."""
    return shlex.join(["trtllm-dflash", *sys.argv[1:]])


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each kind of work on standard error; nothing where that is no terminal."""
    with _bars() as progress:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield update


class _Echo(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


@contextmanager
def logged_to_terminal() -> Iterator[None]:
    """Show the package's log on standard error."""
    log, handler = logging.getLogger("trtllm_dflash"), _Echo()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def sweep_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for the sweep and one for what is measured now, on standard error; none where that is no terminal."""
    with _bars(TimeElapsedColumn()) as progress:
        whole, part = progress.add_task("sweep", total=None), progress.add_task("warming up", total=None)

        def update(what: str, done: int, total: int) -> None:
            progress.update(whole if what == "sweep" else part, description=what, completed=done, total=total)

        yield update


def _bars(*more: ProgressColumn) -> AbstractContextManager[Progress]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    # Up to 14.0 rich ends bars that it does not show by an empty line: those are never begun.
    return progress if console.is_terminal else nullcontext(progress)
