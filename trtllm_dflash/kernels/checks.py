"""Checks of tensors before a kernel reads them: a wrong type or stride would be read as other numbers."""

import torch

Tensor = torch.Tensor

#: Types as `dflash_kernels.h` numbers them.
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
HALVES = (torch.float16, torch.bfloat16)
#: Sizes of heads that all of attention's kernels take, and those that some of them take.
HEAD_SIZES = (64, 128)
ALL_HEAD_SIZES = (*HEAD_SIZES, 256, 512)


def check(is_met: bool, what: str) -> None:
    """Raises a ValueError with `what`, unless the condition is met."""
    if not is_met:
        raise ValueError(f"the CUDA kernels cannot take this: {what}")


def address(x: Tensor | None) -> int | None:
    """The address of x's data; None is a null pointer."""
    return None if x is None else x.data_ptr()


def check_ints(slots: int, **tensors: Tensor | None) -> None:
    """Refuses tensors, by name, that are not contiguous int32 [slots]."""
    for name, x in tensors.items():
        is_right = x is None or (x.shape == (slots,) and x.dtype == torch.int32 and x.is_contiguous())
        check(is_right, f"{name} must be int32 [{slots}]")


def check_rows(x: Tensor, slots: int, size: int, dtype: torch.dtype) -> None:
    """Refuses x unless it is [slots, N, size] of that type, in rows that 16-byte loads can read."""
    check(x.dim() == 3 and x.shape[0] == slots and x.shape[2] == size, f"rows {tuple(x.shape)}, not of {size}")
    is_aligned = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    check(x.dtype == dtype and is_aligned, f"rows must be {dtype}, contiguous and aligned to 16 bytes")
