"""Runs a program that ends when its parent does. Run as a file: python -I -S launch.py LOG PARENT PROGRAM [WORD ...]

It is killed: Triton, asked to end while it streams, can hang for ever, and its clients with it. This runs without
site-packages, and so starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def launch(log: str, parent: int, words: list[str]) -> None:
    """Replaces this process by the program; its output is appended to the log.

    Args:
        parent: whose end ends the program: it may have ended before this runs; 0: whoever it is now.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # our starter held them back
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        sys.exit(1)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.execv(words[0], words)


if __name__ == "__main__":
    launch(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
