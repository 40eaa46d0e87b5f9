"""Waiting for events. No test races a clock: patience ends one that would wait for ever, and measures nothing."""

import time
from collections.abc import Callable

#: Seconds: many times what anything here takes, beside whatever else the machine does.
PATIENCE = 300.0


def wait_until(condition: Callable[[], object], what: str = "it came to pass") -> None:
    """Returns once the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{PATIENCE:g} s, and not yet that {what}"
        time.sleep(0.02)
