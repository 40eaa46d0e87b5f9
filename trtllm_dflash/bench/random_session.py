"""Sessions of random weights: what is measured of a shape without a checkpoint."""

import torch

from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.gpus import RESERVED, gigabytes, present_gpu
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.cost.rates import free_memory
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError
from trtllm_dflash.session.choice import find_kernels
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.ranks import World
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.threads import limit_threads
from trtllm_dflash.session.torch_backend import open_torch_session
from trtllm_dflash.session.torch_session import SlotAccept

_PAGES_AT_ONCE = 16


def check_room(config: EngineConfig, device: torch.device) -> None:
    """Checks that the engine fits the device's free memory, before any is allocated.

    Raises:
        EngineError: there is not enough.
    """
    cuda = device.type == "cuda"
    plan = plan_memory(config, present_gpu() if cuda else None)
    need = plan.total if cuda else (plan.total - plan.graphs) * config.tp
    room = free_memory(device) - (RESERVED if cuda else 0)
    if need > room:
        where = torch.cuda.get_device_name(device) if cuda else "this machine"
        raise EngineError(
            f"--shape {config.name} with {config.max_batch} slots of {config.max_seq_len} tokens needs "
            f"{gigabytes(need)}, and {where} has {gigabytes(max(room, 0))} to give: use a smaller --batch, "
            "--cache-length or --layers"
        )


def check_kernels(config: EngineConfig, device: torch.device, kernels: Kernels) -> None:
    """Checks that the CUDA kernels can be had where they are needed, before anything is allocated.

    Raises:
        EngineError: they would compute this engine, and are missing, stale or not for this GPU.
    """
    if device.type == "cuda":
        find_kernels(config, kernels, torch.cuda.get_device_capability(device))


def own_device(device: torch.device, world: World) -> torch.device:
    """Finds the GPU of a rank.

    Raises:
        EngineError: there are fewer GPUs than ranks.
    """
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if gpus < world.size:
        raise EngineError(f"--tp {world.size}: this machine has {gpus} GPUs, and each rank needs one")
    device = torch.device("cuda", world.rank)
    torch.cuda.set_device(device)  # NCCL takes the current one
    return device


def random_session(
    config: EngineConfig,
    device: torch.device,
    world: World,
    accept: SlotAccept | None = None,
    kernels: Kernels = "auto",
) -> Session:
    """Makes a rank's session with random weights; `accept` and `kernels` as in `CudaSession`.

    Raises:
        EngineError: the device's memory ran out.
    """
    if device.type == "cpu":
        limit_threads(config)
    try:
        weights = random_weights(config, world.rank, device)
        return open_torch_session(config, weights, device, world.connect(device), accept, kernels)
    except torch.OutOfMemoryError:
        raise EngineError(
            f"--shape {config.name}: the GPU's memory ran out; use a smaller --batch or --layers"
        ) from None


def fill_caches(session: Session) -> None:
    """Fills the K/V caches with random rows: zeros would draw less of the GPU's power, and be faster."""
    with torch.inference_mode():
        for cache in session.caches.values():
            for part in cache.split(_PAGES_AT_ONCE):  # not all: what is drawn may be wider than the cache
                part.copy_(torch.randn(part.shape, dtype=session.config.dtype, device=part.device))
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)  # the steps run in a stream of their own
