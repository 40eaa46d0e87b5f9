"""Rows by survival: the verified rows of a step go to the drafts that are most likely to become tokens, of any slot.

A draft's chance is the product of the drafter's own probabilities down to it, times how much more or less often than
foretold the drafts of its position have survived lately. It falls with the position: the largest chances of all slots
are a beginning of each slot's drafts. Every slot keeps its bonus token's row. All on the device: the host chooses but
the number of rows, and learns one step behind whose they were.
"""

import torch

Tensor = torch.Tensor

#: Drafts at a position that are remembered: about so many, the recent ones more; and what is believed before the first.
MEMORY, BELIEF = 400.0, 4.0
#: The probability of a draft that nobody has told.
GUESS = 0.85


class Shares:
    """Chances of every slot's drafts, and how well they were foretold.

    Args:
        slots: in all.
        drafts: of a block.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self._foretold = torch.zeros(slots, drafts, device=device)  # products of the drafter's probabilities
        self._expected = torch.full((drafts,), BELIEF, device=device)  # sums over drafts that were verified
        self._survived = torch.full((drafts,), BELIEF, device=device)

    def note(self, slots: Tensor, log_probs: Tensor) -> None:
        """Notes the log-probabilities [B, drafts] of the drafts that these slots [B] have now."""
        self._foretold.index_fill_(0, slots, 0)
        self._foretold[:, : log_probs.shape[1]].index_copy_(0, slots, log_probs.cumsum(dim=1).exp())

    def divide(self, slots: Tensor, most: Tensor, total: int) -> Tensor:
        """Divides `total` rows over slots [B] that have up to `most` [B] rows each: rows of each [B], 1 at least.

        Equal chances go to the earlier position, then to the earlier slot.
        """
        chances = self._chances(slots, most).t()  # by position first
        best = chances.flatten().sort(descending=True, stable=True).indices[: max(0, total - len(slots))]
        taken = torch.zeros(chances.numel(), dtype=torch.int32, device=best.device).index_fill_(0, best, 1)
        return 1 + (taken.view(chances.shape) * (chances > 0)).sum(dim=0).int()

    def forget(self) -> None:
        """Guesses the chances of all drafts: those of a step that does not tell them. They teach nothing."""
        self._foretold[:] = -(GUESS ** torch.arange(1.0, self._foretold.shape[1] + 1))

    def gains(self, slots: Tensor, most: Tensor) -> Tensor:
        """Sums the chances of these slots' drafts [drafts]: of a draft a slot on average, then one more, best first."""
        chances = self._chances(slots, most).clamp(min=0).flatten().sort(descending=True).values
        return chances.view(self._foretold.shape[1], len(slots)).sum(dim=1) / max(len(slots), 1)

    def learn(self, slots: Tensor, rows: Tensor, accepted: Tensor) -> None:
        """Learns from a step that verified `rows` [B] of these slots, and accepted so many drafts [B] of each."""
        position = torch.arange(1, self._foretold.shape[1] + 1, device=slots.device)
        foretold = self._foretold[slots]
        verified = ((position < rows[:, None]) & (foretold > 0)).float()  # [B, drafts]
        tries = verified.sum(dim=0)
        keep = (MEMORY / (MEMORY + tries)).clamp(max=1)
        self._expected.mul_(keep).add_((foretold * verified).sum(dim=0))
        self._survived.mul_(keep).add_((verified * (position <= accepted[:, None])).sum(dim=0))

    def _chances(self, slots: Tensor, most: Tensor) -> Tensor:
        """Corrects the chances of these slots' drafts [B, drafts], falling with the position; -1: there is none."""
        corrected = (self._foretold[slots].abs() * (self._survived / self._expected)).clamp(max=1)
        falling = corrected.cummin(dim=1).values
        position = torch.arange(1, falling.shape[1] + 1, device=slots.device)
        return torch.where(position < most[:, None], falling, -1.0)
