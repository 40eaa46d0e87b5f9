"""The loss of drafted blocks: cross entropy or distillation of each row, and the weight of its position.

The LM head and what follows it take the rows in chunks, each computed again in the backward pass: the logits of all
rows at once, a vocabulary each, would be larger than the drafter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trtllm_dflash.train.anchors import Anchors
from trtllm_dflash.train.head import Head

Tensor = torch.Tensor

#: Most bytes of a chunk's logits in FP32; of the target's, too.
CHUNK_BYTES = 1 << 30

#: D-PACE's smoothing a (arXiv 2605.18810): any of 0.3 to 0.7 is said to do.
SMOOTHING = 0.5

#: Gamma of exponential weights by block size, as published with DFlash.
_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}

#: Computes the target's logits [a, block - 1, V] at the labels of a range of anchors.
Teacher = Callable[[slice], Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of a pack, and what it says of the drafter."""

    value: Tensor  # [] weighted mean over rows
    accepted: Tensor  # [] mean number of leading drafts that equal their labels


def dpace_weights(ce: Tensor, counts: Tensor) -> Tensor:
    """Weighs each row by what it adds to the expected acceptance, as D-PACE does: [A, K].

    q_i = exp(-CE_i); s_i = (1 - a) q_i + a; w_j = sum over m >= j of s_1 ... s_m. Rows that do not count add nothing.

    Args:
        ce: of the label of each row, [A, K].
        counts: [A, K] bool; no row that counts follows one that does not.
    """
    survival = ((1 - SMOOTHING) * torch.exp(-ce) + SMOOTHING).cumprod(dim=1) * counts
    return survival.flip(1).cumsum(dim=1).flip(1) * counts


def exponential_weights(block: int, counts: Tensor) -> Tensor:
    """Weighs row k of a block by exp(-(k - 1) / gamma), gamma by the block's size: [A, block - 1]."""
    gamma = _GAMMAS.get(block, 7.0 * block / 16)
    return torch.exp(-torch.arange(block - 1, device=counts.device) / gamma) * counts


def block_loss(
    hidden: Tensor,
    head: Head,
    anchors: Anchors,
    weighting: Literal["dpace", "exponential"],
    teacher: Teacher | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Loss:
    """Computes the loss of blocks.

    Args:
        hidden: the drafter's rows, as its head takes them, [A, block - 1, ...].
        head: the LM head, and what the drafter adds to it.
        teacher: None takes the tokens of the text as labels, else the target's whole distribution is distilled.
        chunk_bytes: most bytes of a chunk's logits.
    """
    count, rows, _ = hidden.shape
    size = max(1, chunk_bytes // (4 * rows * len(head.weight)))
    parts, before = [], anchors.before
    for first in range(0, count, size):
        part = slice(first, min(count, first + size))
        labels = before[part], anchors.labels[part]
        arguments = hidden[part], head, *labels, None if teacher is None else (lambda p=part: teacher(p))
        parts.append(
            _row_losses(*arguments) if size >= count else checkpoint(_row_losses, *arguments, use_reentrant=False)
        )
    each, ce, right = (torch.cat(columns) for columns in zip(*parts, strict=True))
    block = rows + 1
    weight = (
        dpace_weights(ce.detach(), anchors.counts)
        if weighting == "dpace"
        else exponential_weights(block, anchors.counts)
    )
    leading = (right & anchors.counts).long().cumprod(dim=1).sum(dim=1)
    return Loss((each * weight).sum() / weight.sum(), leading.float().mean())


def _row_losses(
    hidden: Tensor, head: Head, before: Tensor, labels: Tensor, teacher: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes each row's loss, its label's cross entropy, and whether the label is likeliest: [a, K] each."""
    logits = head.logits(hidden, before)
    log_probs = logits.log_softmax(dim=-1)
    ce = -log_probs.gather(-1, labels[..., None])[..., 0]
    right = logits.argmax(dim=-1) == labels
    if teacher is None:
        return ce, ce, right
    with torch.no_grad():
        wanted = teacher().float().log_softmax(dim=-1)
    divergence = F.kl_div(log_probs, wanted, reduction="none", log_target=True).sum(dim=-1)
    return divergence, ce, right
