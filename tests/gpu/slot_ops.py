"""Append and attention of [slots, rows] by the CUDA kernels, as the TensorRT plugin calls them."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer, Context
from trtllm_dflash.ops.cuda_ops import append_kernel
from trtllm_dflash.ops.fp8 import FP8, dequantize_cache_rows
from trtllm_dflash.ops.torch_ops import TorchOps


class SlotOps(TorchOps):
    """`TorchOps`, with the kernels for norm of heads, RoPE, append, and attention of as many rows as they take."""

    def self_attention(self, layer: AttentionLayer, qkv: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return self._append_and_attend(layer, start, qkv, causal=True)

    def context_rows(self, layer, kv, index, start) -> Context[torch.Tensor]:
        size = layer.kv_heads * layer.head_size
        first = 2 * index * size
        return Context((kv[..., first : first + size], kv[..., first + size : first + 2 * size]), index)

    def keep_context(self, layer: AttentionLayer, context: Context[torch.Tensor], start: torch.Tensor) -> None:
        keys, values = self._caches(layer)
        k, v = context.tensors
        append_kernel(layer, self.weights, self._scales(layer))(keys, values, start, layer.heads, context=(k, v))

    def block_attention(self, layer, context, qkv, start, committed) -> torch.Tensor:
        return self._append_and_attend(layer, start, qkv, False, context.tensors, committed)

    def _append_and_attend(self, layer, start, qkv, causal, context=None, committed=None) -> torch.Tensor:
        (keys, values), scales, rows = self._caches(layer), self._scales(layer), qkv.shape[1]
        append = append_kernel(layer, self.weights, scales)
        q = append(keys, values, start, layer.heads, qkv, context, committed)
        assert q is not None
        if rows <= kernels.MAX_ROWS:
            sinks, window = None if layer.sinks is None else self.weights[layer.sinks], layer.window or 0
            return kernels.attention(q, keys, values, start, causal, window, sinks, committed, rows, scales)
        if scales is not None:
            pairs = zip((keys, values), scales, strict=True)
            keys, values = (dequantize_cache_rows(cache, scale, q.dtype) for cache, scale in pairs)
        lengths = start + rows if committed is None else start + committed + rows
        return self.attention(q, keys, values, lengths, causal, layer.window, layer.sinks)

    def _caches(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        return self.caches[layer.prefix + "key"], self.caches[layer.prefix + "value"]

    def _scales(self, layer: AttentionLayer) -> kernels.Scales:
        if self.caches[layer.prefix + "key"].dtype != FP8:
            return None
        return self.weights[layer.prefix + "key.scale"], self.weights[layer.prefix + "value.scale"]
