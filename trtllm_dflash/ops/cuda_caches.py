"""`TorchOps` on a GPU whose layers' K/V caches our kernels read and append to, wherever rows and caches lie."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer, Context
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor


class CudaCaches(TorchOps):
    """The caches of layers, and rows on their way into them."""

    def _caches(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return self.caches[layer.prefix + "key"], self.caches[layer.prefix + "value"]

    def _scales(self, layer: AttentionLayer) -> kernels.Scales:
        """Scales of a layer's FP8 caches; None where the caches have the rows' type."""
        if self.caches[layer.prefix + "key"].dtype != FP8:
            return None
        return self.weights[layer.prefix + "key.scale"], self.weights[layer.prefix + "value.scale"]

    def _window_and_sinks(self, layer: AttentionLayer) -> tuple[int, Tensor | None]:
        """A layer's window, 0 where it has none, and its sinks, as the kernels of attention take them."""
        return layer.window or 0, None if layer.sinks is None else self.weights[layer.sinks]

    def _append_of(self, layer: AttentionLayer) -> kernels.Append:
        """Makes the kernels' append of a layer's rows."""
        cos, sin, scales = self.weights[layer.rope + ".cos"], self.weights[layer.rope + ".sin"], self._scales(layer)
        of_values = layer.keys_as_values, layer.norms_values
        if layer.norm_eps is None:
            return kernels.Append(cos, sin, None, None, 0.0, scales, *of_values)
        q_norm, k_norm = (self.weights[f"{layer.prefix}self_attn.{name}_norm.weight"] for name in ("q", "k"))
        return kernels.Append(cos, sin, q_norm, k_norm, layer.norm_eps, scales, *of_values)

    def norm_projections(self, layer: AttentionLayer, qkv: Tensor, eps: float) -> Tensor:
        if self.tp > 1 or not kernels.takes_norm(qkv):
            return super().norm_projections(layer, qkv, eps)
        queries, keys = layer.heads * layer.head_size, layer.kv_heads * layer.head_size
        *normed, values = qkv.split([queries, keys, keys], dim=-1)
        weights = (self.weights[f"{layer.prefix}self_attn.{which}_norm.weight"] for which in "qk")
        parts = [kernels.rms_norm(x, weight, eps) for x, weight in zip(normed, weights, strict=True)]
        return torch.cat([*parts, values], dim=-1)

    @staticmethod
    def _without_gates(layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """Takes a layer's queries, keys and values out of what it projected: a gated layer's gates follow them."""
        kinds = 1 if layer.keys_as_values else 2
        return qkv[..., : (layer.heads + kinds * layer.kv_heads) * layer.head_size]

    def _projected(self, layer: AttentionLayer, kv: Tensor, index: int) -> Context[Tensor]:
        """Takes a layer's context rows as projected: they are normed and rotated on their way into the cache."""
        size = layer.kv_heads * layer.head_size
        first = 2 * index * size
        return Context((kv[..., first : first + size], kv[..., first + size : first + 2 * size]), index)
