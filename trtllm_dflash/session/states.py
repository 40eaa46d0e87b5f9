"""The states of gated delta nets that a session keeps; and those of a TensorRT plan, with where each slot's stand."""

import torch

from trtllm_dflash.cost.gpus import gigabytes
from trtllm_dflash.cost.states import checkpoint_count, copies_states, state_tensors, states_bytes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError

Tensor = torch.Tensor


def allocate_states(config: EngineConfig, device: torch.device) -> dict[str, Tensor]:
    """Allocates what every slot keeps of gated delta nets, and copies behind: [slots and copies, ...] by name.

    Raises:
        EngineError: there is no memory for it.
    """
    slots = config.max_batch + checkpoint_count(config)
    try:
        return {
            name: torch.zeros(slots, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in state_tensors(config).items()
        }
    except RuntimeError as error:  # what torch's allocators raise, on CPU and on CUDA
        raise EngineError(
            f"there is no memory for {gigabytes(states_bytes(config))} of states of {config.max_batch} slots; build "
            "with a smaller --max-batch"
        ) from error


class PlanStates:
    """The states that a plan updates; see `TensorRTDeltaNet`. Where they stand is noted beside it.

    Attributes:
        tensors: [slots and copies, ...] by the plan's names; none where the target has no nets.
        made: [slots, ...] by the same names, which a step writes; with our plugin `tensors` themselves.
        lengths: [slots and copies] int32, the position in front of which a slot's states stand.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.tensors = allocate_states(config, device)
        self.lengths = torch.zeros(config.max_batch + checkpoint_count(config), dtype=torch.int32, device=device)
        self._copied = copies_states(config)
        self.made = self.tensors
        if self._copied:
            self.made = {name: torch.empty_like(tensor[: config.max_batch]) for name, tensor in self.tensors.items()}
        self._pending = config.block_size

    def keep(self, first_slot: int, count: int) -> None:
        """Copies what a step has made of the states of `count` slots from first_slot on, where it lies elsewhere."""
        if self._copied:
            for name, tensor in self.tensors.items():
                here = slice(first_slot, first_slot + count)
                tensor[here].copy_(self.made[name][here])

    def advance(self, first_slot: int, start: Tensor, row_count: Tensor) -> None:
        """Notes where the states of slots from first_slot on stand after a step: of row_count [B] rows at start [B]."""
        lengths = self.lengths[first_slot : first_slot + len(start)]
        absorbed = (row_count - self._pending).clamp_(min=0)
        lengths.copy_(torch.where(row_count > 0, start + absorbed, lengths))

    def copy(self, source: int, target: int) -> None:
        """Copies all states of a slot over those of another, with where they stand."""
        for tensor in (*self.tensors.values(), self.lengths):
            tensor[target].copy_(tensor[source])

    def place(self, slot: int, position: int, beside: int) -> None:
        """Lets a slot's states, whatever they hold, stand at a position: for measurements of random weights."""
        self.lengths[slot].fill_(position)
