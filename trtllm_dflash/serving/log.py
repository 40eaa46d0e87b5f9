"""What the engine's process says in Triton's log when it is loaded, for those who started the server."""

import logging
import sys

_MARK = "trtllm_dflash: "


def log_to_triton() -> None:
    """Lets this process's log of the package go to standard error, which is Triton's log."""
    log = logging.getLogger("trtllm_dflash")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_MARK + "%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


def said_at_load(log: str) -> list[str]:
    """The lines that an engine's process has written so, less the mark."""
    return [line.removeprefix(_MARK) for line in log.splitlines() if line.startswith(_MARK)]
