"""Signals: which of them this process was started to ignore, and Ctrl-C while it imports."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def is_heard(number: int) -> bool:
    """Whether a handler for this signal may be set.

    `nohup` has SIGHUP ignored in what it starts, and a script has SIGINT ignored in its background jobs, so that Ctrl-C
    and a terminal that closes end other programs and not these. A handler would undo that.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def leave() -> None:
    """Ends the process at once as an interrupted command ends, whatever call it is in."""
    sys.stderr.write("error: interrupted\n")
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """Lets Ctrl-C, or SIGTERM that a command hears, end the process at once.

    For where nothing is begun yet, and an exception might not get through.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda *_: leave()))
            if callable(signal.getsignal(signal.SIGTERM)):
                before = signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
                stack.callback(signal.signal, signal.SIGTERM, before)
        yield


@contextmanager
def holding_signals(then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the end, where their handlers hear them.

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

    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM) if is_heard(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class GuardedImport:
    """A finder for `sys.meta_path` that lets Ctrl-C and SIGTERM end the process at once while a package is imported.

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
