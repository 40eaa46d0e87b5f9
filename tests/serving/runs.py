"""Runs of `trtllm-dflash serve`, with all that descends from them."""

import os
import re
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import start
from tests.waiting import PATIENCE, wait_until

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
SERVE = [sys.executable, "-m", "trtllm_dflash", "serve", *ANY_PORTS]
#: On the CPU, always drafting the whole block: what `auto` chooses from is first measured, for seconds.
WHOLE_BLOCK = ["--device", "cpu", "--draft-length", 15]
SHARED_MEMORY = Path("/dev/shm")


class Run:
    """One `trtllm-dflash serve`, and all that descends from it."""

    def __init__(self, *arguments: object, ignored: Iterable[int] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp())  # its temporary files; the mark of its processes, too
        self.mark = f"TMPDIR={self.folder}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        self.printed = b""
        self.servers: set[str] = set()  # the names of the servers that it started
        self.process = start([*SERVE, *arguments], ignored, env=environment)

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        while b"\n" not in self.printed:
            assert select.select([self.process.stdout], [], [], PATIENCE)[0], "it says nothing"
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, f"it ended: {self.ends()}"
            self.printed += more
        self.processes()
        line, _, self.printed = self.printed.partition(b"\n")
        return line.decode()

    def ends(self) -> tuple[int, str]:
        """Its exit code and what it said on standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors

    def processes(self) -> dict[int, list[str]]:
        """The living processes that it started, and their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_text().split("\0")
                    if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        found[int(entry.name)] = words
                        self.servers.update(re.findall("trtllm-dflash-[0-9a-f]{8}", " ".join(words)))
        return found

    def pid_of(self, word: str) -> int:
        """The process with this in its command line; of several, the last."""
        pids: list[int] = []

        def found() -> list[int]:
            pids[:] = [pid for pid, words in self.processes().items() if any(word in part for part in words)]
            return pids

        wait_until(found, f"a process has {word} in its command line")
        return pids[-1]

    def log(self) -> str:
        """Triton's log, which is kept where something failed."""
        (file,) = self.folder.glob("*/server.log")
        return file.read_text()

    def leaves_nothing(self) -> bool:
        """Whether its processes, its shared memory and its temporary files are gone, but for logs."""
        files = {file for file in self.folder.rglob("*") if file.is_file() and "server.log" not in file.name}
        return not self.processes() and not self.shared_memory() and not files

    def shared_memory(self) -> list[Path]:
        kept = " ".join(folder.name for folder in self.folder.iterdir())
        self.servers.update(re.findall("trtllm-dflash-[0-9a-f]{8}", kept))
        assert self.servers, "no server was seen"
        return [file for name in self.servers for file in SHARED_MEMORY.glob(f"{name}*")]


@contextmanager
def serve(*arguments: object, ignored: Iterable[int] = ()) -> Iterator[Run]:
    run = Run(*arguments, ignored=ignored)
    try:
        yield run
    finally:
        run.process.kill()
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(PATIENCE)
        shutil.rmtree(run.folder)
        for stream in (run.process.stdout, run.process.stderr):
            assert stream is not None
            stream.close()
