"""Activations; on the CPU a number becomes what it becomes alone, to the bit.

There all are made from `exp`: torch's own functions have other digits where a thread's last few numbers are computed
singly, so that a row would depend on how many there are.
"""

import math

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Computes x * sigmoid(alpha * x)."""
    if x.is_cuda:
        return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)
    wide = x.float()
    scaled = wide.neg() if alpha == 1 else wide * -alpha
    return wide.div(scaled.exp_().add_(1)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Computes GELU by its form with tanh: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2."""
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    # (1 + tanh(y)) / 2 is sigmoid(2 y).
    inner = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(-2 * math.sqrt(2 / math.pi))
    return wide.div(inner.exp_().add_(1)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Computes 1 / (1 + exp(-x)) of FP32."""
    if x.is_cuda:
        return x.sigmoid()
    below = x.neg().exp_().add_(1)
    return torch.ones_like(below).div_(below)


def tanh(x: Tensor) -> Tensor:
    """Computes tanh of FP32, to about 1e-7 of 1."""
    return x.tanh() if x.is_cuda else sigmoid(2 * x).mul_(2).sub_(1)
