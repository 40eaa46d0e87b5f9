"""MiniMax-M2.x: against Hugging Face transformers, drafted, and divided among ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import edit_config, edit_tensors, fill, make_drafter
from tests.conftest import refusal
from tests.family_checks import assert_drafting_changes_nothing, assert_equals, assert_ranks_agree, random_ids
from tests.quantized import quantize_folder
from tests.stub_kernels import needs_cc, stub_library
from trtllm_dflash import LLM
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.errors import EngineError
from trtllm_dflash.kernels import LIBRARY_VARIABLE
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.ops.base import AttentionLayer, MoELayer
from trtllm_dflash.ops.experts import route
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.choice import find_kernels

transformers = pytest.importorskip("transformers", "5.19", reason="transformers computes MiniMax-M2 so since 5.19")

pytestmark = pytest.mark.slow


def make_minimax_m2(path: Path, **values: Any) -> Path:
    """A MiniMax-M2 as transformers saves it, which is as published but for FP8; settings as published."""
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.MiniMaxM2Config(**{**shape, **values})
    fill(transformers.MiniMaxM2ForCausalLM(config), torch.Generator().manual_seed(0)).save_pretrained(path)

    def publish(raw: dict[str, Any]) -> None:
        raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
        raw.update(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
        raw.update(shared_intermediate_size=0, attn_type_list=[1] * config.num_hidden_layers)

    return edit_config(path, publish)


def minimax_pair(folder: Path) -> tuple[Path, Path]:
    target = make_minimax_m2(folder / "target", vocab_size=16)
    return target, make_drafter(folder / "drafter", target, heads=8, seed=3)


def test_minimax_m2_equals_transformers(tmp_path):
    path = make_minimax_m2(tmp_path)
    assert_equals(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


@pytest.mark.parametrize(
    "changes",
    [
        {},  # a theta of 5e6, and not the 1e4 of others
        {"partial_rotary_factor": 0.25},  # before rotary_dim
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
    ],
)
def test_rotary_settings_mean_what_transformers_takes_them_to_mean(changes, tmp_path):
    path = make_minimax_m2(tmp_path, num_hidden_layers=1)
    edit_config(path, lambda raw: (raw.pop("rope_theta"), raw.update(changes)))
    assert_equals(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), prompts=2)


def test_drafted_text_of_minimax_m2_equals_plain_text(tmp_path):
    assert_drafting_changes_nothing(*minimax_pair(tmp_path))


@pytest.mark.principal("2")
@pytest.mark.parametrize("ranks", [2, 4])  # of four, two share each key head
def test_ranks_norm_queries_and_keys_as_one_does(ranks, tmp_path):
    assert_ranks_agree(*minimax_pair(tmp_path), ranks)


def test_text_in_fp8_blocks_is_that_of_the_same_numbers_unquantized(tmp_path):
    shape = {"hidden_size": 128, "num_key_value_heads": 8, "intermediate_size": 128, "num_hidden_layers": 2}
    stored, numbers = (make_minimax_m2(tmp_path / name, **shape) for name in ("stored", "numbers"))
    stands_for = quantize_folder(stored, "blocks")
    assert f"model.layers.0.block_sparse_moe.experts.{7}.w3.weight" in stands_for
    edit_tensors(numbers, lambda tensors: tensors.update(stands_for))
    texts = [
        LLM.from_pretrained(path, None, precision="fp32", device="cpu", max_seq_len=64).generate(random_ids(20, 31))
        for path in (stored, numbers)
    ]
    assert [c.token_ids for c in texts[0]] == [c.token_ids for c in texts[1]]


def test_random_weights_for_timing_are_in_the_formats_of_the_checkpoint(tmp_path):
    sides = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 8, "num_hidden_layers": 1}
    target = make_minimax_m2(tmp_path, **sides)
    quantize_folder(target, "blocks")
    config = LLM.from_pretrained(target, None, device="cpu", max_seq_len=64).config
    made = random_weights(config, 0, torch.device("cpu"))
    read = read_rank_weights(open_pair(target), 1, 0, config.dtype)
    assert {n: (t.shape, t.dtype) for n, t in made.items()} == {n: (t.shape, t.dtype) for n, t in read.items()}
    assert made["model.layers.0.mlp.experts.down_proj.weight"].dtype == FP8


def test_the_correction_bias_is_kept_in_fp32_whatever_the_engine_s_type(tmp_path):
    llm = LLM.from_pretrained(make_minimax_m2(tmp_path), None, precision="bf16", device="cpu", max_seq_len=64)
    bias = llm.session.weights["model.layers.0.mlp.router.correction_bias"]
    name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    assert torch.equal(bias, load_file(tmp_path / "model.safetensors")[name])
    assert llm.generate(random_ids(20))[0].token_ids


def test_a_row_of_a_router_and_of_normed_projections_depends_on_no_other_row():
    generator = torch.Generator().manual_seed(0)
    layer = MoELayer("mlp.", 7, 0, 7, 3, normalized=True, scores="sigmoid")
    logits, bias = 3 * torch.randn(101, 7, generator=generator), torch.randn(7, generator=generator)
    attention = AttentionLayer("l.", "rope", 3, 1, 16, None)
    weights = {f"l.self_attn.{n}_norm.weight": torch.randn(s, generator=generator) for n, s in (("q", 48), ("k", 16))}
    ops, qkv = TorchOps(weights, {}), torch.randn(1, 101, 80, generator=generator)
    (ids, shares), normed = route(layer, logits, bias), ops.norm_projections(attention, qkv, 1e-6)
    for rows in (1, 2, 7, 16, 33):
        some_ids, some_shares = route(layer, logits[3 : 3 + rows], bias)
        assert torch.equal(some_ids, ids[3 : 3 + rows])
        assert torch.equal(some_shares, shares[3 : 3 + rows])
        assert torch.equal(ops.norm_projections(attention, qkv[:, 3 : 3 + rows], 1e-6), normed[:, 3 : 3 + rows])
    scores = torch.sigmoid(logits)
    torch.testing.assert_close(shares, scores.gather(1, ids) / scores.gather(1, ids).sum(1, keepdim=True))
    assert torch.equal(ids.sort().values, (scores + bias).topk(3).indices.sort().values)


def test_the_published_configuration_of_minimax_m2_is_read():
    published = {
        "model_type": "minimax_m2",
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
    config = read_target_config(published)
    assert (config.rope.rotary_size, config.rope.theta) == (64, 5e6)
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.scores) == (256, 8, "sigmoid")
    shapes = {weight.name: weight.shape(8, 7) for weight in build_target(config).weights()}
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (6 * 128,)
    assert shapes["model.layers.61.mlp.router.correction_bias"] == (256,)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"attn_type_list": [1, 0, 1]}, "attn_type_list names other attention than 1, softmax's"),
        ({"rotary_dim": 7}, "7 of a head's 16 dimensions cannot be rotated in pairs"),
        ({"num_local_experts": None}, "'num_local_experts' is missing"),
    ],
)
def test_a_minimax_m2_of_another_kind_is_refused(edit, message, tmp_path):
    path = make_minimax_m2(tmp_path / "target", num_hidden_layers=1)
    edit_config(path, lambda raw: raw.update(edit))
    assert message in refusal("build", "--target", path, "--output", tmp_path / "engine")


@needs_cc
def test_on_gpus_our_kernels_compute_its_flat_rows(tmp_path, monkeypatch):
    monkeypatch.setenv(LIBRARY_VARIABLE, str(stub_library(tmp_path)))
    path = make_minimax_m2(tmp_path / "target", num_hidden_layers=1, head_dim=64, rotary_dim=32)
    config = LLM.from_pretrained(path, None, precision="bf16", device="cpu", max_seq_len=64).config
    found, why = find_kernels(config, "auto", (9, 0))
    assert found is not None and why == "heads of 64 on SM90"
    with pytest.raises(EngineError, match="--kernels exact: not with norms over whole projections; leave it out"):
        find_kernels(config, "exact", (9, 0))
