"""Grammars of replies in a step: which drafts are verified instead of the slots' own, and what each row may choose.

The masks of a block's rows follow from its drafts, which are known once the step that made them has been read: a slot
with a grammar and drafts has the scheduler wait for that. Drafts are checked before the step is launched, and masks are
made when it needs them: while a GPU computes. Where such slots have no drafts, nobody waits: the mask of their one row
is made behind the tokens that the step before it gives them. A grammar never changes what a row would choose among the
tokens that it allows, so that drafted text equals plain text.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.launched import Launched
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Guide, Masks, Piece
from trtllm_dflash.session.session import Session

if TYPE_CHECKING:
    from trtllm_dflash.text.grammar import Grammar, Plan

_Followed = TypeVar("_Followed")


class GuideError(RequestError):
    """A reply's grammar that grew too complex to follow: the fault of one slot's request alone."""

    def __init__(self, stay: Stay, error: RequestError) -> None:
        super().__init__(error.reason, error.field)
        self.stay = stay


class StepMasks(Masks):
    """The masks of a step's guides.

    Args:
        stays: whose replies are guided.
        make: makes their plans; None of a reply that has ended.
    """

    def __init__(self, stays: list[Stay], make: "Callable[[], list[Plan | None]]") -> None:
        self._stays, self._plans = stays, cache(make)
        self.width = _grammar(stays[0]).width

    def write(self, words: Tensor) -> None:
        """Writes them; see `Masks.write`.

        Raises:
            GuideError: a reply's grammar cannot be followed.
        """
        from trtllm_dflash.text.grammar import write_masks  # what few requests need

        plans = self._plans()
        write_masks(plans, words.data_ptr())
        for stay, plan in zip(self._stays, plans, strict=True):
            if plan is not None:
                _followed(stay, plan.check)


def awaits_drafts(batch: Batch) -> bool:
    """Whether guided slots of a step may have drafts, which the step before it leaves."""
    return any(batch.drafted[place] for place in batch.guided)


def guide_step(
    session: Session, batch: Batch, stays: list[Stay], pieces: list[Piece], under_way: list[Launched]
) -> tuple[Batch, list[Guide], Masks | None]:
    """Makes the guides of a step and their masks, and its decoding slots with the rows that they verify by them.

    Those that are guided verify chains, in any case.

    Args:
        stays: those whose prompts the pieces are of.
        under_way: steps that are not read yet; there are none where a guided slot has drafts.

    Raises:
        GuideError: a reply's grammar cannot be followed.
    """
    guided = [batch.stays[place] for place in batch.guided]
    guided += [stay for stay, piece in zip(stays, pieces, strict=True) if piece.last and stay.sequence.grammar]
    if not guided:
        return batch, [], None
    if not awaits_drafts(batch):
        make = partial(_plans_behind, guided, len(batch.guided), under_way)
        return batch, [Guide(stay.slot, []) for stay in guided], StepMasks(guided, make)
    drafts = _drafts(session, batch)
    drafts += [[] for _ in guided[len(drafts) :]]
    plans = [_followed(stay, partial(_grammar(stay).plan, own)) for stay, own in zip(guided, drafts, strict=True)]
    rows, drafted = list(batch.rows), list(batch.drafted)
    for place, plan in zip(batch.guided, plans, strict=False):
        drafted[place] = len(plan.drafts)
        rows[place] = rows[place][0], 1 + drafted[place]
    guides = [Guide(stay.slot, plan.drafts) for stay, plan in zip(guided, plans, strict=True)]
    return replace(batch, rows=rows, drafted=drafted), guides, StepMasks(guided, lambda: [*plans])


def _plans_behind(stays: list[Stay], decoding: int, under_way: list[Launched]) -> "list[Plan | None]":
    """Makes the plans of slots without drafts, of which so many decode, behind what the steps under way give them.

    Waits for these steps, and leaves it to the scheduler to take their tokens.
    """
    behind: dict[Stay, list[int]] = {stay: [] for stay in stays[:decoding]}
    for launched in under_way:
        for place, (stay, ids) in enumerate(zip(launched.stays, launched.outcome.read(), strict=True)):
            if stay in behind:
                decoded = place < len(launched.batch.stays)
                behind[stay] = behind[stay] + ids if decoded else ids  # of its prompt, the last piece alone gives one
    return [_followed(stay, partial(_grammar(stay).plan_behind, behind.get(stay, []))) for stay in stays]


def _drafts(session: Session, batch: Batch) -> list[list[int]]:
    """Reads the drafts of a batch's guided slots that are to be verified."""
    counts = [min(batch.drafted[place], session.config.block_size - 1) for place in batch.guided]
    drafts = session.drafts([batch.rows[place][0] for place in batch.guided])
    return [own[:count] for own, count in zip(drafts, counts, strict=True)]


def _grammar(stay: Stay) -> "Grammar":
    assert stay.sequence.grammar is not None
    return stay.sequence.grammar


def _followed(stay: Stay, follow: Callable[[], _Followed]) -> _Followed:
    """Follows a reply's grammar; what cannot be followed is the fault of its request alone."""
    try:
        return follow()
    except RequestError as error:
        raise GuideError(stay, error) from error
