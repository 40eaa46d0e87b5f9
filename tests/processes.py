"""Programs that a test starts, sends signals to and waits for; and what processes do in tests instead of their work.

It imports little: whoever runs a function of it in a process of its own waits for these imports.
"""

import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

#: What `nohup` and a script's background jobs are started deaf to: so may these tests be, and not what they start.
OFTEN_IGNORED = (signal.SIGINT, signal.SIGHUP)


def start(words: Iterable[object], ignored: Iterable[int] = (), **options: Any) -> "subprocess.Popen[str]":
    """Starts a program that hears SIGINT and SIGHUP, however this process was started.

    Args:
        ignored: signals that it is started deaf to.
        options: of Popen; by default what it prints comes through pipes.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    # What a process ignores its children ignore; what it has a handler for is theirs to hear.
    wanted: dict[int, Any] = {n: _swallow for n in OFTEN_IGNORED if signal.getsignal(n) is signal.SIG_IGN}
    wanted |= dict.fromkeys(ignored, signal.SIG_IGN)
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        return subprocess.Popen([str(word) for word in words], **options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_killed(*_: object) -> None:
    """Ends as a process that the kernel kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def ends_at_once(*_: object) -> None:
    """Ends as a rank without the memory that it needs."""
    raise SystemExit(1)


def _swallow(number: int, frame: object) -> None:
    """Ignores a signal by a handler."""
