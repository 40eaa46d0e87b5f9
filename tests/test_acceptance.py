"""Acceptance of the shipped pair. An off-by-one in positions or tap layers keeps the text right and shows only here."""

import pytest

from trtllm_dflash import SamplingParams
from trtllm_dflash.pairs.prompts import read_prompts

pytestmark = pytest.mark.slow

# Measured greedy means, less a margin for another machine's rounding: see examples/tiny_pair/README.md.
LEAST = {"arithmetic": 8.0, "python": 7.0, "json": 8.0, "story": 3.2}


@pytest.mark.principal("json")
@pytest.mark.parametrize("kind", LEAST)
def test_the_shipped_drafter_is_accepted(kind, tiny):
    prompts = [[{"role": "user", "content": text}] for text in read_prompts(16)[kind]]
    completions = tiny.generate(prompts, SamplingParams(max_tokens=256))
    tokens = sum(len(c.token_ids) - 1 for c in completions)
    assert tokens / sum(c.steps for c in completions) >= LEAST[kind]
