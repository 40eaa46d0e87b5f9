"""Penalties, biases and bans change the logits of a row by the reply before it, drafts included."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import TINY
from trtllm_dflash import SamplingParams
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.choosing import TokenMask
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.ops.penalties import BANNED, Penalties
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts

PROMPTS = [[{"role": "user", "content": text}] for texts in list(read_prompts(1).values())[:3] for text in texts]
ODD = [5, 6, 7]  # nothing that the pair has learned: it repeats itself
LENGTH = 16

#: Each parameter, far enough from neutral to change replies of the shipped pair.
PARAMETERS = {
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9},
    "praise": {"frequency_penalty": -1.2, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {11: 6.0, 13: -100.0, 262: -4.5}},
    "min_tokens": {"min_tokens": LENGTH, "ignore_eos": False, "stop_token_ids": (202, 96)},
    "bad_words": {"bad_words": ("float",)},
    "bad_token_sequences": {"bad_token_sequences": ((96,), (925, 925), (925, 579, 579, 579))},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {11: 2.0},
        "bad_token_sequences": ((925, 925),),
    },
}
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "min_p": 0.02, "seed": 3}


def params(name, **more):
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **PARAMETERS[name], **more})


def expected_reply(model, tiny, prompt, asked):
    """A greedy reply by the definitions of the parameters, from transformers' logits."""
    ids, reply = tiny.encode(prompt), []
    ends = asked.stop_token_ids if asked.min_tokens else ()
    runs = tiny.intake.sequence(prompt, asked).bad_runs
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([ids + reply])).logits[0, -1].double()
        counts = Counter(reply)
        for token in {*ids, *reply}:
            factor = asked.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in counts.items():
            logits[token] -= count * asked.frequency_penalty + asked.presence_penalty
        for token, bias in asked.logit_bias.items():
            logits[token] += bias
        if len(reply) < asked.min_tokens:
            logits[list(ends)] = -torch.inf
        for *begin, last in runs:
            if reply[len(reply) - len(begin) :] == begin:
                logits[last] = -torch.inf
        reply.append(int(logits.argmax()))
    return reply


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def unpenalized(tiny):
    return tiny.generate([ODD], SamplingParams(max_tokens=LENGTH, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_reply_is_what_the_definitions_say(name, tiny, model, unpenalized):
    (reply,) = tiny.generate([ODD], params(name))
    assert reply.token_ids == expected_reply(model, tiny, ODD, params(name))
    assert reply.token_ids != unpenalized


@pytest.mark.slow
def test_drafted_text_equals_plain_text_with_each_of_them_in_one_batch(tiny_at):
    """Greedy and seeded; more requests than slots, so that those with penalties follow others in a slot."""
    llm = tiny_at(16)
    asked = [params(name, **(SAMPLED if i % 2 else {})) for i, name in enumerate([*PARAMETERS, "bias", "all"])]
    asked += [SamplingParams(max_tokens=LENGTH, ignore_eos=True)] * 2
    prompts = [[ODD, *PROMPTS][i % 4] for i in range(len(asked))]
    drafted = llm.generate(prompts, asked)
    plain = llm.generate(prompts, asked, draft=False)
    assert [reply.token_ids for reply in drafted] == [reply.token_ids for reply in plain]
    trees = tiny_at(16, draft_tree=15).generate(prompts, asked)  # whose rows follow their own branch
    assert [reply.token_ids for reply in trees] == [reply.token_ids for reply in plain]
    assert sum(reply.accepted_tokens for reply in drafted[:-2]) > 40, "hardly a draft was accepted"


def test_log_probabilities_are_of_the_logits_before_penalties(tiny):
    (reply,) = tiny.generate([ODD], params("bias", logprobs=1))
    (known,) = tiny.generate([ODD + reply.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert reply.logprobs == known.prompt_logprobs[-LENGTH:]
    assert any(its.top_logprobs[0][0] != token for token, its in zip(reply.token_ids, reply.logprobs, strict=True))


def test_min_p_keeps_what_is_likely_beside_the_most_likely():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None, None]
    kept = {0.0: 4, 0.09: 4, 0.11: 3, 0.5: 2, 0.61: 1, 1.0: 1}
    for min_p, count in kept.items():
        drawn = set()
        for i in range(100):
            one, uniform = torch.ones(1), torch.tensor([[i / 100]])
            inputs = SamplingInputs(one, torch.zeros(1).int(), one, uniform, torch.tensor([min_p]))
            drawn.add(int(TorchOps({}, {}).sample(logits, inputs)))
        assert drawn == set(range(count)), min_p


class Half(Solo):
    """One of two ranks, for operations that need nothing of the other."""

    rank, size = 1, 2


def test_a_rank_changes_its_own_part_of_the_vocabulary():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, low=0):
        return torch.randint(low, 3, shape, generator=generator)

    logits = torch.randn(1, 3, 64, generator=generator)
    rows = torch.tensor([0, 2])
    penalties = Penalties(
        rows=rows,
        presence=torch.tensor([0.5, -1.0]),
        frequency=torch.tensor([1.0, 0.25]),
        repetition=torch.tensor([1.5, 0.5]),
        counts=drawn(2, 64).int(),
        in_prompt=drawn(2, 64).bool(),
        bias=torch.randn(2, 64, generator=generator),
        banned=drawn(2, 64) == 0,
        runs=torch.tensor([[[-1, 40], [5, 41]], [[6, 42], [-1, -1]]]).int(),
        recent=torch.tensor([[5], [5]]).int(),
    )
    mask = TokenMask(rows, drawn(2, 2, low=-(2**31)).int())
    whole, part = TorchOps({}, {}), TorchOps({}, {}, Half())
    changed = whole.mask(whole.penalize(logits, penalties), mask)
    assert torch.equal(part.mask(part.penalize(logits[..., 32:], penalties), mask), changed[..., 32:])
    assert torch.equal(changed[:, 1], logits[:, 1])
    assert (changed == -torch.inf).any() and (changed == BANNED).any() and (changed[0, 0] > -1e9).any()
