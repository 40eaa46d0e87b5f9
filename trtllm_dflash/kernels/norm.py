"""RMSNorm of rows, gates of rows by SiLU or GELU, and caps of logits."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, address, check, check_rows
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


RmsNormParams = structure(
    "dflash_rms_norm_params",
    ints="dtype slots rows size is_weight_wide parts",
    floats="eps",
    pointers="x residual weight sum out",
    longs="x_slot_stride x_row_stride",
)


AddNormedParams = structure(
    "dflash_add_normed_params",
    ints="dtype rows size is_weight_wide",
    floats="eps scale",
    pointers="x weight residual factor out",
)


SwigluParams = structure("dflash_swiglu_params", ints="dtype rows size gelu", pointers="x out")


CapParams = structure("dflash_cap_params", ints="dtype", floats="cap", longs="count", pointers="x out")


def takes_norm(x: Tensor) -> bool:
    """Whether `rms_norm` norms rows x."""
    return x.dtype in HALVES and x.dim() == 3 and x.stride(2) == 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm of x [B, N, H], read by its strides: [B, N, H]. H is a multiple of 8 and at most 32,768.

    Args:
        weight: [H], of x's type, or in FP32: then rows are rounded once, behind it.
    """
    return _rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes x + y, and that sum normed; [B, N, H] each. Arguments as in `rms_norm`."""
    check(y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous(), "what is added must have x's shape")
    return _rms_norm(x, y, weight, eps)


def add_parts_norm(x: Tensor, parts: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes what `add_rms_norm` does of the sum of parts [1 to 4, B, N, H] in FP32, rounded to x's type."""
    is_right = parts.dtype == torch.float32 and 1 <= len(parts) <= 4 and parts.shape[1:] == x.shape
    check(is_right and parts.is_contiguous(), "parts must be FP32 and have x's shape, at most four")
    return _rms_norm(x, parts, weight, eps)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    slots, rows, size = x.shape
    check(x.dtype in HALVES and weight.dtype in (x.dtype, torch.float32), f"norm of {x.dtype} by {weight.dtype}")
    check(size % 8 == 0 and size <= 1 << 15 and weight.shape == (size,), f"norm of {size} numbers")
    check_rows(x, slots, size, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else x
    params = RmsNormParams(
        dtype=DTYPES[x.dtype],
        slots=slots,
        rows=rows,
        size=size,
        is_weight_wide=weight.dtype == torch.float32,
        parts=0 if residual is None or residual.dim() == 3 else len(residual),
        eps=eps,
        x=x.data_ptr(),
        residual=address(residual),
        weight=weight.data_ptr(),
        sum=total.data_ptr() if residual is not None else None,
        out=out.data_ptr(),
        x_slot_stride=x.stride(0),
        x_row_stride=x.stride(1),
    )
    run("dflash_rms_norm", params, stream())
    return total, out


def add_normed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Computes (residual + RMSNorm of x) * factor * scale of rows [..., H], rounded after each; H as in `rms_norm`.

    Args:
        weight: as in `rms_norm`.
        residual: of x's shape; None: nothing is added.
        factor: [1]; None: 1.
    """
    size = x.shape[-1]
    is_right = x.dtype in HALVES and x.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
    check(is_right and size % 8 == 0 and size <= 1 << 15 and weight.shape == (size,), f"norm of {size} {x.dtype}")
    if residual is not None:
        fits = residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
        check(fits, f"a residual {tuple(residual.shape)} {residual.dtype}")
    check(factor is None or (factor.numel() == 1 and factor.dtype == x.dtype), "a factor is one number of x's type")
    out = torch.empty_like(x)
    params = AddNormedParams(
        dtype=DTYPES[x.dtype],
        rows=x.numel() // size,
        size=size,
        is_weight_wide=weight.dtype == torch.float32,
        eps=eps,
        scale=scale,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        residual=address(residual),
        factor=address(factor),
        out=out.data_ptr(),
    )
    run("dflash_add_normed", params, stream())
    return out


def takes_cap(logits: Tensor) -> bool:
    """Whether `cap` takes such logits."""
    is_whole = logits.is_contiguous() and logits.numel() % 8 == 0 and logits.data_ptr() % 16 == 0
    return logits.dtype in DTYPES and logits.is_floating_point() and is_whole


def cap(logits: Tensor, most: float) -> Tensor:
    """Computes most * tanh(logits / most), in FP32 inside; see `takes_cap`."""
    check(takes_cap(logits), f"logits {tuple(logits.shape)} {logits.dtype}")
    out = torch.empty_like(logits)
    params = CapParams(
        dtype=DTYPES[logits.dtype], cap=most, count=logits.numel(), x=logits.data_ptr(), out=out.data_ptr()
    )
    run("dflash_cap", params, stream())
    return out


def swiglu(x: Tensor, gelu: bool = False) -> Tensor:
    """Computes silu(gate) * up [..., F] of x [..., 2F], which holds gate, then up. F is a multiple of 8.

    Args:
        gelu: gates go through GELU by its form with tanh, not through SiLU.
    """
    size = x.shape[-1] // 2
    check(x.dtype in HALVES and x.is_contiguous() and size % 8 == 0, "gates of contiguous 16-bit rows, F by 8")
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    rows = x.numel() // x.shape[-1]
    params = SwigluParams(
        dtype=DTYPES[x.dtype], rows=rows, size=size, gelu=int(gelu), x=x.data_ptr(), out=out.data_ptr()
    )
    run("dflash_swiglu", params, stream())
    return out
