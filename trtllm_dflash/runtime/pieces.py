"""Pieces of prompts: how much a step reads of each, and the session's call for it."""

from trtllm_dflash.runtime.logprobs import next_ids
from trtllm_dflash.runtime.prefill_budget import divide
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Piece, SlotPenalties, SlotSampling, Step


def divided(budget: int, waiting: list[Stay]) -> list[tuple[Stay, int]]:
    """Divides a step's prompt tokens; those that get none are left out."""
    counts = divide(budget, [stay.readable for stay in waiting])
    return [(stay, count) for stay, count in zip(waiting, counts, strict=True) if count]


def piece_of(stay: Stay, count: int) -> Piece:
    """Makes the piece of the next `count` tokens of a slot's prompt."""
    sequence, first = stay.sequence, stay.launched
    params, last = sequence.params, first + count == stay.prompt
    return Piece(
        slot=stay.slot,
        start=first,
        token_ids=sequence.tokens(first, first + count),
        last=last,
        sampling=SlotSampling(params.temperature, params.top_k, params.top_p, params.seed, params.min_p),
        next_ids=next_ids(stay, count),
        penalties=_penalties_of(sequence) if last and params.penalizes else None,
    )


def add_needs(step: Step, stays: list[Stay]) -> None:
    """Adds to a step what the sequences need whose prompts it reads: ways to choose a token, and copies of rows."""
    step.sampled |= any(stay.sequence.is_sampled for stay in stays)
    step.logprobs |= any(stay.sequence.params.logprobs is not None for stay in stays)
    step.penalized = step.penalized + [piece.slot for piece in step.pieces if piece.penalties is not None]
    step.copies = [stay.lease.copy for stay in stays if stay.lease.copy is not None]
    step.window_copies = [stay.lease.window_copy for stay in stays if stay.lease.window_copy is not None]


def _penalties_of(sequence: Sequence) -> SlotPenalties:
    params = sequence.params
    return SlotPenalties(
        prompt_ids=sequence.prompt_ids,
        reply_ids=list(sequence.token_ids),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        bias=tuple(params.logit_bias.items()),
        end_ids=tuple(sequence.end_token_ids),
        ends_from=len(sequence.prompt_ids) + min(params.min_tokens, sequence.room),  # within 32 bits
        bad_runs=sequence.bad_runs,
    )
