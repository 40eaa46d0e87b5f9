"""Grammars of replies in a step: which drafts are verified instead of the slots' own, and what each row may choose.

The masks of a block's rows follow from its drafts, which are known once the step that made them has been read. Where
the device computes by itself, nobody waits for that: the next step is launched with the slots' own drafts, and masks
are made when it needs them, behind the tokens and drafts that the step before it leaves. A draft that the grammar
forbids is then never chosen, and ends the block. What the grammar forces can stand in for it only in a step that is
launched once the drafts are known: so it does where nothing is under way, and where forbidden drafts have cut so many
blocks short that it is worth the wait. A grammar never changes what a row would choose among the tokens that it
allows, so that drafted text equals plain text.

A grammar that cannot be followed is no error of the step, whose target may have run already: what was launched is run
to its end. That reply's rows may choose anything, and it fails when the step is read, unless it has ended by then.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING

from torch import Tensor

from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.launched import Launched
from trtllm_dflash.runtime.request import fault_of
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Guide, Masks, Piece
from trtllm_dflash.session.session import Session

if TYPE_CHECKING:
    from trtllm_dflash.text.grammar import Grammar, Plan

#: A step waits for drafts where forbidden ones cut the blocks of more than this share of its slots short.
_STRAYS = 0.1


class StepMasks(Masks):
    """The masks of a step's guides.

    Args:
        stays: whose replies are guided.
        guides: theirs.
        make: makes their plans; None of a reply that has ended, or whose grammar cannot be followed.
        errors: of those that cannot, where `make` notes them too.

    Attributes:
        errors: likewise, complete once the masks were written.
    """

    def __init__(
        self,
        stays: list[Stay],
        guides: list[Guide],
        make: "Callable[[], list[Plan | None]]",
        errors: dict[Stay, DFlashError],
    ) -> None:
        self._stays, self._plans = stays, cache(make)
        self._rows = [guide.rows for guide in guides]
        self.errors = errors
        self.width = _grammar(stays[0]).width

    def write(self, words: Tensor) -> None:
        """Writes them; see `Masks.write`."""
        from trtllm_dflash.text.grammar import allow_all  # what few requests need

        address = words.data_ptr()
        for stay, rows, plan in zip(self._stays, self._rows, self._plans(), strict=True):
            try:
                if plan is not None:
                    plan.write(address, rows)
            except Exception as error:  # whatever the library raises: no other reply's matter
                self.errors[stay] = fault_of("grammar", error)
            if plan is None or stay in self.errors:
                allow_all(address, rows, self.width)
            address += 4 * rows * self.width


def guide_step(
    session: Session, batch: Batch, stays: list[Stay], pieces: list[Piece], under_way: Iterable[Launched]
) -> tuple[Batch, list[Guide], StepMasks | None]:
    """Makes the guides of a step and their masks, and its decoding slots with the rows that they verify by them.

    Those that are guided verify chains, in any case.

    Args:
        stays: those whose prompts the pieces are of.
        under_way: steps that are not read yet.
    """
    decoding = [batch.stays[place] for place in batch.guided]
    begun = [stay for stay, piece in zip(stays, pieces, strict=True) if piece.last and stay.sequence.grammar]
    guided = decoding + begun
    if not guided:
        return batch, [], None
    under_way = list(under_way)  # those of now, whenever the masks are made
    counts = [min(batch.drafted[place], session.config.block_size - 1) for place in batch.guided]
    guides = [Guide(stay.slot, [], own=count) for stay, count in zip(decoding, counts, strict=True)]
    guides += [Guide(stay.slot, []) for stay in begun]
    errors: dict[Stay, DFlashError] = {}
    make = partial(_plans, session, guided, guides, len(decoding), under_way, errors)
    if any(counts) and (not under_way or session.communicator.size > 1 or _is_worth_waiting(batch)):
        plans = make(complete=True)
        guides = [_with_drafts(guide, plan) for guide, plan in zip(guides, plans, strict=True)]
        make = partial(list, plans)
    return _verifying(batch, guides), guides, StepMasks(guided, guides, make, errors)


def _is_worth_waiting(batch: Batch) -> bool:
    """Whether drafts that grammars forbid cut so many blocks short that others should stand in for them.

    All slots wait for what some of them gain.
    """
    return sum(_grammar(batch.stays[place]).strays for place in batch.guided) > _STRAYS * len(batch.stays)


def _plans(
    session: Session,
    stays: list[Stay],
    guides: list[Guide],
    decoding: int,
    under_way: list[Launched],
    errors: dict[Stay, DFlashError],
    complete: bool = False,
) -> "list[Plan | None]":
    """Makes the plans of slots, of which so many decode, behind what the steps under way give them.

    Waits for these steps, and leaves it to the scheduler to take their tokens.

    Args:
        errors: gets those of grammars that cannot be followed, and of steps that cannot be read: these have no plans.
        complete: as in `Grammar.plan`.
    """
    behind: dict[Stay, list[int]] = {stay: [] for stay in stays[:decoding]}
    for launched in under_way:
        try:
            read = list(zip(launched.stays, launched.outcome.read(), strict=True))
        except Exception as error:  # the scheduler meets it, too, and ends those whose step it is: they alone
            errors |= {stay: fault_of("step", error) for stay in launched.stays if stay in behind}
            continue
        for place, (stay, ids) in enumerate(read):
            if stay in behind:
                decoded = place < len(launched.batch.stays)
                # Of its prompt, the last piece alone gives a token.
                behind[stay] = [*behind[stay], *ids] if decoded else [*ids]
    drafting = [guide.slot for guide in guides if guide.own]
    drafts = dict(zip(drafting, session.drafts(drafting), strict=True)) if drafting else {}
    plans: list[Plan | None] = []
    for stay, guide in zip(stays, guides, strict=True):
        own = drafts.get(guide.slot, [])[: guide.own]
        try:
            plans.append(None if stay in errors else _grammar(stay).plan(own, behind.get(stay, []), complete))
        except Exception as error:
            errors[stay] = fault_of("grammar", error)
            plans.append(None)
    return plans


def _with_drafts(guide: Guide, plan: "Plan | None") -> Guide:
    """Lets a slot verify the drafts of a plan, in place of its own where they are others."""
    if plan is None:
        return guide
    return Guide(guide.slot, plan.drafts) if plan.is_completed else Guide(guide.slot, [], own=len(plan.drafts))


def _verifying(batch: Batch, guides: list[Guide]) -> Batch:
    """Makes the batch whose guided slots verify as many drafts as their guides have."""
    rows = list(batch.rows)
    for place, guide in zip(batch.guided, guides, strict=False):
        rows[place] = rows[place][0], guide.rows
    return batch if rows == batch.rows else batch.verifying(rows)


def _grammar(stay: Stay) -> "Grammar":
    assert stay.sequence.grammar is not None
    return stay.sequence.grammar
