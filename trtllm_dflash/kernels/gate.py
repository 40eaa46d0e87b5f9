"""Rows times the sigmoid of their gates."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, address, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


GateParams = structure(
    "dflash_gate_params", ints="dtype rows size gates_of_row", pointers="x gates residual out", longs="gates_row_stride"
)


def takes_gate(x: Tensor, gates: Tensor) -> bool:
    """Whether `gate` takes rows x [B, N, F] and gates [B, N, F] or [B, N, 1]; those of one slot follow each other."""
    width = gates.shape[-1]
    is_right = x.dtype in HALVES and gates.dtype == x.dtype and x.is_contiguous() and gates.dim() == 3
    if not is_right or x.shape[-1] % 8 or width not in (1, x.shape[-1]):
        return False
    slots, rows, _ = gates.shape
    is_flat = slots == 1 or gates.stride(0) == rows * gates.stride(1)
    is_aligned = width == 1 or (gates.stride(1) % 8 == 0 and gates.data_ptr() % 16 == 0)
    return is_flat and is_aligned and (width == 1 or gates.stride(2) == 1)


def gate(x: Tensor, gates: Tensor, residual: Tensor | None = None) -> Tensor:
    """Multiplies rows x [B, N, F] by sigmoid(gates), [B, N, F] or [B, N, 1]; see `takes_gate`.

    Args:
        residual: [B, N, F] contiguous, of x's type, added to what is rounded by then.
    """
    check(takes_gate(x, gates), f"rows {tuple(x.shape)} of {x.dtype}, gates {tuple(gates.shape)} of {gates.dtype}")
    if residual is not None:
        is_right = residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
        check(is_right, f"a residual {tuple(residual.shape)} {residual.dtype}")
    out = torch.empty_like(x)
    size = x.shape[-1]
    params = GateParams(
        dtype=DTYPES[x.dtype],
        rows=x.numel() // size,
        size=size,
        gates_of_row=gates.shape[-1],
        x=x.data_ptr(),
        gates=gates.data_ptr(),
        residual=address(residual),
        out=out.data_ptr(),
        gates_row_stride=gates.stride(1),
    )
    run("dflash_gate", params, stream())
    return out
