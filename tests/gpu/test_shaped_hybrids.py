"""Log-probabilities, penalties and structured output of hybrids, in captured steps of [slots, rows]."""

import json

import pytest

from tests.conftest import HYBRID
from tests.gpu.test_cuda import NEAR_TIE, tokens
from tests.gpu.test_kernels import why_not
from tests.gpu.test_shaped import CHAT, SAMPLED, requests, values
from tests.near_ties import all_logits, is_near_tie, rounding_gap
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.cuda_session import CudaSession

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def load(precision, device="cuda"):
    limits = {"max_batch": 3, "max_seq_len": 512}
    return LLM.from_pretrained(HYBRID / "target", HYBRID / "drafter", precision=precision, device=device, **limits)


@pytest.fixture(scope="module")
def exact():
    with load("fp32", "cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def gpu():
    with load("fp32") as llm:
        assert isinstance(llm.session, CudaSession)
        yield llm


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_in_fp32_text_and_log_probabilities_are_the_cpus(gpu, exact, sampling):
    prompts, asked = requests(sampling)
    expected = exact.generate(prompts, asked)
    for draft in (True, False):
        found = gpu.generate(prompts, asked, draft=draft)
        for i, (reply, other) in enumerate(zip(found, expected, strict=True)):
            assert reply.token_ids == other.token_ids, (draft, i, asked[i])
            assert values(reply) == pytest.approx(values(other), abs=2e-4)
        assert not draft or sum(reply.accepted_tokens for reply in found) > 20


def test_conversations_go_on_from_states_that_such_steps_kept(gpu, exact):
    scheduler = Scheduler(gpu.session)
    talk = gpu.encode(CHAT)
    for turn in range(4):
        asked = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)
        sequence = gpu.intake.sequence(talk, asked)
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        assert sequence.token_ids == exact.generate([talk], asked)[0].token_ids, turn
        talk = talk + sequence.token_ids + [40 + turn, 50, 60, 70]
    assert scheduler.statistics.reused_tokens > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_replies_keep_to_what_was_asked(precision, exact):
    prompts, asked = requests({"ignore_eos": True})
    asked = [
        each.model_copy(update={"ignore_eos": False, "max_tokens": 80}) if each.structured else each for each in asked
    ]
    with load(precision) as llm:
        drafted, plain = llm.generate(prompts, asked), llm.generate(prompts, asked, draft=False)
        dtype = llm.config.dtype
    for replies in (drafted, plain):
        for prompt, each, reply in zip(prompts, asked, replies, strict=True):
            if each.structured:
                assert set(json.loads(reply.text or "")) <= {"name"}, reply.text
            text = "," + "".join(f"{token}," for token in reply.token_ids)
            assert not any("," + "".join(f"{token}," for token in run) in text for run in each.bad_token_sequences)
            assert 13 not in reply.token_ids or each.logit_bias.get(13, 0) > -100
            its = reply.logprobs or []
            assert all(one.logprob <= 0 for one in its)
            if its and each.structured is None and each.presence_penalty == 0:  # nothing but the target chooses
                ids = exact.encode(prompt) if prompt is CHAT else prompt
                rows = all_logits(exact, ids + reply.token_ids)[len(ids) - 1 : -1]
                for token, logits, one in zip(reply.token_ids, rows, its, strict=True):
                    gap = rounding_gap(4 * NEAR_TIE, logits, dtype)
                    assert is_near_tie(logits, token, gap)
                    assert one.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=gap)
    same = sum(map(list.__eq__, tokens(drafted), tokens(plain)))
    print(f"{precision}: {same} of {len(plain)} drafted texts are the plain ones")
    assert same >= len(plain) // 2  # others have near-ties
    assert sum(reply.accepted_tokens for reply in drafted) > 40


def test_no_such_step_is_captured_after_preparation(gpu, captures):
    prompts, asked = requests({})
    gpu.generate(prompts, asked)  # what is prepared for once
    captures.clear()
    gpu.generate(prompts, asked)
    gpu.generate(prompts, asked, draft=False)
    assert not captures
