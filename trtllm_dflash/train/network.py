"""The drafter in training: the model of `models/drafter.py`, over operations that torch differentiates.

What is trained is what is served, by construction: parameters have the checkpoint's names and are fused, in each pass,
into the engine's tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_dflash.models.dflash2 import PREDECESSOR, SUCCESSOR
from trtllm_dflash.models.drafter import PREFIX, Drafter, DrafterConfig
from trtllm_dflash.models.rope_tables import rope_tables
from trtllm_dflash.ops.base import AttentionLayer, Context, Ops
from trtllm_dflash.ops.drafting import Candidates, Gate
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.train.documents import Pack, moved
from trtllm_dflash.train.head import Head, Selector
from trtllm_dflash.train.mask import MASKED, Attention, Masked

Tensor = torch.Tensor


class BlockOps(TorchOps):
    """Computes a drafter's context rows over a pack [1, S, H], and its blocks [A, block, H], without caches.

    The LM head is the loss's, which takes rows in chunks: `linear` of it, and `argmax`, hand the rows on as they are,
    and `rerank` puts the factors of its choice behind them.

    Args:
        weights: as in `TorchOps`.
        positions: of the pack's tokens in their documents, [1, S].
        attention: of the blocks; None: nothing is drafted.
    """

    def __init__(self, weights: Mapping[str, Tensor], positions: Tensor, attention: Attention | None = None) -> None:
        super().__init__(weights, {})
        self._positions = positions
        self._attention = attention

    def linear(self, name: str, x: Tensor) -> Tensor:
        if name == "lm_head":
            return x
        weight = self.weights[name + ".weight"]
        return F.linear(x.to(weight.dtype), weight, self.weights.get(name + ".bias"))

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return super().embedding(name, ids).float()  # the residual stream is FP32

    def scaled_embedding(self, name: str, ids: Tensor, factor: float) -> Tensor:
        x = super().embedding(name, ids)
        return (x * torch.tensor(factor, dtype=x.dtype)).float()  # rounded as the target rounds it

    def argmax(self, logits: Tensor) -> Tensor:
        return logits

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def top_candidates(
        self, logits: Tensor, count: int, multiplier: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        return logits, logits  # rows, as `linear` and `argmax` hand them on: all tokens are candidates

    def rerank(
        self,
        candidates: Candidates[Tensor],
        predecessor: str,
        successor: str,
        gate: Gate[Tensor] | None,
        first: Tensor,
    ) -> Tensor:
        assert gate is not None
        return torch.cat([candidates.logits, gate.rows.to(candidates.logits.dtype)], dim=-1)

    def _split_qkv(self, layer: AttentionLayer, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Ops._split_qkv(self, layer, qkv, positions)  # TorchOps' own writes in place

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        k = self.split_heads(kv, 2 * index * layer.kv_heads, layer.kv_heads, layer.head_size)
        v = self.split_heads(kv, (2 * index + 1) * layer.kv_heads, layer.kv_heads, layer.head_size)
        return Context((self.rope(layer.rope, self._norm_heads(layer, "k", k), self._positions), v), index)

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        assert self._attention is not None
        parts = self._split_qkv(layer, qkv, self.positions(self.block_start(start, committed), qkv))
        # [A, heads, block, D] -> [1, heads, A * block, D]
        q, k, v = (part.transpose(0, 1).flatten(1, 2)[None] for part in parts)
        context_k, context_v = (rows.to(q.dtype) for rows in context.tensors)
        out = self._attention(q, torch.cat([context_k, k], dim=2), torch.cat([context_v, v.to(q.dtype)], dim=2))
        rows: Tensor = out[0].unflatten(1, qkv.shape[:2])  # [heads, A, block, D]
        return rows.permute(1, 2, 0, 3).flatten(2)


@dataclass(frozen=True, eq=False)
class PackContext:
    """The context rows of a pack, and the tensors that they were computed with."""

    pack: Pack
    weights: Mapping[str, Tensor]
    rows: list[Context[Tensor]]  # of each layer


class TrainedDrafter(nn.Module):
    """A drafter's parameters in FP32, by their names in a checkpoint.

    Args:
        config: its shape.
        embedding: the target's, [V, H]; not trained.
        positions: most tokens of a document.
        seed: of the initial weights.
    """

    def __init__(self, config: DrafterConfig, embedding: Tensor, positions: int, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self._drafter = Drafter(config)
        self._embedding = embedding
        tables = rope_tables(config.rope, config.head_size, positions + config.block_size)
        self._rope = [table.to(embedding.device) for table in tables]
        generator = torch.Generator().manual_seed(seed)
        for key, shape in self.shapes().items():
            values = _initial(key, shape, config, generator)
            self.register_parameter(_parameter_name(key), nn.Parameter(values.to(embedding.device)))

    @property
    def device(self) -> torch.device:
        """The device that its weights lie on."""
        return self._embedding.device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Lists the checkpoint's tensors with their shapes."""
        return {part.key: part.shape for weight in self._drafter.weights() for part in weight.parts}

    def tensors(self) -> dict[str, nn.Parameter]:
        """Lists the parameters by their names in a checkpoint."""
        return {key: self.get_parameter(_parameter_name(key)) for key in self.shapes()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a checkpoint's tensors."""
        with torch.no_grad():
            for key, parameter in self.tensors().items():
                parameter.copy_(tensors[key])

    def head(self, weight: Tensor) -> Head:
        """Joins the target's LM head [V, H] and the drafter's selector, if it has one."""
        selector = self.config.selector
        if selector is None:
            return Head(weight)
        weights = {weight.name: weight.parts[0].key for weight in self._drafter.weights()}
        tables = [self.tensors()[weights[PREFIX + name]] for name in (PREDECESSOR, SUCCESSOR)]
        return Head(weight, Selector(selector, *tables))

    def context(self, pack: Pack, taps: list[Tensor]) -> PackContext:
        """Computes a pack's context rows from its taps [1, S, H]."""
        weights = self._engine_tensors()
        ops = BlockOps(weights, pack.position[None])
        start = torch.zeros(1, dtype=torch.int32, device=pack.position.device)
        return PackContext(pack, weights, self._drafter.context(ops, ops.concat(taps), start))

    def draft(self, context: PackContext, rows: Tensor, attention: Masked = MASKED) -> Tensor:
        """Computes the rows [A, block - 1, ...], ready for the head, of blocks after anchors.

        Args:
            rows: the anchors' places [A], in order, on the host.
            attention: makes that of the blocks.
        """
        pack, size = context.pack, self.config.block_size
        ops = BlockOps(context.weights, pack.position[None], attention.blocks(pack, rows, size))
        at = moved(rows, self.device)
        offsets = torch.arange(size, device=self.device)[None]
        start = pack.position[at]
        return self._drafter.draft(ops, context.rows, start, torch.zeros_like(start), pack.token_ids[at], offsets)

    def forward(self, pack: Pack, taps: list[Tensor], rows: Tensor, attention: Masked = MASKED) -> Tensor:
        """Computes `draft` with the pack's own context."""
        return self.draft(self.context(pack, taps), rows, attention)

    def _engine_tensors(self) -> dict[str, Tensor]:
        mine: dict[str, Tensor] = dict(self.tensors())
        fused = {w.name: torch.cat([mine[part.key] for part in w.parts]) for w in self._drafter.weights()}
        cos, sin = self._rope
        return {
            **fused,
            "model.embed_tokens.weight": self._embedding,
            PREFIX + "rope.cos": cos,
            PREFIX + "rope.sin": sin,
        }


def _parameter_name(key: str) -> str:
    return key.replace(".", "/")  # torch takes no dots


def _initial(key: str, shape: tuple[int, ...], config: DrafterConfig, generator: torch.Generator) -> Tensor:
    """Draws a matrix; norms are ones, biases zeros. What writes to the residual stream starts smaller, by the depth."""
    if key.endswith("base_kernel"):  # a row by itself, and nothing of those before it
        kernel = torch.zeros(shape)
        kernel[:, 0] = 1
        return kernel
    if key.endswith(("kernel_projection.weight", "successor_codebook")):
        return torch.zeros(shape)  # what is DFlash 2's own begins as nothing
    if len(shape) == 1:
        return torch.zeros(shape) if key.endswith(".bias") else torch.ones(shape)
    deviation = shape[1] ** -0.5
    if key.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * config.layers) ** 0.5
    values: Tensor = torch.randn(shape, generator=generator) * deviation
    return values
