"""The pace of a device that computes steps one after the other, and the time that it leaves the host."""

import time
from collections import deque
from collections.abc import Callable

#: Steps by whose shortest the one under way is judged.
_STEPS = 16
#: The part of that time that a launch may wait. What is left is the host's, whose other threads may be in its way.
_SHARE = 1 / 3


class Pace:
    """Measures steps by the times at which they were read.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._begun: float | None = None  # of the step under way

    def note(self, is_next_under_way: bool) -> None:
        """Notes that a step has been read, just now, and whether the next one had been launched: then it has begun."""
        now = self._clock()
        if self._begun is not None:
            self._seconds.append(now - self._begun)
        self._begun = now if is_next_under_way else None

    @property
    def spare(self) -> float:
        """Seconds that the next launch may wait without the device waiting for it; 0 before any step was measured."""
        if self._begun is None or not self._seconds:
            return 0.0
        return max(0.0, self._begun + _SHARE * min(self._seconds) - self._clock())
