"""`TorchOps` on a GPU, with our CUDA kernels for all but dense products: the fast path in BF16 and FP16."""

from collections.abc import Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Context, MoELayer, Residual
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.experts import ExpertMatrix, Experts
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight, dequantize_cache_rows
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor


def moe_kernel(layer: MoELayer, experts: Experts) -> kernels.MoE:
    """Makes the kernels' feed-forward of a layer's experts."""
    clamp = (layer.clamp.alpha, layer.clamp.limit) if layer.clamp else None
    routing = kernels.Routing(layer.experts, layer.first, layer.count, layer.top_k, layer.normalized, clamp)
    return kernels.MoE(routing, _kernel_matrix(experts.gate_up), _kernel_matrix(experts.down))


def takes_experts(layer: MoELayer, weights: Mapping[str, Tensor], hidden: int, dtype: torch.dtype) -> bool:
    """Whether the kernels compute few rows [N, hidden] of such experts."""
    experts = Experts.of(weights, layer)
    device = next(iter(weights.values())).device
    x, logits = (torch.empty(1, size, dtype=dtype, device=device) for size in (hidden, layer.experts))
    return moe_kernel(layer, experts).takes(x, logits)


def _kernel_matrix(matrix: ExpertMatrix) -> kernels.Matrix:
    values = matrix.blocks if matrix.weight is None else matrix.weight
    assert values is not None
    return kernels.Matrix(values, matrix.scales, matrix.bias)


class CudaOps(TorchOps):
    """Computes on CUDA. A call whose inputs stay at their addresses may be captured into a CUDA graph.

    Attention of more rows than a block has (a prompt chunk) is torch's: its fused kernel, where the host knows how far
    the rows go. A slot whose `start` is so low that its rows end at or below position 0 (-rows, say) is idle: its
    attention costs nothing, and its caches are not written.

    Args: as TorchOps, and `chunk_end`: the length of every slot in the call once its rows are appended, where the host
        knows it.

    Raises:
        EngineError: the kernels are not built.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None = None,
        chunk_end: int | None = None,
    ) -> None:
        super().__init__(weights, caches, communicator)
        self._chunk_end = chunk_end
        kernels.load()

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return kernels.embed(self.weights[name + ".weight"], ids)

    def block_embedding(self, name: str, bonus: Tensor, block_offsets: Tensor, mask_id: int) -> Tensor:
        return kernels.embed(self.weights[name + ".weight"], bonus, block_offsets.shape[1], mask_id)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self._skinny_gemm(name, x)
        return super().linear(name, x) if y is None else y

    def linear_swiglu(self, name: str, x: Tensor) -> Tensor:
        y = self._skinny_gemm(name, x, swiglu=True)
        return super().linear_swiglu(name, x) if y is None else y

    def add_product(self, name: str, x: Tensor, y: Tensor) -> Residual[Tensor]:
        total = self._skinny_gemm(name, y, residual=x) if self.tp == 1 and x.is_contiguous() else None
        return super().add_product(name, x, y) if total is None else Residual(total)

    def norm_linear(self, norm: str, name: str, x: Residual[Tensor], eps: float) -> tuple[Tensor, Tensor]:
        y = self._normed_skinny_gemm(norm, name, x, eps)
        return super().norm_linear(norm, name, x, eps) if y is None else (x.x, y)

    def norm_linear_swiglu(self, norm: str, name: str, x: Residual[Tensor], eps: float) -> tuple[Tensor, Tensor]:
        y = self._normed_skinny_gemm(norm, name, x, eps, swiglu=True)
        return super().norm_linear_swiglu(norm, name, x, eps) if y is None else (x.x, y)

    def _normed_skinny_gemm(
        self, norm: str, name: str, x: Residual[Tensor], eps: float, swiglu: bool = False
    ) -> Tensor | None:
        """Computes `_skinny_gemm` of rows that it norms itself, where nothing is pending on the stream; else None."""
        if x.pending is not None or not x.x.is_contiguous():
            return None
        return self._skinny_gemm(name, x.x, swiglu, kernels.Norm(self.weights[norm + ".weight"], eps))

    def _skinny_gemm(
        self,
        name: str,
        x: Tensor,
        swiglu: bool = False,
        norm: kernels.Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """Multiplies by our kernel, or returns None where it cannot; x is not rounded for an FP8 weight."""
        weight = linear_weight(self.weights, name)
        if isinstance(weight, Tensor):
            values, scale = weight, None
        elif isinstance(weight, Fp8Weight) and not weight.by_block:
            values, scale = weight.values, weight.scale
        else:
            return None
        if not kernels.takes_skinny(x, values):
            return None
        return kernels.skinny_gemm(x, values, scale, self.weights.get(name + ".bias"), swiglu, norm, residual)

    def _quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        return kernels.quantize_rows(x) if kernels.takes_quantize(x) else super()._quantize_rows(x)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return kernels.rms_norm(x, self.weights[name + ".weight"], eps)

    def add_rms_norm(self, name: str, x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, y, self.weights[name + ".weight"], eps)

    def swiglu(self, x: Tensor) -> Tensor:
        return kernels.swiglu(x)

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        compute = moe_kernel(layer, Experts.of(self.weights, layer))
        rows, scores = x.flatten(0, 1), logits.flatten(0, 1)
        return compute(rows, scores).view_as(x) if compute.takes(rows, scores) else super().moe(layer, x, logits)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        causal: bool,
        window: int | None = None,
        sinks: str | None = None,
    ) -> Tensor:
        rows = q.shape[2]
        if rows <= kernels.MAX_ROWS:
            return kernels.attention(q, keys, values, lengths, causal, window or 0, self._sinks(sinks))
        if self._chunk_end is None or not causal:
            return super().attention(q, keys, values, lengths, causal, window, sinks)
        if window is not None:
            first = max(0, self._chunk_end - rows - window + 1)
            keys, values = keys[:, :, first : self._chunk_end], values[:, :, first : self._chunk_end]
            return super().attention(q, keys, values, lengths - first, causal, window, sinks)
        keys, values = keys[:, :, : self._chunk_end], values[:, :, : self._chunk_end]
        # Called by name: of rows fewer than keys the public function takes no causal mask, and for rows as many it may
        # choose cuDNN, which compiles a plan for each length. This one's mask ends with the last row and the last key.
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True)
        out: Tensor = results[0]  # [B, heads, N, D]
        if sinks is not None:
            # The sink only adds to the sum that the values were divided by.
            share = torch.sigmoid(results[1] - self.weights[sinks].float()[:, None])  # [B, heads, N]
            out = (out.float() * share[..., None]).to(out.dtype)
        return out.transpose(1, 2).flatten(2)

    def self_attention(self, layer: AttentionLayer, qkv: Tensor, start: Tensor) -> Tensor:
        keys, values = self._caches(layer)
        q = self._append(layer)(keys, values, start, layer.heads, qkv)
        assert q is not None
        return self._attend(layer, q, start, None, True)

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        # As projected: they are normed and rotated on their way into the cache.
        size = layer.kv_heads * layer.head_size
        first = 2 * index * size
        return Context((kv[..., first : first + size], kv[..., first + size : first + 2 * size]), index)

    def keep_context(self, layer: AttentionLayer, context: Context[Tensor], start: Tensor) -> None:
        keys, values = self._caches(layer)
        k, v = context.tensors
        self._append(layer)(keys, values, start, layer.heads, context=(k, v))

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        keys, values = self._caches(layer)
        k, v = context.tensors
        q = self._append(layer)(keys, values, start, layer.heads, qkv, (k, v), committed)
        assert q is not None
        return self._attend(layer, q, start, committed, False)

    def argmax(self, logits: Tensor) -> Tensor:
        best, ids = kernels.argmax(logits)
        if self.tp == 1:
            return ids
        # One message: the bits of the largest logit, and its id in the whole vocabulary.
        own = torch.stack([best.view(torch.int32), ids + self.rank * logits.shape[-1]])
        every = torch.stack(self.communicator.all_gather(own))  # [tp, 2, B, R]
        winner = every[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
        return every[:, 1].gather(0, winner)[0]

    def accept(
        self, token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        return Acceptance(*kernels.accept(token_ids, target_ids, logit_rows.contiguous(), row_count))

    def _caches(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return self.caches[layer.prefix + "key"], self.caches[layer.prefix + "value"]

    def _scales(self, layer: AttentionLayer) -> kernels.Scales:
        """Scales of a layer's FP8 caches; None where the caches have the rows' type."""
        if self.caches[layer.prefix + "key"].dtype != FP8:
            return None
        return self.weights[layer.prefix + "key.scale"], self.weights[layer.prefix + "value.scale"]

    def _sinks(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weights[name]

    def _append(self, layer: AttentionLayer) -> kernels.Append:
        cos, sin = self.weights[layer.rope + ".cos"], self.weights[layer.rope + ".sin"]
        scales = self._scales(layer)
        if layer.norm_eps is None:
            return kernels.Append(cos, sin, scales=scales)
        q_norm, k_norm = (self.weights[f"{layer.prefix}self_attn.{name}_norm.weight"] for name in ("q", "k"))
        return kernels.Append(cos, sin, q_norm, k_norm, layer.norm_eps, scales)

    def _attend(
        self, layer: AttentionLayer, q: Tensor, start: Tensor, committed: Tensor | None, causal: bool
    ) -> Tensor:
        """Attends from q [B, heads, N, D] to a layer's caches; start [B] + committed [B] rows came before."""
        (keys, values), scales, rows = self._caches(layer), self._scales(layer), q.shape[2]
        if rows <= kernels.MAX_ROWS:
            sinks, window = self._sinks(layer.sinks), layer.window or 0
            return kernels.attention(q, keys, values, start, causal, window, sinks, committed, rows, scales)
        if scales is not None:
            # A prompt's chunk: torch's kernels read 16-bit rows.
            end = self._chunk_end if self._chunk_end is not None and causal else keys.shape[2]
            pairs = zip((keys, values), scales, strict=True)
            keys, values = (dequantize_cache_rows(cache[:, :, :end], scale, q.dtype) for cache, scale in pairs)
        lengths = start + rows if committed is None else start + committed + rows
        return self.attention(q, keys, values, lengths, causal, layer.window, layer.sinks)
