"""Masks of the tokens that rows may choose, and log-probabilities of those that they chose."""

from dataclasses import dataclass
from typing import Generic, TypeVar

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
