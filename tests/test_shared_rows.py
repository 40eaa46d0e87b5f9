"""Rows by survival: the slots of a step share its rows, which go to the likeliest drafts, and no text changes."""

from collections import Counter
from unittest.mock import MagicMock

import torch
from pytest import approx

from tests.test_draft_trees import changed, tokens
from trtllm_dflash import SamplingParams
from trtllm_dflash.engine.ladder import LEAST_SHARING, shared_lengths
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.draft_length import FixedDraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.shared_rows import TRIAL, TRIAL_STEPS, SharedRows
from trtllm_dflash.session.calls import Step, call_of, words_of
from trtllm_dflash.session.shares import Shares
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs

ALL = torch.arange(3)


def shares_of(*probabilities):
    """Shares of slots with these probabilities of their drafts."""
    shares = Shares(len(probabilities), len(probabilities[0]), torch.device("cpu"))
    shares.note(torch.arange(len(probabilities)), torch.tensor(probabilities).log())
    return shares


def divided(shares, total, *most):
    return shares.divide(torch.arange(len(most)), torch.tensor(most), total).tolist()


# -- whose the rows are ------------------------------------------------------------------------------------------------


def test_rows_go_to_the_largest_chances_and_every_slot_keeps_one():
    shares = shares_of([0.9, 0.9, 0.9, 0.9], [0.5, 0.9, 0.1, 0.1], [0.05, 1.0, 1.0, 1.0])
    # Products: 0.9, 0.81, 0.73, 0.66; 0.5, 0.45, 0.045, 0.0045; 0.05 four times.
    assert divided(shares, 3, 5, 5, 5) == [1, 1, 1]
    assert divided(shares, 7, 5, 5, 5) == [5, 1, 1]
    assert divided(shares, 9, 5, 5, 5) == [5, 3, 1]
    assert divided(shares, 7, 2, 5, 5) == [2, 3, 2], "no slot gets more than it has"
    assert divided(shares, 99, 5, 5, 1) == [5, 5, 1], "nor is there more than all"
    assert divided(shares_of([0.5, 0.5], [0.5, 0.5]), 3, 3, 3) == [2, 1], "the earlier slot first, among equals"


def test_a_slot_whose_drafts_are_poor_gets_none_and_comes_back():
    shares = shares_of([0.9] * 7, [0.02] * 7)
    assert divided(shares, 8, 8, 8) == [7, 1]
    shares.note(torch.tensor([1]), torch.tensor([[0.95] * 7]).log())
    assert divided(shares, 8, 8, 8) == [3, 5]


def test_chances_are_corrected_by_what_survives_of_a_position():
    shares = shares_of([0.9, 0.9], [0.8, 0.9], [0.1, 0.1])
    assert shares.gains(ALL, torch.tensor([3, 3, 3])).tolist() == approx([(0.9 + 0.81 + 0.8) / 3, (0.72 + 0.11) / 3])
    for _ in range(200):  # the second draft never survives, the first does as was said
        shares.learn(ALL[:2], torch.tensor([3, 3]), torch.tensor([1, 1]))
    assert shares.gains(ALL[:2], torch.tensor([3, 3]))[0] > 0.9, "of either slot the first"
    assert divided(shares, 6, 3, 3, 3) == [2, 2, 2]
    for _ in range(200):  # and then always does
        shares.learn(ALL[:2], torch.tensor([3, 3]), torch.tensor([2, 2]))
    assert divided(shares, 7, 3, 3, 3) == [3, 3, 1]


def test_what_was_not_verified_teaches_nothing():
    shares = shares_of([0.9, 0.9], [0.8, 0.9], [0.1, 0.1])
    before = shares.gains(ALL, torch.tensor([3, 3, 3]))
    shares.learn(ALL, torch.tensor([1, 1, 1]), torch.tensor([0, 0, 0]))
    assert torch.equal(shares.gains(ALL, torch.tensor([3, 3, 3])), before)


def test_guesses_are_divided_evenly_and_teach_nothing():
    shares = shares_of([0.9, 0.9, 0.9], [0.1, 0.1, 0.1])
    shares.forget()
    assert divided(shares, 6, 4, 4) == [3, 3]
    before = shares.gains(ALL[:2], torch.tensor([4, 4]))
    shares.learn(ALL[:2], torch.tensor([4, 4]), torch.tensor([0, 0]))
    assert torch.equal(shares.gains(ALL[:2], torch.tensor([4, 4])), before)


# -- how many there are ------------------------------------------------------------------------------------------------

#: A step takes 1 ms, and as much more for each 4 drafts a slot; 0.1 ms more where rows are shared.
TIMES = {(slots, drafts): 1 + drafts / 4 for slots in (1, 16) for drafts in (0, 1, 3, 7)}
SHARED = {(16, drafts): 1.1 + drafts / 4 for drafts in (1, 3)}
SLOTS = 16


def spread(mean):
    """Numbers of drafts that slots have accepted, so many on average, and the slots of each."""
    low = int(mean)
    above = round((mean - low) * SLOTS)
    return [(n, count) for n, count in ((low, SLOTS - above), (low + 1, above)) if count]


def served(rule, own, shared, gains, steps=600):
    """Steps of a rule by way and drafts, where a slot commits so many drafts with its own and with shared rows."""
    chosen = Counter()
    for _ in range(steps):
        drafts = rule.choose(SLOTS)
        chosen[rule.shares, drafts] += 1
        if rule.shares:
            rule.foresee(gains)
            accepted = [n for n, count in spread(shared[drafts]) for _ in range(count)]
            rule.observe_shared([drafts] * SLOTS, accepted)
        elif drafts:
            rule.observe([drafts] * SLOTS, [own[drafts]] * SLOTS)
    return chosen


def test_rows_are_shared_where_that_commits_more_tokens_a_second():
    better = served(
        SharedRows(TIMES, SHARED), {1: 0, 3: 1, 7: 1}, {1: 0.9, 3: 2.5}, [0.9, 0.9, 0.7, 0.1, 0.1, 0.1, 0.1]
    )
    assert better[True, 3] > 480
    alike = served(SharedRows(TIMES, SHARED), {1: 1, 3: 3, 7: 7}, {1: 1.0, 3: 3.0}, [1.0] * 7)
    assert alike[False, 7] > 480 and 20 <= alike[True, 3] <= 60, "tried from time to time"


def test_what_is_no_better_is_tried_more_and_more_seldom_until_the_load_is_another():
    times, shared_times = (
        kinds | {(32, drafts): 2 * seconds for (slots, drafts), seconds in kinds.items() if slots == 16}
        for kinds in (TIMES, SHARED)
    )
    rule = SharedRows(times, shared_times)
    own, shared, gains = {1: 1, 3: 3, 7: 7}, {1: 1.0, 3: 3.0}, [1.0] * 7
    begin = served(rule, own, shared, gains, steps=64)
    assert begin[True, 3] == TRIAL, "the first soon"
    long = served(rule, own, shared, gains, steps=12_000)
    assert long[True, 3] == 5 * TRIAL, "after 512, 1,024, 2,048 and twice 4,096 steps"
    rule.choose(32)
    soon = served(rule, own, shared, gains, steps=600)
    assert soon[True, 3] >= TRIAL
    # Found better once, it is questioned as soon as at first.
    served(rule, {1: 0, 3: 1, 7: 1}, {1: 0.9, 3: 2.5}, [0.9, 0.9, 0.7, 0.1, 0.1, 0.1, 0.1], steps=1200)
    assert rule.shares and rule._period <= 4 * TRIAL_STEPS


def test_shared_rows_are_as_many_as_their_drafts_are_worth():
    rule = SharedRows(TIMES, SHARED)
    poor = served(rule, {1: 0, 3: 0, 7: 0}, {1: 0.2, 3: 0.3}, [0.2, 0.05, 0.05, 0, 0, 0, 0])
    assert poor[False, 0] > 500 and poor[True, 1] < 60, "plainly, mostly"
    rule = SharedRows(TIMES, SHARED)
    rule.foresee([0.9, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0])
    rule.observe_shared([3] * SLOTS, [0] * 12 + [1] * 4)  # a tenth of what was foreseen
    assert rule._shared_length(SLOTS, 3) == 1


def test_few_slots_have_their_own_rows():
    rule = SharedRows(TIMES, SHARED)
    for _ in range(300):
        rule.choose(LEAST_SHARING - 1)
        assert not rule.shares


def test_where_rows_may_not_be_shared_own_ones_are_chosen():
    rule = SharedRows(TIMES, SHARED)
    served(rule, {1: 0, 3: 1, 7: 1}, {1: 0.9, 3: 2.5}, [0.9, 0.9, 0.7, 0.1, 0.1, 0.1, 0.1])
    assert rule.shares
    assert rule.choose_own(SLOTS) in (0, 1, 3, 7) and not rule.shares


def test_what_blocks_are_likely_to_commit_comes_from_the_drafter_s_operations():
    """Of exact rows those are others than the target's."""
    ops = MagicMock()
    drafts_by = ops.for_drafts.return_value
    drafts_by.keep_drafts.return_value = "tokens", "gains"
    drafter = MagicMock()
    drafter.draft_divided.return_value = "ids", "log-probabilities"
    inputs = StepInputs("ids", "start", "count", "rows", "offsets")
    out = DraftVerifyStep(MagicMock(), drafter).finish(ops, inputs, MagicMock(), Drafting.BLOCK, divided=24)
    assert (out.next_tokens, out.next_gains) == ("tokens", "gains")
    assert drafter.draft_divided.call_args.args[0] is drafts_by and drafter.draft_divided.call_args.args[-1] == 24
    ops.keep_drafts.assert_not_called()


def test_short_blocks_are_not_shared():
    assert [shared_lengths(block) for block in (3, 4, 5, 8)] == [[], [], [1, 2, 3], [1, 2, 3, 5]]


def test_rows_left_by_shared_ones_are_cut_and_teach_nothing_where_each_has_its_own_again(tiny):
    """In the steps between: their drafts beyond a slot's block were never made."""

    class Turns(FixedDraftLength):
        may_share, lengths = True, (0, 3, 7, 15)
        step, seen = 0, []

        @property
        def shares(self):
            return self.step % 4 < 2

        def choose(self, slots):
            self.step += 1
            return 7 if self.shares else (3, 0, 15)[self.step // 4 % 3]

        def observe(self, drafted, accepted):
            self.seen.append(max(drafted))

    llm, rule = changed(tiny, max_batch=4), Turns(7)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [llm.encode([{"role": "user", "content": text}]) for kind in read_prompts(1).values() for text in kind]
    assert tokens(run(llm, prompts, params, rule)) == tokens(llm.generate(prompts, params, draft=False))
    assert rule.seen and all(drafts in (3, 7, 15) for drafts in rule.seen)


# -- texts -------------------------------------------------------------------------------------------------------------


class Seven(FixedDraftLength):
    """Seven drafts a slot, shared."""

    may_share = True


def run(llm, prompts, params, rule):
    sequences = [llm.intake.sequence(prompt, params, True) for prompt in prompts]
    scheduler = Scheduler(llm.session, draft_length=rule)
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    return [sequence.completion() for sequence in sequences]


def test_shared_rows_commit_more_and_every_text_stays(tiny):
    llm = changed(tiny, max_batch=8)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    texts = [text for kind in read_prompts(2).values() for text in kind]
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in texts]
    shared, each = run(llm, prompts, params, Seven(7)), run(llm, prompts, params, FixedDraftLength(7))
    assert tokens(shared) == tokens(each) == tokens(llm.generate(prompts, params, draft=False))
    steps, fixed = (sum(reply.steps for reply in replies) for replies in (shared, each))
    assert steps < fixed / 1.05
    rows, most = (sum(reply.drafted_tokens for reply in replies) for replies in (shared, each))
    assert rows / steps <= 1.01 * most / fixed, "with as many rows a step"


def test_calls_that_share_rows_go_to_other_ranks():
    call = Step([(0, 16), (3, 1)], [], Drafting.BLOCK, 16, True, chances=True, share=9)
    assert call_of(list(words_of(call))) == call
