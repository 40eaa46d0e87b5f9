"""A pipe that a server's own process holds: when that process ends, the kernel kills Triton's processes of models.

Triton starts them, and they may outlive it: one that Triton's end finds in a call into Triton's library waits there for
ever, with Python's lock, so that no thread of its own could end it.
"""

import fcntl
import os
import signal
from pathlib import Path

#: In the environment of a server's processes: the folder that holds the pipe.
FOLDER = "TRTLLM_DFLASH_FOLDER"

_NAME = "lifeline"
_F_SETSIG = 10  # <fcntl.h>; Python 3.10 does not name it


class Lifeline:
    """The end of the process that others must not outlive: open until it is closed, or that process ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / _NAME
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # to read, too: or it would wait for a reader

    def close(self) -> None:
        """Ends those that hold it."""
        os.close(self._pipe)


def hold_lifeline() -> None:
    """Has the kernel kill this process when the server's own ends; does nothing where Triton was started otherwise."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    try:
        pipe = os.open(Path(folder) / _NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never closed
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.read(pipe, 1)  # nothing is ever written: its other end is closed
    except BlockingIOError:
        return
    except FileNotFoundError:  # the next server has removed what this one left
        pass
    os.kill(os.getpid(), signal.SIGKILL)
