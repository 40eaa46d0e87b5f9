"""Rows that a step's slots share, by the chances of their drafts, where that commits more than the same for all.

How many rows there are the host chooses here; whose they are, the device does (see `session.shares`), by what each
draft is likely to commit. It tells the host what so many more rows would commit.
"""

from collections.abc import Sequence
from itertools import accumulate

from trtllm_dflash.engine.ladder import LEAST_SHARING
from trtllm_dflash.runtime.draft_length import MEMORY, AdaptiveDraftLength, PredictedTimes, StepTimes

#: Steps after which the other way is tried, twice as many each time that it is no better, up to so many times as many;
#: and steps of such a trial.
TRIAL_STEPS, MOST_TIMES, TRIAL = 256, 16, 16
#: Steps of a way that are not judged yet: they verify what the other one drafted.
_FIRST = 3
#: Steps of each way whose tokens and times are remembered: about so many, the recent ones more.
_RECENT = 24


class _Way:
    """The rate of one way of drafting: tokens that its latest steps have committed, and their time."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        keep = 1 - 1 / _RECENT
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds

    @property
    def rate(self) -> float | None:
        """Tokens of a slot a second; None: nothing is known."""
        return self._tokens / self._seconds if self._seconds else None


class SharedRows(AdaptiveDraftLength):
    """The draft length of most committed tokens a second, the same for all or on average of slots that share rows.

    Which of both it is, is tried: one is what the drafts' own chances make of it, the other wastes no time on them.

    Args:
        times, tree: as in `AdaptiveDraftLength`.
        shared_times: of steps whose slots share their rows.
    """

    may_share = True

    def __init__(self, times: StepTimes, shared_times: StepTimes, tree: int = 0) -> None:
        super().__init__(times, tree)
        self._shared_times = PredictedTimes(shared_times)
        self._shared_lengths = self._shared_times.lengths
        self._foreseen: list[float] = []  # drafts that a slot commits, by the number that it has on average
        # Sums over steps of what was accepted and of what was foreseen, the recent ones more.
        self._right = self._expected = 0.0
        self._ways = {False: _Way(), True: _Way()}  # by whether rows are shared
        self._period, self._turn, self._is_better = TRIAL_STEPS, TRIAL_STEPS - 4 * TRIAL, False
        self._measured = 0  # the number of slots by whose times steps are judged
        self._in_row = 0  # outcomes of steps that shared rows, without others between
        self._sharing = False

    @property
    def shares(self) -> bool:
        return self._sharing

    def choose(self, slots: int) -> int:
        own = super().choose(slots)
        if slots < LEAST_SHARING or not self._shared_lengths:
            self._sharing = False
            return own
        measured = self._shared_times.measured(slots)
        if measured != self._measured and self._period > TRIAL_STEPS:  # another load: not as long as it would be
            self._period, self._turn = TRIAL_STEPS, min(self._turn, TRIAL_STEPS - TRIAL - 1)
        self._measured = measured
        self._turn += 1
        if self._turn == self._period:
            self._turn, before = 0, self._is_better
            rates = self._ways[True].rate, self._ways[False].rate
            self._is_better = None not in rates and rates[0] > rates[1]  # type: ignore[operator]
            is_as_before = self._is_better == before
            self._period = min(2 * self._period, MOST_TIMES * TRIAL_STEPS) if is_as_before else TRIAL_STEPS
        is_trial = self._turn >= self._period - TRIAL
        if self._turn == self._period - TRIAL:
            self._ways[not self._is_better] = _Way()  # what it was at another load says nothing
        self._sharing = self._is_better != is_trial
        if not (self._sharing or own):  # nothing of it will be observed
            self._ways[False].note(1, self._times.of(slots, 0))
        return self._shared_length(slots, own) if self._sharing else own

    def choose_own(self, slots: int) -> int:
        self._sharing = False
        return super().choose(slots)

    def foresee(self, gains: Sequence[float]) -> None:
        self._foreseen = list(accumulate(gains, initial=0.0))

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        super().observe(drafted, accepted)
        self._in_row = 0
        slots = len(drafted)
        if slots < LEAST_SHARING:
            return
        drafts = min(max(drafted), self._lengths[-1])  # a tree's count by depth
        self._ways[False].note(1 + sum(accepted) / slots, self._times.between(slots, drafts))

    def observe_shared(self, drafted: list[int], accepted: list[int]) -> None:
        slots = len(drafted)
        if not self._foreseen or slots < LEAST_SHARING:
            return
        drafts, right = sum(drafted) / slots, sum(accepted) / slots
        keep = MEMORY / (MEMORY + 1)
        self._right = keep * self._right + right
        self._expected = keep * self._expected + self._foreseen_of(drafts)
        self._in_row += 1
        if self._in_row > _FIRST:
            self._ways[True].note(1 + right, self._shared_times.between(slots, drafts))

    def _shared_length(self, slots: int, own: int) -> int:
        """Chooses the drafts of slots that share rows, on average."""
        if not self._foreseen:
            return min(self._shared_lengths, key=lambda drafts: abs(drafts - own))
        factor = self._right / self._expected if self._expected else 1.0

        def rate(drafts: int) -> float:
            return (1 + factor * self._foreseen_of(drafts)) / self._shared_times.of(slots, drafts)

        return max(self._shared_lengths, key=rate)

    def _foreseen_of(self, drafts: float) -> float:
        below = min(int(drafts), len(self._foreseen) - 2)
        low, high = self._foreseen[below : below + 2]
        return low + (high - low) * (drafts - below)
