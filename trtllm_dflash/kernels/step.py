"""The begin and end of a step: the rows that slots keep, and embeddings of tokens and of blocks to draft."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check, check_ints
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


BeginStepParams = structure(
    "dflash_begin_step_params",
    ints="slots rows block step_rows",
    pointers="tokens kept_start row_count token_ids start",
)


EndStepParams = structure(
    "dflash_end_step_params",
    ints="slots block logit_rows next_rows last_start",
    pointers="row_count target_ids accepted next_start next_tokens tokens kept_start decided",
)


EmbedParams = structure(
    "dflash_embed_params", ints="dtype rows size vocabulary block mask_id", pointers="table ids out"
)


def begin_step(tokens: Tensor, start: Tensor, row_count: Tensor, rows: int, step_rows: int) -> tuple[Tensor, Tensor]:
    """Gathers the rows of a step from what slots kept: token ids [B, rows] and start [B], B of row_count [B].

    Args:
        tokens: [slots, block], of at least B slots, as start [slots].
        row_count: how many of a slot's rows are real; 0: it is idle.
        step_rows: the most that the step writes to a slot: an idle one starts that far below position 0.
    """
    slots = len(row_count)
    _check_slots(tokens, start, row_count)
    token_ids = torch.empty(slots, rows, dtype=torch.int32, device=tokens.device)
    first = torch.empty(slots, dtype=torch.int32, device=tokens.device)
    params = BeginStepParams(
        slots=slots,
        rows=rows,
        block=tokens.shape[1],
        step_rows=step_rows,
        tokens=tokens.data_ptr(),
        kept_start=start.data_ptr(),
        row_count=row_count.data_ptr(),
        token_ids=token_ids.data_ptr(),
        start=first.data_ptr(),
    )
    run("dflash_begin_step", params, stream())
    return token_ids, first


def end_step(
    tokens: Tensor,
    start: Tensor,
    row_count: Tensor,
    last_start: int,
    target_ids: Tensor,
    accepted: Tensor,
    next_start: Tensor,
    next_tokens: Tensor,
) -> Tensor:
    """Keeps a step's next rows in tokens [slots, block] and start [slots], of slots whose row_count [B] is not 0.

    Returns what the host reads, [B, 1 + R]: accepted, then target_ids.

    Args:
        last_start: the largest start that is kept.
        target_ids, accepted, next_start, next_tokens: the step's outputs, [B, R], [B], [B], [B, N].
    """
    slots, logit_rows = target_ids.shape
    _check_slots(tokens, start, row_count)
    check_ints(slots, row_count=row_count, accepted=accepted, next_start=next_start)
    for x in (target_ids, next_tokens):
        check(x.dtype == torch.int32 and x.is_contiguous() and x.shape[0] == slots, "a step's ids must be int32")
    decided = torch.empty(slots, 1 + logit_rows, dtype=torch.int32, device=tokens.device)
    params = EndStepParams(
        slots=slots,
        block=tokens.shape[1],
        logit_rows=logit_rows,
        next_rows=next_tokens.shape[1],
        last_start=last_start,
        row_count=row_count.data_ptr(),
        target_ids=target_ids.data_ptr(),
        accepted=accepted.data_ptr(),
        next_start=next_start.data_ptr(),
        next_tokens=next_tokens.data_ptr(),
        tokens=tokens.data_ptr(),
        kept_start=start.data_ptr(),
        decided=decided.data_ptr(),
    )
    run("dflash_end_step", params, stream())
    return decided


def embed(table: Tensor, ids: Tensor, block: int = 0, mask_id: int = 0) -> Tensor:
    """Looks up ids [B, N] in table [V, H]: [B, N, H]. With a block, ids are [B], each followed by block - 1 masks.

    An id that the table does not have gives zeros.
    """
    check(table.dtype in HALVES and table.is_contiguous() and table.shape[1] % 8 == 0, "a table of 16-bit rows")
    check(ids.dtype == torch.int32 and ids.is_contiguous() and ids.dim() == (1 if block else 2), "ids must be int32")
    shape = (len(ids), block) if block else tuple(ids.shape)
    out = torch.empty(*shape, table.shape[1], dtype=table.dtype, device=table.device)
    params = EmbedParams(
        dtype=DTYPES[table.dtype],
        rows=shape[0] * shape[1],
        size=table.shape[1],
        vocabulary=table.shape[0],
        block=block,
        mask_id=mask_id,
        table=table.data_ptr(),
        ids=ids.data_ptr(),
        out=out.data_ptr(),
    )
    run("dflash_embed", params, stream())
    return out


def _check_slots(tokens: Tensor, start: Tensor, row_count: Tensor) -> None:
    check(tokens.dtype == torch.int32 and tokens.is_contiguous(), "kept tokens must be int32")
    check_ints(len(tokens), start=start)
    check_ints(len(row_count), row_count=row_count)
    check(len(row_count) <= len(tokens), f"{len(row_count)} slots of {len(tokens)}")
