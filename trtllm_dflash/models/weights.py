"""What an engine's tensors are made of: which checkpoint tensors, joined how, and which part of them a rank holds."""

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How tensor parallelism divides a checkpoint tensor."""

    WHOLE = "every rank holds all of it"
    ROWS = "ranks hold runs of its first dimension (column-parallel: output features)"
    COLUMNS = "ranks hold runs of its second dimension (row-parallel: input features)"
    FIRST_RANK = "rank 0 alone holds it (a bias added once, before the all-reduce)"


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


@dataclass(frozen=True)
class Weight:
    """An engine tensor `name`: its parts, joined along the first dimension after slicing."""

    name: str
    parts: tuple[Part, ...]


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
