"""Features of a frozen target: what the engine that will serve the drafter computes of a text.

Documents go through the target a pack at a time, each under its own mask; the numbers are those of serving but for the
order of sums.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dflash.llm import LLM
from trtllm_dflash.models import build_target
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.fp8 import FP8, dequantize_cache_rows, quantize_cache_rows
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.drafter import ops_over
from trtllm_dflash.train.delta import DocumentChunks, gated_delta_over_documents
from trtllm_dflash.train.documents import Pack
from trtllm_dflash.train.loss import CHUNK_BYTES
from trtllm_dflash.train.mask import MASKED, Masked

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Features:
    """The target's hidden states over a pack."""

    taps: list[Tensor]  # [1, S, H] each: after the tapped layers, in their order
    hidden: Tensor  # [1, S, H] after the last layer, before the final norm


class PackOps(TorchOps):
    """Computes a target's pass over a pack [1, S, H], without caches.

    Attributes:
        pack, attend: set before the pass.
    """

    pack: Pack
    attend: Masked

    def positions(self, start: Tensor, rows: Tensor) -> Tensor:
        return self.pack.position[None]

    def append_kv(self, name: str, rows: Tensor, start: Tensor) -> Tensor:
        if self.caches[name].dtype != FP8:
            return rows
        scale = self.weights[name + ".scale"]  # what a cache in FP8 would give back
        return dequantize_cache_rows(quantize_cache_rows(rows, scale), scale, rows.dtype)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        causal: bool,
        window: int | None = None,
        sinks: str | None = None,
        scale: float | None = None,
    ) -> Tensor:
        plain = sinks is None and scale is None
        make = self.attend if plain else MASKED
        attend: Any = self._once((window, plain), self.pack.position, lambda: make.causal(self.pack, window))
        more = () if plain else (scale, None if sinks is None else self.weights[sinks])
        out: Tensor = attend(q, keys, values, *more)
        return out.transpose(1, 2).flatten(2)

    def gated_delta(self, layer: DeltaLayer, x: Tensor, gates: Tensor, start: Tensor) -> Tensor:
        chunks = self._once(("chunks", layer.kernel), self.pack.position, lambda: self._chunks(layer.kernel - 1))
        return gated_delta_over_documents(layer, self.weights, chunks, x, gates)

    def _chunks(self, before: int) -> DocumentChunks:
        lengths = [len(document.token_ids) for document in self.pack.documents]
        return DocumentChunks(lengths, before, self.pack.position.device)


class FrozenTarget:
    """A target in an engine of ours, computed by torch's operations.

    Args:
        llm: loaded from the target's checkpoint.
        taps: the layers whose outputs the drafter reads.
    """

    def __init__(self, llm: LLM, taps: tuple[int, ...]) -> None:
        self._llm = llm
        self._taps = taps
        self._ops = ops_over(llm, PackOps)
        self._target = build_target(llm.config.target)
        self.device = llm.session.device
        weights = self._ops.weights
        self.embedding = weights["model.embed_tokens.weight"]  # [V, H]
        head = linear_weight(weights, "lm_head")
        whole = head if isinstance(head, Tensor) else head.dequantize()
        self.head: Tensor = (whole.to_dense() if whole.is_mkldnn else whole).to(self.embedding.dtype)  # [V, H]

    @torch.no_grad()
    def features(self, pack: Pack, attention: Masked = MASKED) -> Features:
        """Computes the features of a pack's tokens.

        Args:
            attention: makes that of the pack.
        """
        self._ops.pack, self._ops.attend = pack, attention
        start = torch.zeros(1, dtype=torch.int32, device=self.device)
        features = self._target.forward(self._ops, pack.token_ids[None].int(), start, self._taps)
        return Features(features.taps, features.hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [..., V] of hidden [..., H], which the final norm has not seen yet."""
        rows = self._target.logits(self._ops, hidden.reshape(1, -1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def likeliest(self, hidden: Tensor) -> Tensor:
        """Finds the likeliest next token [S] after rows [S, H], a part of them at a time."""
        size = max(1, CHUNK_BYTES // (4 * len(self.head)))
        return torch.cat([self.logits(part).argmax(dim=-1) for part in hidden.split(size)])
