"""In-flight batching: who runs when, and that nobody's reply depends on it."""

import random
import re

import pytest
import torch

from tests.conftest import TINY
from tests.virtual_time import Clock
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.cost.memory import cache_bytes
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.errors import CancelledError, DeadlineError, EngineError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.pages import MIN_COPIED_ROWS
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.torch_session import TorchSession

TEXTS = [text for kind in read_prompts(3).values() for text in kind]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


@pytest.fixture(scope="module")
def loaded():
    """The shipped pair with four slots and pieces of up to 32 tokens."""
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=4, max_seq_len=1800) as llm:
        llm.config = llm.session.config = llm.config.model_copy(update={"chunk": 32})
        yield llm


def with_session(llm, flat=True, **changes):
    """The same engine on a session of its own: of flat rows or of [slots, rows], and with other pages."""
    config = llm.config.model_copy(update=changes)
    return LLM(TorchSession(config, llm.session.weights, llm.session.device, flat=flat), llm.codec)


@pytest.fixture(scope="module")
def paged(loaded):
    return with_session(loaded, page_size=64)


@pytest.fixture(scope="module")
def linear(loaded):
    """Decodes, or reads one piece; each slot has one page."""
    return with_session(loaded, flat=False)


@pytest.fixture(params=["paged", "linear"])
def llm(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(loaded):
    """What `generate` gives for a prompt by itself, from a cache of such replies."""
    known = {}

    def get(prompt, params, draft=True):
        key = str(prompt), params, draft
        if key not in known:
            (known[key],) = loaded.generate([prompt], params, draft)
        return known[key]

    return get


def note_steps(llm, monkeypatch):
    """A list that gets the steps which a session runs."""
    steps, run = [], llm.session.run
    monkeypatch.setattr(llm.session, "run", lambda step: (steps.append(step), run(step))[1])
    return steps


@pytest.fixture
def steps(llm, monkeypatch):
    return note_steps(llm, monkeypatch)


def run(scheduler):
    while scheduler.busy:
        scheduler.step()


def asked(llm, prompt, tokens=24, **settings):
    options = {name: settings.pop(name) for name in ("draft", "priority", "deadline") if name in settings}
    return llm.intake.sequence(prompt, SamplingParams(max_tokens=tokens, **settings), **options)


def same(sequence, completion):
    found = sequence.completion()
    assert found.token_ids == completion.token_ids
    assert found.text == completion.text
    assert found.finish_reason == completion.finish_reason
    return True


# -- nobody's reply depends on the others ------------------------------------------------------------------------------


@pytest.mark.principal("paged-0", "linear-1")
@pytest.mark.slow
@pytest.mark.parametrize(("llm", "ahead"), [("paged", 0), ("linear", 1), ("paged", 2)], indirect=["llm"])
def test_replies_do_not_depend_on_who_joins_and_leaves(llm, alone, ahead):
    """Requests of all kinds come at random steps, some are cancelled: what finishes is what comes of it alone."""
    choices = random.Random(5)
    scheduler = Scheduler(llm.session, ahead=ahead)
    waiting, cancelled = [], []
    for i in range(24):
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 2**64 - 1 - i} if i % 3 == 1 else {}
        stop = {"stop": (" the",)} if i % 5 == 2 else {}
        params = SamplingParams(max_tokens=choices.choice([1, 2, 9, 30]), ignore_eos=i % 4 == 3, **sampled, **stop)
        waiting.append((CHATS[i % len(CHATS)], params, i % 6 != 5))
    sequences = []
    while waiting or scheduler.busy:
        for _ in range(choices.choice([0, 0, 1, 3])):
            if waiting:
                request = waiting.pop()
                sequences.append((llm.intake.sequence(*request), request))
                scheduler.submit(sequences[-1][0])
        scheduler.step()
        going = [sequence for sequence, _ in sequences if not sequence.done]
        if going and choices.random() < 0.1:
            cancelled.append(choices.choice(going))
            scheduler.cancel(cancelled[-1], CancelledError("gone"))
    assert cancelled
    assert len(sequences) == 24
    for sequence, request in sequences:
        if sequence in cancelled:
            assert isinstance(sequence.error, CancelledError)
        else:
            assert same(sequence, alone(*request))
    assert scheduler.statistics.running == 0 or not scheduler.busy


@pytest.mark.principal("paged")
def test_one_step_behind_accepts_the_same_drafts(llm):
    lengths = []
    for ahead in (0, 1):
        scheduler = Scheduler(llm.session, ahead=ahead)
        sequences = [asked(llm, chat, 40) for chat in CHATS[:6]]
        for sequence in sequences:
            scheduler.submit(sequence)
        run(scheduler)
        lengths.append([sequence.accepted_per_step for sequence in sequences])
    assert lengths[0] == lengths[1]
    steps = [count for accepted in lengths[0] for count in accepted]
    assert sum(steps) / len(steps) + 1 > 4


@pytest.mark.principal("paged-1", "linear-0")
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_plain_reply_beside_drafted_ones_is_the_same(llm, alone, ahead):
    scheduler = Scheduler(llm.session, ahead=ahead)
    sequences = [asked(llm, chat, draft=i % 2 == 0) for i, chat in enumerate(CHATS[:4])]
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler)
    for i, sequence in enumerate(sequences):
        assert same(sequence, alone(CHATS[i], sequence.params, i % 2 == 0))
        assert (sequence.drafted > 0) == (i % 2 == 0)
        assert max(sequence.accepted_per_step) > 0 or i % 2


def test_no_step_is_wasted_on_a_plain_reply_that_ends_by_its_length(llm, steps):
    scheduler = Scheduler(llm.session, ahead=1)
    scheduler.submit(asked(llm, CHATS[0], 9, draft=False, ignore_eos=True))
    run(scheduler)
    assert sum(bool(step.decode) for step in steps) == 8


@pytest.mark.principal("paged-1", "linear-0")
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_reply_may_fill_the_context(llm, ahead):
    llm = with_session(llm, flat=llm.session.limits.mixes, max_seq_len=256)
    prompt = list(range(1, llm.config.max_seq_len - 20))
    scheduler = Scheduler(llm.session, ahead=ahead)
    sequences = [asked(llm, prompt, 100, ignore_eos=True), asked(llm, CHATS[0], 60)]
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler)
    assert len(sequences[0].token_ids) == llm.config.max_seq_len - len(prompt)
    assert sequences[0].finish_reason == "length"


@pytest.mark.slow
def test_a_preempted_reply_is_the_same_text(loaded, alone):
    """Caches for one and a half conversations: four at once, all of them with the text and drafts of their own."""
    tight = with_session(
        loaded, page_size=16, max_seq_len=160, kv_memory=cache_bytes(loaded.config, Paging(15, 16, 10))
    )
    scheduler = Scheduler(tight.session, ahead=1)
    sequences = [
        asked(tight, CHATS[i], 80, ignore_eos=True, draft=i != 2, temperature=0.8 * (i == 1), seed=i) for i in range(4)
    ]
    for sequence in sequences:
        scheduler.submit(sequence)
    run(scheduler)
    assert scheduler.statistics.preemptions > 0
    for i, sequence in enumerate(sequences):
        assert sequence.token_ids == alone(CHATS[i], sequence.params, i != 2).token_ids
    assert scheduler.statistics.pages_used == 0


# -- who runs when -----------------------------------------------------------------------------------------------------


@pytest.mark.principal("0.25")
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_running_streams_keep_their_pace_while_a_long_prompt_comes_in(linear, monkeypatch, share):
    """A prompt of 15 chunks takes its share of the steps and no more, from its arrival to its last chunk."""
    llm, steps = linear, note_steps(linear, monkeypatch)
    scheduler = Scheduler(llm.session, prefill_share=share)
    streams = [asked(llm, chat, 1000, ignore_eos=True, draft=False) for chat in CHATS[:2]]
    for stream in streams:
        scheduler.submit(stream)
    while not all(stream.token_ids for stream in streams):
        scheduler.step()
    long = asked(llm, [7 + i % 300 for i in range(470)], 1)
    scheduler.submit(long)
    del steps[:]
    before = [len(stream.accepted_per_step) for stream in streams]
    while not long.done:
        scheduler.step()
    kinds = "".join("p" if step.pieces else "d" for step in steps)
    chunks = 15
    assert kinds.count("p") == chunks
    assert abs(len(kinds) - chunks / share) <= 1 / share
    longest_wait = max(len(run) for run in kinds.split("d"))
    assert longest_wait <= -(-share // (1 - share)) + 1
    for stream, steps in zip(streams, before, strict=True):
        assert len(stream.accepted_per_step) - steps == kinds.count("d")
    scheduler.fail_all(CancelledError("enough"))


def test_prompts_come_first_where_all_steps_are_theirs(linear, monkeypatch):
    steps = note_steps(linear, monkeypatch)
    scheduler = Scheduler(linear.session, prefill_share=1)
    for _ in range(2):
        scheduler.submit(asked(linear, [5] * 100, 2, ignore_eos=True))
    run(scheduler)
    kinds = "".join("p" if step.pieces else "d" for step in steps)
    assert kinds.startswith("pppp")


def test_the_lowest_free_slot_is_taken_first(llm, steps):
    scheduler = Scheduler(llm.session)
    sequences = [asked(llm, [i + 1] * 3, tokens, ignore_eos=True) for i, tokens in enumerate([40, 1, 40])]
    for sequence in sequences:
        scheduler.submit(sequence)
    while not sequences[1].done:
        scheduler.step()
    scheduler.submit(asked(llm, [9] * 3, 1))
    run(scheduler)
    assert [piece.slot for step in steps for piece in step.pieces] == [0, 1, 2, 1]
    assert all(slot < 3 for step in steps for slot, _ in step.decode)


@pytest.mark.principal("paged")
def test_the_most_urgent_waits_least(llm):
    scheduler = Scheduler(llm.session)
    for i in range(4):
        scheduler.submit(asked(llm, [i + 1] * 3, 12, ignore_eos=True))
    scheduler.step()
    ordinary, urgent, later = (asked(llm, [50 + i] * 3, 2, priority=p) for i, p in enumerate((100, 1, 100)))
    for sequence in (ordinary, urgent, later):
        scheduler.submit(sequence)
    run(scheduler)
    scheduled = [sequence.times.first_scheduled_ns for sequence in (urgent, ordinary, later)]
    assert scheduled == sorted(scheduled)


@pytest.mark.principal("linear")
def test_deadlines_pass_while_waiting_and_while_running(llm, alone):
    clock = Clock()
    scheduler = Scheduler(llm.session, clock=clock)
    running = [asked(llm, chat, 1500, ignore_eos=True, deadline=2.0) for chat in CHATS[:4]]
    waiting = asked(llm, CHATS[4], 5, deadline=0.1)
    patient = asked(llm, CHATS[5], 5)
    for sequence in (*running, waiting, patient):
        scheduler.submit(sequence)
    while not all(sequence.token_ids for sequence in running):
        scheduler.step()
    for now, expired in ((0.099, []), (0.1, [waiting]), (1.999, [waiting]), (2.0, [*running, waiting])):
        clock.now = now
        scheduler.step()
        assert [s for s in (*running, waiting) if isinstance(s.error, DeadlineError)] == expired
        assert all(s.done == (s in expired) for s in (*running, waiting))
    assert not waiting.token_ids
    run(scheduler)
    assert same(patient, alone(CHATS[5], patient.params))
    assert scheduler.statistics.requests == {"expired": 5, "completed": 1}


# -- rows that an earlier request left ---------------------------------------------------------------------------------


def prompt_ids(llm, text):
    return llm.encode([{"role": "user", "content": text}])


@pytest.mark.principal("1")
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_shared_prefix_is_taken_from_the_slot_that_holds_most_of_it(linear, alone, ahead):
    scheduler, first, longer, again = share_a_prefix(linear, alone, ahead)
    shared = first.prompt_ids
    assert longer.reused == len(shared)  # in the slot that held it
    assert again.reused == len(shared) - 1  # copied from there to another
    assert scheduler.statistics.reused_tokens == longer.reused + again.reused


@pytest.mark.principal("1")
@pytest.mark.parametrize("ahead", [0, 1])
def test_pages_of_a_shared_prefix_are_taken_by_reference(paged, alone, ahead):
    scheduler, first, longer, again = share_a_prefix(paged, alone, ahead)
    whole, rest = divmod(len(first.prompt_ids) - 1, 64)
    assert whole >= 1
    for sequence in (longer, again):
        assert sequence.reused == 64 * whole + (rest if rest >= MIN_COPIED_ROWS else 0)
    assert scheduler.statistics.prefix_hits == 2


def share_a_prefix(llm, alone, ahead):
    """Serves a prompt, and then one that goes on from it, the same one and another, beside a running reply."""
    shared = prompt_ids(llm, " ".join(TEXTS[:3]))
    first, longer = (asked(llm, ids, 30) for ids in (shared, shared + [11, 12, 13] * 20))
    scheduler = Scheduler(llm.session, ahead=ahead)
    scheduler.submit(asked(llm, [3] * 40, 200, ignore_eos=True))  # keeps slot 0
    scheduler.submit(first)
    while not first.done:
        scheduler.step()
    again, other = asked(llm, shared, 30), asked(llm, [4] * 50, 3)
    for sequence in (longer, again, other):
        scheduler.submit(sequence)
    while not (again.done and longer.done and other.done):
        scheduler.step()
    assert other.reused == 0
    reply = alone(shared, first.params)
    assert same(again, reply)
    assert again.accepted_per_step == reply.accepted_per_step  # the drafter's rows were taken too
    assert same(longer, alone(longer.prompt_ids, longer.params))
    scheduler.fail_all(CancelledError("enough"))
    return scheduler, first, longer, again


def test_a_drafted_request_does_not_reuse_rows_that_the_drafter_never_wrote(linear, alone):
    llm = linear
    shared = prompt_ids(llm, TEXTS[0])
    scheduler = Scheduler(llm.session)
    plain = asked(llm, shared, 40, draft=False)
    scheduler.submit(plain)
    run(scheduler)
    conversation = shared + plain.token_ids + prompt_ids(llm, "And now?")
    drafted = asked(llm, conversation, 20)
    scheduler.submit(drafted)
    run(scheduler)
    assert drafted.reused == len(shared)
    reply = alone(conversation, drafted.params)
    assert same(drafted, reply)
    assert drafted.accepted_per_step == reply.accepted_per_step
    again = asked(llm, conversation, 20, draft=False)
    scheduler.submit(again)
    run(scheduler)
    assert again.reused == len(conversation) - 1


def test_a_conversation_goes_on_from_its_own_reply(llm, alone):
    shared = prompt_ids(llm, TEXTS[3])
    scheduler = Scheduler(llm.session)
    first = asked(llm, shared, 60)
    scheduler.submit(first)
    run(scheduler)
    conversation = shared + first.token_ids + prompt_ids(llm, TEXTS[4])
    second = asked(llm, conversation, 30)
    scheduler.submit(second)
    run(scheduler)
    known = len(shared) + len(first.token_ids) - 1
    assert second.reused >= (known if llm.session.paging.linear else known // 64 * 64)
    reply = alone(conversation, second.params)
    assert same(second, reply)
    assert second.accepted_per_step == reply.accepted_per_step


# -- steps that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.principal(
    "linear-pieces-1", "paged-pieces-0", "linear-copies-0", "paged-copies-1", "linear-decode-0", "paged-decode-1"
)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["pieces", "decode", "copies"])
def test_a_step_that_fails_fails_its_requests_and_no_others(llm, alone, monkeypatch, kind, ahead):
    real = llm.session.run

    def fails(step):
        if not getattr(step, kind):
            return real(step)
        monkeypatch.setattr(llm.session, "run", real)
        failing.extend([slot for slot, _ in step.decode] + [piece.slot for piece in step.pieces])
        raise RuntimeError("the device is on fire\nand more")

    failing = []
    scheduler = Scheduler(llm.session, ahead=ahead)
    shared = prompt_ids(llm, TEXTS[1])
    before = asked(llm, shared, 60)
    scheduler.submit(before)
    while not before.token_ids:
        scheduler.step()
    monkeypatch.setattr(llm.session, "run", fails)
    second = asked(llm, shared, 20)  # begins as the first one: its rows are copied
    scheduler.submit(second)
    run(scheduler)
    assert failing
    for slot, sequence in enumerate((before, second)):
        if slot in failing:
            assert isinstance(sequence.error, EngineError)
            assert str(sequence.error) == "a step failed: RuntimeError: the device is on fire"
        else:
            assert same(sequence, alone(shared, sequence.params))
    if not llm.session.limits.mixes:
        assert (0 in failing) == (kind == "decode")
    after = asked(llm, shared, 20)
    scheduler.submit(after)
    run(scheduler)
    assert same(after, alone(shared, after.params))


def test_a_step_that_accepts_more_drafts_than_it_has_rows_fails_its_requests_alone(llm, alone, monkeypatch):
    real = llm.session.run

    def accepts_too_many(step):
        outcome = real(step)
        if not step.decode:
            return outcome
        monkeypatch.setattr(llm.session, "run", real)
        rows = torch.tensor(outcome.read_whole(), dtype=torch.int32)
        rows[0, 0] = rows.shape[1] - 1
        return Outcome(rows)

    scheduler = Scheduler(llm.session)
    first = asked(llm, prompt_ids(llm, TEXTS[1]), 20)
    scheduler.submit(first)
    monkeypatch.setattr(llm.session, "run", accepts_too_many)
    run(scheduler)
    assert re.search(r"a step of (\d+) rows a slot accepted \1 drafts", str(first.error))
    after = asked(llm, prompt_ids(llm, TEXTS[1]), 20)
    scheduler.submit(after)
    run(scheduler)
    assert same(after, alone(prompt_ids(llm, TEXTS[1]), after.params))


def test_generate_raises_what_failed(llm, monkeypatch):
    def fails(call):
        raise RuntimeError("no")

    monkeypatch.setattr(llm.session, "run", fails)
    with pytest.raises(EngineError, match="a step failed: RuntimeError: no"):
        llm.generate([CHATS[0]])
    with pytest.raises(EngineError, match="a step failed: RuntimeError: no"):
        list(llm.stream(CHATS[0]))


def test_a_run_of_tokens_ends_a_reply_and_is_part_of_it(llm, alone):
    whole = alone(CHATS[0], SamplingParams(max_tokens=24)).token_ids
    stop = tuple(whole[4:7])
    (reply,) = llm.generate([CHATS[0]], SamplingParams(max_tokens=24, stop_token_sequences=(stop, (5, 5, 5))))
    end = next(i for i in range(len(whole)) if tuple(whole[i - 3 : i]) == stop and i >= 3)
    assert reply.token_ids == whole[:end]
    assert reply.finish_reason == "stop"
