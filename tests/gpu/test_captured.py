"""Captured steps: the same tokens as on the CPU in any order of shapes, and no wait for the device in the loop."""

import random
import time
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from tests.gpu.test_cuda import KERNELS, NEAR_TIE, acceptance, load_tiny, shipped_prompts, tokens
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.engine.ladder import draft_lengths
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.draft_length import DraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.step import Drafting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class RandomDraftLength(DraftLength):
    """Any length at any step: every kind of graph, in any order."""

    lengths = tuple(draft_lengths(16))

    def __init__(self) -> None:
        self._chance = random.Random(8)

    def choose(self, slots: int) -> int:
        return self._chance.choice(self.lengths)


def test_graphs_in_any_order_give_the_tokens_of_the_cpu(tiny: LLM) -> None:
    llm, prompts = load_tiny("fp32"), shipped_prompts(5)
    assert isinstance(llm.session, CudaSession)
    sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
    params = [SamplingParams(max_tokens=40, seed=i, **(sampled if i % 3 == 1 else {})) for i in range(len(prompts))]
    scheduler = Scheduler(llm.session, draft_length=RandomDraftLength())
    sequences = [
        llm.intake.sequence(prompt, its, draft=i % 5 != 4)
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True))
    ]
    chance = random.Random(1)
    waiting = list(sequences)
    while waiting or scheduler.busy:
        if waiting and chance.random() < 0.4:
            scheduler.submit(waiting.pop(0))
        scheduler.step()
    expected = tiny.generate(prompts, params)
    assert [s.completion().token_ids for s in sequences] == [c.token_ids for c in expected]


def test_no_step_is_captured_after_preparation(captures: list[object]) -> None:
    """Of any mix of requests: a scheduler prepares when it is made, and what was loaded had prepared for replies."""
    llm, prompts = load_tiny("bf16"), shipped_prompts(5)
    captures.clear()
    llm.generate(prompts[:9], SamplingParams(max_tokens=20))
    llm.generate(prompts[:3], SamplingParams(max_tokens=20, temperature=0.8), draft=False)
    assert not captures
    scheduler = Scheduler(llm.session, draft_length=RandomDraftLength())
    assert captures
    captures.clear()
    chance = random.Random(2)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=chance.randint(1, 60), temperature=0.8 * (i % 3 == 0), seed=i)
        scheduler.submit(llm.intake.sequence(prompt, params, draft=i % 4 != 0))
        for _ in range(chance.randint(0, 4)):
            scheduler.step()
    while scheduler.busy:
        scheduler.step()
    assert not captures
    assert not scheduler.statistics.requests["failed"]


def test_a_step_that_was_not_prepared_for_is_refused() -> None:
    session = load_tiny("bf16").session
    session.prefill(Prefill(0, 0, [5] * 20, True, Drafting.CONTEXT, 1))
    with pytest.raises(EngineError, match="a greedy step of 1 slots and 1 rows, drafting context, was not prepared"):
        session.decode(Decode([1], Drafting.CONTEXT, 1, False))


def test_nothing_in_the_loop_waits_for_the_device() -> None:
    """torch raises at every synchronising call between the first launch and the last."""
    llm = load_tiny("bf16")
    session = llm.session
    session.prepare(Prepare((15,), sampled=True))
    prompt = llm.encode(shipped_prompts(1)[0])
    steps = [Decode([16] * 4, Drafting.BLOCK, 16, sampled) for sampled in (False, True)]

    def loop() -> list[object]:
        outcomes: list[object] = []
        for slot in range(4):
            outcomes.append(session.prefill(Prefill(slot, 0, prompt, True, Drafting.BLOCK, 16)))
        for step in steps * 4:
            outcomes.append(session.decode(step))
        return outcomes

    loop()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_adaptive_length_changes_no_text(tiny: LLM, tmp_path) -> None:  # type: ignore[no-untyped-def]
    folders = str(TINY / "target"), str(TINY / "drafter")
    llm = LLM.from_pretrained(*folders, precision="fp32", device="cuda", max_batch=4, max_seq_len=1024)
    service = llm.service(ServiceSettings(draft_length="auto"))
    replies: dict[int, list[int]] = {}
    prompts = shipped_prompts(4)
    done = [False] * len(prompts)

    def taker(i: int):  # type: ignore[no-untyped-def]
        def take(update) -> None:  # type: ignore[no-untyped-def]
            assert update.error is None
            replies.setdefault(i, []).extend(update.token_ids)
            done[i] = update.completion is not None

        return take

    for i, prompt in enumerate(prompts):
        service.submit(prompt, SamplingParams(max_tokens=48), taker(i))
    while not all(done):
        assert service.failure is None
        time.sleep(0.01)
    service.close()
    expected = tiny.generate(prompts, SamplingParams(max_tokens=48))
    assert [replies[i] for i in range(len(prompts))] == [c.token_ids for c in expected]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_fp8_caches_keep_the_acceptance_and_most_texts(precision: str) -> None:
    """In captured steps, with our kernels and (FP32) with torch's; near-ties may turn."""
    prompts, params = shipped_prompts(8), SamplingParams(max_tokens=96)
    folders = str(TINY / "target"), str(TINY / "drafter")
    limits: dict[str, Any] = {"precision": precision, "device": "cuda", "max_batch": 8, "max_seq_len": 1024}
    limits["kernels"] = KERNELS
    with LLM.from_pretrained(*folders, **limits, kv="fp8") as fp8, LLM.from_pretrained(*folders, **limits) as wide:
        assert {cache.dtype for cache in fp8.session.caches.values()} == {torch.float8_e4m3fn}
        drafted, plain = fp8.generate(prompts, params), fp8.generate(prompts, params, draft=False)
        expected = wide.generate(prompts, params)
        ids, texts = [fp8.encode(prompt) for prompt in prompts], (tokens(drafted), tokens(plain))
        same = assert_only_near_ties_differ(fp8, ids, *texts, params, dtype=torch.bfloat16, count=NEAR_TIE)
    print(acceptance(drafted), acceptance(expected), same, len(prompts))
    assert acceptance(drafted) == pytest.approx(acceptance(expected), rel=0.15)
    assert same >= len(prompts) // 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_kernels_draft_as_well_as_torch_does(precision: str) -> None:
    prompts, params = shipped_prompts(8), SamplingParams(max_tokens=96)
    if KERNELS == "torch":
        pytest.skip("the CUDA kernels are not built (make kernels)")
    with_kernels, without = load_tiny(precision, draft_tree="off"), load_tiny(precision, kernels="torch")
    found, expected = with_kernels.generate(prompts, params), without.generate(prompts, params)
    assert acceptance(found) == pytest.approx(acceptance(expected), rel=0.05)
    ids, texts = [without.encode(prompt) for prompt in prompts], (tokens(found), tokens(expected))
    same = assert_only_near_ties_differ(without, ids, *texts, params, dtype=without.config.dtype, count=NEAR_TIE)
    assert same >= len(prompts) // 2  # stories have near-ties
