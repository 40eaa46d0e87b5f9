"""The PyTorch session: `DraftVerifyStep` over `TorchOps`, on CPU or CUDA, alone or as one rank of several."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.communicator import Communicator, Solo
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.choice import Choice, torch_choice
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.weights import complete_weights, multiplied_weights
from trtllm_dflash.step import Accept, Drafting, DraftVerifyStep, StepInputs, StepOutputs, accept_equals

Tensor = torch.Tensor

#: Makes the rule of which drafts survive from what the device keeps of every slot.
SlotAccept: TypeAlias = Callable[[SlotTensors], Accept]


class TorchSession(Session):
    """Computes each step with TorchOps.

    Args: as in `Session`, and
        weights: the rank's stored tensors, on CPU.
        accept: makes the rule of acceptance from the slots' tensors (see `DraftVerifyStep`); None: drafts survive that
        equal the target's choices.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        communicator: Communicator | None = None,
        accept: SlotAccept | None = None,
    ) -> None:
        super().__init__(config, device, communicator or Solo())
        moved = multiplied_weights(weights, config.dtype, device)
        self.weights = complete_weights(moved, config, self.communicator.rank)
        drafter = Drafter(config.drafter) if config.drafter else None
        rule = accept_equals if accept is None else accept(self._slots)
        self._step = DraftVerifyStep(build_target(config.target), drafter, rule)

    @property
    def choice(self) -> Choice:
        return torch_choice(self.config, self.device.type, "our CUDA kernels need a GPU")

    def _free(self) -> None:
        self.weights = {}

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        caches = self._caches_of(first_slot, len(inputs.token_ids))
        return self._step(TorchOps(self.weights, caches, self.communicator), inputs, drafting)

    def _caches_of(self, first_slot: int, count: int) -> dict[str, Tensor]:
        """Takes the caches of `count` slots."""
        return {name: cache[first_slot : first_slot + count] for name, cache in self.caches.items()}
