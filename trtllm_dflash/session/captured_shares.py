"""Captured steps whose slots share rows: what the device keeps of drafts' chances, and what the host reads of them."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import PIECES, StepKind, shared_lengths
from trtllm_dflash.session.outcome import Copy, Outcome
from trtllm_dflash.session.report import Report
from trtllm_dflash.session.shares import BELIEF, GUESS, MEMORY

Tensor = torch.Tensor


class CapturedShares:
    """Divides the rows of captured steps by the chances of their slots' drafts."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        slots, drafts = config.max_batch, config.block_size - 1
        self.kept = kernels.Foretold(
            torch.zeros(slots, drafts, device=device),
            torch.full((slots,), GUESS, device=device).log_(),
            torch.full((drafts,), BELIEF, device=device),
            torch.full((drafts,), BELIEF, device=device),
            MEMORY,
        )
        # Nobody foretold it, and so it teaches nothing: that is what the sign says.
        self._guess = -(GUESS ** torch.arange(1.0, drafts + 1, device=device)).expand(slots, -1).contiguous()
        self.forget()
        self._is_known = True  # whether the last step told the chances of its drafts

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> "CapturedShares | None":
        """Makes it for an engine; None where its slots share no rows."""
        drafts = max(config.max_batch, PIECES) * (config.block_size - 1)
        is_worth_it = config.may_share_rows and bool(shared_lengths(config.block_size))
        if not is_worth_it or drafts > kernels.MOST_SHARED:
            return None
        return cls(config, device)

    def forget(self) -> None:
        """Guesses the chances of all drafts."""
        self.kept.foretold.copy_(self._guess)

    def prepare(self, kind: StepKind) -> None:
        """Prepares for a step of a kind, before it is launched: nobody has told the chances of what others drafted."""
        if kind.shares and not self._is_known:
            self.forget()
        self._is_known = kind.shares

    def divided(self, words: Tensor, kind: StepKind) -> Tensor:
        """Divides a step's rows, written down in `words`, among its decoding slots."""
        if not kind.slots:
            return words
        return kernels.divide_rows(words, self.kept, kind.slots, kind.slots * kind.rows)

    def told(self, decided: Tensor, layout: kernels.Rows, gains: Tensor) -> Tensor:
        """Joins what the host reads: decided [G, 1 + Bd + ranks], segments' rows [G] and the blocks' gains [drafts]."""
        return torch.cat([decided.flatten(), layout.segments[:, 3], gains.view(torch.int32)])


def outcome_of(
    decided: Tensor, kind: StepKind, slots: int, pieces: int, report: Report | None, ranks: int, copy: Copy
) -> Outcome:
    """Makes the outcome of a captured step in which so many slots and pieces took part.

    Args:
        ranks: of each segment's drafts, so many, behind the target's choices.
        copy: to the host.
    """
    if kind.shares:
        return SharedOutcome(decided, kind.segments, slots, pieces, ranks, copy)
    first_rank = 1 + kind.rows if ranks else 0
    return Outcome(decided[: slots + pieces], report, first_rank=first_rank, rank_columns=ranks, copy=copy)


class SharedOutcome(Outcome):
    """The outcome of a step whose slots share its rows.

    Args:
        told: as `CapturedShares.told` joins it.
        segments: G.
        slots, pieces: those that took part.
        ranks: of each segment's drafts that are told; 0: none.
        copy: to the host.
    """

    def __init__(self, told: Tensor, segments: int, slots: int, pieces: int, ranks: int, copy: Copy) -> None:
        # G * (1 + Bd + ranks), G and Bd - 1 numbers.
        self._drafts = (len(told) - segments * (3 + ranks)) // (segments + 1)
        super().__init__(told, first_rank=2 + self._drafts if ranks else 0, rank_columns=ranks, copy=copy)
        self._segments, self._slots, self._pieces = segments, slots, pieces
        self._of_segments = segments * (2 + self._drafts + ranks)

    @property
    def shared(self) -> list[int]:
        self._wait()
        return self._shares_of

    @property
    def gains(self) -> list[float]:
        self._wait()
        return self._gains

    def _parse(self, host: Tensor) -> Tensor:
        segments, of_segments, taking_part = self._segments, self._of_segments, self._slots + self._pieces
        self._shares_of = host[of_segments : of_segments + self._slots].tolist()
        self._gains = host[of_segments + segments :].view(torch.float32).tolist()
        return host[:of_segments].view(segments, -1)[:taking_part]
