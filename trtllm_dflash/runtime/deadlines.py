"""The deadlines of requests that wait or run."""

from heapq import heapify, heappop, heappush

from trtllm_dflash.runtime.request import Sequence


class Deadlines:
    """Sequences in order of their deadlines; those that have ended are dropped in time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, going: int) -> None:
        """Notes a sequence's deadline, if it has one.

        Args:
            going: sequences that wait or run, with this one.
        """
        if sequence.deadline is None:
            return
        heappush(self._heap, (sequence.deadline, sequence.arrival, sequence))
        if len(self._heap) > 2 * going:  # most have ended, behind one that has not
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapify(self._heap)

    def passed(self, now: float) -> list[Sequence]:
        """Takes out those whose deadline has passed; returns the ones that have not ended."""
        found = []
        while self._heap and (self._heap[0][2].done or self._heap[0][0] <= now):
            sequence = heappop(self._heap)[2]
            if not sequence.done:
                found.append(sequence)
        return found
