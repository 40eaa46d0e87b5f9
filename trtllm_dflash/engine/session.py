"""What runs a step: the interface that the runtime knows, whatever computes behind it."""

from abc import ABC, abstractmethod

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs


class Session(ABC):
    """One engine, loaded: its weights, and the K/V caches of `config.max_batch` slots."""

    config: EngineConfig

    @abstractmethod
    def step(
        self, inputs: StepInputs[torch.Tensor], drafting: Drafting, first_slot: int = 0
    ) -> StepOutputs[torch.Tensor]:
        """Runs one step on the slots from first_slot on, as many as the inputs' B.

        Inputs lie on the CPU; so do the outputs. The slots' caches are updated in place.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the session holds, and lets the other ranks go."""
