"""How much of the prompts is read beside decoding, and whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paged_session import PagedSession, request
from trtllm_dflash.runtime.prefill_budget import MIN_PIECE, AutoPrefillBudget, FixedPrefillBudget, divide
from trtllm_dflash.runtime.scheduler import Scheduler

#: A step of few rows takes as long as one of none; from 256 rows on each costs the same.
TIMES = {
    (slots, drafts, tokens): max(256, slots * (drafts + 1) + tokens) / 256
    for slots in (1, 8, 64)
    for drafts in (0, 15)
    for tokens in (0, 64, 128, 256, 512, 1024)
}


@given(st.integers(1, 5000), st.lists(st.integers(1, 6000), min_size=1, max_size=8))
def test_a_budget_is_divided_in_order(budget, rests):
    pieces = divide(budget, rests)
    assert sum(pieces) <= budget
    assert pieces
    for piece, rest in zip(pieces, rests, strict=True):
        assert 0 <= piece <= rest
    for piece, rest in zip(pieces[1:], rests[1:], strict=True):
        assert piece == 0 or piece >= min(rest, MIN_PIECE)
    # Nothing is left over that the first could use, and it gets as much as the others together.
    if sum(pieces) < budget:
        assert pieces[0] == rests[0]
    assert pieces[0] >= min(rests[0], budget // 2)


@pytest.mark.parametrize(
    ("budget", "rests", "pieces"),
    [
        (512, [4096], [512]),
        (512, [4096, 100], [412, 100]),
        (512, [4096, 4096, 4096], [256, 256, 0]),
        (512, [4096, 4096, 30], [256, 226, 30]),
        (512, [256, 256, 256], [256, 256, 0]),
        (512, [100, 256, 256], [100, 256, 156]),
        (192, [70, 70, 70], [70, 70, 0]),
        (80, [700, 30], [50, 30]),
        (16, [70, 5], [11, 5]),
        (1, [70, 5], [1, 0]),
    ],
)
def test_a_long_prompt_goes_on_and_the_short_ones_behind_it_are_read(budget, rests, pieces):
    assert divide(budget, rests) == pieces


def test_a_budget_is_all_that_a_step_takes_where_nobody_runs():
    for budget in (FixedPrefillBudget(100), AutoPrefillBudget(TIMES, 0.1)):
        assert budget.choose(0, 0, 3, 8192) == 8192


@pytest.mark.parametrize(
    ("running", "drafts", "tokens"),
    [
        (1, 0, 280),  # 256 rows are free, and then a tenth of them
        (8, 15, 153),
        (64, 15, 102),
        (33, 7, 102),  # as the next larger one that was measured
        (200, 15, 102),
    ],
)
def test_a_step_is_longer_by_the_slack_at_most(running, drafts, tokens):
    found = AutoPrefillBudget(TIMES, 0.1).choose(running, drafts, 1, 8192)
    assert found == pytest.approx(tokens, abs=1)


def test_steps_that_were_measured_without_prompts_alone_say_nothing():
    assert AutoPrefillBudget({**TIMES, (16, 7, 0): 1.0}, 0.1).choose(16, 7, 1, 8192) == 102


def test_the_least_budget_is_one_piece():
    assert AutoPrefillBudget(TIMES, 0.001).choose(64, 15, 1, 8192) == MIN_PIECE


def test_many_that_wait_are_worth_more_than_few_that_run():
    budget = AutoPrefillBudget(TIMES, 0.1)
    assert budget.choose(8, 15, 8, 1024) < 1024
    assert budget.choose(8, 15, 9, 1024) == 1024


def test_running_replies_go_on_in_every_step_while_a_long_prompt_comes_in():
    session = PagedSession(pages=60, max_seq_len=800, prompt_rows=256)
    scheduler = Scheduler(session, budget=FixedPrefillBudget(80))
    stream = request([1], 300, draft=False)
    scheduler.submit(stream)
    while not stream.token_ids:
        scheduler.step()
    long, short = request([2] * 700, 1), request([3] * 30, 1)
    scheduler.submit(long)
    scheduler.step()
    scheduler.submit(short)
    before = len(session.steps)
    while not short.done:
        scheduler.step()
    assert len(session.steps) - before <= 4
    while not long.done:
        scheduler.step()
    mixed = [step for step in session.steps if step.pieces][1:]
    assert all(step.decode for step in mixed)
    assert all(sum(len(piece.token_ids) for piece in step.pieces) <= 80 for step in mixed)
    assert len(mixed) == -(-730 // 80)


def test_a_long_prompt_is_read_however_many_short_ones_come():
    session = PagedSession(slots=8, pages=200, max_seq_len=1000, prompt_rows=128, pieces=8)
    scheduler = Scheduler(session)
    long = request([2] * 900, 1)
    scheduler.submit(long)
    steps = 0
    while not long.done:
        for i in range(2):
            scheduler.submit(request([3 + i] * 100, 1))
        scheduler.step()
        steps += 1
        assert steps < 40
