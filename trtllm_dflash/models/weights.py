"""What an engine's tensors are made of: which checkpoint tensors, joined how, and which part of them a rank holds."""

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How tensor parallelism divides a checkpoint tensor."""

    WHOLE = "every rank holds all of it"
    ROWS = "ranks hold runs of its first dimension (column-parallel: output features)"
    COLUMNS = "ranks hold runs of its second dimension (row-parallel: input features)"
    FIRST_RANK = "rank 0 alone holds it (a bias added once, before the all-reduce)"


class WeightPrecision(Enum):
    """How an engine stores a weight's numbers."""

    ENGINE = "in the engine's own type"
    FP8 = "a matrix as E4M3, with one FP32 scale a row of what the rank holds: `NAME.scale` beside `NAME.weight`"


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
    def scale_name(self) -> str:
        """The tensor that holds its scales, where it has any."""
        return self.name.removesuffix(".weight") + ".scale"

    def shape(self, tp: int, rank: int) -> tuple[int, ...]:
        """What `rank` of `tp` holds of it (of a tensor that rank 0 alone holds: what that one does)."""
        shapes = [part.held(tp, rank) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


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
