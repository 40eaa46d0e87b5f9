"""Anchors: the tokens after which blocks are drafted in training, drawn anew every step.

A block is [anchor, MASK, ..., MASK]; its label k is the token k places after the anchor. Anchors are tokens of replies
whose next token is of the reply, too: random ones (arXiv 2602.06036), for fixed blocks would leave most tokens out.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_dflash.train.documents import Pack

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Anchors:
    """A anchors of a pack, with the labels of their blocks."""

    rows: Tensor  # [A] int64: their places in the pack
    tokens: Tensor  # [A]: their own
    labels: Tensor  # [A, block - 1]: the tokens that follow
    counts: Tensor  # [A, block - 1] bool: whether there is such a token in the same document

    @property
    def before(self) -> Tensor:
        """The token before each label: [A, block - 1]."""
        return torch.cat([self.tokens[:, None], self.labels[:, :-1]], dim=1)


def pick_anchors(pack: Pack, count: int, generator: torch.Generator) -> Tensor:
    """Draws places of anchors in a pack, none twice: [A], A at most `count`; in order. All on the host."""
    places = eligible_rows(pack)
    chosen = torch.randperm(len(places), generator=generator)[:count]
    return places[chosen].sort().values


def eligible_rows(pack: Pack) -> Tensor:
    """Lists the places [N] of a pack where an anchor may stand."""
    follows = pack.document[1:] == pack.document[:-1]
    return (pack.in_reply[:-1] & follows).nonzero()[:, 0]


def anchored(pack: Pack, rows: Tensor, block: int, likeliest: Tensor | None = None) -> Anchors:
    """Adds the labels of blocks of `block` rows to anchors at these places [A].

    Args:
        likeliest: the target's likeliest token after each of the pack, [S]: labels are these, as far as the text
            follows them. None: the text's own.
    """
    at = rows[:, None] + torch.arange(1, block, device=rows.device)
    inside = at.clamp(max=len(pack.token_ids) - 1)
    counts = (at == inside) & (pack.document[inside] == pack.document[rows][:, None])
    text = pack.token_ids[inside]
    if likeliest is None:
        return Anchors(rows, pack.token_ids[rows], text, counts)
    labels = likeliest[inside - 1]
    follows = (labels == text)[:, :-1].int().cumprod(dim=1).bool()
    return Anchors(rows, pack.token_ids[rows], labels, counts & F.pad(follows, (1, 0), value=True))
