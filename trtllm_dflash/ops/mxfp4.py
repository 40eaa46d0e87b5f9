"""MXFP4 (OCP Microscaling Formats 1.0): E2M1 numbers, and one power of two (E8M0) for each 32 of them.

A block's 32 numbers are 16 bytes, the even ones in the low halves. A scale byte s stands for 2^(s - 127), 255 for NaN.
"""

import functools

import torch
import torch.nn.functional as F

from trtllm_dflash.ops.formats import E8M0_NAN, E8M0_ONE, MXFP4_BLOCK_BYTES

Tensor = torch.Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The number of each half byte: three bits of magnitude, and the sign above them.
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the numbers [..., n * 32] of uint8 blocks [..., n, 16] and scales [..., n]. Never waits for the device.

    Exact in FP32 and BF16, whose exponents reach as far as the scales do; what FP16 cannot hold becomes infinite or 0.
    """
    _, powers = _tables(blocks.device)
    return (unpack(blocks) * F.embedding(scales.int(), powers)).flatten(-2).to(dtype)


# Of a word of eight numbers: by how much the pairs (1, 5) and (2, 6) are rotated from where BF16 has a number's sign,
# exponent's low bits and fraction, in each half; and these parts of (3, 7), with their shifts. `mxfp4.cuh` undoes both.
_ROTATIONS = (10, 13)
_PARTS = ((0x80008000, 12), (0x01800180, 7), (0x00400040, 2))


def interleave(blocks: Tensor) -> Tensor:
    """Orders the bits of blocks [..., n, 16] as our kernels take them beside BF16: int32 [..., n * 4].

    Each of a word's four pairs of numbers is then one to three operations away from a pair of BF16 numbers.
    """
    words = blocks.flatten(-2).contiguous().view(torch.int32)
    pairs = []
    for shift in (0, 4, 8, 12):
        nibbles = words >> shift & 0x000F000F
        pairs.append((nibbles & 0x00080008) << 12 | (nibbles & 0x00070007) << 6)
    out = pairs[0]
    for pair, by in zip(pairs[1:3], _ROTATIONS, strict=True):
        out = out | _rotate_left(pair, 32 - by)
    for mask, by in _PARTS:
        out = out | _shift_right(pairs[3] & _signed(mask), by)
    return out


def in_order(words: Tensor) -> Tensor:
    """Undoes `interleave`: uint8 [..., n, 16] of int32 [..., n * 4]."""
    pairs = [words, *(_rotate_left(words, by) for by in _ROTATIONS), torch.zeros_like(words)]
    for mask, by in _PARTS:
        pairs[3] = pairs[3] | words << by & _signed(mask)
    out = torch.zeros_like(words)
    for shift, pair in zip((0, 4, 8, 12), pairs, strict=True):
        nibbles = _shift_right(pair, 12) & 0x00080008 | _shift_right(pair, 6) & 0x00070007
        out = out | nibbles << shift
    return out.view(torch.uint8).view(*words.shape[:-1], -1, MXFP4_BLOCK_BYTES)


def _rotate_left(words: Tensor, by: int) -> Tensor:
    return _shift_right(words, 32 - by) | words << by


def _shift_right(words: Tensor, by: int) -> Tensor:
    """Shifts int32 words without their sign."""
    return words >> by & (1 << 32 - by) - 1


def _signed(mask: int) -> int:
    """The int32 of a mask's bits."""
    return mask - (mask >> 31 << 32)


def unpack(packed: Tensor) -> Tensor:
    """Unpacks the E2M1 numbers in bytes [..., n], before any scale: FP32 [..., 2n]. Never waits for the device."""
    pairs, _ = _tables(packed.device)
    return F.embedding(packed.int(), pairs).flatten(-2)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables of the two numbers of each byte [256, 2], and of each scale's power of two [256, 1]; FP32, copied once."""
    pairs = [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)]
    powers = [[2.0 ** (scale - E8M0_ONE)] for scale in range(E8M0_NAN)] + [[float("nan")]]
    return torch.tensor(pairs, device=device), torch.tensor(powers, device=device)
