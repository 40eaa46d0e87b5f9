"""Published shapes: every pair of the catalog has one, and each is written as its publisher's config.json is."""

import json

import pytest

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.random_checkpoint import parts_of, write_configs, write_random_pair
from trtllm_dflash.catalog import load_catalog
from trtllm_dflash.checkpoint.drafter_config import read_drafter_config
from trtllm_dflash.cost.published import PUBLISHED
from trtllm_dflash.cost.shapes import drafter_of
from trtllm_dflash.models import build_target, read_target_config


def test_every_pair_of_the_catalog_has_a_published_shape_of_its_family():
    shipped = {"tiny", "tiny-hybrid"}  # as the package has them; the shape called tiny is a smaller one
    for name, entry in load_catalog().items():
        if name not in shipped:
            shape = PUBLISHED[name]
            assert shape.family == entry.family
            assert shape.drafter.heads % shape.drafter.kv_heads == 0
            assert shape.facts == entry.facts


def test_the_text_models_configuration_has_its_layers_and_their_kinds():
    gemma, coder, kimi = (PUBLISHED[name].target for name in ("gemma-4-31b", "qwen3-coder-next", "kimi-k2.5"))
    assert gemma["text_config"]["num_hidden_layers"] == 60
    assert gemma["text_config"]["layer_types"].count("full_attention") == 10
    assert gemma["text_config"]["layer_types"][-1] == "full_attention"
    assert [i for i, kind in enumerate(coder["layer_types"]) if kind == "full_attention"] == list(range(3, 48, 4))
    assert "layer_types" not in kimi["text_config"]
    assert PUBLISHED["qwen3.5-4b"].target["tie_word_embeddings"] is True


def test_a_random_pair_is_in_the_layout_that_is_read_and_drafts(tmp_path):
    target, drafter = write_random_pair(tmp_path, "tiny", layers=3)
    llm = LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", max_seq_len=64)
    assert llm.config.target.layers == 3 and llm.config.drafter.block_size == 8
    (reply,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6))
    assert len(reply.token_ids) == 6


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3-coder-next", "gpt-oss-20b"])
def test_configurations_alone_say_what_the_shape_does(name, tmp_path):
    target, drafter = (json.loads((part / "config.json").read_text()) for part in write_configs(tmp_path, name))
    config = read_target_config(target)
    assert config == read_target_config(PUBLISHED[name].target)
    assert read_drafter_config(drafter) == drafter_of(PUBLISHED[name], config)


def test_a_random_gpt_oss_has_the_published_tensors():
    config = read_target_config(PUBLISHED["gpt-oss-20b"].target)
    parts = {part.key: part for part in parts_of(build_target(config).weights())}
    layer = "model.layers.23."
    shapes = {
        f"{layer}mlp.experts.gate_up_proj_blocks": (32, 5760, 90, 16),
        f"{layer}mlp.experts.gate_up_proj_scales": (32, 5760, 90),
        f"{layer}mlp.experts.gate_up_proj_bias": (32, 5760),
        f"{layer}mlp.experts.down_proj_blocks": (32, 2880, 90, 16),
        f"{layer}mlp.router.weight": (32, 2880),
        f"{layer}self_attn.sinks": (64,),
        f"{layer}self_attn.k_proj.bias": (512,),
        "model.embed_tokens.weight": (201088, 2880),
    }
    assert {key: parts[key].shape for key in shapes} == shapes
    assert len(parts) == 24 * 19 + 3  # as in its index
