"""The models and GPUs that the kernels support; answered without loading them."""

from collections.abc import Iterable

import torch

from trtllm_dflash.kernels.checks import HALVES, HEAD_SIZES

#: Compute capability of the oldest GPUs that they are for: they wait for each other by instructions of Hopper's.
OLDEST_GPU = (9, 0)


def why_unsupported(dtype: torch.dtype, head_sizes: Iterable[int], capability: tuple[int, int]) -> str | None:
    """Explains why a model of this type and head sizes is left to torch on a GPU; None: the kernels compute it."""
    if dtype not in HALVES:
        return f"our CUDA kernels compute in BF16 and FP16, not in {str(dtype).removeprefix('torch.')}"
    for size in head_sizes:
        if size not in HEAD_SIZES:
            return f"our CUDA kernels have heads of {' and '.join(map(str, HEAD_SIZES))}, not of {size}"
    if capability < OLDEST_GPU:
        return f"our CUDA kernels are for {gpu_name(OLDEST_GPU)} and later, not for {gpu_name(capability)}"
    return None


def gpu_name(capability: tuple[int, int]) -> str:
    """Spells a compute capability as NVIDIA does: SM90."""
    return f"SM{capability[0]}{capability[1]}"
