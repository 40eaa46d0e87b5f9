"""The engine's own lines in Triton's log, written while it loads and read by whoever started the server."""

import logging
import sys

_MARK = "trtllm_dflash: "


def log_to_triton() -> None:
    """Sends this process's log of the package to standard error, which is Triton's log."""
    log = logging.getLogger("trtllm_dflash")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_MARK + "%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


def said_at_load(log: str) -> list[str]:
    """Finds the lines that an engine's process has logged so, without their mark."""
    return [line.removeprefix(_MARK) for line in log.splitlines() if line.startswith(_MARK)]
