"""The parts of a training: masks, anchors, losses and weights equal plain loops; blocks equal those that are served."""

import importlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import make_drafter, make_gpt_oss, make_qwen3_moe, make_target
from tests.conftest import refusal, succeeds
from tests.drafters import make_dflash2
from tests.quantized import quantize_folder
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target
from trtllm_dflash.models.dflash2 import SelectorConfig
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.delta_states import Run
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.drafter import ops_over
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.train.anchors import anchored, eligible_rows, pick_anchors
from trtllm_dflash.train.documents import Document, Pack, Packs, generator
from trtllm_dflash.train.evaluation import Tally
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.head import Head, Selector
from trtllm_dflash.train.loss import block_loss, dpace_weights, exponential_weights
from trtllm_dflash.train.mask import BlockVisibility, CausalVisibility, Flexible, MaskedAttention
from trtllm_dflash.train.network import TrainedDrafter
from trtllm_dflash.train.optimizer import Optimizer, learning_rate
from trtllm_dflash.train.prompts import Record, split
from trtllm_dflash.train.regenerate import read_documents, regenerate, sampling_of
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.state import State

BLOCK = 4


@pytest.fixture(scope="module")
def pack() -> Pack:
    """Three documents: lengths 9, 6 and 7, prompts of 4, 2 and 3 tokens."""
    ids = torch.randint(0, 100, (22,), generator=generator(3)).tolist()
    return Pack.of([Document(ids[:9], 4), Document(ids[9:15], 2), Document(ids[15:], 3)])


# -- packs and anchors -------------------------------------------------------------------------------------------------


def test_an_epoch_has_each_document_once_in_packs_that_are_not_too_long():
    documents = [Document([1] * (3 + i % 7), 1) for i in range(40)]
    packs = Packs(documents, 12, seed=5)
    for epoch in (0, 1):
        lengths = [sum(len(documents[i].token_ids) for i in chosen) for chosen in packs.epoch(epoch)]
        assert sorted(i for chosen in packs.epoch(epoch) for i in chosen) == list(range(40))
        assert max(lengths) <= 12
    assert packs.epoch(0) != packs.epoch(1)
    assert packs.epoch(1) == Packs(documents, 12, seed=5).epoch(1) != Packs(documents, 12, seed=6).epoch(1)


def test_anchors_are_reply_tokens_that_have_a_next_one_in_their_document(pack):
    firsts, expected = [0, 9, 15, 22], []
    for i, document in enumerate(pack.documents):
        expected += range(firsts[i] + document.prompt, firsts[i + 1] - 1)
    assert eligible_rows(pack).tolist() == expected
    drawn = [pick_anchors(pack, 5, generator(0, step)).tolist() for step in range(30)]
    assert all(len(set(rows)) == 5 and set(rows) <= set(expected) and rows == sorted(rows) for rows in drawn)
    assert {row for rows in drawn for row in rows} == set(expected)
    assert drawn[7] == pick_anchors(pack, 5, generator(0, 7)).tolist()
    assert len(pick_anchors(pack, 1000, generator(0, 0))) == len(expected)


def test_labels_are_the_tokens_behind_the_anchor_up_to_the_end_of_its_document(pack):
    rows = eligible_rows(pack)
    anchors = anchored(pack, rows, BLOCK)
    for a, row in enumerate(rows.tolist()):
        for k in range(1, BLOCK):
            inside = row + k < 22 and pack.document[row + k] == pack.document[row]
            assert anchors.counts[a, k - 1] == inside
            if inside:
                assert anchors.labels[a, k - 1] == pack.token_ids[row + k]


def test_labels_of_a_greedy_target_are_its_choices_as_far_as_the_text_follows_them(pack):
    rows = eligible_rows(pack)
    choice = pack.token_ids.roll(-1)  # what the text has next, but for two places
    choice[5], choice[11] = 100, 101
    text, greedy = anchored(pack, rows, BLOCK), anchored(pack, rows, BLOCK, choice)
    for a, row in enumerate(rows.tolist()):
        follows = True
        for k in range(1, BLOCK):
            assert greedy.counts[a, k - 1] == (text.counts[a, k - 1] and follows)
            if greedy.counts[a, k - 1]:
                assert greedy.labels[a, k - 1] == choice[row + k - 1]
                follows = bool(choice[row + k - 1] == pack.token_ids[row + k])
    assert 0 < (text.counts & ~greedy.counts).sum() < text.counts.sum()


# -- the mask, and the block that is drafted under it ------------------------------------------------------------------


def test_the_mask_equals_a_plain_loop(pack):
    rows = torch.tensor([4, 7, 11, 20])
    mask = BlockVisibility(pack, rows, BLOCK).dense()
    tokens = len(pack.token_ids)
    assert mask.shape == (len(rows) * BLOCK, tokens + len(rows) * BLOCK)
    for row in range(len(mask)):
        anchor = int(rows[row // BLOCK])
        for key in range(tokens):
            assert mask[row, key] == (pack.document[key] == pack.document[anchor] and key < anchor)
        for key in range(len(rows) * BLOCK):
            assert mask[row, tokens + key] == (key // BLOCK == row // BLOCK)


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_its_document_up_to_itself(window, pack):
    mask = CausalVisibility(pack, window).dense()
    for row in range(22):
        for key in range(22):
            near = window is None or row - key < window
            assert mask[row, key] == (pack.document[row] == pack.document[key] and key <= row and near)


@pytest.mark.parametrize("size", [4, 8, 12])
def test_rows_in_chunks_attend_as_all_at_once(size, pack, monkeypatch):
    """Each chunk leaves out keys that none of its rows sees."""
    blocks = BlockVisibility(pack, eligible_rows(pack), BLOCK)
    for visibility in (blocks, CausalVisibility(pack), CausalVisibility(pack, 3)):
        draw = partial(torch.randn, generator=generator(6))
        q, k, v = draw(1, 4, visibility.rows, 16), draw(1, 2, visibility.keys, 16), draw(1, 2, visibility.keys, 16)
        whole = F.scaled_dot_product_attention(q, k, v, visibility.dense(), enable_gqa=True)
        monkeypatch.setattr("trtllm_dflash.train.mask._CHUNK", size)
        attention = MaskedAttention(visibility)
        torch.testing.assert_close(attention(q, k, v), whole)
        assert sum(mask.numel() for *_, mask in attention.masks) < visibility.rows * visibility.keys


@pytest.mark.parametrize("block", [8, 10, 16])
def test_flex_attention_skips_no_key_that_a_row_sees(block):
    """Its lists of tiles are made by hand; whatever is not in them is never looked at."""
    lengths, chance = 2 * [70, 300, 9, 411, 130], generator(12)
    pack = Pack.of([Document([1] * length, length // 3) for length in lengths])
    anchors = pick_anchors(pack, 60, chance)
    mask = Flexible(2048, 64, lambda: None).blocks(pack, anchors, block).tiles.to_dense()[0, 0].bool()
    seen = BlockVisibility(pack, anchors, block, 2048, 64).dense()
    padded = F.pad(seen, (0, -seen.shape[1] % 128, 0, mask.shape[0] * 128 - len(seen)))
    needed = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(dim=3).any(dim=1)
    assert not (needed & ~mask[:, : needed.shape[1]]).any()
    assert mask.sum() < mask.numel() / 2


@pytest.mark.slow  # what it imports takes long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_and_the_dense_mask_are_one(pack):
    anchors = eligible_rows(pack)[::2]
    visibility = BlockVisibility(pack, anchors, BLOCK)
    rows, keys = visibility.rows, visibility.keys
    draw = partial(torch.randn, generator=generator(4))
    q, k, v = draw(1, 4, rows, 16), draw(1, 2, keys, 16), draw(1, 2, keys, 16)
    make = Flexible(30, 40, flex_attention)
    torch.testing.assert_close(make.blocks(pack, anchors, BLOCK)(q, k, v), MaskedAttention(visibility)(q, k, v))
    causal = MaskedAttention(CausalVisibility(pack, 3))
    q, k, v = draw(1, 4, 22, 16), draw(1, 2, 22, 16), draw(1, 2, 22, 16)
    torch.testing.assert_close(make.causal(pack, 3)(q, k, v), causal(q, k, v))


def later(module: str, maker: str, **values: object) -> Callable[[Path], object]:
    """Makes a small target of a family that not every release of transformers has."""
    return lambda path: getattr(importlib.import_module(f"tests.{module}"), maker)(path, **values)


LATER = {
    "qwen3-next": later("hybrid_checkpoints", "make_hybrid", layout="qwen3_next"),
    "qwen3.5": later("hybrid_checkpoints", "make_hybrid", layout="qwen3_5"),
    "gemma-4": later("test_gemma4", "make_gemma4"),
    "gemma-4 with experts": later("test_gemma4", "make_gemma4", experts=True),
    "minimax-m2": later("test_minimax_m2", "make_minimax_m2"),
    "kimi-k2.5": later("test_kimi_k25", "make_kimi"),
}


def make_fp8(path: Path) -> None:
    quantize_folder(make_target(path), "channel")


@pytest.mark.principal("qwen3", "fp8", "gpt-oss", "qwen3.5", "minimax-m2")
@pytest.mark.parametrize(
    "make",
    [
        make_target,
        partial(make_target, family="llama"),
        make_gpt_oss,
        make_qwen3_moe,
        make_fp8,
        *(pytest.param(make, marks=pytest.mark.slow) for make in LATER.values()),
    ],
    ids=["qwen3", "llama", "gpt-oss", "qwen3-moe", "fp8", *LATER],
)
def test_blocks_of_a_pack_are_what_the_served_drafter_computes(make, tmp_path):
    make(tmp_path / "target")
    make_drafter(tmp_path / "drafter", tmp_path / "target", attention_bias=True)
    folders = tmp_path / "target", tmp_path / "drafter"
    ids = torch.randint(0, 127, (50,), generator=generator(1)).tolist()
    pack = Pack.of([Document(ids[:30], 10), Document(ids[30:], 5)])
    with LLM.from_pretrained(*folders, device="cpu", max_seq_len=64) as llm:
        checkpoint = open_drafter(folders[1])
        target = FrozenTarget(llm, checkpoint.config.tap_layers)
        assert llm.config.drafter is not None
        trained = TrainedDrafter(llm.config.drafter, target.embedding, 64)
        trained.load({key: checkpoint.folder.read(checkpoint.keys[key]) for key in trained.shapes()})
        rows = eligible_rows(pack)[::5]
        with torch.no_grad():
            logits = F.linear(trained(pack, target.features(pack).taps, rows), target.head)
            served = torch.cat([served_drafts(llm, pack, row, LogitOps) for row in rows.tolist()])
    torch.testing.assert_close(logits, served, atol=1e-4, rtol=1e-4)
    assert len(rows) == 7 and logits.std() > 1


@pytest.mark.slow
def test_gated_delta_nets_keep_their_fp32_under_autocast(tmp_path):
    """As on a GPU, where a drafter is evaluated in BF16."""
    LATER["qwen3.5"](tmp_path / "target")
    ids = torch.randint(0, 127, (90,), generator=generator(1)).tolist()
    pack = Pack.of([Document(ids[:70], 10), Document(ids[70:], 5)])
    with LLM.from_pretrained(tmp_path / "target", None, device="cpu", max_seq_len=128) as llm:
        target = FrozenTarget(llm, (0,))
        exact = target.features(pack).hidden
        with torch.autocast("cpu", torch.bfloat16):
            rounded = target.features(pack).hidden.float()
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_a_chain_of_dflash_2_is_what_the_served_drafter_chooses(tmp_path):
    make_target(tmp_path / "target")
    make_dflash2(tmp_path / "drafter", tmp_path / "target", windows=[None, None])
    ids = torch.randint(0, 127, (50,), generator=generator(1)).tolist()
    pack = Pack.of([Document(ids[:30], 10), Document(ids[30:], 5)])
    with LLM.from_pretrained(tmp_path / "target", tmp_path / "drafter", device="cpu", max_seq_len=64) as llm:
        checkpoint = open_drafter(tmp_path / "drafter")
        target = FrozenTarget(llm, checkpoint.config.tap_layers)
        trained = TrainedDrafter(checkpoint.config, target.embedding, 64)
        trained.load({key: checkpoint.folder.read(checkpoint.keys[key]) for key in trained.shapes()})
        rows = eligible_rows(pack)[::3]
        with torch.no_grad():
            made = trained(pack, target.features(pack).taps, rows)
            head = trained.head(target.head)
            assert head.selector is not None
            hidden, gate = head.parts(made)
            chain = head.selector.choose(head.plain_logits(hidden), gate, pack.token_ids[rows])
            served = torch.cat([served_drafts(llm, pack, row, TorchOps) for row in rows.tolist()])
    assert torch.equal(chain, served)
    assert len(set(map(tuple, chain.tolist()))) > 5


class LogitOps(TorchOps):
    """TorchOps that drafts logits instead of the likeliest tokens."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def served_drafts(llm: LLM, pack: Pack, row: int, kind: type[TorchOps]) -> torch.Tensor:
    """Drafts [1, block - 1, ...] after the token at a place of a pack, by the step's own operations over caches."""
    config = llm.config.drafter
    assert config is not None
    ops, drafter, target = ops_over(llm, kind), Drafter(config), build_target(llm.config.target)
    first = row - int(pack.position[row])
    assert isinstance(llm.session, TorchSession)
    ops.states, ops.runs = llm.session.states, (Run(0, 0, row - first, 0, 0),)  # of gated delta nets
    start, count = torch.zeros(1, dtype=torch.int32), torch.tensor([row - first], dtype=torch.int32)
    features = target.forward(ops, pack.token_ids[None, first:row].int(), start, config.tap_layers)
    context = drafter.context(ops, ops.concat(features.taps), start)
    block = torch.arange(config.block_size, dtype=torch.int32)[None]
    return drafter.draft(ops, context, start, count, pack.token_ids[row : row + 1].int(), block)


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(pack):
    """Anchors, hidden rows [A, 3, 8] and a head [20, 8]."""
    anchors = anchored(pack, eligible_rows(pack), BLOCK)
    anchors.labels.remainder_(20)
    hidden = torch.randn(len(anchors.rows), BLOCK - 1, 8, generator=generator(8), requires_grad=True)
    return anchors, hidden, Head(torch.randn(20, 8, generator=generator(9)))


def plain_dpace(ce: list[float]) -> list[float]:
    """w_j = sum over m >= j of the product of s_i up to m, s_i = (1 - a) exp(-CE_i) + a, a = 0.5."""
    s = [0.5 * math.exp(-value) + 0.5 for value in ce]
    return [sum(math.prod(s[: m + 1]) for m in range(j, len(s))) for j in range(len(s))]


@pytest.mark.parametrize("weighting", ["dpace", "exponential"])
def test_the_loss_and_its_weights_equal_the_published_formulas(weighting, rows):
    anchors, hidden, head = rows
    total = weights = 0.0
    leading = []
    for a in range(len(hidden)):
        count = int(anchors.counts[a].sum())
        logits = (hidden[a] @ head.weight.t()).double().detach()
        ce = [float(F.cross_entropy(logits[k], anchors.labels[a, k])) for k in range(count)]
        weight = plain_dpace(ce) if weighting == "dpace" else [math.exp(-k / (7 * BLOCK / 16)) for k in range(count)]
        total += sum(w * c for w, c in zip(weight, ce, strict=True))
        weights += sum(weight)
        right = [bool(logits[k].argmax() == anchors.labels[a, k]) for k in range(count)]
        leading.append(right.index(False) if False in right else count)
    loss = block_loss(hidden, head, anchors, weighting)
    assert loss.value.item() == pytest.approx(total / weights, rel=1e-5)
    assert loss.accepted.item() == pytest.approx(sum(leading) / len(leading))


def test_weights_are_a_function_of_their_own_block_and_of_rows_that_count():
    ce, counts = torch.tensor([[0.3, 2.0, 0.1, 5.0]]), torch.tensor([[True, True, True, False]])
    assert dpace_weights(ce, counts)[0, :3].tolist() == pytest.approx(plain_dpace([0.3, 2.0, 0.1]))
    assert dpace_weights(ce, counts)[0, 3] == exponential_weights(5, counts)[0, 3] == 0
    published = {16: 7.0, 10: 5.0, 8: 4.0}
    for block, gamma in published.items():
        weights = exponential_weights(block, torch.ones(1, block - 1, dtype=torch.bool))[0]
        assert weights.tolist() == pytest.approx([math.exp(-k / gamma) for k in range(block - 1)])


def test_distillation_is_the_divergence_from_the_target(rows):
    anchors, hidden, head = rows
    teacher = torch.randn(*hidden.shape[:2], 20, generator=generator(10))
    loss = block_loss(hidden, head, anchors, "exponential", lambda part: teacher[part])
    wanted, found = teacher.double().softmax(-1), (hidden @ head.weight.t()).double().softmax(-1)
    each = (wanted * (wanted.log() - found.log())).sum(-1)
    weight = exponential_weights(BLOCK, anchors.counts)
    assert loss.value.item() == pytest.approx((each * weight).sum().item() / weight.sum().item(), rel=1e-5)
    assert block_loss(hidden, head, anchors, "dpace", lambda part: (hidden @ head.weight.t())[part]).value.abs() < 1e-6


@pytest.mark.parametrize("distilled", [False, True])
def test_chunks_of_the_head_change_neither_the_loss_nor_its_gradient(distilled, rows):
    anchors, hidden, head = rows
    logits = torch.randn(*hidden.shape[:2], 20, generator=generator(11))
    teacher = (lambda part: logits[part]) if distilled else None
    whole = block_loss(hidden, head, anchors, "dpace", teacher)
    parts = block_loss(hidden, head, anchors, "dpace", teacher, chunk_bytes=4 * 20 * (BLOCK - 1) * 2)
    assert parts.value.item() == pytest.approx(whole.value.item())
    gradients = [torch.autograd.grad(loss.value, hidden)[0] for loss in (whole, parts)]
    torch.testing.assert_close(*gradients)


def test_the_bias_of_dflash_2_is_by_the_label_before(rows):
    anchors, hidden, plain = rows
    config = SelectorConfig(kind="dflash2", rank=3, candidates=4, multiplier=0.5, softcap=4.0)
    draw = partial(torch.randn, generator=generator(13))
    predecessor, successor, gate = draw(100, 3), draw(20, 3), draw(*hidden.shape[:2], 3)
    head = Head(plain.weight, Selector(config, predecessor, successor))
    logits = head.logits(torch.cat([hidden, gate], dim=-1), anchors.before)
    for a in range(len(anchors.rows)):
        for k in range(BLOCK - 1):
            before = anchors.labels[a, k - 1] if k else anchors.tokens[a]
            score = 4.0 * torch.tanh(0.5 * (plain.weight @ hidden[a, k]) / 4.0)
            bias = (predecessor[before] * gate[a, k] * successor).sum(dim=1)
            torch.testing.assert_close(logits[a, k], score + bias)


def test_the_rate_warms_up_and_ends_near_zero():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.25) and max(rates) == pytest.approx(rates[3], rel=0.01)
    assert rates[50] == pytest.approx(0.5) and rates[99] < 1e-3
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_go_on_from_kept_moments_to_the_bit(kind, tmp_path):
    make_drafter(tmp_path / "drafter", make_target(tmp_path / "target"))
    config = open_drafter(tmp_path / "drafter").config
    whole, first, second = (TrainedDrafter(config, torch.zeros(128, config.hidden_size), 64) for _ in range(3))

    def steps(drafter: TrainedDrafter, optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            for i, parameter in enumerate(drafter.tensors().values()):
                parameter.grad = torch.randn(parameter.shape, generator=generator(number, i))
            optimizer.step(number)

    steps(whole, Optimizer(whole, 1e-2, 6, kind), range(6))
    before = Optimizer(first, 1e-2, 6, kind)
    steps(first, before, range(3))
    second.load({key: p.detach() for key, p in first.tensors().items()})
    after = Optimizer(second, 1e-2, 6, kind)
    after.load({key: x.clone() for key, x in before.tensors().items()}, 3)
    steps(second, after, range(3, 6))
    assert all(torch.equal(p, second.tensors()[key]) for key, p in whole.tensors().items())
    kept = {name.split("/")[0] for name in before.tensors() if name.endswith("down_proj.weight")}
    assert kept == ({"momentum_buffer"} if kind == "muon" else {"exp_avg", "exp_avg_sq"})


def test_muon_moves_a_matrix_alike_in_all_directions(tmp_path):
    make_drafter(tmp_path / "drafter", make_target(tmp_path / "target"))
    config = open_drafter(tmp_path / "drafter").config
    moves = {}
    for kind in ("adamw", "muon"):
        drafter = TrainedDrafter(config, torch.zeros(128, config.hidden_size), 64)
        before = {key: p.detach().clone() for key, p in drafter.tensors().items()}
        for i, parameter in enumerate(drafter.tensors().values()):
            parameter.grad = torch.randn(parameter.shape, generator=generator(i))
        Optimizer(drafter, 1e-2, 1, kind).step(0)
        moves[kind] = {key: p.detach() - before[key] for key, p in drafter.tensors().items()}
    key = "layers.0.mlp.down_proj.weight"
    singular = [torch.linalg.svdvals(moves[kind][key]) for kind in ("adamw", "muon")]
    spread = [float(values.max() / values.min()) for values in singular]
    assert spread[1] < 2 < spread[0]
    # AdamW's first step moves each number by the rate; its later ones, and Muon's, by about a fifth of it.
    assert moves["muon"][key].norm().item() == pytest.approx(0.2 * moves["adamw"][key].norm().item(), rel=0.2)
    assert torch.equal(moves["muon"]["norm.weight"], moves["adamw"]["norm.weight"])


def test_on_a_cpu_muon_multiplies_in_fp32(tmp_path):
    make_drafter(tmp_path / "drafter", make_target(tmp_path / "target"))
    config = open_drafter(tmp_path / "drafter").config
    drafter = TrainedDrafter(config, torch.zeros(128, config.hidden_size), 64)
    for parameter in drafter.tensors().values():
        parameter.grad = torch.ones_like(parameter)
    types = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                types.update(x.dtype for x in args)
            return func(*args, **(kwargs or {}))

    with Products():
        Optimizer(drafter, 1e-2, 1, "muon").step(0)
    assert types == {torch.float32}


def test_a_tally_counts_tokens_a_step_and_shares_by_position():
    tally = Tally()
    tally.add(2, 3)
    tally.add(0, 1)
    assert tally.length == 2.0
    assert tally.by_position == [0.5, 1.0, 0.0]


# -- prompts and state -------------------------------------------------------------------------------------------------


def settings(data: Path, **values: object) -> TrainSettings:
    return TrainSettings.model_validate({"target": "t", "data": data, **values})


def write(file: Path, rows: list[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_file_without_a_prompt_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"--data .*a\.jsonl: holds no prompt"):
        split(settings(write(tmp_path / "a.jsonl", [])))


def test_a_prompt_stays_on_its_side_whatever_else_is_in_the_file(tmp_path):
    rows: list[object] = [{"prompt": f"What is {i} + {i}?", "domain": "sums"} for i in range(200)]
    one = split(settings(write(tmp_path / "a.jsonl", rows), held_out=0.2))
    other = split(settings(write(tmp_path / "b.jsonl", [rows[0], *rows[100:], *rows[:50]]), held_out=0.2))
    sides = {record.id: False for record in one.training} | {record.id: True for record in one.held_out}
    assert len(sides) == 200 and 20 <= len(one.held_out) <= 60
    assert {record.id for record in other.held_out} <= {id for id, held in sides.items() if held}
    assert len(other.training) + len(other.held_out) == 150  # the one that is there twice counts once
    assert {record.domain for record in one.training} == {"sums"}


def test_general_data_is_the_share_that_was_asked_for(tmp_path):
    own = write(tmp_path / "own.jsonl", [{"prompt": f"own {i}", "domain": "own"} for i in range(300)])
    general = write(tmp_path / "all.jsonl", [{"prompt": f"all {i}", "domain": "all"} for i in range(300)])
    parts = split(settings(own, general=general, general_share=0.2))
    assert sum(record.domain == "all" for record in parts.training) == pytest.approx(0.2 * len(parts.training), abs=1)
    assert any(record.domain == "all" for record in parts.held_out)


def test_general_prompts_are_no_larger_a_share_of_what_is_measured_on(tmp_path):
    own = write(tmp_path / "own.jsonl", [{"prompt": f"own {i}", "domain": "own"} for i in range(300)])
    general = write(tmp_path / "all.jsonl", [{"prompt": f"all {i}", "domain": "all"} for i in range(3000)])
    parts = split(settings(own, general=general, general_share=0.2, held_out=0.2, evaluate_on=50))
    assert len(parts.held_out) == 50
    assert sum(record.domain == "all" for record in parts.held_out) == 10
    assert len(split(settings(own, general=general, general_share=0.6, evaluate_on=1)).held_out) == 1


def test_conversations_end_before_the_reply_and_thinking_has_its_share(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[object] = [{"messages": [{"role": "system", "content": str(i)}, *messages]} for i in range(100)]
    parts = split(settings(write(tmp_path / "a.jsonl", rows), thinking=0.25))
    records = parts.training + parts.held_out
    assert all(record.messages is not None and record.messages[-1]["role"] == "user" for record in records)
    assert 10 <= sum(bool(record.thinking) for record in records) <= 40


def test_replies_are_the_target_s_or_a_record_s_own_and_are_made_once(tmp_path):
    records = [
        Record("a", 1, "x", prompt_ids=[1, 2, 3], reply_ids=[9] * 99),
        Record("b", 2, "y", prompt_ids=list(range(40)), reply_ids=[5, 6]),
        Record("c", 3, "y", prompt_ids=[4, 5], reply_ids=[7, 8]),
    ]
    params = SamplingParams(max_tokens=6)
    rates: list[tuple[int, int]] = []
    quiet = {"progress": lambda *_: None, "on_rate": lambda rate, left: rates.append((rate.tokens, left))}
    with LLM.from_pretrained(make_target(tmp_path / "target"), None, device="cpu", max_seq_len=32) as llm:
        greedy = [llm.generate([record.prompt_ids or []], params)[0].token_ids for record in (records[0], records[2])]
        assert regenerate(llm, records, tmp_path / "asked", params, keep=False, **quiet) == 1  # b is too long
        assert [list(d.token_ids[d.prompt :]) for d in read_documents(tmp_path / "asked")] == greedy
        assert rates == [(6, 1)]

        # b is as long as the engine: nothing of its reply is left.
        assert regenerate(llm, records, tmp_path / "kept", params, keep=True, **quiet) == 1
        kept = read_documents(tmp_path / "kept")
        assert [(list(d.token_ids), d.prompt, d.domain) for d in kept] == [
            ([1, 2, 3] + [9] * 29, 3, "x"),
            ([4, 5, 7, 8], 2, "y"),
        ]

        whole = (tmp_path / "asked").read_text()
        (tmp_path / "asked").write_text(whole[:-9])  # killed while it wrote
        regenerate(llm, records, tmp_path / "asked", params, keep=False, **quiet)
        assert (tmp_path / "asked").read_text() == whole


def test_replies_are_sampled_as_the_target_s_own_configuration_says(tmp_path):
    file = tmp_path / "generation_config.json"
    assert sampling_of(tmp_path, None, 9) == SamplingParams(max_tokens=9)
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    assert sampling_of(tmp_path, None, 9) == SamplingParams(max_tokens=9, temperature=0.6, top_k=20, top_p=0.95)
    assert sampling_of(tmp_path, 0.0, 9) == SamplingParams(max_tokens=9)
    file.write_text(json.dumps({"do_sample": True, "temperature": -1}))
    with pytest.raises(SettingsError, match=r"generation_config\.json: temperature"):
        sampling_of(tmp_path, None, 9)


@pytest.mark.parametrize(
    "line",
    ["[1]", '{"text": "a"}', '{"messages": []}', '{"prompt_ids": [1, -2], "reply_ids": [1]}', '{"prompt_ids": [1]}'],
)
def test_a_line_that_is_no_record_is_named(line, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(SettingsError, match=r"--data .*a\.jsonl: line 3 is not a JSON object with"):
        split(settings(file))


def test_a_state_directory_belongs_to_its_target_its_settings_and_one_process(tmp_path):
    folder = tmp_path / "state"
    with State.opened(folder, "a" * 64) as state:
        assert state.begin("split", {"held_out": 0.1})
        state.write("made.txt", "1")
        state.finish("split", "made.txt", count=1)
        with pytest.raises(SettingsError, match="another training is using it"), State.opened(folder, "a" * 64):
            pass
    with pytest.raises(SettingsError, match="belongs to a target with other files"), State.opened(folder, "b" * 64):
        pass
    with State.opened(folder, "a" * 64) as state:
        assert not state.begin("split", {"held_out": 0.1})
        assert state.facts("split") == {"count": 1}
        with pytest.raises(SettingsError, match=r"--held-out: .* was begun with 0\.1, not 0\.2"):
            state.begin("split", {"held_out": 0.2})
        (folder / "made.txt").write_text("2")
        with pytest.raises(SettingsError, match=r"made\.txt: is missing or has changed"):
            state.begin("split", {"held_out": 0.1})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(SettingsError, match="is no state directory"), State.opened(tmp_path / "other", "a"):
        pass


def test_a_training_that_cannot_begin_leaves_no_state_directory(tmp_path):
    folder = tmp_path / "state"
    with pytest.raises(SettingsError, match="no data"), State.opened(folder, "a") as state:
        state.begin("split", {})
        raise SettingsError("no data")
    assert not folder.exists()
    with State.opened(folder, "a"):
        pass
    with pytest.raises(SettingsError), State.opened(folder, "a"):  # which was there
        raise SettingsError("no data")
    assert (folder / "manifest.json").exists()


def test_a_full_disk_is_said_in_one_line_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    said = pytest.raises(SettingsError, match="cannot be written \\(No space left on device\\)")
    with said, State.opened(tmp_path / "state", "a") as state:
        state.write("file", "before")
        monkeypatch.setattr(Path, "write_text", full)
        state.write("file", "after")
    monkeypatch.undo()
    assert (tmp_path / "state" / "file").read_text() == "before"
    assert not list((tmp_path / "state").glob(".*"))
    with State.opened(tmp_path / "state", "a") as state, pytest.raises(SettingsError, match="no space for checkpoints"):
        state.check_space("checkpoints", 10**18)


@pytest.mark.parametrize("line", ['{"prompt": "a \\ud800"}', '{"prompt": "a", "domain": "\\ud800"}', "[" * 100_000])
def test_a_record_of_half_characters_or_without_end_is_named(line, tmp_path):
    make_target(tmp_path / "target")
    (tmp_path / "a.jsonl").write_text('{"prompt": "b"}\n' + line + "\n")
    words = ("--target", tmp_path / "target", "--output", tmp_path / "out", "--data", tmp_path / "a.jsonl")
    assert "a.jsonl: line 2 is not a JSON object" in refusal("train", *words, "--mask-token", 9)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(64)))
    assert "split: " in succeeds("train", *words, "--mask-token", 9, "--until", "split")


def test_wrong_input_is_refused_in_one_line(tmp_path):
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", tmp_path / "target")
    data = write(tmp_path / "a.jsonl", [{"prompt": "b"}])
    place = ("--target", tmp_path / "target", "--output", tmp_path / "out")
    masked = (*place, "--mask-token", 9)
    given = (*place, "--data", data)
    begun = (*given, "--from", tmp_path / "drafter")
    assert "cannot be read (No such file" in refusal("train", *masked, "--data", tmp_path / "none.jsonl")
    assert "none of the prompts is held out" in refusal("train", *masked, "--data", data)
    assert "--mask-token: every row of the embedding" in refusal("train", *given)
    assert "--taps 1,x" in refusal("train", *given, "--taps", "1,x")
    assert "--taps 4: the target has layers 0 to 3" in refusal("train", *given, "--taps", "1,4")
    assert "--until build" in refusal("train", *given, "--until", "build")
    for number in ("inf", "nan", "0"):
        assert "--rate" in refusal("train", *given, "--rate", number)
        assert "--hours" in refusal("train", *given, "--hours", number)
    assert "--objective l1" in refusal("train", *given, "--objective", "l1")
    assert "--block: the drafter of --from has 8" in refusal("train", *begun, "--block", 16)
    assert "--pack 64: is shorter than --max-seq-len 128" in refusal(
        "train", *begun, "--max-seq-len", 128, "--pack", 64
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", str(2**64)], "--seed 18446744073709551616: Input should be less than 9223372036854775808"),
        (["--rate", "1e300"], "--rate 1e+300: Input should be less than or equal to 1"),
        (["--hours", "1e308"], "--hours 1e+308: Input should be less than or equal to 1000000"),
        (["--max-tokens", str(2**31)], "--max-tokens 2147483648: Input should be less than 2147483648"),
        (["--max-batch", str(2**31)], "--max-batch 2147483648: Input should be less than 2147483648"),
        (["--packs", "2147483647"], "--packs 2147483647: Input should be less than or equal to 65536"),
        (["--layers", "5000"], "--layers 5000: Input should be less than or equal to 1024"),
        (["--block", "5000"], "--block 5000: Input should be less than or equal to 1024"),
        (["--taps", "-1,2"], "--taps -1,2: give layers as numbers from 0, each once: 1,9,17, or auto"),
        (["--taps", "1,1"], "--taps 1,1: give layers as numbers from 0, each once: 1,9,17, or auto"),
        (["--steps", "4", "--epochs", "2"], "--steps and --epochs: give one of them"),
        (["--general-share", "0.3"], "--general-share goes with --general FILE"),
        (["--taps", "1,x"], "--taps 1,x: give layers as numbers from 0, each once: 1,9,17, or auto"),
        (
            ["--attention", "flex", "--device", "cpu"],
            "--attention flex: torch trains with it on a GPU alone; leave it out",
        ),
    ],
)
def test_a_number_that_nothing_is_trained_with_is_refused_by_its_flag(words, says, tmp_path):
    """It ended with a traceback once the replies were there, or was refused by another name."""
    folders = ["--target", "nowhere", "--data", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    assert refusal("train", *folders, *words) == f"error: {says}"
