"""Decoding steps by kind, each captured once, before any request."""

from collections.abc import Callable
from typing import Generic, TypeVar

from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.ladder import StepKind, step_kinds
from trtllm_dflash.errors import EngineError
from trtllm_dflash.session.calls import Decode, Prepare
from trtllm_dflash.step import Drafting

Graph = TypeVar("Graph")


class StepGraphs(Generic[Graph]):
    """The captured graphs of a session, by kind of step.

    Args:
        config: the engine.
        capture: captures a step of a kind.
    """

    def __init__(self, config: EngineConfig, capture: Callable[[StepKind], Graph]) -> None:
        self._config = config
        self._capture = capture
        self._graphs: dict[StepKind, Graph] = {}
        self._found: dict[tuple[int, int, Drafting, bool], StepKind] = {}  # by slots, rows, ...

    def __len__(self) -> int:
        return len(self._graphs)

    def missing(self, call: Prepare) -> list[StepKind]:
        """Lists the kinds of a call that are not captured yet, in the order to capture them."""
        lengths = call.lengths if self._config.drafter is not None else ()
        kinds = step_kinds(self._config.max_batch, lengths, call.sampled)
        return [kind for kind in kinds if kind not in self._graphs]

    def prepare(self, call: Prepare, progress: Progress) -> None:
        """Captures the missing kinds. The largest first: the smaller ones then reuse its memory."""
        kinds = self.missing(call)
        self._found.clear()
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
        if call.drafting is Drafting.BLOCK:
            rows = max(rows, call.block)  # one number for both, so that there are few graphs
        asked = (len(call.row_counts), rows, call.drafting, call.sampled)
        kind = self._found.get(asked)
        if kind is None:
            kind = self._found[asked] = self._smallest(*asked)
        return kind, self._graphs[kind]

    def _smallest(self, slots: int, rows: int, drafting: Drafting, sampled: bool) -> StepKind:
        alike = [kind for kind in self._graphs if kind.drafting is drafting and kind.sampled == sampled]
        fitting = [kind for kind in alike if kind.slots >= slots and kind.rows >= rows]
        if not fitting:
            what = f"{'sampled' if sampled else 'greedy'} step of {slots} slots and {rows} rows"
            raise EngineError(f"a {what}, drafting {drafting.value}, was not prepared for: see Session.prepare")
        return min(fitting, key=lambda kind: (kind.slots, kind.rows))

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
        self._found.clear()
