"""The slots of a session: the sequences in them, and the pages that each has."""

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.checkpoints import SPACING, Checkpoint, Checkpoints, StateReach
from trtllm_dflash.runtime.pages import Lease, LinearPages, Pages
from trtllm_dflash.runtime.request import Sequence


@dataclass(eq=False, slots=True)
class Stay:
    """A sequence's stay in a slot, from its admission until it ends or has to wait again.

    Attributes:
        prompt: tokens to read before it decodes: its prompt, and those of its reply that earlier stays gave it.
        drafts: whether drafts are made for it.
        launched: how many tokens of the prompt have rows, or will by the steps that were launched.
        offset: rows less the tokens of its reply.
        drafter_rows: how many of them the drafter's caches hold too; None: all.
        enough: rows up to which it has the pages that its next step may write to.
        block: rows that its next step can verify: the bonus token, and the drafts that its last step left, or a tree's.
        tree: whether those drafts are a tree.
        kept: tokens up to its last state that is kept, of recurrent layers.
        branch: tokens that another sequence began with, too, and a state is worth keeping behind; 0: none are.
        states: those that pieces which are not read yet have left to later prompts, with the tokens up to each.
        quiet: tokens up to which its reply grows without a look at it: there are pages for them, and it goes on.
        goes_on: tokens up to which none of the steps under way can bring its end; -1: each of them may.
        over: it has left the slot: the outcome of steps that are still under way is nobody's.
    """

    slot: int
    sequence: Sequence
    prompt: int
    lease: Lease
    drafts: bool
    launched: int
    offset: int
    drafter_rows: int | None
    enough: float = math.inf
    block: int = 1
    tree: bool = False
    kept: int = 0
    branch: int = 0
    quiet: float = -1
    goes_on: int = -1
    over: bool = False
    states: list[tuple[int, Checkpoint]] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all sequences: the most urgent first, among equals the earliest."""
        return self.sequence.rank

    @property
    def rows(self) -> int:
        """Rows that the steps read so far have written, and that stay: the position of the next step's first one."""
        return self.offset + len(self.sequence.token_ids)

    @rows.setter
    def rows(self, rows: int) -> None:
        self.offset = rows - len(self.sequence.token_ids)
        self.watch()

    @property
    def readable(self) -> int:
        """Tokens of its prompt that the next step may read: a piece ends where a state is to be kept."""
        return (self.branch if self.launched < self.branch else self.prompt) - self.launched

    def watch(self) -> None:
        """Finds anew how many tokens its reply may have with no need to look at it."""
        has_pages = self.enough - self.offset
        self.quiet = has_pages if has_pages < self.goes_on else self.goes_on

    def note_drafter_rows(self) -> None:
        """Notes that the drafter's caches have the rows so far, and not those of a step that it had no part in."""
        if self.drafter_rows is None:
            self.drafter_rows = self.rows


class Slots:
    """All slots of an engine, and its pages.

    Args:
        count: of slots.
        margin: rows that may be written past those that are known, by the next step and those still under way.
        checkpoints: the kept states of recurrent layers, where sequences can go on from those alone.
        ahead: steps that may be under way when one is read.

    Attributes:
        table_changes: slot, place and page, of pages that slots have got and no step knows yet.
        window_changes: likewise, of layers with a window, where they have pages of their own.
        state_copies: places of states, from and to, that no step has copied yet.
    """

    def __init__(
        self, count: int, paging: Paging, margin: int, checkpoints: Checkpoints | None = None, ahead: int = 0
    ) -> None:
        assert paging.pages >= paging.width, "one sequence alone must fit"
        self.table_changes: list[tuple[int, int, int]] = []
        self.window_changes: list[tuple[int, int, int]] = []
        self.pages = Pages(paging)
        self._linear = LinearPages(paging) if paging.linear else None
        if self._linear is not None:
            self.pages = self._linear
        self._paging = paging
        self._margin, self._ahead = margin, ahead
        # Rows up to which the first pages are all that a step writes to, by their number.
        self._enough = [*(pages * paging.rows - margin for pages in range(paging.width)), math.inf]
        self._checkpoints = checkpoints
        self.state_copies: list[tuple[int, int]] = []
        self.total = count
        self._free = list(range(count))  # ascending
        self._stays: dict[Sequence, Stay] = {}

    def __iter__(self) -> Iterator[Stay]:
        return iter(list(self._stays.values()))

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._stays)

    def find(self, sequence: Sequence) -> Stay | None:
        """Finds a sequence's stay; None if it has no slot."""
        return self._stays.get(sequence)

    def admit(self, sequence: Sequence, drafts: bool) -> Stay | None:
        """Gives a sequence a slot and the pages for its prompt and one step; None where there are not enough.

        The lowest slot: linear sessions compute all slots up to the highest in use.
        """
        linear = self._linear
        slot = next((slot for slot in self._free if linear is None or linear.is_free(slot)), None)
        if slot is None:
            return None
        prompt = len(sequence.prompt_ids) + len(sequence.token_ids)
        # Rows that are shared are not computed, and have no log-probabilities.
        ids = sequence.tokens(0, 1 if sequence.awaits_prompt_logprobs else prompt)
        rows = min(prompt + self._margin, self._paging.rows * self._paging.width)
        reach = None if self._checkpoints is None else StateReach(self._checkpoints, ids, self._unwritten())
        lease = (
            self.pages.admit(ids, drafts, rows, reach) if linear is None else linear.admit_to(slot, ids, drafts, reach)
        )
        if lease is None:
            return None
        self._free.remove(slot)
        sequence.shared_pages = 0 if linear is not None else lease.rows // self._paging.rows
        drafter_rows = None if lease.drafter_rows == lease.rows else lease.drafter_rows
        offset = lease.rows - len(sequence.token_ids)
        stay = Stay(slot, sequence, prompt, lease, drafts, lease.rows, offset, drafter_rows)
        if reach is not None:
            self._load_state(stay, reach)
        stay.goes_on = -1 if sequence.is_watched else sequence.room - 1 - self._ahead
        self._stays[sequence] = stay
        self._update(stay)
        if linear is None:
            self.table_changes += [(slot, place, node.page) for place, node in enumerate(lease.nodes)]
            self._show(stay, lease.seen)
        return stay

    def look(self, stay: Stay, rows: int) -> None:
        """Gives a slot the pages of layers with a window for a step behind so many rows, and takes others back."""
        if self.pages.windows is not None:
            self._show(stay, self.pages.look(stay.lease, stay.rows, rows + self._margin))
            self._update(stay)

    def give_back(self, stay: Stay) -> None:
        """Takes back the pages of layers with a window that a slot sees no more: those of a piece that has been read.

        Its next piece may wait for long, and decoding steps look at its pages where a new one begins.
        """
        if self.pages.windows is not None:
            self.pages.look(stay.lease, stay.rows, 0)

    def begin_changes(self) -> None:
        """Begins new lists of changes: a step knows those so far."""
        if self.table_changes or self.window_changes:
            self.table_changes, self.window_changes = [], []
        if self.state_copies:
            self.state_copies = []

    def keep_state(self, stay: Stay, first: int) -> None:
        """Keeps the state behind a piece of a slot's prompt, from `first` on, if it is far enough behind the last one.

        The next step copies it, before it computes anything.
        """
        checkpoints, end = self._checkpoints, stay.launched
        ends = end == stay.prompt
        if checkpoints is None or (not ends and end != stay.branch and end - stay.kept < SPACING):
            return
        stay.kept = end
        state = checkpoints.keep(stay.sequence.tokens(0, end), first, ends)
        if state is not None:
            self.state_copies.append((stay.slot, state.place))
            stay.states.append((end, state))

    def _unwritten(self) -> set[int]:
        """Finds the places of kept states that no step has copied yet: where the next one fails, they never are."""
        return {target for _, target in self.state_copies}

    def _load_state(self, stay: Stay, reach: StateReach) -> None:
        """Gives a slot the state from which its sequence goes on."""
        kept = reach.go_on(stay.rows)
        if kept is not None:
            self.state_copies.append((kept.place, stay.slot))
        stay.branch = reach.branch(stay.rows, kept, stay.prompt)

    def grow(self, stay: Stay) -> bool:
        """Gives a slot the pages that its next step may write to; False: no more are available."""
        pages, lease, enough = self.pages, stay.lease, self._enough
        rows = stay.offset + len(stay.sequence.token_ids)  # `stay.rows`, and `stay.watch()` below: each step calls this
        count = len(lease.nodes)
        while rows > enough[count]:
            if pages.used == pages.total:
                return False
            self.table_changes.append((stay.slot, count, pages.grow(lease)))
            count += 1
        stay.enough = enough[count]
        has_pages = stay.enough - stay.offset
        stay.quiet = has_pages if has_pages < stay.goes_on else stay.goes_on
        if pages.windows is not None:
            self.look(stay, rows)
        return True

    def record(self, stay: Stay) -> None:
        """Lets other prompts know the rows that a slot has."""
        lease = stay.lease
        tokens = stay.sequence.tokens(lease.rows, stay.rows)
        drafter_rows = lease.rows + len(tokens) if stay.drafter_rows is None else stay.drafter_rows
        exchanged = self.pages.record(lease, tokens, drafter_rows)
        self.table_changes += [(stay.slot, *change) for change in exchanged]
        self._show(stay, [place for place, _ in exchanged if place in lease.seen])

    def leave(self, stay: Stay, forget: bool = False) -> None:
        """Frees a slot; its rows stay, for later prompts that begin with them, or are forgotten."""
        stay.sequence.pages = len(stay.lease.nodes)
        if forget:
            self._forget_copies(stay.slot)
            self.forget_states(stay)
            self.pages.forget(stay.lease)
        else:
            self.record(stay)
            self.pages.release(stay.lease)
        stay.over = True
        stay.quiet = stay.goes_on = -1
        self.table_changes = [change for change in self.table_changes if change[0] != stay.slot]
        self.window_changes = [change for change in self.window_changes if change[0] != stay.slot]
        del self._stays[stay.sequence]
        insort(self._free, stay.slot)

    def forget_states(self, stay: Stay) -> None:
        """Forgets the states that a sequence, which may be over, has left to others in steps that are not read."""
        for _, state in stay.states:
            if self._checkpoints is not None and self._checkpoints.drop(state):
                self.state_copies = [copy for copy in self.state_copies if copy[1] != state.place]
        stay.states.clear()

    def drop_copies(self, launched: list[list[tuple[int, int]]] | None = None) -> list[Stay]:
        """Forgets the states that a failed step may have copied, or not; made again, some would be of others' states.

        Args:
            launched: copies of that step, then of those launched behind it; None: it was not launched, and its copies
                are those that no step has made.

        Returns:
            Those whose slots may have got such a state.
        """
        failed, *behind = launched or [self.state_copies]
        pending, self.state_copies = self.state_copies if launched else [], []
        spoilt = {target for _, target in failed}
        for source, target in chain(*behind, pending):
            spoilt = spoilt | {target} if source in spoilt else spoilt - {target}
        self.state_copies = [copy for copy in pending if copy[0] not in spoilt]
        if self._checkpoints is not None:
            self._checkpoints.drop_at(spoilt)
        return [stay for stay in self if stay.slot in spoilt]

    def _forget_copies(self, slot: int) -> None:
        """Forgets the states that a slot would have left to others, also those of sequences that had it before."""
        if self._checkpoints is None:
            return
        self._checkpoints.drop_at({target for source, target in self.state_copies if source == slot})
        self.state_copies = [copy for copy in self.state_copies if slot not in copy]

    def _show(self, stay: Stay, places: Iterable[int]) -> None:
        """Notes the pages of layers with a window that a slot has at these places."""
        windows, nodes = self.pages.windows, stay.lease.nodes
        if windows is not None:
            self.window_changes += [(stay.slot, place, windows.of(nodes[place].page)) for place in places]

    def _update(self, stay: Stay) -> None:
        stay.enough = self._enough[len(stay.lease.nodes)]
        if self.pages.windows is not None:
            stay.enough = min(stay.enough, self._enough[stay.lease.seen.stop])
        stay.watch()
