"""Runs the command line: `python -m trtllm_dflash`, and `trtllm-dflash`."""

import sys

from trtllm_dflash.signals import GuardedImport, leaving_on_interrupt


def start() -> None:
    """Runs a command. Its imports take a third of a second, and torch's more, in which Ctrl-C is one line, too."""
    with leaving_on_interrupt():
        from trtllm_dflash.cli import main
    sys.meta_path.insert(0, GuardedImport("torch"))
    main()


if __name__ == "__main__":
    start()
