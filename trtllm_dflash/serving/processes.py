"""The processes of a server, found by a mark in their environment: also those whose parent has gone."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.serving.triton import STUB
from trtllm_dflash.session.launcher import RANK_VARIABLES

#: In the environment of every process of a server, with the server's own name.
MARK = "TRTLLM_DFLASH_SERVER"

_PATIENCE = 10.0  # seconds until a killed process is gone
_PAUSE = 0.01  # seconds between two looks


@dataclass(frozen=True)
class Process:
    """A process of a server.

    Attributes:
        started: by the kernel's clock, so that a later process with the same number is not taken for it.
        what: its model or rank, for a reader; empty where nobody but us knows it.
    """

    pid: int
    started: str
    what: str

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        state, started = _state(self.pid)
        return started == self.started and state not in "ZX"


def find_processes(server: str) -> list[Process]:
    """Finds all processes of the server with this name."""
    mark = f"{MARK}={server}"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it ends as we look
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if mark in environment:
                state, started = _state(int(entry.name))
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if state not in "ZX":
                    found.append(Process(int(entry.name), started, _describe(words, environment)))
    return found


def kill_processes(server: str) -> None:
    """Kills all processes of the server with this name, and waits until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    while (left := find_processes(server)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(_PAUSE)


def _state(pid: int) -> tuple[str, str]:
    """Reads a process's state and starting time; Z (a zombie) where there is none."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold anything
    except OSError:
        return "Z", ""
    return rest[0], rest[19]


def _describe(words: list[str], environment: list[str]) -> str:
    """Names a process of a server for messages: its model or rank."""
    ranks = [value for name, _, value in (entry.partition("=") for entry in environment) if name in RANK_VARIABLES]
    rank = f" of rank {ranks[0]}" if ranks else ""
    program = Path(words[0]).name
    if program == "tritonserver":
        return f"Triton{rank}"
    if program == STUB:  # its first word is MODEL/VERSION/model.py; while it begins, it may have none
        folders = Path("".join(words[1:2])).parents
        model = f"model {folders[1].name}" if len(folders) > 1 else "a model"
        return f"the process of {model}{rank}"
    return ""
