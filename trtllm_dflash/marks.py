"""Processes that bear a mark, a variable in their environment: also those whose parent has gone."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PATIENCE = 30.0  # seconds until a killed process is gone
_PAUSE = 0.01  # seconds between two looks


def find_marked(mark: str) -> list[int]:
    """Finds the processes, but this one, that run and have `mark`, NAME=VALUE, in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ends as we look
                environment = (entry / "environ").read_bytes().split(b"\0")
                if mark.encode() in environment and state(int(entry.name))[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def kill_marked(mark: str, before: Callable[[int], object] = lambda _: None) -> None:
    """Kills the processes that have `mark` in their environment, and waits until they are gone.

    Args:
        before: called with each of them while all are there: they stand still, for the end of one may end others.
    """
    deadline = time.monotonic() + _PATIENCE
    while (left := find_marked(mark)) and time.monotonic() < deadline:
        _signal(left, signal.SIGSTOP)
        for pid in left:
            before(pid)
        _signal(left, signal.SIGKILL)
        time.sleep(_PAUSE)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def state(pid: int) -> tuple[str, str]:
    """Reads a process's state and starting time; Z (a zombie) where there is none."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()  # a name may hold anything
    except OSError:
        return "Z", ""
    return rest[0], rest[19]
