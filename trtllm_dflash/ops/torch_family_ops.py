"""Operations that some families alone need, computed by torch: norms of MiniMax, GELU of Gemma, latent attention."""

from abc import ABC
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from trtllm_dflash.ops.activations import gelu, tanh
from trtllm_dflash.ops.base import AttentionLayer, LatentLayer, Ops
from trtllm_dflash.ops.cpu_norm import normed
from trtllm_dflash.ops.latent_attention import MOST_ABSORBED, absorb, by_head, expand, value_up

Tensor = torch.Tensor


class TorchFamilyOps(Ops[Tensor], ABC):
    """The part of `TorchOps` that some families alone need.

    Attributes:
        weights: as in `TorchOps`.
    """

    weights: Mapping[str, Tensor]

    def norm_projections(self, layer: AttentionLayer, qkv: Tensor, eps: float) -> Tensor:
        sizes = [heads * layer.head_size for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
        *normed, v = qkv.split(sizes, dim=-1)
        squares = torch.cat([x.float().square().sum(dim=-1, keepdim=True) for x in normed], dim=-1)
        sums = self.all_reduce(squares).split(1, dim=-1)
        for i, (which, x) in enumerate(zip("qk", normed, strict=True)):
            # Keys that several ranks hold are counted as often as they are held, in the sum as in the number.
            root = (sums[i] / (self.tp * sizes[i])).add_(eps).rsqrt_()
            weight = self.weights[f"{layer.prefix}self_attn.{which}_norm.weight"]
            normed[i] = (x.float() * root).to(x.dtype) * weight
        return torch.cat([*normed, v], dim=-1)

    def unit_norm(self, x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) if x.is_cuda else normed(x, eps)

    def scaled_embedding(self, name: str, ids: Tensor, factor: float) -> Tensor:
        x = self.embedding(name, ids)
        return x * torch.tensor(factor, dtype=x.dtype)  # on the CPU: CUDA takes it as a number

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def multiply(self, name: str, x: Tensor) -> Tensor:
        return x * self.weights[name]

    def geglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate) * up

    def cap(self, logits: Tensor, cap: float) -> Tensor:
        return (tanh(logits.float() / cap) * cap).to(logits.dtype)

    def latent_attention(self, layer: LatentLayer, q: Tensor, kv: Tensor, start: Tensor) -> Tensor:
        plain, rotated, rows = self._latent_rows(layer, q, kv, self.positions(start, q))
        cache, lengths = self.append_kv(layer.prefix + "latent", rows, start), self.key_lengths(start, q)
        up = self.weights[layer.prefix + "self_attn.latent_up"]
        if q.shape[1] > MOST_ABSORBED:
            used = cache if cache.is_cuda else cache[:, :, : int(lengths.max())]
            keys, values = expand(layer, up, used)
            queries = torch.cat([plain, rotated], dim=-1)
            return self.attention(queries, keys, values, lengths, True, scale=layer.scale)
        out = self.attention(
            absorb(layer, up, plain, rotated), cache, cache[..., : layer.rank], lengths, True, scale=layer.scale
        )
        return self._risen(layer, out)

    def _latent_rows(
        self, layer: LatentLayer, q: Tensor, kv: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits queries into plain and rotated parts, [B, heads, N, ...], and makes cache rows [B, 1, N, D] of kv."""
        heads = self.split_heads(q, 0, layer.heads, layer.plain_size + layer.rotary_size)
        plain, rotary = heads.split([layer.plain_size, layer.rotary_size], dim=-1)
        latent, key = kv[:, None].split([layer.rank, layer.rotary_size], dim=-1)
        latent = self.rms_norm(layer.prefix + "self_attn.kv_a_layernorm", latent, layer.norm_eps)
        rows = torch.cat([latent, self.rope(layer.rope, key, positions)], dim=-1)
        return plain, self.rope(layer.rope, rotary, positions), rows

    def _risen(self, layer: LatentLayer, out: Tensor) -> Tensor:
        """Makes each head's values [B, N, heads * value size] of what it saw of the rows, [B, N, heads * rank]."""
        up = self.weights[layer.prefix + "self_attn.latent_up"]
        by_heads = self.split_heads(out, 0, layer.heads, layer.rank)
        return by_head(by_heads, value_up(layer, up)).transpose(1, 2).flatten(2)
