"""Log-probabilities, penalties and masks on a GPU: the kernels against torch, and captured steps against the CPU's."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from tests.gpu.test_cuda import KERNELS
from tests.gpu.test_kernels import why_not
from tests.gpu.test_ragged_attention import ints
from tests.gpu.test_rows import LAYOUTS, Layout
from tests.test_penalties import PARAMETERS, params
from trtllm_dflash import LLM, SamplingParams, Structured, kernels
from trtllm_dflash.ops.base import Ops
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.penalties import Penalties, penalized
from trtllm_dflash.session.calls import Guide, MadeMasks, Piece, SlotPenalties, Step
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.penalties import _recent
from trtllm_dflash.step import Drafting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_kernels = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

Tensor = torch.Tensor

SIZES = [1000, 1003, 2048]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PRECISIONS = ["fp32", *(pytest.param(precision, marks=needs_kernels) for precision in ("bf16", "fp16"))]


# -- the kernels -------------------------------------------------------------------------------------------------------


def kept_of(layout: Layout, vocabulary: int) -> kernels.KeptPenalties:
    """Random penalties of all slots but every third; runs that the replies end with are among them."""
    slots, choose = layout.slots, random.Random(5)
    generator = torch.Generator().manual_seed(7)
    counts = torch.randint(-6, 4, (slots, vocabulary), generator=generator).clamp(min=0).int()
    recent = torch.randint(0, min(1000, vocabulary), (slots, 7), generator=generator).int()
    recent[::5, :4] = -2  # short replies
    runs = torch.full((slots, 64, 8), -1, dtype=torch.int32)
    for slot in range(slots):
        reply = [*recent[slot].tolist(), *layout.tokens[slot]]
        for place in range(0, 64, 2):
            end, length = choose.randrange(1, len(reply)), choose.randrange(0, 8)
            begin = [token for token in reply[max(0, end - length) : end] if token >= 0]
            if choose.random() < 0.3 and begin:
                begin[0] = (begin[0] + 1) % vocabulary  # no match
            run = [*begin, choose.randrange(vocabulary)]
            runs[slot, place, -len(run) :] = torch.tensor(run)
    bias = torch.randn(slots, vocabulary, generator=generator) * (
        torch.rand(slots, vocabulary, generator=generator) < 0.1
    )
    tensors: dict[str, Tensor] = {
        "penalized": (torch.arange(slots) % 3 != 2).int(),
        "presence": torch.randn(slots, generator=generator),
        "frequency": torch.randn(slots, generator=generator),
        "repetition": torch.rand(slots, generator=generator) + 0.5,
        "counts": counts,
        "in_prompt": torch.rand(slots, vocabulary, generator=generator) < 0.2,
        "bias": bias,
        "ends": torch.rand(slots, vocabulary, generator=generator) < 0.05,
        "ends_from": torch.randint(0, 1000, (slots,), generator=generator).int(),
        "runs": runs,
        "recent": recent,
    }
    return kernels.KeptPenalties(**{name: x.cuda() for name, x in tensors.items()})


def masks_of(logits: int, vocabulary: int) -> kernels.RowMasks:
    """Random masks of every other row, in any order."""
    words = torch.randint(-(2**31), 2**31 - 1, (max(logits // 2, 1), -(-vocabulary // 32)), dtype=torch.int32)
    rows = torch.full((logits + 3,), -1, dtype=torch.int32)
    rows[1:logits:2] = torch.randperm(logits // 2).int()[: len(rows[1:logits:2])]
    return kernels.RowMasks(words.cuda(), rows.cuda())


def expected_shape(logits: Tensor, rows: kernels.Rows, kept: kernels.KeptPenalties, masks: kernels.RowMasks) -> Tensor:
    """Computes `kernels.shape_logits` by torch's operations, each row for itself; it can be captured."""
    count, device = len(logits), logits.device
    logit, row, slot = torch.arange(count, device=device), rows.logit_rows.long(), rows.logit_slot.long()
    segment = rows.row_segment[row].long().clamp(min=0)
    is_real = logit < rows.logit_first[-1]
    counts = torch.cat([rows.decoding[:, 3], rows.decoding.new_zeros(1)])
    decodes = counts[segment.clamp(max=len(rows.decoding))] > 0
    said = torch.where(decodes & is_real, logit - rows.logit_first[segment] + 1, 0)
    place = torch.arange(len(rows.token_ids), device=device)
    follows = (place <= row[:, None]) & (place > (row - said)[:, None])
    ids = rows.token_ids.long()
    penalties = Penalties(
        rows=logit,
        presence=kept.presence[slot],
        frequency=kept.frequency[slot],
        repetition=kept.repetition[slot],
        counts=kept.counts[slot].scatter_add(1, ids.expand_as(follows), follows.int()),
        in_prompt=kept.in_prompt[slot],
        bias=kept.bias[slot],
        banned=kept.ends[slot] & (rows.logit_position + 1 < kept.ends_from[slot])[:, None],
        runs=kept.runs[slot],
        recent=_recent(kept.recent[slot], ids, follows),
    )
    changes = (kept.penalized[slot] != 0) & is_real
    out = torch.where(changes[:, None], penalized(logits.float(), penalties), logits.float())
    which = masks.rows[:count]
    bits = masks.words[which.clamp(min=0)][..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool() | ((which < 0) | ~is_real)[:, None]
    return out.masked_fill(~allowed, -torch.inf)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("one", "decode", "idle", "piece", "mixed", "together")])
def test_the_kernel_shapes_logits_as_torch_does(layout: Layout, vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows = layout.begin()
    count = len(rows.logit_rows)
    logits = (4 * torch.randn(count, vocabulary, device="cuda")).to(dtype)
    kept, masks = kept_of(layout, vocabulary), masks_of(count, vocabulary)
    found = kernels.shape_logits(logits, rows, kept, masks, 0)
    expected = expected_shape(logits, rows, kept, masks)
    wrong = (found != expected).nonzero()
    errors = (found - expected).abs().nan_to_num(0)
    print(f"{len(wrong)} differ, by at most {errors.max().item():.3g}; first {wrong[:1].tolist()}")
    assert (found == -torch.inf).equal(expected == -torch.inf)
    assert (found == -1e30).equal(expected == -1e30)
    assert (expected == -1e30).any() or len(layout.decodes) < 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("one", "decode", "idle", "piece", "mixed", "together")])
def test_rows_that_change_in_nothing_are_chosen_from_without_a_copy(
    layout: Layout, vocabulary: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    rows = layout.begin()
    count = len(rows.logit_rows)
    logits = (4 * torch.randn(count, vocabulary, device="cuda")).round().to(dtype)
    kept, masks = kept_of(layout, vocabulary), masks_of(count, vocabulary)
    every = kernels.shape_logits(logits, rows, kept, masks, 0)
    shaped, is_shaped = kernels.shape_changed_logits(logits, rows, kept, masks, 0)
    is_real = torch.arange(count, device="cuda") < rows.logit_first[-1]
    changes = is_real & ((kept.penalized[rows.logit_slot.long()] != 0) | (masks.rows[:count] >= 0))
    assert is_shaped.bool().equal(changes)
    assert changes.any() or not layout.decodes
    assert shaped[changes].equal(every[changes])
    for found, expected in zip(
        kernels.argmax(logits[None], (shaped, is_shaped)), kernels.argmax(every[None]), strict=True
    ):
        assert found.equal(expected)


@needs_kernels
def test_log_probabilities_that_nobody_wants_are_not_computed() -> None:
    logits, ids, wanted = torch.randn(3, 1003, device="cuda"), ints([1, 2, 3]), ints([1])
    kernels.log_probabilities(logits, ids, 5, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.log_probabilities(logits, ids, 5, wanted)
    graph.replay()
    before = [x.clone() for x in found]
    logits.neg_()
    after = kernels.log_probabilities(logits, ids, 5)
    for is_wanted, expected in ((0, before), (1, after)):
        wanted.fill_(is_wanted)
        graph.replay()
        assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


@needs_kernels
def test_each_rank_shapes_its_own_tokens() -> None:
    layout, vocabulary = LAYOUTS["mixed"], 2048
    rows = layout.begin()
    logits = torch.randn(len(rows.logit_rows), vocabulary, device="cuda")
    kept, masks = kept_of(layout, vocabulary), masks_of(len(logits), vocabulary)
    parts = [
        kernels.shape_logits(part.contiguous(), rows, kept, masks, 512 * rank)
        for rank, part in enumerate(logits.split(512, dim=1))
    ]
    assert torch.cat(parts, dim=1).equal(kernels.shape_logits(logits, rows, kept, masks, 0))


@needs_kernels
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("one", "decode", "idle", "piece", "mixed", "together")])
def test_replies_go_on_by_what_was_accepted(layout: Layout) -> None:
    vocabulary = 1000
    rows, said = layout.begin(), layout.expected()
    kept = kept_of(layout, vocabulary)
    accepted = [max(0, min(count - 1, index % 5)) for index, (*_, count) in enumerate(said["segments"])]
    counts, recent = kept.counts.tolist(), kept.recent.tolist()
    for (slot, _, first, count), drafts in zip(said["decoding"], accepted, strict=False):
        if count and slot % 3 != 2:
            tokens = said["token_ids"][first : first + drafts + 1]
            for token in tokens:
                counts[slot][token] += 1
            recent[slot] = [*recent[slot], *tokens][-7:]
    kernels.keep_replies(rows, kept, ints(accepted))
    assert kept.recent.tolist() == recent
    assert kept.counts.tolist() == counts


@needs_kernels
def test_likely_tokens_that_few_threads_read_are_all_found() -> None:
    """More of them than candidates have place: the row is then looked at token by token."""
    logits = torch.full((2, 151936), -9.0, device="cuda", dtype=torch.bfloat16)
    numbers = torch.arange(151936, device="cuda")
    logits[1, numbers // 8 % 512 < 20] = (torch.randn(151936, device="cuda")[numbers // 8 % 512 < 20]).bfloat16()
    _, top_ids, _ = kernels.log_probabilities(logits, ints([0, 0]), 20)
    assert top_ids.long().equal(logits.double().sort(dim=1, descending=True, stable=True).indices[:, :20])


def logits_of(kind: str, rows: int, size: int) -> Tensor:
    if kind == "equal":
        return torch.zeros(rows, size, device="cuda")
    x = 5 * torch.randn(rows, size, device="cuda")
    return x.round() if kind == "ties" else x.sort(dim=1).values if kind == "sorted" else x


@needs_kernels
@pytest.mark.parametrize("kind", ["random", "ties", "sorted", "equal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 25), (5, 1003), (140, 2048), (3, 151936)], ids=str)
def test_the_kernels_log_probabilities_are_torchs(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(2)
    rows, size = shape
    logits, count = logits_of(kind, rows, size).to(dtype), min(20, size)
    ids = torch.randint(0, size, (rows,), device="cuda").int()
    chosen, top_ids, top = kernels.log_probabilities(logits, ids, count)
    every = logits.double().log_softmax(dim=1)
    expected = every.gather(1, ids.long()[:, None])[:, 0]
    order = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :count]
    print(f"largest error {(chosen - expected).abs().max().item():.3g}")
    assert top_ids.long().equal(order)
    torch.testing.assert_close(chosen.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(top.double(), every.gather(1, order), rtol=0, atol=1e-5)


# -- captured steps ----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "additionalProperties": False}
FORM = Structured(kind="json_schema", value=SCHEMA)
ODD = [5, 6, 7]
CHAT = [{"role": "user", "content": "Give me a JSON object for a user."}]
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "min_p": 0.02}


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[..., LLM]]:
    """The shipped pair on the GPU with three slots, loaded once in each precision."""
    load = cache(load_engine)
    yield load
    load.cache_clear()


def load_engine(precision: str) -> LLM:
    folders = str(TINY / "target"), str(TINY / "drafter")
    limits: dict[str, Any] = {"max_batch": 3, "max_seq_len": 256}
    return LLM.from_pretrained(*folders, precision=precision, device="cuda", kernels=KERNELS, **limits)


def requests(sampling: dict[str, Any]) -> tuple[list[Any], list[SamplingParams]]:
    """One request of each kind, and such as ask for nothing beside them."""
    common = {"max_tokens": 32, "seed": 3, **sampling}
    asked = [params(name, **common) for name in PARAMETERS]
    asked += [SamplingParams(**common, logprobs=20, prompt_logprobs=2), SamplingParams(**common)]
    asked += [SamplingParams(**common, structured=FORM), SamplingParams(**common, structured=FORM, logprobs=1)]
    asked += [SamplingParams(**common), SamplingParams(**common, logprobs=0, structured=FORM, presence_penalty=0.7)]
    return [CHAT if each.structured or i % 2 else ODD for i, each in enumerate(asked)], asked


def values(reply: Any) -> list[float]:
    its = [*(reply.logprobs or []), *(reply.prompt_logprobs or [])]
    return [number for each in its if each for number in (each.logprob, *(value for _, value in each.top_logprobs))]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_in_fp32_text_and_log_probabilities_are_the_cpus(
    engine: Callable[..., LLM], sampling: dict[str, Any], tiny: LLM
) -> None:
    """By torch's kernels, on [slots, rows]."""
    llm = engine("fp32")
    prompts, asked = (part[:3] + part[-6:] for part in requests(sampling))
    expected = tiny.generate(prompts, asked)
    for draft in (True, False):
        found = llm.generate(prompts, asked, draft=draft)
        for i, (reply, other) in enumerate(zip(found, expected, strict=True)):
            assert reply.token_ids == other.token_ids, (draft, i, asked[i])
            assert values(reply) == pytest.approx(values(other), abs=1e-4)


@needs_kernels
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_our_kernels_and_torchs_operations_choose_the_same_tokens(
    engine: Callable[..., LLM], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same logits: in captured steps of flat rows, drafted and plain, greedy and sampled."""
    texts = []
    for is_ours in (True, False):
        if not is_ours:

            def shape(self: Any, logits: Tensor, shapes: Any, token_ids: Tensor, start: Tensor) -> Tensor:
                return expected_shape(logits[0], self._layout, shapes.penalties, shapes.masks)[None]

            monkeypatch.setattr(CudaOps, "shape", shape)
            monkeypatch.setattr(CudaOps, "argmax_shaped", Ops.argmax_shaped)
        llm = engine(precision) if is_ours else load_engine(precision)
        texts.append(
            [
                [reply.token_ids for reply in llm.generate(*requests(sampling), draft=draft)]
                for sampling in ({}, SAMPLED)
                for draft in (True, False)
            ]
        )
    for i, (ours, torchs) in enumerate(zip(*texts, strict=True)):
        assert ours == torchs, i
    for drafted, plain in (texts[0][:2], texts[0][2:]):
        print(precision, sum(a == b for a, b in zip(drafted, plain, strict=True)), "of", len(plain), "are plain text")


@needs_kernels
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_replies_keep_to_what_was_asked(engine: Callable[..., LLM], precision: str) -> None:
    llm = engine(precision)
    prompts, asked = requests({"ignore_eos": True})
    asked = [
        each.model_copy(update={"ignore_eos": False, "max_tokens": 80}) if each.structured else each for each in asked
    ]
    drafted, plain = llm.generate(prompts, asked), llm.generate(prompts, asked, draft=False)
    for replies in (drafted, plain):
        for each, reply in zip(asked, replies, strict=True):
            if each.structured:
                assert set(json.loads(reply.text or "")) <= {"name"}, reply.text
            text = "," + "".join(f"{token}," for token in reply.token_ids)
            assert not any("," + "".join(f"{token}," for token in run) in text for run in each.bad_token_sequences)
            assert 13 not in reply.token_ids or each.logit_bias.get(13, 0) > -100
            assert all(its.logprob <= 0 for its in reply.logprobs or [])
    same = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    print(f"{same} of {len(plain)} drafted texts are the plain ones")
    assert same >= len(plain) // 2  # others have near-ties
    assert sum(reply.accepted_tokens for reply in drafted) > 40


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probabilities_of_a_reply_are_those_of_its_text_as_a_prompt(
    engine: Callable[..., LLM], precision: str
) -> None:
    llm = engine(precision)
    (reply,) = llm.generate([ODD], SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3))
    (known,) = llm.generate([ODD + reply.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=3))
    again = [its.logprob for its in (known.prompt_logprobs or [])[-40:] if its]
    errors = [abs(a.logprob - b) for a, b in zip(reply.logprobs or [], again, strict=True)]
    print(f"largest difference {max(errors):.3g}")
    assert max(errors) < (1e-4 if precision == "fp32" else 0.3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_such_step_is_captured_after_preparation(
    engine: Callable[..., LLM], precision: str, captures: list[object]
) -> None:
    llm = engine(precision)
    captures.clear()
    prompts, asked = requests({})
    llm.generate(prompts, asked)
    llm.generate(prompts, asked, draft=False)
    llm.generate(prompts[:3], requests(SAMPLED)[1][:3])
    assert not captures


def test_drafts_are_read_once_their_step_has_made_them(engine: Callable[..., LLM]) -> None:
    session = engine("bf16").session
    session.run(Step([], [Piece(0, 0, ODD, True)], Drafting.BLOCK, 16, sampled=False))
    for _ in range(8):
        session.run(Step([(0, 16)], [], Drafting.BLOCK, 16, sampled=False))
        found = session.drafts([0])
        torch.cuda.synchronize()
        assert found == [session._slots.tokens[0, 1:].tolist()]


@pytest.mark.skipif(KERNELS == "torch", reason="the CUDA kernels are not built (make kernels)")
def test_nothing_in_such_steps_waits_for_the_device(engine: Callable[..., LLM]) -> None:
    llm = engine("bf16")
    session = llm.session
    assert isinstance(session, CudaSession)
    words = -(-session.config.target.vocab_size // 32)
    penalties = SlotPenalties(ODD, [], presence=0.5, bias=((4, 1.0),), end_ids=(1,), ends_from=9, bad_runs=((5, 6),))

    def run(decode: list[tuple[int, int]], pieces: list[Piece], drafts: list[int]) -> Outcome:
        masks = MadeMasks(words, [-1] * words * (1 + len(drafts)))
        step = Step(decode, pieces, Drafting.BLOCK, 16, sampled=False, guides=[Guide(1, drafts)], masks=masks)
        return session.run(replace(step, logprobs=True, penalized=[0, 1, 2]))

    def loop() -> list[Outcome]:
        pieces = [Piece(slot, 0, ODD, True, next_ids=[6, 7], penalties=penalties) for slot in range(3)]
        return [run([], pieces, [])] + [run([(0, 16), (1, 3), (2, 16)], [], [7, 8]) for _ in range(6)]

    loop()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = loop()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(ids) > 0 for outcome in outcomes for ids in outcome.read())
