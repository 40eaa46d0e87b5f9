"""The rows that the slots of a step share: as many as commit most tokens a second, by the chances of their drafts.

How many rows there are the host chooses here; whose they are, the device does (see `session.shares`), by what each
draft is likely to commit. It tells the host what so many more rows would commit; what they did commit corrects that.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.runtime.draft_length import MEMORY, AdaptiveDraftLength, StepTimes


class SharedRows(AdaptiveDraftLength):
    """The draft length, on average over a step's slots, of most committed tokens a second.

    Shorter blocks than the longest share their rows. What is told of them is used while they do; until then the
    observed survival of drafts is, as where nothing is shared.

    Args:
        times: as `AdaptiveDraftLength`'s, of steps that share their rows; of the longest length, of those that do not.
        tree: likewise.
    """

    shares = True

    def __init__(self, times: StepTimes, tree: int = 0) -> None:
        super().__init__(times, tree)
        self._tree = tree
        self._foreseen: list[
            float
        ] = []  # drafts that a slot commits, by its drafts; none: the last step shared no rows
        # Sums over steps of what was accepted and of what was foreseen, the recent ones more.
        self._right = self._expected = 0.0

    def foresee(self, gains: Sequence[float]) -> None:
        self._foreseen = list(accumulate(gains, initial=0.0))

    def observe_shared(self, drafts: float, accepted: float) -> None:
        if not self._foreseen:
            return
        below = min(int(drafts), len(self._foreseen) - 2)
        low, high = self._foreseen[below : below + 2]
        keep = MEMORY / (MEMORY + 1)
        self._right = keep * self._right + accepted
        self._expected = keep * self._expected + low + (high - low) * (drafts - below)

    def observe(self, verified: Mapping[tuple[int, int], int]) -> None:
        self._foreseen = []
        super().observe(verified)

    def _committed(self) -> list[float]:
        committed = super()._committed()
        if not self._foreseen:
            return committed
        factor = self._right / self._expected if self._expected else 1.0
        longest = len(committed) - 1
        committed = [min(1 + factor * drafts, 1.0 + i) for i, drafts in enumerate(self._foreseen)]
        if self._tree:
            tokens = ImposedAcceptance(committed[longest], longest + 1).of_tree(self._tree)
            committed[longest] = committed[longest] if tokens is None else tokens
        return committed
