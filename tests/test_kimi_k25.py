"""Kimi-K2.5: against Hugging Face transformers' DeepSeek-V3, drafted, in INT4, and divided among ranks."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.checkpoints import edit_config, edit_tensors, fill, make_drafter
from tests.conftest import refusal, succeeds
from tests.family_checks import assert_drafting_changes_nothing, assert_equals, assert_ranks_agree
from trtllm_dflash import LLM
from trtllm_dflash.build.transcoding import nvfp4_error
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.cost.memory import cache_shapes, plan_memory
from trtllm_dflash.cost.published import published_shape
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.ops.base import LatentLayer
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.nvfp4 import rounded_to_nvfp4
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.choice import find_kernels

pytestmark = pytest.mark.slow

EXPERTS = 8


def make_kimi(path: Path, *, factor: float = 64.0, int4: bool = True, **values: Any) -> tuple[Path, torch.nn.Module]:
    """A Kimi-K2.5 in the published layout, and the same numbers in transformers' DeepSeek-V3.

    Published: a wrapper's names and configuration, and each expert's matrices packed as INT4.
    """
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    rope: dict[str, Any] = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"rope_type": "yarn", "rope_theta": 50000.0, "original_max_position_embeddings": 64}
    config = DeepseekV3Config(**{**shape, **values}, rope_parameters=dict(rope))
    model = DeepseekV3ForCausalLM(config).eval()
    fill(model, torch.Generator().manual_seed(0))
    if int4:
        _round_to_int4(model)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps  # transformers leaves out the configuration's
    model.save_pretrained(path)
    edit_tensors(path, lambda tensors: _publish(tensors, int4))

    def wrap(raw: dict[str, Any]) -> None:
        text = {key: raw.pop(key) for key in list(raw)}
        text.update(model_type="kimi_k2", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        rope = text.pop("rope_parameters")
        text.update(rope_theta=rope.pop("rope_theta"), rope_scaling={**rope, "type": rope.pop("rope_type")})
        if int4:
            weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}
            groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
            text["quantization_config"] = {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": groups,
            }
        raw.update(model_type="kimi_k25", text_config=text)

    return edit_config(path, wrap), model


def _round_to_int4(model: torch.nn.Module) -> None:
    """Rounds the experts of a model to what INT4 stands for, in place."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks = parameter.data.unflatten(-1, (-1, 32))
            scale = (blocks.abs().amax(dim=-1, keepdim=True) / 7.5).bfloat16().float()
            parameter.data = ((blocks / scale).round().clamp(-8, 7) * scale).flatten(-2)


def _publish(tensors: dict[str, torch.Tensor], int4: bool) -> None:
    """Names tensors as Kimi's are, and packs the experts' matrices."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        name = "language_model." + name
        if not int4 or ".mlp.experts." not in name:
            tensors[name] = tensor.clone()
            continue
        blocks = tensor.unflatten(-1, (-1, 32))
        # All numbers are whole multiples of the scale: found again from the largest, which is 7 or 8 of them.
        scale = torch.stack([(blocks.abs().amax(dim=-1) / most).bfloat16().float() for most in (7, 8)])
        off = ((blocks / scale[..., None]) - (blocks / scale[..., None]).round()).abs().amax(dim=-1)
        scale = torch.where(off[0] <= off[1], scale[0], scale[1])
        whole = ((blocks / scale[..., None]).round().flatten(-2) + 8).int().unflatten(-1, (-1, 8))
        prefix = name.removesuffix("weight")
        tensors[prefix + "weight_packed"] = (whole << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1).int()
        tensors[prefix + "weight_scale"] = scale.bfloat16()
        tensors[prefix + "weight_shape"] = torch.tensor(tensor.shape)
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 2)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(2, 2)


def kimi_pair(folder: Path, **values: Any) -> tuple[Path, Path]:
    target, _ = make_kimi(folder / "target", vocab_size=16, **values)
    return target, make_drafter(folder / "drafter", target, seed=3)


@pytest.mark.parametrize("factor", [64.0, 8.0])
def test_kimi_equals_deepseek_v3_of_transformers_in_int4(factor, tmp_path):
    path, model = make_kimi(tmp_path, factor=factor)
    assert_equals(path, model, prompts=20 if factor == 64 else 5)


def test_what_is_left_of_yarn_scales_no_scores_of_unscaled_positions(tmp_path):
    path, _ = make_kimi(tmp_path, num_hidden_layers=1, int4=False)
    edit_config(path, lambda raw: raw["text_config"]["rope_scaling"].update(rope_type="default"))
    latent = open_pair(path).target_config.latent_attention
    assert latent is not None
    assert latent.scale == pytest.approx(24**-0.5)


def test_int4_is_read_to_the_bit(tmp_path):
    path, model = make_kimi(tmp_path)
    pair = open_pair(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for tp in (1, 2):
        ranks = [read_rank_weights(pair, tp, rank, torch.float32) for rank in range(tp)]
        parts = [
            Int4Weight(rank[name + ".weight"], rank[name + ".scale"]).dequantize().chunk(2, dim=1) for rank in ranks
        ]
        whole = torch.cat([part for half in zip(*parts, strict=True) for part in half], dim=1)
        assert torch.equal(whole, model.get_parameter(name))


def test_drafted_text_of_kimi_equals_plain_text(tmp_path):
    assert_drafting_changes_nothing(*kimi_pair(tmp_path))


def test_trees_of_drafts_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="--draft-tree 15: latent attention verifies chains alone so far"):
        LLM.from_pretrained(*kimi_pair(tmp_path), precision="fp32", device="cpu", max_seq_len=64, draft_tree=15)


@pytest.mark.principal("2-64-False")
@pytest.mark.parametrize(("ranks", "columns", "ep"), [(2, 64, False), (4, 128, False), (4, 64, True)])
def test_ranks_give_the_tokens_of_one(ranks, columns, ep, tmp_path):
    assert_ranks_agree(*kimi_pair(tmp_path, moe_intermediate_size=columns), ranks, ep=ep)


def test_half_a_block_of_an_expert_is_refused(tmp_path):
    """Of 64 columns four ranks would have it: they are given whole experts."""
    target, _ = kimi_pair(tmp_path)
    line = refusal("build", "--target", target, "--tp", "4", "--output", tmp_path / "engine")
    assert "has 16 columns, no whole number of the checkpoint's INT4 blocks of 32; use fewer ranks or --ep" in line


def test_few_rows_and_many_attend_alike():
    """Absorbed or not."""
    layer = LatentLayer("l.", "rope", 4, 32, 16, 8, 12, 1e-5, scale=0.3)
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    weights = {"rope.cos": angles.cos(), "rope.sin": angles.sin()}
    weights["l.self_attn.kv_a_layernorm.weight"] = torch.rand(32, generator=generator)
    weights["l.self_attn.latent_up"] = torch.randn(4 * 28, 32, generator=generator)
    q, kv = (torch.randn(2, 40, size, generator=generator) for size in (4 * 24, 40))

    def attend(cut: int) -> torch.Tensor:
        caches = {"l.latent": torch.zeros(2, 1, 64, 40)}
        parts = zip(q.split(cut, dim=1), kv.split(cut, dim=1), strict=True)
        starts = [torch.full((2,), at, dtype=torch.int32) for at in range(0, 40, cut)]
        return torch.cat(
            [
                TorchOps(weights, caches).latent_attention(layer, *part, start)
                for part, start in zip(parts, starts, strict=True)
            ],
            dim=1,
        )

    torch.testing.assert_close(attend(20), attend(40), rtol=1e-4, atol=1e-5)


def test_the_published_configuration_of_kimi_k2_5_is_read(tmp_path):
    config = read_target_config(published_shape("kimi-k2.5").target)
    assert config.latent_attention is not None
    assert config.latent_attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    assert (config.rope.attention_factor, config.rope.factor) == (1.0, 64.0)
    assert config.moe is not None
    assert (config.moe.dense_layers, config.moe.shared_size, config.moe.scale) == (1, 2048, 2.827)
    shapes = {weight.name: weight.shape(8, 7) for weight in build_target(config).weights()}
    attention = "model.layers.1.self_attn."
    assert shapes[attention + "qkv_proj.weight"] == (1536 + 576, 7168)
    assert shapes[attention + "latent_up"] == (8 * 256, 512)
    assert "model.layers.0.mlp.router.weight" not in shapes
    small = LLM.from_pretrained(make_kimi(tmp_path)[0], None, precision="bf16", device="cpu", max_seq_len=64).config
    assert find_kernels(small, "auto", (9, 0)) == (None, "our CUDA kernels have no flat rows of latent attention")
    engine = small.model_copy(update={"target": config, "tp": 8, "max_batch": 1, "max_seq_len": 1000, "block_size": 8})
    caches = cache_shapes(engine)
    # On every rank: 576 numbers of 61 layers a token.
    assert sum(a * b * c * d for a, b, c, d in caches.values()) == 1016 * 576 * 61
    assert plan_memory(engine).target_cache == 1016 * 70272


def test_what_becomes_of_int4_is_said_when_it_is_built_and_planned(tmp_path):
    target, drafter = kimi_pair(tmp_path)
    pair = ("--target", target, "--drafter", drafter)
    said = (
        "experts stay in int4, and those that rows choose are dequantized each time, but by our kernels, on a GPU in "
    )
    line = next(line for line in succeeds("build", *pair, "--output", tmp_path / "e").splitlines() if "int4" in line)
    assert line == f"target: {said}BF16 and FP16"
    plan = succeeds("build", "--plan", *pair, "--gpu", "h100", "--acceptance", 3)
    assert "Target: experts in INT4, read as they are." in plan


def test_nvfp4_of_int4_experts_is_refused_with_its_error(tmp_path):
    target, model = make_kimi(tmp_path / "target")
    assert 0.02 < nvfp4_error(open_pair(target)) < 0.2
    for command in (("build", "--output", tmp_path / "e"), ("build", "--plan", "--gpu", "b300")):
        line = refusal(*command, "--target", target, "--precision", "nvfp4")
        assert re.search(r"--precision nvfp4: .* int4, .* a relative error of \d+\.\d%", line)
    numbers = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    # What NVFP4 has stays what it is; the error is that of the numbers which it has not.
    again = rounded_to_nvfp4(rounded_to_nvfp4(numbers))
    assert torch.equal(again, rounded_to_nvfp4(numbers)) and not torch.equal(again, numbers)


def test_the_memory_plan_counts_what_an_engine_holds(tmp_path):
    llm = LLM.from_pretrained(make_kimi(tmp_path)[0], None, precision="fp32", device="cpu", max_seq_len=64)
    held = {name: tensor for name, tensor in llm.session.weights.items() if not tensor.is_mkldnn}
    packed = [tensor for tensor in llm.session.weights.values() if tensor.is_mkldnn]
    counted = sum(x.nbytes for x in held.values()) + sum(x.numel() * 4 for x in packed)
    assert plan_memory(llm.config).weights == counted


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"n_group": 8}, "n_group 8 is not supported; supported: 1"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
    ],
)
def test_a_kimi_of_another_kind_is_refused(edit, message, tmp_path):
    path, _ = make_kimi(tmp_path / "target")
    edit_config(path, lambda raw: raw["text_config"].update(edit))
    assert message in refusal("build", "--target", path, "--output", tmp_path / "engine")


def test_int4_of_another_kind_is_refused(tmp_path):
    path, _ = make_kimi(tmp_path / "target")
    edit_config(
        path,
        lambda raw: raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits=8),
    )
    line = refusal("build", "--target", path, "--output", tmp_path / "engine")
    assert "packed weights of num_bits 8 are not read; read: 4" in line
    assert "language_model.model.embed_tokens.weight" in load_file(path / "model.safetensors")
