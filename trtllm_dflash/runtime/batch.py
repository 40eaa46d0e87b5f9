"""The decoding slots of a step."""

from dataclasses import dataclass, replace

from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.slots import Stay


@dataclass(frozen=True, slots=True)
class Batch:
    """The decoding slots of a step. It serves for all steps until a slot joins or leaves, or verifies other rows."""

    stays: list[Stay]
    sequences: list[Sequence]  # theirs
    rows: list[tuple[int, int]]  # slot, and rows that it verifies
    drafted: list[int]  # drafts of each among those rows
    drafts: bool  # whether any of them drafts
    block: int  # rows that those verify; 0: not all the same
    trees: bool | None  # whether the drafts of those are trees; None: not of all the same
    sampled: bool
    logprobs: bool
    penalized: list[int]  # slots
    guided: list[int]  # places of slots whose replies have a grammar
    end_ids: frozenset[int]  # tokens that end any of the replies

    @classmethod
    def of(cls, stays: list[Stay]) -> "Batch":
        """Makes the batch of these sequences, with the rows that the next step can verify of each."""
        counts = [stay.block if stay.drafts else 1 for stay in stays]
        blocks = {stay.block for stay in stays if stay.drafts}
        kinds = {stay.tree for stay in stays if stay.drafts}
        return cls(
            stays=list(stays),
            sequences=[stay.sequence for stay in stays],
            rows=[(stay.slot, count) for stay, count in zip(stays, counts, strict=True)],
            drafted=[count - 1 for count in counts],
            drafts=bool(blocks),
            block=blocks.pop() if len(blocks) == 1 else 0,
            trees=kinds.pop() if len(kinds) == 1 else None,
            sampled=any(stay.sequence.params.temperature > 0 for stay in stays),
            logprobs=any(stay.sequence.params.logprobs is not None for stay in stays),
            guided=[place for place, stay in enumerate(stays) if stay.sequence.grammar is not None],
            penalized=[stay.slot for stay in stays if stay.sequence.params.penalizes],
            end_ids=frozenset().union(*{stay.sequence.end_token_ids for stay in stays}),
        )

    def cut(self, most: int) -> "Batch":
        """Makes the same batch with so many rows of each slot, at most."""
        rows = [(slot, min(count, most)) for slot, count in self.rows]
        return replace(self, rows=rows, drafted=[count - 1 for _, count in rows], block=min(self.block, most))


def is_shaped(batch: Batch, reading: list[Stay]) -> bool:
    """Whether anybody of a batch, or whose prompt is read, asks for log-probabilities, penalties or a grammar."""
    if batch.logprobs or batch.penalized or batch.guided:
        return True
    return any(stay.sequence.is_shaped for stay in reading)


#: Of no slots.
NOBODY = Batch.of([])
