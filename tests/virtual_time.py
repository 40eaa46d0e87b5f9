"""Clocks that tests turn, and an event loop that turns its own when nothing is to be done: no test waits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Clock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine, at once, however long it sleeps."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:  # as `asyncio.run` does
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
