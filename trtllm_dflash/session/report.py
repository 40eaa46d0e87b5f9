"""Log-probabilities that a step of flat rows reports, read by segment of the step."""

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from trtllm_dflash.ops.choosing import Logprobs

#: The log-probability of a token, and the most likely tokens with theirs.
Reported: TypeAlias = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True)
class Report:
    """Log-probabilities of a step's rows.

    Args:
        choices: of the tokens chosen, [1, R]; None: not computed.
        first_choices: where each segment's rows begin among those.
        prompts: of tokens of prompts, [1, P]; None: not computed.
        first_prompts: where each segment's rows begin among those.
        starts: the position of the first of those rows of each segment.
    """

    choices: Logprobs[torch.Tensor] | None = None
    first_choices: list[int] = field(default_factory=list)
    prompts: Logprobs[torch.Tensor] | None = None
    first_prompts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def of_choices(self, place: int, count: int, most: int) -> list[Reported]:
        """Reads a segment's first `count` choices, with so many most likely tokens each."""
        assert self.choices is not None
        first = self.first_choices[place]
        return _read(self.choices, first, first + count, most)

    def of_prompt(self, place: int, most: int) -> list[Reported]:
        """Reads all that a segment has of its prompt, with so many most likely tokens each."""
        assert self.prompts is not None
        return _read(self.prompts, self.first_prompts[place], self.first_prompts[place + 1], most)


def _read(logprobs: Logprobs[torch.Tensor], first: int, end: int, most: int) -> list[Reported]:
    chosen = logprobs.chosen[0, first:end].tolist()
    ids, values = logprobs.top_ids[0, first:end, :most].tolist(), logprobs.top[0, first:end, :most].tolist()
    return [(own, list(zip(*top, strict=True))) for own, *top in zip(chosen, ids, values, strict=True)]
