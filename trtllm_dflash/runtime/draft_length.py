"""The number of tokens to draft: a constant, or the one that commits most tokens a second at this load.

A step of B slots and K drafts takes a time that was measured; how many of the drafts survive is watched while serving.
With few slots a long block is nearly free; with many, its rows cost more than they bring.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Annotated, Literal

from trtllm_dflash.cost.acceptance import chain_power
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.runtime.auto import count_or_auto
from trtllm_dflash.runtime.verified import VerifiedDrafts

#: Steps between two tries of the next longer length, without which a drafter that has become good is never noticed.
PROBE_STEPS = 64
#: Steps between two looks at what was observed.
LOOK_STEPS = 16
#: Drafts at a position that are remembered: about so many, the recent ones more.
MEMORY = 400
#: What is believed of a position before it was tried, and the number of tries that this belief is worth.
PRIOR, PRIOR_TRIES = 0.8, 4.0

#: Seconds of a decoding step by slots and drafts a slot.
StepTimes = dict[tuple[int, int], float]


#: Tokens to draft a step, or "auto" for what the load makes best: a field of settings, read from texts too.
DraftLengthChoice = Annotated[int | Literal["auto"], count_or_auto("draft_length", 0)]


def check_draft_length(choice: int | Literal["auto"], block_size: int) -> None:
    """Checks that an engine can draft so many tokens: at most a block less its bonus token.

    Raises:
        SettingsError: it is more.
    """
    if choice != "auto" and choice > block_size - 1:
        raise SettingsError(f"--draft-length {choice}: this engine drafts up to {block_size - 1}")


class DraftLength(ABC):
    """Chooses K, the number of drafts after the bonus token."""

    #: Whether slots may ever share a step's rows, by the chances of their drafts.
    may_share = False

    @property
    def shares(self) -> bool:
        """Whether they share those of the step that was chosen last."""
        return self.may_share

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Every K that may be chosen."""

    @abstractmethod
    def choose(self, slots: int) -> int:
        """Chooses the drafts to make in this step, for the next one to verify, with so many slots decoding."""

    def choose_own(self, slots: int) -> int:
        """Chooses likewise, where slots may not share rows."""
        return self.choose(slots)

    def foresee(self, gains: Sequence[float]) -> None:  # noqa: B027
        """Records what one more draft a slot, on average, is likely to commit, after none, one and so on."""

    def observe_shared(self, drafted: list[int], accepted: list[int]) -> None:  # noqa: B027
        """Records as `observe` does a step whose sequences shared rows: some may have had no drafts."""

    def observe(self, drafted: list[int], accepted: list[int]) -> None:  # noqa: B027
        """Records the drafts of a step's sequences: those that were verified of each, and the accepted ones.

        Nobody may change the lists from now on.
        """


class FixedDraftLength(DraftLength):
    """The same draft length in every step."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._drafts,)

    def choose(self, slots: int) -> int:
        return self._drafts


class PredictedTimes:
    """Seconds of steps of any number of slots, on straight lines between those that were measured.

    Args:
        times: of the same draft lengths at several numbers of slots.

    Attributes:
        lengths: those that were measured, ascending.
        of: predicts a step's time by its slots and its drafts, one of those lengths; each is computed once.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._slots = sorted({slots for slots, _ in times})
        self.lengths = sorted({drafts for _, drafts in times})
        self.of = cache(self._of)

    def measured(self, slots: int) -> int:
        """Finds the next number of slots that was measured; where there is none, it is the number itself."""
        place = bisect_left(self._slots, slots)
        return self._slots[place] if place < len(self._slots) else slots

    def between(self, slots: int, drafts: float) -> float:
        """Predicts the time of the next measured number of slots, and of any number of drafts, on average."""
        slots = self.measured(slots)
        below, above = _around(self.lengths, drafts)
        low, high = self.of(slots, below), self.of(slots, above)
        return low if above == below else low + (high - low) * (drafts - below) / (above - below)

    def _of(self, slots: int, drafts: int) -> float:
        below, above = _around(self._slots, slots)
        low, high = self._times[below, drafts], self._times[above, drafts]
        return low if above == below else low + (high - low) * (slots - below) / (above - below)


def _around(known: list[int], number: float) -> tuple[int, int]:
    """Finds the last of ascending numbers up to one, and the first from it on; outside of them, the nearest twice."""
    above = known[min(bisect_left(known, number), len(known) - 1)]
    place = bisect_right(known, number)
    return known[place - 1] if place else above, above


class AdaptiveDraftLength(DraftLength):
    """The length of most committed tokens a second, by measured step times and the drafts' observed survival.

    Args:
        times: of all lengths that can be chosen, 0 among them, at several numbers of slots.
        tree: nodes of the trees that are drafted where the longest length is chosen; 0: chains.
    """

    def __init__(self, times: StepTimes, tree: int = 0) -> None:
        self._times = PredictedTimes(times)
        # What a tree's drafts teach of a chain's, and the other way round: only one of both is drafted at a time.
        self._power = chain_power(tree) if tree else 1.0
        self._lengths = self._times.lengths
        longest = self._lengths[-1]
        # Counts of drafts whose predecessors were all accepted, by position from 1: tries, and those accepted.
        self._tries = [PRIOR_TRIES] * longest
        self._accepted = [PRIOR * PRIOR_TRIES] * longest
        self._new = VerifiedDrafts(longest)  # since the last look
        self._steps = 0
        self._best: dict[int, int] = {}  # by number of slots, until the next look at what was observed

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def choose(self, slots: int) -> int:
        self._steps += 1
        if self._steps % LOOK_STEPS == 1:
            self._best.clear()
        best = self._best.get(slots)
        if best is None:
            self._look()
            committed = self._committed()
            best = max(self._lengths, key=lambda drafts: committed[drafts] / self._times.of(slots, drafts))
            self._best[slots] = best
        if self._steps % PROBE_STEPS == 0:
            longer = [drafts for drafts in self._lengths if drafts > best]
            return longer[0] if longer else best
        return best

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        self._new.note(drafted, accepted)

    def _look(self) -> None:
        """Adds what was observed since the last look to what is remembered."""
        longest = len(self._tries)
        new, self._new = self._new.counts(), VerifiedDrafts(longest)
        trees = {key: count for key, count in new.items() if key[0] == longest}
        chains = {key: count for key, count in new.items() if key[0] < longest}
        for observed, power in ((trees, self._power), (chains, 1.0)):
            reached = [0] * (longest + 1)  # sequences whose drafts before a position were all accepted
            right = [0] * (longest + 1)  # those whose draft there was, too
            for (drafted, accepted), count in observed.items():
                reached[min(drafted, accepted + 1)] += count
                right[accepted] += count
            tries = hits = 0
            for i in range(longest - 1, -1, -1):
                tries += reached[i + 1]
                hits += right[i + 1]
                if tries:
                    keep = min(1.0, MEMORY / self._tries[i])
                    self._tries[i] = keep * self._tries[i] + tries
                    self._accepted[i] = keep * self._accepted[i] + tries * (hits / tries) ** power

    def _committed(self) -> list[float]:
        """Predicts the tokens of a step by its number of drafts: the bonus token, and the drafts that survive."""
        shares = [a / t for a, t in zip(self._accepted, self._tries, strict=True)]
        committed = list(accumulate(accumulate(shares, mul), initial=1.0))
        committed[-1] = sum(accumulate((share ** (1 / self._power) for share in shares), mul), start=1.0)
        return committed
