"""The order to drain: from `serve` to the process of the engine's model, through files in the server's folder.

Triton has none: at SIGTERM it refuses what comes, waits for all that runs, and crashes where that takes too long.
"""

import os
from contextlib import suppress
from pathlib import Path

from trtllm_dflash.serving.lifeline import FOLDER

_LISTENS, _ORDER, _DONE = "drain.listens", "drain.order", "drain.done"


class DrainOrder:
    """The order, to whoever gives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_heard(self) -> bool:
        """Whether a model of ours listens for it."""
        return (self._folder / _LISTENS).exists()

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered."""
        return (self._folder / _DONE).exists()

    def give(self, seconds: float) -> None:
        """Orders that no new request be taken, and that those that run end within these seconds."""
        aside = self._folder / f"{_ORDER}.aside"
        aside.write_text(str(seconds))
        aside.replace(self._folder / _ORDER)


class DrainListener:
    """The order, to the model; there is none where Triton was started otherwise."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER)
        self._folder = None if folder is None else Path(folder)
        self._tell(_LISTENS)

    def seconds(self) -> float | None:
        """Reads the order: the seconds that running requests have; None while there is none."""
        if self._folder is not None:
            with suppress(FileNotFoundError):
                return float((self._folder / _ORDER).read_text())
        return None

    def report_done(self) -> None:
        """Says that every request has been answered."""
        self._tell(_DONE)

    def _tell(self, name: str) -> None:
        if self._folder is not None:
            with suppress(FileNotFoundError):  # the server has ended
                (self._folder / name).touch()
