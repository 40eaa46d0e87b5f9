"""Steps of flat rows: decoding slots and pieces of prompts together, over pages, give what each request gives alone."""

import functools
import random

import pytest

from tests.conftest import TINY
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.ops.ragged_ops import RaggedOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.calls import Piece, Prepare, SlotSampling, Step
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.step import Drafting

CHATS = [[{"role": "user", "content": text}] for kind in read_prompts(2).values() for text in kind][:6]
TOKENS = 24


@pytest.fixture(scope="module")
def solo():
    """The shipped pair, one request at a time."""
    with LLM.from_pretrained(
        str(TINY / "target"), str(TINY / "drafter"), precision="fp32", device="cpu", max_seq_len=1800
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(solo):
    """What each request gives alone, decoded once: drafted or not, greedy or some of them sampled."""

    @functools.cache
    def get(draft, sampled):
        prompts = [solo.intake.encode(text) for text in CHATS]
        return solo.generate(prompts, params(sampled), draft=draft)

    return get


def params(sampled):
    return [
        SamplingParams(max_tokens=TOKENS, temperature=0.8 if sampled and i % 2 else 0.0, seed=i, ignore_eos=True)
        for i in range(len(CHATS))
    ]


class Drive:
    """Runs prompts on a session, each in a slot of its own, in steps that mix what a random generator says.

    Attributes:
        tokens: of each reply.
        accepted: drafts of each that were accepted, by step.
    """

    def __init__(self, session, prompts, params, rng, drafting=Drafting.BLOCK):
        self.session, self.prompts, self.params, self.rng, self.drafting = session, prompts, params, rng, drafting
        count = len(prompts)
        self.block = session.config.block_size if drafting is Drafting.BLOCK else 1
        self.tree = session.config.draft_tree if drafting is Drafting.BLOCK else 0
        self.most = self.tree + 1 if self.tree else self.block  # rows of a slot
        self.read, self.rows = [0] * count, [1] * count
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.accepted: list[list[int]] = [[] for _ in prompts]

    def run(self):
        while any(len(tokens) < TOKENS for tokens in self.tokens):
            self.step()
        return [tokens[:TOKENS] for tokens in self.tokens]

    def step(self):
        decode, pieces = [], []
        room = self.session.limits.prompt_rows
        for slot, prompt in enumerate(self.prompts):
            if self.rng.random() < 0.3:  # it takes no part this time
                continue
            if self.read[slot] < len(prompt):
                first = self.read[slot]
                count = min(self.rng.choice([1, 5, 17, 200]), len(prompt) - first, room)
                if count == 0:
                    continue
                room -= count
                p = self.params[slot]
                sampling = SlotSampling(p.temperature, p.top_k, p.top_p, p.seed)
                self.read[slot] += count
                last = self.read[slot] == len(prompt)
                pieces.append(Piece(slot, first, prompt[first : first + count], last, sampling))
            elif len(self.tokens[slot]) < TOKENS:
                rows = self.rows[slot]
                decode.append((slot, rows if self.rng.random() < 0.85 else self.rng.randint(1, rows)))
        if not decode and not pieces:
            return
        sampled = any(p.temperature > 0 for p in self.params)
        outcome = self.session.run(Step(decode, pieces, self.drafting, self.block, sampled, tree=self.tree)).read()
        assert len(outcome) == len(decode) + len(pieces)
        for (slot, count), ids in zip(decode, outcome, strict=False):
            self.tokens[slot] += ids
            self.rows[slot] = self.most
            if count == self.most:  # all its drafts were verified
                self.accepted[slot].append(len(ids) - 1)
        for piece, ids in zip(pieces, outcome[len(decode) :], strict=True):
            if piece.last:
                assert len(ids) == 1
                self.tokens[piece.slot] += ids
                self.rows[piece.slot] = self.most


def session_of(solo, page_size, **changes):
    """A session of six slots on the same weights, with pages of this size in a random order."""
    update = {"max_batch": len(CHATS), "page_size": page_size, **changes}
    config = solo.config.model_copy(update=update)
    session = TorchSession(config, dict(solo.session.weights), solo.session.device)
    pages = list(range(session.paging.pages))
    random.Random(5).shuffle(pages)
    if not session.paging.linear:
        width = session.paging.width
        given = [(slot, i, pages[slot * width + i]) for slot in range(len(CHATS)) for i in range(width)]
        session._tables = [[0] * width for _ in CHATS]
        prompt = Piece(0, 0, [1], False)
        session.run(Step([], [prompt], Drafting.OFF, 1, False, pages=given))
    session.prepare(Prepare((config.block_size - 1,), sampled=True))
    return session


#: By pairs: pages of each size drafted and not, and those greedy and sampled; the smallest drafted alone.
CASES = [
    (None, False, Drafting.BLOCK),
    (None, True, Drafting.OFF),
    (100, True, Drafting.BLOCK),
    (100, False, Drafting.OFF),
    pytest.param(16, True, Drafting.BLOCK, marks=pytest.mark.slow),
]


@pytest.mark.principal("100-True-block", "None-False-block")
@pytest.mark.parametrize(("page_size", "sampled", "drafting"), CASES)
def test_mixed_steps_give_what_each_request_gives_alone(solo, alone, page_size, sampled, drafting):
    prompts = [solo.intake.encode(text) for text in CHATS]
    expected = alone(drafting is Drafting.BLOCK, sampled)
    session = session_of(solo, page_size)
    drive = Drive(session, prompts, params(sampled), random.Random(3), drafting)
    assert drive.run() == [reply.token_ids for reply in expected]
    if drafting is Drafting.BLOCK:
        # Wrong context rows do not change the text; they lower acceptance.
        found = [n for accepted in drive.accepted for n in accepted]
        known = [n for reply in expected for n in reply.accepted_per_step]
        assert sum(found) / len(found) > 0.85 * sum(known) / len(known)


@pytest.mark.principal("15")
@pytest.mark.parametrize("nodes", [15, pytest.param(63, marks=pytest.mark.slow)])
def test_trees_over_scattered_pages_and_parts_of_trees_give_it_too(solo, alone, nodes):
    prompts = [solo.intake.encode(text) for text in CHATS]
    drive = Drive(session_of(solo, 7, draft_tree=nodes), prompts, params(True), random.Random(4))
    expected = alone(True, True)
    assert drive.run() == [reply.token_ids for reply in expected]
    found = [n for accepted in drive.accepted for n in accepted]
    known = [n for reply in expected for n in reply.accepted_per_step]
    assert sum(found) / len(found) > 0.95 * sum(known) / len(known)


def test_pages_are_copied_before_the_rows_of_their_step(solo):
    prompts = [solo.intake.encode(CHATS[0])]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    expected = solo.generate(prompts, params)[0].token_ids
    session = session_of(solo, 64)
    ids, size = prompts[0], 64
    shared = (len(ids) - 1) // size * size + (len(ids) - 1) % size
    session.run(Step([], [Piece(0, 0, ids, True)], Drafting.BLOCK, 16, False))
    pages = session._tables[0]
    full = shared // size
    given = [(1, i, pages[i]) for i in range(full)]
    copies = [(pages[full], session._tables[1][full], shared - full * size)]
    drive = Drive(session, [[], ids], [params, params], random.Random(1))
    drive.tokens[0] = [0] * TOKENS
    outcome = session.run(
        Step([], [Piece(1, shared, ids[shared:], True)], Drafting.BLOCK, 16, False, given, copies)
    ).read()
    drive.tokens[1], drive.read[1], drive.rows[1] = list(outcome[0]), len(ids), 16
    assert drive.run()[1] == expected


@pytest.mark.parametrize("needs", ["tokens", "prompt_logprobs", "tapped"])
def test_the_last_layer_of_a_prompt_ends_with_its_attention(solo, monkeypatch, needs):
    """But where all its rows are wanted: to tell their log-probabilities, or to draft from."""
    session = session_of(solo, None)
    last = session.config.target.layers - 1
    if needs == "tapped":
        taps = *session.config.drafter.tap_layers[:-1], last
        drafter = session.config.drafter.model_copy(update={"tap_layers": taps})
        session = session_of(solo, None, drafter=drafter)
    rows = {}
    add_product = RaggedOps.add_product

    def counted(ops, name, x, y):
        rows[name] = y.shape[1]
        return add_product(ops, name, x, y)

    ids = solo.intake.encode(CHATS[0])
    session.run(Step([], [Piece(0, 0, ids, True)], Drafting.BLOCK, 16, False))
    monkeypatch.setattr(RaggedOps, "add_product", counted)
    told = ids[1:31] if needs == "prompt_logprobs" else []
    pieces = [Piece(1, 0, ids[:30], False, next_ids=told), Piece(2, 0, ids[:40], False)]
    session.run(Step([(0, 16)], pieces, Drafting.BLOCK, 16, False))
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert [rows[f"model.layers.{i}.{part}"] for i in range(last)] == [16 + 30 + 40] * last
        assert rows[f"model.layers.{last}.{part}"] == (16 + 2 if needs == "tokens" else 16 + 30 + 40)


def test_pages_come_from_the_memory_given(solo):
    assert session_of(solo, 64).paging == Paging(6 * 29, 64, 29)
    assert session_of(solo, None).paging.linear
