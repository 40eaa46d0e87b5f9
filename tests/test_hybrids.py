"""Hybrids of gated delta nets and gated attention: against transformers, drafted, and however their rows are cut."""

import json
import random
import shutil
from itertools import chain
from unittest.mock import Mock

import pytest
import torch
import transformers

from tests.checkpoints import edit_config, edit_tensors, make_drafter
from tests.conftest import refusal, succeeds
from tests.family_checks import assert_ranks_agree
from tests.hybrid_checkpoints import LAYOUTS, make_hybrid
from tests.near_ties import all_logits
from tests.quantized import quantize_folder
from tests.stub_kernels import needs_cc, stub_library
from tests.test_quantized_experts import planned
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.cost.floor import step_work
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.cost.states import state_bytes
from trtllm_dflash.engine.directory import plan_file, read_config, weights_file
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.kernels import LIBRARY_VARIABLE
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.ops.cuda_experts import join_shared_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.quantize.target import _load
from trtllm_dflash.runtime.checkpoints import Checkpoints
from trtllm_dflash.runtime.prefill_budget import FixedPrefillBudget
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Piece, Step
from trtllm_dflash.session.choice import find_kernels
from trtllm_dflash.session.weights import multiplied_weights
from trtllm_dflash.step import Drafting

IDS = torch.randint(4, 128, (90,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A hybrid's folder, by layout."""
    made = {}

    def make(layout, **shape):
        key = layout, tuple(sorted(shape.items()))
        if key not in made:
            made[key] = make_hybrid(tmp_path_factory.mktemp("hybrid") / "target", layout, **shape)
        return made[key]

    return make


def load(folder, drafter=None, **settings):
    return LLM.from_pretrained(folder, drafter, precision="fp32", device="cpu", **{"max_seq_len": 256, **settings})


def reference(folder, layout):
    """The same checkpoint as transformers computes it."""
    classes = {
        "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
        "qwen3_5_moe": transformers.Qwen3_5MoeForConditionalGeneration,
    }
    kind = classes.get(layout.partition(",")[0], transformers.AutoModelForCausalLM)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_logit_is_transformers_own(layout, hybrid):
    llm = load(hybrid(layout))
    with torch.inference_mode():
        expected = reference(hybrid(layout), layout)(torch.tensor([IDS])).logits[0]
    actual = all_logits(llm, IDS)
    assert (actual - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4


@pytest.mark.parametrize(
    ("layout", "stored"),
    [("qwen3_next", "blocks"), ("qwen3_5", "blocks"), ("qwen3_next", "channel"), ("qwen3_5", "nvfp4")],
)
def test_in_few_bits_its_logits_are_those_of_the_numbers_that_they_stand_for(layout, stored, tmp_path):
    shape = {"hidden_size": 128, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    quantized, numbers = (make_hybrid(tmp_path / name, layout, **shape) for name in ("quantized", "numbers"))
    stands_for = quantize_folder(quantized, stored)
    assert {name.split(".")[-2] for name in stands_for} >= {"out_proj", "q_proj", "down_proj"}
    assert {"in_proj_qkvz", "in_proj_qkv"} & {name.split(".")[-2] for name in stands_for}
    edit_tensors(numbers, lambda tensors: tensors.update(stands_for))
    logits = [all_logits(load(folder), IDS[:20]) for folder in (quantized, numbers)]
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-5


def test_a_shared_expert_in_blocks_is_joined_to_its_layers_experts_as_it_is_published(tmp_path):
    shape = {"hidden_size": 128, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    folder = make_hybrid(tmp_path, "qwen3_5_moe", **shape)
    stands_for = quantize_folder(folder, "blocks", within=".mlp.")
    pair, config = planned(folder)
    layers = build_target(config.target).expert_layers()
    weights = read_rank_weights(pair, 1, 0, torch.bfloat16)
    of = torch.bfloat16, torch.device("cpu")
    loaded = multiplied_weights(join_shared_experts(weights, layers, *of, takes=lambda *experts: True), *of)
    assert len(layers) == 4
    for layer in layers:
        experts = Experts.of(loaded, layer, "experts+shared_expert")
        for matrix, names in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
            one = [stands_for[f"model.language_{layer.prefix}shared_expert.{name}_proj.weight"] for name in names]
            assert len(matrix.weight) == 9 and matrix.numbers(8, torch.float32).equal(torch.cat(one))
            assert loaded[f"{layer.prefix}shared_expert.{'gate_up' if names[1:] else 'down'}_proj.weight"].dtype == FP8


@pytest.mark.parametrize("columns", [192, 64])
def test_a_shared_expert_whose_gates_end_within_a_block_is_refused_in_blocks(columns, tmp_path):
    shape = {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": columns}
    folder = make_hybrid(tmp_path, "qwen3_5_moe", **shape)
    quantize_folder(folder, "blocks", within=".mlp.")
    said = r"shared_expert.gate_up_proj.weight of a rank is no whole number of the checkpoint's FP8 blocks of 128"
    with pytest.raises(SettingsError, match=said):
        planned(folder)


@pytest.mark.parametrize(
    ("shape", "linear"),
    [
        ({"head_dim": 64}, "self_attn.qkv_proj"),  # queries and gates in turn
        ({"linear_key_head_dim": 64}, "linear_attn.in_proj"),  # a key head's query, key, values and gates in turn
    ],
)
def test_heads_that_end_within_a_block_are_refused_in_blocks_and_dequantized(shape, linear, tmp_path):
    whole = {"hidden_size": 128, "head_dim": 128, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
    shape = {**whole, **shape}
    quantized, numbers = (make_hybrid(tmp_path / name, "qwen3_next", **shape) for name in ("quantized", "numbers"))
    stands_for = quantize_folder(quantized, "blocks", within="_attn.")
    with pytest.raises(SettingsError, match=rf"{linear}.weight of a rank is no whole number of .* blocks of 128"):
        planned(quantized)
    edit_tensors(numbers, lambda tensors: tensors.update(stands_for))
    logits = [all_logits(load(folder), IDS[:20]) for folder in (quantized, numbers)]
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-5


# -- states ------------------------------------------------------------------------------------------------------------


def logits_of_pieces(llm, ids, sizes):
    """[pieces, V]: the logits of each piece's last token, where a prompt is read in pieces of these sizes."""
    session, seen = llm.session, []
    target = session._step.target
    inner = target.logits
    target.logits = lambda ops, hidden: seen.append(inner(ops, hidden)) or seen[-1]
    try:
        at = 0
        for size in sizes:
            piece = Piece(0, at, ids[at : at + size], last=False)
            session.run(Step([], [piece], Drafting.OFF, 1, False))
            at += len(piece.token_ids)
    finally:
        target.logits = inner
    return torch.cat([logits[0, -1:] for logits in seen])


@pytest.mark.parametrize("inside", [True, False])
def test_the_head_of_an_image_model_is_tied_as_the_whole_says(inside, tmp_path):
    """As transformers ties it, whatever the text model's own settings say."""
    folder = make_hybrid(tmp_path, "qwen3_5")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = inside
    assert read_target_config({**raw, "tie_word_embeddings": not inside}).tied_embeddings is not inside
    raw.pop("tie_word_embeddings", None)
    assert read_target_config(raw).tied_embeddings is inside


def test_an_image_models_text_model_names_its_class_to_modelopt(tmp_path):
    model = _load(make_hybrid(tmp_path, "qwen3_5"), torch.device("cpu"))
    assert model.config.architectures == ["Qwen3_5ForCausalLM"]


@pytest.mark.parametrize("layout", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_prompt_is_read_alike_in_pieces_of_any_size(layout, hybrid, tmp_path):
    folder = hybrid(layout)
    llm = load(folder, make_drafter(tmp_path / "drafter", folder, block_size=16))
    one_by_one = logits_of_pieces(llm, IDS, [1] * len(IDS))
    whole = all_logits(llm, IDS)
    assert (one_by_one - whole).norm(dim=-1).div(whole.norm(dim=-1)).max() < 1e-5
    for sizes in ([5] * 18, [16] * 5 + [10], [64, 26], [1, 17, 2, 16, 3, 51]):
        ends = torch.tensor(sizes).cumsum(0) - 1
        assert torch.equal(logits_of_pieces(llm, IDS, sizes), one_by_one[ends]), sizes


class Oracle:
    """Decodes known texts in a session: drafts what they go on with, up to a random place, and then what they do not.

    Args:
        texts: prompt and reply of each sequence.
    """

    def __init__(self, session, texts, seed):
        self.session, self.texts = session, texts
        self.random = random.Random(seed)
        self.slots = [None] * session.config.max_batch  # the sequence, and how many of its tokens have rows
        self.steps = [0] * len(texts)  # decoding steps of each sequence, since it last began
        self.most = [0] * len(texts)  # of those that were not cancelled
        self.accepted = set()

    def run(self, cancels):
        """Runs until every text has been written once, with so many sequences cancelled on the way."""
        waiting = list(range(len(self.texts)))
        while waiting or any(self.slots):
            for slot, there in enumerate(self.slots):
                if there is None and waiting and self.random.random() < 0.5:
                    self.slots[slot] = [waiting.pop(0), 0]
                elif there is not None and cancels and self.random.random() < 0.02:
                    waiting.append(there[0])
                    self.steps[there[0]] = 0
                    self.slots[slot], cancels = None, cancels - 1
            self._step()

    def _step(self):
        decode, pieces = [], []
        for slot, there in enumerate(self.slots):
            if there is None or self.random.random() < 0.2:
                continue  # takes no part
            index, rows = there
            prompt, reply = self.texts[index]
            if rows < len(prompt):
                ids = prompt[rows : rows + self.random.randint(1, 30)]
                last = rows + len(ids) == len(prompt)
                pieces.append((Piece(slot, rows, ids, last), there, reply[:1]))
            else:
                decode.append((slot, there, self._drafted(slot, reply, rows - len(prompt))))
        if not decode and not pieces:
            return
        counts = [(slot, count) for slot, _, (count, _) in decode]
        step = Step(counts, [piece for piece, _, _ in pieces], Drafting.OFF, 1, False)
        written = self.session.run(step).read()
        for (slot, there, (_, tokens)), ids in zip(decode, written, strict=False):
            assert list(ids) == tokens, (slot, there, self.steps)
            there[1] += len(tokens)
            self.accepted.add(len(tokens) - 1)
            self.steps[there[0]] += 1
            if there[1] + 1 >= sum(map(len, self.texts[there[0]])):
                self.most[there[0]], self.slots[slot] = self.steps[there[0]], None
        for (piece, there, first), ids in zip(pieces, written[len(decode) :], strict=True):
            assert not piece.last or list(ids) == first
            there[1] += len(piece.token_ids)

    def _drafted(self, slot, reply, at):
        """Puts drafts behind a reply's token at a place: the rows, and the tokens that the step must write."""
        most = min(self.session.config.block_size, len(reply) - at - 1)
        count = self.random.randint(1, max(1, most))
        right = min(count - 1, self.random.choice((0, 0, 0, 1, 2, 3, 15)))
        rows = reply[at : at + count]
        rows[right + 1 :] = [(token + 1) % 16 for token in rows[right + 1 :]]
        self.session._slots.tokens[slot, :count] = torch.tensor(rows, dtype=torch.int32)
        return count, reply[at + 1 : at + 2 + right]


def decoded(folder, drafter, lengths, cancels):
    """Decodes prompts plainly, then drafted by an `Oracle`, which it returns.

    Args:
        lengths: of each prompt, and of its reply.
    """
    with load(folder, drafter, max_batch=3, max_seq_len=max(map(sum, lengths)) + 1) as llm:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(0, 15, (n,), generator=generator).tolist() for n, _ in lengths]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in lengths]
        replies = [completion.token_ids for completion in llm.generate(prompts, params, draft=False)]
        oracle = Oracle(llm.session, list(zip(prompts, replies, strict=True)), seed=5)
        oracle.run(cancels)
        return oracle


@pytest.mark.principal("qwen3_5_text")
@pytest.mark.parametrize("layout", ["qwen3_next", "qwen3_5_text"])
def test_blocks_accepted_in_part_leave_the_states_of_plain_decoding(layout, hybrid, tmp_path):
    """Beside prompts that are read, slots that take no part, cancelled and used again; rows change in every step."""
    folder = hybrid(layout, vocab=16)
    lengths = (5, 40), (40, 40), (1, 40), (70, 20)
    oracle = decoded(folder, make_drafter(tmp_path / "drafter", folder, block_size=16), lengths, cancels=2)
    assert oracle.accepted >= {0, 1, 2, 3}


@pytest.mark.exhaustive(beside="test_blocks_accepted_in_part_leave_the_states_of_plain_decoding")
@pytest.mark.slow
def test_so_they_do_over_hundreds_of_steps(hybrid, tmp_path):
    folder = hybrid("qwen3_5_text", vocab=16)
    drafter = make_drafter(tmp_path / "drafter", folder, block_size=16)
    oracle = decoded(folder, drafter, ((30, 930), (1, 930), (50, 30), (9, 30), (90, 20)), cancels=3)
    assert min(oracle.most[:2]) >= 300
    assert oracle.accepted == set(range(16))


# -- sequences ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(hybrid, tmp_path_factory):
    """An engine of few pages, with a drafter like Qwen3.5's; it is right now and then: its vocabulary is of 16."""
    folder, target = tmp_path_factory.mktemp("engine"), hybrid("qwen3_5", vocab=16)
    drafter = make_drafter(folder / "drafter", target, layers=6, tap_layers=(0, 1, 2, 3) * 2, heads=8, head_size=8)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    edit_config(drafter, lambda raw: raw.update(layer_types=kinds, sliding_window=24, use_sliding_window=True))
    pair = {"name": "hybrid", "target": str(target), "drafter": str(drafter), "precision": "fp32"}
    settings = BuildSettings(**pair, max_batch=3, max_seq_len=160, chunk=24, page_size=64, kv_memory=0.00071)
    build(settings, folder / "engine")
    return folder / "engine"


@pytest.mark.slow
def test_drafted_text_is_plain_text_where_sequences_wait_for_pages(engine):
    """Greedy and sampled ones in turn."""
    prompts = [[1, 2, 3, 4] * 12, [2, 3, 4] * 16, [3, 4] * 23, [5], [6, 7] * 20]
    params = SamplingParams(max_tokens=44), SamplingParams(max_tokens=44, temperature=0.8, seed=3)
    asked = [(prompt, params[i % 2]) for i, prompt in enumerate(prompts)]
    with LLM.load(engine, "cpu") as llm:
        plain = [llm.generate([prompt], its, draft=False)[0].token_ids for prompt, its in asked]
        scheduler = Scheduler(llm.session)
        sequences = [llm.intake.sequence(prompt, its, draft=True) for prompt, its in asked]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
    assert [sequence.token_ids for sequence in sequences] == plain
    for some in (sequences[::2], sequences[1::2]):
        assert any(accepted for sequence in some for accepted in sequence.accepted_per_step)
    assert scheduler.statistics.preemptions > 0


def test_states_are_found_by_the_tokens_that_they_stand_behind():
    kept = Checkpoints(slots=3, count=2, pending=4)
    first, second = kept.keep([1, 2, 3, 4, 5, 6], first=0, ends=True), kept.keep([1, 2, 9], first=1, ends=True)
    assert {first.place, second.place} == {3, 4}
    # The first stands behind 2 tokens, with 4 rows beside it, the other behind 1.
    assert [kept.find([1, 2, 3, 4, 8, 8], most)[0] for most in (1, 2, 5)] == [1, 2, 4]
    assert kept.find([7, 2, 3], 3) == (0, None)
    assert kept.keep([1, 2, 9], first=1, ends=True) is None
    kept.use(kept.find([1, 2, 3], 3)[1])
    third = kept.keep([5, 5], first=0, ends=True)
    assert third.place == second.place  # which was used longer ago than the first
    kept.drop(second)
    assert kept.find([5, 5], 2)[1] is third, "another one's place is not given up"
    for _ in range(2):
        kept.drop(third)
    places = {kept.keep([6], first=0, ends=True).place, kept.keep([7], first=0, ends=True).place}
    assert places == {3, 4}, "no two states have one place"


def test_a_state_behind_a_step_that_failed_is_no_prompts_beginning(hybrid, tmp_path):
    """Also where the step after it, one ahead, has copied it already."""
    target = hybrid("qwen3_5_text", vocab=16)
    llm = load(target, make_drafter(tmp_path / "drafter", target, block_size=16), max_batch=2)
    params, prompt = SamplingParams(max_tokens=24, ignore_eos=True), [token % 16 for token in IDS[:30]]
    expected = llm.generate([prompt], params)[0].token_ids
    scheduler, run, steps = Scheduler(llm.session, ahead=1), llm.session.run, []

    def run_with_a_fault(step):
        outcome = run(step)
        steps.append(step)
        if len(steps) == 1:
            for tensor in llm.session.states.tensors.values():
                tensor[0] += 100.0
            outcome.packed = Mock(side_effect=RuntimeError("lost"))
        return outcome

    llm.session.run = run_with_a_fault
    replies = []
    for _ in range(3):
        sequence = llm.intake.sequence(prompt, params)
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        replies.append(sequence)
    assert "lost" in str(replies[0].error)
    assert [sequence.token_ids for sequence in replies[1:]] == [expected, expected]
    assert replies[2].reused > 0


def build_of_16_tokens(hybrid, folder, **limits):
    """Builds an engine in FP32 whose drafter is right now and then: of 16 tokens."""
    target = hybrid("qwen3_5_text", vocab=16)
    pair = {"name": "hybrid", "target": str(target), "drafter": str(make_drafter(folder / "drafter", target))}
    build(BuildSettings(**pair, precision="fp32", **limits), folder / "engine")
    return folder / "engine"


@pytest.mark.parametrize("when", ["launched", "read"])
def test_a_step_that_fails_leaves_no_copy_of_a_state_to_the_next(when, hybrid, tmp_path):
    """It may have made them, or not: by the next, another sequence's state may lie where they would copy from."""
    limits = {"max_batch": 3, "max_seq_len": 320, "page_size": 64, "kv_memory": 0.004}
    llm = LLM.load(build_of_16_tokens(hybrid, tmp_path, **limits), "cpu")
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    known, other = ([(token + more) % 16 for token in IDS[:90]] for more in (0, 5))
    expected = llm.generate([known], params)[0].token_ids
    scheduler, run, copied = Scheduler(llm.session, budget=FixedPrefillBudget(1)), llm.session.run, []
    failed = []

    def run_with_a_fault(step):
        outcome = run(step)
        copied.extend(copy for copy in step.state_copies if waiting and copy[1] < 3)
        if copied and not failed:
            failed.append(step)
            for tensor in llm.session.states.tensors.values():
                tensor[copied[0][1]] += 100.0
            if when == "launched":
                raise RuntimeError("after the copies")
            outcome.packed = Mock(side_effect=RuntimeError("lost"))
        return outcome

    def submit(prompt):
        sequence = llm.intake.sequence(prompt, params)
        scheduler.submit(sequence)
        return sequence

    waiting = []
    llm.session.run = run_with_a_fault
    first = submit(known)
    while scheduler.busy:
        scheduler.step()
    running = submit(other)
    while not running.token_ids:
        scheduler.step()
    # A step takes a token of the next prompt, and none of the one behind it, which goes on from the state that is kept.
    read, unread = submit([(token + 9) % 16 for token in IDS[:90]]), submit(known)
    waiting.append(unread)
    while not failed:
        assert scheduler.busy
        scheduler.step()
    while read.error is None:
        scheduler.step()
    assert running.error is not None and read.error is not None and unread.error is None
    assert scheduler._slots.state_copies == []
    while scheduler.busy:
        scheduler.step()
    assert first.token_ids == unread.token_ids == expected


@pytest.mark.principal("pages")
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "a page a slot"])
def test_a_conversation_goes_on_from_a_state_that_is_kept(paged, hybrid, tmp_path):
    limits = {"page_size": 64, "kv_memory": 0.003} if paged else {}
    engine = build_of_16_tokens(hybrid, tmp_path, max_batch=2, max_seq_len=320, chunk=40, **limits)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    chance = random.Random(1)
    talks = [[[chance.randrange(15) for _ in range(n)]] for n in (30, 75, 130)]
    with LLM.load(engine, "cpu") as llm:
        scheduler = Scheduler(llm.session)
        for turn in range(4):
            prompts = [[*chain.from_iterable(talk)] for talk in talks]
            prompts.append(prompts[1][: 20 + 30 * turn])  # begins as another does, and ends before
            sequences = [llm.intake.sequence(prompt, params) for prompt in prompts]
            for sequence in sequences:
                scheduler.submit(sequence)
            while scheduler.busy:
                scheduler.step()
            for talk, sequence in zip(talks, sequences, strict=False):
                talk += [sequence.token_ids, [chance.randrange(15) for _ in range(chance.randint(1, 20))]]
        # Where each slot has one page, four prompts take turns in two.
        assert scheduler.statistics.reused_tokens > (500 if paged else 200)
        for talk in talks:
            for turn in range(4):
                prompt = [*chain.from_iterable(talk[: 2 * turn + 1])]
                # A new scheduler knows of no rows.
                assert llm.generate([prompt], params, draft=False)[0].token_ids == talk[2 * turn + 1], turn


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "a page a slot"])
def test_the_third_prompt_with_a_common_beginning_goes_on_from_its_end(paged, hybrid, tmp_path):
    limits = {"page_size": 64, "kv_memory": 0.01} if paged else {}
    engine = build_of_16_tokens(hybrid, tmp_path, max_batch=3, max_seq_len=400, chunk=320, **limits)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[token % 15 for token in (IDS * 4)[:280]] + [15, own, *range(14)] * 2 for own in range(3)]
    with LLM.load(engine, "cpu") as llm:
        scheduler, sequences = Scheduler(llm.session), []
        for prompt in prompts:
            sequences.append(llm.intake.sequence(prompt, params))
            scheduler.submit(sequences[-1])
            while scheduler.busy:
                scheduler.step()
        assert [sequence.reused for sequence in sequences] == [0, 0, 281]
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert llm.generate([prompt], params, draft=False)[0].token_ids == sequence.token_ids
            assert any(sequence.accepted_per_step)


def test_inspect_says_how_large_a_slots_state_is(engine, tmp_path):
    said = succeeds("inspect", engine)
    # 3 nets: 4 heads of 16 x 16; 8 pending rows of 4 x 16, 2 x 16 and 4 numbers; 11 rows of 128 channels.
    size = 4 * 3 * (4 * 16 * 16 + 8 * (64 + 32 + 4) + 11 * 128)
    assert f"states (3 slots' and 4 kept of {size / 1e6:.2f} MB) {7 * size / 1e6:.1f} MB" in said
    assert "and 14 K/V caches and 15 tensors of states, updated in place" in said  # 1 + 6 layers attend
    assert json.loads(succeeds("inspect", engine, "--json"))["memory_per_gpu"]["states"] == 7 * size
    plan = shutil.copytree(engine, tmp_path / "plan")
    edit_config(plan, lambda config: config.update(backend="tensorrt", gpu="sm120"))
    shutil.copy(plan / weights_file(0), plan / plan_file(0))
    said = succeeds("inspect", plan)
    assert "states (3 slots' twice and 4 kept of " in said
    assert "and 14 K/V caches, updated in place, and 9 tensors of states, copied behind a step" in said
    with LLM.load(engine, "cpu") as llm:
        session = llm.session
        held = sum(x.nbytes for x in (*session.caches.values(), *session.states.tensors.values()))
        plan = plan_memory(session.config)
        assert held == plan.target_cache + plan.drafter_cache + plan.states


def test_in_bf16_too_drafted_text_is_plain_text(hybrid, tmp_path):
    target = hybrid("qwen3_next", vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target)
    llm = LLM.from_pretrained(target, drafter, precision="bf16", device="cpu", max_batch=2, max_seq_len=128)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    drafted = llm.generate([[1, 2, 3], [4] * 30], params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in llm.generate([[1, 2, 3], [4] * 30], params, False)]


@pytest.mark.slow
def test_steps_of_a_hybrid_are_timed(engine, tmp_path):
    flags = "--batch", 2, "--rounds", 1, "--steps", 3, "--cache-length", 40, "--device", "cpu"
    succeeds("bench", "step", "--engine", engine, *flags, "--json", tmp_path / "steps.json")
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert {row["arm"] for row in rows} == {"plain", "context only", "drafted"}


def test_the_shape_of_qwen3_5_27b_on_eight_ranks():
    config = shape_config("qwen3.5-27b", precision="bf16", tp=8, max_batch=8, max_seq_len=4096, chunk=512)
    shapes = {weight.name: weight.shape(8, 7) for weight in build_target(config.target).weights()}
    net = "model.layers.0.linear_attn."
    # 2 key heads and their 6 value heads of 128 each.
    assert shapes[net + "in_proj.weight"] == (2 * 2 * 128 + 2 * 6 * 128, 5120)
    assert shapes[net + "gates.weight"] == (12, 5120)
    assert shapes[net + "conv1d.weight"] == (10 * 128, 1, 4)
    assert shapes[net + "out_proj.weight"] == (5120, 6 * 128)
    # 3 query heads with their gates, and half of the ranks share a key head.
    assert shapes["model.layers.3.self_attn.qkv_proj.weight"] == ((3 + 1 + 1 + 3) * 256, 5120)
    # As published: 144 MiB of states, 24.1 of pending rows, 17.8 of the convolution's.
    whole = shape_config("qwen3.5-27b", precision="bf16", max_batch=8, max_seq_len=4096, chunk=512, tp=1)
    assert state_bytes(whole) / 2**20 == pytest.approx(144 + 24.1 + 17.8, abs=0.1)
    assert state_bytes(config) * 8 == state_bytes(whole)
    assert whole.drafter.rope.rotary_size is None


def test_a_step_reads_keys_of_the_layers_that_attend_and_states_of_the_others():
    config = shape_config("qwen3.5-27b", precision="bf16", max_batch=8, max_seq_len=4096, chunk=512, tp=1)
    (short,), (long,) = (step_work(config, Drafting.OFF, batch=1, rows=1, length=n) for n in (1000, 2000))
    assert long.bytes - short.bytes == 1000 * 16 * 2 * 4 * 256 * 2
    # Of two rows a slot: a single one leaves states unwritten, mostly.
    (one,), (two,) = (step_work(config, Drafting.OFF, batch=n, rows=2, length=1000) for n in (1, 2))
    keys = 1002 * 16 * 2 * 4 * 256 * 2
    assert two.bytes - one.bytes == keys + 2 * state_bytes(config) + 2 * 5120 * 2


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.principal("qwen3_5_text-False", "qwen3_5_moe, stacked-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ep"),
    [("qwen3_next", False), ("qwen3_5_text", False), ("qwen3_5_moe, stacked", True), ("qwen3_5", False)],
)
def test_two_ranks_decode_as_one_does(layout, ep, hybrid, tmp_path):
    target = hybrid(layout, vocab=16)
    assert_ranks_agree(target, make_drafter(tmp_path / "drafter", target), 2, ep=ep)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--greedy", "--precision", "bf16", "--gpu", "h200"),
            "is a setting of --backend tensorrt; here it is torch, since it has our GPU kernels for gated delta nets",
        ),
        (("--tp", "4"), "--tp 4 does not divide the 2 key heads of its gated delta nets; possible: 1, 2"),
        (
            ("--tp", "8"),
            "--tp 8 does not divide the 4 query heads, nor the 2 key heads of its gated delta nets; possible: 1, 2",
        ),
    ],
)
def test_what_is_not_computed_is_refused(flags, message, hybrid, tmp_path):
    assert message in refusal("build", "--target", hybrid("qwen3_5_text"), *flags, "--output", tmp_path / "engine")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must say linear_attention or full_attention for each of 4"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"linear_num_value_heads": 5}, "5 linear value heads cannot share 2 key heads"),
        ({"linear_num_key_heads": None}, "'linear_num_key_heads' is missing"),
        ({"rope_parameters": {"partial_rotary_factor": "x"}}, "config.json: partial_rotary_factor 'x' is not a number"),
        ({"rope_parameters": {"partial_rotary_factor": float("nan")}}, "partial_rotary_factor nan is not a number"),
        ({"rope_parameters": 1.5}, "config.json: rope_parameters 1.5 is not an object"),
        ({"linear_value_head_dim": 32}, "conv1d.weight [160, 1, 4] instead of [256, 1, 4]"),
    ],
)
def test_a_hybrid_that_is_not_what_its_config_says_is_refused(edit, message, hybrid, tmp_path):
    target = shutil.copytree(hybrid("qwen3_5_text"), tmp_path / "target")
    edit_config(target, lambda raw: raw.update(edit))
    assert message in refusal("build", "--target", target, "--output", tmp_path / "engine")


@needs_cc
def test_on_a_gpu_our_kernels_compute_its_nets_or_it_is_refused_with_the_remedy(engine, tmp_path, monkeypatch):
    config = read_config(engine)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(stub_library(tmp_path)))
    found, why = find_kernels(config, "auto", (9, 0))
    assert found is None
    assert why.startswith("gated delta nets by our CUDA kernels")
    assert "flat rows: " in why
    models = {name: getattr(config, name).model_copy(update={"head_size": 64}) for name in ("target", "drafter")}
    for rotary in (16, 24):
        rope = {"rope": config.target.rope.model_copy(update={"rotary_size": rotary})}
        halves = config.model_copy(
            update={"precision": "bf16", **models, "target": models["target"].model_copy(update=rope)}
        )
        found, why = find_kernels(halves, "auto", (9, 0))
        assert (found is not None) == (rotary == 16)
        assert why.endswith("heads of 64 on SM90" if rotary == 16 else "no RoPE of 24 numbers of 64")
    with pytest.raises(EngineError, match="are for SM90 and later, not for SM89: --device cpu"):
        find_kernels(config, "auto", (8, 9))
    with pytest.raises(EngineError, match="--kernels torch: on a GPU the gated delta nets of hybrid are our kernels'"):
        find_kernels(config, "torch", (9, 0))
    nets = config.target.delta.model_copy(update={"value_size": 24})
    other = config.model_copy(update={"target": config.target.model_copy(update={"delta": nets})})
    with pytest.raises(EngineError, match="heads of 16, 32, 64, 128, keys as values, not of 16 and 24: --device cpu"):
        find_kernels(other, "auto", (9, 0))
