"""Penalties, biases and bans: changes of the logits of some flat rows before their tokens are chosen.

They change in this order: repetition, frequency, presence, bias, bans.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

Tensor = torch.Tensor

#: The logit of a banned token: below any other, and still above a token that a grammar rules out.
BANNED = -1e30

#: Stands for "any token" before a short run of tokens, and for "no token" before a reply.
ANY, NONE = -1, -2


@dataclass(frozen=True)
class Penalties(Generic[T]):
    """Penalties of n of a step's logit rows.

    A row's reply is what its slot's reply is up to the token that the row chooses: the drafts before it are part of it.
    W runs of at most L tokens are banned.
    """

    rows: T  # [n] int64, which of the logit rows
    presence: T  # [n] float32
    frequency: T  # [n] float32
    repetition: T  # [n] float32
    counts: T  # [n, V] int32: how often the reply has each token
    in_prompt: T  # [n, V] bool
    bias: T  # [n, V] float32
    banned: T  # [n, V] bool: end tokens, where it is too early for them
    runs: T  # [n, W, L] int32: the last token of each is banned behind its others; `ANY` before short ones
    recent: T  # [n, L - 1] int32: the reply's last tokens; `NONE` before the first one


def penalized(logits: Tensor, penalties: Penalties[Tensor], first: int = 0) -> Tensor:
    """Changes the logits [n, V/tp] of the rows, FP32, which begin at token `first`."""
    here = slice(first, first + logits.shape[1])
    counts = penalties.counts[:, here]
    said = counts > 0
    factor = torch.where(said | penalties.in_prompt[:, here], penalties.repetition[:, None], 1.0)
    x = torch.where(logits > 0, logits / factor, logits * factor)
    x = x - counts * penalties.frequency[:, None] - said * penalties.presence[:, None] + penalties.bias[:, here]
    return x.masked_fill((penalties.banned | _ends_of_runs(penalties))[:, here], BANNED)


def _ends_of_runs(penalties: Penalties[Tensor]) -> Tensor:
    """Marks the tokens [n, V] that would complete a run."""
    begin, last = penalties.runs[:, :, :-1], penalties.runs[:, :, -1].long()
    matches = ((begin == ANY) | (begin == penalties.recent[:, None])).all(dim=2) & (last != ANY)  # [n, W]
    # A place without a run marks token 0 with nothing.
    return torch.zeros_like(penalties.counts).scatter_add(1, last.clamp(min=0), matches.int()) > 0
