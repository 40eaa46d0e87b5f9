"""The processes of tensor-parallel ranks, as an MPI launcher starts and ends them."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from trtllm_dflash.errors import EngineError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.marks import kill_marked
from trtllm_dflash.signals import ENDING, holding_signals, is_heard, leave

#: Variables of ranks, for MPICH: with memory that they share, each polls until all have begun, on others' cores.
PATIENT = {"MPIR_CVAR_NOLOCAL": "1"}
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH and Intel MPI; PMIx; Open MPI
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # PMIx has none

MPI_FILES = "mpich_shm_*"  # of MPICH, in shared memory

_MARK = "TRTLLM_DFLASH_RANKS"  # in the environment of ranks that were launched here, and of their launcher
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PAUSE = 0.02  # seconds between two looks at the launcher

_for_rank_0: list[signal.Signals] = []  # signals, and this is another one


def launched_rank() -> int | None:
    """Finds this process's rank; None where no MPI launcher started it."""
    ranks = [int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ]
    return ranks[0] if ranks else None


def check_launched(tp: int) -> None:
    """Checks the number of processes that an MPI launcher says it started, before any of them waits for torch.

    Raises:
        EngineError: they are not `tp` in number.
    """
    sizes = [int(os.environ[name]) for name in _SIZE_VARIABLES if name in os.environ]
    if launched_rank() is not None and sizes:
        check_number(tp, sizes[0])


def check_number(tp: int, started: int) -> None:
    """Refuses another number of processes than an engine has ranks."""
    if started != tp:
        raise EngineError(f"this engine has {tp} ranks, but mpiexec started {started}; use: mpiexec -n {tp}")


def find_launcher(tp: int) -> str:
    """Finds mpiexec: beside this Python, else on PATH.

    Raises:
        EngineError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if launcher is None:
        raise EngineError(f"tp {tp} needs {tp} MPI processes and there is no mpiexec: {pip_install('tp')}")
    return launcher


def launch_ranks(tp: int, arguments: list[str]) -> NoReturn:
    """Runs `tp` MPI ranks that each run `trtllm-dflash` with these arguments, and ends this process with their code.

    A signal ends them at once, whatever they have begun. The launcher would print a page then, and end with a code that
    depends on how far they were: so this process alone hears it, and the launcher has a session of its own.

    Raises:
        EngineError: no MPI launcher is installed.
    """
    command = [find_launcher(tp), "-n", str(tp), sys.executable, "-m", "trtllm_dflash", *arguments]
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    end_too = partial(_end_with, os.getpid(), ctypes.CDLL(None))
    asked: list[bool] = []
    sys.stdout.flush()
    with holding_signals(lambda: asked.append(True)):
        process = subprocess.Popen(
            command,
            env={**os.environ, _MARK: mark},
            stdin=subprocess.DEVNULL,  # ranks cannot share it, and a job in the background must not read it
            start_new_session=True,
            restore_signals=False,
            preexec_fn=end_too,
        )
        while process.poll() is None and not asked:
            time.sleep(_PAUSE)
        kill_ranks(f"{_MARK}={mark}")
        code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)


def _end_with(parent: int, libc: ctypes.CDLL) -> None:
    """Has the kernel kill this process, the launcher's, when the one that started it ends: its ranks end with it."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os._exit(1)


def kill_ranks(mark: str) -> None:
    """Kills the processes with this mark in their environment, and removes the memory that ranks among them share."""
    memory: set[Path] = set()
    kill_marked(mark, lambda pid: memory.update(mpi_memory(pid)))
    remove_memory(memory)


def end_on_interrupt() -> None:
    """Has a signal end the ranks at once: rank 0 leaves, whatever call it is in, and the launcher ends the others.

    An exception in the middle of a step would leave the other ranks waiting for this one. The launcher minds a rank's
    leaving only once that has begun MPI, where others would wait for it: until then Ctrl-C ends each of them.
    """
    for number in filter(is_heard, ENDING):
        if launched_rank() is None:
            continue
        if launched_rank() == 0:
            signal.signal(number, lambda number, _: _leave_nothing(number))
        else:
            signal.signal(number, signal.SIG_DFL)  # not Python's, which waits for MPI to begin
            _for_rank_0.append(number)


def leave_interrupts_to_rank_0() -> None:
    """Keeps a rank that has begun MPI from ending at Ctrl-C by itself, where `end_on_interrupt` ends the ranks.

    It says nothing from then on: that rank 0 has left it is no error to print.
    """
    for number in _for_rank_0:
        signal.signal(number, lambda *_: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def mpi_memory(pid: int) -> set[Path]:
    """Finds the files of MPICH's shared memory that a rank has, and leaves behind where it is killed."""
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {Path(path) for path in re.findall(r"(/dev/shm/mpich_shm_\w+)$", maps, re.MULTILINE)}  # not "(deleted)"
    return set()


def remove_memory(files: Iterable[Path]) -> None:
    """Removes files of shared memory, where they are still there; who has them keeps what was in them."""
    for file in files:
        with suppress(OSError):
            file.unlink()


def _leave_nothing(number: int) -> None:
    """Ends rank 0 at once, and takes the memory along that it shares with the others: the launcher kills them."""
    for file in mpi_memory(os.getpid()):
        remove_memory(file.parent.glob(f"{file.name.rpartition('_')[0]}_*"))
    leave(number)
