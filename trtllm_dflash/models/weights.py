"""What an engine's tensors are made of: which checkpoint tensors, joined how, and which part of them a rank holds."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from trtllm_dflash.ops.fp8 import FP8_BLOCK
from trtllm_dflash.ops.linear_weight import NVFP4_BLOCK


class Split(Enum):
    """How tensor parallelism divides a checkpoint tensor."""

    WHOLE = "every rank holds all of it"
    ROWS = "ranks hold runs of its first dimension (column-parallel: output features)"
    COLUMNS = "ranks hold runs of its second dimension (row-parallel: input features)"
    FIRST_RANK = "rank 0 alone holds it (a bias added once, before the all-reduce)"


class WeightPrecision(str, Enum):
    """How an engine stores a weight's numbers; see `ops/linear_weight.py`."""

    ENGINE = "engine"  # in the engine's own type
    FP8 = "fp8"  # a matrix as E4M3, with one FP32 scale a row of what the rank holds
    FP8_BLOCKS = "fp8-blocks"  # with one a block of 128 by 128
    NVFP4 = "nvfp4"

    def stored_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of a weight of that shape with its scales, in an engine whose own type has `itemsize`."""
        count = prod(shape)
        if self is WeightPrecision.ENGINE:
            return count * itemsize
        rows, columns = shape
        if self is WeightPrecision.FP8:
            return count + 4 * rows
        if self is WeightPrecision.FP8_BLOCKS:
            return count + 4 * (-(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK))
        return count // 2 + count // NVFP4_BLOCK + 4 * rows


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor. `units` heads (or features) are divided among the ranks, whole ones only.

    Where there are fewer units than ranks (key/value heads), neighbouring ranks share one.
    """

    key: str
    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    units: int = 1

    def bounds(self, tp: int, rank: int) -> tuple[int, int]:
        """First and past-the-last index that `rank` of `tp` holds along the divided dimension."""
        size = self.shape[0] if self.split is Split.ROWS else self.shape[1]
        unit = size // self.units
        first, last = unit_range(self.units, tp, rank)
        return first * unit, last * unit

    def held(self, tp: int, rank: int) -> tuple[int, ...]:
        """The shape of what a rank that holds any of it has."""
        if self.split not in (Split.ROWS, Split.COLUMNS):
            return self.shape
        first, last = self.bounds(tp, rank)
        axis = 0 if self.split is Split.ROWS else 1
        return (*self.shape[:axis], last - first, *self.shape[axis + 1 :])


@dataclass(frozen=True)
class Weight:
    """An engine tensor `name`: its parts, joined along the first dimension after slicing."""

    name: str
    parts: tuple[Part, ...]
    precision: WeightPrecision = WeightPrecision.ENGINE

    @property
    def linear(self) -> str:
        """The name of the linear whose weight it is, where it is one's."""
        return self.name.removesuffix(".weight")

    @property
    def is_matrix(self) -> bool:
        """Whether it may be a linear's weight: tables are looked up, and stay as they are."""
        return len(self.parts[0].shape) == 2 and not self.name.endswith("embed_tokens.weight")

    def shape(self, tp: int, rank: int) -> tuple[int, ...]:
        """What `rank` of `tp` holds of it (of a tensor that rank 0 alone holds: what that one does)."""
        shapes = [part.held(tp, rank) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def in_precision(weights: Iterable[Weight], precision: WeightPrecision | None, plain: Collection[str]) -> list[Weight]:
    """These weights with the matrices in that precision (None: the engine's), but for the linears named in `plain`."""
    if precision is None:
        return list(weights)
    return [replace(w, precision=precision) if w.is_matrix and w.linear not in plain else w for w in weights]


def unit_range(units: int, tp: int, rank: int) -> tuple[int, int]:
    """The units that a rank holds: an equal run each, or one shared by tp / units neighbours."""
    if units % tp == 0:
        return units // tp * rank, units // tp * (rank + 1)
    if tp % units == 0:
        shared = rank * units // tp
        return shared, shared + 1
    raise ValueError(f"{units} units cannot be divided among {tp} ranks")


def units_per_rank(units: int, tp: int) -> int:
    """How many of `units` each of `tp` ranks holds; at least one."""
    first, last = unit_range(units, tp, 0)
    return last - first
