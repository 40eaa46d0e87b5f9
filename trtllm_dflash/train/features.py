"""Features of a frozen target: what the engine that will serve the drafter computes of a text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_dflash.llm import LLM
from trtllm_dflash.models import build_target
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.drafter import ops_over
from trtllm_dflash.train.documents import Document, Pack

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Features:
    """The target's hidden states over a pack."""

    taps: list[Tensor]  # [1, S, H] each: after the tapped layers, in their order
    hidden: Tensor  # [1, S, H] after the last layer, before the final norm


class FrozenTarget:
    """A target in an engine of ours, computed by torch's operations, document after document.

    Args:
        llm: loaded from the target's checkpoint, as long as the longest document.
        taps: the layers whose outputs the drafter reads.
    """

    def __init__(self, llm: LLM, taps: tuple[int, ...]) -> None:
        self._llm = llm
        self._taps = taps
        self._ops = ops_over(llm, TorchOps)
        self._target = build_target(llm.config.target)
        self.device = llm.session.device
        weights = self._ops.weights
        self.embedding = weights["model.embed_tokens.weight"]  # [V, H]
        head = linear_weight(weights, "lm_head")
        whole = head if isinstance(head, Tensor) else head.dequantize()
        self.head: Tensor = (whole.to_dense() if whole.is_mkldnn else whole).to(self.embedding.dtype)  # [V, H]

    @torch.no_grad()
    def features(self, pack: Pack) -> Features:
        """Computes the features of a pack's tokens."""
        passes = [self._pass(document) for document in pack.documents]
        taps = [torch.cat(parts, dim=1) for parts in zip(*(taps for taps, _ in passes), strict=True)]
        return Features(taps, torch.cat([hidden for _, hidden in passes], dim=1))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [..., V] of hidden [..., H], which the final norm has not seen yet."""
        rows = self._target.logits(self._ops, hidden.reshape(1, -1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def drafted_logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [..., V] of the drafter's rows [..., H], which its last norm has seen."""
        return F.linear(hidden.to(self.head.dtype), self.head)

    def _pass(self, document: Document) -> tuple[list[Tensor], Tensor]:
        ids = torch.tensor([list(document.token_ids)], dtype=torch.int32, device=self.device)
        start = torch.zeros(1, dtype=torch.int32, device=self.device)
        features = self._target.forward(self._ops, ids, start, self._taps)
        return features.taps, features.hidden
