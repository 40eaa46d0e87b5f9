"""Counts of verified drafts, made when they are read: a step has no time for more than to note its numbers."""

from collections import Counter, defaultdict, deque
from struct import pack
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch comes with it, and who serves or deploys needs none
    from trtllm_dflash.session.outcome import Ints

#: Steps whose numbers are noted, at most, before they are counted.
_MOST_NOTED = 16


class VerifiedDrafts:
    """Counts sequences' steps by the drafts that were verified, and by how many of them were accepted.

    One thread notes, any reads.

    Args:
        longest: drafts of the longest chain; more are a tree's, which count by depth.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._counts: Counter[tuple[int, int]] = Counter()
        self._noted: deque[tuple[list[int], list[int]]] = deque()
        self._lock = Lock()

    def note(self, drafted: list[int], accepted: list[int]) -> None:
        """Notes a step's sequences; those without drafts do not count. Nobody may change the lists from now on."""
        self._noted.append((drafted, accepted))
        if len(self._noted) >= _MOST_NOTED:
            self.counts()

    def counts(self) -> Counter[tuple[int, int]]:
        """Counts what was noted; returns all counts so far, which go on changing."""
        with self._lock:
            by_drafts: defaultdict[int, list[int]] = defaultdict(list)
            while self._noted:
                drafted, accepted = self._noted.popleft()
                if drafted.count(drafted[0]) == len(drafted):  # all but always; numbers are counted sooner than pairs
                    by_drafts[drafted[0]] += accepted
                    continue
                for drafts, count in zip(drafted, accepted, strict=True):
                    by_drafts[drafts].append(count)
            by_drafts.pop(0, None)
            for drafts, every in by_drafts.items():
                # All packed together: that is counted sooner than Python's integers, one by one.
                found = np.bincount(np.frombuffer(pack(f"{len(every)}H", *every), np.uint16)).tolist()
                key = min(drafts, self._longest)
                self._counts.update({(key, count): sequences for count, sequences in enumerate(found) if sequences})
        return self._counts


class AcceptedRanks:
    """Counts the accepted drafts of trees by rank; likewise."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._noted: deque[Ints] = deque()
        self._lock = Lock()

    def note(self, ranks: "Ints") -> None:
        """Notes the ranks of a step's drafts, in any shape; zeros do not count. Nobody may change them from now on."""
        self._noted.append(ranks)
        if len(self._noted) >= _MOST_NOTED:
            self.counts()

    def counts(self) -> Counter[int]:
        """Counts what was noted; returns all counts so far, which go on changing."""
        with self._lock:
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            found = np.bincount(np.concatenate(noted, axis=None)).tolist() if noted else []
            self._counts.update({rank: count for rank, count in enumerate(found) if rank and count})
        return self._counts
