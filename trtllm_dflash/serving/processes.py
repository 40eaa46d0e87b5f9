"""The processes of a server, found by a mark in their environment: also those whose parent has gone."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.marks import find_marked, state
from trtllm_dflash.serving.triton import STUB
from trtllm_dflash.session.launcher import RANK_VARIABLES, kill_ranks

#: In the environment of every process of a server, with the server's own name.
MARK = "TRTLLM_DFLASH_SERVER"


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
        running, started = state(self.pid)
        return started == self.started and running not in "ZX"


def find_processes(server: str) -> list[Process]:
    """Finds all processes of the server with this name."""
    found = []
    for pid in find_marked(f"{MARK}={server}"):
        with suppress(OSError):  # it ends as we look
            entry = Path(f"/proc/{pid}")
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            running, started = state(pid)
            if running not in "ZX":
                found.append(Process(pid, started, _describe(words, environment)))
    return found


def kill_processes(server: str) -> None:
    """Kills all processes of the server with this name, waits until they are gone, and removes what ranks share."""
    kill_ranks(f"{MARK}={server}")


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
