"""Tensor-parallel ranks: MPI processes, joined into one torch.distributed group."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trtllm_dflash.errors import DFlashError, EngineError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.ops.communicator import IDLE, Communicator, Solo, TorchDistributed
from trtllm_dflash.session.launcher import (
    PATIENT,
    check_number,
    launched_rank,
    leave_interrupts_to_rank_0,
    mpi_memory,
    remove_memory,
)

_LOOPBACK = "127.0.0.1"
_PAUSE = 0.005  # seconds between two looks at whether all ranks are there


class World:
    """The ranks of one engine, before and while they are joined for computing. tp 1 needs no MPI.

    Raises:
        EngineError: MPI is missing, or the processes are not `tp` in number.
    """

    def __init__(self, tp: int) -> None:
        self.rank, self.size = 0, tp
        if tp == 1:
            return
        if launched_rank() is None:
            raise EngineError(
                f"this engine has {tp} ranks; start it as: mpiexec -n {tp} ... (or trtllm-dflash generate)"
            )
        os.environ.update(PATIENT | dict(os.environ))
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise EngineError(f"tp {tp} needs MPI: {pip_install('tp')} ({error})") from error
        leave_interrupts_to_rank_0()
        self._mpi = MPI.COMM_WORLD
        self.rank = self._mpi.rank
        check_number(tp, self._mpi.size)
        self._meet()
        remove_memory(mpi_memory(os.getpid()))  # all ranks have it now; one that is killed would leave it

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raises an error of one rank on all of them, so that none is left waiting for another."""
        problem = None
        try:
            yield
        except DFlashError as error:
            if self.size == 1:
                raise
            problem = str(error)
        if self.size > 1:
            self._meet()
            problems = [p for p in self._mpi.allgather(problem) if p is not None]
            if problems:
                raise EngineError(problems[0])

    def _meet(self) -> None:
        """Waits for all ranks. MPI itself polls while it waits, on a core that another rank may load with."""
        arrived = self._mpi.Ibarrier()
        while not arrived.Test():
            time.sleep(_PAUSE)

    def _open_store(self) -> TCPStore:
        """Opens the ranks' meeting place, on a port that the system chooses; only this host can reach it."""
        listener = socket.create_server((_LOOPBACK, 0))  # the store itself would listen on every interface
        port: int = listener.getsockname()[1]
        handle = listener.detach()
        return TCPStore(_LOOPBACK, port, self.size, is_master=True, wait_for_workers=False, master_listen_fd=handle)

    def _leave(self, store: TCPStore) -> None:
        """Leaves MPI once all ranks know the port: what one has given to MPI may be sent only while it calls MPI."""
        store.add("arrived", 1)
        while store.add("arrived", 0) < self.size:
            self._mpi.Iprobe()
            time.sleep(_PAUSE)

    def connect(self, device: torch.device) -> Communicator:
        """Joins the ranks for computing: gloo on CPU, NCCL on GPUs. All of them are on this host."""
        if self.size == 1:
            return Solo()
        if device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.size))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        server = self._open_store() if self.rank == 0 else None
        port = self._mpi.bcast(server.port if server else None)
        store = server or TCPStore(_LOOPBACK, port, self.size, is_master=False)
        self._leave(store)
        if device.type == "cuda":
            dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.size)
        else:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=IDLE)
        group = dist.group.WORLD
        assert group is not None
        return TorchDistributed(group)
