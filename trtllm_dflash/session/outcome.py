"""The outcome of a step, as the host reads it."""

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import chain, islice
from struct import Struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.session.report import Report

Tensor = torch.Tensor
Ints = npt.NDArray[np.int32]


#: What unpacks tokens, of bytes and from where they begin.
Unpack: TypeAlias = Callable[[bytes, int], tuple[int, ...]]
#: Bytes of all slots, where each slot's tokens begin in them, its accepted drafts, and what unpacks tokens, by those.
Packed: TypeAlias = tuple[bytes, list[int], list[int], list[Unpack]]


#: Has numbers of a device copied to the host: they are there once the event is past.
Copy: TypeAlias = Callable[[Tensor], tuple[Tensor, torch.cuda.Event]]


def _send(numbers: Tensor, host: Tensor) -> None:
    host.copy_(numbers, non_blocking=True)


def copy_to_host(numbers: Tensor, send: Callable[[Tensor, Tensor], None] = _send) -> tuple[Tensor, torch.cuda.Event]:
    """Has numbers of a device copied to the host, behind the step that makes them: see `Copy`.

    Args:
        send: copies them to pinned memory.
    """
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # so that the host goes on meanwhile
    send(numbers, host)
    event = torch.cuda.Event()
    event.record()
    return host, event


@cache
def _unpackers(width: int) -> list[Unpack]:
    """Makes what unpacks the final tokens of a row of so many int32, by the number of its accepted drafts."""
    return [Struct(f"{tokens}i").unpack_from for tokens in range(1, width)]


@cache
def _possible(width: int) -> frozenset[int]:
    """Lists the numbers of accepted drafts that a row of so many int32 can have."""
    return frozenset(range(width - 1))


@lru_cache(maxsize=256)
def _begins(slots: int, width: int) -> list[int]:
    """Lists where each slot's tokens begin among rows of so many int32."""
    return list(range(4, 4 * slots * width, 4 * width))


class Outcome:
    """The outcome of a step, on its way from the device. `read` waits for it, if it must."""

    def __init__(
        self,
        decided: Tensor,
        report: Report | None = None,
        shared: Tensor | None = None,
        gains: Tensor | None = None,
        ranks: list[list[int]] | None = None,
        first_rank: int = 0,
        rank_columns: int = 0,
        copy: Copy = copy_to_host,
    ) -> None:
        """decided [B, 1 + R]: `accepted`, then `target_ids`; on the CPU alone, shared [D], gains [drafts] and ranks.

        first_rank: column of decided from which on it has ranks, of as many drafts as were accepted, then zeros; 0: it
            has none.
        rank_columns: of those; what is behind them is something else.
        """
        self.report = report or Report()
        self._ranks, self._first_rank, self._past_ranks = ranks or [], first_rank, first_rank + rank_columns
        self._shared: list[int] | None = None if shared is None else shared.tolist()
        self._gained: list[float] = [] if gains is None else gains.tolist()
        self._event: torch.cuda.Event | None = None
        if decided.is_cuda:
            decided, self._event = copy(decided)
        self._decided = decided
        self._arrived: Ints | None = None  # its rows, once they have arrived
        self._counts: list[int] = []  # accepted drafts of each of them
        self._places: list[int] | None = None

    @property
    def shared(self) -> list[int] | None:
        """Rows that each decoding slot got of those that they share; None: each had its own."""
        return self._shared

    @property
    def gains(self) -> list[float]:
        """Tokens that one more draft a slot, on average, is likely to commit of those that were made, after so many."""
        return self._gained

    @property
    def ranks(self) -> list[list[int]]:
        """Ranks of each slot's accepted drafts, in order, among the drafter's candidates at their depths, from 1.

        They are those of trees' drafts; of chains they are without meaning. Empty where the session tells none.
        """
        ranks, first = self._ranks, self._first_rank
        if first:
            ranks = [row[first : first + row[0]] for row in self.read_whole()]
        return ranks if self._places is None or not ranks else [ranks[place] for place in self._places]

    def ranks_of(self, counts: list[int]) -> Ints:
        """Lists the ranks of each slot's first accepted drafts, so many of each, and zeros, in any shape; see `ranks`.

        Nobody may change them.
        """
        first, slots = self._first_rank, len(counts)
        if first and self._counts[:slots] == counts:  # all of them, as mostly: what is behind them is 0
            return self._wait()[:slots, first : self._past_ranks]
        return np.fromiter(chain.from_iterable(map(islice, self.ranks, counts)), np.int32)

    def read(self) -> list[tuple[int, ...]]:
        """Reads the tokens that became final, by slot of the call: the target's choices up to the first wrong draft."""
        whole, begins, accepted, unpack = self.packed()
        return [unpack[count](whole, begin) for count, begin in zip(accepted, begins, strict=True)]

    def packed(self) -> Packed:
        """Reads what `read` does, not unpacked yet: all of the matrix would be many integers for nothing.

        Raises:
            EngineError: the session told of more accepted drafts than the step has rows for.
        """
        rows = self._wait()
        slots, width = rows.shape
        begins, accepted = _begins(slots, width), self._counts
        if not _possible(width).issuperset(accepted):  # it takes half as long as their maximum
            raise EngineError(f"a step of {width - 1} rows a slot accepted {max(self._counts)} drafts")
        if self._places is not None:
            begins, accepted = [begins[place] for place in self._places], self.accepted
        return rows.tobytes(), begins, accepted, _unpackers(width)

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each slot: the tokens that `read` returns of it, less one."""
        self._wait()
        return self._counts if self._places is None else [self._counts[place] for place in self._places]

    def may_have(self, tokens: dict[int, Ints]) -> bool:
        """Whether any of these tokens may be among those that became final; it is sooner known than where.

        Args:
            tokens: each as [1, 1], too.
        """
        rows = self._wait()
        for token, alike in tokens.items():
            # All numbers lie in one run, and are compared in half the time: counts and ranks too, which are smaller.
            among = rows if token >= rows.shape[1] else rows[:, 1 : self._first_rank or None]
            if b"\1" in (among == alike).tobytes():  # sooner found there than by numpy, of so few
                return True
        return False

    def read_whole(self) -> list[list[int]]:
        """Reads all that it was made of, accepted drafts first."""
        rows: list[list[int]] = self._wait().tolist()
        return rows

    def _wait(self) -> Ints:
        """Waits for what comes from the device."""
        if self._arrived is None:
            if self._event is not None:
                self._event.synchronize()
            self._arrived = self._parse(self._decided).numpy().astype(np.int32, copy=False)
            self._counts = self._arrived[:, 0].tolist()
        return self._arrived

    def _parse(self, host: Tensor) -> Tensor:
        """Takes apart what has come from the device."""
        return host

    def of(self, places: list[int]) -> "Outcome":
        """Chooses what `read` returns: the tokens of these places, in this order."""
        self._places = places
        return self
