"""`TorchOps` of [slots, rows] on a GPU, with our kernels for append and attention where they take the heads."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer, Context, LatentLayer
from trtllm_dflash.ops.cuda_caches import CudaCaches
from trtllm_dflash.ops.cuda_experts import CudaExperts
from trtllm_dflash.ops.cuda_products import CudaProducts
from trtllm_dflash.ops.cuda_shapes import CudaShapes
from trtllm_dflash.ops.fp8 import FP8, dequantize_cache_rows
from trtllm_dflash.ops.latent_attention import MOST_ABSORBED, key_up, value_up

Tensor = torch.Tensor


class CudaSlots(CudaCaches):
    """The attention of a network whose rows lie in [slots, rows], over caches of one run of rows a slot.

    The attention of heads that ours does not take is torch's, over rows that our kernel appended. Where that kernel
    does not take them either, all is torch's.
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

    def latent_attention(self, layer: LatentLayer, q: Tensor, kv: Tensor, start: Tensor) -> Tensor:
        """Attends absorbed, by our kernels and products of each head; many rows of a prompt are torch's."""
        if q.shape[1] > MOST_ABSORBED or not self.attends_latent(layer) or not q.is_contiguous():
            return super().latent_attention(layer, q, kv, start)
        norm = self.weights[layer.prefix + "self_attn.kv_a_layernorm.weight"]
        cos, sin = (self.weights[f"{layer.rope}.{table}"] for table in ("cos", "sin"))
        append, cache = kernels.LatentAppend(norm, cos, sin, layer.norm_eps), self.caches[layer.prefix + "latent"]
        (slots, rows), up = q.shape[:2], self.weights[layer.prefix + "self_attn.latent_up"]
        plain = q.view(slots * rows, layer.heads, -1)[..., : layer.plain_size]
        queries = append(q, kv, start, layer.heads, cache)  # [B, N, heads, D], of which products make the rest
        absorbed = queries.flatten(0, 1)[..., : layer.rank]
        torch.bmm(plain.transpose(0, 1), key_up(layer, up), out=absorbed.transpose(0, 1))
        seen = kernels.attend_latent(queries.transpose(1, 2), cache, self.key_lengths(start, q), layer.scale)
        out = torch.empty(slots * rows, layer.heads, layer.value_size, dtype=q.dtype, device=q.device)
        by_heads = seen.view(slots * rows, layer.heads, layer.rank).transpose(0, 1)
        torch.bmm(by_heads, value_up(layer, up).mT, out=out.transpose(0, 1))
        return out.view(slots, rows, -1)

    def attends_latent(self, layer: LatentLayer) -> bool:
        """Whether our kernels compute a layer's latent attention."""
        norm, cos = self.weights[layer.prefix + "self_attn.kv_a_layernorm.weight"], self.weights[layer.rope + ".cos"]
        cache = self.caches[layer.prefix + "latent"]
        sizes = layer.rank, layer.rotary_size
        return norm.dtype == cos.dtype == cache.dtype and kernels.takes_latent(cache, *sizes)

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
        qkv = self._without_gates(layer, qkv)
        q = self._append_of(layer)(keys, values, start, layer.heads, qkv, context, committed)
        assert q is not None
        is_short = rows <= kernels.MAX_ROWS
        # A block of more rows is torch's: in cuts they would not see later ones, nor are they made behind `committed`.
        if self._takes(q, keys, values, scales) and (is_short or (causal and committed is None)):
            window, sinks = self._window_and_sinks(layer)
            if is_short:
                more = window, sinks, committed, rows, scales, layer.scale
                return kernels.attention(q, keys, values, start, causal, *more)
            cuts = self._once(("cuts", rows), start, lambda: _cuts(start, rows))
            return _attend_cuts(q, keys, values, cuts, window, sinks, scales, layer.scale)
        if scales is not None:
            pairs = zip((keys, values), scales, strict=True)
            keys, values = (dequantize_cache_rows(cache, scale, q.dtype) for cache, scale in pairs)
        first = start if committed is None else self.block_start(start, committed)
        lengths = self.key_lengths(first, qkv)
        return self.attention(q, keys, values, lengths, causal, layer.window, layer.sinks, layer.scale)

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
        """Attends by our kernels over caches that whatever else has filled."""
        rows = q.shape[2]
        if not self._takes(q, keys, values) or (rows > kernels.MAX_ROWS and not causal):
            return super().attention(q, keys, values, lengths, causal, window, sinks, scale)
        more = window or 0, None if sinks is None else self.weights[sinks]
        if rows <= kernels.MAX_ROWS:
            return kernels.attention(q, keys, values, lengths, causal, *more, scale=scale)
        cuts = self._once(("cuts", rows), lengths, lambda: _cuts(lengths - rows, rows))
        return _attend_cuts(q, keys, values, cuts, *more, scale=scale)

    def attends(self, layer: AttentionLayer) -> bool:
        """Whether our kernels compute a layer's attention."""
        keys = self._caches(layer)[0]
        is_read = keys.dtype != FP8 or self._appends(layer)  # else it is what the cache stands for that is read
        return kernels.takes_heads(layer.head_size, self.weights[layer.rope + ".cos"].dtype, keys) and is_read

    @staticmethod
    def _takes(q: Tensor, keys: Tensor, values: Tensor, scales: kernels.Scales = None) -> bool:
        """Whether our kernels attend from q [B, heads, N, D] to such caches."""
        is_alike = keys.shape == values.shape and (scales is not None or keys.dtype == q.dtype)
        return is_alike and kernels.takes_heads(q.shape[-1], q.dtype, keys)

    def _appends(self, layer: AttentionLayer) -> bool:
        """Whether our kernel appends a layer's rows, whatever computes their attention."""
        cos = self.weights[layer.rope + ".cos"]
        is_known = layer.head_size in kernels.ALL_HEAD_SIZES and cos.dtype in kernels.HALVES
        return is_known and kernels.takes_rotary(2 * cos.shape[1], layer.head_size)


class CudaSlotOps(CudaShapes, CudaSlots, CudaExperts, CudaProducts):
    """Computes a step of [slots, rows] by whatever our kernels have of it. A call may be captured into a CUDA graph."""


def _attend_cuts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cuts: tuple[Tensor, Tensor],
    window: int,
    sinks: Tensor | None,
    scales: kernels.Scales = None,
    scale: float | None = None,
) -> Tensor:
    """Attends from q [B, Hq, N, D], rows of prompts, as `kernels.attention` does, in cuts; see `_cuts`."""
    slots, heads, rows, size = q.shape
    segments, table = cuts
    out = torch.empty(slots, rows, heads * size, dtype=q.dtype, device=q.device)
    flat, pages = q.transpose(1, 2).flatten(0, 1), kernels.Pages(table, keys.shape[2])  # one a slot
    most = kernels.MAX_ROWS
    return kernels.attend_rows(flat, keys, values, pages, segments, most, out, True, window, sinks, scales, scale=scale)


def _cuts(start: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Makes segments [A, 4] of at most MAX_ROWS rows, out of `rows` of each slot at start [B]; and the slots' pages."""
    slots, device = len(start), start.device
    slot = torch.arange(slots, dtype=torch.int32, device=device)[:, None]  # [B, 1]
    first = torch.arange(0, rows, kernels.MAX_ROWS, dtype=torch.int32, device=device)[None]  # [1, cuts of a slot]
    counts = (rows - first).clamp(max=kernels.MAX_ROWS)
    parts = slot, start[:, None] + first, slot * rows + first, counts
    return torch.stack(torch.broadcast_tensors(*parts), dim=-1).flatten(0, 1), slot
