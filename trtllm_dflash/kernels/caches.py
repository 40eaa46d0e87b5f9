"""K/V caches as the kernels take them: [B, Hkv, S, D] by strides, in the rows' type or in E4M3 with scales."""

from typing import TypeAlias

import torch

from trtllm_dflash.kernels.checks import check

Tensor = torch.Tensor

#: Of FP8 caches: the keys' and the values', FP32 [] each. None: caches have the rows' type.
Scales: TypeAlias = tuple[Tensor, Tensor] | None


def scale_addresses(scales: Scales) -> dict[str, int]:
    """Addresses of the scales, by member of a kernel's structure; empty without scales."""
    return {} if scales is None else {"key_scale": scales[0].data_ptr(), "value_scale": scales[1].data_ptr()}


def check_caches(
    keys: Tensor, values: Tensor, slots: int, size: int, dtype: torch.dtype, scales: Scales = None
) -> None:
    """Refuses caches that are not of so many slots, heads of that size, and rows of that type or scaled E4M3."""
    if scales is not None:
        check(all(x.dtype == torch.float32 and x.numel() == 1 for x in scales), "scales of caches must be FP32 []")
        dtype = torch.float8_e4m3fn
    check(keys.shape == values.shape and keys.stride() == values.stride(), "caches must be alike")
    check(keys.dtype == values.dtype == dtype, f"caches must be {dtype}")
    check(keys.shape[0] == slots and keys.shape[3] == size, f"caches {tuple(keys.shape)} for {slots} slots of {size}")
    check(keys.stride()[2:] == (size, 1), "each head's rows of a cache must be contiguous")
