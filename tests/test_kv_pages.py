"""Pages of the K/V caches: what is shared is never written, nothing is lost, and nothing is given twice."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.pages import MIN_COPIED_ROWS, LinearPages, Node, Pages

ROWS = 20
#: Texts that prompts begin with; the first three begin alike.
TEXTS = [[text if i >= shared else -1 for i in range(200)] for text, shared in enumerate((18, 40, 70, 0))]


class Written:
    """A sequence as the model sees it: its tokens, and how many of its rows steps have written."""

    def __init__(self, lease, ids, drafts):
        self.lease, self.ids, self.drafts = lease, ids, drafts
        self.drafter_rows = lease.drafter_rows
        self.keeps_up = lease.drafter_rows == lease.rows


class PagesMachine(RuleBasedStateMachine):
    """Sequences that come, are read and written, and leave, on pages whose rows a model keeps."""

    PAGING = Paging(14, ROWS, 10)

    def __init__(self):
        super().__init__()
        self.pages = Pages(self.PAGING)
        self.caches = [[None] * ROWS for _ in range(14)]  # (token, whether the drafter's caches have it), by page
        self.running: list[Written] = []

    def has_room(self, places):
        """Whether so many places more may be seen."""
        return True

    # -- what a session does -----------------------------------------------------------------------------------------

    def launch(self, sequence):
        """A step of a sequence: its copy is made, and all its rows behind those that are known are written over."""
        lease = sequence.lease
        if lease.copy is not None:
            source, target, rows = lease.copy
            self.caches[target][:rows] = self.caches[source][:rows]
            self.pages.copied(lease)
        for place, node in enumerate(lease.nodes):
            for row in range(ROWS):
                if place * ROWS + row >= lease.rows:
                    owners = sum(node in other.lease.nodes for other in self.running)
                    assert owners == 1, "a page that is written has one owner"
                    assert len(node.tokens) <= row, "a row that the tree knows is written"
                    self.caches[node.page][row] = None

    def write(self, sequence, count, with_drafter):
        """Steps that write the next rows, and the tree that is told."""
        lease = sequence.lease
        self.launch(sequence)
        tokens = sequence.ids[lease.rows : lease.rows + count]
        sequence.keeps_up = sequence.keeps_up and with_drafter
        for position, token in enumerate(tokens, lease.rows):
            self.put(lease.nodes[position // ROWS].page, position % ROWS, token, with_drafter)
        if sequence.keeps_up:
            sequence.drafter_rows += len(tokens)
        for place, page in self.pages.record(lease, tokens, sequence.drafter_rows):
            assert lease.nodes[place].page == page

    def put(self, page, row, token, with_drafter):
        self.caches[page][row] = token, with_drafter

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        text=st.sampled_from(TEXTS),
        shared=st.integers(0, 130),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        drafts=st.booleans(),
        growth=st.integers(1, 30),
    )
    def admit(self, text, shared, own, drafts, growth):
        ids = text[:shared] + own
        rows = min(len(ids) + growth, 10 * ROWS)
        if not self.has_room(4):
            return
        before, available = self.pages.changes, self.pages.available
        lease = self.pages.admit(ids, drafts, rows)
        if lease is None:
            assert -(-rows // ROWS) > available or self.running
            assert (self.pages.available, self.pages.changes) == (available, before)
            return
        assert len(lease.nodes) == -(-rows // ROWS)
        assert lease.rows < len(ids)
        assert not drafts or lease.drafter_rows == lease.rows
        self.running.append(Written(lease, ids, drafts))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 60), with_drafter=st.sampled_from([True, True, True, False]))
    def read_prompt(self, data, count, with_drafter):
        sequence = data.draw(st.sampled_from(self.running))
        room = len(sequence.lease.nodes) * ROWS - sequence.lease.rows
        while len(sequence.ids) < sequence.lease.rows + count:  # it has come to its reply
            sequence.ids.append(data.draw(st.integers(0, 1)))
        if room:
            self.write(sequence, min(count, room), with_drafter)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        if self.pages.available and len(sequence.lease.nodes) < 10:
            place, page = len(sequence.lease.nodes), self.pages.grow(sequence.lease)
            assert sequence.lease.nodes[place].page == page

    @precondition(lambda self: self.running)
    @rule(data=st.data(), forget=st.sampled_from([False, False, False, True]))
    def leave(self, data, forget):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        (self.pages.forget if forget else self.pages.release)(sequence.lease)

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_in_one_place(self):
        leased = Counter(node.page for sequence in self.running for node in sequence.lease.nodes)
        held = leased + Counter(s.lease.source.page for s in self.running if s.lease.source is not None)
        kept = [node.page for node in tree(self.pages) if node.refs == 0]
        free = [node.page for node in self.pages._free]
        assert sorted([*held, *kept, *free]) == list(range(14))
        assert self.pages.used == len(held)
        assert self.pages.shared == sum(count > 1 for count in held.values())
        assert self.pages.kept == len(kept)

    @invariant()
    def a_free_page_is_like_a_new_one(self):
        for node in self.pages._free:
            assert not (node.tokens or node.drafter_rows or node.refs or node.children or node.full or node.begun)
            assert node.parent is node.key is None

    @invariant()
    def what_is_kept_can_be_taken(self):
        for node in tree(self.pages):
            assert node.refs or not any(child.refs for child in tree(self.pages) if child.parent is node)

    @invariant()
    def rows_that_are_known_are_in_the_caches(self):
        for node in tree(self.pages):
            rows = self.caches[node.page]
            assert [row and row[0] for row in rows[: len(node.tokens)]] == node.tokens
            assert all(row[1] for row in rows[: node.drafter_rows])
        for sequence in self.running:
            copy = sequence.lease.copy
            for position in range(sequence.lease.rows):
                page = sequence.lease.nodes[position // ROWS].page
                if copy is not None and page == copy[1]:
                    page = copy[0]
                token, drafted = self.caches[page][position % ROWS]
                assert token == sequence.ids[position]
                assert drafted or position >= sequence.drafter_rows

    def teardown(self):
        for sequence in self.running:
            self.pages.release(sequence.lease)
        self.running = []
        assert self.pages.used == self.pages.shared == 0
        for lease in [self.pages.admit([text], False, 7 * ROWS) for text in (7, 8)]:
            assert lease is not None
        assert not self.pages.available


def runs_of(machine: type[RuleBasedStateMachine], examples: int) -> Any:
    """A test of so many runs of a machine, of up to 40 steps."""
    values = {"settings": settings(max_examples=examples, stateful_step_count=40)}
    return pytest.mark.slow(type(machine.__name__, (machine.TestCase,), values))


TestPages = runs_of(PagesMachine, 50)
TestPagesManyTimes = pytest.mark.exhaustive(beside="tests/test_kv_pages.py::TestPages::runTest")(
    runs_of(PagesMachine, 150)
)


class WindowedPagesMachine(PagesMachine):
    """The same where layers with a window have fewer pages of their own."""

    PAGING = Paging(14, ROWS, 10, window=25, window_pages=11)

    def __init__(self):
        super().__init__()
        self.windows = self.pages.windows
        self.window_caches = [[None] * ROWS for _ in range(self.PAGING.window_pages)]

    def has_room(self, places):
        """There are as many in an engine as its slots may ever see; here that is left to whoever asks for more."""
        return self.windows.held + places <= self.PAGING.window_pages

    def launch(self, sequence):
        if sequence.lease.window_copy is not None:
            source, target, rows = sequence.lease.window_copy
            self.window_caches[target][:rows] = self.window_caches[source][:rows]
        super().launch(sequence)
        lease = sequence.lease
        for place in lease.seen:
            node = lease.nodes[place]
            if (place + 1) * ROWS > lease.rows:
                others = [other.lease for other in self.running if other is not sequence]
                assert not any(node is other.nodes[i] for other in others for i in other.seen)
                first = max(0, lease.rows - place * ROWS)
                self.window_caches[self.windows.of(node.page)][first:] = [None] * (ROWS - first)

    def write(self, sequence, count, with_drafter):
        lease, end = sequence.lease, sequence.lease.rows + count
        if not self.has_room(-(-end // ROWS) - lease.seen.stop):
            return
        before = lease.seen
        assert self.pages.look(lease, lease.rows, end) == range(before.stop, lease.seen.stop)
        assert lease.seen.start == max(before.start, min(before.stop, max(0, lease.rows - 24) // ROWS))
        assert lease.seen.stop * ROWS >= end
        super().write(sequence, count, with_drafter)

    def put(self, page, row, token, with_drafter):
        super().put(page, row, token, with_drafter)
        self.window_caches[self.windows.of(page)][row] = token

    @invariant()
    def every_window_page_is_in_one_place(self):
        seen = {s.lease.nodes[place].page for s in self.running for place in s.lease.seen}
        seen |= {s.lease.source.page for s in self.running if s.lease.window_copy is not None}
        behind, kept = self.windows._behind, set(self.windows._kept)
        assert sorted([*behind.values(), *self.windows._free]) == list(range(self.PAGING.window_pages))
        assert self.windows.held == len(seen)
        assert kept | seen == set(behind)
        assert not kept & seen

    @invariant()
    def rows_that_are_seen_are_in_the_window_pages(self):
        for node in tree(self.pages):
            if self.windows.has(node.page):
                rows = self.window_caches[self.windows.of(node.page)]
                assert rows[: len(node.tokens)] == node.tokens
        for sequence in self.running:
            lease = sequence.lease
            for position in range(max(0, lease.rows - 24), lease.rows):
                assert position // ROWS in lease.seen
                page = self.windows.of(lease.nodes[position // ROWS].page)
                if lease.window_copy is not None and page == lease.window_copy[1]:
                    page = lease.window_copy[0]
                assert self.window_caches[page][position % ROWS] == sequence.ids[position]

    def teardown(self):
        for sequence in self.running:
            self.pages.release(sequence.lease)
        self.running = []
        assert self.windows.held == 0


TestWindowedPages = runs_of(WindowedPagesMachine, 50)
TestWindowedPagesManyTimes = pytest.mark.exhaustive(beside="tests/test_kv_pages.py::TestWindowedPages::runTest")(
    runs_of(WindowedPagesMachine, 150)
)


def tree(pages):
    """All pages of the tree: those that are found, and those that hang on a lease alone."""
    found, ahead = {}, [pages._root]
    while ahead:
        node = ahead.pop()
        for child in [*node.full.values(), *(child for begun in node.begun.values() for child in begun)]:
            if id(child) not in found:
                found[id(child)] = child
                ahead.append(child)
    return list(found.values())


# -- what a prompt gets ------------------------------------------------------------------------------------------------


def written(pages, ids, drafts=True, drafter_rows=None):
    """A sequence whose prompt was read; its lease."""
    lease = pages.admit(ids, drafts, len(ids) + 1)
    pages.copied(lease)
    pages.record(lease, ids[lease.rows :], len(ids) if drafter_rows is None else drafter_rows)
    return lease


@pytest.mark.parametrize("running", [True, False])
def test_full_pages_are_shared_with_running_and_finished_sequences_and_the_rest_is_copied(running):
    pages = Pages(Paging(20, 64, 10))
    first = written(pages, [*range(64), *range(100, 164), *range(200, 230)])
    nodes = list(first.nodes)
    if not running:
        pages.release(first)
        assert (pages.used, pages.kept) == (0, 3)
    second = pages.admit([*range(64), *range(100, 164), *range(200, 220), 7, 8], True, 160)
    assert second.nodes[:2] == nodes[:2]
    assert second.rows == second.drafter_rows == 148
    assert second.copy == (nodes[2].page, second.nodes[2].page, 20)
    assert (pages.used, pages.shared) == (4, 3 if running else 0)  # the page to be copied is held as well
    pages.copied(second)
    assert (pages.used, pages.shared) == (4, 2) if running else (3, 0)


def test_the_last_token_is_always_computed():
    pages = Pages(Paging(8, 64, 8))
    ids = list(range(128))
    pages.release(written(pages, ids))
    again = pages.admit(ids, True, 130)
    assert len(again.nodes) == 3
    assert again.rows == 127
    assert again.copy[2] == 63


def test_a_few_rows_are_not_copied():
    pages = Pages(Paging(8, 64, 8))
    pages.release(written(pages, list(range(40))))
    for rows, copied in ((MIN_COPIED_ROWS - 1, 0), (MIN_COPIED_ROWS, MIN_COPIED_ROWS)):
        lease = pages.admit([*range(rows), 99, 98], True, 60)
        assert lease.rows == copied
        pages.release(lease)


def test_rows_that_the_drafter_never_wrote_are_not_given_to_who_drafts():
    pages = Pages(Paging(20, 64, 10))
    ids = list(range(180))
    pages.release(written(pages, ids, drafts=False, drafter_rows=90))
    drafted = pages.admit([*ids, 5], True, 200)
    assert drafted.rows == drafted.drafter_rows == 90
    plain = pages.admit([*ids, 5], False, 200)
    assert plain.rows == 180
    assert plain.drafter_rows == 90


def test_two_that_read_the_same_prompt_at_once_share_it_from_then_on():
    pages = Pages(Paging(20, 64, 10))
    ids = list(range(130))
    first, second = (pages.admit(ids, True, 140) for _ in range(2))
    assert pages.used == 6
    assert pages.record(first, ids, 130) == []
    assert pages.record(second, ids, 130) == [(0, first.nodes[0].page), (1, first.nodes[1].page)]
    assert (pages.used, pages.shared, pages.available) == (4, 2, 16)


def test_a_page_is_not_exchanged_for_one_with_fewer_of_the_drafter_s_rows():
    pages = Pages(Paging(20, 64, 10))
    ids = list(range(64))
    plain, drafted = (pages.admit(ids, False, 70) for _ in range(2))
    assert pages.record(plain, ids, 0) == []
    assert pages.record(drafted, ids, 60) == []
    assert pages.used == 4
    third = pages.admit([*ids[:62], 99, 98], True, 70)
    assert third.rows == third.drafter_rows == 60
    assert third.copy == (drafted.nodes[0].page, third.nodes[0].page, 60)


def test_the_least_recently_used_ending_is_given_up_first():
    pages = Pages(Paging(6, 64, 6))
    shared = list(range(64))
    for end in (1, 2):
        pages.release(written(pages, shared + [end] * 60))
    pages.release(written(pages, shared + [1] * 60 + [3]))  # uses the first ending again
    assert pages.kept == 4
    lease = pages.admit([9] * 10, True, 4 * 64)
    assert lease is not None
    assert pages.admit(shared + [2] * 60, True, 128).rows == 64
    assert pages.available == 0


def test_a_sequence_that_needs_every_page_gets_them_all():
    """Also the one that it would copy rows from."""
    pages = Pages(Paging(3, 64, 3))
    pages.release(written(pages, list(range(50))))
    lease = pages.admit([*range(40), *[7] * 60], True, 3 * 64)
    assert len(lease.nodes) == 3
    assert lease.rows == 0
    assert lease.copy is None


class Counted(list):
    """A prompt's tokens, and how many pieces of them were compared."""

    pieces = 0

    def __getitem__(self, place):
        self.pieces += isinstance(place, slice)
        return super().__getitem__(place)


@pytest.mark.parametrize("kept", [100, 1_000])
def test_of_many_pages_that_begin_alike_the_newest_are_compared_and_one_is_forgotten_at_once(kept, monkeypatch):
    pages, head = Pages(Paging(kept + 2, 64, 2)), list(range(20))
    for i in range(kept):
        pages.release(written(pages, [*head, *[1_000 + i] * 30]))
    prompt = Counted([*head, *[1_000 + kept - 1] * 25, 7])
    lease = pages.admit(prompt, True, 60)
    assert lease.rows == 45
    assert prompt.pieces < 80  # of 64 pages at most, and a few of the best one
    pages.copied(lease)
    pages.record(lease, prompt[45:], len(prompt))
    passed = []
    monkeypatch.setattr(Node, "__eq__", lambda node, other: passed.append(other) or node is other)
    pages.forget(lease)
    assert not passed


def test_copies_wait_for_no_one_and_lose_nothing():
    pages = Pages(Paging(3, 64, 3))
    first = written(pages, list(range(50)))
    second = pages.admit([*range(40), 7], True, 64)
    pages.release(first)
    assert pages.available == 1
    assert pages.admit([5], True, 100) is None
    pages.copied(second)
    assert pages.admit([5], True, 100) is not None


# -- one page a slot ---------------------------------------------------------------------------------------------------


def linear(slots=3):
    return LinearPages(Paging(slots, 500, 1))


def read(pages, slot, ids, drafts=True):
    lease = pages.admit_to(slot, ids, drafts)
    pages.copied(lease)
    pages.record(lease, ids[lease.rows :], len(ids) if drafts else lease.drafter_rows)
    return lease


def test_a_slot_goes_on_from_its_own_rows_and_else_copies_another_s():
    pages = linear()
    text = list(range(100))
    pages.release(read(pages, 0, text))
    own = pages.admit_to(0, [*text, 5], True)
    assert (own.rows, own.copy) == (100, None)
    copied = pages.admit_to(1, [*text, 6], True)
    assert (copied.rows, copied.copy) == (100, (0, 1, 100))
    pages.copied(copied)
    pages.release(own)
    pages.release(copied)
    few = pages.admit_to(0, [0, 1, 2, 99], True)
    assert (few.rows, few.copy) == (3, None)


def test_of_many_slots_that_begin_alike_the_oldest_is_found_too():
    pages, head = linear(200), list(range(20))
    for slot in range(200):
        pages.release(read(pages, slot, [*head, *[1_000 + slot] * 30]))
    lease = pages.admit_to(199, [*head, *[1_000] * 30, 7], True)
    assert (lease.rows, lease.copy) == (50, (0, 199, 50))


def test_a_slot_is_not_given_while_rows_are_to_be_copied_from_it():
    pages = linear()
    first = read(pages, 0, list(range(100)))
    second = pages.admit_to(1, [*range(100), 5], True)
    pages.release(first)
    assert not pages.is_free(0)
    pages.copied(second)
    assert pages.is_free(0)


def test_rows_that_were_never_copied_are_not_believed():
    """The one that was to have them is cancelled before its first step."""
    pages = linear()
    read(pages, 0, list(range(100)))
    waiting = pages.admit_to(2, [*range(100), 5], True)
    assert waiting.copy == (0, 2, 100)
    pages.release(waiting)
    later = pages.admit_to(2, [*range(100), 6], True)
    assert later.copy == (0, 2, 100)


def test_a_whole_page_is_not_copied_and_none_is_lost():
    """Two read the same text; the second's page stays apart, for it has more of the drafter's rows."""
    pages, text = Pages(Paging(24, 64, 8)), list(range(1000, 1064))
    first, second = (pages.admit(text[:1], False, 128) for _ in range(2))
    assert first is not None and second is not None
    pages.record(first, text, 30)
    pages.record(second, text, 40)
    assert second.nodes[0] is not first.nodes[0]
    pages.release(first)
    others = [lease for i in range(1, pages.available + 1) if (lease := pages.admit([i], False, 64)) is not None]
    for lease in others:  # the first one's page is theirs now
        pages.release(lease)
    for i in range(3):
        follower = pages.admit([*text, *[5 + i] * 20], False, 192)
        assert follower is not None
        assert follower.copy is None or follower.copy[2] < 64
        pages.copied(follower)
        pages.record(follower, [*text, *[5 + i] * 20][follower.rows :], 0)
        pages.release(follower)
    pages.release(second)
    assert pages.used == 0
    taken = [pages.admit([100 + i], False, 64) for i in range(24)]
    assert all(lease is not None for lease in taken)


def test_forgotten_rows_are_not_found():
    pages = linear()
    pages.forget(read(pages, 0, list(range(100))))
    lease = pages.admit_to(1, list(range(100)), False)
    assert lease.rows == 0


@pytest.mark.parametrize("seed", range(20))
def test_linear_pages_do_what_slots_did(seed):
    """As many rows as any slot has of a prompt; in place where it is the slot's own, or none has enough for a copy."""
    chance = random.Random(seed)
    pages, rows = linear(4), {slot: ([], 0) for slot in range(4)}
    for _ in range(60):
        slot = chance.randrange(4)
        ids = chance.choice(TEXTS)[: chance.randrange(100)] + [chance.randrange(2) for _ in range(1 + slot)]
        drafts = chance.random() < 0.7

        def shared(slot, ids=ids, drafts=drafts):
            known, drafter_rows = rows[slot]
            most = min(len(ids) - 1, drafter_rows if drafts else len(known))
            return next((i for i in range(most) if known[i] != ids[i]), most)

        longest, own = max(map(shared, rows)), shared(slot)
        lease = pages.admit_to(slot, ids, drafts)
        copied = longest > own and longest >= MIN_COPIED_ROWS
        assert lease.rows == (longest if copied else own)
        assert (lease.copy is not None) == copied
        if copied:
            assert shared(lease.copy[0]) == longest
        drafter_rows = lease.drafter_rows
        pages.copied(lease)
        if drafts:
            drafter_rows = len(ids)
        pages.record(lease, ids[lease.rows :], drafter_rows)
        pages.release(lease)
        rows[slot] = ids, drafter_rows
