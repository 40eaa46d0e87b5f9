"""The steps that a session takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepLimits:
    """The most that one step takes besides its decoding slots."""

    pieces: int  # of prompts
    prompt_rows: int  # of all pieces together
    mixes: bool  # pieces beside decoding slots, and several together; else a step decodes, or has one piece


def one_piece(chunk: int) -> StepLimits:
    """Limits of a session of [slots, rows], which decodes or reads one piece of so many rows."""
    return StepLimits(pieces=1, prompt_rows=chunk, mixes=False)
