"""Norms on the CPU: a row's bits are a function of that row alone."""

from functools import cache

import torch

Tensor = torch.Tensor


def normed(x: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) over the last dimension, in FP32 inside; returns it in x's type.

    To the bit as torch's `rms_norm` on a CPU, which makes tensors of its numbers anew each time.
    """
    if x.dtype != torch.float32:
        return normed(x.float(), eps).to(x.dtype)
    mean = (x * x).sum(dim=-1, keepdim=True).div_(_scalar(x.shape[-1]))
    return x * mean.add_(_scalar(eps)).rsqrt_()


@cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
