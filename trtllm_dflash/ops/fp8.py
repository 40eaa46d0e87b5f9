"""FP8 (E4M3) numbers and their FP32 scales: of weights, and of the rows that are multiplied by them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from trtllm_dflash.ops.formats import FP8_BLOCK

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn

_LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A linear's weight as E4M3, with one scale a row or one a block of 128 by 128; or a stack of E experts' [E, ...].

    What a checkpoint scales as a whole has the same scale in all of its rows: tensors of several scales are fused here.
    """

    values: Tensor  # [O, I] E4M3
    scale: Tensor  # FP32 [O], or by block [ceil(O / 128), ceil(I / 128)]
    input_scale: Tensor | None = None  # FP32 []: what calibration found that rows should be divided by before rounding

    @property
    def by_block(self) -> bool:
        """Whether each block of 128 by 128 has a scale, not each row."""
        return self.scale.ndim == self.values.ndim

    def of(self, experts: Tensor | int) -> "Fp8Weight":
        """Takes the matrices of `experts` [...] from a stack: [..., O, I]."""
        return Fp8Weight(taken(self.values, experts), self.scale[experts], self.input_scale)

    def dequantize(self) -> Tensor:
        """Multiplies the numbers by their scales: FP32 [..., O, I]."""
        scale = self.scale[..., None]
        if self.by_block:
            outputs, inputs = self.values.shape[-2:]
            scale = self.scale.repeat_interleave(FP8_BLOCK, -2)[..., :outputs, :]
            scale = scale.repeat_interleave(FP8_BLOCK, -1)[..., :inputs]
        return self.values.float() * scale


def taken(x: Tensor, experts: Tensor | int) -> Tensor:
    """Takes x [E, ...] at `experts`, of any type of one byte: not every device indexes FP8."""
    return x.view(torch.uint8)[experts].view(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x [N, I] to E4M3 [N, I] and FP32 scales [N, 1], whose product is near x. Never waits for the device."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    # 1e-12 + largest / 448 in one kernel: on a GPU each launch counts. A row of zeros must not divide by zero.
    scale = torch.rsub(largest, 1e-12, alpha=-1 / _LARGEST)
    return (x / scale).to(FP8), scale


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x [N, I] likewise, with a scale for each 128 numbers of a row: [N, I], and FP32 [I / 128, N]."""
    values, scale = quantize_rows(x.reshape(-1, FP8_BLOCK))
    return values.view(x.shape), scale.view(x.shape[0], -1).t().contiguous()


def dequantize_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Multiplies E4M3 x [N, I] by scales [N] or [N, 1]: FP32 [N, I]."""
    return x.float() * scale.view(-1, 1)


def quantize_cache_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Rounds x / scale [] of any shape to E4M3: to nearest, ties to even, and saturated; NaN stays."""
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8)


def dequantize_cache_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies E4M3 rows of a cache by their scale [], rounded to `dtype`."""
    return (x.float() * scale).to(dtype)


def multiplies(device: torch.device, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether `TorchOps` multiplies rows of `dtype` by an FP8 weight as it is stored, on that device.

    GPUs from compute capability 8.9 on do by one with a scale a row; by one with a scale a block: `multiplies_blocks`.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if not weight.by_block:
        return capability >= (8, 9)
    return multiplies_blocks(capability, tuple(weight.values.shape), dtype)


def multiplies_blocks(capability: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether rows of `dtype` are multiplied by weights [O, I] with a scale a block as they are stored, on such a GPU.

    Hopper GPUs do, of rows in 16 bits, where there are whole blocks, of a row four at a time; with torch 2.9 and later,
    made for CUDA 12.9 and later.
    """
    outputs, inputs = shape[-2:]
    is_whole = outputs % FP8_BLOCK == 0 and inputs % (4 * FP8_BLOCK) == 0
    return capability == (9, 0) and is_whole and dtype in (torch.bfloat16, torch.float16) and _takes_blocks()


@cache
def _takes_blocks() -> bool:
    """Whether this torch hands scales of blocks to cuBLAS. One without CUDA counts for one that does, elsewhere."""
    versions = torch.__version__, torch.version.cuda or "12.9"
    release, cuda = (tuple(int(part) for part in version.split("+")[0].split(".")[:2]) for version in versions)
    return release >= (2, 9) and cuda >= (12, 9)


def scaled_product(x: Tensor, weight: Fp8Weight, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Multiplies x [N, I] by a weight that `multiplies` allows, transposed: [N, O] in x's type.

    Args:
        quantize: `quantize_rows`, or `quantize_blocks` where the weight has a scale a block; or what computes that.
    """
    count = len(x)
    if weight.by_block and count % 4:  # cuBLAS takes four rows at a time
        x = F.pad(x, (0, 0, 0, -count % 4))
    return product_of_rounded(*quantize(x), weight, x.dtype)[:count]


def product_of_rounded(
    rows: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Multiplies rows [N, I], rounded as `scaled_product` rounds them, a multiple of four by a weight with blocks.

    Args:
        bias: [O], added.
    """
    if weight.by_block:
        scales = scale.t(), weight.scale.t()  # as cuBLAS reads them
        y = torch._scaled_mm(rows, weight.values.t(), *scales, out_dtype=dtype)
        return y if bias is None else y + bias
    # With a scale a row, BF16 is what every GPU gives. Fast: partial sums are not kept to FP32's last digits.
    scales = scale, weight.scale[None]
    bf16 = torch.bfloat16
    added = bias if dtype == bf16 else None
    y = torch._scaled_mm(rows, weight.values.t(), *scales, bias=added, out_dtype=bf16, use_fast_accum=True).to(dtype)
    return y if bias is None or added is not None else y + bias
