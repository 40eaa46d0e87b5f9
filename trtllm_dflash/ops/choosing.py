"""Masks of the tokens that rows may choose, the likeliest of them, and log-probabilities of those that they chose."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

#: Most likely tokens whose log-probabilities are reported with a token's own; all, of a smaller vocabulary.
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Logprobs(Generic[T]):
    """Log-probabilities at each row, of the distribution that the model itself gives; n: `MOST_LOGPROBS`."""

    chosen: T  # [B, R] float32, of the row's token
    top_ids: T  # [B, R, n] int32, the most likely first
    top: T  # [B, R, n] float32


@dataclass(frozen=True)
class TokenMask(Generic[T]):
    """The tokens that some of a step's flat logit rows may choose: a bit for each, the lowest first."""

    rows: T  # [n] int64, which of the logit rows
    words: T  # [n, ceil(V / 32)] int32


def largest_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Finds the ids of each row's largest logits [..., V] FP32, the lowest among equals first: [..., count]."""
    bits = logits.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    vocabulary = logits.shape[-1]
    last_first = torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) + last_first  # no two are equal
    return vocabulary - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
