"""Documents to train on, a prompt and its reply each, and packs of them.

Which documents a pack has depends on the seed and on the pack's number alone: so a training that goes on after a pause
sees what it would have seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tensor = torch.Tensor
IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Document:
    """The tokens of a prompt and of the target's reply to it."""

    token_ids: Sequence[int]
    prompt: int  # how many of them are the prompt
    domain: str = ""

    @property
    def reply(self) -> int:
        """Tokens of the reply."""
        return len(self.token_ids) - self.prompt


@dataclass(frozen=True, eq=False)
class Pack:
    """Documents behind each other, S tokens in all."""

    documents: list[Document]
    token_ids: Tensor  # [S] int64
    document: Tensor  # [S] the number of each token's document
    position: Tensor  # [S] of each token in its document
    in_reply: Tensor  # [S] bool

    @classmethod
    def of(cls, documents: list[Document]) -> "Pack":
        """Packs documents, in their order, on the host."""
        lengths = torch.tensor([len(document.token_ids) for document in documents])
        prompts = torch.tensor([document.prompt for document in documents])
        ids = np.concatenate([np.asarray(document.token_ids, np.int64) for document in documents])
        number = torch.arange(len(documents)).repeat_interleave(lengths)
        first = lengths.cumsum(0) - lengths
        position = torch.arange(len(ids)) - first[number]
        parts = torch.from_numpy(ids), number, position, position >= prompts[number]
        return cls(documents, *parts)

    def to(self, device: torch.device) -> "Pack":
        """Copies its tensors to a device, without waiting for it."""
        parts = self.token_ids, self.document, self.position, self.in_reply
        return Pack(self.documents, *(moved(part, device) for part in parts))

    def begin(self, places: IntArray) -> IntArray:
        """Finds the places where the documents of the tokens at these places begin; on the host."""
        firsts: IntArray = self._firsts[self._firsts.searchsorted(places, side="right") - 1]
        return firsts

    @cached_property
    def _firsts(self) -> IntArray:
        lengths = [len(document.token_ids) for document in self.documents]
        return np.cumsum([0, *lengths])[:-1]


class Packs:
    """Packs of documents, epoch after epoch, each document once in an epoch.

    Args:
        documents: none longer than a pack.
        length: tokens of a pack, at most.
        seed: of the order.
    """

    def __init__(self, documents: list[Document], length: int, seed: int) -> None:
        self._documents = documents
        self._length = length
        self._seed = seed
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def epoch(self, number: int) -> list[list[int]]:
        """Lists the documents of each pack of an epoch."""
        if self._epoch[0] != number:
            order = torch.randperm(len(self._documents), generator=generator(self._seed, number)).tolist()
            packs: list[list[int]] = []
            room = 0
            for index in order:
                size = len(self._documents[index].token_ids)
                if size > room:
                    packs.append([])
                    room = self._length
                packs[-1].append(index)
                room -= size
            self._epoch = number, packs
        return self._epoch[1]

    def pack(self, epoch: int, place: int) -> Pack:
        """Makes a pack of an epoch, on the host."""
        return Pack.of([self._documents[index] for index in self.epoch(epoch)[place]])


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device, without waiting for what the device does."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def generator(*numbers: int) -> torch.Generator:
    """Makes a generator on the CPU whose draws are a function of these numbers alone."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)
