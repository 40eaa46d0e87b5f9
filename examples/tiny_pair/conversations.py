"""Training rows: conversations of many exchanges, so that every position of the window is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from corpus import SYSTEM_PROMPTS, Exchange
from tokenizers import Tokenizer
from torch import Tensor

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[np.int16]]"
REPLY = 1  # what a token is: 0 for the prompt's side, 1 inside a reply


class Conversations:
    def __init__(self, tokenizer_file: Path, seed: int, found: list[Exchange]) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        asks = tokenizer.encode_batch_fast(
            [f"<|im_start|>user\n{e.prompt}<|im_end|>\n<|im_start|>assistant\n" for e in found]
        )
        replies = tokenizer.encode_batch_fast([f"{e.reply}<|im_end|>\n" for e in found])
        self.turns = [np.array(a.ids + r.ids, np.int16) for a, r in zip(asks, replies, strict=True)]
        self.starts = [len(a.ids) for a in asks]
        self.systems = [
            np.array(tokenizer.encode(f"<|im_start|>system\n{s}<|im_end|>\n").ids, np.int16) for s in SYSTEM_PROMPTS
        ]
        self.random = np.random.default_rng(seed)
        self.order: Iterator[int] = iter(())

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))

    def turn(self) -> tuple[Tokens, Tokens]:
        index = next(self.order, None)
        if index is None:
            self.order = iter(self.random.permutation(len(self.turns)).tolist())
            index = next(self.order)
        part = np.full(len(self.turns[index]), REPLY, np.int16)
        part[: self.starts[index]] = 0
        part[-1] = 0  # the line break after <|im_end|> belongs to the template
        return self.turns[index], part

    def row(self, length: int) -> tuple[Tokens, Tokens]:
        ids, parts, have = [], [], 0
        if self.random.random() < 0.2:
            system = self.systems[self.random.integers(len(self.systems))]
            ids, parts, have = [system], [np.zeros_like(system)], len(system)
        while have < length:
            turn, part = self.turn()
            ids.append(turn)
            parts.append(part)
            have += len(turn)
        return np.concatenate(ids)[:length], np.concatenate(parts)[:length]

    def batch(self, rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
        """Token ids and what they are, both [rows, length]."""
        ids, parts = zip(*(self.row(length) for _ in range(rows)), strict=True)
        both = (torch.from_numpy(np.stack(rows)).long() for rows in (ids, parts))
        if device == "cuda":  # pinned, so that the copy waits for no step before it
            both = (rows.pin_memory() for rows in both)
        tokens, sides = (rows.to(device, non_blocking=True) for rows in both)
        return tokens, sides
