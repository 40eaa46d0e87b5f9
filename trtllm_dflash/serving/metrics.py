"""A service's counts on Triton's metrics endpoint."""

import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from trtllm_dflash.runtime.statistics import Sample

_PERIOD = 1.0  # seconds between two rounds
_PERIOD_AFTER_END = 0.1  # where a request has ended since
_BATCH = 8  # samples at a time: each is a round trip of 0.1 ms to Triton's process, and replies wait meanwhile


class Metrics:
    """Publishes samples, a few at a time. For one thread.

    Args:
        samples: returns all of them.
        pb_utils: Triton's module, which only its own processes have.
    """

    def __init__(self, samples: Callable[[], list[Sample]], pb_utils: Any) -> None:
        self._samples = samples
        self._pb_utils = pb_utils
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        self._refused: set[tuple[str, ...]] = set()  # by Triton, once: replies go on
        self._round: Iterator[None] | None = None
        self._begun = 0.0
        self._ended = False

    def close(self) -> None:
        """Frees the metrics while Triton's module still exists: left to the interpreter's end, they crash it."""
        self._round = None
        self._metrics.clear()
        self._families.clear()

    def request_ended(self) -> None:
        """Makes the next round due sooner, so that a client that has its reply soon finds it counted."""
        self._ended = True

    def advance(self) -> bool:
        """Publishes the next samples of a round, or begins a round when it is due; says whether more is due soon."""
        if self._round is None:
            now = time.monotonic()
            if now - self._begun < (_PERIOD_AFTER_END if self._ended else _PERIOD):
                return self._ended
            self._begun, self._ended = now, False
            self._round = self._publish()
        if len(list(islice(self._round, _BATCH))) < _BATCH:
            self._round = None
        return self._ended or self._round is not None

    def _publish(self) -> Iterator[None]:
        for sample in self._samples():
            key = (sample.name, *sample.labels.values())
            before = self._published.get(key)
            if before == sample.value or key in self._refused:
                continue
            try:
                metric = self._metric(key, sample)
                if sample.kind == "gauge":
                    metric.set(sample.value)
                else:
                    metric.increment(sample.value - (before or 0.0))
                self._published[key] = sample.value
            except Exception:
                traceback.print_exc()
                self._refused.add(key)
            yield

    def _metric(self, key: tuple[str, ...], sample: Sample) -> Any:
        if key not in self._metrics:
            family = self._pb_utils.MetricFamily
            if sample.name not in self._families:
                kind = family.GAUGE if sample.kind == "gauge" else family.COUNTER
                self._families[sample.name] = family(name=sample.name, description=sample.help, kind=kind)
            self._metrics[key] = self._families[sample.name].Metric(labels=sample.labels)
        return self._metrics[key]
