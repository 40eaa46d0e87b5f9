"""Ctrl-C, SIGTERM and SIGHUP, kept until a step of training has ended and its outcome is on the disk."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trtllm_dflash.signals import ENDING, is_heard


class Interruption:
    """Whether a signal has come. A second one does at once what it always does."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: int | None = None

    @property
    def has_come(self) -> bool:
        """Whether to end after this step."""
        return self._came is not None

    def pass_on(self) -> None:
        """Does what the signal would have done."""
        assert self._came is not None
        self.let_go()
        signal.raise_signal(self._came)

    def hold(self) -> None:
        """Keeps signals from now on."""
        for number in filter(is_heard, ENDING):
            self._handlers[number] = signal.signal(number, self._note)

    def let_go(self) -> None:
        """Gives the signals their handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number
        self.let_go()


@contextmanager
def held_signals() -> Iterator[Interruption]:
    """Keeps signals while the body runs, where it runs on the main thread; the body passes them on."""
    interruption = Interruption()
    if threading.current_thread() is threading.main_thread():
        interruption.hold()
    try:
        yield interruption
    finally:
        interruption.let_go()
