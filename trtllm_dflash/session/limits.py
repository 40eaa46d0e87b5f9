"""The steps that a session takes, and what it takes of one reply."""

from dataclasses import dataclass

#: Runs of tokens that one reply may be kept from, and the tokens of each.
MOST_BAD_RUNS = 64
MOST_BAD_TOKENS = 8


@dataclass(frozen=True)
class StepLimits:
    """The most that one step takes besides its decoding slots."""

    pieces: int  # of prompts
    prompt_rows: int  # of all pieces together
    mixes: bool  # pieces beside decoding slots, and several together; else a step decodes, or has one piece
    shapes: bool = False  # what more may be asked of a choice: log-probabilities, penalties, biases, structure
    shapes_trees: bool = True  # whether trees are drafted, and rows shared, while a slot asks for such; else chains are
    divides: bool = False  # rows of decoding slots, by the chances of their drafts
    checkpoints: int | None = None  # states that can be kept, from which alone rows go on; None: rows need none
