"""In-flight batching over pages: prompts beside decoding, shared prefixes, and sequences that wait for pages again."""

import gc
import random
import weakref
from collections import Counter

import pytest

from tests.paged_session import PagedSession, reply, request
from tests.virtual_time import Clock
from trtllm_dflash.errors import CancelledError, DeadlineError, EngineError
from trtllm_dflash.runtime.draft_length import DraftLength
from trtllm_dflash.runtime.prefill_budget import FixedPrefillBudget
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.scheduler import Scheduler


class AnyLength(DraftLength):
    """Any length at any step."""

    lengths = (0, 1, 3)

    def __init__(self):
        self._chance = random.Random(3)

    def choose(self, slots):
        return self._chance.choice(self.lengths)


def run(scheduler, steps=5000):
    """Steps until nothing is left to do, which is no matter of many thousands."""
    for _ in range(steps):
        if not scheduler.busy:
            return
        scheduler.step()
    raise AssertionError("it never ends")


def assert_it_goes_on(scheduler, after):
    """Asserts that a later request gets its reply."""
    scheduler.submit(after)
    run(scheduler)
    assert after.token_ids == reply(after.prompt_ids, after.params)


def watch(scheduler, session):
    """Notes the steps that write a page which their slot does not have alone, or a row that the tree knows.

    So too those that see a page of a layer with a window which their slot does not hold.
    """
    wrong, real, rows = [], session.run, session.paging.rows

    def run_and_check(step):
        outcome = real(step)
        leases = {stay.slot: stay.lease for stay in scheduler._slots}
        for slot, position, page in session.writes:
            node = leases[slot].nodes[position // rows]
            owners = sum(node in lease.nodes for lease in leases.values())
            if node.page != page or owners != 1 or position < leases[slot].rows:
                wrong.append((step, slot, position, page))
        for slot, first, last in session.looks:
            if first // rows not in leases[slot].seen or last // rows not in leases[slot].seen:
                wrong.append((step, slot, first, last))
        return outcome

    session.run = run_and_check
    return wrong


def prompts(chance, count):
    """Prompts of which many begin alike, of one token to more than a hundred."""
    texts = [[chance.randrange(1, 50) for _ in range(150)] for _ in range(3)]
    return [
        [*chance.choice(texts)[: chance.choice([0, 5, 30, 60, 61, 130])], *chance.choices(range(50), k=1 + i % 7)]
        for i in range(count)
    ]


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("pages", [11, 16, 40])
@pytest.mark.parametrize("window", [0, 30])
def test_replies_do_not_depend_on_pages_and_who_joins_and_leaves(window, pages, ahead, mixes):
    """Pages run out, prefixes are shared, requests are cancelled: what finishes is what comes of it alone."""
    chance = random.Random(pages + ahead)
    session = PagedSession(pages=pages, ahead=ahead, mixes=mixes, pieces=3 if mixes else 1, window=window)
    scheduler = Scheduler(session, draft_length=AnyLength(), budget=FixedPrefillBudget(70))
    waiting = [
        request(
            prompt,
            tokens=chance.choice([1, 2, 9, 60]),
            draft=i % 6 != 5,
            priority=chance.choice([1, 100, 100]),
            ignore_eos=i % 4 != 3,
            temperature=0.8 * (i % 3 == 1),
            seed=i,
        )
        for i, prompt in enumerate(prompts(chance, 60))
    ]
    sequences, cancelled, wrong = [], [], watch(scheduler, session)
    while waiting or scheduler.busy:
        for _ in range(chance.choice([0, 0, 1, 3])):
            if waiting:
                sequences.append(waiting.pop())
                scheduler.submit(sequences[-1])
        scheduler.step()
        going = [sequence for sequence in sequences if not sequence.done]
        if going and chance.random() < 0.05:
            cancelled.append(chance.choice(going))
            scheduler.cancel(cancelled[-1], CancelledError("gone"))
        assert len(session.steps) < 10_000
    for sequence in sequences:
        if sequence in cancelled:
            assert isinstance(sequence.error, CancelledError)
        else:
            assert sequence.completion().token_ids == reply(sequence.prompt_ids, sequence.params)
    assert wrong == session.lost == []
    if window:
        assert scheduler._slots.pages.windows.held == 0
    statistics = scheduler.statistics
    assert cancelled
    assert statistics.prefix_hits > 5
    assert (statistics.preemptions > 0) == (pages < 40)
    assert statistics.running == statistics.kv_tokens_in_use == statistics.pages_used == 0


@pytest.mark.parametrize("pages", [11, 40])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("window", [0, 30])
def test_slots_where_nothing_happens_are_settled_as_those_that_are_looked_at(window, ahead, pages, monkeypatch):
    """The same steps, replies and counts, whether each token is looked at or only those that may matter."""

    def course():
        chance = random.Random(pages + ahead)
        session = PagedSession(pages=pages, ahead=ahead, window=window)
        scheduler = Scheduler(session, draft_length=AnyLength(), budget=FixedPrefillBudget(70))
        sequences = [
            request(prompt, chance.choice([1, 2, 9, 60]), draft=i % 6 != 5, ignore_eos=i % 4 != 3, seed=i)
            for i, prompt in enumerate(prompts(chance, 30))
        ]
        for sequence in sequences:
            scheduler.submit(sequence)
        counted = []
        while scheduler.busy:
            changed, counts = [sequence.arrival for sequence in scheduler.step()], scheduler.statistics
            counted.append((changed, counts.committed_tokens, Counter(counts.verified), *counts.recent))
            assert counts.kv_tokens_in_use == sum(stay.rows for stay in scheduler._slots)
        replies = [(s.token_ids, s.accepted_per_step, s.accepted, s.drafted, s.pages) for s in sequences]
        return session.steps, counted, replies

    found = course()
    monkeypatch.setattr(Sequence, "is_watched", True)
    assert course() == found


@pytest.mark.parametrize("ends", [{7}, {7, 2**40}, {7, 11, 12, 13}, set(range(7, 19)), {50, 51}], ids=str)
def test_replies_end_with_any_of_few_tokens_and_of_many(ends):
    sequences = [request([1, 2, token], 60, seed=token, temperature=1.0) for token in range(8)]
    scheduler = Scheduler(PagedSession(pages=80))
    for sequence in sequences:
        sequence.end_token_ids = frozenset(ends)
        scheduler.submit(sequence)
    run(scheduler)
    for sequence in sequences:
        whole = reply(sequence.prompt_ids, sequence.params)
        end = next((at for at, token in enumerate(whole, start=1) if token in ends), len(whole))
        assert sequence.token_ids == whole[:end]


def test_a_text_that_fails_takes_nothing_along_and_leaves_nothing():
    class Text:
        stopped, tokens = False, 0

        def push(self, token):
            self.tokens += 1
            if self.tokens > 20:
                raise ValueError("no such token")

    session = PagedSession(pages=40)
    scheduler = Scheduler(session, draft_length=AnyLength())
    broken, sound = request([3] * 70, 60), request([4] * 70, 60)
    broken.text = Text()
    scheduler.submit(broken)
    scheduler.submit(sound)
    while scheduler.busy:
        scheduler.step()
        counted = scheduler.statistics.kv_tokens_in_use
        assert counted == sum(stay.rows for stay in scheduler._slots)
    assert str(broken.error) == "the reply's text failed: ValueError: no such token"
    assert sum(broken.accepted_per_step) == broken.accepted < 20
    assert sound.token_ids == reply(sound.prompt_ids, sound.params)
    assert scheduler.statistics.pages_used == 0


def test_pages_that_a_window_has_left_are_given_back_while_the_sequence_runs():
    session = PagedSession(slots=2, pages=60, max_seq_len=600, window=30, ahead=0, prompt_rows=40)
    scheduler = Scheduler(session)
    windows = scheduler._slots.pages.windows
    long = request([1] * 300, 250)
    scheduler.submit(long)
    held = []
    while scheduler.busy:
        scheduler.step()
        held.append(windows.held)
    assert long.token_ids == reply(long.prompt_ids, long.params)
    assert session.lost == []
    assert scheduler.statistics.preemptions == 0
    # 30 rows that are seen, 40 of a piece and 8 that steps write, in pages of 20 begun at both ends; all would be 28.
    assert max(held) <= 6
    assert max(held[30:-1]) <= 4
    assert len({page for step in session.steps for _, _, page in step.window_pages}) <= session.paging.window_pages


def test_a_prefix_is_shared_as_long_as_what_its_window_sees_is_there():
    session = PagedSession(slots=2, pages=200, max_seq_len=400, window=30, ahead=0)
    scheduler = Scheduler(session)
    prefix = [*range(1, 46)] * 4  # nine pages

    def ask(*tokens):
        asked = request([*prefix, *tokens] if tokens[0] != 7 else list(tokens), 100)
        scheduler.submit(asked)
        run(scheduler)
        assert asked.token_ids == reply(asked.prompt_ids, asked.params)
        return asked.reused

    assert ask(9) == 0
    assert ask(8) == len(prefix)
    for i in range(20):
        ask(7, *[i] * 200)
    assert ask(6) == 0  # others have taken those pages, though not the pages of all layers
    assert ask(5) == len(prefix)
    assert session.lost == []


def test_a_step_has_decoding_slots_and_pieces_of_several_prompts():
    session = PagedSession(prompt_rows=192)
    scheduler = Scheduler(session)
    scheduler.submit(request([1, 2, 3]))
    scheduler.step()
    for first in (10, 20, 30):
        scheduler.submit(request([first] * 70, 3))
    run(scheduler)
    mixed = session.steps[1]
    assert mixed.decode == [(0, 4)]
    assert [len(piece.token_ids) for piece in mixed.pieces] == [70, 70]
    assert [piece.last for piece in mixed.pieces] == [True, True]
    assert scheduler.statistics.steps == {"prefill": 1, "mixed": 2, "decode": len(session.steps) - 3}


def test_the_youngest_of_the_lowest_priority_waits_again_and_comes_back_first():
    session = PagedSession(slots=4, pages=11, max_seq_len=200)
    scheduler = Scheduler(session)
    urgent, old, young = request([1] * 30, 150, priority=1), request([2] * 30, 60), request([3] * 30, 60)
    for sequence in (old, young, urgent):
        scheduler.submit(sequence)
    later = request([4] * 5, 3)
    before = {}
    while not scheduler.statistics.preemptions:
        scheduler.step()
        before = {sequence: list(sequence.token_ids) for sequence in (urgent, old, young)}
    assert scheduler._slots.find(young) is None
    assert scheduler._slots.find(old)
    assert scheduler._slots.find(urgent)
    scheduler.submit(later)
    text = before[young]
    assert text
    run(scheduler)
    assert later.times.first_scheduled_ns > young.times.first_scheduled_ns
    assert young.token_ids[: len(text)] == text
    for sequence in (urgent, old, young, later):
        assert sequence.token_ids == reply(sequence.prompt_ids, sequence.params)


def test_updates_go_on_where_they_were_after_a_preemption():
    session = PagedSession(slots=2, pages=11)
    scheduler = Scheduler(session)
    sequences = [request([i + 1] * 20, 150, temperature=1.0, seed=7) for i in range(2)]
    streamed = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        for sequence in scheduler.step():
            streamed[sequence] += sequence.take_update().token_ids
    assert scheduler.statistics.preemptions
    for sequence in sequences:
        assert streamed[sequence] == reply(sequence.prompt_ids, sequence.params)


def test_what_was_computed_before_a_preemption_is_reused():
    session = PagedSession(slots=2, pages=14)
    scheduler = Scheduler(session)
    first, second = (request([i + 1] * 90, 60) for i in range(2))
    for sequence in (first, second):
        scheduler.submit(sequence)
    run(scheduler)
    assert scheduler.statistics.preemptions == 1
    again = [piece for step in session.steps for piece in step.pieces if piece.start > 90]
    assert again
    # A prompt that is read again gives a token, too, which no step decoded.
    assert sorted(len(each.token_ids) - each.completion().step_tokens for each in (first, second)) == [1, 2]


def test_nobody_overtakes_one_that_waits_for_pages():
    session = PagedSession(slots=4, pages=12)
    scheduler = Scheduler(session)
    running, large, small = request([1] * 60, 80), request([2] * 150, 5), request([3] * 5, 5)
    for sequence in (running, large, small):
        scheduler.submit(sequence)
    run(scheduler)
    ended = [sequence.times.first_scheduled_ns for sequence in (running, large, small)]
    assert ended == sorted(ended)
    assert scheduler.statistics.preemptions == 0


def test_a_shared_prefix_is_given_by_reference_and_acceptance_is_as_without():
    session = PagedSession(slots=8, pages=60)
    prefix = [*range(1, 49), *range(1, 49), 9]  # four pages and 17 rows
    lengths = []
    for requests in ([[*prefix, 7]], [[*prefix, 7], [*prefix, 8], [*prefix, 7]]):
        scheduler = Scheduler(session)
        first = request(requests[0], 30)
        scheduler.submit(first)
        while not first.token_ids:
            scheduler.step()
        others = [request(prompt, 30) for prompt in requests]
        for other in others:
            scheduler.submit(other)
        scheduler.step()
        assert scheduler.statistics.pages_shared == 4
        run(scheduler)
        for sequence in (first, *others):
            assert sequence.token_ids == reply(sequence.prompt_ids, sequence.params)
        assert all(other.reused == len(prefix) for other in others)
        lengths.append([others[0].accepted_per_step, first.accepted_per_step])
        assert first.accepted_per_step == others[0].accepted_per_step
    assert lengths[0] == lengths[1]


def test_a_reply_says_how_many_pages_it_had_and_how_many_it_shared():
    scheduler = Scheduler(PagedSession(page_rows=20))
    first, second = request(range(1, 46)), request([*range(1, 46), 7])
    for sequence in (first, second):
        scheduler.submit(sequence)
        run(scheduler)
    assert first.completion().pages >= 4  # for 45 and 20 rows
    assert first.completion().shared_pages == 0
    assert second.completion().shared_pages == 2  # and 5 rows of a third, copied
    assert second.completion().pages >= 4


def test_a_deadline_passes_for_one_that_waits_for_pages():
    clock = Clock()
    session = PagedSession(slots=4, pages=11)
    scheduler = Scheduler(session, clock=clock)
    running, waiting = request([1] * 100, 80), request([2] * 150, 5, deadline=1.0)
    scheduler.submit(running)
    scheduler.submit(waiting)
    scheduler.step()
    clock.now = 1.0
    scheduler.step()
    assert isinstance(waiting.error, DeadlineError)
    run(scheduler)
    assert running.token_ids == reply(running.prompt_ids, running.params)


def test_requests_that_have_ended_are_not_kept_behind_the_deadline_of_one_that_runs():
    scheduler, ended = Scheduler(PagedSession(max_seq_len=400), clock=Clock()), []
    running = request([1], 350, deadline=1.0)
    scheduler.submit(running)
    for number in range(60):
        sequence = request([2, number % 47], 1, deadline=2.0 + number)
        ended.append(weakref.ref(sequence.times))  # which nobody else has
        scheduler.submit(sequence)
        while not sequence.done:
            scheduler.step()
    del sequence
    gc.collect()
    assert not running.done
    assert sum(times() is not None for times in ended) < 8


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_fails_fails_its_requests_and_its_pages_come_back(ahead, monkeypatch):
    session = PagedSession(slots=3, pages=20, ahead=ahead)
    scheduler = Scheduler(session, budget=FixedPrefillBudget(64))
    failing = [request([1] * 10, 30), request([2] * 60, 5)]
    for sequence in failing:
        scheduler.submit(sequence)
    scheduler.step()
    waiting = request([3] * 150, 5)
    scheduler.submit(waiting)
    real, failed = session.run, []

    def fails(step):
        monkeypatch.setattr(session, "run", real)
        failed.extend(stay.sequence for stay in scheduler._slots if stay.slot in dict(step.decode))
        failed.extend(stay.sequence for stay in scheduler._slots if stay.slot in [p.slot for p in step.pieces])
        raise RuntimeError("on fire")

    monkeypatch.setattr(session, "run", fails)
    run(scheduler)
    assert failed
    for sequence in (*failing, waiting):
        if sequence in failed:
            assert "on fire" in str(sequence.error)
        else:
            assert sequence.token_ids == reply(sequence.prompt_ids, sequence.params)
    assert scheduler.statistics.pages_used == 0
    assert_it_goes_on(scheduler, request([1] * 10, 30))


def test_a_choice_of_pieces_that_fails_fails_the_requests_that_it_is_for(monkeypatch):
    session = PagedSession(slots=3, pages=20)
    scheduler = Scheduler(session)
    failing = [request([1] * 10, 30), request([2] * 60, 5)]
    scheduler.submit(failing[0])
    scheduler.step()
    scheduler.submit(failing[1])

    def fails(step, pieces):
        monkeypatch.undo()
        raise RuntimeError("on fire")

    monkeypatch.setattr(session, "prompt_room", fails)
    run(scheduler)
    assert all("on fire" in str(sequence.error) for sequence in failing)
    assert scheduler.statistics.pages_used == 0
    assert_it_goes_on(scheduler, request([2] * 60, 5))


def test_a_fault_at_admission_loses_nobody(monkeypatch):
    """Not even one that waits to share the pages of a prompt that is being read."""
    session = PagedSession(slots=8, pages=200, max_seq_len=400, prompt_rows=64)
    scheduler = Scheduler(session)
    first, alike, other = (request([*prompt, 8], 3) for prompt in ([7] * 200, [7] * 200, [5] * 30))
    scheduler.submit(first)
    scheduler.step()

    def fails(sequence, drafts):
        raise RuntimeError("on fire")

    monkeypatch.setattr(scheduler._slots, "admit", fails)
    scheduler.submit(alike)
    scheduler.submit(other)
    with pytest.raises(RuntimeError, match="on fire"):
        scheduler.step()
    assert set(scheduler.fail_all(EngineError("over"))) == {first, alike, other}


@pytest.mark.parametrize("draft", [True, False])
def test_prompts_that_come_together_and_begin_alike_are_read_once(draft):
    """The others wait until the first one's pages are read; one that begins otherwise does not."""
    session = PagedSession(slots=8, pages=200, max_seq_len=400, prompt_rows=64, pieces=8)
    scheduler = Scheduler(session, draft=draft)
    shared = [7] * 200
    alike = [request([*shared, 8 + i, 9], 3) for i in range(5)]
    other = request([5] * 30, 3)
    for sequence in [*alike, other]:
        scheduler.submit(sequence)
    ends = {}
    while scheduler.busy:
        for sequence in scheduler.step():
            if sequence.done:
                ends[id(sequence)] = len(session.steps)
    assert all(sequence.done and sequence.error is None for sequence in [*alike, other])
    page = session.paging.rows
    read = sum(len(piece.token_ids) for step in session.steps for piece in step.pieces)
    assert read <= 202 + 30 + 4 * (202 - 200 // page * page)
    assert ends[id(other)] < ends[id(alike[1])]


def test_one_that_shares_no_rows_waits_for_no_prompt_that_begins_like_its_own():
    """Rows that are shared have no log-probabilities."""
    session = PagedSession(slots=4, pages=200, max_seq_len=400, prompt_rows=64)
    scheduler = Scheduler(session)
    first, alike, reporting = (
        request([*[7] * 300, i], 3, **more) for i, more in enumerate(({}, {}, {"prompt_logprobs": 0}))
    )
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(alike)
    scheduler.submit(reporting)
    scheduler.step()
    assert scheduler.statistics.running == 2
    assert scheduler._slots.find(reporting) is not None


def test_prompts_are_not_compared_while_no_slot_is_free(monkeypatch):
    session = PagedSession(slots=2, pages=200, max_seq_len=400, prompt_rows=64)
    scheduler, compared = Scheduler(session), []
    real = scheduler._will_share
    monkeypatch.setattr(scheduler, "_will_share", lambda sequence: compared.append(sequence) or real(sequence))
    alike = [request([*[7] * 300, i], 3) for i in range(20)]
    scheduler.submit(request([5] * 3, 300))
    for sequence in alike:
        scheduler.submit(sequence)
    for _ in range(3):
        scheduler.step()
    assert scheduler.statistics.running == 2
    assert compared[1:] == [alike[0]]  # behind the one that decodes
