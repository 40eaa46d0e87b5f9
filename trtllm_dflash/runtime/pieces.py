"""Pieces of prompts: how much a step reads of each, and the session's call for it."""

from trtllm_dflash.runtime.logprobs import next_ids
from trtllm_dflash.runtime.prefill_budget import divide
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Piece, SlotSampling


def divided(budget: int, waiting: list[Stay]) -> list[tuple[Stay, int]]:
    """Divides a step's prompt tokens; those that get none are left out."""
    counts = divide(budget, [stay.prompt - stay.launched for stay in waiting])
    return [(stay, count) for stay, count in zip(waiting, counts, strict=True) if count]


def piece_of(stay: Stay, count: int) -> Piece:
    """Makes the piece of the next `count` tokens of a slot's prompt."""
    params, first = stay.sequence.params, stay.launched
    return Piece(
        slot=stay.slot,
        start=first,
        token_ids=stay.sequence.tokens(first, first + count),
        last=first + count == stay.prompt,
        sampling=SlotSampling(params.temperature, params.top_k, params.top_p, params.seed),
        next_ids=next_ids(stay, count),
    )
