"""Decoding steps by kind, each captured once, before any request."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

import torch

from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.ladder import StepKind, shaped_kinds, step_kinds
from trtllm_dflash.errors import EngineError
from trtllm_dflash.session.calls import Decode, Prepare, Step
from trtllm_dflash.step import Drafting, StepInputs

Tensor = torch.Tensor

Graph = TypeVar("Graph")

#: Decoding slots, rows of each, the block, the tree out of it, its drafting, sampled, shaped, whether rows are shared;
#: all rows and pieces of prompts, where there are any.
_Asked: TypeAlias = tuple[int, int, int, int, Drafting, bool, bool, bool, int, int]

#: Drafting, sampled, shaped, whether rows are shared, with prompts.
_Alike: TypeAlias = tuple[Drafting, bool, bool, bool, bool]


class StepGraphs(Generic[Graph]):
    """The captured graphs of a session, by kind of step.

    Args:
        config: the engine.
        capture: captures a step of a kind.
        chunk: the most prompt rows beside decoding slots; 0: steps only decode.
    """

    def __init__(self, config: EngineConfig, capture: Callable[[StepKind], Graph], chunk: int = 0) -> None:
        self._config = config
        self._chunk = chunk
        self._capture = capture
        self._graphs: dict[StepKind, Graph] = {}
        self._found: dict[_Asked, StepKind] = {}
        self._sorted: dict[_Alike, list[StepKind]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def missing(self, call: Prepare) -> list[StepKind]:
        """Lists the kinds of a call that are not captured yet, in the order to capture them."""
        lengths = call.lengths if self._config.drafter is not None else ()
        # Trees are drafted where a chain would be the whole block.
        tree = self._config.draft_tree if self._config.block_size - 1 in lengths else 0
        shared = self._config.block_size if call.shares else 0
        kinds = step_kinds(self._config.max_batch, lengths, call.sampled, self._chunk, tree, shared)
        if call.shaped:
            kinds += shaped_kinds(self._config.max_batch, lengths, call.sampled, self._chunk, tree)
            kinds.sort(key=lambda kind: kind.all_rows, reverse=True)
        return [kind for kind in kinds if kind not in self._graphs and not self._serves(kind)]

    def _serves(self, kind: StepKind) -> bool:
        """Whether a plain step beside prompts has one in which the drafter keeps up: it does for both."""
        return (
            kind.pieces > 0
            and kind.drafting is Drafting.OFF
            and replace(kind, drafting=Drafting.CONTEXT) in self._graphs
        )

    def prepare(self, call: Prepare, progress: Progress) -> None:
        """Captures the missing kinds. The largest first: the smaller ones then reuse its memory."""
        kinds = self.missing(call)
        self._found.clear()
        self._sorted.clear()
        for done, kind in enumerate(kinds):
            progress("capturing", done, len(kinds))
            self._graphs[kind] = self._capture(kind)
        progress("capturing", len(kinds), len(kinds))

    def find(self, call: Decode) -> tuple[StepKind, Graph]:
        """Finds the smallest kind that a step fits in, and its graph.

        Raises:
            EngineError: there is none: it was not prepared for, and no request waits for a capture.
        """
        rows = max(call.row_counts)
        return self._find((len(call.row_counts), rows, call.block, 0, call.drafting, call.sampled, False, False, 0, 0))

    def find_slots(self, call: Step) -> tuple[StepKind, Graph]:
        """Finds likewise the kind of a shaped step of [slots, rows], which computes the slots up to its last one."""
        counts = [count for _, count in call.decode]
        slots = 1 + max(slot for slot, _ in call.decode)
        return self._find((slots, max(counts), call.block, 0, call.drafting, call.sampled, True, False, 0, 0))

    def find_flat(self, call: Step, pieces: list[int], shaped: bool = False) -> tuple[StepKind, Graph]:
        """Finds the smallest kind that a step fits in, with pieces of so many rows, and its graph. Errors as in `find`.

        The step's own pieces do not count.
        """
        slots = len(call.decode)
        # Without pieces the rows of all are no matter: each slot then has place for as many as any.
        all_rows = decoded_rows(call) + sum(pieces) if pieces else 0
        rows = -(-call.share // slots) if call.share else max((count for _, count in call.decode), default=0)
        how = call.block, call.tree, call.drafting, call.sampled, shaped, call.chances
        return self._find((slots, rows, *how, all_rows, len(pieces)))

    def _find(self, asked: _Asked) -> tuple[StepKind, Graph]:
        kind = self._found.get(asked)
        if kind is None:
            kind = self._smallest(*asked)
            if not asked[-1]:  # of those with prompts there is no end
                self._found[asked] = kind
        return kind, self._graphs[kind]

    def _smallest(
        self,
        slots: int,
        rows: int,
        block: int,
        tree: int,
        drafting: Drafting,
        sampled: bool,
        shaped: bool,
        shares: bool,
        all_rows: int,
        pieces: int,
    ) -> StepKind:
        if drafting is Drafting.BLOCK:
            rows = max(rows, block, tree + 1)  # one number for both, so that there are few graphs
        for kind in self._alike(drafting, sampled, shaped, shares, pieces > 0):
            fits = kind.slots >= slots and kind.rows >= rows and kind.tree >= tree
            fits = fits and kind.pieces >= pieces and kind.segments >= slots + pieces
            if fits and kind.all_rows >= all_rows:
                return kind
        what = f"{'sampled' if sampled else 'greedy'} step of {slots} slots and {rows} rows"
        what += f" beside {pieces} pieces of prompts" if pieces else ""
        what += ", with log-probabilities, penalties or masks" if shaped else ""
        raise EngineError(f"a {what}, drafting {drafting.value}, was not prepared for: see Session.prepare")

    def _alike(
        self, drafting: Drafting, sampled: bool, shaped: bool, shares: bool, with_prompts: bool
    ) -> list[StepKind]:
        """Lists the kinds that draft, sample, are shaped and share rows so, the smallest first."""
        asked = drafting, sampled, shaped, shares, with_prompts
        alike = self._sorted.get(asked)
        if alike is None:
            kinds = [
                kind
                for kind in self._graphs
                if (kind.drafting, kind.sampled, kind.shaped, kind.shares, kind.pieces > 0) == asked
            ]
            if not kinds and with_prompts and drafting is Drafting.OFF:
                return self._alike(Drafting.CONTEXT, sampled, shaped, shares, True)  # see `_serves`
            alike = sorted(kinds, key=lambda kind: (kind.all_rows, kind.slots, kind.rows))
            self._sorted[asked] = alike
        return alike

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
        self._found.clear()
        self._sorted.clear()


def decoded_rows(call: Step) -> int:
    """Counts the rows of a step's decoding slots."""
    return call.share or sum(count for _, count in call.decode)


def words_of(call: Step, kind: StepKind) -> list[int]:
    """Writes down a step as `kernels.begin_rows` reads it, for a captured kind.

    Where slots share their rows, their counts are the most that each may have, as `kernels.divide_rows` reads them.
    """
    # Rows that no piece takes are computed in any case.
    shared = decoded_rows(call) if call.pieces else kind.slots * kind.rows
    words: list[int] = []
    for slot, count in call.decode:
        words += (slot, count, -1, shared if kind.shares else count)
    for piece in call.pieces:
        words += (piece.slot, len(piece.token_ids), piece.start, 1)
    words += [0] * (4 * kind.segments - len(words))
    for piece in call.pieces:
        words += piece.token_ids
    return words


def words_of_inputs(inputs: StepInputs[Tensor], first_slot: int) -> list[int]:
    """Writes down given inputs likewise, of slots from first_slot on: each is a piece of a prompt."""
    row_counts, rows = inputs.row_count.tolist(), inputs.token_ids.shape[1]
    is_whole = inputs.logit_rows.shape[1] == rows
    words: list[int] = []
    for slot, (start, own) in enumerate(zip(inputs.start.tolist(), row_counts, strict=True)):
        words += (first_slot + slot, own, start, own if is_whole else 1)
    for ids, own in zip(inputs.token_ids.tolist(), row_counts, strict=True):
        words += ids[:own]
    return words
