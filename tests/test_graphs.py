"""Captured steps, with a capture that captures nothing: every step that is asked for was prepared before."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.conftest import TINY
from tests.pages import DOCS
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.engine.ladder import (
    StepKind,
    draft_lengths,
    largest_first,
    most_pieces,
    shaped_kinds,
    shared_lengths,
    step_kinds,
)
from trtllm_dflash.errors import EngineError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.step_times import measure
from trtllm_dflash.session.calls import (
    Copy,
    CopyStates,
    Decode,
    Guide,
    MadeMasks,
    Piece,
    Prefill,
    Prepare,
    SlotPenalties,
    SlotSampling,
    Step,
    call_of,
    words_of,
)
from trtllm_dflash.session.graphs import StepGraphs
from trtllm_dflash.session.graphs import words_of as flat_words
from trtllm_dflash.session.shaping import is_shaped
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.step import Drafting

CHATS = [[{"role": "user", "content": text}] for kind in read_prompts(3).values() for text in kind]
LENGTHS = tuple(draft_lengths(16))


class Captured(TorchSession):
    """Computes each step on the CPU in the shape that a GPU's session has captured for it.

    Attributes:
        captures: the kinds that were captured, in order.
        asked: what `decode` was asked for, with the kind that was found.
    """

    def __init__(self, config, weights, device, flat=False):
        super().__init__(config, weights, device, flat=flat)
        self.captures: list[StepKind] = []
        self.asked: list[tuple[Decode, StepKind]] = []
        self._graphs = StepGraphs(self.config, lambda kind: self.captures.append(kind) or kind, config.chunk * flat)

    def _needs(self, call):
        return bool(self._graphs.missing(call))

    def _prepare(self, call, progress):
        self._graphs.prepare(call, progress)

    def _run_decode(self, call):
        kind, _ = self._graphs.find(call)
        self.asked.append((call, kind))
        row_counts = call.row_counts + [0] * (kind.slots - len(call.row_counts))
        return self._decode_rows(self._int32(row_counts), kind.rows, kind.drafting, kind.rows, kind.sampled)


class CapturedFlat(Captured):
    """Computes steps of flat rows as they are, and notes the kinds that a GPU's session has captured for them."""

    def __init__(self, config, weights, device):
        super().__init__(config.model_copy(update={"page_size": 64, "chunk": 100}), weights, device, flat=True)

    @property
    def limits(self):
        return replace(super().limits, shapes_trees=False)

    def _run_step(self, call):
        kind, _ = self._graphs.find_flat(call, [len(piece.token_ids) for piece in call.pieces], is_shaped(call))
        counts = [count for _, count in call.decode]
        assert kind.slots >= len(counts)
        assert kind.rows >= max(counts, default=0)
        assert kind.all_rows >= sum(counts) + sum(len(piece.token_ids) for piece in call.pieces)
        assert kind.pieces >= len(call.pieces)
        assert kind.segments >= len(counts) + len(call.pieces)
        assert kind.logit_rows >= sum(counts) + len(call.pieces)
        assert kind.tree >= call.tree
        for slot in {*call.penalized, *(guide.slot for guide in call.guides)} & {slot for slot, _ in call.decode}:
            rows = dict(call.decode)[slot]
            assert self._slots.parents[slot, :rows].tolist() in ([0] * rows, list(range(-1, rows - 1))), "a chain"
        return super()._run_step(call)


class Idle(Captured):
    """Computes nothing."""

    def _run_prefill(self, call):
        return self._int32([[0, 5]])

    def _decode_rows(self, row_count, rows, drafting, block, sampled):
        return self._int32([[0] * (1 + rows)] * len(row_count))


@pytest.fixture(scope="module")
def loaded():
    """The shipped pair with 3 slots."""
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=3, max_seq_len=512) as llm:
        yield llm


@pytest.fixture
def llm(loaded):
    """The same on a session that captures and has prepared nothing yet."""
    return LLM(Captured(loaded.config, loaded.session.weights, loaded.session.device), loaded.codec)


@pytest.fixture
def idle(loaded):
    return LLM(Idle(loaded.config, loaded.session.weights, loaded.session.device), loaded.codec)


@pytest.fixture(scope="module")
def requests():
    chance = random.Random(1)
    params = [
        SamplingParams(max_tokens=chance.randint(1, 12), temperature=0.8 * (i % 3 == 0), seed=i) for i in range(6)
    ]
    return list(zip(CHATS[::3], params, strict=False))


@pytest.fixture(scope="module")
def expected(loaded, requests):
    chats, params = zip(*requests, strict=True)
    return [completion.token_ids for completion in loaded.generate(list(chats), list(params))]


class Any(DraftLength):
    lengths = LENGTHS

    def __init__(self):
        self._chance = random.Random(3)

    def choose(self, slots):
        return self._chance.choice(self.lengths)


def adaptive():
    """Changes its mind with the load: many slots are slow."""
    return AdaptiveDraftLength({(b, k): 1 + 0.3 * (b - 1) * k for b in (1, 2, 3) for k in LENGTHS})


@pytest.mark.parametrize("make", [Any, adaptive, lambda: FixedDraftLength(15), lambda: FixedDraftLength(0)])
def test_any_mix_of_requests_finds_its_steps_captured_and_gets_its_text(loaded, requests, expected, make):
    run_any_mix(
        LLM(CapturedFlat(loaded.config, loaded.session.weights, loaded.session.device), loaded.codec),
        requests,
        expected,
        make,
    )


@pytest.mark.parametrize(("nodes", "make"), [(15, Any), (63, adaptive)])
def test_so_does_any_mix_of_trees_and_chains(loaded, requests, expected, nodes, make):
    config = loaded.config.model_copy(update={"draft_tree": nodes})
    llm = LLM(CapturedFlat(config, loaded.session.weights, loaded.session.device), loaded.codec)
    run_any_mix(llm, requests, expected, make)
    assert {kind.rows for kind in llm.session.captures if kind.tree} == {nodes + 1}


@pytest.mark.parametrize("nodes", [15, 63])
def test_so_do_requests_that_shape_their_choices_beside_trees(loaded, requests, nodes):
    kinds = [{}, {"logprobs": 2}, {"presence_penalty": 0.4}, {"structured": Structured(kind="regex", value="[a-z ]*")}]
    mixed = [(ids, each.model_copy(update=kinds[i % 4])) for i, (ids, each) in enumerate(requests)]
    chats, params = zip(*mixed, strict=True)
    expected = [reply.token_ids for reply in loaded.generate(list(chats), list(params), draft=False)]
    config = loaded.config.model_copy(update={"draft_tree": nodes})
    llm = LLM(CapturedFlat(config, loaded.session.weights, loaded.session.device), loaded.codec)
    run_any_mix(llm, mixed, expected, lambda: FixedDraftLength(15))


@pytest.mark.parametrize("make", [Any, adaptive, lambda: FixedDraftLength(15), lambda: FixedDraftLength(0)])
def test_so_does_any_mix_on_slots_and_rows(llm, requests, expected, make):
    run_any_mix(llm, requests, expected, make)
    # No step that drafts or decodes plainly has more rows than the next power of two.
    for call, kind in llm.session.asked:
        assert kind.slots == min(size for size in (1, 2, 3) if size >= len(call.row_counts))
        if call.drafting is not Drafting.CONTEXT:
            assert kind.rows == min(rows for rows in (1, 2, 4, 8, 16) if rows >= max(*call.row_counts, call.block))


def run_any_mix(llm, requests, expected, make):
    scheduler = Scheduler(llm.session, draft_length=make(), ahead=1)
    prepared = list(llm.session.captures)
    chance = random.Random(1)
    sequences = [llm.intake.sequence(*request, draft=i % 4 != 0) for i, request in enumerate(requests)]
    for sequence in sequences:
        scheduler.submit(sequence)
        for _ in range(chance.randint(0, 6)):
            scheduler.step()
    while scheduler.busy:
        scheduler.step()
    assert llm.session.captures == prepared
    assert not scheduler.statistics.requests["failed"]
    assert [sequence.completion().token_ids for sequence in sequences] == expected


def test_plain_decoding_captures_plain_steps_alone(idle):
    Scheduler(idle.session, draft=False)
    assert {kind.drafting for kind in idle.session.captures} == {Drafting.OFF}


def test_what_was_prepared_is_not_captured_again(llm):
    llm.session.prepare(Prepare((15,), sampled=True))
    first = len(llm.session.captures)
    assert first == 12  # of 1, 2 and 3 slots: plain and drafted, greedy and sampled
    llm.session.prepare(Prepare((15,), sampled=False))
    assert len(llm.session.captures) == first
    llm.generate(CHATS[:3], SamplingParams(max_tokens=5))
    assert len(llm.session.captures) == first


def test_preparation_tells_how_far_it_is(idle):
    told = []
    idle.session.prepare(Prepare((15,), sampled=False), lambda *what: told.append(what))
    assert told == [("capturing", done, 6) for done in range(7)]


def test_measuring_steps_prepares_them_first(idle):
    measure(idle.session, LENGTHS)
    assert {kind.drafting for _, kind in idle.session.asked} == {Drafting.CONTEXT, Drafting.BLOCK}
    assert not any(kind.sampled for kind in idle.session.captures)


def test_where_nothing_is_drafted_plain_steps_alone_are_timed_and_captured(idle):
    assert set(measure(idle.session, [])) == {(1, 0), (3, 0)}
    assert {kind.drafting for _, kind in idle.session.asked} == {Drafting.OFF}
    assert {kind.drafting for kind in idle.session.captures} == {Drafting.OFF}


def test_a_step_that_was_not_prepared_for_is_refused(idle):
    idle.session.prepare(Prepare((15,), sampled=False))
    for call in (
        Decode([1], Drafting.BLOCK, 16, sampled=True),
        Decode([1], Drafting.CONTEXT, 1, sampled=False),
        Decode([2], Drafting.OFF, 1, sampled=False),
    ):
        with pytest.raises(EngineError, match="was not prepared for"):
            idle.session.decode(call)


def test_a_step_takes_the_smallest_graph_that_it_fits_in(idle):
    idle.session.prepare(Prepare((0, 3, 7, 15), sampled=False))
    for row_counts, block, kind in (
        ([3, 1], 2, StepKind(2, 4, Drafting.BLOCK, False)),
        ([3, 1], 6, StepKind(2, 8, Drafting.BLOCK, False)),
        ([3, 9, 1], 4, StepKind(3, 16, Drafting.BLOCK, False)),
    ):
        assert idle.session._graphs.find(Decode(row_counts, Drafting.BLOCK, block, False))[0] == kind
    assert idle.session._graphs.find(Decode([5], Drafting.CONTEXT, 1, False))[0].rows == 16


def test_kinds_are_few_and_the_largest_first():
    kinds = step_kinds(32, draft_lengths(16), sampled=True)
    assert len(kinds) == len(set(kinds)) == 4 * (1 + 2 + 4) * 2 + 2 * (1 + 3 + 7) * 2
    assert kinds[0] in (StepKind(32, 16, drafting, True) for drafting in Drafting)
    assert all(a.slots * a.rows >= b.slots * b.rows for a, b in pairwise(kinds))
    assert len(step_kinds(8, (15,), sampled=False)) == 4 * 2
    for nodes in (15, 31):
        trees = step_kinds(32, draft_lengths(16), sampled=True, tree=nodes)
        assert len(trees) == len(kinds)
        assert StepKind(32, nodes + 1, Drafting.BLOCK, True, tree=nodes) in trees


@pytest.mark.parametrize("slots", [8, 32, 256])
@pytest.mark.parametrize("lengths", [(), (15,), LENGTHS])
def test_kinds_with_more_than_tokens_are_fewer(slots, lengths):
    plain, shaped = (make(slots, lengths, True, 512) for make in (step_kinds, shaped_kinds))
    assert all(kind.shaped for kind in shaped) and not any(kind.shaped for kind in plain)
    assert len(set(shaped)) == len(shaped) < len(plain)


PENALTIES = SlotPenalties(
    [1, 7], [], 0.5, -0.25, 1.5, ((3, 2.0), (4, -100.0)), end_ids=(0, 2), ends_from=9, bad_runs=((5,), (6, 7))
)


def test_every_rank_captures_its_steps_in_one_order():
    """Sets of kinds have another order in each process; ranks that capture different steps wait for ever."""
    for kinds in (step_kinds(64, LENGTHS, True, 512, 15, 16), shaped_kinds(64, LENGTHS, True, 512, 15)):
        for seed in range(9):
            others = kinds.copy()
            random.Random(seed).shuffle(others)
            assert largest_first(others) == kinds


def test_ranks_are_told_what_to_prepare():
    for call in (
        Prepare((0, 7, 15), sampled=True),
        Prepare((), sampled=False),
        Copy(1, 2, 3),
        Decode([1, 0, 4], Drafting.BLOCK, 4, True),
        Prefill(2, 5, [7, 8, 9], True, Drafting.CONTEXT, 1),
        Step(
            [(3, 16), (0, 1)],
            [
                Piece(1, 64, [5, 6], False, next_ids=[6, 7]),
                Piece(2, 0, [7], True, SlotSampling(0.5, 4, 0.9, 2**63, 0.05), penalties=PENALTIES),
                Piece(4, 0, [8, 9], True, penalties=SlotPenalties([8, 9], [])),
            ],
            Drafting.BLOCK,
            16,
            True,
            pages=[(1, 0, 9), (2, 1, 4)],
            copies=[(9, 4, 30)],
            window_pages=[(1, 0, 3)],
            window_copies=[(3, 2, 30), (1, 0, 8)],
            logprobs=True,
            penalized=[0, 2, 4],
            guides=[Guide(0, [5, 6]), Guide(2, []), Guide(3, [], own=1)],
            masks=MadeMasks(2, [-1, 0, 5, 6, -7, 8, 2**31 - 1, -(2**31), 9, 10, 11, 12]),
        ),
        Step([(0, 1)], [], Drafting.OFF, 1, False),
        CopyStates(7, 2),
    ):
        assert call_of(list(words_of(call))) == call


@pytest.mark.parametrize("chunk", [32, 64, 100, 128, 200, 256, 512])
@pytest.mark.parametrize("lengths", [(), (0,), (7,), LENGTHS])
def test_every_step_beside_prompts_finds_its_kind(loaded, chunk, lengths):
    """Of any number of slots, rows, pieces and prompt rows that a GPU's session says it takes."""
    slots = 8
    config = loaded.config.model_copy(update={"chunk": chunk, "max_batch": slots})
    graphs = StepGraphs(config, lambda kind: kind, chunk)
    graphs.prepare(Prepare(lengths, sampled=True, shaped=True), lambda *_: None)
    blocks = [length + 1 for length in lengths] or [1]
    drafting = {1: [Drafting.CONTEXT, Drafting.OFF] if lengths else [Drafting.OFF]}
    for running in (0, 1, 3, slots - 1):
        for rows in blocks:
            for block in blocks:
                for kind in drafting.get(block, [Drafting.BLOCK]):
                    for pieces in range(1, min(most_pieces(chunk), slots - running) + 1):
                        for tokens in {pieces, chunk}:
                            counts = [1] * (pieces - 1) + [tokens - pieces + 1]
                            step = Step([(i, rows) for i in range(running)], [], kind, block, sampled=rows % 2 == 0)
                            for shaped in (False, True):
                                found, _ = graphs.find_flat(step, counts, shaped)
                                assert found.pieces >= pieces and found.shaped == shaped
                                assert found.segments >= running + pieces and found.slots >= running
                                assert found.logit_rows >= running * rows + pieces
                    if running and (kind is not Drafting.OFF or rows == 1):
                        step = Step([(i, rows) for i in range(running)], [], kind, block, sampled=False)
                        assert graphs.find_flat(step, [], True)[0].shaped


def test_as_many_steps_are_captured_as_the_page_on_gpus_says(loaded):
    config = loaded.config.model_copy(update={"chunk": 512, "max_batch": 64, "block_size": 16})
    counts = []
    for lengths, shares in ((tuple(draft_lengths(16)), True), ((7,), False), ((), False)):
        graphs = StepGraphs(config, lambda kind: kind, config.chunk)
        graphs.prepare(Prepare(lengths, sampled=True, shaped=True, shares=shares), lambda *_: None)
        counts.append(len(graphs))
    page = " ".join((DOCS / "gpu.md").read_text().split())
    said = "there are {}, 88 of them for .* With `--draft-length 7` there are {}, with `--no-draft` {}\\."
    assert re.search(said.format(*counts), page), counts


@pytest.mark.parametrize(
    ("clients", "rows"), [(8, 16), (16, 8), (32, 8), (32, 6), (64, 4), (100, 8)], ids=lambda number: str(number)
)
def test_a_prompt_beside_all_other_slots_costs_the_drafter_and_the_head_no_rows_more(loaded, clients, rows):
    """Each client has one slot, that decodes or whose prompt is read: rows of nobody are those of sizes alone."""
    config = loaded.config.model_copy(update={"chunk": 512, "max_batch": 128})
    graphs = StepGraphs(config, lambda kind: kind, config.chunk)
    graphs.prepare(Prepare(LENGTHS, sampled=False), lambda *_: None)
    least = min(size for size in (8, 16, 32, 64, 128) if size >= clients)
    for pieces in (1, 2, 8):
        decode = [(slot, rows) for slot in range(clients - pieces)]
        step = Step(decode, [], Drafting.BLOCK, rows, sampled=False)
        found, _ = graphs.find_flat(step, [256 // pieces] * pieces)
        assert (found.segments, found.rows) == (found.slots, rows) or not decode
        assert found.segments <= least
        assert found.logit_rows <= least * rows
        assert found.all_rows <= least * rows + 256


def test_a_prompt_takes_a_place_that_no_slot_decodes_in(loaded):
    """What the device reads of a step of 31 slots and a prompt: 32 segments, and the prompt's tokens behind them."""
    config = loaded.config.model_copy(update={"chunk": 512, "max_batch": 32})
    graphs = StepGraphs(config, lambda kind: kind, config.chunk)
    graphs.prepare(Prepare((7,), sampled=False), lambda *_: None)
    piece = Piece(9, 64, list(range(256)), True)
    step = Step([(slot, 8) for slot in range(32) if slot != 9], [piece], Drafting.BLOCK, 8, sampled=False)
    kind, _ = graphs.find_flat(step, [256])
    assert (kind.slots, kind.segments, kind.all_rows, kind.logit_rows) == (32, 32, 512, 256)
    words = flat_words(step, kind)
    segments = [words[at : at + 4] for at in range(0, 4 * kind.segments, 4)]
    assert segments[:31] == [[slot, 8, -1, 8] for slot, _ in step.decode]
    assert segments[31:] == [[9, 256, 64, 1]]
    assert words[4 * kind.segments :] == piece.token_ids


def test_steps_of_an_engine_without_a_drafter_are_timed_plainly(loaded):
    config = loaded.config.model_copy(update={"drafter": None, "block_size": 1})
    session = Idle(config, loaded.session.weights, loaded.session.device)
    assert set(measure(session, ())) == {(1, 0), (3, 0)}
    assert {kind.drafting for _, kind in session.asked} == {Drafting.OFF}


def test_slots_share_the_rows_of_every_length_that_may_be_shared():
    """Beside prompts, for which fewer sizes are captured, too."""
    for block in (8, 10, 16):
        lengths = draft_lengths(block)
        for tree in (0, 15) if block == 16 else (0,):
            config = SimpleNamespace(max_batch=32, block_size=block, draft_tree=tree, drafter=object())
            graphs = StepGraphs(config, lambda kind: kind, 512)
            graphs.prepare(Prepare(tuple(lengths), sampled=False, shares=True), lambda *_: None)
            for slots in (9, 24):
                for drafts in shared_lengths(block):
                    for pieces in ([], [300], [20, 40]):
                        share = slots * (drafts + 1)
                        rows = [(slot, block) for slot in range(slots)]
                        step = Step(rows, [], Drafting.BLOCK, drafts + 1, False, chances=True, share=share)
                        kind, _ = graphs.find_flat(step, pieces)
                        assert kind.shares and kind.tree == 0 and kind.rows < block
                        assert kind.all_rows >= share + sum(pieces)
            for drafts in lengths[1:]:
                own = Step([(0, block)], [], Drafting.BLOCK, drafts + 1, False, tree=tree * (drafts == block - 1))
                assert not graphs.find_flat(own, [])[0].shares


def test_the_words_of_a_step_say_how_many_rows_its_slots_share():
    kind = StepKind(4, 8, Drafting.BLOCK, False, prompt_rows=64, shares=True)
    alone = Step([(2, 16), (0, 16)], [], Drafting.BLOCK, 6, False, chances=True, share=12)
    assert flat_words(alone, kind)[:8] == [2, 16, -1, 32, 0, 16, -1, 32], "all that are computed"
    beside = replace(alone, pieces=[Piece(1, 0, [5] * 40, True)])
    assert flat_words(beside, kind)[:12] == [2, 16, -1, 12, 0, 16, -1, 12, 1, 40, 0, 1]
