"""The head in training: logits of a drafter's rows, by the target's LM head, and DFlash 2's bias by the token before.

A drafter of DFlash 2 chooses each draft among its row's likeliest tokens by the draft before it. In training the bias
is for the whole vocabulary, and the token before a label is the label before it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_dflash.models.dflash2 import SelectorConfig
from trtllm_dflash.ops.drafting import Candidates, Gate
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Selector:
    """The tables of DFlash 2's choice along a chain of drafts."""

    config: SelectorConfig
    predecessor: Tensor  # [V, r]
    successor: Tensor  # [V, r]

    def bias(self, before: Tensor, gate: Tensor) -> Tensor:
        """Computes what is added to logits [..., V] behind the tokens before [...], by factors [..., r]."""
        return F.linear(F.embedding(before, self.predecessor) * gate, self.successor)

    def scaled(self, logits: Tensor) -> Tensor:
        """Multiplies and bounds logits as the configuration says, in FP32."""
        scaled = logits.float() * self.config.multiplier
        cap = self.config.softcap
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    def choose(self, logits: Tensor, gate: Tensor, first: Tensor) -> Tensor:
        """Chooses a chain [A, K] after the tokens first [A], as it is served.

        Args:
            logits: [A, K, V].
            gate: [A, K, r].
        """
        ops = TorchOps({"predecessor": self.predecessor, "successor": self.successor}, {})
        ids, scores = ops.top_candidates(logits, self.config.candidates, self.config.multiplier, self.config.softcap)
        return ops.rerank(Candidates(ids, ids, scores), "predecessor", "successor", Gate(gate), first)


@dataclass(frozen=True, eq=False)
class Head:
    """An LM head [V, H], and a drafter's selector where it has one: rows then are [..., H + r], factors behind."""

    weight: Tensor
    selector: Selector | None = None

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Splits rows into what the LM head takes [..., H], and the factors of the choice [..., r or 0]."""
        size = self.weight.shape[1]
        return rows[..., :size], rows[..., size:]

    def plain_logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [..., V] of hidden [..., H], of the row alone."""
        return F.linear(hidden.to(self.weight.dtype), self.weight)

    def logits(self, rows: Tensor, before: Tensor) -> Tensor:
        """Computes logits in FP32, [..., V].

        Args:
            rows: as the drafter makes them.
            before: the tokens before the labels, [...].
        """
        hidden, gate = self.parts(rows)
        logits = self.plain_logits(hidden)
        if self.selector is None:
            return logits.float()
        return self.selector.scaled(logits) + self.selector.bias(before, gate).float()
