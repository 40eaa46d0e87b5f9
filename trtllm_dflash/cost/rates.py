"""The most that a device does: bytes a second of a copy, operations a second of a large product."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_dflash.cost.gpus import Rates

_CUDA_COPY, _CPU_COPY = 1 << 30, 1 << 28  # bytes of each buffer: far beyond the caches
_CUDA_GEMM, _CPU_GEMM = 8192, 1024  # rows and columns of each matrix
_ROUNDS, _SECONDS = 5, 0.1  # seconds a round, at least


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures a device by copying a large buffer and multiplying large matrices; takes a second or so."""
    with torch.inference_mode():
        rates = Rates(_copy_rate(device), _gemm_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the buffers' memory is the captured graphs' now
    return rates


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _copy_rate(device: torch.device) -> float:
    size = min(_CUDA_COPY if device.type == "cuda" else _CPU_COPY, free_memory(device) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _CUDA_GEMM if device.type == "cuda" else _CPU_GEMM
    # Not zeros: those take a GPU less power, and so run at higher clocks than a model's numbers do.
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: torch.nn.functional.linear(x, weight), device)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Times one action, in seconds: the median of a few rounds of many."""

    def timed(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    timed(3)
    count = max(1, round(_SECONDS / timed(3)))
    return statistics.median(timed(count) for _ in range(_ROUNDS))
