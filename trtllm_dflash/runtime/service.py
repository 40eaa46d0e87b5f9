"""An engine that takes requests from any thread, and runs them together in a thread of its own."""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import LEAST_SHARING, draft_lengths, shared_lengths
from trtllm_dflash.errors import (
    CancelledError,
    DFlashError,
    EngineError,
    QueueFullError,
    ReplyError,
    RequestError,
    ShutdownError,
)
from trtllm_dflash.runtime.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength, check_draft_length
from trtllm_dflash.runtime.harvest import Harvest
from trtllm_dflash.runtime.intake import Intake, Prompt
from trtllm_dflash.runtime.prefill_budget import (
    MIN_PIECE,
    AutoPrefillBudget,
    FixedPrefillBudget,
    MixedStepTimes,
    PrefillBudget,
)
from trtllm_dflash.runtime.request import DEFAULT_PRIORITY, SamplingParams, Sequence, Update
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.runtime.shared_rows import SharedRows
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.runtime.step_times import decoding_times, step_times
from trtllm_dflash.session.session import Session

#: Steps that fail without any reply being completed between them, after which an engine is given up: it may be lost.
MOST_FAILURES = 3

_CLOSE_SECONDS = 30

_log = logging.getLogger(__name__)


class Ticket:
    """A request that a service has taken."""

    def __init__(self, sequence: Sequence, on_update: Callable[[Update], None]) -> None:
        self.sequence = sequence
        self.on_update = on_update
        self.cancelled = False


class Service:
    """Serves requests on a session until it is closed.

    Args:
        session: runs the steps. Nobody else may use it meanwhile, and closing it is its owner's.
        intake: makes requests ready for that session.
        folder: the engine directory, where measured step times are kept, if any.
        after_step: called on the service's thread when a step's updates have been reported.
        clock: returns seconds, for deadlines.

    Attributes:
        failure: the error that ended it; None while it serves.
    """

    def __init__(
        self,
        session: Session,
        intake: Intake,
        settings: ServiceSettings | None = None,
        folder: Path | None = None,
        after_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or ServiceSettings()
        self.failure: str | None = None
        self._config = session.config
        self._intake = intake
        self._after_step = after_step
        self._clock = clock
        lengths = _lengths(self._config, settings)
        times = cache(lambda: step_times(session, folder, lengths))
        length = _choose_draft_length(session, settings, times, folder)
        budget = _choose_budget(session, settings, times)
        self._scheduler = Scheduler(session, settings.draft, length, budget, settings.prefill_share, clock=clock)
        self._most = self._config.max_batch + settings.max_queue
        self._changed = threading.Condition()  # guards what follows
        self._arrived: list[Ticket] = []
        self._unwanted: list[tuple[Ticket, bool]] = []  # whether as complete, in their order
        self._taken = 0  # requests that have not ended
        self._closing = False
        self._drain: tuple[float, float] | None = None  # seconds that requests are given, and when they are over
        self._tickets: dict[Sequence, Ticket] = {}  # the thread's own
        self._harvest: Harvest | None = None
        if settings.harvest:  # last: settings that are refused leave its directory to others
            self._harvest = Harvest(Path(settings.harvest), settings.harvest_share, settings.harvest_mb * 10**6)
        self._thread = threading.Thread(target=self._run, name="dflash-steps", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_update: Callable[[Update], None],
        *,
        draft: bool = True,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Ticket:
        """Takes a request. Calls `on_update` with its updates on the service's thread: it must not block.

        Args:
            prompt: token ids, text or a conversation.
            draft: False decodes this request plainly.
            priority: 1 is the most urgent; 0 is none in particular.
            deadline: seconds from now to its last token.

        Raises:
            RequestError: the engine cannot serve it; a QueueFullError if too many wait.
            ShutdownError: the service is draining.
            EngineError: it has failed or is closed.
        """
        if priority < 0:
            raise RequestError(f"{priority}; 1 is the most urgent, 0 none in particular", "priority")
        if deadline is not None and not deadline > 0:
            raise RequestError(f"{deadline:g} s from now is not in the future", "deadline")
        by = None if deadline is None else self._clock() + deadline
        sequence = self._intake.sequence(prompt, params, draft, priority or DEFAULT_PRIORITY, by)
        ticket = Ticket(sequence, on_update)
        with self._changed:
            if self._closing or self.failure is not None:
                raise EngineError(self.failure or "the service is closed")
            if self._drain is not None:
                raise ShutdownError("the server takes no more requests")
            if self._taken >= self._most:
                self._scheduler.statistics.requests["refused"] += 1
                slots = self._config.max_batch
                raise QueueFullError(
                    f"the queue is full: {slots} requests have a slot, and {self._most - slots} wait (--max-queue)"
                )
            self._taken += 1
            self._arrived.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request at the next step with an error; does nothing to one that has ended."""
        self._end_early(ticket, complete=False)

    def finish(self, ticket: Ticket) -> None:
        """Ends a request at the next step as complete with what there is of its reply; cancels one that has none."""
        self._end_early(ticket, complete=True)

    def _end_early(self, ticket: Ticket, complete: bool) -> None:
        with self._changed:
            if ticket.sequence.done or self._closing or self.failure is not None:
                return
            self._unwanted.append((ticket, complete))
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Takes no more requests from now on; those that are left after `seconds` are ended with a ShutdownError."""
        with self._changed:
            self._drain = seconds, self._clock() + seconds

    @property
    def running(self) -> bool:
        """Whether it uses its session: until it has failed, or its last step has ended once it is closed."""
        return self.failure is None and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether every request that was taken has ended."""
        return self._taken == 0

    def statistics(self) -> Statistics:
        """Returns the counts so far; they go on changing."""
        return self._scheduler.statistics

    def close(self) -> None:
        """Fails the requests that are left, and ends the thread.

        Raises:
            EngineError: a step has not ended in half a minute; the engine must not be closed under it. Or an update's
                receiver closes it, which the thread calls that would have to end.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is self._thread:
            raise EngineError("a service cannot be closed by who receives its updates; close it on another thread")
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            raise EngineError(f"a step has not ended in {_CLOSE_SECONDS} s; end the process")
        if self._harvest is not None:
            self._harvest.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a library's panic too: without this thread nothing is ever answered
            traceback.print_exc()
            self._give_up(f"the scheduler failed: {type(error).__name__}: {error}")
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def _serve(self) -> None:
        failures, ended = 0, self._scheduler.statistics.requests
        while self._take_in():
            self._end_drained()
            completed_before = ended["completed"]
            changed = self._scheduler.step()
            self._report(changed)
            # An error of a request or of one reply says nothing of the engine.
            own = RequestError, ReplyError
            causes = [s.error for s in changed if s.error is not None and not isinstance(s.error, own)]
            failures = 0 if ended["completed"] > completed_before else failures + bool(causes)
            # Ranks that have not all run the same steps no longer belong together.
            if failures == MOST_FAILURES or (causes and self._config.tp > 1):
                self._give_up(f"the engine failed: {causes[0]}")
                return
        self._end_all(EngineError("the service is closing"))

    def _take_in(self) -> bool:
        """Takes in new requests and cancellations, and waits for one when idle; False: the service is to end.

        While the device computes and slots are free, it waits for requests, too: a client that has its reply sends its
        next one at once, and would else miss the step that is launched meanwhile.
        """
        with self._changed:
            while not (self._arrived or self._unwanted or self._closing or self._scheduler.busy):
                self._changed.wait()
            free, seconds = self._scheduler.patience
            self._changed.wait_for(lambda: len(self._arrived) >= free or self._unwanted or self._closing, seconds)
            arrived, self._arrived = self._arrived, []
            unwanted, self._unwanted = self._unwanted, []
            closing = self._closing
        self._tickets.update((ticket.sequence, ticket) for ticket in arrived)  # all, before anything can raise
        for ticket in arrived:
            self._scheduler.submit(ticket.sequence)
        for ticket, complete in unwanted:
            if complete and ticket.sequence.token_ids:
                self._scheduler.finish(ticket.sequence)
            else:
                self._scheduler.cancel(ticket.sequence, CancelledError("the request was cancelled"))
        return not closing

    def _end_drained(self) -> None:
        """Ends all requests once the time that `drain` gave them is over."""
        if self._drain is not None and self._clock() >= self._drain[1]:
            error = ShutdownError(f"the reply was not complete after {self._drain[0]:g} s (--drain-seconds)")
            for sequence in self._tickets:
                self._scheduler.cancel(sequence, error)

    def _report(self, changed: list[Sequence]) -> None:
        for sequence in changed:
            ticket = self._tickets.get(sequence)
            update = sequence.take_update()
            if ticket is None or update is None:
                continue
            if sequence.done:
                del self._tickets[sequence]
                with self._changed:
                    self._taken -= 1
                if self._harvest is not None and update.completion is not None:
                    self._harvest.take(sequence)
            try:
                ticket.on_update(update)
            except Exception:  # the caller's fault, and no other request's
                traceback.print_exc()
        self._after_step()

    def _give_up(self, failure: str) -> None:
        with self._changed:
            self.failure = failure
            arrived, self._arrived = self._arrived, []
        self._tickets.update((ticket.sequence, ticket) for ticket in arrived)
        self._end_all(EngineError(failure))

    def _end_all(self, error: DFlashError) -> None:
        """Ends every request with an error, those too that a fault of the scheduler keeps it from ending."""
        try:
            self._report(self._scheduler.fail_all(error))
        except BaseException:  # as in `_run`
            traceback.print_exc()
        for sequence in self._tickets:  # none of them is answered, those that were done neither
            sequence.error = sequence.error or error
        self._report(list(self._tickets))


def _choose_budget(
    session: Session, settings: ServiceSettings, times: Callable[[], MixedStepTimes]
) -> PrefillBudget | None:
    """Makes the rule of how much of prompts rides in a step; None where steps do not mix."""
    if not session.limits.mixes:
        return None
    if settings.prefill_tokens != "auto":
        return FixedPrefillBudget(settings.prefill_tokens)
    if session.device.type == "cpu":  # where no row of a step is for nothing
        return FixedPrefillBudget(MIN_PIECE)
    return AutoPrefillBudget(times(), settings.itl_slack)


def _lengths(config: EngineConfig, settings: ServiceSettings) -> list[int]:
    """Lists the draft lengths that the settings let the service choose from; none where it does not draft at all."""
    if config.drafter is None or not settings.draft:
        return []
    return draft_lengths(config.block_size) if settings.draft_length == "auto" else [settings.draft_length]


def _may_share(session: Session) -> bool:
    """Whether slots may share the rows of their steps: not on a CPU, where whole blocks cost more than they bring."""
    return session.limits.divides and session.config.max_batch >= LEAST_SHARING and session.device.type == "cuda"


def _choose_draft_length(
    session: Session, settings: ServiceSettings, times: Callable[[], MixedStepTimes], folder: Path | None
) -> DraftLength:
    """Makes the rule of draft lengths that the settings choose; logs it, with the reason."""
    config = session.config
    check_draft_length(settings.draft_length, config.block_size)
    chosen: DraftLength
    if config.drafter is None or not settings.draft:
        chosen, why = FixedDraftLength(0), "0: no drafter" if config.drafter is None else "0: --no-draft"
    elif settings.draft_length == "auto":
        alone, shares = decoding_times(times(), _lengths(config, settings)), _may_share(session)
        if shares:
            shared = step_times(session, folder, shared_lengths(config.block_size), shared=True)
            chosen = SharedRows(alone, {key[:2]: seconds for key, seconds in shared.items()}, config.draft_tree)
        else:
            chosen = AdaptiveDraftLength(alone, config.draft_tree)
        why = f"0 to {config.block_size - 1}, what the load makes best by step times (auto)"
        why += f", and trees of {config.draft_tree} in the whole block's place" if config.draft_tree else ""
        why += ", rows by survival where that commits more" if shares else ""
    else:
        chosen, why = FixedDraftLength(settings.draft_length), f"{settings.draft_length} (--draft-length)"
    _log.info("%s: draft length %s", config.name, why)
    return chosen
