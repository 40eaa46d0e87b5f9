"""Times of requests: nanoseconds since the epoch, by a clock that is not set back."""

import time

from trtllm_dflash.runtime.clock import now_ns
from trtllm_dflash.runtime.request import SamplingParams, Sequence


def test_it_is_the_time_since_the_epoch():
    assert abs(now_ns() - time.time_ns()) < 3600 * 10**9  # a clock may be set while the tests run


def test_a_wall_clock_that_is_set_back_changes_no_time(monkeypatch):
    sequence = Sequence([1], SamplingParams(), 1, frozenset())
    arrival = sequence.times.arrival_ns
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert Sequence([1], SamplingParams(), 1, frozenset()).times.arrival_ns >= arrival
    sequence.begin((2,), now_ns())
    times = sequence.times
    assert arrival <= times.first_token_ns <= times.last_token_ns
