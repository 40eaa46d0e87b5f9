"""Signals, and which of them this process was started to ignore."""

import signal


def is_heard(number: int) -> bool:
    """Whether a handler for this signal may be set.

    `nohup` has SIGHUP ignored in what it starts, and a script has SIGINT ignored in its background jobs, so that Ctrl-C
    and a terminal that closes end other programs and not these. A handler would undo that.
    """
    return signal.getsignal(number) not in (signal.SIG_IGN, None)
