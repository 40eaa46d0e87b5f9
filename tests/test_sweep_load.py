"""The load generator against servers of known timing, on a virtual clock; and what is made of what it sees."""

import asyncio
import random

import numpy as np
import pytest

from tests.virtual_time import run_virtually
from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import EngineError
from trtllm_dflash.sweep.dataset import Dataset, Sample
from trtllm_dflash.sweep.load import Amount, ClosedLoop, OpenLoop, Reply, Target, Traits, run_load
from trtllm_dflash.sweep.summary import Round, Spread, summarize

SAMPLES = Dataset("test", tuple(Sample((f"prompt {i}",)) for i in range(50)))
TRAITS = Traits(SamplingParams(max_tokens=8), "served")


class FixedServer(Target):
    """Every reply takes the same: a first token, then responses of several tokens each."""

    def __init__(self, ttft=0.2, gap=0.05, responses=10, tokens=4, says_tokens=True):
        self.ttft, self.gap, self.responses, self.tokens, self.says = ttft, gap, responses, tokens, says_tokens
        self.running = self.most = 0
        self.asked = []

    async def check(self, arms, params):
        pass

    async def send(self, request):
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        reply, loop = Reply(text="said"), asyncio.get_running_loop()
        counts = [1] + [self.tokens] * self.responses
        for i, count in enumerate(counts):
            await asyncio.sleep(self.gap if i else self.ttft)
            reply.times.append(loop.time())
            reply.tokens += count
        reply.tokens_by_response = counts if self.says else []
        self.running -= 1
        return reply


class OneAtATime(Target):
    """Serves in order, each in 10 ms; at one moment it stalls."""

    def __init__(self, stall_at, stall):
        self.stall_at, self.stall, self.pause = stall_at, stall, 0.01
        self.lock = asyncio.Lock()

    async def check(self, arms, params):
        pass

    async def send(self, request):
        loop = asyncio.get_running_loop()
        async with self.lock:
            if self.stall and loop.time() >= self.stall_at:
                await asyncio.sleep(self.stall)
                self.stall = 0
            await asyncio.sleep(self.pause)
        return Reply(times=[loop.time()], tokens=1, tokens_by_response=[1])


def measure(target, load, amount, dataset=SAMPLES, traits=TRAITS):
    traffic = run_virtually(run_load(target, dataset, load, amount, traits))
    return traffic, summarize([Round.of("served", load.value, 0, traffic)], None, [""] * len(dataset.samples))


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
@pytest.mark.parametrize("amount", [Amount(requests=128), Amount(seconds=14.0)])
def test_a_server_of_known_timing_is_measured_as_it_is(concurrency, amount):
    server = FixedServer(ttft=0.2, gap=0.05, responses=10, tokens=4)
    _, point = measure(server, ClosedLoop(concurrency), amount)
    assert server.most == concurrency
    # 41 tokens in 0.2 + 10 * 0.05 s.
    assert point.ttft.p50 == point.ttft.p99 == pytest.approx(0.2, rel=1e-3)
    assert point.tpot.p50 == pytest.approx(0.5 / 40, rel=1e-3)
    assert point.tokens_per_second_per_user == pytest.approx(80, rel=1e-3)
    assert point.itl.p50 == point.itl.p99 == pytest.approx(0.05, rel=0.005)
    assert point.e2e.mean == pytest.approx(0.7, rel=1e-3)
    assert point.output_tokens_per_second == pytest.approx(concurrency * 41 / 0.7, rel=0.06 if amount.seconds else 1e-3)
    assert point.requests_per_second == pytest.approx(concurrency / 0.7, rel=0.06 if amount.seconds else 1e-3)


def test_clients_that_begin_apart_are_measured_from_when_all_have_begun():
    server = FixedServer(ttft=0.2, gap=0.05, responses=10, tokens=4)
    traffic, point = measure(server, ClosedLoop(8, ramp=2.8), Amount(seconds=7.0))
    # Clients begin every 0.35 s, and send every 0.7 s.
    sent = [record.sent for record in traffic.before + traffic.records]
    assert sent[:4] == pytest.approx([-2.8, -2.45, -2.1, -2.1], abs=1e-6)
    assert len(traffic.records) == 80 and min(record.sent for record in traffic.records) >= 0
    assert point.output_tokens_per_second == pytest.approx(8 * 41 / 0.7, rel=0.01)


@pytest.mark.parametrize("says_tokens", [True, False])
def test_of_a_fixed_time_only_the_tokens_that_came_in_it_count(says_tokens):
    # One reply of 0.7 s, then the first 0.3 s of another: its first token, and two of its ten further responses.
    traffic, _ = measure(FixedServer(says_tokens=says_tokens), ClosedLoop(1), Amount(seconds=1.0 + 1e-6))
    assert len(traffic.records) == 2
    assert traffic.tokens == pytest.approx(41 + (9 if says_tokens else 41 * 3 / 11))


class Silent(FixedServer):
    """Answers its first requests, and later ones never."""

    def __init__(self, answered):
        super().__init__()
        self.answered = answered

    async def send(self, request):
        if len(self.asked) >= self.answered:
            await asyncio.Event().wait()
        return await super().send(request)


@pytest.mark.parametrize("load", [ClosedLoop(3), OpenLoop(0.01, "constant")], ids=lambda load: type(load).__name__)
def test_a_server_that_sends_nothing_to_anybody_is_waited_for_so_long(load):
    async def measured():
        with pytest.raises(EngineError, match=r"the server has sent nothing for 600 s to . requests? \(--timeout\)"):
            await run_load(Silent(5), SAMPLES, load, Amount(requests=20), TRAITS, timeout=600)
        return asyncio.get_running_loop().time()

    # The last reply comes at 1.4 s, or its turn would be at 500 s.
    assert run_virtually(measured()) == pytest.approx(600 + (1.4 if isinstance(load, ClosedLoop) else 500), abs=0.1)


def test_requests_may_wait_longer_for_their_turn_and_a_server_for_requests():
    queue = run_load(OneAtATime(0, 500), SAMPLES, ClosedLoop(4), Amount(requests=20), TRAITS, timeout=600)
    assert len(run_virtually(queue).records) == 20
    one = OneAtATime(0, 0)
    one.pause = 400
    turns = run_load(one, SAMPLES, ClosedLoop(4), Amount(requests=8), TRAITS, timeout=600)
    assert max(record.reply.times[-1] - record.sent for record in run_virtually(turns).records) > 1500
    rare = run_load(FixedServer(), SAMPLES, OpenLoop(0.001, "constant"), Amount(requests=3), TRAITS, timeout=600)
    assert len(run_virtually(rare).records) == 3


def test_a_reply_that_goes_on_is_no_silence():
    class Telling(FixedServer):
        async def send(self, request):
            for _ in range(10):
                await asyncio.sleep(400)
                self._heard = asyncio.get_running_loop().time()
            return await super().send(request)

    slow = run_load(Telling(), SAMPLES, ClosedLoop(1), Amount(requests=1), TRAITS, timeout=600)
    assert run_virtually(slow).records[0].reply.tokens == 41


def test_arrivals_wait_for_nobody():
    server = FixedServer()
    traffic, point = measure(server, OpenLoop(20, "constant"), Amount(requests=100))
    assert [record.due for record in traffic.records] == pytest.approx([i / 20 for i in range(100)])
    assert server.most == 14  # 20 requests a second, each of 0.7 s
    assert point.ttft.p99 == pytest.approx(0.2, rel=1e-3)


def test_poisson_arrivals_have_their_rate_and_come_again_with_their_seed():
    def dues(seed):
        traits = Traits(SamplingParams(), "served", seed=seed)
        traffic, _ = measure(FixedServer(responses=0), OpenLoop(50), Amount(requests=800), traits=traits)
        return np.array([record.due for record in traffic.records])

    gaps = np.diff(dues(1))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert (dues(1) == dues(1)).all()
    assert (dues(1) != dues(2)).any()


def test_a_stall_counts_for_every_request_that_was_due_in_it():
    """Coordinated omission: clients that wait for the stalled server send nothing meanwhile, and see one slow reply."""
    arrivals, _ = measure(OneAtATime(1.0, stall=1.0), OpenLoop(50, "constant"), Amount(requests=200))
    slow = [record for record in arrivals.records if record.reply.times[-1] - record.due > 0.1]
    # 50 were due in that second; twice as fast as they come, the server needs a second more to catch up.
    assert 85 <= len(slow) <= 100
    waits = [record.reply.times[-1] - record.due for record in arrivals.records]
    assert np.percentile(waits, 90) > 0.7
    clients, _ = measure(OneAtATime(1.0, stall=1.0), ClosedLoop(1), Amount(requests=200))
    assert sum(record.reply.times[-1] - record.due > 0.1 for record in clients.records) == 1


def test_a_late_generator_is_no_excuse_for_the_server():
    """Where the generator itself is held up, latency still counts from when the request was due."""

    async def load():
        loop = asyncio.get_running_loop()

        def hold_up():
            loop.now += 0.5  # as a long computation on the loop would

        loop.call_at(0.95, hold_up)
        return await run_load(FixedServer(), SAMPLES, OpenLoop(10, "constant"), Amount(requests=20), TRAITS)

    traffic = run_virtually(load())
    held = traffic.records[10]
    assert held.due == pytest.approx(1.0)
    assert held.sent == pytest.approx(1.45)
    assert held.reply.times[0] - held.due == pytest.approx(0.65)
    point = summarize([Round.of("served", 10, 0, traffic)], None, [""] * 50)
    assert point.late.p99 > 0.4


def test_a_sample_of_turns_is_a_conversation():
    server = FixedServer()
    dataset = Dataset("chat", (Sample(("first", "second"), system="be short"),))
    traffic, point = measure(server, ClosedLoop(1), Amount(requests=2), dataset)
    assert point.requests == 4
    assert [record.turn for record in traffic.records] == [0, 1, 0, 1]
    second = server.asked[1]
    assert second.sample.messages(second.replies) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "second"},
    ]


def test_requests_differ_in_their_seeds_and_arms_agree_in_them():
    def seeds(arm):
        server = FixedServer()
        measure(server, ClosedLoop(4), Amount(requests=20), traits=Traits(SamplingParams(seed=7), arm, 40))
        assert {request.arm for request in server.asked} == {arm}
        return sorted((request.sample.turns, request.params.seed) for request in server.asked)

    assert seeds("plain") == seeds("draft")
    assert len({seed for _, seed in seeds("draft")}) == 20


def test_errors_are_counted_and_left_out_of_latencies():
    class Refuses(FixedServer):
        async def send(self, request):
            if len(self.asked) % 4 == 3:
                self.asked.append(request)
                # As a stream that broke: what had come of it is no reply, and no throughput either.
                return Reply([asyncio.get_running_loop().time()], 1000, [1000], error="the queue is full")
            return await super().send(request)

    traffic, point = measure(Refuses(), ClosedLoop(1), Amount(requests=40))
    assert traffic.tokens == sum(record.reply.tokens for record in traffic.records if not record.reply.error)
    assert point.errors == {"the queue is full": 10}
    assert point.requests == 30
    assert point.ttft.p99 == pytest.approx(0.2)


def test_gaps_are_kept_to_half_a_percent():
    chance = random.Random(3)
    gaps = [chance.lognormvariate(-4, 1) for _ in range(5000)]
    times = np.cumsum([1.0, *gaps]).tolist()
    reply = Reply(times=times, tokens=len(times), tokens_by_response=[1] * len(times))

    class Recorded(FixedServer):
        async def send(self, request):
            return reply

    _, point = measure(Recorded(), ClosedLoop(1), Amount(requests=1))
    exact = Spread.of(gaps)
    for percentile in (50, 90, 99):
        assert point.itl.at(percentile) == pytest.approx(exact.at(percentile), rel=0.01)
    assert point.itl.mean == pytest.approx(exact.mean, rel=0.005)


def test_acceptance_is_tokens_a_step_and_shares_of_what_was_verified():
    class Drafts(FixedServer):
        async def send(self, request):
            reply = await super().send(request)
            reply.drafted, reply.accepted, reply.steps = 30, 30, 10
            for _ in range(5):
                reply.count_step(4, 3)
                reply.count_step(2, 0)
            return reply

    _, point = measure(Drafts(), ClosedLoop(2), Amount(requests=8))
    assert point.acceptance_length == pytest.approx(40 / 10)
    assert point.acceptance_by_position == pytest.approx([0.5, 0.5, 1.0, 0.0])
    _, plain = measure(FixedServer(), ClosedLoop(2), Amount(requests=8))
    assert plain.acceptance_length is None


def test_tokens_of_prompts_that_are_read_again_are_no_step_s():
    """Of 41 tokens ten steps gave 36: the prefill gave the first, and four preemptions one each."""

    class Preempts(FixedServer):
        async def send(self, request):
            reply = await super().send(request)
            reply.drafted, reply.accepted, reply.steps = 70, 26, 10
            return reply

    _, point = measure(Preempts(), ClosedLoop(2), Amount(requests=8))
    assert point.acceptance_length == pytest.approx(36 / 10)


@pytest.mark.parametrize("tells_steps", [True, False])
def test_drafts_of_which_none_is_accepted_are_an_acceptance_of_one(tells_steps):
    class Drafts(FixedServer):
        async def send(self, request):
            reply = await super().send(request)
            steps = reply.tokens - 1
            reply.drafted, reply.accepted, reply.steps = 4 * steps, 0, steps if tells_steps else None
            for _ in range(steps):
                reply.count_step(4, 0)
            return reply

    _, point = measure(Drafts(), ClosedLoop(2), Amount(requests=8))
    assert point.acceptance_length == pytest.approx(1)
    assert point.acceptance_by_position == [0, 0, 0, 0]
