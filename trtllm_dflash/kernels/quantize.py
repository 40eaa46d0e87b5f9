"""Rounding rows to E4M3, with a scale a row or one for each 128 numbers of a row."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check
from trtllm_dflash.kernels.library import run, stream, structure
from trtllm_dflash.kernels.products import FP8_BLOCK, Norm

Tensor = torch.Tensor


QuantizeParams = structure(
    "dflash_quantize_params",
    ints="dtype rows size by_block is_weight_wide",
    floats="eps",
    pointers="x norm_weight out scale",
)


def takes_quantize(x: Tensor) -> bool:
    """Whether `quantize_rows` takes contiguous rows x [N, I]."""
    return x.dtype in HALVES and x.shape[1] % 8 == 0 and x.shape[1] <= 1 << 15


def quantize_rows(x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Computes `ops.fp8.quantize_rows` of 16-bit x [N, I] in one kernel. I is a multiple of 8 and at most 32,768.

    Args:
        norm: of x first, as `rms_norm` rounds it; its weight may be FP32.
    """
    check(takes_quantize(x) and x.is_contiguous(), f"rows of {x.shape[1]} {x.dtype}")
    out, scale = _quantize(x, norm, by_block=False)
    return out, scale.view(-1, 1)


def quantize_blocks(x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Computes `ops.fp8.quantize_blocks` likewise. I is a multiple of 128."""
    check(takes_quantize(x) and x.shape[1] % FP8_BLOCK == 0 and x.is_contiguous(), f"rows of {x.shape[1]} {x.dtype}")
    return _quantize(x, norm, by_block=True)


def _quantize(x: Tensor, norm: Norm | None, by_block: bool) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    if norm is not None:
        is_right = norm.weight.shape == (size,) and norm.weight.dtype in (x.dtype, torch.float32) and not norm.adds_one
        check(is_right and norm.weight.is_contiguous(), f"a norm of {tuple(norm.weight.shape)} {norm.weight.dtype}")
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(size // FP8_BLOCK if by_block else 1, rows, dtype=torch.float32, device=x.device)
    params = QuantizeParams(
        dtype=DTYPES[x.dtype],
        rows=rows,
        size=size,
        by_block=by_block,
        is_weight_wide=norm is not None and norm.weight.dtype == torch.float32,
        eps=norm.eps if norm else 0.0,
        x=x.data_ptr(),
        norm_weight=norm.weight.data_ptr() if norm else None,
        out=out.data_ptr(),
        scale=scale.data_ptr(),
    )
    run("dflash_quantize", params, stream())
    return out, scale
