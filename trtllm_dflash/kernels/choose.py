"""The choice of tokens from logits, and how many drafts it accepts."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


ArgmaxParams = structure("dflash_argmax_params", ints="dtype rows size", pointers="logits ids best", longs="row_stride")


AcceptParams = structure(
    "dflash_accept_params",
    ints="slots rows logit_row_count",
    pointers="token_ids target_ids logit_rows row_count start accepted committed bonus next_start segments logit_first",
)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Finds each row's largest logit of [B, R, V], as FP32, and its id, the lowest among equals: [B, R] each."""
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
    )
    run("dflash_argmax", params, stream())
    return best, ids


def accept(
    token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `Ops.accept`: accepted, committed and bonus, int32 [B] each."""
    slots, rows = token_ids.shape
    check(target_ids.shape == logit_rows.shape, "one choice a logit row")
    inputs = {"token_ids": token_ids, "target_ids": target_ids, "logit_rows": logit_rows, "row_count": row_count}
    for name, x in inputs.items():
        check(x.dtype == torch.int32 and x.is_contiguous() and x.shape[0] == slots, f"{name} must be int32")
    out = torch.empty(3, slots, dtype=torch.int32, device=token_ids.device)
    addresses = {name: x.data_ptr() for name, x in inputs.items()}
    params = AcceptParams(
        slots=slots,
        rows=rows,
        logit_row_count=target_ids.shape[1],
        accepted=out[0].data_ptr(),
        committed=out[1].data_ptr(),
        bonus=out[2].data_ptr(),
        **addresses,
    )
    run("dflash_accept", params, stream())
    return out[0], out[1], out[2]
