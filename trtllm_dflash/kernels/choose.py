"""The choice of tokens from logits."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


ArgmaxParams = structure(
    "dflash_argmax_params",
    ints="dtype rows size",
    pointers="logits ids best",
    longs="row_stride",
    pointers_="shaped is_shaped",
)


def argmax(logits: Tensor, shaped: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Finds each row's largest logit of [B, R, V], as FP32, and its id, the lowest among equals: [B, R] each.

    Args:
        shaped: FP32 logits, as many, and which rows are theirs: [B * R] int32. See `shape_changed_logits`.
    """
    check(logits.dtype in DTYPES and logits.is_contiguous(), "argmax of contiguous logits")
    ids = torch.empty(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    best = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    params = ArgmaxParams(
        dtype=DTYPES[logits.dtype],
        rows=ids.numel(),
        size=logits.shape[-1],
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        best=best.data_ptr(),
        row_stride=logits.shape[-1],
        shaped=None if shaped is None else shaped[0].data_ptr(),
        is_shaped=None if shaped is None else shaped[1].data_ptr(),
    )
    run("dflash_argmax", params, stream())
    return best, ids
