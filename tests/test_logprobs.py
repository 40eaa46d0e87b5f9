"""Log-probabilities are the model's own, whatever else is asked, drafted or not, alone or not."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import TINY
from trtllm_dflash import SamplingParams
from trtllm_dflash.ops.choosing import Logprobs
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.logprobs import note_logprobs
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.session.report import Report

ASKED = {"max_tokens": 12, "ignore_eos": True, "logprobs": 20, "prompt_logprobs": 3}
SAMPLED = {"temperature": 0.9, "top_k": 30, "seed": 5}
PROMPTS = [[{"role": "user", "content": text}] for texts in list(read_prompts(1).values())[:3] for text in texts]
MIXED = [{**ASKED, **(SAMPLED if i % 2 else {})} for i in range(len(PROMPTS))]


def test_log_probabilities_are_those_of_transformers(tiny):
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    for prompt, asked in zip(PROMPTS[:2], MIXED, strict=False):
        (reply,) = tiny.generate([prompt], SamplingParams(**asked))
        ids = tiny.encode(prompt)
        with torch.inference_mode():
            expected = model(torch.tensor([ids + reply.token_ids])).logits[0].log_softmax(dim=-1)
        assert reply.prompt_logprobs[0] is None
        found = reply.prompt_logprobs[1:] + reply.logprobs
        assert len(found) == len(ids) + len(reply.token_ids) - 1
        for row, token, its in zip(expected, [*ids[1:], *reply.token_ids], found, strict=False):
            assert its.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert dict(its.top_logprobs) == pytest.approx({i: row[i].item() for i, _ in its.top_logprobs}, abs=1e-4)
            # These are the most likely ones: nothing that is left out is likelier.
            rest = row.clone()
            rest[[i for i, _ in its.top_logprobs]] = -torch.inf
            assert its.top_logprobs[-1][1] >= rest.max().item() - 1e-4
            assert its.top_logprobs == sorted(its.top_logprobs, key=lambda pair: -pair[1])
        assert [len(its.top_logprobs) for its in found] == [3] * (len(ids) - 1) + [20] * len(reply.token_ids)


def test_they_sum_to_one_over_the_vocabulary():
    logits = 9 * torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    found = TorchOps({}, {}).log_probabilities(logits, torch.tensor([[4, 0, 19]]))
    for row, (own, ids, values) in enumerate(zip(found.chosen[0], found.top_ids[0], found.top[0], strict=True)):
        assert sorted(ids.tolist()) == list(range(20))  # of twenty, the twenty most likely are all
        assert math.fsum(values.exp().tolist()) == pytest.approx(1, abs=1e-6)
        assert own == values[ids == (4, 0, 19)[row]]


def test_they_are_the_same_drafted_plain_and_in_any_company_to_the_bit(tiny_at):
    def numbers(completions):
        return [(x.token_ids, x.logprobs, x.prompt_logprobs) for x in completions]

    params, llm = [SamplingParams(**asked) for asked in MIXED], tiny_at(16)
    drafted = llm.generate(PROMPTS, params)
    assert any(completion.accepted_tokens for completion in drafted)
    assert numbers(llm.generate(PROMPTS, params, draft=False)) == numbers(drafted)
    assert numbers(llm.generate(PROMPTS[:1], params[:1])) == numbers(drafted[:1])


def test_they_change_no_reply_and_each_gets_as_many_as_it_asked_for(tiny):
    plain = [SamplingParams(**{**asked, "logprobs": None, "prompt_logprobs": None}) for asked in MIXED]
    expected = tiny.generate(PROMPTS, plain)
    asked = [params.model_copy(update={"logprobs": (None, 0, 2)[i % 3]}) for i, params in enumerate(plain)]
    found = tiny.generate(PROMPTS, asked)
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]
    for params, completion in zip(asked, found, strict=True):
        assert completion.prompt_logprobs is None
        if params.logprobs is None:
            assert completion.logprobs is None
        else:
            assert [len(its.top_logprobs) for its in completion.logprobs] == [params.logprobs] * 12


def test_they_stream_beside_their_tokens(tiny):
    params = SamplingParams(**ASKED)
    (whole,) = tiny.generate([PROMPTS[0]], params)
    chunks = list(tiny.stream(PROMPTS[0], params))
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert [its for chunk in chunks for its in chunk.logprobs] == whole.logprobs
    assert chunks[-1].completion.prompt_logprobs == whole.prompt_logprobs


def test_a_prompt_that_is_read_again_from_its_beginning_has_each_of_them_once():
    """As where its pages were given to others before it was read to its end."""
    sequence = Sequence([5, 6, 7, 8, 9], SamplingParams(prompt_logprobs=0), 1, frozenset())
    for start, count in ((0, 2), (2, 1), (0, 3), (3, 1)):
        rows = torch.arange(start, start + count).float()[None]
        told = Logprobs(rows, torch.zeros(1, count, 0), torch.zeros(1, count, 0))
        note_logprobs(Report(prompts=told, first_prompts=[0, count], starts=[start]), [sequence])
    assert [its.logprob for its in sequence.prompt_logprobs] == [0, 1, 2, 3]
    assert not sequence.awaits_prompt_logprobs
