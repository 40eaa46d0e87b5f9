"""Copies of what steps decide to the host, by a kernel of ours."""

import weakref
from collections import deque

import torch

from trtllm_dflash import kernels
from trtllm_dflash.session.outcome import copy_to_host

Tensor = torch.Tensor

#: Numbers that a kernel sends: its block takes 256 at a time, and of more than were timed it may be the slower one.
_MOST_SENT = 1024


class HostCopies:
    """Has int32 numbers of a device copied to the host, as `outcome.copy_to_host` does, in less time of the device.

    The engine that copies waits for the kernels before it, and the next step for that: 9 us of a step. A kernel's copy
    takes 3.
    """

    def __init__(self) -> None:
        # Memory is held until its kernel has run, though nobody may read the outcome: else others would get it.
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        weakref.finalize(self, _wait, self._under_way).atexit = False

    def __call__(self, numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """numbers: contiguous, of the current stream, on which all calls are."""
        while self._under_way and self._under_way[0][1].query():
            self._under_way.popleft()
        copy = copy_to_host(numbers, kernels.send) if numbers.numel() <= _MOST_SENT else copy_to_host(numbers)
        self._under_way.append(copy)
        return copy


def _wait(under_way: deque[tuple[Tensor, torch.cuda.Event]]) -> None:
    """Waits until all have arrived: they are in order."""
    if under_way:
        under_way[-1][1].synchronize()
