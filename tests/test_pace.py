"""Launches that wait, while the device computes, for requests that may come."""

import queue

import pytest

from tests.conftest import TINY
from tests.virtual_time import Clock
from tests.waiting import PATIENCE
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.runtime import scheduler
from trtllm_dflash.runtime.pace import Pace
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings

#: Seconds of a step by the device's clock, a third of which the service may wait by this machine's: nobody comes later.
STEP = 3 * PATIENCE


def test_a_launch_may_wait_for_a_third_of_the_shortest_step():
    clock = Clock()
    pace = Pace(clock)
    pace.note(is_next_under_way=True)
    assert pace.spare == 0  # nothing was measured
    for seconds in (0.015, 0.012, 0.020):
        clock.now += seconds
        pace.note(is_next_under_way=True)
    assert pace.spare == pytest.approx(0.004)
    clock.now += 0.003
    assert pace.spare == pytest.approx(0.001)
    clock.now += 0.002
    assert pace.spare == 0


def test_an_idle_device_is_waited_for_by_nobody_and_its_idle_time_is_no_steps():
    clock = Clock()
    pace = Pace(clock)
    for seconds in (0.0, 0.015, 0.015):
        clock.now += seconds
        pace.note(is_next_under_way=True)
    clock.now += 0.015
    pace.note(is_next_under_way=False)
    assert pace.spare == 0
    clock.now += 0.001  # less than any step: the first one after a pause began at nobody knows when
    pace.note(is_next_under_way=True)
    assert pace.spare == pytest.approx(0.005)


class Device:
    """Runs a session's steps one after the other, each as long as the others, while the host goes on.

    Its clock stands where the step that was read last has ended.
    """

    ahead = 1

    def __init__(self, session, clock):
        self._session, self._clock, self._free_at = session, clock, 0.0
        self.read = []  # whether each step reads a prompt

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run(self, call):
        self.read.append(bool(call.pieces))
        at = self._free_at = max(self._free_at, self._clock.now) + STEP
        outcome = self._session.run(call)
        packed = outcome.packed

        def later():
            self._clock.now = max(self._clock.now, at)
            return packed()

        outcome.packed = later
        return outcome


def test_a_client_that_comes_back_is_in_the_step_after_the_one_under_way(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(scheduler, "Pace", lambda: Pace(clock))
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=2, max_seq_len=256) as llm:
        device = Device(llm.session, clock)
        service = Service(device, llm.intake, ServiceSettings(draft=False))
        try:
            ends = queue.SimpleQueue()

            def send(tokens):
                def update(found):
                    if found.completion is not None or found.error is not None:
                        ends.put((found.error, len(device.read)))

                service.submit([1, 2, 3], SamplingParams(max_tokens=tokens, ignore_eos=True), update)

            send(200)  # is there all the while
            send(4)
            error, launched = ends.get(timeout=PATIENCE)
            assert error is None
            send(1)
            error, _ = ends.get(timeout=PATIENCE)
            assert error is None and device.read.index(True, launched) == launched
        finally:
            service.close()
