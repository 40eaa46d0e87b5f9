"""Products of rows and a weight on the CPU: a row's bits are a function of that row and the weight alone.

oneDNN sums each number of a product in one order, however many rows there are; a single row, for which it has another
kernel, goes as two. BLAS does not: there a row differs in its last digits with the number of rows, with its place among
them, and with the number of threads.
"""

from functools import cache

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

#: Rows of a product where oneDNN has no kernels for the type: always as many, so that all go the same way.
_TILE = 16


def packed(weight: Tensor) -> Tensor:
    """Lays a weight [O, I] out as `product` reads it fastest; returns it as it is where nothing is faster."""
    if weight.is_mkldnn or not weight.numel() or not _has_kernels(weight.dtype):
        return weight
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TILE)
    return layout


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [..., I] by a weight [O, I], packed or not, transposed, and adds a bias [O]: [..., O]."""
    rows = x.flatten(0, -2)
    if not len(rows):
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    multiply = _one_dnn if _has_kernels(x.dtype) else _in_tiles
    return multiply(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


@cache
def _has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[dtype]()) if dtype in supported else dtype == torch.float32


def _one_dnn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    alone = len(rows) == 1
    two = torch.cat([rows, rows]) if alone else rows
    y: Tensor = torch.ops.mkldnn._linear_pointwise(two, weight, bias, "none", [], "")
    return y[:1] if alone else y


def _in_tiles(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _TILE))
    parts = [F.linear(tile, weight, bias) for tile in padded.split(_TILE)]
    return torch.cat(parts)[: len(rows)]
