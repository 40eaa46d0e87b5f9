"""`TorchOps` of models with gated delta nets on a GPU: the nets, and what others have too, by our kernels."""

from collections.abc import Iterable, Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_slots import CudaSlotOps
from trtllm_dflash.ops.delta_states import PARTS, DeltaStates, Run

Tensor = torch.Tensor


class CudaStates(DeltaStates):
    """The states of all slots on a GPU, where it is noted as well where they stand: the host need not know.

    A net's state is transposed there, [Hv, D values, D keys].

    Args: as `DeltaStates`.

    Attributes:
        lengths: [slots and copies] int32, the position in front of which a slot's states stand.
        counters: [slots and copies, Hk] int32 zeros; see `kernels.DeltaNet`.
    """

    def __init__(self, tensors: dict[str, Tensor], pending: int) -> None:
        super().__init__(tensors, pending)
        keys = next(tensor for name, tensor in tensors.items() if name.endswith("keys"))
        slots, heads = keys.shape[0], keys.shape[2]
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=keys.device)
        self.counters = torch.zeros(slots, heads, dtype=torch.int32, device=keys.device)
        self._size = keys.shape[3]

    def accepted(self, run: Run) -> int:
        raise NotImplementedError("the kernels count the rows that were accepted")

    def finish(self, runs: Iterable[Run]) -> None:
        raise NotImplementedError("a step's segments lie on the device: see `advance`")

    def compute(
        self,
        layer: DeltaLayer,
        weights: Mapping[str, Tensor],
        x: Tensor,
        gates: Tensor,
        segments: Tensor,
        most_rows: int,
    ) -> Tensor:
        """Computes a layer's net; arguments as in `kernels.DeltaNet`."""
        net = delta_net(layer, weights, self)
        return net(x, gates, segments, self.lengths, self.counters, most_rows, self.keeps(len(x), segments))

    def advance(self, segments: Tensor, rows: int) -> None:
        """Notes where the states stand after a step of so many rows of segments [G, 4], once all nets have run."""
        kernels.advance_states(self.lengths, segments, self.pending, self.keeps(rows, segments))

    def keeps(self, rows: int, segments: Tensor) -> int:
        """Counts the rows beside a state up to which a step of so many leaves it unwritten; 0: it has none to leave."""
        return min(self.pending, kernels.MOST_KEPT) if kernels.joins_rows(rows, len(segments), self._size) else 0

    def copy(self, source: int, target: int) -> None:
        for tensor in (*self.tensors.values(), self.lengths):
            tensor[target].copy_(tensor[source])

    def place(self, slot: int, position: int, beside: int) -> None:
        self.lengths[slot].fill_(position)


class CudaStateOps(CudaSlotOps):
    """Computes a step of [slots, rows] of such a model. A call may be captured into a CUDA graph.

    Args: as `TorchOps`, but
        segments: [B, 4] int32 of each slot, its start, first row and count; see `slot_segments`.
        rows: that each slot has a place for.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None,
        states: CudaStates,
        segments: Tensor,
        rows: int,
    ) -> None:
        super().__init__(weights, caches, communicator)
        self._cuda_states = states
        self._segments, self._rows = segments, rows * len(segments)

    def gated_delta(self, layer: DeltaLayer, x: Tensor, gates: Tensor, start: Tensor) -> Tensor:
        rows = x.flatten(0, 1), gates.flatten(0, 1)
        out = self._cuda_states.compute(layer, self.weights, *rows, self._segments, x.shape[1])
        return out.view(*x.shape[:2], -1)

    def advance(self) -> None:
        self._cuda_states.advance(self._segments, self._rows)


def delta_net(layer: DeltaLayer, weights: Mapping[str, Tensor], states: CudaStates) -> kernels.DeltaNet:
    """Makes the kernels' gated delta net of a layer."""
    names = "conv1d.weight", "A_log", "dt_bias", "norm.weight"
    conv, rates, bias, norm = (weights[layer.prefix + name] for name in names)
    parts = [states.tensors[layer.prefix + part] for part in PARTS]
    return kernels.DeltaNet(conv, rates, bias, norm, layer.norm_eps, *parts)


def slot_segments(first_slot: int, start: Tensor, row_count: Tensor, rows: int) -> Tensor:
    """Makes the segments [B, 4] of slots from first_slot on, which begin at start [B] and have row_count [B] rows.

    Args:
        rows: that each slot has a place for.
    """
    index = torch.arange(len(start), dtype=torch.int32, device=start.device)
    return torch.stack([index + first_slot, start, index * rows, row_count], dim=1)
