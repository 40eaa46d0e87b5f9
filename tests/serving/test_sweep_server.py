"""`sweep` against the real server: its acceptance is the engine's own, on both arms."""

import pytest

from tests.conftest import refusal, succeeds
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.sweep.dataset import read_dataset
from trtllm_dflash.sweep.results import read_results

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the sweep extra)")


def test_a_sweep_of_the_server_finds_the_engine_s_acceptance(server, tmp_path):
    asked = ("--compare", "plain,draft", "--concurrency", "1,3", "--requests", 4, "--rounds", 1, "--warmup", 1)
    url, tokenizer = ("--url", server.grpc_url), ("--tokenizer", server.engine)
    text = succeeds("sweep", *url, *tokenizer, *asked, "--max-tokens", 32, "--at", 1, "--output", tmp_path)
    results = read_results(tmp_path)
    assert "imposed" not in text
    assert results.complete
    assert [(point.load, point.arm, point.requests) for point in results.points] == [
        (load, arm, 4) for load in (1, 3) for arm in ("plain", "draft")
    ]
    with LLM.load(server.engine, "cpu") as llm:
        prompts = [sample.messages() for sample in read_dataset().shuffled(0).samples[:4]]
        replies = llm.generate(prompts, SamplingParams(max_tokens=32))
    steps = sum(reply.steps for reply in replies)
    for point in results.points:
        assert not point.errors
        assert point.mean_output_tokens == sum(len(reply.token_ids) for reply in replies) / 4
        assert point.mean_prompt_tokens == sum(reply.prompt_tokens for reply in replies) / 4
        assert 0 < point.ttft.p50 <= point.e2e.p50  # a reply of two steps may come at once
        if point.arm == "draft":
            committed = sum(len(reply.token_ids) - 1 for reply in replies)
            assert point.acceptance_length == pytest.approx(committed / steps)
            reached = [sum(n > i for reply in replies for n in reply.accepted_per_step) / steps for i in range(15)]
            assert point.acceptance_by_position == pytest.approx(reached)
        else:
            assert point.acceptance_length is None


def test_a_model_that_takes_tokens_is_not_for_text(server, tmp_path):
    said = refusal("sweep", "--url", server.grpc_url, "--model", "tensorrt_llm", "--output", tmp_path)
    assert "name the ensemble" in said
