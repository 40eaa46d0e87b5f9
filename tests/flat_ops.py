"""`CudaOps` over steps that tests make of [slots, rows], and without any rows."""

from functools import cache

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.cuda_ops import CudaOps


def rowless_ops(weights, communicator=None, kind=CudaOps) -> CudaOps:
    """Operations that need no layout of rows."""
    none = torch.zeros(0, dtype=torch.int32)
    segments = none.view(0, 4)
    layout = kernels.Rows(segments, segments, segments, none, none, none, none, none, none, segments, None)
    return kind(weights, {}, communicator, kernels.Pages(none.view(0, 1), 1), layout, 1)


def decoding_ops(weights, caches, token_ids: torch.Tensor, start: torch.Tensor) -> tuple[CudaOps, kernels.Rows]:
    """Operations over the rows token_ids [B, Q] of slots at start [B], all with logits; may be captured, once run."""
    slots, rows = token_ids.shape
    layout = kernels.begin_rows(
        _decoding_words(slots, rows),
        token_ids,
        start,
        segments=slots,
        decode_segments=slots,
        pieces=0,
        rows=slots * rows,
        logit_rows=slots * rows,
        cuts=0,
    )
    return CudaOps(weights, caches, None, _linear_pages(caches), layout, rows), layout


def piece_ops(weights, caches, slot: int, start: int, token_ids: list[int]) -> tuple[CudaOps, kernels.Rows]:
    """Operations over a piece of a slot's prompt."""
    pages, count = _linear_pages(caches), len(token_ids)
    layout = kernels.begin_rows(
        torch.tensor([slot, count, start, 1, *token_ids], dtype=torch.int32, device="cuda"),
        torch.zeros(len(pages.table), 1, dtype=torch.int32, device="cuda"),
        torch.zeros(len(pages.table), dtype=torch.int32, device="cuda"),
        segments=1,
        decode_segments=0,
        pieces=1,
        rows=count,
        logit_rows=1,
        cuts=-(-count // kernels.MAX_ROWS),
    )
    return CudaOps(weights, caches, None, pages, layout, 1), layout


@cache  # made before a capture, they are not in it
def _decoding_words(slots: int, rows: int) -> torch.Tensor:
    words = [x for slot in range(slots) for x in (slot, rows, -1, rows)]
    return torch.tensor(words, dtype=torch.int32, device="cuda")


def _linear_pages(caches) -> kernels.Pages:
    """One page a slot of caches [slots, heads, S, D]."""
    slots, _, length, _ = next(iter(caches.values())).shape
    return kernels.Pages(_linear_table(slots), length)


@cache
def _linear_table(slots: int) -> torch.Tensor:
    return torch.arange(slots, dtype=torch.int32, device="cuda")[:, None]
