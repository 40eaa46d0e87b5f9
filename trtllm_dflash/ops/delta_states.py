"""The states of gated delta nets: what each slot keeps, and where it stands.

A state is never rolled back. A step leaves it in front of its rows, or of the last of them where it has more than a
block, and keeps those beside it ("pending"); the next step's start says how many of them were accepted, and these are
absorbed first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trtllm_dflash.ops.base import DeltaLayer

Tensor = torch.Tensor


@dataclass(frozen=True)
class Run:
    """One slot's rows of a step: rows first..first+count-1 of batch entry `entry` of the step's x [B, N, C]."""

    slot: int
    start: int  # position of its first row
    count: int
    entry: int
    first: int


@dataclass(frozen=True)
class NetState:
    """One net's state of one slot; n rows may be pending. All but the window in FP32."""

    state: Tensor  # [Hv, Dk, Dv] in front of the pending rows
    writes: Tensor  # [n, Hv, Dv] u of each pending row
    keys: Tensor  # [n, Hk, Dk]
    decays: Tensor  # [n, Hv]
    window: Tensor  # [kernel - 1 + n, C] what goes into the convolution: rows before the pending ones, and these


#: The parts of `NetState`, as tensors of all slots are named behind a net's prefix.
PARTS = ("state", "writes", "keys", "decays", "window")


def part_shapes(layer: DeltaLayer, pending: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one slot's `NetState`, by part.

    Args:
        pending: rows at most, those of a block.
    """
    keys, values = layer.key_heads, layer.value_heads
    return {
        "state": (values, layer.key_size, layer.value_size),
        "writes": (pending, values, layer.value_size),
        "keys": (pending, keys, layer.key_size),
        "decays": (pending, values),
        "window": (layer.kernel - 1 + pending, layer.channels),
    }


def absorbed_rows(count: int, pending: int) -> int:
    """Counts the rows of a step of `count` rows that a state absorbs at once; the others stay pending."""
    return max(0, count - pending)


class DeltaStates:
    """The states of all slots, and copies of some behind them, which the host places rows in.

    Args:
        tensors: [slots and copies, ...] by `{net's prefix}{part}`; see `part_shapes`.
        pending: rows at most that a step leaves pending.

    Attributes:
        length: by slot, the position in front of which its states stand.
        rows: by slot, the pending rows behind it.
    """

    def __init__(self, tensors: dict[str, Tensor], pending: int) -> None:
        slots = len(next(iter(tensors.values())))
        self.tensors = tensors
        self.pending = pending
        self.length = [0] * slots
        self.rows = [0] * slots

    def of(self, prefix: str, slot: int) -> NetState:
        """Takes a net's state of a slot."""
        return NetState(*(self.tensors[prefix + part][slot] for part in PARTS))

    def accepted(self, run: Run) -> int:
        """Counts the pending rows of a slot that a step which begins at `run.start` follows."""
        if run.start == 0:
            return 0
        count = run.start - self.length[run.slot]
        # Never K/V rows with a foreign state: whoever places rows has made a mistake.
        assert 0 <= count <= self.rows[run.slot], (
            f"slot {run.slot}: a step at {run.start}, but its states stand at {self.length[run.slot]} "
            f"with {self.rows[run.slot]} rows behind"
        )
        return count

    def finish(self, runs: Iterable[Run]) -> None:
        """Notes where the states stand after a step, once all nets have computed it."""
        for run in runs:
            absorbed = absorbed_rows(run.count, self.pending)
            self.length[run.slot] = run.start + absorbed
            self.rows[run.slot] = run.count - absorbed

    def copy(self, source: int, target: int) -> None:
        """Copies all states of a slot over those of another, with where they stand."""
        for tensor in self.tensors.values():
            tensor[target] = tensor[source]
        self.length[target], self.rows[target] = self.length[source], self.rows[source]

    def place(self, slot: int, position: int, beside: int) -> None:
        """Lets a slot's states, whatever they hold, stand at a position: for measurements of random weights.

        Args:
            beside: accepted rows behind it.
        """
        self.length[slot], self.rows[slot] = position, beside
