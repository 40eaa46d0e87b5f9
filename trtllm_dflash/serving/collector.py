"""Python's garbage collector, kept away from what a process imports and never lets go."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Has what is made inside stay: the collector looks for no garbage among it, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
