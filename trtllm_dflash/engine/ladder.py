"""Sizes that decoding steps come in: slots, drafts and rows; each is a graph where steps are captured."""

from collections.abc import Iterable
from dataclasses import dataclass

from trtllm_dflash.step import Drafting

#: Draft lengths to choose from, those that a drafter's block allows.
LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)


@dataclass(frozen=True)
class StepKind:
    """A decoding step, as it is captured."""

    slots: int
    rows: int  # of each slot: that are verified, and of the block that is drafted
    drafting: Drafting
    sampled: bool  # False: all slots are greedy


def batch_sizes(most: int) -> list[int]:
    """Lists the numbers of slots of a step: 1, 2, 4 and so on, and the most."""
    return sorted({size for power in range(most.bit_length()) if (size := 2**power) <= most} | {most})


def draft_lengths(block_size: int) -> list[int]:
    """Lists the draft lengths of a drafter with this block size, its whole block among them."""
    return sorted({drafts for drafts in LENGTHS if drafts < block_size} | {block_size - 1})


def step_kinds(max_batch: int, lengths: Iterable[int], sampled: bool) -> list[StepKind]:
    """Every kind of step that decodes up to `max_batch` slots, plainly or with these draft lengths; the largest first.

    Args:
        lengths: that are chosen among, 0 for no drafts; none at all: there is no drafter.
        sampled: whether slots may sample; steps in which none does are among the kinds in any case.
    """
    drafts = sorted(set(lengths))
    rows = {Drafting.OFF: [1], Drafting.BLOCK: [length + 1 for length in drafts if length]}
    if 0 in drafts:
        # A step that drafts nothing more verifies what the one before it left, once: not every size is worth a graph.
        rows[Drafting.CONTEXT] = sorted({1, *(length + 1 for length in (drafts[1:2] + drafts[-1:]))})
    kinds = [
        StepKind(slots, count, drafting, samples)
        for slots in batch_sizes(max_batch)
        for drafting, counts in rows.items()
        for count in counts
        for samples in {False, sampled}
    ]
    return sorted(kinds, key=lambda kind: (kind.slots * kind.rows, kind.sampled), reverse=True)
