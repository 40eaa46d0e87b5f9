"""A step on its way."""

from dataclasses import dataclass, field

from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.session import Outcome
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

    @property
    def stays(self) -> list[Stay]:
        """The slots of the step, in its outcome's order."""
        return [*self.batch.stays, *(stay for stay, _ in self.pieces)]
