"""Penalties and masks of logits, the replies that slots with penalties keep, and log-probabilities."""

from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.checks import DTYPES, check, check_ints
from trtllm_dflash.kernels.library import run, stream, structure
from trtllm_dflash.kernels.rows import Rows

Tensor = torch.Tensor

ShapeLogitsParams = structure(
    "dflash_shape_logits_params",
    ints="dtype rows size first_token vocabulary segment_count decode_segments run_count run_length mask_words",
    pointers="logits shaped decoding logit_first row_segment token_ids logit_rows logit_slot logit_position masks",
    pointers_="mask_rows penalized presence frequency repetition counts in_prompt bias ends ends_from runs recent",
    pointers__="is_shaped",
)


KeepRepliesParams = structure(
    "dflash_keep_replies_params",
    ints="decode_segments vocabulary run_length",
    pointers="decoding token_ids accepted penalized counts recent",
)


LogProbabilitiesParams = structure(
    "dflash_log_probabilities_params", ints="dtype rows size top_count", pointers="logits ids chosen top_ids top wanted"
)


@dataclass(frozen=True)
class KeptPenalties:
    """Penalties of all slots, and their replies up to the token before the next step's first row.

    Captured steps read them where they are. W runs of at most L tokens are banned.
    """

    penalized: Tensor  # [slots] int32: 0: the slot has none, and nothing else of it is read
    presence: Tensor  # [slots] float32
    frequency: Tensor  # [slots] float32
    repetition: Tensor  # [slots] float32
    counts: Tensor  # [slots, V] int32: how often the reply has each token
    in_prompt: Tensor  # [slots, V] bool
    bias: Tensor  # [slots, V] float32
    ends: Tensor  # [slots, V] bool: tokens that end the reply
    ends_from: Tensor  # [slots] int32: the first position that these may stand at
    runs: Tensor  # [slots, W, L] int32: the last token of each is banned behind its others; -1: any token, or no run
    recent: Tensor  # [slots, L - 1] int32: the reply's last tokens; -2 before the first one


@dataclass(frozen=True)
class RowMasks:
    """Masks of tokens, and which of them each logit row has."""

    words: Tensor  # [M, ceil(V / 32)] int32: a bit for each token, the lowest first
    rows: Tensor  # [>= R] int32: the row's mask; -1: it may choose any token


def shape_logits(logits: Tensor, rows: Rows, kept: KeptPenalties, masks: RowMasks, first: int) -> Tensor:
    """Changes logits [R, V/tp] of a step's rows by their slots' penalties, and then by masks; returns all in FP32.

    Args:
        first: this rank's first token.
    """
    return _shaped(logits, rows, kept, masks, first, None)


def shape_changed_logits(
    logits: Tensor, rows: Rows, kept: KeptPenalties, masks: RowMasks, first: int
) -> tuple[Tensor, Tensor]:
    """Changes logits likewise, and leaves out rows that change in nothing; returns all, and which are there: [R] int32.

    Arguments as in `shape_logits`; `argmax` takes both.
    """
    is_shaped = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    return _shaped(logits, rows, kept, masks, first, is_shaped), is_shaped


def _shaped(
    logits: Tensor,
    rows: Rows,
    kept: KeptPenalties,
    masks: RowMasks,
    first: int,
    is_shaped: Tensor | None,
) -> Tensor:
    _check_logits(logits, len(rows.logit_rows))
    _check_kept(kept)
    slots, vocabulary = kept.counts.shape
    check_ints(slots, penalized=kept.penalized, ends_from=kept.ends_from)
    words = masks.words
    is_right = words.dtype == torch.int32 and words.dim() == 2 and words.is_contiguous()
    check(is_right, "masks must be int32 [M, words]")
    is_right = masks.rows.dtype == torch.int32 and len(masks.rows) >= len(logits)
    check(is_right, f"rows of masks must be int32 [{len(logits)}]")
    shaped = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    params = ShapeLogitsParams(
        dtype=DTYPES[logits.dtype],
        rows=len(logits),
        size=logits.shape[1],
        first_token=first,
        vocabulary=vocabulary,
        segment_count=len(rows.segments),
        decode_segments=len(rows.decoding),
        run_count=kept.runs.shape[1],
        run_length=kept.runs.shape[2],
        mask_words=words.shape[1],
        logits=logits.data_ptr(),
        shaped=shaped.data_ptr(),
        decoding=rows.decoding.data_ptr(),
        logit_first=rows.logit_first.data_ptr(),
        row_segment=rows.row_segment.data_ptr(),
        token_ids=rows.token_ids.data_ptr(),
        logit_rows=rows.logit_rows.data_ptr(),
        logit_slot=rows.logit_slot.data_ptr(),
        logit_position=rows.logit_position.data_ptr(),
        masks=words.data_ptr(),
        mask_rows=masks.rows.data_ptr(),
        penalized=kept.penalized.data_ptr(),
        presence=kept.presence.data_ptr(),
        frequency=kept.frequency.data_ptr(),
        repetition=kept.repetition.data_ptr(),
        counts=kept.counts.data_ptr(),
        in_prompt=kept.in_prompt.data_ptr(),
        bias=kept.bias.data_ptr(),
        ends=kept.ends.data_ptr(),
        ends_from=kept.ends_from.data_ptr(),
        runs=kept.runs.data_ptr(),
        recent=kept.recent.data_ptr(),
        is_shaped=None if is_shaped is None else is_shaped.data_ptr(),
    )
    run("dflash_shape_logits", params, stream())
    return shaped


def keep_replies(rows: Rows, kept: KeptPenalties, accepted: Tensor) -> None:
    """Adds what a step has made final to the replies of slots with penalties: accepted [G] drafts, and the row before.

    Args: as in `shape_logits`.
    """
    _check_kept(kept)
    check_ints(len(rows.segments), accepted=accepted)
    params = KeepRepliesParams(
        decode_segments=len(rows.decoding),
        vocabulary=kept.counts.shape[1],
        run_length=kept.runs.shape[2],
        decoding=rows.decoding.data_ptr(),
        token_ids=rows.token_ids.data_ptr(),
        accepted=accepted.data_ptr(),
        penalized=kept.penalized.data_ptr(),
        counts=kept.counts.data_ptr(),
        recent=kept.recent.data_ptr(),
    )
    run("dflash_keep_replies", params, stream())


def log_probabilities(
    logits: Tensor, ids: Tensor, count: int, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probabilities of each row's token, ids [R], and of its `count` likeliest: logits [R, V].

    Returns those of ids [R], the likeliest ones' ids [R, count], the lowest among equals first, and theirs.

    Args:
        wanted: [1] int32: where it is 0, nothing is computed.
    """
    _check_logits(logits, len(ids))
    check_ints(len(logits), ids=ids)
    chosen = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(len(logits), count, dtype=torch.int32, device=logits.device)
    top = torch.empty(len(logits), count, dtype=torch.float32, device=logits.device)
    params = LogProbabilitiesParams(
        dtype=DTYPES[logits.dtype],
        rows=len(logits),
        size=logits.shape[1],
        top_count=count,
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        chosen=chosen.data_ptr(),
        top_ids=top_ids.data_ptr(),
        top=top.data_ptr(),
        wanted=None if wanted is None else wanted.data_ptr(),
    )
    run("dflash_log_probabilities", params, stream())
    return chosen, top_ids, top


def _check_logits(logits: Tensor, rows: int) -> None:
    is_right = logits.dtype in DTYPES and logits.dim() == 2 and logits.is_contiguous() and len(logits) == rows
    check(is_right, f"logits must be contiguous [{rows}, V]")


def _check_kept(kept: KeptPenalties) -> None:
    """Refuses what slots keep unless all of it is contiguous, and of the types that the kernels read."""
    slots, vocabulary = kept.counts.shape
    floats, ints = torch.float32, torch.int32
    tensors = (
        (kept.presence, floats, (slots,)),
        (kept.frequency, floats, (slots,)),
        (kept.repetition, floats, (slots,)),
        (kept.counts, ints, (slots, vocabulary)),
        (kept.in_prompt, torch.bool, (slots, vocabulary)),
        (kept.bias, floats, (slots, vocabulary)),
        (kept.ends, torch.bool, (slots, vocabulary)),
        (kept.runs, ints, (slots, *kept.runs.shape[1:])),
        (kept.recent, ints, (slots, kept.runs.shape[2] - 1)),
    )
    is_right = all(x.dtype == dtype and x.shape == shape and x.is_contiguous() for x, dtype, shape in tensors)
    check(is_right, "penalties of slots must be contiguous, and of their types")
