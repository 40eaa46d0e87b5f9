"""What the ranks of a tensor-parallel engine say to each other."""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist


class Communicator(ABC):
    """Collectives among `size` ranks, of which this is `rank`. Every rank must make every call, in one order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; may reuse x."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, in their order; all of one shape."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, on every rank; x gives shape and dtype."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; no more calls after it."""


class Solo(Communicator):
    """The only rank."""

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


class TorchDistributed(Communicator):
    """A process group of torch.distributed: gloo on CPU, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, src=0, group=self.group)
        return x

    def close(self) -> None:
        # The group's threads must end before the interpreter does, or they end the process with SIGABRT.
        del self.group
        dist.destroy_process_group()
