"""Signals that end this process: which of them it was started to ignore, how it ends, and Ctrl-C while it imports."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

#: Signals that ask a process to end, and what is said then. SIGHUP: its terminal was closed.
ENDING = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Ended(SystemExit):
    """SIGTERM or SIGHUP, which unwinds as an error does: what is half-written goes, and the ranks are let go.

    Attributes:
        code: what the process ends with.
        reason: in a word or two.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.code: int = 128 + number
        self.reason = ENDING[signal.Signals(number)]


def is_heard(number: int) -> bool:
    """Whether a handler for this signal may be set.

    `nohup` has SIGHUP ignored in what it starts, and a script has SIGINT ignored in its background jobs, so that Ctrl-C
    and a terminal that closes end other programs and not these. A handler would undo that.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def unwind_on_signals() -> None:
    """Has SIGTERM and SIGHUP, where they are heard, raise `Ended`, as Ctrl-C raises KeyboardInterrupt."""
    for number in filter(is_heard, (signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _unwind)


def _unwind(number: int, frame: object) -> NoReturn:
    for standard in (1, 2):
        # A terminal that was closed is none any more, and cannot be written: who tries gets an error in place of this.
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(standard).st_mode) and not os.isatty(standard):
                os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
    raise Ended(number)


def leave(number: int) -> None:
    """Ends the process at once as a command ends at this signal, whatever call it is in."""
    with suppress(OSError):  # a terminal that was closed
        sys.stderr.write(f"error: {ENDING[signal.Signals(number)]}\n")
        sys.stderr.flush()
    os._exit(128 + number)


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """Lets Ctrl-C, or SIGTERM and SIGHUP that a command hears, end the process at once.

    For where nothing is begun yet, and an exception might not get through.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) in (signal.default_int_handler, _unwind):
                    stack.callback(signal.signal, number, signal.signal(number, lambda number, _: leave(number)))
        yield


@contextmanager
def holding_signals(then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds Ctrl-C, SIGTERM and SIGHUP back until the end, where their handlers hear them.

    For calls of libraries that make another error of the exception that a handler raises inside them.

    Args:
        then: called at once when one comes; raises nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: object) -> None:
        came.append(number)
        then()

    before = {number: signal.signal(number, hold) for number in filter(is_heard, ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class GuardedImport:
    """A finder for `sys.meta_path` that lets signals end the process at once while a package is imported.

    Torch's takes a second or more, and parts of it clear whatever exception they meet: the command went on.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds the package as Python does, to be executed so; None for others."""
        spec = PathFinder.find_spec(name, path, target) if name == self._package else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with leaving_on_interrupt():
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
