"""Penalties, biases and bans: changes of the logits of some flat rows before their tokens are chosen.

They change in this order: repetition, frequency, presence, bias, bans.
"""

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch

from trtllm_dflash.kernels import KeptPenalties, RowMasks

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


@dataclass(frozen=True)
class KeptShapes:
    """Penalties that slots keep, and masks of a step's logit rows, as captured steps read them."""

    penalties: KeptPenalties
    masks: RowMasks

    def of_slots(self, count: int) -> "KeptShapes":
        """Takes those of the first slots."""
        kept = {part.name: getattr(self.penalties, part.name)[:count] for part in fields(KeptPenalties)}
        return KeptShapes(KeptPenalties(**kept), self.masks)


def shaped(logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor, first: int = 0) -> Tensor:
    """Penalizes and masks the logits [B, R, V/tp] of decoding slots, which begin at token `first`; returns FP32.

    Args:
        shapes: of these B slots.
        token_ids: [B, R] of the rows: each row's reply goes on with those up to its own.
        start: [B] positions of the first rows.
    """
    kept, out = shapes.penalties, logits.float().clone()
    counts, recent = kept.counts.clone(), kept.recent
    is_penalized = (kept.penalized != 0)[:, None]
    for row, ids in enumerate(token_ids.split(1, dim=1)):
        counts = counts.scatter_add(1, ids.long(), torch.ones_like(ids))
        recent = torch.cat([recent[:, 1:], ids], dim=1)
        penalties = Penalties(
            rows=start,  # none of these are picked
            presence=kept.presence,
            frequency=kept.frequency,
            repetition=kept.repetition,
            counts=counts,
            in_prompt=kept.in_prompt,
            bias=kept.bias,
            banned=kept.ends & (start + row + 1 < kept.ends_from)[:, None],
            runs=kept.runs,
            recent=recent,
        )
        out[:, row] = torch.where(is_penalized, penalized(out[:, row], penalties, first), out[:, row])
    return _masked(out, shapes.masks, first)


def keep_replies(kept: KeptPenalties, token_ids: Tensor, accepted: Tensor, row_count: Tensor) -> None:
    """Adds the rows that a step has made final to the replies of decoding slots with penalties.

    Args:
        kept: of the B slots.
        token_ids: [B, R] of the rows.
        accepted: [B] drafts of these.
        row_count: [B] rows that are real; 0: the slot takes no part.
    """
    said = torch.where((row_count > 0) & (kept.penalized != 0), accepted + 1, 0)[:, None]
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    kept.counts.scatter_add_(1, token_ids.long(), (places < said).int())
    every = torch.cat([kept.recent, token_ids], dim=1)
    last = torch.arange(kept.recent.shape[1], device=token_ids.device) + said
    kept.recent.copy_(every.gather(1, last))


def _masked(logits: Tensor, masks: RowMasks, first: int) -> Tensor:
    """Rules out what the rows' masks have not, of logits [B, R, V/tp] FP32."""
    rows = masks.rows[: logits.shape[0] * logits.shape[1]]
    words = masks.words[rows.clamp(min=0)]  # [B * R, W]
    bits = words[..., None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    allowed = bits.flatten(1)[:, first : first + logits.shape[2]].bool() | (rows < 0)[:, None]
    return logits.masked_fill(~allowed.view_as(logits), -torch.inf)


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
