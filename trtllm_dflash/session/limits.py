"""The steps that a session takes, and the pages of its caches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepLimits:
    """The most that one step takes besides its decoding slots."""

    pieces: int  # of prompts
    prompt_rows: int  # of all pieces together
    mixes: bool  # pieces beside decoding slots, and several together; else a step decodes, or has one piece


@dataclass(frozen=True)
class Paging:
    """The pages of a session's caches; a page has the same number in every layer, the drafter's too."""

    pages: int
    rows: int  # of a page
    width: int  # pages of a slot, at most

    @property
    def linear(self) -> bool:
        """Whether each slot has one page of its own, of its number."""
        return self.width == 1
