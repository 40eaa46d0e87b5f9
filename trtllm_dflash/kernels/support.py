"""The models and GPUs that the kernels support; answered without loading them."""

from collections.abc import Iterable

import torch

from trtllm_dflash.kernels.append import takes_rotary
from trtllm_dflash.kernels.checks import ALL_HEAD_SIZES, HALVES, HEAD_SIZES

#: Compute capability of the oldest GPUs that they are for: they wait for each other by instructions of Hopper's.
OLDEST_GPU = (9, 0)
#: Of those that compute attention from heads of all sizes, by instructions that no other GPUs have.
HOPPER = (9, 0)
#: KB of shared memory that a block can have: on Hopper and SM100 to SM110, and on others of ours (SM120), which have
#: less. From the CUDA programming guide's table of compute capabilities.
_LARGE_MAJORS, _LARGE_KB, _SMALL_KB = (9, 10, 11), 227, 99


def why_unsupported(
    dtype: torch.dtype,
    head_sizes: Iterable[int],
    capability: tuple[int, int],
    kv: str | None = None,
    rotated: Iterable[tuple[int, int]] = (),
) -> str | None:
    """Explains why a model of this type and head sizes is left to torch on a GPU; None: the kernels compute it.

    Args:
        kv: the caches' type, where that is another.
        rotated: numbers of a head that RoPE rotates, and the head's size.
    """
    if dtype not in HALVES:
        return f"our CUDA kernels compute in BF16 and FP16, not in {str(dtype).removeprefix('torch.')}"
    known = " and ".join(map(str, HEAD_SIZES))
    for size in head_sizes:
        if size not in ALL_HEAD_SIZES:
            return f"our CUDA kernels have heads of {known}, not of {size}"
        if size not in HEAD_SIZES and capability != HOPPER:
            own = gpu_name(capability)
            return f"our CUDA kernels have heads of {known} on {own}, of {size} on {gpu_name(HOPPER)} alone"
        if size not in HEAD_SIZES and kv is not None:
            return f"our CUDA kernels have {kv} caches for heads of {known}, not of {size}"
    for rotary, size in rotated:
        if not takes_rotary(rotary, size):
            return f"our CUDA kernels have no RoPE of {rotary} numbers of {size}"
    if capability < OLDEST_GPU:
        return f"our CUDA kernels are for {gpu_name(OLDEST_GPU)} and later, not for {gpu_name(capability)}"
    return None


def shared_bytes(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block can have on a GPU that the kernels are for."""
    return 1024 * (_LARGE_KB if capability[0] in _LARGE_MAJORS else _SMALL_KB)


def gpu_name(capability: tuple[int, int]) -> str:
    """Spells a compute capability as NVIDIA does: SM90."""
    return f"SM{capability[0]}{capability[1]}"
