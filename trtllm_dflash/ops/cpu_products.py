"""Products of rows and a weight on the CPU: a row's bits are a function of that row and the weight alone.

BLAS does not give that: there a row differs in its last digits with the number of rows, with its place among them, and
with the number of threads. oneDNN sums each number of a product in one order, on most CPUs and for most shapes: for any
number of rows, or from some number on, or only for one same number. Which it is, is tried once for each shape.
Numbers of 16 bits for which oneDNN has no kernels on a CPU are multiplied in FP32 there, and what they make is rounded.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_SHORT = (torch.bfloat16, torch.float16)

#: Rows of a product where their number matters: always as many, so that all go the same way.
_TILE = 16

#: Rows of the largest product: more go in pieces of so many. None larger is tried.
_MOST = 512

#: Numbers of rows that are tried, the telling ones first: for a large weight the later ones are left out.
_COUNTS = (1, 2, 16, 33, 15, 8, 26, 64, 3, 128, 31, 32, 37, 100, 257, 4, 5, 6, 7, *range(9, 15), 17)
_COUNTS += (24, 28, 30, 48, 63, 65, 96, 97, 127, 129, 200, 256, 300, _MOST)

#: Multiplications that trying one way to multiply may cost, about.
_BUDGET = 2**32


@dataclass(frozen=True)
class _Way:
    """A way to multiply: in pieces of `least` to `most` rows, which are repeated where there are fewer."""

    least: int
    most: int
    one_dnn: bool = True

    def multiply(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies rows [N, I] by a weight [O, I], transposed, and adds a bias [O]: [N, O]."""
        count = rows.shape[0]
        if count > self.most:
            return torch.cat([self.multiply(piece, weight, bias) for piece in rows.split(self.most)])
        multiply = _one_dnn if self.one_dnn else F.linear
        if count >= self.least:
            return multiply(rows, weight, bias)
        return multiply(torch.cat([rows] * -(-self.least // count))[: self.least], weight, bias)[:count]


#: Ways by oneDNN, the fastest first. A single row goes as two: it has another kernel.
_ONE_DNN = (_Way(2, _MOST), _Way(_TILE, _MOST), _Way(_TILE, _TILE))
_BLAS = _Way(_TILE, _TILE, one_dnn=False)


class _Kind(NamedTuple):
    """All that the order of a product's sums may depend on, but its rows."""

    dtype: torch.dtype  # in which is multiplied
    outputs: int
    inputs: int
    packed: bool
    transposed: bool  # in memory
    biased: bool
    threads: int

    def __str__(self) -> str:
        return f"{self.outputs} by {self.inputs} in {str(self.dtype).removeprefix('torch.')}"


def packed(weight: Tensor) -> Tensor:
    """Lays a weight [O, I] out as `product` reads it fastest; returns it as it is where nothing is faster, or exact."""
    if weight.is_mkldnn or not weight.numel() or not _has_kernels(weight.dtype):
        return weight
    plain = _kind(weight, None)
    if _way(plain._replace(packed=True, transposed=False)) is None and _way(plain) is not None:
        return weight
    return _packed(weight)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [..., I] by a weight [O, I], packed or not, transposed, and adds a bias [O]: [..., O]."""
    rows = x.flatten(0, -2).contiguous()
    if not rows.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    kind = _kind(weight, bias)
    way = _way(kind) or _ways(kind)[0]
    if kind.dtype != weight.dtype:
        rows, weight = rows.to(kind.dtype), weight.to(kind.dtype, memory_format=torch.contiguous_format)
        bias = None if bias is None else bias.to(kind.dtype)
    y = way.multiply(rows, weight, bias)
    return (y if y.dtype == x.dtype else y.to(x.dtype)).view(*x.shape[:-1], -1)


def why_inexact(weight: Tensor, bias: Tensor | None) -> str | None:
    """Says why a row's bits depend on the rows beside it in `product` by this weight; None: they do not."""
    kind = _kind(weight, bias)
    return None if not weight.numel() or _way(kind) else f"oneDNN's product of {kind} depends on the number of rows"


def _kind(weight: Tensor, bias: Tensor | None) -> _Kind:
    (outputs, inputs), is_packed, dtype = weight.shape, weight.is_mkldnn, weight.dtype
    if dtype in _SHORT and not _has_kernels(dtype):
        dtype = torch.float32
    transposed = dtype == weight.dtype and not is_packed and not weight.is_contiguous()
    return _Kind(dtype, outputs, inputs, is_packed, transposed, bias is not None, torch.get_num_threads())


def _ways(kind: _Kind) -> tuple[_Way, ...]:
    """Lists the ways to multiply so, the fastest first."""
    by_one_dnn = _ONE_DNN if _has_kernels(kind.dtype) else ()
    return by_one_dnn if kind.packed else (*by_one_dnn, _BLAS)


@cache
def _way(kind: _Kind) -> _Way | None:
    """Finds the fastest way to multiply in which a row's bits depend on no other row; None: there is none."""
    rows, weight = _cancelling(kind)
    bias = rows.new_zeros(kind.outputs) if kind.biased else None
    return next((way for way in _ways(kind) if _holds(way, rows, weight, bias)), None)


def _holds(way: _Way, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether rows [N, I] have the same products among any number of them, and at any place, as far as is tried.

    N is odd: repeated, each row comes to lie at each place of a tile.
    """
    expected, left = way.multiply(rows, weight, bias), _BUDGET
    for count in _COUNTS:
        cost = count * weight.shape[0] * weight.shape[1]
        if cost > left and count > _TILE:
            continue
        left -= cost
        which = (torch.arange(count) + count) % len(rows)
        if not torch.equal(way.multiply(rows[which], weight, bias), expected[which]):
            return False
    return True


def _cancelling(kind: _Kind) -> tuple[Tensor, Tensor]:
    """Draws rows [N, I] and a weight [O, I] whose products are 0, but for what rounding leaves.

    That depends on the order of the sums, in each number and in its first digit, so that no type rounds it away.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(kind.inputs, generator=generator)
    half, odd = divmod(kind.inputs, 2)

    def draw(count: int, sign: int) -> Tensor:
        numbers = 8 * torch.randn(count, half, generator=generator)
        return torch.cat([numbers, sign * numbers, numbers.new_zeros(count, odd)], dim=1)[:, order].to(kind.dtype)

    rows = draw(_TILE + 1, -1)
    few = draw(_TILE * 4 + 3, 1)  # of the outputs: a large weight repeats them
    weight = few[torch.arange(kind.outputs) % len(few)]
    if kind.transposed:
        weight = weight.t().contiguous().t()
    return rows, _packed(weight) if kind.packed else weight


def _packed(weight: Tensor) -> Tensor:
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TILE)
    return layout


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
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return y
