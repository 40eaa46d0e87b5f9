"""The rows that the slots of a step share: as many as commit most tokens a second, by the chances of their drafts.

Every slot drafts a whole block; how many of all drafts are verified the host chooses here, and whose they are, the
device does (see `session.shares`). It tells the chances of the drafts that it has made: the sum of the largest so many
is what so many more rows commit. No service chooses this rule by itself: on a CPU the drafter's whole blocks cost more
than the better rows bring.
"""

from collections.abc import Sequence
from itertools import accumulate

from trtllm_dflash.runtime.draft_length import PROBE_STEPS, DraftLength, StepTimes, seconds_of


class SharedRows(DraftLength):
    """The number of shared rows that most tokens a second come of, by measured step times and the drafts' own chances.

    Args:
        times: as `AdaptiveDraftLength`'s, of steps whose slots share their rows; the longest length is the whole block.
    """

    shares = True

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._lengths = sorted({drafts for _, drafts in times})
        self._steps = 0
        self._tries = False  # to draft and verify all, whatever the chances
        self._committed: list[float] = []  # tokens a slot that each length commits, by the drafts made last

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def choose(self, slots: int) -> int:
        """Chooses the whole block, or nothing where no draft is worth its row; from time to time it tries again."""
        self._steps += 1
        if self._steps % PROBE_STEPS == 0:
            self._tries = True
        return self._lengths[-1] if self._tries or self._best(slots) else 0

    def share(self, slots: int) -> int:
        if self._tries:  # verified, too: chances that are wrong are corrected by what is verified
            self._tries = False
            return self._lengths[-1]
        return self._best(slots)

    def foresee(self, chances: Sequence[float]) -> None:
        block = self._lengths[-1]
        slots = len(chances) // block
        if not slots:
            return
        sums = list(accumulate(chances, initial=0.0))
        self._committed = [1 + sums[slots * drafts] / slots for drafts in self._lengths]

    def _best(self, slots: int) -> int:
        if not self._committed:
            return self._lengths[-1]
        rates = [n / seconds_of(self._times, slots, k) for n, k in zip(self._committed, self._lengths, strict=True)]
        return self._lengths[max(range(len(rates)), key=rates.__getitem__)]


def shared_rows(rule: DraftLength, rows: Sequence[tuple[int, int]]) -> int:
    """Counts the rows that a step's decoding slots share, of slots and their most rows; 0: nobody has drafts."""
    drafting = sum(most > 1 for _, most in rows)
    return len(rows) + drafting * rule.share(drafting) if drafting else 0
