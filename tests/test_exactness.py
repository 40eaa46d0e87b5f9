"""Drafted output is the target's own, token for token."""

import functools

import pytest
import torch

from tests.checkpoints import make_drafter, make_target
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.pairs.prompts import read_prompts

GREEDY = SamplingParams(max_tokens=28, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=28, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.95, seed=11)


def random_prompts(lengths, vocab=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def with_blocks(tiny_at):
    """The shipped pair at a block size, loaded once."""
    return functools.cache(tiny_at)


@pytest.fixture(scope="module")
def plain(tiny):
    """The tokens of prompts without drafting, decoded once."""

    @functools.cache
    def get(prompts, params):
        return tokens(tiny.generate([[{"role": "user", "content": text}] for text in prompts], params, draft=False))

    return get


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small pair of a family and a drafter's format, made and loaded once."""

    @functools.cache
    def load(family, format):
        # A vocabulary of 16: a drafter that knows nothing is still right now and then, so blocks are accepted in part.
        folder = tmp_path_factory.mktemp("small")
        target = make_target(folder / "target", family, vocab=16)
        reduced = 8 if format == "speculators" else None
        drafter = make_drafter(folder / "drafter", target, format=format, draft_vocab=reduced)
        limits = {"max_batch": 4, "max_seq_len": 128}
        return LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", **limits)

    return load


@pytest.mark.principal("z-lab-qwen3-greedy", "speculators-llama-sampled")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("format", ["z-lab", "speculators"])
def test_drafted_text_equals_plain_text(family, format, params, small):
    llm = small(family, format)
    prompts = random_prompts((1, 2, 7, 30, 64, 87), vocab=15)
    drafted = llm.generate(prompts, params)
    assert tokens(drafted) == tokens(llm.generate(prompts, params, draft=False))
    assert any(count for completion in drafted for count in completion.accepted_per_step)


@pytest.mark.principal("greedy-2", "sampled-5")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "block_size"),
    [*((GREEDY, size) for size in range(2, 17)), *((SAMPLED, size) for size in (2, 5, 9, 16))],
    ids=lambda value: value if isinstance(value, int) else "greedy" if value is GREEDY else "sampled",
)
def test_at_every_block_size_the_text_is_the_same(block_size, params, plain, with_blocks):
    texts = tuple(texts[0] for texts in read_prompts(1).values())
    drafted = with_blocks(block_size).generate([[{"role": "user", "content": text}] for text in texts], params)
    assert tokens(drafted) == plain(texts, params)
    accepted = [count for completion in drafted for count in completion.accepted_per_step]
    assert max(accepted) <= block_size - 1
    if params is GREEDY:
        assert sum(accepted) / len(accepted) > 0.35 * (block_size - 1), "acceptance collapsed"


@pytest.mark.exhaustive(beside="tests/test_scheduler.py::test_replies_do_not_depend_on_who_joins_and_leaves")
@pytest.mark.slow
def test_a_reply_does_not_depend_on_what_else_is_in_the_batch(tiny):
    """Greedy and sampled, mixed lengths, more than slots; sequences end inside a block and leave theirs to others."""
    texts = [text for kind in read_prompts(3).values() for text in kind]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    each = [
        (GREEDY, SAMPLED)[i // 2 % 2].model_copy(update={"max_tokens": 5 + 3 * i, "seed": i, "ignore_eos": i % 2 == 0})
        for i in range(len(prompts))
    ]
    together = tiny.generate(prompts, each)
    alone = [tiny.generate([prompt], one)[0] for prompt, one in zip(prompts, each, strict=True)]
    assert tokens(together) == tokens(alone)
    assert tokens(together) == tokens(tiny.generate(prompts, each, draft=False))


@pytest.mark.slow
def test_a_chunked_prompt_gives_the_same_text_and_the_same_acceptance(tiny, tiny_engine, tmp_path):
    from tests.conftest import build_tiny

    build_tiny(tmp_path / "engine", chunk=7)
    texts = [text for kind in read_prompts(1).values() for text in kind]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    with LLM.load(tmp_path / "engine", "cpu") as chunked:
        ours = chunked.generate(prompts, GREEDY)
    whole = tiny.generate(prompts, GREEDY)
    assert tokens(ours) == tokens(whole)
    assert [c.accepted_per_step for c in ours] == [c.accepted_per_step for c in whole]


@pytest.mark.principal("greedy")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompts_of_one_token_and_at_the_context_limit(params, tmp_path):
    target = make_target(tmp_path / "target", vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target)
    llm = LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_batch=2, max_seq_len=64)
    prompts = random_prompts((1, 40, 57, 62, 63), vocab=15)
    endless = params.model_copy(update={"max_tokens": 1000})
    drafted = llm.generate(prompts, endless)
    assert tokens(drafted) == tokens(llm.generate(prompts, endless, draft=False))
    assert [c.prompt_tokens + len(c.token_ids) for c in drafted] == [64] * 5
    assert {c.finish_reason for c in drafted} == {"length"}


@pytest.mark.principal("greedy")
@pytest.mark.parametrize("params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_in_bf16_too_drafted_text_equals_plain_text(params, tiny_at):
    llm = tiny_at(16, precision="bf16")
    texts = [text for kind in read_prompts(1).values() for text in kind]
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in texts]
    drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
    assert tokens(drafted) == tokens(plain)
    accepted = [count for completion in drafted for count in completion.accepted_per_step]
    assert sum(accepted) / len(accepted) > (5 if params is GREEDY else 2)
