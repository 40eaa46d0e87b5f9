"""In-flight batching: sequences join and leave the running batch at any step.

The host launches a step before it has read the one before it, where the device computes by itself
(`session.ahead`): the end of a sequence is known one step late, and its tokens of that step are dropped.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from trtllm_dflash.errors import DeadlineError, DFlashError, EngineError
from trtllm_dflash.runtime.draft_length import DraftLength, FixedDraftLength
from trtllm_dflash.runtime.queue import Queue
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.slots import MIN_COPIED_ROWS, Slot, Slots
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.session.calls import Copy, Decode, Prefill, Prepare, SlotSampling
from trtllm_dflash.session.session import Outcome, Session
from trtllm_dflash.step import Drafting


@dataclass(frozen=True)
class _Part:
    """One sequence's part in a step."""

    slot: Slot
    sequence: Sequence
    index: int  # its row in the outcome
    row_ids: list[int]  # prefill: the chunk
    drafts: int = 0  # decode: drafts that are verified
    last_chunk: bool = False


@dataclass(frozen=True)
class _Launched:
    """A step that was launched and not yet read."""

    parts: list[_Part]
    outcome: Outcome
    wrote_drafter: bool


class Scheduler:
    """Runs sequences on a session, which it prepares. A sequence takes the lowest free slot and leaves at its end.

    Args:
        session: runs the steps.
        draft: False decodes plainly, without the drafter's work.
        draft_length: chooses how much to draft; by default the drafter's whole block.
        prefill_share: of the steps that are chunks of prompts, while there are both prompts and running sequences.
        ahead: steps to launch before the first is read; by default the session's.
        clock: returns seconds, for deadlines.
    """

    def __init__(
        self,
        session: Session,
        draft: bool = True,
        draft_length: DraftLength | None = None,
        prefill_share: float = 0.5,
        ahead: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = session.config
        self._session = session
        self._draft = draft and config.drafter is not None
        self._draft_length = draft_length or FixedDraftLength(config.block_size - 1)
        self._share = prefill_share
        self._ahead = session.ahead if ahead is None else ahead
        self._clock = clock
        session.prepare(Prepare(self._draft_length.lengths if self._draft else (), config.sampling))
        self._credit = 1.0  # of prompts: a chunk costs 1
        self._queue = Queue()
        self._slots = Slots(config.max_batch)
        self._launched: deque[_Launched] = deque()
        self._admitted = count()
        self._changed: list[Sequence] = []
        kv_tokens = config.max_batch * config.max_seq_len
        self.statistics = Statistics(config.max_batch, kv_tokens, session.choice.labels)

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs, or a launched step is not yet read."""
        return bool(self._queue or self._launched) or any(slot.sequence for slot in self._slots)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. One whose `error` is set later leaves at the next step."""
        self._queue.push(sequence)
        self.statistics.waiting = len(self._queue)

    def step(self) -> list[Sequence]:
        """Launches a step, reads the one before it, and returns the sequences that have updates.

        A step is a chunk of a prompt, or a block of all running sequences. One that fails fails its sequences.
        """
        self._drop_unwanted()
        self._admit()
        launched = self._launch()
        while len(self._launched) > (self._ahead if launched else 0):
            self._read(self._launched.popleft())
        self._count_requests()
        changed, self._changed = self._changed, []
        return changed

    def fail_all(self, error: DFlashError) -> list[Sequence]:
        """Ends every sequence with an error; returns them, and those that an unfinished `step` did not return."""
        self._launched.clear()
        for sequence in self._queue.remove_if(lambda _: True):
            self._end(sequence, error)
        for slot in self._slots:
            if slot.sequence is not None:
                self._fail(slot, error)
        self._count_requests()
        changed, self._changed = self._changed, []
        return changed

    def _count_requests(self) -> None:
        running = [slot for slot in self._slots if slot.sequence is not None]
        self.statistics.waiting = len(self._queue)
        self.statistics.running = len(running)
        self.statistics.kv_tokens_in_use = sum(len(slot.rows) for slot in running)

    # -- who runs --------------------------------------------------------------------------------------------------

    def _drop_unwanted(self) -> None:
        """Ends the sequences that were cancelled, and those whose deadline has passed."""
        now = self._clock()

        def unwanted(sequence: Sequence) -> bool:
            if sequence.error is None and sequence.deadline is not None and now >= sequence.deadline:
                sequence.error = DeadlineError("deadline: it passed before the reply was complete")
            return sequence.error is not None

        for sequence in self._queue.remove_if(unwanted):
            self._end(sequence, sequence.error)
        for slot in self._slots:
            if slot.sequence is not None and unwanted(slot.sequence):
                self._end(slot.sequence, slot.sequence.error)
                slot.release()

    def _admit(self) -> None:
        while self._queue and (slot := self._slots.lowest_free()) is not None:
            slot.sequence = self._queue.pop()
            slot.order = next(self._admitted)
            try:
                self._reuse_prefix(slot, slot.sequence)
            except Exception as error:
                self._fail(slot, error)
                break  # what fails once may fail for all that wait

    def _reuse_prefix(self, slot: Slot, sequence: Sequence) -> None:
        """Starts a prompt from the K/V rows that some slot already has of it."""
        drafts = self._drafts(sequence)
        source, rows = self._slots.longest_prefix(sequence.prompt_ids, drafts)
        own = slot.shared_rows(sequence.prompt_ids, drafts)
        if rows == own or rows < MIN_COPIED_ROWS:
            rows = own
        else:
            self._session.copy_rows(Copy(source.index, slot.index, rows))
            slot.rows, slot.drafter_rows = source.rows[:rows], min(source.drafter_rows, rows)
        slot.forget(rows)
        sequence.prefilled = sequence.reused = rows
        self.statistics.prompt_tokens += len(sequence.prompt_ids)
        self.statistics.reused_tokens += rows

    # -- launching -------------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        prefilling = [slot for slot in self._slots if slot.sequence is not None and not slot.running]
        decoding = [slot for slot in self._slots if slot.running and not self._ends_in_flight(slot)]
        if not prefilling and not decoding:
            return False
        prefill = bool(prefilling) and (not decoding or self._credit >= 1)
        if prefilling and decoding:
            self._credit += self._share - prefill
        slots = [min(prefilling, key=_first_come)] if prefill else decoding
        parts = [self._chunk(slots[0])] if prefill else self._batch(slots)
        try:
            launched = self._prefill(parts[0]) if prefill else self._decode(parts)
        except Exception as error:
            for slot in slots:
                self._fail(slot, error)
            return False
        self._launched.append(launched)
        self.statistics.steps["prefill" if prefill else "decode"] += 1
        return True

    def _ends_in_flight(self, slot: Slot) -> bool:
        """Whether the launched steps end a slot's sequence for certain: each adds a token at least."""
        sequence = slot.sequence
        return sequence is not None and len(sequence.token_ids) + sequence.in_flight >= sequence.room

    def _chunk(self, slot: Slot) -> _Part:
        sequence = slot.sequence
        assert sequence is not None
        first = sequence.prefilled
        ids = sequence.prompt_ids[first : first + self._session.config.chunk]
        return _Part(slot, sequence, 0, ids, last_chunk=first + len(ids) == len(sequence.prompt_ids))

    def _prefill(self, part: _Part) -> _Launched:
        slot, sequence, params = part.slot, part.sequence, part.sequence.params
        drafts = 0
        if part.last_chunk and self._drafts(sequence) and sequence.room > 1:
            drafts = self._draft_length.choose(1 + max(s.index for s in self._slots if s.running or s is slot))
        drafting = _drafting(drafts) if self._draft else Drafting.OFF
        call = Prefill(
            slot=slot.index,
            start=sequence.prefilled,
            token_ids=part.row_ids,
            last=part.last_chunk,
            drafting=drafting,
            block=drafts + 1,
            sampling=SlotSampling(params.temperature, params.top_k, params.top_p, params.seed),
        )
        if not sequence.times.first_scheduled_ns:
            sequence.times.first_scheduled_ns = time.time_ns()
        outcome = self._session.prefill(call)
        sequence.prefilled += len(part.row_ids)
        if part.last_chunk:
            sequence.in_flight += 1
            slot.running = True
            slot.block = call.block
        return _Launched([part], outcome, drafting is not Drafting.OFF)

    def _batch(self, slots: list[Slot]) -> list[_Part]:
        parts = []
        for slot in slots:
            sequence = slot.sequence
            assert sequence is not None
            drafts = slot.block - 1 if self._drafts(sequence) else 0
            parts.append(_Part(slot, sequence, slot.index, [], drafts))
        return parts

    def _decode(self, parts: list[_Part]) -> _Launched:
        row_counts = [0] * (parts[-1].index + 1)
        for part in parts:
            row_counts[part.index] = part.drafts + 1
        drafting, drafts = Drafting.OFF, 0
        if any(self._drafts(part.sequence) for part in parts):
            drafts = self._draft_length.choose(len(row_counts))  # as many slots as the step computes
            drafting = _drafting(drafts)
        sampled = any(part.sequence.params.temperature > 0 for part in parts)
        call = Decode(row_counts, drafting, drafts + 1, sampled)
        outcome = self._session.decode(call)
        for part in parts:
            part.sequence.in_flight += 1
            part.slot.block = call.block
        return _Launched(parts, outcome, drafting is not Drafting.OFF)

    def _drafts(self, sequence: Sequence) -> bool:
        return self._draft and sequence.draft

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, launched: _Launched) -> None:
        try:
            committed = launched.outcome.read()
        except Exception as error:
            for part in launched.parts:
                if part.slot.sequence is part.sequence:
                    self._fail(part.slot, error)
            return
        for part in launched.parts:
            try:
                self._settle(part, committed[part.index], launched.wrote_drafter)
            except Exception as error:  # of its text, say: nobody else's matter
                if part.slot.sequence is part.sequence:
                    self._fail(part.slot, error)

    def _settle(self, part: _Part, ids: list[int], wrote_drafter: bool) -> None:
        slot, sequence = part.slot, part.sequence
        gives_tokens = part.last_chunk or not part.row_ids
        sequence.in_flight -= gives_tokens
        if slot.sequence is not sequence:
            return  # it has ended: this step was launched before that was known
        slot.keep(part.row_ids, wrote_drafter)
        if not gives_tokens:
            return
        if not part.row_ids:  # the bonus token of the step before, and the drafts that were accepted
            slot.keep([sequence.token_ids[-1], *ids[:-1]], wrote_drafter)
        taken = sequence.commit(ids)
        self.statistics.committed_tokens += taken
        if not part.row_ids:
            accepted = min(len(ids) - 1, taken)
            sequence.count_drafts(part.drafts, accepted)
            if part.drafts:
                self.statistics.count_drafts(part.drafts, accepted, taken)
                self._draft_length.observe(part.drafts, len(ids) - 1)
        self._changed.append(sequence)
        if sequence.done:
            self.statistics.count_end(sequence)
            slot.release()

    def _end(self, sequence: Sequence, error: DFlashError | None) -> None:
        sequence.error = error
        self.statistics.count_end(sequence)
        self._changed.append(sequence)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """Ends a slot's sequence with an error, and forgets its K/V rows."""
        assert slot.sequence is not None
        if not isinstance(error, DFlashError):
            lines = str(error).splitlines()
            error = EngineError(f"a step failed: {type(error).__name__}: {lines[0] if lines else ''}")
        self._end(slot.sequence, error)
        slot.release()
        slot.forget()


def _drafting(drafts: int) -> Drafting:
    return Drafting.BLOCK if drafts else Drafting.CONTEXT


def _first_come(slot: Slot) -> tuple[int, int]:
    assert slot.sequence is not None
    return slot.sequence.priority, slot.order
