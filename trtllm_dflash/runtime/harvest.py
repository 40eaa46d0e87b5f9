"""Harvested replies: token ids of some prompts and replies, for training a drafter on what is really asked.

No text, no user, no time: but token ids are what the text was, for whoever has the tokenizer. So nothing is harvested
unless its folder is named, the file is its owner's alone, and there is a share of the replies and a size at most.
"""

import errno
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.output import lock, writing
from trtllm_dflash.runtime.request import Sequence

FILE = "replies.jsonl"

_log = logging.getLogger(__name__)


class Harvest:
    """Writes sampled replies to a file of a folder, until it is full.

    Args:
        folder: made where it is missing.
        share: of the replies.
        most: bytes of the file.
        draw: draws numbers in [0, 1).

    Raises:
        SettingsError: the folder cannot be written, or another process harvests there.
    """

    def __init__(self, folder: Path, share: float, most: int, draw: Callable[[], float] = random.random) -> None:
        self._share, self._most, self._draw = share, most, draw
        with writing(folder, "--harvest"):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        try:  # two would cut off each other's replies
            lock(handle, f"--harvest {folder}: another server harvests there; give each its own")
        except SettingsError:
            self.close()
            raise

    def take(self, sequence: Sequence) -> None:
        """Writes a finished sequence, if it is drawn and there is room. A disk that fails ends the harvest alone.

        A reply that a grammar, penalties or biases had a part in is not the target's own: nothing to train on.
        """
        is_own = sequence.grammar is None and not sequence.params.penalizes
        if self._file.closed or not is_own or self._draw() >= self._share:
            return
        row = {"prompt_ids": sequence.prompt_ids, "reply_ids": sequence.token_ids}
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            before = self._file.tell()
            if before + len(line) > self._most:
                self.close()
                _log.info("harvest: %s has its %d MB; no more is taken", self._file.name, self._most // 10**6)
            elif self._file.write(line) < len(line):  # what a disk says that has become full
                self._file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()
            _log.warning("harvest: ends, for it cannot be written (%s)", error.strerror)

    def close(self) -> None:
        """Takes no more."""
        self._file.close()
