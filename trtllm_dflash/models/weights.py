"""An engine's tensors: the checkpoint tensors that each is joined from, and the part that each rank holds."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, Literal

from trtllm_dflash.ops.formats import E8M0_ONE, FP8_BLOCK, INT4_BLOCK, NVFP4_BLOCK

#: The types that an engine computes in.
Precision = Literal["fp32", "bf16", "fp16"]


class Split(Enum):
    """The way in which tensor parallelism divides a checkpoint tensor."""

    WHOLE = "every rank holds all of it", None
    ROWS = "ranks hold runs of its first dimension (column-parallel: output features)", 0
    COLUMNS = "ranks hold runs of its second dimension (row-parallel: input features)", 1
    THIRD = "ranks hold runs of its third dimension (input features of stacked matrices)", 2
    FIRST_RANK = "rank 0 alone holds it (a bias added once, before the all-reduce)", None

    def __init__(self, meaning: str, axis: int | None) -> None:
        self.axis = axis  # the dimension that is divided; None where none is


class Content(Enum):
    """The kind of a checkpoint tensor's elements."""

    NUMBERS = "floating-point numbers"
    E2M1_PAIRS = "bytes of two MXFP4 numbers each, kept as they are"
    E8M0 = "bytes that are MXFP4's powers of two, kept as they are"

    @property
    def padding(self) -> int:
        """The element that padding consists of: with the others of its kind it makes zeros."""
        return E8M0_ONE if self is Content.E8M0 else 0


class WeightPrecision(str, Enum):
    """The format of a weight's numbers in an engine; see `ops/linear_weight.py`."""

    ENGINE = "engine"  # in the engine's own type
    FP8 = "fp8"  # a matrix as E4M3, with one FP32 scale a row of what the rank holds
    FP8_BLOCKS = "fp8-blocks"  # with one a block of 128 by 128
    NVFP4 = "nvfp4"
    INT4 = "int4"  # see `ops/int4.py`
    BYTES = "bytes"  # as the checkpoint's
    FP32 = "fp32"  # in any engine: numbers that fewer bits would change too much

    def stored_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Counts the bytes of a weight of that shape with its scales, in an engine whose own type has `itemsize`."""
        count = prod(shape)
        if self is WeightPrecision.ENGINE:
            return count * itemsize
        if self is WeightPrecision.BYTES:
            return count
        if self is WeightPrecision.FP32:
            return 4 * count
        if self is WeightPrecision.INT4:
            return count // 2 + 2 * (count // INT4_BLOCK)
        *stack, rows, columns = shape
        if self is WeightPrecision.FP8:
            return count + 4 * prod(stack) * rows
        if self is WeightPrecision.FP8_BLOCKS:
            return count + 4 * prod(stack) * (-(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK))
        return count // 2 + count // NVFP4_BLOCK + 4 * prod(stack) * rows


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor, or a part of it. `units` heads (or features) are divided among ranks, whole ones only.

    Where there are fewer units than ranks (key/value heads), neighbouring ranks share one. `shape` is the tensor's; of
    a stack of matrices the part is one, and sections and units are counted in that.
    """

    key: str
    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    units: int = 1
    content: Content = Content.NUMBERS
    padded: bool = False  # units need not divide: the first ranks hold one more, the others padding in its place
    interleaved: bool = False  # gate and up rows alternate; an engine has all gates, then all ups
    transposed: bool = False  # the second and third dimension are an engine's third and second
    section: tuple[int, int] | None = None  # first and past-the-last index along the divided dimension, or else rows
    run: tuple[int, int] | None = None  # first and past-the-last of each unit's rows
    matrix: int | None = None  # of a stack
    less_one: bool = False  # an engine's numbers are these and 1
    alternating: int = 0  # of each unit's rows, the last so many are pairs; an engine has all first, then all second

    @property
    def sides(self) -> tuple[int, ...]:
        """The shape of the tensor, or of the matrix out of its stack."""
        return self.shape if self.matrix is None else self.shape[1:]

    @property
    def axis(self) -> int | None:
        """The dimension that some indices are held of; None where it is all of them."""
        return 0 if self.split.axis is None and self.section is not None else self.split.axis

    @property
    def unit(self) -> int:
        """Indices of a unit along the divided dimension."""
        assert self.axis is not None
        first, last = self.section or (0, self.sides[self.axis])
        return (last - first) // self.units

    def bounds(self, tp: int, rank: int) -> tuple[int, int]:
        """Computes the first and past-the-last index that `rank` of `tp` reads along the divided dimension."""
        begin = 0 if self.section is None else self.section[0]
        if self.split.axis is None:
            assert self.section is not None
            return self.section
        unit = self.unit
        if self.padded:
            least, more = divmod(self.units, tp)
            first, last = rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more)
        else:
            first, last = unit_range(self.units, tp, rank)
        return begin + first * unit, begin + last * unit

    def held(self, tp: int, rank: int) -> tuple[int, ...]:
        """Computes the shape of a rank's slice, padding included, on ranks that hold any of it."""
        axis, sides = self.axis, self.sides
        if axis is None:
            return sides
        first, last = self.bounds(tp, 0 if self.padded else rank)  # of padded ones rank 0 holds the most
        count = last - first
        if self.run is not None:
            count = count // self.unit * (self.run[1] - self.run[0])
        return (*sides[:axis], count, *sides[axis + 1 :])

    def made(self, tp: int, rank: int) -> tuple[int, ...]:
        """Computes the shape of a rank's slice in the engine's weight."""
        held = self.held(tp, rank)
        return (held[0], held[2], held[1]) if self.transposed else held


@dataclass(frozen=True)
class Weight:
    """An engine tensor `name`: its parts, joined along the first dimension after slicing.

    Where it is a stack of equal matrices, the parts of each stand together, in the stack's order. `divided`: ranks hold
    equal runs of the stack, whole matrices, instead of slices of each.
    """

    name: str
    parts: tuple[Part, ...]
    precision: WeightPrecision = WeightPrecision.ENGINE
    stack: int | None = None
    divided: bool = False

    @property
    def linear(self) -> str:
        """The name of the linear that the weight belongs to, if any."""
        return self.name.removesuffix(".weight")

    @property
    def is_matrix(self) -> bool:
        """Whether its numbers may be stored in few bits: a linear's weight, or the experts'. Tables are looked up."""
        is_weight = self.name.endswith(".weight") and not self.name.endswith("embed_tokens.weight")
        return is_weight and len(self.parts[0].sides) == 2

    @property
    def parts_of_each(self) -> int:
        """Number of parts that make one matrix of the stack; all parts where it is no stack."""
        return len(self.parts) // (self.stack or 1)

    def parts_of(self, tp: int, rank: int) -> tuple[Part, ...]:
        """Lists the parts that `rank` of `tp` reads."""
        if not self.divided:
            return self.parts
        assert self.stack is not None
        first, last = unit_range(self.stack, tp, rank)
        return self.parts[first * self.parts_of_each : last * self.parts_of_each]

    def shape(self, tp: int, rank: int) -> tuple[int, ...]:
        """Computes the shape of the slice of `rank` of `tp` (of a tensor that rank 0 alone holds: of rank 0's)."""
        parts = self.parts_of(tp, rank)
        of_each = self.parts_of_each
        shapes = [part.made(tp, rank) for part in parts[:of_each]]
        matrix = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return matrix if self.stack is None else (len(parts) // of_each, *matrix)


def in_precision(weights: Iterable[Weight], precision: WeightPrecision | None, plain: Collection[str]) -> list[Weight]:
    """Sets the precision of matrices (None: the engine's), except for the linears named in `plain`."""
    if precision is None:
        return list(weights)
    return [replace(w, precision=precision) if w.is_matrix and w.linear not in plain else w for w in weights]


def rounded_to_fp8(weights: Iterable[Weight]) -> dict[str, Any]:
    """Makes the changes to a configuration that round projections to FP8, but not LM head, routers and experts.

    They are `linear_precision` and `plain_linears` of `DecoderConfig`.
    """
    is_rounded = {w.linear: w.linear.endswith("_proj") and w.stack is None for w in weights if w.is_matrix}
    plain = tuple(linear for linear, rounded in is_rounded.items() if not rounded)
    return {"linear_precision": WeightPrecision.FP8, "plain_linears": plain}


def unit_range(units: int, tp: int, rank: int) -> tuple[int, int]:
    """Range of the units that a rank holds: an equal run each, or one shared by tp / units neighbours."""
    if units % tp == 0:
        return units // tp * rank, units // tp * (rank + 1)
    if tp % units == 0:
        shared = rank * units // tp
        return shared, shared + 1
    raise ValueError(f"{units} units cannot be divided among {tp} ranks")


def units_per_rank(units: int, tp: int) -> int:
    """Number of `units` that each of `tp` ranks holds; at least one."""
    first, last = unit_range(units, tp, 0)
    return last - first
