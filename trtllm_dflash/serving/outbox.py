"""The one thread of a model that talks to Triton about its requests once `execute` has returned."""

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

POLL_SECONDS = 0.02  # between two questions whether one request's client is gone
LEAST_PAUSE = 0.005  # between two questions at all: each is a round trip of 0.1 ms to Triton's process
_MOST_QUESTIONS = 8  # at once, for those that were due while a step's responses were sent
_IDLE_SECONDS = 0.01
_QUIET_SECONDS = 0.1  # where no client waits, and nothing else is under way


class Outbox:
    """Runs callables in order on a thread of its own, and watches for clients that have gone.

    Every response sender of a process must be used by one thread: where several send at the same time, Triton's Python
    backend (2.51) can block all of them for ever.

    Args:
        idle: called on the thread about a hundred times a second while a client is watched or it returns true, and
            ten times a second otherwise.
    """

    def __init__(self, idle: Callable[[], bool] | None = None) -> None:
        self._idle = idle
        self._busy = False  # until `idle` says that nothing is to do
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._watched: dict[Any, Callable[[], None]] = {}  # sender -> what to do when its client is gone
        self._turns: deque[Any] = deque()
        self._polled = 0.0
        self._idled = 0.0
        self._thread = threading.Thread(target=self._run, name="dflash-outbox", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Runs `work` on the thread; may be called from any thread."""
        self._work.put(work)

    def watch(self, sender: Any, gone: Callable[[], None]) -> None:
        """Calls `gone`, again and again, while the client of an unanswered request is gone. On the thread only."""
        self._watched[sender] = gone
        self._turns.append(sender)

    def unwatch(self, sender: Any) -> None:
        """Stops watching. On the thread only."""
        self._watched.pop(sender, None)
        if not self._watched:
            self._turns.clear()

    def close(self) -> None:
        """Runs the work that is left, and ends the thread."""
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            while True:
                try:
                    work = self._work.get(timeout=self._patience())
                    if work is None:
                        return
                    work()
                    self._busy = self._idle is not None
                except Empty:
                    pass
                self._look_around()
        except BaseException:  # without this thread no request is ever answered: better to end than to hang
            traceback.print_exc()
            end_process("the thread that answers requests failed")

    def _patience(self) -> float | None:
        if self._watched or self._busy:
            return _IDLE_SECONDS
        return None if self._idle is None else _QUIET_SECONDS

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._watched:
            due = int((now - self._polled) / max(LEAST_PAUSE, POLL_SECONDS / len(self._watched)))
            for _ in range(min(due, _MOST_QUESTIONS, len(self._watched))):
                self._polled = now
                self._poll_next()
        if self._idle is not None and now - self._idled >= _IDLE_SECONDS:
            self._idled = now
            self._busy = self._idle()

    def _poll_next(self) -> None:
        while self._turns:
            sender = self._turns.popleft()
            if sender in self._watched:
                self._turns.append(sender)
                if sender.is_cancelled():
                    self._watched[sender]()
                return


def end_process(reason: str) -> None:
    """Ends this model's process at once; Triton fails its requests, and whoever watches the process ends the server."""
    print(f"error: {reason}; this process ends", file=sys.stderr, flush=True)
    os._exit(1)
