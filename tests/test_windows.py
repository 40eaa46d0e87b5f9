"""Layers with a window give their pages back while a sequence runs, and its text stays what it is."""

import random
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.cost.memory import cache_bytes, cache_shapes, plan_memory, plan_pages
from trtllm_dflash.runtime.prefill_budget import FixedPrefillBudget
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.choice import Choice
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.torch_session import TorchSession

PREFIX = [1 + 7 * i % 120 for i in range(120)]
PROMPTS = [[*PREFIX, 3], [*PREFIX, 5, 6], [*PREFIX[:90], 9, 9], [4, 5, 6], [*PREFIX, 3]]
TOKENS = 60


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """A small gpt-oss, every other layer of which sees 16 tokens, over caches of one page."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    target = make_gpt_oss(folder / "target", experts=2, top_k=1, window=16, mxfp4=False)
    drafter = make_drafter(folder / "drafter", target)
    with LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", max_batch=3, max_seq_len=400) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(solo):
    replies = [solo.generate([prompt], params(i))[0].token_ids for i, prompt in enumerate(PROMPTS[:-1])]
    return [*replies, replies[0]]  # the last one is the first again, and greedy


def params(i, tokens=TOKENS):
    return SamplingParams(max_tokens=tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)


def paged(solo, **changes):
    """The same engine over pages, of 16 unless it is said."""
    config = solo.config.model_copy(update={"page_size": 16, "chunk": 64, **changes})
    return LLM(TorchSession(config, solo.session.weights, solo.session.device), solo.codec)


def run(scheduler, sequences):
    """Runs them all, the last one after the others; returns the most pages that windows saw."""
    *first, last = sequences
    held = [0]
    for batch in (first, [last]):
        for sequence in batch:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
            held.append(scheduler._slots.pages.windows.held)
    return max(held)


#: Rows of a page (of the larger ones parts are copied), whether pages are few, and steps ahead.
PAGES = [(32, True, 1), (16, False, 0)]


@pytest.mark.principal("32-True-1")
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "few", "ahead"), PAGES)
def test_texts_are_those_of_each_request_alone(solo, alone, rows, few, ahead):
    paging = plan_pages(paged(solo, page_size=rows).config)
    memory = cache_bytes(solo.config, replace(paging, pages=416 // rows))
    llm = paged(solo, page_size=rows, kv_memory=memory if few else None)
    assert llm.session.paging.pages == (416 // rows if few else 3 * paging.width)
    assert llm.session.paging.window == 16
    scheduler = Scheduler(llm.session, ahead=ahead, budget=FixedPrefillBudget(40))
    sequences = [llm.intake.sequence(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
    run(scheduler, sequences)
    assert [sequence.token_ids for sequence in sequences] == alone
    assert scheduler.statistics.prefix_hits > 0
    assert (scheduler.statistics.preemptions > 0) == few
    assert scheduler.statistics.pages_used == scheduler._slots.pages.windows.held == 0


@pytest.mark.slow
def test_acceptance_is_as_over_one_page(solo):
    llm = paged(solo)
    sequences = [llm.intake.sequence(PROMPTS[0], params(0)) for _ in range(2)]
    run(Scheduler(llm.session), sequences)
    expected = solo.generate([PROMPTS[0]], params(0))[0].accepted_per_step
    assert [sequence.accepted_per_step for sequence in sequences] == [expected] * 2


def test_a_long_sequence_holds_what_its_window_sees(solo):
    llm = paged(solo)
    scheduler = Scheduler(llm.session, budget=FixedPrefillBudget(40))
    sequence = llm.intake.sequence([*PREFIX, *PREFIX], params(0, 150))
    scheduler.submit(sequence)
    used = []
    while scheduler.busy:
        scheduler.step()
        used.append(scheduler.statistics.window_pages_used)
    # 390 rows are 25 pages: it has those of 16 rows that are seen, 64 of a piece, and 24 that steps write.
    assert 2 <= max(used) <= 8
    assert used[-1] == 0
    assert scheduler.statistics.window_pages == llm.session.paging.window_pages > 8
    assert len(sequence.token_ids) == 150


class Idle:
    """A session that computes nothing, over the pages that an engine has, and accepts no draft."""

    def __init__(self, config, ahead):
        self.config, self.ahead, self.paging = config, ahead, plan_pages(config)
        self.limits = StepLimits(8, config.chunk, mixes=True, shapes=True)
        self.choice = Choice("torch", "cpu", "fp32", "torch", "torch", "none", "")

    def prepare(self, call):
        pass

    def prompt_room(self, like, counts):
        return sum(counts)

    def run(self, step):
        return Outcome(torch.tensor([[0, 1]] * (len(step.decode) + len(step.pieces)), dtype=torch.int32))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("chunk", [512, 2048])
def test_there_are_pages_for_every_prompt_however_they_come(solo, chunk, ahead):
    """A slot that waits for the rest of its prompt to be read, or has just read all of it, holds no piece's pages."""
    windows = tuple(window and 128 for window in solo.config.target.windows)
    target = solo.config.target.model_copy(update={"windows": windows})
    limits = {"max_batch": 8, "max_seq_len": 4096, "chunk": chunk, "page_size": 64}
    config = solo.config.model_copy(update={"target": target, **limits})
    chance = random.Random(0)
    for length in (300, 512, 1024, 2000, None) * 4:
        session = Idle(config, ahead)
        assert session.paging.window == 128
        scheduler = Scheduler(session, budget=FixedPrefillBudget(chance.choice([64, 10**6])))
        sequences = []
        while len(sequences) < 12 or scheduler.busy:
            for _ in range(min(chance.choice([0, 1, 1, 8]), 12 - len(sequences))):
                ids = [len(sequences)] * (length or chance.randrange(1, 4000))
                tokens = chance.choice([1, 5, 90])
                sequences.append(Sequence(ids, SamplingParams(max_tokens=tokens, ignore_eos=True), tokens, frozenset()))
                scheduler.submit(sequences[-1])
            scheduler.step()
        assert [sequence.error for sequence in sequences] == [None] * 12
        assert scheduler._slots.pages.windows.held == 0


def test_layers_with_a_window_have_fewer_pages(solo):
    llm = paged(solo)
    paging = plan_pages(llm.config)
    shapes = {name: cache.shape[0] for name, cache in llm.session.caches.items()}
    assert shapes == {name: shape[0] for name, shape in cache_shapes(llm.config, paging).items()}
    windowed = [f"model.layers.{i}.{kind}" for i in (0, 2) for kind in ("key", "value")]
    assert {name for name, pages in shapes.items() if pages == paging.window_pages} == set(windowed)
    assert paging.window_pages < paging.pages
    memory = plan_memory(llm.config)
    assert memory.target_cache + memory.drafter_cache == sum(c.numel() * 4 for c in llm.session.caches.values())
