"""The ranks of an engine, while MPI brings them together."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import PATIENCE
from trtllm_dflash.errors import EngineError
from trtllm_dflash.session import ranks
from trtllm_dflash.session.launcher import check_launched, find_launcher
from trtllm_dflash.session.ranks import World

RANKS = 3


class Lazy:
    """An MPI that sends what a rank has given it while that rank calls it, as it may: rank 1 hands on to rank 2."""

    def __init__(self) -> None:
        self.told = [threading.Event() for _ in range(RANKS)]
        self.port: int | None = None
        self.told[0].set()

    def of(self, rank: int) -> SimpleNamespace:
        def bcast(port):
            if rank == 0:
                self.port = port
            assert self.told[rank].wait(PATIENCE), f"rank {rank} was told nothing"
            return self.port

        def look():
            if rank + 1 < RANKS:
                self.told[rank + 1].set()

        return SimpleNamespace(bcast=bcast, Iprobe=look)


def test_no_rank_leaves_mpi_before_all_have_been_told(monkeypatch):
    """What follows waits for the other ranks, and no longer calls MPI."""
    together = threading.Barrier(RANKS)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *_, **__: together.wait(PATIENCE))
    monkeypatch.setattr(ranks.dist, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(ranks, "TorchDistributed", lambda group: group)
    monkeypatch.setattr(ranks.torch, "set_num_threads", lambda _: None)
    mpi, worlds = Lazy(), []
    for rank in range(RANKS):
        world = World(1)
        world.rank, world.size, world._mpi = rank, RANKS, mpi.of(rank)
        worlds.append(world)
    with ThreadPoolExecutor(RANKS) as pool:
        joined = [pool.submit(world.connect, torch.device("cpu")) for world in worlds]
        for each in joined:
            each.result(timeout=2 * PATIENCE)


@pytest.mark.parametrize("sizes", [{}, {"PMI_SIZE": "2"}], ids=["MPI", "launcher"])
def test_another_number_of_processes_is_refused_by_whoever_knows_it_first(sizes, monkeypatch):
    """A launcher of PMIx says no number: then it is MPI that does."""
    monkeypatch.setattr("os.environ", {"PMI_RANK": "0", **sizes})
    together = SimpleNamespace(Test=lambda: True)
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=2, Ibarrier=lambda: together))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    check = check_launched if sizes else World
    check(2)
    with pytest.raises(EngineError, match="has 4 ranks, but mpiexec started 2; use: mpiexec -n 4"):
        check(4)


def test_a_launcher_that_says_no_number_is_left_to_mpi(monkeypatch):
    monkeypatch.setattr("os.environ", {"PMIX_RANK": "0"})
    check_launched(4)


def test_ranks_that_have_begun_mpi_leave_no_shared_memory_when_they_are_killed():
    """They removed its files as soon as all had them, and still have them."""
    pytest.importorskip("mpi4py", reason="ranks need the tp extra (mpi4py and an MPI)")
    code = (
        "import re, signal\n"
        "from pathlib import Path\n"
        "from trtllm_dflash.session.ranks import World\n"
        "world = World(2)\n"
        "world._meet()\n"  # behind which both have removed theirs
        "names = re.findall('/dev/shm/(mpich_shm_.*)', Path('/proc/self/maps').read_text())\n"
        "print(*names, sep='|', flush=True)\n"
        "world._mpi.allgather(world.rank)\n"
        "signal.raise_signal(signal.SIGKILL)\n"
    )
    done = subprocess.run([find_launcher(2), "-n", "2", sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stdout  # in which the lines of ranks may meet
    assert said.count("mpich_shm_") >= 2 or version("mpich").startswith("4.")
    assert said.count("mpich_shm_") == said.count("(deleted)")


@pytest.mark.parametrize(("has_begun", "lives"), [(False, False), (True, True)])
def test_ctrl_c_ends_a_rank_that_has_not_begun_mpi_and_is_rank_0_s_matter_then(has_begun, lives):
    """Before, the launcher would not mind that rank 0 has left, and this one would wait for it for ever."""
    words = ["end_on_interrupt()", "leave_interrupts_to_rank_0()"] if has_begun else ["end_on_interrupt()"]
    code = f"import os; from trtllm_dflash.session.launcher import *; {'; '.join(words)}; os.kill(os.getpid(), 2)"
    code += "; print('rank 0 has left', file=sys.stderr)"  # as the next sum over ranks would say
    environment = {**os.environ, "PMI_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == (0 if lives else -signal.SIGINT)
    assert done.stderr == b""
