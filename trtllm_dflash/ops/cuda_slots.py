"""`TorchOps` of [slots, rows] on a GPU, with our kernels for append and attention where they take the heads."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer, Context
from trtllm_dflash.ops.cuda_caches import CudaCaches
from trtllm_dflash.ops.fp8 import dequantize_cache_rows

Tensor = torch.Tensor


class CudaSlots(CudaCaches):
    """The attention of a network whose rows lie in [slots, rows], over caches of one run of rows a slot.

    Heads that our attention does not take, and pieces of prompts with more rows than it takes, are torch's, over rows
    that our kernel appended. Where that kernel does not take the heads, all is torch's.
    """

    def self_attention(self, layer: AttentionLayer, qkv: Tensor, start: Tensor) -> Tensor:
        if not self._appends(layer):
            return super().self_attention(layer, qkv, start)
        return self._append_and_attend(layer, start, qkv, True)

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        if not self._appends(layer):
            return super().context_rows(layer, kv, index, start)
        return self._projected(layer, kv, index)

    def keep_context(self, layer: AttentionLayer, context: Context[Tensor], start: Tensor) -> None:
        if not self._appends(layer):
            return super().keep_context(layer, context, start)
        (keys, values), (k, v) = self._caches(layer), context.tensors
        append = self._append_of(layer)
        append(keys, values, start, layer.heads, context=(k, v))
        return None

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        if not self._appends(layer):
            return super().block_attention(layer, context, qkv, start, committed)
        k, v = context.tensors
        return self._append_and_attend(layer, start, qkv, layer.causal_block, (k, v), committed)

    def _append_and_attend(
        self,
        layer: AttentionLayer,
        start: Tensor,
        qkv: Tensor,
        causal: bool,
        context: tuple[Tensor, Tensor] | None = None,
        committed: Tensor | None = None,
    ) -> Tensor:
        """Appends the committed rows of context, if any, and those of qkv [B, N, ...]; returns these ones' attention.

        [B, N, heads*D]. Arguments as in `kernels.Append`.
        """
        (keys, values), scales, rows = self._caches(layer), self._scales(layer), qkv.shape[1]
        qkv = qkv[..., : (layer.heads + 2 * layer.kv_heads) * layer.head_size]  # a gated layer's gates follow
        q = self._append_of(layer)(keys, values, start, layer.heads, qkv, context, committed)
        assert q is not None
        if rows <= kernels.MAX_ROWS and self.attends(layer):
            sinks, window = None if layer.sinks is None else self.weights[layer.sinks], layer.window or 0
            return kernels.attention(q, keys, values, start, causal, window, sinks, committed, rows, scales)
        if scales is not None:
            pairs = zip((keys, values), scales, strict=True)
            keys, values = (dequantize_cache_rows(cache, scale, q.dtype) for cache, scale in pairs)
        first = start if committed is None else self.block_start(start, committed)
        lengths = self.key_lengths(first, qkv)
        return self.attention(q, keys, values, lengths, causal, layer.window, layer.sinks)

    def attends(self, layer: AttentionLayer) -> bool:
        """Whether our kernels compute a layer's attention, of as many rows as they take."""
        cos, keys = self.weights[layer.rope + ".cos"], self._caches(layer)[0]
        return self._appends(layer) and kernels.takes_heads(layer.head_size, cos.dtype, keys)

    def _appends(self, layer: AttentionLayer) -> bool:
        """Whether our kernel appends a layer's rows, whatever computes their attention."""
        cos = self.weights[layer.rope + ".cos"]
        is_plain = layer.scale is None and not layer.keys_as_values and not layer.norms_values
        is_known = layer.head_size in kernels.ALL_HEAD_SIZES and cos.dtype in kernels.HALVES
        return is_plain and is_known and kernels.takes_rotary(2 * cos.shape[1], layer.head_size)
