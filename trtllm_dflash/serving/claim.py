"""A server's name, and what bears it: processes, shared memory, a folder. What a killed server left, the next removes.

Triton's Python models exchange tensors through files in /dev/shm, and leave them there when they are killed. A server's
own have its name, and a lock beside them is held as long as the process that must remove them lives.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.lifeline import FOLDER, Lifeline
from trtllm_dflash.serving.processes import MARK, find_processes, kill_processes
from trtllm_dflash.session.launcher import MPI_FILES, mpi_memory

SHARED_MEMORY = Path("/dev/shm")

KEPT_LOGS = 3  # of servers that failed, so that who was told of one can still read it

_PREFIX = "trtllm-dflash-"
_SEPARATOR = b"\0"  # in the lock: of the folder's path and of the names of others' files


class Claim:
    """A name that is this process's until it is released, or until the process ends.

    Attributes:
        name: begins the names of files in shared memory, and is in the environment of the processes.
        folder: a temporary folder of its own.
        control: a folder in it, by which its processes know it.

    Raises:
        EngineError: there is no room for them.
    """

    def __init__(self) -> None:
        self.name = f"{_PREFIX}{secrets.token_hex(4)}"
        self._noted: set[Path] = set()
        with ExitStack() as undo:
            try:
                self._take(undo)
            except OSError as error:
                place = Path(error.filename or SHARED_MEMORY)
                knob = "docker run --shm-size" if place.is_relative_to(SHARED_MEMORY) else "TMPDIR"
                raise EngineError(f"{place}: {error.strerror}; a server has files there ({knob})") from None
            undo.pop_all()

    def _take(self, undo: ExitStack) -> None:
        undo.callback(_lock_of(self.name).unlink, missing_ok=True)
        self._lock = _locked(_lock_of(self.name))
        undo.callback(_close, self._lock)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._lock.write(bytes(self.folder))
        self._lock.flush()
        # Whoever cleans up old temporary files passes over a locked folder and what is in it (tmpfiles.d(5)).
        self._kept = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, self._kept)
        fcntl.flock(self._kept, fcntl.LOCK_SH)
        self.control = self.folder / "control"
        self.control.mkdir()
        self._lifeline = Lifeline(self.control)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the processes that bear the name, and are killed when this one ends."""
        return {MARK: self.name, FOLDER: str(self.control)}

    def note_memory(self) -> None:
        """Has what ranks share now removed with what bears the name, also by the next server; call it while they start.

        Ranks remove it themselves as soon as all of them have it.
        """
        if not any(SHARED_MEMORY.glob(MPI_FILES)):  # a look at all processes takes longer
            return
        files = {file for process in find_processes(self.name) for file in mpi_memory(process.pid)}
        self._lock.write(b"".join(_SEPARATOR + file.name.encode() for file in files - self._noted))
        self._lock.flush()
        self._noted |= files

    def release(self, keep_files: bool = False) -> None:
        """Kills the processes that bear the name, and removes what else does.

        Args:
            keep_files: those in the folder stay, but not what is in folders of it.
        """
        if self._lock.closed:  # it is released already
            return
        kill_processes(self.name)
        self._lifeline.close()
        os.close(self._kept)
        with suppress(OSError):  # it holds files that stay, or whoever cleans up temporary files was here
            for entry in self.folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif not keep_files:
                    entry.unlink(missing_ok=True)
            self.folder.rmdir()
        _remove_memory(self.name)
        self._lock.close()


def remove_orphans() -> None:
    """Removes what servers left whose own process was killed, and old logs of those that failed."""
    _remove_logs()
    for file in SHARED_MEMORY.glob(f"{_PREFIX}*.lock"):
        # Removed just now, a link, or locked. A pipe of somebody's is opened without waiting for its other end.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError), os.fdopen(os.open(file, flags), "rb") as lock:
            found = os.fstat(lock.fileno())
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                continue  # what it says is another user's word
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name, folder = file.stem, Path(os.fsdecode(lock.read().partition(_SEPARATOR)[0]))
            kill_processes(name)
            if folder.name.startswith(f"{name}-"):
                shutil.rmtree(folder, ignore_errors=True)
            _remove_memory(name)


def _remove_logs() -> None:
    """Removes the folders of old logs: those with files alone. A living one's has a folder in it, or nothing."""
    kept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{'[0-9a-f]' * 8}-*"):
        with suppress(OSError):  # another server removes it, or it is another user's
            found = folder.lstat()
            files = list(folder.iterdir()) if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else []
            if files and not any(file.is_dir() for file in files):
                kept.append((found.st_mtime_ns, folder))
    for _, folder in sorted(kept, reverse=True)[KEPT_LOGS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(file: Path) -> IO[bytes]:
    """Makes a file and locks it: the one that has the name, which who removes orphans may take away in between."""
    while True:
        lock = file.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                return lock
        lock.close()


def _close(lock: IO[bytes]) -> None:
    with suppress(OSError):  # what it could not write before, it cannot now
        lock.close()


def _lock_of(name: str) -> Path:
    return SHARED_MEMORY / f"{name}.lock"


def _remove_memory(name: str) -> None:
    with suppress(FileNotFoundError):  # somebody has emptied the shared memory
        _, *others = _lock_of(name).read_bytes().split(_SEPARATOR)
        for other in others:
            (SHARED_MEMORY / Path(os.fsdecode(other)).name).unlink(missing_ok=True)
    for file in (*SHARED_MEMORY.glob(f"{name}-*"), _lock_of(name)):
        file.unlink(missing_ok=True)
