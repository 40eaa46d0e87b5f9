"""`TorchOps` on a GPU with our kernels where they take the rows: embeddings, norms, SwiGLU, products."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Residual
from trtllm_dflash.ops.fp8 import Fp8Weight, multiplies, product_of_rounded
from trtllm_dflash.ops.linear_weight import joined_name, linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

_PARTS = 4  # dimensions of what is pending in parts


class CudaProducts(TorchOps):
    """The part of a network that is the same wherever its rows lie: [slots, rows] or flat.

    Weights may have beside them what lets kernels do more at once: see `join_weights`, `add_norms_less_one`.
    """

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        table = self.weights[name + ".weight"]
        return kernels.embed(table, ids) if table.dtype in kernels.HALVES else super().embedding(name, ids)

    def block_embedding(self, name: str, bonus: Tensor, block_offsets: Tensor, mask_id: int) -> Tensor:
        table = self.weights[name + ".weight"]
        if table.dtype not in kernels.HALVES:
            return super().block_embedding(name, bonus, block_offsets, mask_id)
        return kernels.embed(table, bonus, block_offsets.shape[1], mask_id)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self._product(name, x)
        return super().linear(name, x) if y is None else y

    def linear_swiglu(self, name: str, x: Tensor) -> Tensor:
        y = self._product(name, x, swiglu=True)
        return super().linear_swiglu(name, x) if y is None else y

    def add_product(self, name: str, x: Tensor, y: Tensor) -> Residual[Tensor]:
        if self.tp > 1 or not x.is_contiguous():
            return super().add_product(name, x, y)
        total = self._product(name, y, residual=x)
        if total is not None:
            return Residual(total)
        parts = self._product_in_parts(name, y)
        return super().add_product(name, x, y) if parts is None else Residual(x, parts)

    def _product_in_parts(self, name: str, x: Tensor) -> Tensor | None:
        """Multiplies x [B, N, I] in parts of its columns: FP32 [P, B, N, O], whose sum `add_rms_norm` takes.

        None where that is no faster. cuBLAS divides such a product, too, but adds the parts up in a kernel of its own.
        """
        weight = linear_weight(self.weights, name)
        if not isinstance(weight, Tensor) or weight.dtype != x.dtype or name + ".bias" in self.weights:
            return None
        count = kernels.count_parts(x, weight)
        return None if count == 1 else kernels.product_in_parts(x, weight, count)

    def norm_linear(self, norm: str, name: str, x: Residual[Tensor], eps: float) -> tuple[Tensor, Tensor]:
        y = self._normed_product(norm, name, x, eps)
        return super().norm_linear(norm, name, x, eps) if y is None else (x.x, y)

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        joined = self._joined(names, x)
        return super().linears(names, x) if joined is None else self._parts_of(self.linear(joined, x), names)

    def norm_linears(
        self, norm: str, names: tuple[str, ...], x: Residual[Tensor], eps: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        joined = self._joined(names, x.x)
        if joined is None:
            return super().norm_linears(norm, names, x, eps)
        stream, y = self.norm_linear(norm, joined, x, eps)
        return stream, self._parts_of(y, names)

    def norm_and_linears(
        self, norm: str, names: tuple[str, ...], x: Residual[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        name = joined_name(names)
        weight, bias = self.weights.get(name + ".weight"), self.weights.get(name + ".bias")
        by = self.weights[norm + ".weight"]
        is_flat = x.pending is None or (x.pending.is_contiguous() and x.pending.dim() < _PARTS)
        if weight is None or not is_flat or not kernels.takes_router(x.x, by, weight, bias):
            return super().norm_and_linears(norm, names, x, eps)
        stream, h, y = kernels.router(x.x, x.pending, by, eps, weight, bias)
        return stream, h, self._parts_of(y, names)

    def _joined(self, names: tuple[str, ...], x: Tensor) -> str | None:
        """Names the linear of whose weight those are parts; None where our kernel does not multiply x by it.

        cuBLAS, which multiplies more rows, takes longer for the joined weight than for its parts.
        """
        joined = joined_name(names)
        weight = self.weights.get(joined + ".weight")
        is_ours = weight is not None and (kernels.takes_skinny(x, weight) or kernels.suits_wide(x, weight, False))
        return joined if is_ours else None

    def _parts_of(self, y: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Splits what a joined weight makes into its linears' parts."""
        sizes = [len(self.weights[name + ".weight"]) for name in names]
        parts: tuple[Tensor, ...] = y[..., : sum(sizes)].split(sizes, dim=-1)
        return parts

    def norm_linear_swiglu(self, norm: str, name: str, x: Residual[Tensor], eps: float) -> tuple[Tensor, Tensor]:
        y = self._normed_product(norm, name, x, eps, swiglu=True)
        return super().norm_linear_swiglu(norm, name, x, eps) if y is None else (x.x, y)

    def _normed_product(
        self, norm: str, name: str, x: Residual[Tensor], eps: float, swiglu: bool = False, gelu: bool = False
    ) -> Tensor | None:
        """Computes `_product` of rows that it norms itself, where nothing is pending on the stream; else None."""
        weight = self.weights[norm + ".weight"]
        has_less = norm + ".less_one" in self.weights and self.weights[name + ".weight"].dtype == x.x.dtype
        adds_one = weight.dtype != x.x.dtype and has_less
        weight = self.weights[norm + ".less_one"] if adds_one else weight
        if x.pending is not None or not x.x.is_contiguous():
            return None
        return self._product(name, x.x, swiglu, kernels.Norm(weight, eps, adds_one), gelu=gelu)

    def _product(
        self,
        name: str,
        x: Tensor,
        swiglu: bool = False,
        norm: kernels.Norm | None = None,
        residual: Tensor | None = None,
        gelu: bool = False,
    ) -> Tensor | None:
        """Multiplies by our kernel, or returns None where it cannot."""
        weight = linear_weight(self.weights, name)
        if isinstance(weight, Tensor):
            values, scale = weight, None
        elif isinstance(weight, Fp8Weight):
            values, scale = weight.values, weight.scale
        else:
            return None
        is_alike = scale is not None or values.dtype == x.dtype  # a router's may be FP32
        if not is_alike or not x.is_contiguous():
            return None
        bias = self.weights.get(name + ".bias")
        if kernels.takes_skinny(x, values):
            if norm is not None and norm.weight.dtype != x.dtype:
                return None
            return kernels.skinny_gemm(x, values, scale, bias, swiglu, norm, residual, gelu, self._leaves_room(name))
        if scale is None and norm is None and kernels.suits_wide(x, values, swiglu):
            return kernels.wide_gemm(x, values, bias, swiglu, residual, gelu)
        if isinstance(weight, Fp8Weight):
            return _rounded_product(x, weight, bias, swiglu, norm, residual, gelu)
        if swiglu and norm is None and kernels.suits_bulk(x, values):
            return kernels.bulk_gemm(x, values, bias, gelu)
        return None

    def _leaves_room(self, name: str) -> bool:
        """Whether a product is to leave room for the attention that runs before it, or after."""
        return False

    def _quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        return kernels.quantize_rows(x) if kernels.takes_quantize(x) else super()._quantize_rows(x)

    def _quantize_blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        return kernels.quantize_blocks(x) if kernels.takes_quantize(x) else super()._quantize_blocks(x)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        weight = self.weights[name + ".weight"]
        return kernels.rms_norm(x, weight, eps) if kernels.takes_norm(x) else super().rms_norm(name, x, eps)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return super().add(x, _sum_of(y, x))

    def add_rms_norm(self, name: str, x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if y.dim() == _PARTS:
            return kernels.add_parts_norm(x, y, self.weights[name + ".weight"], eps)
        if not kernels.takes_norm(x) or not y.is_contiguous():
            return super().add_rms_norm(name, x, y, eps)
        return kernels.add_rms_norm(x, y, self.weights[name + ".weight"], eps)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return kernels.gate(x, gate) if kernels.takes_gate(x, gate) else super().gated(x, gate)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        is_taken = kernels.takes_gate(y, gate) and x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()
        return kernels.gate(y, gate, x) if is_taken else super().add_gated(x, y, gate)

    def swiglu(self, x: Tensor) -> Tensor:
        return kernels.swiglu(x) if x.dtype in kernels.HALVES else super().swiglu(x)

    # -- Gemma's -----------------------------------------------------------------------------------------------------

    def geglu(self, x: Tensor) -> Tensor:
        is_taken = x.dtype in kernels.HALVES and x.is_contiguous() and x.shape[-1] % 16 == 0
        return kernels.swiglu(x, gelu=True) if is_taken else super().geglu(x)

    def norm_linear_geglu(self, norm: str, name: str, x: Residual[Tensor], eps: float) -> tuple[Tensor, Tensor]:
        y = self._normed_product(norm, name, x, eps, swiglu=True, gelu=True)
        if y is not None:
            return x.x, y
        stream, h = self.norm(norm, x, eps)
        y = self._product(name, h, swiglu=True, gelu=True)
        return stream, self.geglu(self.linear(name, h)) if y is None else y

    def add_normed(self, norm: str, x: Tensor, y: Tensor, eps: float, factor: str | None = None) -> Tensor:
        if not (kernels.takes_norm(y) and y.is_contiguous() and x.is_contiguous()):
            return super().add_normed(norm, x, y, eps, factor)
        number = None if factor is None else self.weights[factor]
        return kernels.add_normed(y, self.weights[norm + ".weight"], eps, x, number)

    def scaled_norm(self, norm: str, x: Tensor, eps: float, scale: float) -> Tensor:
        if not (kernels.takes_norm(x) and x.is_contiguous()):
            return super().scaled_norm(norm, x, eps, scale)
        return kernels.add_normed(x, self.weights[norm + ".weight"], eps, scale=scale)

    def cap(self, logits: Tensor, cap: float) -> Tensor:
        return kernels.cap(logits, cap) if kernels.takes_cap(logits) else super().cap(logits, cap)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        if not logits.is_contiguous():
            return super().argmax(logits)
        return self._first_of_ranks(logits, *kernels.argmax(logits))

    def _first_of_ranks(self, logits: Tensor, best: Tensor, ids: Tensor) -> Tensor:
        """Finds each row's best id of all ranks, out of those of this one."""
        if self.tp == 1:
            return ids
        # One message: the bits of the largest logit, and its id in the whole vocabulary.
        own = torch.stack([best.view(torch.int32), ids + self.rank * logits.shape[-1]])
        every = torch.stack(self.communicator.all_gather(own))  # [tp, 2, B, R]
        winner = every[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
        return every[:, 1].gather(0, winner)[0]


def _sum_of(y: Tensor, x: Tensor) -> Tensor:
    """Adds up what is pending in parts, rounded to the type of the stream x."""
    return y.sum(dim=0).to(x.dtype) if y.dim() == _PARTS else y


def _rounded_product(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    swiglu: bool,
    norm: kernels.Norm | None,
    residual: Tensor | None,
    gelu: bool,
) -> Tensor | None:
    """Multiplies more rows than `skinny_gemm` takes, rounded to E4M3; None where nothing of ours does.

    What our kernel does not multiply cuBLAS does, once one of ours has normed and rounded it.
    """
    flat = x.flatten(0, -2)
    if not multiplies(x.device, weight, x.dtype) or not kernels.takes_quantize(flat):
        return None
    is_ours = kernels.suits_wide_fp8(x, weight.values, weight.scale, swiglu)
    is_whole = not weight.by_block or len(flat) % 4 == 0
    if not is_ours and (norm is None or residual is not None or not is_whole):
        return None
    rows, factors = (kernels.quantize_blocks if weight.by_block else kernels.quantize_rows)(flat, norm)
    if is_ours:
        of = weight.values, weight.scale, bias, swiglu, residual, gelu
        return kernels.wide_gemm_fp8(rows.view(x.shape), factors, *of)
    y = product_of_rounded(rows, factors, weight, x.dtype, bias).view(*x.shape[:-1], -1)
    return kernels.swiglu(y, gelu=gelu) if swiglu else y
