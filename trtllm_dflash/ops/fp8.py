"""FP8 (E4M3) numbers with one FP32 scale a row: of a weight, and of the rows that are multiplied by it."""

import torch

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn
#: What the sides of a matrix must be multiples of, or the hardware's products cannot take it.
FP8_MULTIPLE = 16

_LARGEST = torch.finfo(FP8).max


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [N, I] as E4M3 [N, I] and FP32 scales [N, 1], whose product is near x. Nothing waits for the device."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    # 1e-12 + largest / 448 in one kernel: on a GPU each launch counts. A row of zeros must not divide by zero.
    scale = torch.rsub(largest, 1e-12, alpha=-1 / _LARGEST)
    return (x / scale).to(FP8), scale


def dequantize_rows(x: Tensor, scale: Tensor) -> Tensor:
    """FP32 numbers [N, I] of E4M3 x [N, I] and scales [N] or [N, 1]."""
    return x.float() * scale.view(-1, 1)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device multiplies FP8 matrices: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
