"""Ranks of a training: processes of one host, a GPU each, that divide the packs of a step among them.

Rank 0 is the process that was started; it starts the others, and alone writes. All have the same parameters: gradients
are summed, so that a step is that of one process with the same packs, but for the order of sums.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from trtllm_dflash.errors import DFlashError, EngineError, SettingsError

_PATIENCE = 5.0  # seconds in which a process that has ended is known to have

Tensor = torch.Tensor
V = TypeVar("V")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_LONGEST = timedelta(hours=1)  # that one waits for another: for an evaluation, or a checkpoint on a slow disk
_POLL = 0.1  # seconds


class Ranks:
    """This process among those of a training; by default it is alone.

    Attributes:
        rank, size: its number, and how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def mine(self, items: Sequence[V]) -> list[V]:
        """Takes this rank's share of items."""
        return list(items[self.rank :: self.size])

    def add_up(self, tensors: list[Tensor]) -> None:
        """Sums tensors of one type over the ranks, in place."""
        if self.size > 1:
            flat = torch.cat([x.flatten() for x in tensors])
            dist.all_reduce(flat)
            for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
                x.copy_(total.view_as(x))

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on some rank. Waits for no GPU."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags)
        return bool(flags)

    def gather(self, value: V) -> list[V]:
        """Gathers a value of each rank, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def check_ranks(size: int, packs: int, device: torch.device) -> None:
    """Refuses ranks that have no GPU, or no pack.

    Raises:
        SettingsError: names the flag.
    """
    if packs % size:
        raise SettingsError(f"--packs {packs}: give a multiple of --ranks {size}, which divide them")
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise SettingsError(f"--ranks {size}: a GPU each is needed, and this machine has {torch.cuda.device_count()}")


@contextmanager
def joined(size: int, device: torch.device, follow: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[Ranks]:
    """Starts the other ranks, and joins them as rank 0; ends them after the body.

    Args:
        follow: called in each of them as follow(connect, *arguments); connect() joins it, once it is ready.

    Raises:
        EngineError: one of them ended.
    """
    if size == 1:
        yield Ranks()
        return
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_begin, args=(rank, size, store, device.type, follow, arguments), daemon=True)
            for rank in range(1, size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(_store(store), processes)
            ranks = _connected(0, size, store, device.type)
            try:
                yield ranks
            except RuntimeError as error:
                for process in processes:  # whose end may have been heard of before it is known
                    process.join(_PATIENCE)
                if any(process.exitcode for process in processes):
                    raise EngineError(f"--ranks {size}: one of them ended ({error})") from None
                raise
            else:
                for process in processes:
                    process.join()
            finally:
                dist.destroy_process_group()
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _begin(
    rank: int, size: int, store: Path, device: str, follow: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Runs another rank, in its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: rank 0 tells when to end
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))

    def connect() -> Ranks:
        _store(store).set(f"ready {rank}", "1")
        return _connected(rank, size, store, device)

    try:
        follow(connect, *arguments)
    except DFlashError as error:
        sys.exit(f"error: rank {rank}: {error}")


def _wait(store: FileStore, processes: list[Any]) -> None:
    """Waits until all ranks are ready."""
    while not store.check([f"ready {rank}" for rank in range(1, len(processes) + 1)]):
        if any(process.exitcode is not None for process in processes):
            raise EngineError(f"--ranks {len(processes) + 1}: one of them ended before it was ready")
        time.sleep(_POLL)


def _store(file: Path) -> FileStore:
    return FileStore(str(file), -1)


def _connected(rank: int, size: int, store: Path, device: str) -> Ranks:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prefixed = PrefixStore("group", _store(store))
    dist.init_process_group(_BACKENDS[device], store=prefixed, rank=rank, world_size=size, timeout=_LONGEST)
    return Ranks(rank, size)
