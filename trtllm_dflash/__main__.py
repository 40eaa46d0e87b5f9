"""Runs the command line: `python -m trtllm_dflash`, and `trtllm-dflash`."""

import signal
import sys


def start() -> None:
    """Runs a command. Its imports take a third of a second, in which Ctrl-C is one line, too."""
    try:
        from trtllm_dflash.cli import main
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    main()


if __name__ == "__main__":
    start()
