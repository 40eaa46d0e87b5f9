"""A load on a server: closed loops of clients, or arrivals that wait for nobody; and the record of each request.

Times are those of the running event loop's clock. In an open loop a request's latencies count from the moment when it
should have been sent, not from when the generator or the server got round to it.
"""

import asyncio
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.sweep.dataset import Dataset, Sample
from trtllm_dflash.sweep.runtime_metrics import Reading

#: "served", or "plain" and "draft" of one server; or a name of each of several servers.
Arm = str

#: Seconds that a server has to say what it serves.
CHECK_SECONDS = 10.0

#: Told how many samples are done, and of how many; or how many seconds, of how many.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """One turn of a sample.

    Attributes:
        replies: the server's, in the turns before.
        arm: "served": as the server likes; "plain" and "draft" ask for it. Of several servers: which.
    """

    sample: Sample
    replies: tuple[str, ...]
    params: SamplingParams
    arm: Arm


@dataclass
class Reply:
    """The reply to a request, or its error.

    Attributes:
        times: of each response that brought tokens or text, on the event loop's clock.
        tokens: of the whole reply.
        tokens_by_response: tokens of each of `times`; empty where the server does not tell.
        drafted, accepted: drafts; None where the server does not tell.
        steps: decoding steps, the prefill not counted; None likewise.
        drafted_at, accepted_at: steps by the position of a draft, from 1: verified there, accepted there; or empty.
        error: why there is no whole reply.
    """

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_by_response: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    error: str | None = None

    def count_step(self, drafted: int, accepted: int) -> None:
        """Counts a step's drafts by position."""
        for counts, depth in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts += [0] * (depth - len(counts))
            for position in range(depth):
                counts[position] += 1


class Target(ABC):
    """A server, or an engine in this process, that a sweep measures."""

    _heard: float = -math.inf

    @property
    def heard(self) -> float:
        """Time when the server sent something last, on the event loop's clock; before that, and of an engine, -inf."""
        return self._heard

    @abstractmethod
    async def send(self, request: Request) -> Reply:
        """Sends a request; returns its reply, with the error if it failed."""

    @abstractmethod
    async def check(self, arms: tuple[Arm, ...], params: SamplingParams) -> None:
        """Checks once that the target answers and supports these arms and parameters.

        Raises:
            DFlashError: it is not.
        """

    async def look(self, arm: Arm) -> Reading | None:
        """Reads the arm's server's counts of drafts so far; None where it has no metrics of a known form.

        Raises:
            EngineError: it had, and they cannot be read.
        """
        return None

    async def close(self) -> None:  # noqa: B027
        """Lets go of connections."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Target"]:
        """Yields the target, and closes it at the end."""
        try:
            yield self
        finally:
            await self.close()


@dataclass(frozen=True)
class ClosedLoop:
    """A number of clients, each of which sends its next request once it has its reply.

    Args:
        ramp: seconds before the round over which the clients begin, one after the other; 0: all at once, with it.
    """

    concurrency: int
    ramp: float = 0.0

    @property
    def value(self) -> float:
        return self.concurrency


@dataclass(frozen=True)
class OpenLoop:
    """Arrivals at a rate, whatever the server does.

    Args:
        rate: requests a second.
        arrival: "poisson": at random; "constant": evenly.
    """

    rate: float
    arrival: Literal["poisson", "constant"] = "poisson"

    @property
    def value(self) -> float:
        return self.rate

    def gaps(self, seed: int) -> Iterator[float]:
        """Yields seconds between arrivals, the first one at once."""
        chance = random.Random(seed)
        yield 0.0
        while True:
            yield 1 / self.rate if self.arrival == "constant" else chance.expovariate(self.rate)


Load = ClosedLoop | OpenLoop


@dataclass(frozen=True)
class Amount:
    """The length of a round: a number of samples, or seconds in which requests are begun."""

    requests: int | None = None
    seconds: float | None = None


@dataclass
class Record:
    """A request as it was measured; times in seconds from the round's begin.

    Attributes:
        sample: its index in the dataset.
        due: when it was to be sent.
        sent: when it was.
    """

    sample: int
    turn: int
    due: float
    sent: float
    reply: Reply


@dataclass
class Traffic:
    """The records of a round of load; times in seconds from its begin, which is on the event loop's clock."""

    begin: float
    records: list[Record]
    seconds: float  # what tokens are counted over: to the last reply, or the time that was asked for
    before: list[Record] = field(default_factory=list)  # of requests that were sent while clients began

    @property
    def tokens(self) -> float:
        """Output tokens that arrived within `seconds`, of replies that became whole."""
        whole = (record.reply for record in self.before + self.records if record.reply.error is None)
        return sum(_tokens_within(reply, self.seconds) for reply in whole)


def _tokens_within(reply: Reply, end: float) -> float:
    if not reply.times or (reply.times[0] >= 0 and reply.times[-1] <= end):
        return reply.tokens
    if reply.tokens_by_response:
        return sum(n for time, n in zip(reply.times, reply.tokens_by_response, strict=True) if 0 <= time <= end)
    return reply.tokens * sum(0 <= time <= end for time in reply.times) / len(reply.times)


@dataclass(frozen=True)
class Traits:
    """The parameters, arm and seed of every request of a round."""

    params: SamplingParams
    arm: Arm
    first_sample: int = 0
    seed: int = 0


async def run_load(
    target: Target,
    dataset: Dataset,
    load: Load,
    amount: Amount,
    traits: Traits,
    progress: Progress = lambda done, total: None,
    timeout: float = math.inf,
) -> Traffic:
    """Puts a load on a target until its amount is done and every reply has arrived.

    Samples are taken in order from `traits.first_sample` on, and from the first again after the last. A sample of
    several turns is one after the other; a turn is due when the reply before it has come.

    Args:
        timeout: seconds in which a server may send nothing to any of its requests; one may wait longer for its turn.

    Raises:
        EngineError: the server has sent nothing for so long.
    """
    return await _Round(target, dataset, load, amount, traits, progress).run(timeout)


class _Round:
    def __init__(
        self, target: Target, dataset: Dataset, load: Load, amount: Amount, traits: Traits, progress: Progress
    ) -> None:
        self._target, self._dataset, self._load, self._amount = target, dataset, load, amount
        self._traits, self._progress = traits, progress
        self._loop = asyncio.get_running_loop()
        self._records: list[Record] = []
        self._done = 0
        self._begin = 0.0
        self._waiting, self._quiet_since = 0, 0.0  # requests without a whole reply; when there was none, or one came
        self._next = iter(range(amount.requests) if amount.requests is not None else itertools.count())

    async def run(self, timeout: float) -> Traffic:
        if timeout == math.inf:
            return await self._run()
        work, watch = asyncio.create_task(self._run()), asyncio.create_task(self._watch(timeout))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await watch
            return await work
        finally:
            work.cancel()
            watch.cancel()

    async def _watch(self, timeout: float) -> None:
        while True:
            quiet = self._loop.time() - max(self._quiet_since, self._target.heard) if self._waiting else 0.0
            if quiet >= timeout:
                waiting = f"{self._waiting} request{'s' if self._waiting > 1 else ''}"
                raise EngineError(f"the server has sent nothing for {timeout:g} s to {waiting} (--timeout)")
            await asyncio.sleep(timeout - quiet)

    async def _run(self) -> Traffic:
        self._begin = self._loop.time()
        if isinstance(self._load, ClosedLoop):
            count, ramp = self._load.concurrency, self._load.ramp
            self._begin += ramp
            await _all_or_none([self._client(ramp * i / count) for i in range(count)])
        else:
            await self._arrivals(self._load)
        for record in self._records:
            record.reply.times = [time - self._begin for time in record.reply.times]
        seconds = self._amount.seconds
        if seconds is None:
            seconds = max((record.reply.times[-1] for record in self._records if record.reply.times), default=0.0)
        self._records.sort(key=lambda record: (record.due, record.sample))
        before = [record for record in self._records if record.due < 0]
        return Traffic(self._begin, self._records[len(before) :], seconds, before)

    async def _client(self, wait: float) -> None:
        if wait:
            await asyncio.sleep(wait)
        for number in self._next:
            if self._over(self._loop.time()):
                return
            await self._converse(number, self._loop.time())

    async def _arrivals(self, load: OpenLoop) -> None:
        tasks: set[asyncio.Task[None]] = set()
        due = self._begin
        try:
            for number, gap in zip(self._next, load.gaps(self._traits.seed), strict=False):
                due += gap
                if self._over(due):
                    break
                # Requests that are late already are sent at once: the clock does not wait for the generator either.
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                tasks.add(asyncio.create_task(self._converse(number, due)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _over(self, now: float) -> bool:
        return self._amount.seconds is not None and now - self._begin >= self._amount.seconds

    async def _converse(self, number: int, due: float) -> None:
        index = (self._traits.first_sample + number) % len(self._dataset.samples)
        sample = self._dataset.samples[index]
        # Each request has random numbers of its own, the same ones in every arm.
        params = self._traits.params.model_copy(update={"seed": self._traits.params.seed + index})
        replies: tuple[str, ...] = ()
        for turn in range(max(1, len(sample.turns))):
            sent = self._loop.time()
            self._quiet_since = self._quiet_since if self._waiting else sent
            self._waiting += 1
            reply = await self._target.send(Request(sample, replies, params, self._traits.arm))
            self._waiting -= 1
            self._quiet_since = self._loop.time()
            self._records.append(Record(index, turn, due - self._begin, sent - self._begin, reply))
            if reply.error is not None:
                break
            replies += (reply.text,)
            due = self._loop.time()
        self._done += 1
        elapsed = self._loop.time() - self._begin
        if self._amount.requests is not None:
            self._progress(self._done, self._amount.requests)
        elif self._amount.seconds is not None:
            self._progress(round(min(elapsed, self._amount.seconds)), round(self._amount.seconds))


async def _all_or_none(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines together; where one fails, or this is cancelled, all are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
