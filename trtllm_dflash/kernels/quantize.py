"""Rounding rows to E4M3, with a scale a row."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


QuantizeParams = structure("dflash_quantize_params", ints="dtype rows size", pointers="x out scale")


def takes_quantize(x: Tensor) -> bool:
    """Whether `quantize_rows` takes contiguous rows x [N, I]."""
    return x.dtype in HALVES and x.shape[1] % 8 == 0 and x.shape[1] <= 1 << 15


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `ops.fp8.quantize_rows` of 16-bit x [N, I] in one kernel. I is a multiple of 8 and at most 32,768."""
    rows, size = x.shape
    check(takes_quantize(x) and x.is_contiguous(), f"rows of {size} {x.dtype}")
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    params = QuantizeParams(
        dtype=DTYPES[x.dtype], rows=rows, size=size, x=x.data_ptr(), out=out.data_ptr(), scale=scale.data_ptr()
    )
    run("dflash_quantize", params, stream())
    return out, scale
