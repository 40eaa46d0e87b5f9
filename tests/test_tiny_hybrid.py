"""The shipped hybrid: what it is, that its drafter is accepted, and that drafting changes no token of its text."""

import json
import queue
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trtllm_dflash
from tests.conftest import HYBRID, TINY, succeeds
from tests.family_checks import on_ranks
from tests.near_ties import all_logits
from tests.waiting import PATIENCE
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.catalog import find_entry
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.scheduler import Scheduler

EXAMPLE = Path(trtllm_dflash.__file__).parents[1] / "examples" / "tiny_pair"
#: Measured greedy means, less a margin for another machine's rounding: see examples/tiny_pair/README.md.
LEAST = {"arithmetic": 6.0, "python": 3.5, "json": 4.5, "story": 2.0}
#: Sampled as a user would: some drafts are still right.
SEEDED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def hybrid():
    """The pair in FP32 on the CPU."""
    settings = {"precision": "fp32", "device": "cpu", "max_batch": 8, "max_seq_len": 1024}
    with LLM.from_pretrained(HYBRID / "target", HYBRID / "drafter", **settings) as llm:
        yield llm


def chats(each):
    """Held-out prompts of every kind as conversations."""
    return {kind: [[{"role": "user", "content": text}] for text in texts] for kind, texts in read_prompts(each).items()}


def test_it_is_three_delta_nets_to_one_layer_of_attention_in_less_than_12_mb(hybrid):
    raw = json.loads((HYBRID / "target" / "config.json").read_text())
    assert raw["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert find_entry("tiny-hybrid").family == hybrid.config.target.family == "qwen3_5"
    assert sum(file.stat().st_size for file in HYBRID.rglob("*")) < 12e6
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (HYBRID / "target" / name).read_bytes() == (TINY / "target" / name).read_bytes()


@pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the examples are not beside the package")
def test_what_trained_it_computes_the_logits_of_what_serves_it(hybrid, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    module = import_module("qwen3_5")
    for name in ("qwen3", "qwen3_5"):  # no other test is to find modules of these names
        monkeypatch.delitem(sys.modules, name)
    model = module.Target(module.CONFIG)
    tensors = load_file(HYBRID / "target" / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): values.float() for name, values in tensors.items()})
    ids = hybrid.encode(" ".join(read_prompts(1)["story"] * 2))[:150]  # three chunks, the last not full
    with torch.inference_mode():
        trained = model(torch.tensor([ids]))[0]
    served = all_logits(hybrid, ids)
    assert (served - trained).abs().max() < 1e-3 and served.std() > 1


@pytest.mark.principal("json")
@pytest.mark.slow
@pytest.mark.parametrize("kind", LEAST)
def test_its_drafter_is_accepted(kind, hybrid):
    completions = hybrid.generate(chats(8)[kind], SamplingParams(max_tokens=200))
    tokens = sum(len(c.token_ids) - 1 for c in completions)
    assert tokens / sum(c.steps for c in completions) >= LEAST[kind]


@pytest.mark.principal("greedy")
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=60), SEEDED], ids=["greedy", "seeded"])
def test_drafting_changes_no_token(params, hybrid):
    prompts = [chat for texts in chats(1).values() for chat in texts]
    drafted, plain = (hybrid.generate(prompts, params, draft=draft) for draft in (True, False))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.steps for c in drafted) * 2 < sum(c.steps for c in plain)


def test_two_ranks_write_what_one_does(hybrid):
    prompt = hybrid.encode(chats(1)["json"][0])
    params = SamplingParams(max_tokens=30)
    alone = hybrid.generate([prompt], params)[0].token_ids
    shared = on_ranks(
        HYBRID / "target", HYBRID / "drafter", 2, lambda llm: llm.generate([prompt], params)[0], max_batch=1
    )
    assert shared.token_ids == alone and max(shared.accepted_per_step) > 1


def test_a_second_turn_goes_on_from_a_kept_state_and_shares_the_first_one_s_rows(hybrid):
    params, scheduler = SamplingParams(max_tokens=40), Scheduler(hybrid.session)

    def reply(talk):
        sequence = hybrid.intake.sequence(talk, params, draft=True)
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        return sequence.token_ids, hybrid.codec.decode(sequence.token_ids)

    talk = chats(1)["arithmetic"][0]
    first, said = reply(talk)
    assert scheduler.statistics.reused_tokens == 0
    talk = [*talk, {"role": "assistant", "content": said}, *chats(1)["story"][0]]
    second, _ = reply(talk)
    assert scheduler.statistics.reused_tokens > 20
    # A new scheduler knows of no rows and no states.
    assert hybrid.generate([talk], params, draft=False)[0].token_ids == second
    assert first != second


def test_a_service_of_it_starts_with_its_defaults_and_answers(hybrid):
    """It times steps of slots that have read nothing."""
    prompt, params, ends = chats(1)["json"][0], SamplingParams(max_tokens=12), queue.SimpleQueue()
    service = hybrid.service()
    service.submit(prompt, params, lambda update: ends.put(update) if update.completion or update.error else None)
    end = ends.get(timeout=PATIENCE)
    service.close()
    assert end.error is None
    assert end.completion.token_ids == hybrid.generate([prompt], params, draft=False)[0].token_ids


@pytest.mark.slow
@pytest.mark.exhaustive(beside="tests/test_demo.py::test_json_is_all_that_json_prints_and_has_every_figure")
def test_the_demo_shows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--model", "tiny-hybrid", "--prompts-per-kind", 1, "--max-tokens", 24, "--device", "cpu"
    said = succeeds("demo", *flags)
    assert "NO" not in said and "x " in said
    assert [path.name for path in (tmp_path / "engines").iterdir()] == ["tiny-hybrid"]
