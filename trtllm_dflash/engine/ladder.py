"""Sizes that decoding steps come in: slots, drafts and rows; each is a graph where steps are captured."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trtllm_dflash.step import Drafting

#: Draft lengths to choose from, those that a drafter's block allows.
LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)

#: Rows of a slot, of those that draft lengths give, that steps of few slots are captured for. Eight slots of Qwen3-8B's
#: shape on one NVIDIA H200 take 1.2, 1.1 and 2.9% longer with 4, 8 and 16 rows than with 3, 6 and 12; fewer slots less.
_FEW_SLOTS = 8
_ROWS_OF_FEW = (2, 4, 8, 16)

#: Likewise, that steps with prompt rows are captured for.
_MIXED_ROWS = (4, 6, 8, 16)

#: Slots, and rows of each, of steps that have log-probabilities, penalties and masks.
_SHAPED_SLOTS = (1, 2, 4, 8, 32, 128)
_SHAPED_ROWS = (8, 16)

#: The fewest slots that share the rows of their steps, and the most drafts of each on average: where rows are dear and
#: all sizes are captured.
LEAST_SHARING, MOST_SHARED_DRAFTS = _FEW_SLOTS + 1, 7

#: Rows of the smallest block that slots share: beside prompts, too, fewer rows than it has are captured.
_LEAST_SHARED_BLOCK = min(_MIXED_ROWS) + 1

#: Pieces of prompts in one step, at most.
PIECES = 8

#: The fewest prompt rows that a step is captured for, and how many of them there are for a piece more.
_LEAST_PROMPT_ROWS = 64
_ROWS_A_PIECE = 32


@dataclass(frozen=True)
class StepKind:
    """A step, as it is captured."""

    slots: int  # that decode
    rows: int  # of each slot: that are verified, and of the block that is drafted
    drafting: Drafting
    sampled: bool  # False: all slots are greedy
    prompt_rows: int = 0  # besides; pieces of prompts may take those too that decoding slots leave
    tree: int = 0  # nodes of the trees that are drafted, out of the engine's whole block; 0: chains
    shaped: bool = False  # whether it has log-probabilities, penalties and masks, for slots that ask for them
    shares: bool = False  # whether slots share its rows, and those of the blocks: `rows` are what each has on average

    @property
    def pieces(self) -> int:
        """Pieces of prompts, at most."""
        return _pieces(self.prompt_rows)

    @property
    def tells_prompts(self) -> bool:
        """Whether prompts may ask for log-probabilities of their tokens."""
        return self.shaped and self.pieces > 0

    @property
    def segments(self) -> int:
        """Decoding slots and pieces together, at most; each gets a block of the drafter.

        A piece is of a slot that does not decode yet: it takes a place that would else be nobody's.
        """
        return min(self.slots + self.pieces, max(self.slots, PIECES))

    @property
    def all_rows(self) -> int:
        """Rows of the target's products."""
        return self.slots * self.rows + self.prompt_rows

    @property
    def block_rows(self) -> int:
        """Rows of the blocks that slots which share rows draft: half as many again, for the best of more are better."""
        return -(-3 * self.segments * self.rows // 2)

    @property
    def logit_rows(self) -> int:
        """Rows that get logits: all of decoding slots, and one of each piece."""
        return self.slots * self.rows + self.segments - self.slots


def batch_sizes(most: int) -> list[int]:
    """Lists the numbers of slots of a step: 1, 2, 4 and so on, and the most."""
    return sorted({size for power in range(most.bit_length()) if (size := 2**power) <= most} | {most})


def draft_lengths(block_size: int) -> list[int]:
    """Lists the draft lengths of a drafter with this block size, its whole block among them."""
    return sorted({drafts for drafts in LENGTHS if drafts < block_size} | {block_size - 1})


def shared_lengths(block_size: int) -> list[int]:
    """Lists the draft lengths, on average, of slots that share rows; none of blocks too short for it."""
    if block_size < _LEAST_SHARED_BLOCK:
        return []
    return [drafts for drafts in LENGTHS if 0 < drafts <= min(MOST_SHARED_DRAFTS, block_size - 2)]


def most_pieces(chunk: int) -> int:
    """Counts the pieces of prompts that the largest steps have, of engines with such a chunk."""
    return _pieces(prompt_sizes(chunk)[-1])


def _pieces(prompt_rows: int) -> int:
    return min(PIECES, prompt_rows // _ROWS_A_PIECE)


def prompt_sizes(chunk: int) -> list[int]:
    """Lists the numbers of prompt rows that steps are captured for: 64, 256 and so on, and the most."""
    sizes = {_LEAST_PROMPT_ROWS << power for power in range(0, 16, 2) if _LEAST_PROMPT_ROWS << power < chunk}
    return sorted(sizes | {max(chunk, _LEAST_PROMPT_ROWS)})


def step_kinds(
    max_batch: int, lengths: Iterable[int], sampled: bool, chunk: int = 0, tree: int = 0, shared_block: int = 0
) -> list[StepKind]:
    """Every kind of step that decodes up to `max_batch` slots, plainly or with these draft lengths; the largest first.

    Args:
        lengths: that are chosen among, 0 for no drafts; none at all: there is no drafter.
        sampled: whether slots may sample; steps in which none does are among the kinds in any case.
        chunk: the most prompt rows beside them; 0: steps only decode.
        tree: nodes of the trees that take the place of the longest drafts; 0: all are chains.
        shared_block: rows of the block of which slots that draft less may share their rows, besides; 0: they do not.
    """
    drafts = _drafts(lengths, tree)
    kinds = [
        StepKind(slots, rows, drafting, samples)
        for slots in batch_sizes(max_batch)
        for drafting, rows in _decoding_rows(slots, drafts)
        for samples in {False, sampled}
    ]
    if chunk:
        kinds += _mixed_kinds(max_batch, drafts, sampled, chunk)
    if tree:
        grown = drafts[-1] + 1
        kinds = [replace(k, tree=tree) if (k.drafting, k.rows) == (Drafting.BLOCK, grown) else k for k in kinds]
    kinds += [
        replace(kind, shares=True)
        for kind in kinds
        if kind.drafting is Drafting.BLOCK and _is_shared(kind, shared_block)
    ]
    return largest_first(kinds)


def shaped_kinds(
    max_batch: int, lengths: Iterable[int], sampled: bool, chunk: int = 0, tree: int = 0
) -> list[StepKind]:
    """Every kind of step that has log-probabilities, penalties and masks: fewer sizes, for fewer requests ask for them.

    Arguments as in `step_kinds`. They draft chains, and may verify trees that the step before them left.
    """
    drafts = _drafts(lengths, tree)
    blocks = {length + 1 for length in drafts if length}
    blocks = {rows for rows in blocks if rows in _SHAPED_ROWS or rows == max(blocks)}
    kept = Drafting.CONTEXT if drafts else Drafting.OFF
    runs = [(Drafting.OFF, 1)] + [(Drafting.BLOCK, rows) for rows in blocks]
    if 0 in drafts:
        runs += [(Drafting.CONTEXT, rows) for rows in {1, drafts[-1] + 1}]
    slots = {size for size in _SHAPED_SLOTS if size < max_batch} | {max_batch}
    kinds = [StepKind(count, rows, drafting, False, shaped=True) for count in slots for drafting, rows in runs]
    if chunk:
        most, sizes = max(blocks, default=1), prompt_sizes(chunk)
        mixed = {(count, *run) for count in slots & {8, max_batch} | {0} for run in [(most, Drafting.BLOCK), (1, kept)]}
        mixed |= {(max_batch, most, kept)}  # the step that verifies what the one before it left
        kinds += [
            StepKind(count, rows, drafting, False, prompt_rows, shaped=True)
            for count, rows, drafting in mixed
            for prompt_rows in {sizes[0], sizes[-1]}
            if blocks or drafting is kept
        ]
    kinds += [replace(kind, sampled=True) for kind in kinds if sampled]
    return largest_first(kinds)


def largest_first(kinds: Iterable[StepKind]) -> list[StepKind]:
    """Sorts kinds into the order in which they are captured: the same one in every rank.

    Ranks that capture different steps wait for each other's sums for ever, and sets of kinds have another order in each
    process.
    """

    def size(kind: StepKind) -> tuple[int, bool, int, int, str, int, bool, bool]:
        first = kind.all_rows, kind.sampled, kind.slots, kind.rows
        return *first, kind.drafting.value, kind.tree, kind.shaped, kind.shares

    return sorted(kinds, key=size, reverse=True)


def _is_shared(kind: StepKind, block: int) -> bool:
    """Whether slots may share the rows of such a step."""
    return kind.slots >= LEAST_SHARING and kind.rows <= max(shared_lengths(block), default=0) + 1


def _drafts(lengths: Iterable[int], tree: int) -> list[int]:
    """Sorts draft lengths; the longest is a tree's nodes, where trees take its place."""
    drafts = sorted(set(lengths))
    if tree:
        drafts[-1] = max(tree, drafts[-1])
    return drafts


def _decoding_rows(slots: int, drafts: list[int]) -> list[tuple[Drafting, int]]:
    """Rows of each of so many slots, by drafting, in steps that only decode."""
    blocks = {length + 1 for length in drafts if length}
    if slots <= _FEW_SLOTS:
        blocks = {rows for rows in blocks if rows in _ROWS_OF_FEW or rows == max(blocks)}
    runs = [(Drafting.OFF, 1)] + [(Drafting.BLOCK, rows) for rows in blocks]
    if 0 in drafts:
        # A step that drafts nothing more verifies what the one before it left, once: not every size is worth a graph.
        left = {1, *(length + 1 for length in drafts[-1:])}
        if slots > _FEW_SLOTS:  # where rows of nobody cost much
            left |= {length + 1 for length in drafts[1:2]}
        runs += [(Drafting.CONTEXT, rows) for rows in left]
    return runs


def _mixed_kinds(max_batch: int, drafts: list[int], sampled: bool, chunk: int) -> list[StepKind]:
    """Kinds with prompt rows: fewer sizes of the rest, for prompts take the rows that decoding slots leave."""
    blocks = {length + 1 for length in drafts if length}
    few = {rows for rows in blocks if rows in _MIXED_ROWS or rows == max(blocks)}
    kept = Drafting.CONTEXT if drafts else Drafting.OFF  # no drafts: then the drafter keeps up all the same
    runs = [(Drafting.BLOCK, rows) for rows in sorted(few)] + [(kept, 1)]
    kinds = [
        StepKind(slots, rows, drafting, samples, prompt_rows)
        for slots in _mixed_slots(max_batch)
        for drafting, rows in (runs if slots else runs[-2:])  # without slots, rows are those of new blocks alone
        for samples in {False, sampled}
        for prompt_rows in prompt_sizes(chunk)
        if 4 * prompt_rows >= slots * rows or prompt_rows >= chunk  # fewer are no matter beside so many
    ]
    if blocks:  # for the step that drafts nothing more, and verifies what the one before it left
        kinds += [
            StepKind(max_batch, max(blocks), kept, samples, max(prompt_sizes(chunk))) for samples in {False, sampled}
        ]
    return kinds


def _mixed_slots(max_batch: int) -> set[int]:
    """Numbers of slots that decode beside prompts: 0, 2, 8, 16, 24, 32, 48 and so on, and the most."""
    sizes = {2, 8, 24} | {size for power in range(4, 12) for size in (2**power, 3 * 2**power)}
    return {0, max_batch} | {size for size in sizes if size < max_batch}
