"""`CudaOps` whose rows depend on nothing else in the batch: each gets the same bits alone and among any others."""

import torch
from torch.nn.functional import pad

from trtllm_dflash import kernels
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import AttentionLayer, MoELayer, Residual
from trtllm_dflash.ops.cuda_experts import takes_experts
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.linear_weight import linear_weight

Tensor = torch.Tensor

#: Pieces of prompts that attend at once: for each, attention's scratch has room for the longest cache.
_CUTS_AT_ONCE = 8
#: Numbers of a sum over the ranks: of 16 bits or more, its bytes are then what our kernel takes.
_SUMMED = 8
#: The smallest step of a sum of numbers up to 1: as whole steps, those of half a million tokens add up in 63 bits.
_STEP = 2.0**-44


class ExactOps(CudaOps):
    """Computes a target's part of a step as `CudaOps` does, each row's sums in one order.

    Products of BF16 norm their rows. In FP16 norms stay apart: weights of a norm are scaled there, by parts of a row.

    Raises:
        EngineError: a product, or experts, of types or sizes that our kernels do not take.
    """

    _is_exact = True

    def for_drafts(self) -> CudaOps:
        shared = self.weights, self.caches, self.communicator, self._pages, self._layout
        more = self._window_pages, self._moves, self._reports, self._foretold, self._prompt_rows
        return CudaOps(*shared, self._most, *more)

    def _joined(self, names: tuple[str, ...], x: Tensor) -> str | None:
        return None  # parts of a row have the same bits only in the same product, whatever the number of rows

    def norm_and_linears(
        self, norm: str, names: tuple[str, ...], x: Residual[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Norms rows and multiplies them as any others: our router takes few rows alone."""
        stream, h = self.norm(norm, x, eps)
        return stream, h, self.linears(names, h)

    def _normed_product(
        self, norm: str, name: str, x: Residual[Tensor], eps: float, swiglu: bool = False, gelu: bool = False
    ) -> Tensor | None:
        if x.x.dtype != torch.bfloat16:
            return None
        return super()._normed_product(norm, name, Residual(x.x.contiguous(), x.pending), eps, swiglu, gelu)

    def _product(
        self,
        name: str,
        x: Tensor,
        swiglu: bool = False,
        norm: kernels.Norm | None = None,
        residual: Tensor | None = None,
        gelu: bool = False,
    ) -> Tensor | None:
        """Multiplies any number of rows, each in one order; None where the norm's weight is of another type."""
        if norm is not None and norm.weight.dtype != x.dtype:
            return None
        weight, x = linear_weight(self.weights, name), x.contiguous()
        if not isinstance(weight, Tensor) or not kernels.takes_wide(x, weight):
            raise EngineError(f"--kernels exact: {name} is of a type or of sizes that our kernels do not multiply")
        return kernels.exact_gemm(x, weight, self.weights.get(name + ".bias"), swiglu, norm, residual, gelu)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums over the ranks in their order, however many rows there are: in parts that our kernel takes."""
        if self.tp == 1:
            return x
        flat, missing = x.flatten(), -x.numel() % _SUMMED
        whole = pad(flat, (0, missing)) if missing else flat
        parts = whole.split(kernels.ALL_REDUCE_BYTES // x.element_size())
        sums = [self.communicator.all_reduce(part) for part in parts]
        return (sums[0] if len(sums) == 1 else torch.cat(sums))[: flat.numel()].view_as(x)

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        """Computes experts by our kernels alone: those for few rows and for many add up in one order."""
        if not takes_experts(layer, self.weights, x.shape[-1], x.dtype):
            raise EngineError(f"--kernels exact: {layer.prefix}experts are of a type or of sizes that our kernels lack")
        return super().moe(layer, x, logits)

    def _attend_prompts(self, layer: AttentionLayer, q: Tensor, out: Tensor) -> None:
        for cuts in self._layout.cuts.split(_CUTS_AT_ONCE):
            self._attend(layer, q, cuts, kernels.MAX_ROWS, out, causal=True)

    def probabilities(self, logits: Tensor) -> Tensor:
        weights = logits.exp()
        return (weights / (_steps(weights).sum(dim=-1, keepdim=True).double() * _STEP)).float()

    def running_sum(self, x: Tensor) -> Tensor:
        return _steps(x).cumsum(dim=-1).double() * _STEP


def _steps(x: Tensor) -> Tensor:
    """Rounds numbers of at most 1 to whole steps: in whatever order these are added, nothing is rounded."""
    return (x.double() / _STEP).round().long()
