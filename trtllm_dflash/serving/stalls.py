"""Models that Triton gives up because the machine stood still while they loaded, and the signs of it.

While a model loads, Triton's Python backend takes its process for dead once a second has passed without a sign of life
from it: a fixed second (release 24.10), which `stub-timeout-seconds` does not change. Where every process is held up
for so long, as by a host with too much to do or a suspended virtual machine, the process goes on all the same, on
shared memory that Triton has taken back. Then Triton aborts, or waits for ever until the process ends.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from trtllm_dflash.serving.triton import STUB

_ABORTED = b"terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
_GIVEN_UP = b"is not healthy"  # what Triton says of such a process

_LOOK = 1.0  # seconds between two looks
_PATIENCE = 3.0  # seconds that a process which Triton waits for has to end by itself, as after an error of its own


class Stalls:
    """Watches a server that starts, and ends what it waits for in vain.

    Args:
        processes: finds the server's processes.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._looked = time.monotonic()
        self._waited_for: dict[int, float] = {}  # since when
        self._unseen: dict[int, float] = {}  # ended, since when
        self._ended = False

    def look(self) -> bool:
        """Ends models' processes that Triton has given up, though they run, and waits for; call it often.

        Returns:
            Whether a model's process has ended so early that Triton did not see it, and waits for ever.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return False
        self._looked = now
        processes = list(self._processes())
        self._unseen = {pid: self._unseen.get(pid, now) for pid in _ended_models(set(processes))}
        models = set(filter(_runs_a_model, processes))
        self._waited_for = {pid: self._waited_for.get(pid, now) for pid in models & _waited_for(processes)}
        for pid, since in self._waited_for.items():
            if now - since > _PATIENCE:
                self._ended = True
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return any(now - since > _PATIENCE for since in self._unseen.values())

    def explain(self, code: int | None, log: bytes) -> bool:
        """Tells whether a server that ended with this code and log took the living process of a model for dead."""
        return code == -signal.SIGABRT or _ABORTED in log or (self._ended and _GIVEN_UP in log)


def _runs_a_model(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(STUB.encode())
    return False


def _ended_models(parents: set[int]) -> set[int]:
    """Finds the processes of models that have ended, and of which their parent has not taken note."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends as we look
            name, _, rest = (entry / "stat").read_bytes().partition(b"(")[2].rpartition(b")")
            state, parent = rest.split()[:2]
            if state == b"Z" and int(parent) in parents and STUB.encode().startswith(name):
                found.add(int(entry.name))
    return found


def _waited_for(processes: Iterable[int]) -> set[int]:
    """Finds the processes whose end a thread of these sleeps for; none where the kernel does not tell."""
    found = set()
    for pid in processes:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError, ValueError, IndexError):  # it ends as we look
                if (thread / "wchan").read_text() == "do_wait":
                    found.add(int((thread / "syscall").read_text().split()[1], 16))  # NUMBER FIRST-ARGUMENT ...
    return found
