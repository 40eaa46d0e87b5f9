"""Runs the command line: `python -m trtllm_dflash`."""

from trtllm_dflash.cli import main

if __name__ == "__main__":
    main()
