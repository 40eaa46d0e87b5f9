"""Decoding steps by kind, each captured once, before any request."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.ladder import StepKind, step_kinds
from trtllm_dflash.errors import EngineError
from trtllm_dflash.session.calls import Decode, Prepare, Step
from trtllm_dflash.step import Drafting

Graph = TypeVar("Graph")

#: Decoding slots, rows of each, the block, the tree out of it, its drafting, sampled; all rows and pieces of prompts,
#: where there are any.
_Asked: TypeAlias = tuple[int, int, int, int, Drafting, bool, int, int]


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
        self._sorted: dict[tuple[Drafting, bool, bool], list[StepKind]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def missing(self, call: Prepare) -> list[StepKind]:
        """Lists the kinds of a call that are not captured yet, in the order to capture them."""
        lengths = call.lengths if self._config.drafter is not None else ()
        # Trees are drafted where a chain would be the whole block.
        tree = self._config.draft_tree if self._config.block_size - 1 in lengths else 0
        kinds = step_kinds(self._config.max_batch, lengths, call.sampled, self._chunk, tree)
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
        return self._find((len(call.row_counts), rows, call.block, 0, call.drafting, call.sampled, 0, 0))

    def find_flat(self, call: Step, pieces: list[int]) -> tuple[StepKind, Graph]:
        """Finds the smallest kind that a step fits in, with pieces of so many rows, and its graph. Errors as in `find`.

        The step's own pieces do not count.
        """
        counts = [count for _, count in call.decode]
        # Without pieces the rows of all are no matter: each slot then has place for as many as any.
        all_rows = sum(counts) + sum(pieces) if pieces else 0
        rows = max(counts, default=0)
        asked = len(counts), rows, call.block, call.tree, call.drafting, call.sampled, all_rows, len(pieces)
        return self._find(asked)

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
        all_rows: int,
        pieces: int,
    ) -> StepKind:
        if drafting is Drafting.BLOCK:
            rows = max(rows, block, tree + 1)  # one number for both, so that there are few graphs
        for kind in self._alike(drafting, sampled, pieces > 0):
            fits = kind.slots >= slots and kind.rows >= rows and kind.tree >= tree
            if fits and kind.pieces >= pieces and kind.all_rows >= all_rows:
                return kind
        what = f"{'sampled' if sampled else 'greedy'} step of {slots} slots and {rows} rows"
        what += f" beside {pieces} pieces of prompts" if pieces else ""
        raise EngineError(f"a {what}, drafting {drafting.value}, was not prepared for: see Session.prepare")

    def _alike(self, drafting: Drafting, sampled: bool, with_prompts: bool) -> list[StepKind]:
        """Lists the kinds that draft and sample so, the smallest first."""
        alike = self._sorted.get((drafting, sampled, with_prompts))
        if alike is None:
            kinds = [
                k for k in self._graphs if (k.drafting, k.sampled, k.pieces > 0) == (drafting, sampled, with_prompts)
            ]
            if not kinds and with_prompts and drafting is Drafting.OFF:
                return self._alike(Drafting.CONTEXT, sampled, True)  # see `_serves`
            alike = sorted(kinds, key=lambda kind: (kind.all_rows, kind.slots, kind.rows))
            self._sorted[drafting, sampled, with_prompts] = alike
        return alike

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
        self._found.clear()
        self._sorted.clear()
