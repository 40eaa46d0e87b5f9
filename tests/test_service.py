"""Requests from many threads, and what becomes of them."""

import queue
import threading

import pytest

from tests.conftest import TINY
from tests.virtual_time import Clock
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.errors import (
    CancelledError,
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    SettingsError,
)
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.service import MOST_FAILURES, Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.runtime.slots import Slots
from trtllm_dflash.runtime.statistics import RECENT_STEPS, Statistics
from trtllm_dflash.text.grammar import Grammar
from trtllm_dflash.text.stream import TextStream

#: Step times are not measured for a fixed length.
WHOLE_BLOCK = ServiceSettings(draft_length=15)

CHATS = [[{"role": "user", "content": text}] for kind in read_prompts(3).values() for text in kind]


@pytest.fixture(scope="module")
def llm():
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=4, max_seq_len=1024) as llm:
        yield llm


@pytest.fixture
def service(llm):
    service = llm.service(WHOLE_BLOCK.model_copy(update={"max_queue": 4}))
    yield service
    service.close()


class Client:
    """Submits a request and collects its updates."""

    def __init__(self, service, prompt, tokens=24, draft=True, priority=0, deadline=None, **params):
        self.updates = queue.SimpleQueue()
        settings = SamplingParams(max_tokens=tokens, **params)
        self.service = service
        self.ticket = service.submit(
            prompt, settings, self.updates.put, draft=draft, priority=priority, deadline=deadline
        )

    def wait(self):
        """All updates up to the last one."""
        found = []
        while not found or (found[-1].completion is None and found[-1].error is None):
            found.append(self.updates.get(timeout=PATIENCE))
        return found

    def first(self):
        return self.updates.get(timeout=PATIENCE)


def test_updates_joined_are_the_whole_reply(tiny, service):
    expected = tiny.generate(CHATS[:4], SamplingParams(max_tokens=40, stop=("zebra",)))
    clients = [Client(service, chat, 40, stop=("zebra",)) for chat in CHATS[:4]]
    for client, reply in zip(clients, expected, strict=True):
        updates = client.wait()
        last = updates[-1]
        assert "".join(update.text for update in updates) == reply.text == last.completion.text
        assert [token for update in updates for token in update.token_ids] == reply.token_ids
        assert last.completion.accepted_per_step == reply.accepted_per_step
        assert last.drafted_tokens == reply.drafted_tokens == 15 * reply.steps
        assert last.accepted_tokens == reply.accepted_tokens
        times = last.completion.times
        ordered = [times.arrival_ns, times.first_scheduled_ns, times.first_token_ns, times.last_token_ns]
        assert ordered == sorted(ordered)
        assert last.completion.seconds == pytest.approx((times.last_token_ns - times.first_scheduled_ns) / 1e9)


@pytest.mark.exhaustive(beside="tests/serving/test_gateway.py::test_sixteen_clients_at_once_each_get_their_own_reply")
@pytest.mark.slow
def test_many_threads_at_once(llm):
    expected = llm_replies(llm)
    service = llm.service(WHOLE_BLOCK)
    failures = []

    def client(i):
        chat, reply = CHATS[i % len(CHATS)], expected[i % len(CHATS)]
        updates = Client(service, chat).wait()
        if "".join(update.text for update in updates) != reply.text:
            failures.append(i)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(36)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
    assert failures == []
    statistics = service.statistics()
    service.close()
    assert statistics.requests == {"completed": 36}
    assert statistics.running == statistics.waiting == 0


def llm_replies(llm):
    return llm.generate(CHATS, SamplingParams(max_tokens=24))


def test_a_full_queue_is_an_error_at_once_and_the_others_go_on(service):
    clients = [Client(service, CHATS[i], 200, ignore_eos=True) for i in range(8)]
    with pytest.raises(QueueFullError, match=r"4 requests have a slot, and 4 wait .*max-queue"):
        Client(service, CHATS[0])
    for client in clients[2:]:
        service.cancel(client.ticket)
    for client in clients:
        client.wait()
    assert Client(service, CHATS[0]).wait()[-1].completion is not None
    assert service.statistics().requests["refused"] == 1


def test_cancelling_frees_the_slot_at_the_next_step(service):
    endless = [Client(service, CHATS[i], 900, ignore_eos=True) for i in range(4)]
    for client in endless:
        client.first()
    assert service.statistics().running == 4
    service.cancel(endless[2].ticket)
    service.cancel(endless[2].ticket)
    assert isinstance(endless[2].wait()[-1].error, CancelledError)
    assert Client(service, CHATS[5], 4).wait()[-1].completion is not None  # in that slot: the others still run
    assert service.statistics().running == 3
    for client in endless:
        service.cancel(client.ticket)


def test_what_is_long_enough_ends_as_complete(service, tiny):
    """With what there is of it; what comes after it, a cancellation too, changes nothing."""
    endless = [Client(service, CHATS[i], 900, ignore_eos=True) for i in range(5)]
    begun = [client.first() for client in endless[:4]]
    service.finish(endless[1].ticket)
    service.cancel(endless[1].ticket)
    service.finish(endless[4].ticket)  # nothing of it is there, and perhaps no slot
    updates = [begun[1], *endless[1].wait()]
    done = updates[-1].completion
    assert done.finish_reason == "stop" and 0 < len(done.token_ids) < 900
    assert [token for update in updates for token in update.token_ids] == done.token_ids
    assert "".join(update.text for update in updates) == done.text
    assert (
        done.token_ids
        == tiny.generate([CHATS[1]], SamplingParams(max_tokens=len(done.token_ids), ignore_eos=True))[0].token_ids
    )
    for client in (*endless[:1], *endless[2:4]):
        service.cancel(client.ticket)
        client.wait()
    endless[4].wait()
    service.finish(endless[1].ticket)
    counts = service.statistics()
    assert (counts.requests["completed"], counts.requests["cancelled"]) == (1, 4)
    assert counts.running == counts.kv_tokens_in_use == 0
    assert Client(service, CHATS[5], 4).wait()[-1].completion is not None


def test_a_deadline(llm):
    clock = Clock()
    clock.now = 1000.0
    service = Service(llm.session, llm.intake, WHOLE_BLOCK, clock=clock)
    # Drawn from all tokens: drafts are wrong, and 900 tokens take hundreds of steps.
    client = Client(service, CHATS[0], 900, ignore_eos=True, deadline=0.2, temperature=5.0)
    assert client.first().error is None
    clock.now += 0.2
    assert isinstance(client.wait()[-1].error, DeadlineError)
    with pytest.raises(RequestError, match="deadline"):
        Client(service, CHATS[0], deadline=-1)
    with pytest.raises(RequestError, match="priority"):
        Client(service, CHATS[0], priority=-3)
    service.close()


def test_a_bad_request_is_refused_and_the_next_one_served(service):
    with pytest.raises(RequestError, match="the prompt is empty"):
        Client(service, [])
    with pytest.raises(RequestError, match="the prompt has 2000 tokens"):
        Client(service, [1] * 2000)
    assert Client(service, [1, 2, 3], 4).wait()[-1].completion is not None


def test_a_step_that_fails_fails_its_requests_and_the_service_goes_on(llm, service, monkeypatch):
    real = llm.session.run

    def fails(call):
        monkeypatch.setattr(llm.session, "run", real)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.session, "run", fails)
    error = Client(service, CHATS[0]).wait()[-1].error
    assert str(error) == "a step failed: RuntimeError: out of luck"
    assert Client(service, CHATS[0]).wait()[-1].completion is not None
    assert service.failure is None


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_engine_that_fails_every_step_is_given_up(llm, monkeypatch, kind):
    service = llm.service(WHOLE_BLOCK)

    real = llm.session.run

    def fails(call):
        if call.pieces if kind == "prefill" else call.decode:
            raise RuntimeError("the GPU is gone")
        return real(call)

    monkeypatch.setattr(llm.session, "run", fails)
    clients = []
    for _ in range(MOST_FAILURES):
        clients.append(Client(service, CHATS[0]))
        assert isinstance(clients[-1].wait()[-1].error, EngineError)
    wait_until(lambda: service.failure is not None, "the service gave up")
    assert "the GPU is gone" in service.failure
    with pytest.raises(EngineError, match=r"the engine failed: .*the GPU is gone"):
        Client(service, CHATS[0])
    service.close()


@pytest.mark.parametrize("form", [{}, {"structured": Structured(kind="regex", value="[a-z ]{50,200}")}])
def test_a_step_that_cannot_be_read_fails_no_request_of_the_next_one(llm, monkeypatch, form):
    """Whose grammars look at what that step gave."""
    scheduler, run = Scheduler(llm.session, ahead=1), llm.session.run
    failing = llm.intake.sequence([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=not form, **form))
    scheduler.submit(failing)
    for _ in range(3):
        scheduler.step()

    def unread(step):
        outcome = run(step)
        monkeypatch.setattr(outcome, "packed", lambda: 1 / 0)
        return outcome

    with monkeypatch.context() as once:
        once.setattr(llm.session, "run", unread)
        scheduler.step()
    other = llm.intake.sequence([8, 9, 10], SamplingParams(max_tokens=5, ignore_eos=True))
    scheduler.submit(other)
    while scheduler.busy:
        scheduler.step()
    assert "division by zero" in str(failing.error) and other.completion().finish_reason == "length"


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_at_fault_do_not_end_the_service(llm, service, monkeypatch, ranks):
    def plan(self, drafts, behind=(), complete=True):
        raise RequestError("cannot be followed", "structured")

    monkeypatch.setattr(Grammar, "plan", plan)
    monkeypatch.setattr(service, "_config", llm.config.model_copy(update={"tp": ranks}))
    for _ in range(MOST_FAILURES):
        error = Client(service, CHATS[0], structured=Structured(kind="regex", value="x+")).wait()[-1].error
        assert str(error) == "structured: cannot be followed"
    assert Client(service, CHATS[0], 4).wait()[-1].completion is not None
    assert service.failure is None


def test_a_fault_of_one_requests_text_fails_that_request_alone(llm, service, monkeypatch):
    poisoned = []

    def push(self, token, real=TextStream.push):
        if self in poisoned:
            raise ValueError("invalid prefix")
        real(self, token)

    monkeypatch.setattr(TextStream, "push", push)
    clients = [Client(service, CHATS[i], 40, ignore_eos=True) for i in range(3)]
    poisoned.append(clients[1].ticket.sequence.text)
    ends = [client.wait()[-1] for client in clients]
    assert [end.error is None for end in ends] == [True, False, True]
    assert str(ends[1].error) == "the reply's text failed: ValueError: invalid prefix"
    assert Client(service, CHATS[0], 4).wait()[-1].completion is not None


@pytest.mark.principal("accept-2", "plan-1")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", ["accept", "plan"])
def test_faults_of_grammars_end_those_requests_alone(llm, service, monkeypatch, part, ranks):
    real, poisoned = getattr(Grammar, part), []

    def fails(self, *more):
        if self in poisoned:
            raise KeyError("astray")
        return real(self, *more)

    monkeypatch.setattr(service, "_config", llm.config.model_copy(update={"tp": ranks}))
    monkeypatch.setattr(Grammar, part, fails)
    other = Client(service, CHATS[1], 900, ignore_eos=True)
    for _ in range(MOST_FAILURES):
        held = Client(service, CHATS[0], 900, structured=Structured(kind="grammar", value='start: "x" start'))
        held.first()
        poisoned.append(held.ticket.sequence.grammar)
        assert "astray" in str(held.wait()[-1].error)
    assert Client(service, CHATS[0], 4).wait()[-1].completion is not None
    assert service.failure is None
    service.cancel(other.ticket)
    assert isinstance(other.wait()[-1].error, CancelledError)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", ["push", "finish"])
def test_faults_of_texts_do_not_end_the_service(llm, service, monkeypatch, part, ranks):
    def fails(self, *token):
        raise ValueError("invalid prefix")

    monkeypatch.setattr(service, "_config", llm.config.model_copy(update={"tp": ranks}))
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, part, fails)
        for _ in range(MOST_FAILURES):
            assert "invalid prefix" in str(Client(service, CHATS[0], 4).wait()[-1].error)
    assert Client(service, CHATS[0], 4).wait()[-1].completion is not None
    assert service.failure is None


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(llm, monkeypatch):
    """Also not the one whose reply ended in the very step that failed."""
    service = llm.service(WHOLE_BLOCK)
    clients = [Client(service, CHATS[i], 3 if i == 0 else 900, ignore_eos=True) for i in range(3)]
    real = Scheduler._read

    def fails_once_one_has_ended(self, launched):
        real(self, launched)
        if clients[0].ticket.sequence.done:
            monkeypatch.setattr(Scheduler, "_read", real)
            raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "_read", fails_once_one_has_ended)
    for client in clients:
        client.wait()
    assert "a bug" in service.failure
    with pytest.raises(EngineError, match="a bug"):
        Client(service, CHATS[0])


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


def test_a_panic_leaves_nobody_waiting(llm, monkeypatch):
    service, everybody_is_there = llm.service(WHOLE_BLOCK), threading.Event()

    def panics(self, token):
        everybody_is_there.wait(PATIENCE)
        raise Panic("index out of bounds")

    monkeypatch.setattr(TextStream, "push", panics)
    clients = [Client(service, CHATS[i], 900, ignore_eos=True) for i in range(6)]
    everybody_is_there.set()
    assert all("index out of bounds" in str(client.wait()[-1].error) for client in clients)
    with pytest.raises(EngineError, match="index out of bounds"):
        Client(service, CHATS[0])


@pytest.mark.slow
def test_a_fault_in_freeing_slots_leaves_nobody_waiting(llm, monkeypatch):
    """It is there again when the service gives up, and frees all slots."""
    service = llm.service(WHOLE_BLOCK)
    clients = [Client(service, CHATS[0], 900, ignore_eos=True)]
    clients[0].first()

    def fails(self, stay, forget=False):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Slots, "leave", fails)
    Client(service, CHATS[1], 6)  # the first to leave
    clients += [Client(service, CHATS[i], 900, ignore_eos=True) for i in range(2, 6)]
    assert all("a bug" in str(client.wait()[-1].error) for client in clients)
    assert "a bug" in service.failure


def test_a_client_whose_callback_raises_harms_no_other(service):
    def raises(update):
        raise KeyError("mine")

    service.submit(CHATS[0], SamplingParams(max_tokens=4), raises)
    assert Client(service, CHATS[1], 4).wait()[-1].completion is not None
    assert service.failure is None


def test_nothing_else_uses_an_engine_that_a_service_has(llm):
    """It computed in the same slots: both texts were wrong."""
    stream = llm.stream(CHATS[0])
    next(stream)
    service = llm.service(WHOLE_BLOCK)
    client = Client(service, CHATS[0], ignore_eos=True)
    begins = lambda: next(llm.stream(CHATS[1]))  # noqa: E731
    for use in (lambda: llm.generate([CHATS[1]]), begins, lambda: next(stream), llm.service):
        with pytest.raises(RequestError, match="a service has this LLM's slots until it is closed"):
            use()
    reply = client.wait()[-1].completion
    service.close()
    assert llm.generate([CHATS[0]], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids == reply.token_ids


def test_an_engine_that_is_closed_ends_its_service_first():
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=1, max_seq_len=1024) as llm:
        service = llm.service(WHOLE_BLOCK)
        client = Client(service, CHATS[0], 900, ignore_eos=True)
        client.first()
    assert not service.running and service.failure is None
    assert client.wait()[-1].error is not None


def test_who_receives_updates_cannot_close_the_service(llm):
    service, said = llm.service(WHOLE_BLOCK), queue.SimpleQueue()

    def update(found):
        try:
            service.close()
        except EngineError as error:
            said.put(str(error))

    service.submit(CHATS[0], SamplingParams(max_tokens=4), update)
    assert "close it on another thread" in said.get(timeout=PATIENCE)
    service.close()


def test_a_service_that_is_refused_leaves_the_harvests_folder_to_others(llm, tmp_path):
    with pytest.raises(SettingsError, match="--draft-length 99") as refused:
        llm.service(ServiceSettings(draft_length=99, harvest=str(tmp_path)))
    llm.service(ServiceSettings(draft_length=15, harvest=str(tmp_path))).close()
    del refused  # whose traceback knew what was made so far


def test_the_acceptance_length_is_of_the_last_steps_of_sequences():
    statistics, steps = Statistics(longest=7), [[number % 7] * (1 + number % 64) for number in range(300)]
    for more in steps:
        statistics.note_drafts(more, [7] * len(more), more)
    assert statistics.recent == [one + 1 for more in steps for one in more][-RECENT_STEPS:]


def test_closing_fails_what_is_left(llm):
    service = llm.service(WHOLE_BLOCK)
    clients = [Client(service, CHATS[i % 12], 900, ignore_eos=True) for i in range(6)]
    clients[0].first()
    service.close()
    for client in clients:
        assert "closing" in str(client.wait()[-1].error)
    with pytest.raises(EngineError, match="closed"):
        Client(service, CHATS[0])


def test_statistics_add_up(llm):
    service = llm.service(WHOLE_BLOCK)
    replies = [Client(service, chat).wait()[-1].completion for chat in CHATS[:6]]
    Client(service, CHATS[6], draft=False).wait()
    statistics = service.statistics()
    service.close()
    drafted = sum(reply.drafted_tokens for reply in replies)
    accepted = sum(reply.accepted_tokens for reply in replies)
    found = {}
    for sample in statistics.samples():
        key = sample.name, *sample.labels.values()
        assert key not in found
        assert sample.help
        found[key] = sample.value
    positions = [str(i) for i in range(1, 16)]
    assert sum(found["dflash_drafted_tokens_total", p] for p in positions) == drafted
    assert sum(found.get(("dflash_accepted_tokens_total", p), 0) for p in positions) == accepted
    by_position = [found.get(("dflash_accepted_tokens_total", p), 0) for p in positions]
    assert by_position == sorted(by_position, reverse=True)
    assert found["dflash_acceptance_length",] == pytest.approx(
        sum(len(reply.token_ids) - 1 for reply in replies) / sum(reply.steps for reply in replies)
    )
    assert found["dflash_requests_total", "completed"] == 7
    assert found["dflash_slots_in_use",] == 0
    assert found["dflash_time_to_first_token_seconds_count",] == 7
    assert found["dflash_time_to_first_token_seconds_bucket", "+Inf"] == 7
    assert found["dflash_request_seconds_sum",] > found["dflash_time_to_first_token_seconds_sum",] > 0
    assert found["dflash_prompt_tokens_total",] == sum(r.prompt_tokens for r in replies) + len(llm.encode(CHATS[6]))
