"""Grammars of replies in a step: which drafts are verified instead of the slots' own, and what each row may choose.

The masks of a block's rows follow from its drafts, which are known once the step that made them has been read: a slot
with a grammar has the scheduler wait for that. A grammar never changes what a row would choose among the tokens that it
allows, so that drafted text equals plain text.
"""

from collections.abc import Iterable
from dataclasses import replace

from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Guide, Piece
from trtllm_dflash.session.session import Session


class GuideError(RequestError):
    """A reply's grammar that grew too complex to follow: the fault of one slot's request alone."""

    def __init__(self, stay: Stay, error: RequestError) -> None:
        super().__init__(error.reason, error.field)
        self.stay = stay


def guide_batch(session: Session, batch: Batch) -> tuple[Batch, list[Guide]]:
    """Makes the guides of decoding slots, and the batch with the rows that they verify by them: chains, in any case.

    Raises:
        GuideError: a reply's grammar cannot be followed.
    """
    most = session.config.block_size - 1
    slots = [batch.rows[place][0] for place in batch.guided]
    rows, drafted, guides = list(batch.rows), list(batch.drafted), []
    drafts = session.drafts(slots) if any(drafted[place] for place in batch.guided) else [[] for _ in slots]
    for place, slot, own in zip(batch.guided, slots, drafts, strict=True):
        guides.append(_guide(batch.stays[place], own[: min(drafted[place], most)]))
        drafted[place] = len(guides[-1].drafts)
        rows[place] = slot, 1 + drafted[place]
    return replace(batch, rows=rows, drafted=drafted), guides


def guide_pieces(pieces: Iterable[tuple[Stay, Piece]]) -> list[Guide]:
    """Makes the guides of prompts whose replies begin in a step.

    Raises:
        GuideError: a reply's grammar cannot be followed.
    """
    return [_guide(stay, []) for stay, piece in pieces if piece.last and stay.sequence.grammar is not None]


def _guide(stay: Stay, drafts: list[int]) -> Guide:
    grammar = stay.sequence.grammar
    assert grammar is not None
    try:
        plan = grammar.plan(drafts)
    except RequestError as error:
        raise GuideError(stay, error) from error
    return Guide(stay.slot, plan.drafts, plan.masks)
