"""Rounding rows to E4M3, with a scale a row or one for each 128 numbers of a row."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check
from trtllm_dflash.kernels.library import run, stream, structure
from trtllm_dflash.kernels.products import FP8_BLOCK

Tensor = torch.Tensor


QuantizeParams = structure("dflash_quantize_params", ints="dtype rows size by_block", pointers="x out scale")


def takes_quantize(x: Tensor) -> bool:
    """Whether `quantize_rows` takes contiguous rows x [N, I]."""
    return x.dtype in HALVES and x.shape[1] % 8 == 0 and x.shape[1] <= 1 << 15


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `ops.fp8.quantize_rows` of 16-bit x [N, I] in one kernel. I is a multiple of 8 and at most 32,768."""
    check(takes_quantize(x) and x.is_contiguous(), f"rows of {x.shape[1]} {x.dtype}")
    out, scale = _quantize(x, by_block=False)
    return out, scale.view(-1, 1)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `ops.fp8.quantize_blocks` likewise. I is a multiple of 128."""
    check(takes_quantize(x) and x.shape[1] % FP8_BLOCK == 0 and x.is_contiguous(), f"rows of {x.shape[1]} {x.dtype}")
    return _quantize(x, by_block=True)


def _quantize(x: Tensor, by_block: bool) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(size // FP8_BLOCK if by_block else 1, rows, dtype=torch.float32, device=x.device)
    params = QuantizeParams(
        dtype=DTYPES[x.dtype],
        rows=rows,
        size=size,
        by_block=by_block,
        x=x.data_ptr(),
        out=out.data_ptr(),
        scale=scale.data_ptr(),
    )
    run("dflash_quantize", params, stream())
    return out, scale
