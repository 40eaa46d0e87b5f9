"""Collectives among the ranks of a tensor-parallel engine."""

import logging
from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist

from trtllm_dflash import kernels
from trtllm_dflash.errors import EngineError

_log = logging.getLogger(__name__)


class Communicator(ABC):
    """Collectives among `size` ranks, of which this is `rank`. Every rank must make every call, in one order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks; may reuse x."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Gathers every rank's x, in their order; all of one shape."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Sends rank 0's x to every rank; x gives shape and dtype. On the CPU: it waits for no device."""

    def share_memory(self, device: torch.device) -> None:  # noqa: B027
        """Lets our kernel, which reads the other ranks' memory, compute small sums, where it can."""

    @property
    def sums_in_order(self) -> bool:
        """Whether small sums, of at most ALL_REDUCE_BYTES on a GPU, add ranks in one order wherever a number lies."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; no more calls after it."""


class Solo(Communicator):
    """The communicator of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass


#: How long a rank waits for rank 0's next call: a server may have nothing to do for days. That a rank has died is seen
#: by its closed connection.
IDLE = timedelta(days=365)


class TorchDistributed(Communicator):
    """A process group of torch.distributed: gloo on CPU, NCCL on GPUs, where all but `broadcast` may be captured.

    Every rank must make one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        # NCCL takes nothing from the CPU.
        self._host = dist.new_group(backend="gloo", timeout=IDLE) if dist.get_backend(group) == "nccl" else group
        self._small: kernels.AllReduce | None = None
        self._shared: torch.Tensor | None = None  # what it works in, for as long as it lives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda and self.size > 2:
            # gloo adds the ranks in an order that depends on a number's place in x, and so on the rows beside its own.
            first, *others = self.all_gather(x)
            for other in others:
                first += other
            return first
        if self._small is not None and self._small.takes(x):
            return self._small(x)
        dist.all_reduce(x, group=self.group)
        return x

    @property
    def sums_in_order(self) -> bool:
        return self._host is self.group or self._small is not None

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        if x.is_cuda:
            whole = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
            dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
            return list(whole.unbind())
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, src=0, group=self.group if x.is_cuda else self._host)
        return x

    def share_memory(self, device: torch.device) -> None:
        if self._small is not None or self.size not in kernels.ALL_REDUCE_RANKS:
            return
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import, and for this alone

        works = torch.ones(1)
        try:
            shared = symmetric_memory.empty(kernels.ALL_REDUCE_SHARED, dtype=torch.uint8, device=device).zero_()
            torch.cuda.synchronize(device)
            addresses = symmetric_memory.rendezvous(shared, self.group).buffer_ptrs
            self._small, self._shared = kernels.AllReduce(list(addresses), self.rank), shared
        except (RuntimeError, EngineError) as error:  # GPUs that do not see each other's memory, say
            _log.warning("all sums over the ranks go through NCCL: %s", error)
            works.zero_()
        # After this every rank's memory is zeros.
        dist.all_reduce(works, op=dist.ReduceOp.MIN, group=self._host)
        if not works.item():
            self._small = self._shared = None

    def close(self) -> None:
        self._small = self._shared = None
        # The group's threads must end before the interpreter does, or they end the process with SIGABRT.
        del self.group, self._host
        dist.destroy_process_group()
