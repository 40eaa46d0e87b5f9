"""A step on its way."""

from dataclasses import dataclass, field
from itertools import compress

from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.draft_length import DraftLength
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.step import Drafting


@dataclass(slots=True)
class Launched:
    """A step that was launched and not yet read: its decoding slots come first."""

    batch: Batch
    pieces: list[tuple[Stay, int]]  # and the tokens of each
    outcome: Outcome
    drafting: Drafting
    number: int  # of steps with decoding slots, up to this one
    reports: bool  # it has log-probabilities
    errors: dict[Stay, DFlashError] = field(default_factory=dict)  # of replies whose grammars cannot be followed
    is_cut: bool = False  # whether it verified but a part of drafts that slots had shared rows for
    copies: list[tuple[int, int]] = field(default_factory=list)  # of states, that it makes first

    def count_drafts(
        self,
        cut: dict[int, int],
        drafted: list[int],
        accepted: list[int],
        statistics: Statistics,
        draft_length: DraftLength,
    ) -> None:
        """Counts the drafts that the step has verified.

        Args:
            cut: tokens by place of the replies that did not get one more than accepted drafts; 0: they do not count.
            drafted, accepted: drafts of each.
        """
        if self.batch.trees:
            statistics.note_ranks(self.outcome.ranks_of(accepted))
        more = accepted  # tokens of each, but one
        if cut or not self.batch.all_draft:
            taken = [cut.get(place, count + 1) for place, count in enumerate(accepted)]
            counted = [new and most for new, most in zip(taken, self.batch.drafted, strict=True)]
            drafted, accepted = (list(compress(of, counted)) for of in (drafted, accepted))
            more = [new - 1 for new in compress(taken, counted)]
        if not accepted:
            return
        statistics.note_drafts(more, drafted, accepted)
        if self.outcome.shared is not None:
            draft_length.observe_shared(drafted, accepted)
        elif not self.is_cut:
            draft_length.observe(drafted, accepted)

    @property
    def drafted(self) -> list[int]:
        """Drafts that the step verifies of each decoding slot."""
        shared = self.outcome.shared
        return self.batch.drafted if shared is None else [rows - 1 for rows in shared]

    @property
    def stays(self) -> list[Stay]:
        """The slots of the step, in its outcome's order."""
        return [*self.batch.stays, *(stay for stay, _ in self.pieces)]
