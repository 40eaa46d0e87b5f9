"""The time of requests' events."""

import time

#: What the two clocks were apart when this process began.
_APART = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Returns nanoseconds since the epoch, as that was known when this process began.

    Nobody sets this clock: what lies between two times is real, also where the machine's time of day is set meanwhile.
    """
    return time.monotonic_ns() + _APART
