"""The queue of requests that wait for a slot: the most urgent first, among equals the earliest."""

import heapq
from collections.abc import Callable
from itertools import count

from trtllm_dflash.runtime.request import Sequence


class Queue:
    """Sequences in order of priority and arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence: one that was here before, before all that came later."""
        if sequence.arrival < 0:
            sequence.arrival = next(self._arrivals)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence:
        """Looks at the next one."""
        return self._heap[0][1]

    def pop(self) -> Sequence:
        """Takes the next one out."""
        return heapq.heappop(self._heap)[1]

    def remove_if(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Takes out all for which `unwanted` is true."""
        kept, removed = [], []
        for rank, sequence in self._heap:
            if unwanted(sequence):
                removed.append(sequence)
            else:
                kept.append((rank, sequence))
        if removed:
            self._heap = kept
            heapq.heapify(self._heap)
        return removed
