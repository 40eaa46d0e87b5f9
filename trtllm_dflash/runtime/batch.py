"""The decoding slots of a step."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.slots import Stay

if TYPE_CHECKING:  # torch comes with it
    from trtllm_dflash.session.outcome import Ints

#: Tokens that are sooner looked for in a whole step than each slot's tokens among them.
_FEW = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """The decoding slots of a step. It serves for all steps until a slot joins or leaves, or verifies other rows."""

    stays: list[Stay]
    sequences: list[Sequence]  # theirs
    rows: list[tuple[int, int]]  # slot, and rows that it verifies
    drafted: list[int]  # drafts of each among those rows
    drafts: bool  # whether any of them drafts
    all_draft: bool
    block: int  # rows that those verify; 0: not all the same
    trees: bool | None  # whether the drafts of those are trees; None: not of all the same
    sampled: bool
    logprobs: bool
    penalized: list[int]  # slots
    guided: list[int]  # places of slots whose replies have a grammar
    shaped: bool  # whether any of them asks for log-probabilities, penalties or a grammar
    end_ids: frozenset[int]  # tokens that end any of the replies
    ends: "dict[int, Ints] | None"  # those, each as [1, 1] too; None: too many to look for all at once

    @classmethod
    def of(cls, stays: list[Stay]) -> "Batch":
        """Makes the batch of these sequences, with the rows that the next step can verify of each."""
        counts = [stay.block if stay.drafts else 1 for stay in stays]
        drafting = {(stay.block, stay.tree) for stay in stays if stay.drafts}
        blocks, kinds = {block for block, _ in drafting}, {tree for _, tree in drafting}
        sequences = [stay.sequence for stay in stays]
        end_ids = frozenset().union(*{sequence.end_token_ids for sequence in sequences})
        asking = [place for place, sequence in enumerate(sequences) if sequence.is_shaped]
        logprobs = any(sequences[place].params.logprobs is not None for place in asking)
        guided = [place for place in asking if sequences[place].grammar is not None]
        penalized = [stays[place].slot for place in asking if sequences[place].params.penalizes]
        return cls(
            stays=list(stays),
            sequences=sequences,
            rows=[(stay.slot, count) for stay, count in zip(stays, counts, strict=True)],
            drafted=[count - 1 for count in counts],
            drafts=bool(blocks),
            all_draft=min(counts, default=1) > 1,
            block=blocks.pop() if len(blocks) == 1 else 0,
            trees=kinds.pop() if len(kinds) == 1 else None,
            sampled=any([sequence.is_sampled for sequence in sequences]),
            logprobs=logprobs,
            penalized=penalized,
            guided=guided,
            shaped=bool(logprobs or penalized or guided),
            end_ids=end_ids,
            ends=_ends(end_ids),
        )

    def cut(self, most: int) -> "Batch":
        """Makes the same batch with so many rows of each slot, at most."""
        cut = self.verifying([(slot, min(count, most)) for slot, count in self.rows])
        return replace(cut, block=min(self.block, most))

    def verifying(self, rows: list[tuple[int, int]]) -> "Batch":
        """Makes the same batch with so many rows of each slot."""
        drafted = [count - 1 for _, count in rows]
        return replace(self, rows=rows, drafted=drafted, all_draft=all(drafted))


@lru_cache(maxsize=64)
def _ends(end_ids: frozenset[int]) -> "dict[int, Ints] | None":
    """Lists tokens as `Outcome.may_have` takes them, if they are few; no token of an outcome is past 32 bits."""
    known = [token for token in end_ids if 0 <= token < 2**31]
    return {token: np.full((1, 1), token, np.int32) for token in known} if len(known) <= _FEW else None


def is_shaped(batch: Batch, reading: list[Stay]) -> bool:
    """Whether anybody of a batch, or whose prompt is read, asks for log-probabilities, penalties or a grammar."""
    return batch.shaped or (bool(reading) and any(stay.sequence.is_shaped for stay in reading))


#: Of no slots.
NOBODY = Batch.of([])
