"""The rows of a step: as many for every slot, or shared by the chances of the drafts, whichever commits more a second.

Where rows are shared every slot drafts a whole block; how many of all drafts are verified the host chooses here, and
whose they are, the device does (see `session.shares`). It tells the chances of the drafts that it has made: the sum of
the largest so many is what so many more rows commit.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from trtllm_dflash.runtime.draft_length import PROBE_STEPS, AdaptiveDraftLength, DraftLength, StepTimes, seconds_of

#: The weight of a step among those that what sharing commits is the mean of.
_NEWS = 0.1


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
        self._mean: list[float] = []  # likewise, by those of recent steps

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def rate(self, slots: int) -> float:
        """Predicts the tokens a second that a slot gets of shared rows; infinite before anything is known."""
        return max(self._rates(self._mean, slots), default=float("inf"))

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
        sums = list(accumulate(chances, initial=0.0))
        self._committed = [1 + sums[slots * drafts] / slots for drafts in self._lengths]
        before = self._mean or self._committed
        self._mean = [old + _NEWS * (new - old) for old, new in zip(before, self._committed, strict=True)]

    def _best(self, slots: int) -> int:
        rates = self._rates(self._committed, slots)
        return self._lengths[max(range(len(rates)), key=rates.__getitem__)] if rates else self._lengths[-1]

    def _rates(self, committed: list[float], slots: int) -> list[float]:
        return [n / seconds_of(self._times, slots, k) for n, k in zip(committed, self._lengths, strict=False)]


class AutoRows(DraftLength):
    """Rows of each slot's own, or shared ones: those that more tokens a second come of.

    Args:
        own: chooses the drafts of every slot.
        shared: chooses the drafts of all.
    """

    def __init__(self, own: AdaptiveDraftLength, shared: SharedRows) -> None:
        self._own, self._shared = own, shared
        self._steps = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._own.lengths

    def choose(self, slots: int) -> int:
        self._steps += 1
        own = self._own.choose(slots)
        tries = self._steps % PROBE_STEPS == PROBE_STEPS // 2
        self.shares = tries or self._shared.rate(slots) > self._own.rate(slots, own)
        return self._shared.choose(slots) if self.shares else own

    def share(self, slots: int) -> int:
        return self._shared.share(slots)

    def foresee(self, chances: Sequence[float]) -> None:
        self._shared.foresee(chances)

    def observe(self, verified: Mapping[tuple[int, int], int]) -> None:
        if not self.shares:  # of shared rows the likely drafts alone are verified: they say little of the others
            self._own.observe(verified)
