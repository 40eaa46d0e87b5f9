"""Prompt tokens that ride in a step: a constant, or as many as keep the running replies' pace.

They are divided among waiting sequences so that a long prompt goes on in every step and nobody waits behind it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from trtllm_dflash.runtime.auto import count_or_auto

#: Fewer tokens of a prompt are not read at a time, unless they are its last or the budget is less than two pieces.
MIN_PIECE = 64


#: Prompt tokens a step, or "auto" for what the replies' pace allows: a field of settings, read from texts too.
PrefillTokensChoice = Annotated[int | Literal["auto"], count_or_auto("prefill_tokens", 1)]

#: Seconds of a step by decoding slots, drafts of each, and prompt tokens.
MixedStepTimes = dict[tuple[int, int, int], float]


class PrefillBudget(ABC):
    """Chooses the prompt tokens of a step."""

    @abstractmethod
    def choose(self, running: int, drafts: int, waiting: int, most: int) -> int:
        """Chooses a number of tokens, `most` at most.

        Args:
            running: slots that decode in the step.
            drafts: that each of them verifies.
            waiting: sequences whose prompts are to be read.
        """


class FixedPrefillBudget(PrefillBudget):
    """The same number in every step that decodes; all that a step takes where none does."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self, running: int, drafts: int, waiting: int, most: int) -> int:
        return min(self._tokens, most) if running else most


class AutoPrefillBudget(PrefillBudget):
    """The most that keep a step within a share of the time that it takes without them, by measured times.

    Where more sequences wait for their first token than run, there is more to lose by waiting: as many as a step takes.

    Args:
        times: of steps with several numbers of slots and drafts; some with several numbers of tokens, 0 among them.
        slack: by which a step may be longer, as a share of its time.
    """

    def __init__(self, times: MixedStepTimes, slack: float) -> None:
        self._slack = slack
        points: dict[tuple[int, int], list[tuple[int, float]]] = {}  # tokens and seconds, ascending
        for (slots, drafts, tokens), seconds in sorted(times.items()):
            points.setdefault((slots, drafts), []).append((tokens, seconds))
        self._times = {kind: measured for kind, measured in points.items() if len(measured) > 1}
        self._found: dict[tuple[int, int], int] = {}

    def choose(self, running: int, drafts: int, waiting: int, most: int) -> int:
        if not running or waiting > running:
            return most
        tokens = self._found.get((running, drafts))
        if tokens is None:
            tokens = self._found[running, drafts] = self._within_slack(running, drafts)
        return min(tokens, most)

    def _within_slack(self, running: int, drafts: int) -> int:
        """Finds the most tokens, between two that were measured on a straight line; one piece's at least."""
        points = self._times[self._nearest(running, drafts)]
        (_, plain), *_ = points
        bound = plain * (1 + self._slack)
        best = 0
        for (tokens, seconds), (more, longer) in pairwise(points):
            if seconds > bound:
                break
            best = more if longer <= bound else tokens + int((more - tokens) * (bound - seconds) / (longer - seconds))
        return max(best, MIN_PIECE)

    def _nearest(self, running: int, drafts: int) -> tuple[int, int]:
        """Finds the least measured step that has all of this one's rows, or else the largest."""
        above = [kind for kind in self._times if kind[0] >= running and kind[1] >= drafts]
        return min(above) if above else max(self._times)


def divide(budget: int, rests: Sequence[int]) -> list[int]:
    """Divides a step's prompt tokens among sequences in their order, by the tokens that each has left to read.

    The first has half of them, or all that others leave; the others come in order of what they have left, the shortest
    first. So a short prompt does not wait for a long one, and a long one is the first in the end. Some get none.
    """
    pieces = [min(rests[0], budget - budget // 2), *(0 for _ in rests[1:])]
    left = budget - pieces[0]
    for i in sorted(range(1, len(rests)), key=lambda i: rests[i]):
        if left < min(rests[i], MIN_PIECE):
            break
        pieces[i] = min(rests[i], left)
        left -= pieces[i]
    pieces[0] += min(rests[0] - pieces[0], left)
    return pieces
