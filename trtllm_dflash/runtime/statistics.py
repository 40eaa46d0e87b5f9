"""Statistics of a service: gauges, counters and histograms, in Prometheus' terms."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from trtllm_dflash.errors import CancelledError, DeadlineError, RequestError, ShutdownError
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.verified import AcceptedRanks, VerifiedDrafts

if TYPE_CHECKING:  # torch comes with them
    from trtllm_dflash.runtime.pages import Pages
    from trtllm_dflash.runtime.queue import Queue
    from trtllm_dflash.runtime.slots import Slots
    from trtllm_dflash.session.outcome import Ints
    from trtllm_dflash.session.session import Session

#: Drafted steps that the acceptance length is the mean of.
RECENT_STEPS = 1000

_TOKENS = tuple(float(2**power) for power in range(5, 15))
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


@dataclass(frozen=True)
class Sample:
    """One number: `name` with `labels` is `value`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: dict[str, str]
    value: float


class Histogram:
    """Counts of observations at or below each bound, their sum and their number."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.name, self.help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Adds an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> list[Sample]:
        """Lists the cumulative counts, by the label `le`."""
        total, samples = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            samples.append(Sample(f"{self.name}_bucket", "counter", self.help, {"le": le}, total))
        samples.append(Sample(f"{self.name}_sum", "counter", self.help, {}, self._sum))
        samples.append(Sample(f"{self.name}_count", "counter", self.help, {}, total))
        return samples


@dataclass
class Statistics:
    """Counts of one scheduler; written by its thread, read by any.

    Attributes:
        computes: names of what computes the steps; see `Choice.labels`.
        longest: drafts of the longest chain.
    """

    slots: int = 0
    kv_tokens: int = 0  # that fit in the caches
    computes: dict[str, str] = field(default_factory=dict)
    taken: Sized = ()  # slots
    queue: Sized = ()
    kv_tokens_in_use: int = 0
    pages: int = 0  # of the caches
    window_pages: int = 0  # of layers with a window, where they have pages of their own
    leases: "Pages | None" = None  # all pages, by who has them
    preemptions: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # by outcome
    steps: Counter[str] = field(default_factory=Counter)  # by kind
    prompt_tokens: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    committed_tokens: int = 0
    longest: int = 0
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {
            "queue": Histogram("dflash_queue_seconds", "From arrival to the first prefill step"),
            "first": Histogram("dflash_time_to_first_token_seconds", "From arrival to the first token"),
            "token": Histogram("dflash_time_per_output_token_seconds", "Mean time between a reply's tokens"),
            "request": Histogram("dflash_request_seconds", "From arrival to the last token"),
            "rows": Histogram("dflash_step_prompt_tokens", "Prompt tokens of a step that reads any", _TOKENS),
        }
    )

    def __post_init__(self) -> None:
        self._recent: deque[list[int]] = deque(maxlen=RECENT_STEPS)  # steps': at least so many of sequences
        self._verified, self._ranks = VerifiedDrafts(self.longest), AcceptedRanks()

    @classmethod
    def of(cls, session: "Session", queue: "Queue", slots: "Slots") -> "Statistics":
        """Makes those of a scheduler that runs sequences on a session, from this queue in these slots."""
        config, paging = session.config, session.paging
        return cls(
            slots=config.max_batch,
            kv_tokens=paging.pages * (config.max_seq_len if paging.linear else paging.rows),
            computes=session.choice.labels,
            taken=slots,
            queue=queue,
            pages=paging.pages,
            window_pages=paging.window_pages,
            leases=slots.pages,
            longest=config.block_size - 1,
        )

    def note_drafts(self, more: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Notes drafted sequences of a step: the tokens of each but one, its drafts and those that were accepted.

        Nobody may change the lists from now on.
        """
        self._recent.append(more)
        self._verified.note(drafted, accepted)

    def note_ranks(self, ranks: "Ints") -> None:
        """Notes the ranks of drafts that a step has accepted, and zeros."""
        self._ranks.note(ranks)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self.taken)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self.queue)

    @property
    def pages_used(self) -> int:
        """Pages of running requests."""
        return 0 if self.leases is None else self.leases.used

    @property
    def pages_shared(self) -> int:
        """Pages of several running requests."""
        return 0 if self.leases is None else self.leases.shared

    @property
    def pages_kept(self) -> int:
        """Free pages whose rows are kept for prompts that begin with them."""
        return 0 if self.leases is None else self.leases.kept

    @property
    def window_pages_used(self) -> int:
        """Pages of layers with a window that running requests see."""
        return 0 if self.leases is None or self.leases.windows is None else self.leases.windows.held

    @property
    def recent(self) -> list[int]:
        """Tokens of the last drafted steps of sequences."""
        last = islice(chain.from_iterable(map(reversed, reversed(self._recent.copy()))), RECENT_STEPS)
        return [more + 1 for more in last][::-1]

    @property
    def verified(self) -> Counter[tuple[int, int]]:
        """Drafted steps of sequences, by their drafts, and by how many of them were accepted."""
        return self._verified.counts()

    @property
    def ranks(self) -> Counter[int]:
        """Accepted drafts of trees, by the place that the drafter gave each at its depth: 1 is its likeliest."""
        return self._ranks.counts()

    @property
    def drafted(self) -> Counter[int]:
        """Drafts verified, by position in the block, from 1."""
        return _by_position((drafts, count) for (drafts, _), count in list(self.verified.items()))

    @property
    def accepted(self) -> Counter[int]:
        """Drafts accepted, by position in the block, from 1; none after a reply's end."""
        return _by_position((accepted, count) for (_, accepted), count in list(self.verified.items()))

    def count_prompt(self, tokens: int, reused: int) -> None:
        """Counts the prompt of a request that has got a slot, and those of its tokens whose rows were there."""
        self.prompt_tokens += tokens
        self.reused_tokens += reused
        self.prefix_hits += reused > 0

    def count_end(self, sequence: Sequence) -> None:
        """Counts a sequence that has ended, by its finish reason or error; none whose request is wrong itself."""
        if sequence.error is not None:
            kinds: dict[type, str] = {CancelledError: "cancelled", ShutdownError: "cancelled", DeadlineError: "expired"}
            kind = kinds.get(type(sequence.error), "failed")
            if kind != "failed" or not isinstance(sequence.error, RequestError):
                self.requests[kind] += 1
            return
        self.requests["completed"] += 1
        times = sequence.times
        self.histograms["queue"].observe((times.first_scheduled_ns - times.arrival_ns) / 1e9)
        self.histograms["first"].observe((times.first_token_ns - times.arrival_ns) / 1e9)
        self.histograms["request"].observe((times.last_token_ns - times.arrival_ns) / 1e9)
        if len(sequence.token_ids) > 1:
            seconds = (times.last_token_ns - times.first_token_ns) / 1e9
            self.histograms["token"].observe(seconds / (len(sequence.token_ids) - 1))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of the recent drafted steps; 0 before the first."""
        recent = self.recent
        return sum(recent) / len(recent) if recent else 0.0

    def samples(self) -> list[Sample]:
        """Lists every metric's samples."""
        gauges = {
            "requests_running": (self.running, "Requests that have a slot"),
            "requests_waiting": (self.waiting, "Requests that wait for a slot"),
            "slots_in_use": (self.running, "Slots in use"),
            "slots_total": (self.slots, "Slots"),
            "kv_tokens_in_use": (self.kv_tokens_in_use, "Tokens of running requests in the K/V caches"),
            "kv_tokens_total": (self.kv_tokens, "Tokens that fit in the K/V caches"),
            "pages_total": (self.pages, "Pages of the K/V caches"),
            "pages_used": (self.pages_used, "Pages of running requests"),
            "pages_shared": (self.pages_shared, "Of those, pages of several requests"),
            "pages_kept": (self.pages_kept, "Free pages whose rows are kept for prompts that begin with them"),
            "window_pages_total": (self.window_pages, "Pages that layers with a window have of their own"),
            "window_pages_used": (self.window_pages_used, "Of those, pages that running requests see"),
            "acceptance_length": (self.acceptance_length, f"Tokens a step, mean of the last {RECENT_STEPS}"),
        }
        counters = {
            "prompt_tokens_total": (self.prompt_tokens, "Prompt tokens of requests that got a slot"),
            "prefix_hits_total": (self.prefix_hits, "Requests that began with an earlier request's rows"),
            "prefix_reused_tokens_total": (self.reused_tokens, "Of the prompt tokens, those in such rows"),
            "preemptions_total": (self.preemptions, "Requests that gave their pages up and had to wait again"),
            "committed_tokens_total": (self.committed_tokens, "Tokens generated"),
        }
        labelled: list[tuple[str, str, str, Counter[str]]] = [
            ("requests_total", "outcome", "Requests that have ended", self.requests),
            ("steps_total", "kind", "Steps", self.steps),
            ("drafted_tokens_total", "position", "Drafts verified", _by_text(self.drafted)),
            ("accepted_tokens_total", "position", "Drafts accepted", _by_text(self.accepted)),
            ("accepted_nodes_total", "rank", "Drafts of trees accepted, by rank at their depth", _by_text(self.ranks)),
        ]
        samples = [Sample("dflash_kernels_info", "gauge", "What computes the steps", self.computes, 1)]
        samples += [Sample(f"dflash_{name}", "gauge", text, {}, value) for name, (value, text) in gauges.items()]
        samples += [Sample(f"dflash_{name}", "counter", text, {}, value) for name, (value, text) in counters.items()]
        for name, label, text, counts in labelled:
            samples += [
                Sample(f"dflash_{name}", "counter", text, {label: key}, value) for key, value in list(counts.items())
            ]
        for histogram in self.histograms.values():
            samples += histogram.samples()
        return samples


def _by_position(runs: Iterable[tuple[int, int]]) -> Counter[int]:
    """Counts drafts by position, from the lengths of runs that begin at position 1, and their numbers."""
    counts: Counter[int] = Counter()
    for length, count in runs:
        for position in range(1, length + 1):
            counts[position] += count
    return counts


def _by_text(counts: Counter[int]) -> Counter[str]:
    return Counter({str(key): value for key, value in list(counts.items())})
