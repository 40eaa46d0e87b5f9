"""Rows by survival on a GPU: each kernel against the host, then whole replies of captured steps that share rows."""

import random
import time

import pytest
import torch

from tests.gpu.test_cuda import NEAR_TIE, SAMPLED, acceptance, shipped_prompts, tokens
from tests.gpu.test_draft_trees import load_trees
from tests.gpu.test_kernels import why_not
from tests.gpu.test_ragged_attention import ints
from tests.gpu.test_rows import Decode, Layout, prompt
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash import LLM, SamplingParams, kernels
from trtllm_dflash.engine.ladder import draft_lengths, shared_lengths
from trtllm_dflash.runtime import shared_rows
from trtllm_dflash.runtime.draft_length import FixedDraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.shares import BELIEF, GUESS, MEMORY, Shares

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

Tensor = torch.Tensor


@pytest.fixture
def begun(poisoned):
    """Poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def kept_of(shares: Shares, outlook: Tensor) -> kernels.Foretold:
    """The same on the device."""
    expected, survived = shares._expected.cuda(), shares._survived.cuda()
    return kernels.Foretold(shares._foretold.cuda(), outlook.cuda(), expected, survived, MEMORY)


def random_shares(slots: int, drafts: int) -> Shares:
    """Shares of slots whose drafts are good or poor, some of them guesses, after what was learnt of some steps."""
    shares = Shares(slots, drafts, torch.device("cpu"))
    every = torch.arange(slots)
    shares.note(every, (torch.rand(slots, 1) * torch.rand(slots, drafts)).clamp(min=1e-3).log() * 0.3)
    shares._expected += torch.rand(drafts) * 50
    shares._survived += torch.rand(drafts) * 50
    shares._foretold[::5] *= -1
    shares._foretold[1::7, drafts // 2 :] = 0  # shorter blocks
    return shares


@pytest.mark.parametrize(("slots", "drafts"), [(1, 15), (3, 7), (32, 15), (64, 15), (128, 15), (200, 9)])
@pytest.mark.parametrize("average", [1, 2, 8])
def test_rows_are_divided_as_on_the_host(slots, drafts, average, begun):
    shares, chance = random_shares(slots, drafts), random.Random(slots)
    taking_part = chance.sample(range(slots), max(1, slots * 3 // 4))
    most = [chance.choice([1, 2, drafts + 1, drafts + 1]) for _ in taking_part]
    total = min(average, drafts) * len(taking_part)
    pieces = [7, 40, 11, 1]  # slot, count, start and logits of a piece
    words = [word for slot, rows in zip(taking_part, most, strict=True) for word in (slot, rows, -1, total)]
    words += [*pieces, *[0] * 8, *range(40)]
    places = len(taking_part) + 2
    divided = kernels.divide_rows(ints(words), kept_of(shares, torch.zeros(slots)), places, 10**6).tolist()
    expected = shares.divide(torch.tensor(taking_part), torch.tensor(most), total).tolist()
    for index, (slot, rows) in enumerate(zip(taking_part, expected, strict=True)):
        assert divided[4 * index : 4 * index + 4] == [slot, rows, -1, rows], index
    assert divided[4 * len(taking_part) :] == words[4 * len(taking_part) :]
    fewer = kernels.divide_rows(ints(words), kept_of(shares, torch.zeros(slots)), places, 0).tolist()
    assert fewer[1 : 4 * len(taking_part) : 4] == [1] * len(taking_part), "no more than there is room for"


STEPS = [
    Layout([Decode(0, 3)], [], block=16, spare=5, idle=2),
    Layout([Decode(slot, 1 + slot % 9) for slot in range(40)], [prompt(40, 0, 100), prompt(41, 50, 70)], 16, 5, 2),
    Layout([], [prompt(0, 0, 33)], block=16, spare=5, idle=0),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("average", [2, 5, 16])
def test_blocks_are_divided_by_their_slots_outlook(step, average, begun):
    layout, segments = begin(step), step.expected()["segments"]
    outlook = -torch.rand(step.slots) * 0.8
    rows, drafts = average * len(segments), 15
    next_start, bonus = ints(range(100, 100 + len(segments))), ints(range(7, 7 + len(segments)))
    kept = kept_of(random_shares(step.slots, drafts), outlook)
    blocks = kernels.divide_blocks(layout, kept, next_start, bonus, rows, 5)
    active = [index for index, (*_, count) in enumerate(segments) if count]
    is_decoding = {index for index in active if index < len(step.decodes)}
    means = {i: outlook[segments[i][0]].item() if i in is_decoding else -0.16 for i in active}
    chances = sorted(((means[i] * (1 + draft), draft, i) for i in active for draft in range(1, drafts)), reverse=True)
    left = rows - 2 * len(active)
    counts = {i: 2 for i in active}
    for _, _, i in chances[:left]:
        counts[i] += 1
    found = blocks.rows.segments.tolist()
    first = 0
    for index, segment in enumerate(segments):
        count = counts.get(index, 0)
        got = found[index]
        assert abs(got[3] - count) <= 1, (index, got, count)  # of two chances that round alike either may be taken
        assert got[2] == first or not count
        first += got[3]
        if count:
            assert got[:2] == [segment[0], 100 + index]
            assert blocks.rows.token_ids[got[2]].item() == 7 + index
            assert blocks.rows.token_ids[got[2] + 1 : got[2] + got[3]].tolist() == [5] * (got[3] - 1)
    assert first == min(rows, (drafts + 1) * len(active))
    every = sorted(torch.tensor(mean).mul(1 + d).exp().item() for mean in means.values() for d in range(drafts))[::-1]
    # The first drafts come first, whatever they are worth.
    first_ones = [torch.tensor(mean).exp().item() for mean in means.values()]
    gains = blocks.gains.tolist()
    assert gains[0] == pytest.approx(sum(first_ones) / len(active), rel=1e-4)
    assert sum(gains) == pytest.approx(sum(every) / len(active), rel=1e-4)


def begin(step: Layout) -> kernels.Rows:
    expected = step.expected()
    return kernels.begin_rows(
        ints(step.words()),
        ints(step.tokens),
        ints(step.kept_start),
        segments=len(expected["segments"]),
        decode_segments=len(step.decodes) + step.idle,
        pieces=len(step.pieces) + step.idle,
        rows=len(expected["row_segment"]),
        logit_rows=len(expected["logit_rows"]),
        cuts=len(expected["cuts"]),
    )


@pytest.mark.parametrize("step", STEPS[:2], ids=str)
def test_drafts_are_kept_and_learnt_from_as_on_the_host(step, begun):
    drafts, layout, segments = 15, begin(step), step.expected()["segments"]
    shares, outlook = random_shares(step.slots, drafts), -torch.rand(step.slots)
    kept = kept_of(shares, outlook)
    accepted = [random.Random(i).randint(0, max(count - 1, 0)) for i, (*_, count) in enumerate(segments)]
    accepted = [min(n, drafts) for n in accepted]
    next_start, bonus = ints(range(len(segments))), ints(range(7, 7 + len(segments)))
    blocks = kernels.divide_blocks(layout, kept, next_start, bonus, 6 * len(segments), 5)
    ids = torch.randint(0, 1000, (6 * len(segments), 8), dtype=torch.int32, device="cuda")
    log_probs = -torch.rand(6 * len(segments), 8, device="cuda")
    found = kernels.keep_drafts(layout, blocks, kept, ints(accepted), ids[:, 0], log_probs[:, 0])
    decoding = [(slot, count, n) for (slot, _, _, count), n in zip(segments, accepted, strict=True) if count]
    decoding = decoding[: len(step.decodes)]
    shares.learn(*(torch.tensor(x) for x in zip(*decoding, strict=True)))
    torch.testing.assert_close(kept.expected.cpu(), shares._expected)
    torch.testing.assert_close(kept.survived.cpu(), shares._survived)
    for index, (slot, _, first, count) in enumerate(blocks.rows.segments.tolist()):
        if not count:
            continue
        rows = slice(first + 1, first + count)
        wanted = ids[rows, 0].tolist()
        assert found[index].tolist() == [7 + index, *wanted, *[0] * (drafts - len(wanted))]
        own = log_probs[rows, 0].cpu()
        shares.note(torch.tensor([slot]), own[None])
        weights = torch.cat([torch.zeros(1), own.cumsum(0)[:-1]]).exp()
        newest = (weights * own).sum() / weights.sum()
        is_decoding = index < len(step.decodes)
        mean = (outlook[slot] + newest) / 2 if is_decoding else newest
        assert kept.outlook[slot].item() == pytest.approx(mean.item(), rel=1e-4)
        torch.testing.assert_close(kept.foretold[slot].cpu(), shares._foretold[slot])


# -- whole replies -----------------------------------------------------------------------------------------------------


class Shared(FixedDraftLength):
    """So many drafts a slot, shared."""

    may_share = True


class SharedAtRandom(Shared):
    """Any length at any step: shared, whole blocks or trees, and none."""

    lengths = tuple(draft_lengths(16))
    shares = False

    def __init__(self) -> None:
        self._chance = random.Random(8)

    def choose(self, slots: int) -> int:
        drafts = self._chance.choice(self.lengths)
        self.shares = drafts in shared_lengths(16) and self._chance.random() < 0.7
        return drafts


def run(llm: LLM, prompts, params, rule, chance: random.Random | None = None):
    """Replies of requests that come one after another, at random with `chance`."""
    asked = params if isinstance(params, list) else [params] * len(prompts)
    sequences = [llm.intake.sequence(prompt, its, True) for prompt, its in zip(prompts, asked, strict=True)]
    scheduler, waiting = Scheduler(llm.session, draft_length=rule), list(sequences)
    while waiting or scheduler.busy:
        while waiting and (chance is None or chance.random() < 0.3):
            scheduler.submit(waiting.pop(0))
        scheduler.step()
    return [sequence.completion() for sequence in sequences]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_shared_rows_commit_more_and_any_difference_of_text_is_a_near_tie(precision):
    llm = load_trees("off", precision, max_batch=12)
    prompts = [llm.encode(text) for text in shipped_prompts(8)]
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    shared, each = run(llm, prompts, params, Shared(7)), run(llm, prompts, params, FixedDraftLength(7))
    plain = llm.generate(prompts, params, draft=False)
    same = assert_only_near_ties_differ(
        llm, prompts, tokens(shared), tokens(plain), params, dtype=llm.config.dtype, count=NEAR_TIE
    )
    assert same >= len(prompts) // 2
    steps, fixed = (sum(reply.steps for reply in replies) for replies in (shared, each))
    rows, most = (sum(reply.drafted_tokens for reply in replies) for replies in (shared, each))
    print(precision, "steps", steps, "each its own", fixed, "drafts", rows, most)
    assert steps < fixed / 1.08
    assert rows / steps <= 1.2 * most / fixed, "nobody's rows are shared, too"


@pytest.mark.parametrize("nodes", ["off", 15])
def test_lengths_in_any_order_and_requests_at_any_time_change_no_text(nodes):
    llm = load_trees(nodes, max_batch=12)
    prompts = [llm.encode(text) for text in shipped_prompts(16)]
    chance = random.Random(3)
    params = [SamplingParams(max_tokens=chance.randint(5, 80)) for _ in prompts]
    for i in (2, 7):
        params[i] = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
    drafted = run(llm, prompts, params, SharedAtRandom(), chance)
    plain = llm.generate(prompts, params, draft=False)
    free = [i for i in range(len(prompts)) if i not in (2, 7)]
    both = [tokens([replies[i] for i in free]) for replies in (drafted, plain)]
    assert_only_near_ties_differ(
        llm, [prompts[i] for i in free], *both, params[0], dtype=llm.config.dtype, count=NEAR_TIE
    )
    assert sum(a == b for a, b in zip(*both, strict=True)) >= len(free) // 2
    assert acceptance(drafted) > 2


def test_sampled_replies_of_shared_rows_are_those_of_plain_steps():
    """But for numbers that roundings put on another side of a bound: in less than a third of the replies."""
    llm = load_trees("off", max_batch=12)
    prompts, params = [llm.encode(text) for text in shipped_prompts(6)], SamplingParams(max_tokens=48, **SAMPLED)
    drafted, plain = run(llm, prompts, params, Shared(5)), llm.generate(prompts, params, draft=False)
    assert sum(a == b for a, b in zip(tokens(drafted), tokens(plain), strict=True)) >= len(prompts) * 2 // 3


@pytest.mark.parametrize("kernels_of", ["auto", "exact"])
def test_auto_shares_rows_and_captures_nothing_while_it_serves(kernels_of, captures, monkeypatch):
    for name, steps in (("TRIAL_STEPS", 16), ("TRIAL", 4)):  # so that they are tried within these replies
        monkeypatch.setattr(shared_rows, name, steps)
    foreseen, foresee = [], shared_rows.SharedRows.foresee
    monkeypatch.setattr(shared_rows.SharedRows, "foresee", lambda *given: foreseen.append(1) or foresee(*given))
    llm = load_trees("auto" if kernels_of == "auto" else "off", max_batch=12, kernels=kernels_of)
    prompts, params = shipped_prompts(12), SamplingParams(max_tokens=64)
    expected = llm.generate(prompts, params)
    service = llm.service(ServiceSettings(draft_length="auto"))
    before, replies = len(captures), {}
    for i, text in enumerate(prompts):
        service.submit(text, params, lambda update, i=i: replies.setdefault(i, []).append(update))
    while not all(i in replies and replies[i][-1].completion for i in range(len(prompts))):
        assert service.failure is None
        assert not any(update.error for updates in replies.values() for update in updates)
        time.sleep(0.01)
    service.close()
    assert len(captures) == before
    assert foreseen, "rows were shared"
    texts = [[token for update in replies[i] for token in update.token_ids] for i in range(len(prompts))]
    assert sum(a == b for a, b in zip(texts, tokens(expected), strict=True)) >= len(prompts) * 2 // 3


def test_before_anything_is_known_slots_have_guesses():
    llm = load_trees("off", max_batch=4)
    kept = llm.session._captured_shares.kept
    assert kept.foretold[0, :3].tolist() == pytest.approx([-GUESS, -(GUESS**2), -(GUESS**3)])
    assert kept.expected.tolist() == kept.survived.tolist() == [BELIEF] * 15
