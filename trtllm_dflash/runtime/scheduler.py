"""In-flight batching: sequences join and leave the running batch at any step.

A step has the next rows of all running sequences, and pieces of waiting prompts as far as its budget goes. The host
launches it before it has read the one before it, where the device computes by itself (`session.ahead`): the end of a
sequence is known one step late, and its tokens of that step are dropped.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import compress
from operator import attrgetter

from trtllm_dflash.errors import DeadlineError, DFlashError, EngineError
from trtllm_dflash.runtime.batch import NOBODY, Batch
from trtllm_dflash.runtime.checkpoints import checkpoints_of
from trtllm_dflash.runtime.clock import now_ns
from trtllm_dflash.runtime.deadlines import Deadlines
from trtllm_dflash.runtime.draft_length import DraftLength, FixedDraftLength
from trtllm_dflash.runtime.drafting import DraftChooser
from trtllm_dflash.runtime.guiding import guide_step
from trtllm_dflash.runtime.launched import Launched
from trtllm_dflash.runtime.logprobs import note_logprobs
from trtllm_dflash.runtime.pace import Pace
from trtllm_dflash.runtime.pieces import add_needs, divided, piece_of
from trtllm_dflash.runtime.prefill_budget import FixedPrefillBudget, PrefillBudget
from trtllm_dflash.runtime.queue import Queue
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.slots import Slots, Stay
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.session.calls import Prepare, Step
from trtllm_dflash.session.outcome import Packed
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import Drafting

_RANK = attrgetter("rank")


class Scheduler:
    """Runs sequences on a session, which it prepares. A sequence takes a free slot, and leaves it at its end.

    Args:
        session: runs the steps.
        draft: False decodes plainly, without the drafter's work.
        draft_length: chooses how much to draft; by default the drafter's whole block.
        budget: chooses how much of the prompts to read in a step beside decoding; by default all that a step takes.
        prefill_share: of the steps that are pieces of prompts, where the session does not mix them with decoding, while
            there are both prompts and running sequences.
        ahead: steps to launch before the first is read; by default the session's.
        clock: returns seconds, for deadlines.
    """

    def __init__(
        self,
        session: Session,
        draft: bool = True,
        draft_length: DraftLength | None = None,
        budget: PrefillBudget | None = None,
        prefill_share: float = 0.5,
        ahead: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, self._limits = session.config, session.limits
        self._session = session
        self._draft = draft and config.drafter is not None
        self._longest = config.block_size - 1
        self._draft_length = draft_length or FixedDraftLength(self._longest)
        self._chooser = DraftChooser(config, self._limits, self._draft_length, self._draft)
        self._budget = budget or FixedPrefillBudget(self._limits.prompt_rows)
        self._share = prefill_share
        self._credit = 1.0  # of prompts, where steps are not mixed: a piece costs 1
        self._ahead = session.ahead if ahead is None else ahead
        self._clock = clock
        lengths = self._draft_length.lengths if self._draft else ()
        session.prepare(Prepare(lengths, config.sampling, self._limits.shapes, self._chooser.may_share))
        # Every step under way may move a slot by a block, the next one writes a block, and its drafter another.
        margin = (self._ahead + 2) * (max(config.block_size, config.draft_tree + 1) if self._draft else 1)
        self._queue = Queue()
        self._slots = Slots(config.max_batch, session.paging, margin, checkpoints_of(session), self._ahead)
        self._prefilling: list[Stay] = []  # in order of rank
        self._running: list[Stay] = []  # without those that the steps under way will end
        self._short: list[Stay] = []  # need pages before their next step
        self._batch: Batch | None = None  # of `_running`; None: it has changed
        self._launched: deque[Launched] = deque()
        self._pace = Pace()
        self._decoded = 0  # steps with decoding slots
        self._refused: tuple[Sequence, int] | None = None  # a slot or pages; at what change of them
        self._unwanted: list[Sequence] = []
        self._deadlines = Deadlines()
        self._changed: list[Sequence] = []
        self.statistics = Statistics.of(session, self._queue, self._slots)

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs, or a launched step is not yet read."""
        return bool(self._queue or self._launched or self._slots)

    @property
    def patience(self) -> tuple[int, float]:
        """Counts the slots that requests may still take in the next step, and the seconds that it can wait for them."""
        free = 0 if self._queue else self._slots.total - len(self._slots)
        return free, self._pace.spare if free else 0.0

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._queue.push(sequence)
        self._deadlines.add(sequence, len(self._queue) + len(self._slots))

    def cancel(self, sequence: Sequence, error: DFlashError) -> None:
        """Ends a sequence with an error at the next step, unless it ends before."""
        if not sequence.done:
            sequence.error = error
            self._unwanted.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step as complete with what there is of it, unless it ends before."""
        if not sequence.done:
            sequence.cut(now_ns())
            self._unwanted.append(sequence)

    def step(self) -> list[Sequence]:
        """Launches a step, reads the one before it, and returns the sequences that have updates.

        A step that fails fails its sequences.
        """
        if self._unwanted or self._deadlines:
            self._drop_unwanted()
        if self._short:
            self._give_pages()
        if self._queue:
            self._admit()
        launched = self._launch()
        while len(self._launched) > (self._ahead if launched else 0):
            self._read(self._launched.popleft())
            self._pace.note(bool(self._launched))
        changed, self._changed = self._changed, []
        return changed

    def fail_all(self, error: DFlashError) -> list[Sequence]:
        """Ends every sequence with an error; returns them, and those that an unfinished `step` did not return."""
        self._launched.clear()
        for sequence in self._queue.remove_if(lambda _: True):
            self._end(sequence, error)
        for stay in self._slots:
            self._fail(stay, error)
        changed, self._changed = self._changed, []
        return changed

    # -- who runs --------------------------------------------------------------------------------------------------

    def _drop_unwanted(self) -> None:
        """Ends the sequences that were cancelled or cut short, and those whose deadline has passed."""
        for sequence in self._deadlines.passed(self._clock()):
            self.cancel(sequence, DeadlineError("deadline: it passed before the reply was complete"))
        if not self._unwanted:
            return
        for sequence in self._queue.remove_if(lambda waiting: waiting.done):
            self._end(sequence, sequence.error)
        for sequence in self._unwanted:
            stay = self._slots.find(sequence)
            if stay is not None:
                self._end(sequence, sequence.error)
                self._leave(stay)
        self._unwanted = []

    def _admit(self) -> None:
        """Gives slots and pages to those that wait, in their order: nobody overtakes one that waits for pages.

        One whose prompt begins like another's that is being read waits until it can share those pages.
        """
        late: list[Sequence] = []
        try:
            while self._queue:
                sequence, changes = self._queue.first(), self._slots.pages.changes
                if self._refused == (sequence, changes):
                    break
                if len(late) >= self._slots.total - len(self._slots):
                    break  # no slot is free, or those that are will be theirs
                if self._will_share(sequence):
                    late.append(self._queue.pop())
                    continue
                stay = self._slots.admit(sequence, self._draft and sequence.draft)
                if stay is None:
                    self._refused = sequence, changes
                    break
                self._queue.pop()
                self._begin(stay)
        finally:
            for sequence in late:
                self._queue.push(sequence)

    def _begin(self, stay: Stay) -> None:
        """Counts a sequence that has got a slot, and lets its prompt be read."""
        self.statistics.kv_tokens_in_use += stay.rows
        insort(self._prefilling, stay, key=_RANK)
        sequence = stay.sequence
        if not sequence.times.first_scheduled_ns:
            sequence.times.first_scheduled_ns, sequence.reused = now_ns(), stay.rows
            self.statistics.count_prompt(stay.prompt, stay.rows)

    def _will_share(self, sequence: Sequence) -> bool:
        """Whether a prompt has whole pages in common with one that is read before it, which are not read yet."""
        if sequence.awaits_prompt_logprobs:
            return False  # it shares no rows
        page, ids = self._slots.pages.rows, sequence.prompt_ids
        for stay in self._slots if self._limits.checkpoints is None else ():
            lacks_drafter_rows = self._draft and sequence.draft and stay.drafter_rows is not None
            if stay.rows >= stay.prompt or stay.rank > sequence.rank or lacks_drafter_rows:
                continue
            others = stay.sequence.prompt_ids
            wanted = stay.rows // page * page + page  # the next one's end
            if wanted < len(ids) and wanted <= len(others) and ids[:wanted] == others[:wanted]:
                return True
        return False

    def _give_pages(self) -> None:
        """Gives running sequences the pages that their next step may write to; the last in rank wait again for them."""
        short, self._short = self._short, []
        for stay in short:
            while not (stay.over or self._slots.grow(stay)):
                self._preempt(max(self._slots, key=_RANK))

    def _preempt(self, stay: Stay) -> None:
        """Puts a sequence back into the queue, to be computed again from its prompt and the tokens so far."""
        self._leave(stay)
        self._queue.push(stay.sequence)
        self.statistics.preemptions += 1

    def _leave(self, stay: Stay, forget: bool = False) -> None:
        self.statistics.kv_tokens_in_use -= stay.rows
        self._slots.leave(stay, forget)
        for stays in (self._prefilling, self._running):
            if stay in stays:
                stays.remove(stay)
        self._batch = None

    # -- launching -------------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        batch = self._next_batch()
        reading = self._prefilling[: self._limits.pieces]
        pieces: list[tuple[Stay, int]] = []
        try:
            if reading:
                batch, pieces = self._choose(batch, reading)
                reading = [stay for stay, _ in pieces]
            if not pieces and (not batch.stays or self._may_all_have_ended(batch)):
                return False
            self._run(batch, reading, pieces)
        except Exception as error:
            for stay in [*batch.stays, *reading]:
                self._fail(stay, error)
            for stay in self._slots.drop_copies():
                self._preempt(stay)
            return False
        return True

    def _next_batch(self) -> Batch:
        if self._batch is None:
            self._batch = Batch.of(self._running)
        return self._batch

    def _choose(self, batch: Batch, reading: list[Stay]) -> tuple[Batch, list[tuple[Stay, int]]]:
        """Chooses a step's decoding slots and pieces of prompts; either, where the session does not mix them."""
        if self._limits.mixes:
            return batch, self._pieces(batch, reading)
        pieces = self._pieces(NOBODY, reading) if not batch.stays or self._credit >= 1 else []
        if batch.stays:
            self._credit += self._share - bool(pieces)
        return (NOBODY if pieces else batch), pieces

    def _may_all_have_ended(self, batch: Batch) -> bool:
        """Whether the steps under way may well end the only sequence: one more would but delay the next."""
        if len(batch.stays) > 1 or not self._launched:
            return False
        sequence = batch.stays[0].sequence
        under_way = sum(batch is launched.batch for launched in self._launched)
        return sequence.left <= under_way * max(min(batch.block, self._longest + 1) // 2, 1)

    def _pieces(self, batch: Batch, waiting: list[Stay]) -> list[tuple[Stay, int]]:
        """Chooses how many tokens of these prompts a step with these decoding slots reads."""
        like = self._chooser.like(batch, self._prefilling)
        budget = self._budget.choose(len(batch.stays), like.block - 1, len(self._prefilling), self._limits.prompt_rows)
        pieces = divided(budget, waiting)
        # What the step computes in any case is not wasted on rows of nobody.
        room = self._session.prompt_room(like, [count for _, count in pieces])
        return divided(room, [stay for stay, _ in pieces]) if room > budget else pieces

    def _run(self, batch: Batch, reading: list[Stay], pieces: list[tuple[Stay, int]]) -> None:
        """Runs a step of these decoding slots, and of pieces of the prompts that are read."""
        last = [stay for stay, count in pieces if stay.launched + count == stay.prompt] if pieces else []
        slots = self._slots_computed(batch, last)
        drafts = self._chooser.choose(batch, reading, last, self._prefilling, slots)
        batch = batch if drafts.most is None else batch.cut(drafts.most)
        for stay, count in pieces:
            self._slots.look(stay, stay.launched + count)
        calls = [piece_of(stay, count) for stay, count in pieces] if pieces else []
        if batch.guided or reading:
            batch, guides, masks = guide_step(self._session, batch, reading, calls, self._launched)
        else:
            guides, masks = [], None
        # Its fields by name, but not all in one call: that takes three times as long.
        step = Step(batch.rows, calls, drafts.drafting, drafts.block, batch.sampled, self._slots.table_changes)
        step.window_pages, step.state_copies = self._slots.window_changes, self._slots.state_copies
        step.tree, step.chances, step.share = drafts.tree, drafts.shares, drafts.share
        step.logprobs, step.penalized, step.guides, step.masks = batch.logprobs, batch.penalized, guides, masks
        if pieces:
            add_needs(step, reading)
        outcome = self._session.run(step)
        self._slots.begin_changes()
        self._chooser.note(drafts)
        if batch.stays:
            self._decoded += 1
            is_other = batch.block != drafts.rows or batch.trees != (drafts.tree > 0)
            if batch.drafts and (is_other or drafts.most is not None):
                for stay in batch.stays:
                    stay.block, stay.tree = drafts.rows, drafts.tree > 0
                self._batch = None
        found = step.reports, {} if masks is None else masks.errors, drafts.most is not None, step.state_copies
        self._launched.append(Launched(batch, pieces, outcome, drafts.drafting, self._decoded, *found))
        for stay, count in pieces:
            self._slots.pages.copied(stay.lease)
            stay.launched += count
            self._slots.keep_state(stay, stay.launched - count)
            if stay.launched == stay.prompt:
                stay.block, stay.tree = drafts.rows, drafts.tree > 0
                self._prefilling.remove(stay)
                self._join(stay)
        self._count_step(batch, pieces)

    def _count_step(self, batch: Batch, pieces: list[tuple[Stay, int]]) -> None:
        kind = "mixed" if pieces and batch.stays else "prefill" if pieces else "decode"
        self.statistics.steps[kind] += 1
        if pieces:
            self.statistics.histograms["rows"].observe(sum(count for _, count in pieces))

    def _join(self, stay: Stay) -> None:
        """Adds a sequence to the decoding ones, unless its prompt's last step ends it for certain."""
        if stay.sequence.left > 1:
            self._running.append(stay)
            self._batch = None

    def _slots_computed(self, batch: Batch, begin: list[Stay]) -> int:
        """Counts the slots that a step of the running sequences, and of those that begin to decode, computes."""
        if self._limits.mixes:
            return len(batch.stays) + len(begin)
        return 1 + max((stay.slot for stay in [*self._running, *begin]), default=-1)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, launched: Launched) -> None:
        try:
            packed = launched.outcome.packed()
        except Exception as error:
            for stay in launched.stays:
                if stay.over:
                    self._slots.forget_states(stay)
                else:
                    self._fail(stay, error)
            for stay in self._slots.drop_copies([each.copies for each in (launched, *self._launched)]):
                self._preempt(stay)
            return
        for stay, wrong in launched.errors.items():
            if not stay.over:
                self._fail(stay, wrong)
        now = now_ns()
        wrote_drafter = launched.drafting is not Drafting.OFF
        if launched.batch.stays:
            self._settle(launched, packed, wrote_drafter, now)
        if launched.pieces:
            (whole, begins, accepted, unpack), first = packed, len(launched.batch.stays)
            for (stay, count), drafts, begin in zip(launched.pieces, accepted[first:], begins[first:], strict=True):
                if not stay.over:
                    self._settle_piece(stay, count, unpack[drafts](whole, begin), launched, wrote_drafter, now)
        if launched.outcome.gains:  # of the drafts that it has made: behind what was accepted of those before
            self._draft_length.foresee(launched.outcome.gains)
        if launched.reports:
            note_logprobs(launched.outcome.report, [stay.sequence for stay in launched.stays])

    def _settle(self, launched: Launched, packed: Packed, wrote_drafter: bool, now: int) -> None:
        """Takes what a step has decoded. Its loop runs for every step and slot: no line that is not needed."""
        batch, outcome, under_way = launched.batch, launched.outcome, self._decoded - launched.number
        if not wrote_drafter:
            for stay in batch.stays:
                if stay.drafter_rows is None:
                    stay.note_drafter_rows()
        whole, begins, accepted, unpack = packed
        drafted, accepted, short = launched.drafted, accepted[: len(batch.stays)], self._short
        new = sum(accepted) + len(accepted)  # tokens
        self.statistics.kv_tokens_in_use += new
        cut: dict[int, int] = {}  # places of slots of whose tokens fewer count, and how many; 0: it is over, or fails
        may_end, has_no_end = batch.ends is None or outcome.may_have(batch.ends), batch.end_ids.isdisjoint
        slots = zip(batch.stays, batch.sequences, begins, accepted, drafted, strict=False)
        for stay, sequence, begin, survived, drafts in slots:
            ids = unpack[survived](whole, begin)
            tokens = sequence.token_ids
            tokens += ids
            # Always at one that is over, or has no limit yet.
            if len(tokens) > stay.quiet or (may_end and not has_no_end(ids)):
                if len(tokens) > stay.goes_on or (may_end and not has_no_end(ids)):
                    del tokens[-len(ids) :]  # not all of them may count
                    taken = self._look(stay, ids, drafts, under_way, now)
                    if taken < len(ids):
                        cut[batch.stays.index(stay)] = taken
                    continue
                short.append(stay)
            if sequence.text is not None and not self._say(stay, ids):
                cut[batch.stays.index(stay)] = 0
                continue
            sequence.accepted_per_step.append(survived)
            sequence.drafted += drafts
        for place, taken in cut.items():
            new -= accepted[place] + 1 - taken
            accepted[place] = taken  # the last of them is a draft
        self.statistics.committed_tokens += new
        grown = [cut.get(place, 1) for place in range(len(accepted))] if cut else None
        self._changed += batch.sequences if grown is None else compress(batch.sequences, grown)
        if batch.drafts:
            launched.count_drafts(cut, drafted, accepted, self.statistics, self._draft_length)

    def _say(self, stay: Stay, ids: tuple[int, ...]) -> bool:
        """Adds tokens to a reply's text; False: that has failed, which is nobody else's matter."""
        try:
            stay.sequence.say(ids)
        except Exception as error:
            stay.offset -= len(ids)
            self.statistics.kv_tokens_in_use -= len(ids)
            self._fail(stay, error)
            return False
        return True

    def _look(self, stay: Stay, ids: tuple[int, ...], drafted: int, under_way: int, now: int) -> int:
        """Takes what a step has decoded for a slot that is to be looked at; returns the tokens that count."""
        sequence, tokens, rows, taken = stay.sequence, stay.sequence.token_ids, stay.rows, 0
        try:
            if not stay.over:
                taken = sequence.commit(ids, drafted, now)
        except Exception as error:  # of its text or grammar
            stay.rows = rows
            self._fail(stay, error)
        if not taken:
            self.statistics.kv_tokens_in_use -= len(ids)
            return 0
        stay.offset += len(ids) - taken  # behind its end, there are rows too
        if sequence.finish_reason is not None or sequence.room - len(tokens) <= under_way:
            self._retire(stay)
        elif stay.offset + len(tokens) > stay.enough:
            self._short.append(stay)
        return taken

    def _retire(self, stay: Stay) -> None:
        """Takes a sequence out of the decoding ones: it has ended, or the steps under way end it, a token each."""
        if stay.sequence.finish_reason is not None:
            self._finish(stay)
        elif stay in self._running:
            self._running.remove(stay)
            self._batch = None

    def _settle_piece(
        self, stay: Stay, count: int, ids: tuple[int, ...], launched: Launched, wrote_drafter: bool, now: int
    ) -> None:
        if not wrote_drafter:
            stay.note_drafter_rows()
        rows = stay.rows = stay.rows + count
        self.statistics.kv_tokens_in_use += count
        if stay.states:  # those up to here are as good as what was read
            stay.states = [(end, state) for end, state in stay.states if end > rows]
        try:
            self._slots.record(stay)
            self._slots.give_back(stay)
            if rows < stay.prompt:
                return
            self.statistics.committed_tokens += stay.sequence.begin(ids, now)
            stay.rows = rows
        except Exception as error:
            stay.rows = rows
            self._fail(stay, error)
            return
        sequence = stay.sequence
        self._changed.append(sequence)
        if sequence.left <= self._decoded - launched.number:
            self._retire(stay)

    def _finish(self, stay: Stay) -> None:
        self.statistics.count_end(stay.sequence)
        self._leave(stay)

    def _end(self, sequence: Sequence, error: DFlashError | None) -> None:
        sequence.error = error
        self.statistics.count_end(sequence)
        self._changed.append(sequence)

    def _fail(self, stay: Stay, error: Exception) -> None:
        """Ends a slot's sequence with an error, and forgets its K/V rows."""
        if not isinstance(error, DFlashError):
            lines = str(error).splitlines()
            error = EngineError(f"a step failed: {type(error).__name__}: {lines[0] if lines else ''}")
        self._end(stay.sequence, error)
        self._leave(stay, forget=True)
