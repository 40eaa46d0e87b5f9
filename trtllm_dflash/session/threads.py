"""The number of threads that torch computes with on the CPU."""

import os

import torch

from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.engine.config import EngineConfig

SMALL_MODEL = 100_000_000  # bytes of weights


def limit_threads(config: EngineConfig) -> None:
    """Sets one thread for a small model, whose steps are too short to divide. OMP_NUM_THREADS overrides it.

    Threads that wait for one another make such steps many times slower wherever another process wants a core.
    """
    if "OMP_NUM_THREADS" not in os.environ and plan_memory(config).weights < SMALL_MODEL:
        torch.set_num_threads(1)
