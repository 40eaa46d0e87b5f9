"""The flat rows of a step: their layout on the device, acceptance over them, and what slots keep of them."""

from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.attention import MAX_ROWS
from trtllm_dflash.kernels.checks import address, check, check_ints
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor

#: Segments of a step, and so slots of an engine, that one block lays out: as many as its shared memory holds.
MOST_SEGMENTS = 1741


BeginRowsParams = structure(
    "dflash_begin_rows_params",
    ints="segment_count decode_segments piece_count rows logit_row_count cut_count cut_rows block",
    pointers="words tokens kept_start segments decoding pieces row_segment token_ids logit_first logit_rows logit_slot",
    pointers_="logit_position cuts seeds logit_uniform parents row_position row_path",
)


AcceptParams = structure(
    "dflash_accept_params",
    ints="segment_count",
    pointers="segments logit_first token_ids target_ids accepted committed bonus next_start",
)


EndRowsParams = structure(
    "dflash_end_rows_params",
    ints="segment_count block width next_rows last_start depths",
    pointers="segments logit_first target_ids ranks accepted next_start next_tokens tokens kept_start decided",
    pointers_="next_parents parents",
)


SendParams = structure("dflash_send_params", ints="count", pointers="numbers host")


@dataclass(frozen=True)
class Rows:
    """The layout of a step's N flat rows, G segments and R logits; int32 all but the numbers.

    A segment is one slot's run of rows: slot, start (the position of the first), first row, count (0: it is idle).
    """

    segments: Tensor  # [G, 4] those that decode, then pieces of prompts; how many of either, the device knows
    decoding: Tensor  # [D, 4] the first ones, of which pieces are idle
    pieces: Tensor  # [P, 4] the pieces
    row_segment: Tensor  # [N]; padding: -1
    token_ids: Tensor  # [N]; padding: 0, as in what follows
    logit_first: Tensor  # [G + 1] each segment's first logit, and their number
    logit_rows: Tensor  # [R] the flat row of each logit
    logit_slot: Tensor  # [R]
    logit_position: Tensor  # [R] the row's own
    cuts: Tensor  # [A, 4] pieces of prompts, as segments of at most MAX_ROWS rows
    logit_uniform: Tensor | None  # [R] FP32 in [0, 1), of the position after the row; None: the step is greedy
    row_position: Tensor | None = None  # [N]; None: slots have no trees, as for the next
    row_path: Tensor | None = None  # [N] int64, a bit for each of its segment's rows from the first to it; pieces: 0


def begin_rows(
    words: Tensor,
    tokens: Tensor,
    kept_start: Tensor,
    segments: int,
    decode_segments: int,
    pieces: int,
    rows: int,
    logit_rows: int,
    cuts: int,
    seeds: Tensor | None = None,
    parents: Tensor | None = None,
) -> Rows:
    """Lays out a step's flat rows on the device.

    Rows and logits lie tight, in the order of segments: decode segments first, then pieces of prompts. The rows, logits
    and cuts of a step may be fewer than those that are made: the others are padding.

    Args:
        words: [>= 4 * segments] int32. Of each segment slot, count, start (-1: it decodes) and number of logits, those
            of its last rows; then the pieces' token ids, in the order of segments.
        tokens, kept_start: what slots kept, [slots, block] and [slots]: the tokens of decode segments are these.
        segments, decode_segments, pieces: how many there are at most, and how many that decode, and pieces.
        rows, logit_rows, cuts: how many are made.
        seeds: [slots] int64: each logit gets a random number, which depends on its slot's seed and the position after
            its row alone, that of the token which it chooses. None: the step is greedy.
        parents: [slots, block], the row of each kept token's parent: decode segments are trees. None: they are runs.
    """
    check(words.dtype == torch.int32 and words.is_contiguous() and words.data_ptr() % 16 == 0, "words must be int32")
    check(words.numel() >= 4 * segments, f"{words.numel()} words of {segments} segments")
    for count in (decode_segments, pieces):
        check(0 <= count <= segments, f"{count} of {segments} segments")
    _check_kept(tokens, kept_start)
    _check_parents(parents, tokens)
    if seeds is not None:
        is_right = seeds.shape == kept_start.shape and seeds.dtype == torch.int64 and seeds.is_contiguous()
        check(is_right, f"seeds must be int64 [{len(kept_start)}]")

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=words.device)

    layout = Rows(
        segments=empty(segments, 4),
        decoding=empty(decode_segments, 4),
        pieces=empty(pieces, 4),
        row_segment=empty(rows),
        token_ids=empty(rows),
        logit_first=empty(segments + 1),
        logit_rows=empty(logit_rows),
        logit_slot=empty(logit_rows),
        logit_position=empty(logit_rows),
        cuts=empty(cuts, 4),
        logit_uniform=None if seeds is None else torch.empty(logit_rows, dtype=torch.float32, device=words.device),
        row_position=None if parents is None else empty(rows),
        row_path=None if parents is None else torch.empty(rows, dtype=torch.int64, device=words.device),
    )
    params = BeginRowsParams(
        segment_count=segments,
        decode_segments=decode_segments,
        piece_count=pieces,
        rows=rows,
        logit_row_count=logit_rows,
        cut_count=cuts,
        cut_rows=MAX_ROWS,
        block=tokens.shape[1],
        words=words.data_ptr(),
        tokens=tokens.data_ptr(),
        kept_start=kept_start.data_ptr(),
        segments=layout.segments.data_ptr(),
        decoding=layout.decoding.data_ptr(),
        pieces=layout.pieces.data_ptr(),
        row_segment=layout.row_segment.data_ptr(),
        token_ids=layout.token_ids.data_ptr(),
        logit_first=layout.logit_first.data_ptr(),
        logit_rows=layout.logit_rows.data_ptr(),
        logit_slot=layout.logit_slot.data_ptr(),
        logit_position=layout.logit_position.data_ptr(),
        cuts=layout.cuts.data_ptr(),
        seeds=address(seeds),
        logit_uniform=address(layout.logit_uniform),
        parents=address(parents),
        row_position=address(layout.row_position),
        row_path=address(layout.row_path),
    )
    run("dflash_begin_rows", params, stream())
    return layout


def accept_rows(rows: Rows, target_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accepts drafts that equal the target's choices target_ids [R]: accepted, committed, bonus, next_start [G] each.

    Committed are a segment's rows up to the last accepted draft. Idle segments get zeros.
    """
    check_targets(rows, target_ids)
    segments = len(rows.segments)
    accepted, committed, bonus, next_start = torch.empty(
        4, segments, dtype=torch.int32, device=target_ids.device
    ).unbind()
    params = AcceptParams(
        segment_count=segments,
        segments=rows.segments.data_ptr(),
        logit_first=rows.logit_first.data_ptr(),
        token_ids=rows.token_ids.data_ptr(),
        target_ids=target_ids.data_ptr(),
        accepted=accepted.data_ptr(),
        committed=committed.data_ptr(),
        bonus=bonus.data_ptr(),
        next_start=next_start.data_ptr(),
    )
    run("dflash_accept", params, stream())
    return accepted, committed, bonus, next_start


def end_rows(
    rows: Rows,
    tokens: Tensor,
    kept_start: Tensor,
    last_start: int,
    target_ids: Tensor,
    accepted: Tensor,
    next_start: Tensor,
    next_tokens: Tensor,
    width: int,
    next_parents: Tensor | None = None,
    parents: Tensor | None = None,
    ranks: Tensor | None = None,
    depths: int = 0,
) -> Tensor:
    """Keeps a step's next rows in tokens [slots, block] and kept_start [slots], of the slots that had rows.

    Returns what the host reads, [G, 1 + width + depths]: accepted, then the segment's target_ids, then zeros; then the
    ranks of its accepted drafts, then zeros.

    Args:
        last_start: the largest start that is kept.
        target_ids, accepted, next_start, next_tokens: the step's outputs, [R], [G], [G], [G, 1 to block].
        width: the most logits that a segment has.
        next_parents: [G, 1 to block], of the next tokens; None: each is the child of the one before.
        parents: [slots, block], to keep them in; None: they are not kept.
        ranks, depths: [R] of the accepted drafts, as `accept_paths` has them, and how many of a segment's are read.
    """
    segments = len(rows.segments)
    _check_kept(tokens, kept_start)
    check_targets(rows, target_ids)
    check_ints(segments, accepted=accepted, next_start=next_start)
    check((ranks is None) == (depths == 0), f"ranks go with the number that is read of a segment; that is {depths}")
    check_ints(len(rows.logit_rows), ranks=ranks)
    is_right = next_tokens.dtype == torch.int32 and next_tokens.is_contiguous() and len(next_tokens) == segments
    check(is_right, f"the next tokens must be int32 [{segments}, N]")
    _check_parents(parents, tokens)
    _check_parents(next_parents, next_tokens)
    decided = torch.empty(segments, 1 + width + depths, dtype=torch.int32, device=tokens.device)
    params = EndRowsParams(
        segment_count=segments,
        block=tokens.shape[1],
        width=width,
        next_rows=next_tokens.shape[1],
        last_start=last_start,
        depths=depths,
        segments=rows.segments.data_ptr(),
        logit_first=rows.logit_first.data_ptr(),
        target_ids=target_ids.data_ptr(),
        ranks=address(ranks),
        accepted=accepted.data_ptr(),
        next_start=next_start.data_ptr(),
        next_tokens=next_tokens.data_ptr(),
        tokens=tokens.data_ptr(),
        kept_start=kept_start.data_ptr(),
        decided=decided.data_ptr(),
        next_parents=address(next_parents),
        parents=address(parents),
    )
    run("dflash_end_rows", params, stream())
    return decided


def _check_kept(tokens: Tensor, kept_start: Tensor) -> None:
    check(tokens.dtype == torch.int32 and tokens.dim() == 2 and tokens.is_contiguous(), "kept tokens must be int32")
    check_ints(len(tokens), kept_start=kept_start)


def _check_parents(parents: Tensor | None, tokens: Tensor) -> None:
    shape = tuple(tokens.shape)
    is_right = parents is None or (parents.shape == shape and parents.dtype == torch.int32 and parents.is_contiguous())
    check(is_right, f"parents must be int32 {shape}")


def check_targets(rows: Rows, target_ids: Tensor) -> None:
    """Refuses choices of the target that are not contiguous int32, one for each logit."""
    is_right = target_ids.dtype == torch.int32 and target_ids.is_contiguous()
    check(is_right and target_ids.numel() == len(rows.logit_rows), f"target_ids must be int32 [{len(rows.logit_rows)}]")


def send(numbers: Tensor, host: Tensor) -> None:
    """Copies int32 numbers of a device to pinned memory of the host, behind what is on its way there.

    Args:
        host: pinned int32, of as many numbers. The caller holds it until the kernel has run: the allocator of pinned
            memory does not know of it.
    """
    is_right = numbers.dtype == host.dtype == torch.int32 and numbers.is_contiguous() and host.is_contiguous()
    check(is_right and numbers.numel() == host.numel(), f"{tuple(host.shape)} int32 are not {tuple(numbers.shape)}")
    check(numbers.is_cuda and host.is_pinned(), "numbers of a device go to pinned memory")
    params = SendParams(count=numbers.numel(), numbers=numbers.data_ptr(), host=host.data_ptr())
    run("dflash_send", params, stream())
