"""MXFP4 (OCP Microscaling Formats 1.0): E2M1 numbers, and one power of two (E8M0) for each 32 of them.

A block's 32 numbers are 16 bytes, the even ones in the low halves. A scale byte s stands for 2^(s - 127), 255 for NaN.
"""

import functools

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

#: Numbers that share a scale, and the bytes that hold them.
BLOCK = 32
BLOCK_BYTES = BLOCK // 2
#: The scale bytes that stand for 1, and for not a number.
ONE, NAN = 127, 255

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The number of each half byte: three bits of magnitude, and the sign above them.
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the numbers [..., n * 32] of uint8 blocks [..., n, 16] and scales [..., n]. Never waits for the device.

    Exact in FP32 and BF16, whose exponents reach as far as the scales do; what FP16 cannot hold becomes infinite or 0.
    """
    _, powers = _tables(blocks.device)
    return (unpack(blocks) * F.embedding(scales.int(), powers)).flatten(-2).to(dtype)


def unpack(packed: Tensor) -> Tensor:
    """Unpacks the E2M1 numbers in bytes [..., n], before any scale: FP32 [..., 2n]. Never waits for the device."""
    pairs, _ = _tables(packed.device)
    return F.embedding(packed.int(), pairs).flatten(-2)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables of the two numbers of each byte [256, 2], and of each scale's power of two [256, 1]; FP32, copied once."""
    pairs = [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)]
    powers = [[2.0 ** (scale - ONE)] for scale in range(NAN)] + [[float("nan")]]
    return torch.tensor(pairs, device=device), torch.tensor(powers, device=device)
