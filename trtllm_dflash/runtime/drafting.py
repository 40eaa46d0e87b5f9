"""The choice of what a step drafts: how much, chains or trees, and whether the slots share their rows."""

from functools import cache
from typing import NamedTuple

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.runtime.batch import Batch, is_shaped
from trtllm_dflash.runtime.draft_length import DraftLength
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.calls import Step
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.step import Drafting


class StepDrafts(NamedTuple):
    """The drafts that a step makes, and how its slots verify those that the one before it has left."""

    drafting: Drafting
    block: int  # rows of the block to draft; of slots that share their rows, on average
    tree: int = 0  # nodes of the trees to draft out of it; 0: chains
    shares: bool = False  # whether slots share the rows of such blocks
    share: int = 0  # rows that they share in this step; 0: each has its own
    rows: int = 1  # that the next step may verify of a slot
    most: int | None = None  # that this one verifies of a slot, of shared rows' drafts: others are dropped; None: all


@cache  # they are the same in most steps; integers alone are hashed in no time
def _own_rows(drafts: int, longest: int, tree: int, most: int | None) -> StepDrafts:
    """Makes the drafts of slots with rows of their own: trees of so many nodes, if any, for the longest chains."""
    block = drafts + 1
    if not drafts:
        return StepDrafts(Drafting.CONTEXT, block, most=most)
    # The best tree of a block is one of the whole block.
    nodes = tree if drafts >= longest else 0
    return StepDrafts(Drafting.BLOCK, block, nodes, rows=nodes + 1 if nodes else block, most=most)


class DraftChooser:
    """Chooses what each step drafts.

    Args:
        config: the engine.
        limits: of its session.
        length: chooses how much to draft.
        draft: False decodes plainly, without the drafter's work.

    Attributes:
        may_share: whether slots may ever share rows.
    """

    def __init__(self, config: EngineConfig, limits: StepLimits, length: DraftLength, draft: bool) -> None:
        self._limits, self._length, self._draft = limits, length, draft
        self.may_share = draft and limits.divides and length.may_share
        self._longest, self._tree = config.block_size - 1, config.draft_tree
        self._last = StepDrafts(Drafting.OFF, config.block_size)  # those of the last step

    def choose(
        self, batch: Batch, pieces: list[Stay], begin: list[Stay], reading: list[Stay], slots: int
    ) -> StepDrafts:
        """Chooses for the next step of a batch.

        Args:
            pieces: whose prompts it reads; begin: to the end.
            reading: whose prompts are being read at all.
            slots: that it computes.
        """
        wanted = batch.drafts or any(stay.drafts and stay.sequence.room > 1 for stay in begin)
        if not self._draft or not (wanted or pieces):
            return StepDrafts(Drafting.OFF, 1)
        may_differ = self._may_differ(batch, reading)
        choose = self._length.choose if self.may_share and may_differ else self._length.choose_own
        return self._of(batch, may_differ, choose(slots) if wanted else 0)

    def like(self, batch: Batch, reading: list[Stay]) -> Step:
        """Makes a step like the next one of a batch is likely to be, with no pieces of prompts yet."""
        drafts = min(max(batch.block - 1, 0), self._longest)
        if self.may_share:
            drafts = min(drafts, self._last.block - 1)
        if not self._draft:
            return Step(batch.rows, [], Drafting.OFF, 1, batch.sampled)
        of = self._of(batch, self._may_differ(batch, reading), drafts)
        return Step(batch.rows, [], of.drafting, of.block, batch.sampled, chances=of.shares, share=of.share)

    def note(self, launched: StepDrafts) -> None:
        """Notes what the step drafts that was launched."""
        self._last = launched

    def _may_differ(self, batch: Batch, reading: list[Stay]) -> bool:
        """Whether slots may draft trees, or share rows: elsewhere all draft chains while anybody asks for more."""
        return self._limits.shapes_trees or not is_shaped(batch, reading)

    def _of(self, batch: Batch, may_differ: bool, drafts: int) -> StepDrafts:
        if 0 < drafts < self._longest and may_differ and self.may_share and self._length.shares:
            drafting = sum(count > 1 for _, count in batch.rows)
            is_shared = drafting and self._last.drafting is Drafting.BLOCK and not batch.guided
            share = len(batch.rows) + drafting * drafts if is_shared else 0
            return StepDrafts(Drafting.BLOCK, drafts + 1, shares=True, share=share, rows=self._longest + 1)
        # Where some have had a whole block's rows, all would have them: that takes much longer.
        most = max(drafts + 1, 2) if self._last.shares else None
        return _own_rows(drafts, self._longest, self._tree if may_differ else 0, most)
