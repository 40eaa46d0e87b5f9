"""NVFP4, and MXFP4 as NVFP4.

NVFP4: E2M1 numbers (see `ops.mxfp4`), an E4M3 scale for each 16 of them, and one FP32 scale for a whole tensor. An E4M3
scale holds the powers of two from 2^-9 to 2^8, so 18 neighbouring exponents of MXFP4 are the same numbers with another
name. The tensor's scale says which 18: those that keep most blocks. A block outside them is still exact where its
numbers, doubled or halved so that its scale comes inside, are E2M1 numbers; else it is rounded, and counted.
"""

from dataclasses import dataclass

import torch

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.ops.formats import E8M0_NAN, E8M0_ONE
from trtllm_dflash.ops.mxfp4 import E2M1
from trtllm_dflash.ops.transcoded import Transcoded

Tensor = torch.Tensor

#: The powers of two that E4M3 holds.
LEAST, MOST = -9, 8
#: Numbers that share a scale.
_BLOCK = 16
#: The tensor's scale is an FP32 number that is not subnormal.
_FP32_POWERS = (-126, 127)


@dataclass(frozen=True)
class NVFP4:
    """A tensor [..., I]. Its numbers are E2M1 times the block's scale times the tensor's."""

    packed: Tensor  # [..., I / 2] uint8: two numbers a byte, the even one in the low half
    scales: Tensor  # [..., I / 16] float8_e4m3fn
    scale: Tensor  # [] float32


def from_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[NVFP4, Transcoded]:
    """Converts MXFP4's blocks [..., n, 16] and scales [..., n], both uint8, to NVFP4 [..., n * 32]; counts losses.

    Raises:
        CheckpointError: a scale is not a number.
    """
    if bool((scales == E8M0_NAN).any()):
        raise CheckpointError("an MXFP4 scale is not a number: the checkpoint is damaged")
    is_zero = (blocks & 0x77 == 0).all(dim=-1)
    exponents = torch.where(is_zero, E8M0_ONE, scales.int()) - E8M0_ONE
    power = _tensor_power(exponents[~is_zero])
    wanted = torch.where(is_zero, 0, exponents - power)  # [..., n]
    held = wanted.clamp(LEAST, MOST)
    packed, outside = blocks, wanted != held
    rounded, largest_error = 0, 0.0
    if bool(outside.any()):
        coded, errors = _shifted(blocks[outside], (wanted - held)[outside])
        packed = blocks.clone()
        packed[outside] = coded
        rounded = int((errors > 0).sum())
        largest_error = float((errors * torch.exp2((held + power)[outside].double())).max())
    block_scales = torch.exp2(held.float()).to(torch.float8_e4m3fn).repeat_interleave(2, dim=-1)
    converted = NVFP4(packed.flatten(-2), block_scales, torch.tensor(2.0**power))
    return converted, Transcoded(exponents.numel(), rounded, largest_error)


def rounded_to_nvfp4(numbers: Tensor) -> Tensor:
    """Rounds a tensor [..., I] to NVFP4, without calibration: FP32 [..., I].

    The tensor's scale lets the largest number be 6 times the largest E4M3 scale; a block's lets its own largest be 6,
    but for the scale's rounding.
    """
    blocks = numbers.float().unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True) / E2M1[7]
    e4m3 = torch.finfo(torch.float8_e4m3fn)
    scale = (largest.amax() / e4m3.max).clamp(min=torch.finfo(torch.float32).tiny)
    by = (largest / scale).clamp(max=e4m3.max).to(torch.float8_e4m3fn).float() * scale
    magnitudes = torch.tensor(E2M1[:8], device=blocks.device)
    ratios = torch.where(by > 0, blocks.abs() / by, 0)
    index = torch.bucketize(ratios, (magnitudes[1:] + magnitudes[:-1]) / 2)  # of two as near, the one nearer to zero
    rounded: Tensor = magnitudes[index] * by * blocks.sign()
    return rounded.flatten(-2)


def _tensor_power(exponents: Tensor) -> int:
    """Chooses the power of two of the tensor's scale that most exponents fit E4M3 with, the highest among equals."""
    if not len(exponents):
        return 0
    least, most = int(exponents.min()), int(exponents.max())
    counts = torch.bincount(exponents.flatten() - least, minlength=most - least + 1)
    width = MOST - LEAST + 1
    below = torch.cat([torch.zeros(width, dtype=torch.int64), counts.cumsum(0)])
    inside = below[width:] - below[:-width]  # [most - least + 1]: of those from e - 17 to e, for e from least on
    highest = least + len(inside) - 1 - int(inside.flip(0).argmax())
    return min(max(highest - MOST, _FP32_POWERS[0]), _FP32_POWERS[1])


def _shifted(blocks: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies blocks [m, 16] by 2^shifts [m], rounded to E2M1; also returns the largest error of each, [m]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1)  # [m, 16, 2]
    magnitudes = torch.tensor(E2M1[:8], dtype=torch.float64)  # in which every power of two of MXFP4 is at home
    exact = magnitudes[(codes & 7).long()] * torch.exp2(shifts.double())[:, None, None]
    nearest = (exact[..., None] - magnitudes).abs().argmin(dim=-1)  # of two as near, the one nearer to zero
    codes = (codes & 8) | nearest.to(torch.uint8)
    return codes[..., 0] | codes[..., 1] << 4, (exact - magnitudes[nearest]).abs().amax(dim=(1, 2))
