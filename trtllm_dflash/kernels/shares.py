"""Rows by survival: the division of a step's rows, and of the blocks drafted in it, among the drafts of all slots."""

from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.checks import check, check_ints
from trtllm_dflash.kernels.library import run, stream, structure
from trtllm_dflash.kernels.rows import Rows, begin_rows

Tensor = torch.Tensor

#: Drafts of all segments together, at most, as `dflash_kernels.h` has it.
MOST_SHARED = 4096


DivideRowsParams = structure(
    "dflash_divide_rows_params",
    ints="decode_segments drafts most word_count",
    pointers="words foretold expected survived divided",
)


DivideBlocksParams = structure(
    "dflash_divide_blocks_params",
    ints="segment_count decode_segments drafts rows mask_id",
    pointers="segments decoding next_start bonus outlook words gains",
)


KeepDraftsParams = structure(
    "dflash_keep_drafts_params",
    ints="segment_count decode_segments drafts id_stride log_prob_stride",
    floats="memory",
    pointers="decoding accepted blocks bonus ids log_probs foretold outlook expected survived next_tokens",
)


@dataclass(frozen=True)
class Foretold:
    """Chances of drafts, as slots keep them; FP32, contiguous."""

    foretold: Tensor  # [slots, drafts] product of the probabilities down to each draft; 0: none. Negative: a guess
    outlook: Tensor  # [slots] mean log-probability of a draft behind right ones
    expected: Tensor  # [drafts] sums of what was foretold of drafts that were verified, by position
    survived: Tensor  # [drafts] how many of them survived
    memory: float  # drafts at a position that are remembered: about so many, the recent ones more

    def __post_init__(self) -> None:
        slots, drafts = self.foretold.shape
        shapes = {"outlook": (slots,), "expected": (drafts,), "survived": (drafts,), "foretold": (slots, drafts)}
        for name, shape in shapes.items():
            x = getattr(self, name)
            check(x.shape == shape and x.dtype == torch.float32 and x.is_contiguous(), f"{name} must be FP32 {shape}")

    @property
    def drafts(self) -> int:
        return self.foretold.shape[1]


@dataclass(frozen=True)
class Blocks:
    """The blocks that a step drafts, of different lengths: M flat rows, each block's bonus token first."""

    rows: Rows  # segment g's slot, next start, first row and count; its rows stand behind the committed ones
    bonus: Tensor  # [G] int32
    gains: Tensor  # [drafts] FP32: what one more draft a slot, on average, is likely to commit, after so many


def divide_rows(words: Tensor, kept: Foretold, decode_segments: int, most: int) -> Tensor:
    """Divides a step's rows among the slots that decode; returns words as `begin_rows` reads them.

    Args:
        words: as there, but of each decoding slot the most rows that it may have, and for its logits the rows that all
            of them share.
        most: that they have together, whatever the words say.
    """
    check(words.dtype == torch.int32 and words.is_contiguous() and words.data_ptr() % 16 == 0, "words must be int32")
    check(words.numel() >= 4 * decode_segments, f"{words.numel()} words of {decode_segments} segments")
    divided = torch.empty_like(words)
    params = DivideRowsParams(
        decode_segments=decode_segments,
        drafts=kept.drafts,
        most=most,
        word_count=words.numel(),
        words=words.data_ptr(),
        foretold=kept.foretold.data_ptr(),
        expected=kept.expected.data_ptr(),
        survived=kept.survived.data_ptr(),
        divided=divided.data_ptr(),
    )
    run("dflash_divide_rows", params, stream())
    return divided


def divide_blocks(layout: Rows, kept: Foretold, next_start: Tensor, bonus: Tensor, rows: int, mask_id: int) -> Blocks:
    """Divides `rows` rows among the blocks that a step drafts behind its committed rows.

    Args:
        layout: of the step; each segment that has rows gets a block.
        next_start, bonus: [G] int32.
    """
    segments = len(layout.segments)
    check_ints(segments, next_start=next_start, bonus=bonus)
    words = torch.empty(4 * segments + rows, dtype=torch.int32, device=bonus.device)
    gains = torch.empty(kept.drafts, dtype=torch.float32, device=bonus.device)
    params = DivideBlocksParams(
        segment_count=segments,
        decode_segments=len(layout.decoding),
        drafts=kept.drafts,
        rows=rows,
        mask_id=mask_id,
        segments=layout.segments.data_ptr(),
        decoding=layout.decoding.data_ptr(),
        next_start=next_start.data_ptr(),
        bonus=bonus.data_ptr(),
        outlook=kept.outlook.data_ptr(),
        words=words.data_ptr(),
        gains=gains.data_ptr(),
    )
    run("dflash_divide_blocks", params, stream())
    # Each block is a run of given tokens from a given position on, as a piece of a prompt is.
    unread = bonus[:1, None], next_start[:1]  # kept tokens and starts: of segments that decode, of which there are none
    blocks = begin_rows(
        words, *unread, segments=segments, decode_segments=0, pieces=segments, rows=rows, logit_rows=rows, cuts=0
    )
    return Blocks(blocks, bonus, gains)


def keep_drafts(
    layout: Rows, blocks: Blocks, kept: Foretold, accepted: Tensor, ids: Tensor, log_probs: Tensor
) -> Tensor:
    """Keeps what is foretold of the drafts of such blocks, and learns from a step's acceptance.

    Args:
        layout: of the step.
        accepted: [G] int32 drafts of it.
        ids, log_probs: [M] of each row of the blocks, the likeliest token and its log-probability, by strides.

    Returns:
        the next tokens, [G, 1 + drafts] int32: the bonus token and the drafts, then zeros.
    """
    segments, rows = len(layout.segments), len(blocks.rows.token_ids)
    check_ints(segments, accepted=accepted, bonus=blocks.bonus)
    is_right = ids.dtype == torch.int32 and log_probs.dtype == torch.float32 and ids.shape == log_probs.shape == (rows,)
    check(is_right, f"ids and log-probabilities must be int32 and FP32 [{rows}]")
    tokens = torch.empty(segments, 1 + kept.drafts, dtype=torch.int32, device=ids.device)
    params = KeepDraftsParams(
        segment_count=segments,
        decode_segments=len(layout.decoding),
        drafts=kept.drafts,
        id_stride=ids.stride(0),
        log_prob_stride=log_probs.stride(0),
        memory=kept.memory,
        decoding=layout.decoding.data_ptr(),
        accepted=accepted.data_ptr(),
        blocks=blocks.rows.segments.data_ptr(),
        bonus=blocks.bonus.data_ptr(),
        ids=ids.data_ptr(),
        log_probs=log_probs.data_ptr(),
        foretold=kept.foretold.data_ptr(),
        outlook=kept.outlook.data_ptr(),
        expected=kept.expected.data_ptr(),
        survived=kept.survived.data_ptr(),
        next_tokens=tokens.data_ptr(),
    )
    run("dflash_keep_drafts", params, stream())
    return tokens
