"""The number of threads that torch computes with on the CPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.engine.config import EngineConfig

SMALL_MODEL = 100_000_000  # bytes of weights


def limit_threads(config: EngineConfig) -> None:
    """Sets one thread for a small model, whose steps are too short to divide. OMP_NUM_THREADS overrides it.

    Threads that wait for one another make such steps many times slower wherever another process wants a core.
    """
    _limit(lambda: plan_memory(config).weights)


@contextmanager
def limited_threads(checkpoint: Path) -> Iterator[None]:
    """Does as `limit_threads` for the model of a checkpoint, until it is left."""
    threads = torch.get_num_threads()
    _limit(lambda: sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _limit(weights: Callable[[], int]) -> None:
    if "OMP_NUM_THREADS" not in os.environ and weights() < SMALL_MODEL:
        torch.set_num_threads(1)
