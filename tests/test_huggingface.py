"""The models against Hugging Face transformers: the same weights, FP32."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import YARN, edit_config, make_target
from tests.family_checks import assert_equals, assert_greedy
from tests.near_ties import all_logits
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.pairs.prompts import read_prompts

pytestmark = pytest.mark.slow

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that a test's positions reach all three bands
}

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3 tied": {"family": "qwen3", "tied": True},
    "qwen3 with biases, sharded file": {"family": "qwen3", "attention_bias": True, "shards": 3},
    "qwen3 one query head a KV head": {"family": "qwen3", "heads": 4, "kv_heads": 4},
    "qwen3 four": {"family": "qwen3", "heads": 4, "kv_heads": 1},
    "qwen3 eight": {"family": "qwen3", "heads": 8, "kv_heads": 1},
    "llama": {"family": "llama"},
    "llama 3.1 rope, one query head a KV head": {"family": "llama", "rope_scaling": LLAMA3, "kv_heads": 4},
    "llama 3.1 rope, eight": {"family": "llama", "rope_scaling": LLAMA3, "heads": 8, "kv_heads": 1},
    "llama 3.1 rope": {"family": "llama", "rope_scaling": LLAMA3},
    "llama 3.1 rope, tied": {"family": "llama", "rope_scaling": LLAMA3, "tied": True, "heads": 8, "kv_heads": 2},
    "llama linear rope": {"family": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


@pytest.mark.principal("qwen3 with biases, sharded file", "llama 3.1 rope, eight", "qwen3 tied", "llama linear rope")
@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_position_and_greedy_text_equal_transformers(case, tmp_path):
    path = make_target(tmp_path / "target", **CASES[case], max_positions=256)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    llm = LLM.from_pretrained(str(path), None, precision="fp32", device="cpu", max_seq_len=256)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 128, (200,), generator=generator).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    actual = all_logits(llm, ids)
    assert (actual - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4

    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in range(1, 15)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    replies = [completion.token_ids for completion in llm.generate(prompts, params)]
    assert {len(reply) for reply in replies} == {8}
    assert_greedy(model, prompts, replies)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_original_positions_beside_the_rope_settings_are_read(scaling, tmp_path):
    original = {"original_max_position_embeddings": scaling["original_max_position_embeddings"]}
    path = make_target(tmp_path, rope_scaling=scaling, max_positions=256)
    edit_config(path, lambda raw: raw.update(original))
    edit_config(path, lambda raw: raw["rope_parameters"].pop("original_max_position_embeddings"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    assert_equals(path, model, prompts=2)


@pytest.mark.principal("2")
@pytest.mark.parametrize("each", [2, 6])  # prompts of a kind
def test_the_shipped_target_equals_transformers_on_prompts_of_every_kind(each, tiny):
    from tests.conftest import TINY

    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    prompts = [
        tiny.encode([{"role": "user", "content": text}]) for kind in read_prompts(each).values() for text in kind
    ]
    assert len(prompts) == 4 * each
    completions = tiny.generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = prompt + completion.token_ids
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0]
        assert (all_logits(tiny, ids) - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4
        # Teacher-forced: each token is the argmax after those before it, which is what greedy text means.
        assert completion.token_ids == expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
