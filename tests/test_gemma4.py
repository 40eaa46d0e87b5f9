"""Gemma 4: against Hugging Face transformers, drafted, in pages, and divided among ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.checkpoints import edit_config, edit_tensors, fill, make_drafter
from tests.conftest import refusal
from tests.family_checks import GREEDY, assert_drafting_changes_nothing, assert_equals, assert_ranks_agree, random_ids
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.cost.memory import cache_bytes, cache_shapes, pages_on_gpu
from trtllm_dflash.engine.paging import linear_paging
from trtllm_dflash.errors import EngineError
from trtllm_dflash.kernels import LIBRARY_VARIABLE
from trtllm_dflash.models import read_target_config
from trtllm_dflash.session.choice import find_kernels
from trtllm_dflash.session.torch_session import TorchSession

transformers = pytest.importorskip(
    "transformers", "5.15", reason="transformers has Gemma 4 as it is published since 5.15"
)

pytestmark = pytest.mark.slow

WINDOW = 8


def make_gemma4(path: Path, *, experts: bool = False, published: bool = True, tied: bool = True, **values: Any) -> Path:
    """A Gemma 4 as transformers saves it, which is as published but for its configuration's form.

    Heads of 16 with a window, of 32 without; two of six layers have none.
    """
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if experts:
        shape |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
    text = transformers.Gemma4TextConfig(**{**shape, **values}).to_dict()
    model = transformers.Gemma4ForConditionalGeneration(
        transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=tied)
    )
    fill(model, torch.Generator().manual_seed(0)).save_pretrained(path)
    # What is beside the text in every published one.
    edit_tensors(path, lambda tensors: tensors.update({"model.vision_tower.patch_embedder.weight": torch.zeros(2, 2)}))

    def publish(raw: dict[str, Any]) -> None:
        raw["text_config"].pop("per_layer_config")
        own = {name: {**shape, **values}[name] for name in ("global_head_dim", "num_global_key_value_heads")}
        raw["text_config"].update(own)

    return edit_config(path, publish) if published else path


def transformers_model(path: Path) -> torch.nn.Module:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(path, **options).eval()


def gemma_pair(folder: Path, **values: Any) -> tuple[Path, Path]:
    is_free = values.get("experts") and "top_k_experts" not in values
    few: dict[str, Any] = {"num_experts": 4, "top_k_experts": 2} if is_free else {}
    target = make_gemma4(folder / "target", vocab_size=16, **few, **values)
    # So small that a drafter, which knows nothing, does not draft the mask alone: what it embeds is scaled, too.
    name = "model.language_model.embed_tokens.weight"
    edit_tensors(target, lambda tensors: tensors[name].div_(8))
    return target, make_drafter(folder / "drafter", target, tap_layers=(0, 2, 5), seed=3)


@pytest.mark.parametrize("experts", [False, True])
def test_gemma4_equals_transformers(experts, tmp_path):
    path = make_gemma4(tmp_path, experts=experts)
    assert_equals(path, transformers_model(path), prompts=20 if experts else 10)


def test_rope_of_layers_without_a_window_is_slowed_by_its_factor(tmp_path):
    """Contexts are extended so; published ones have none, which is 1."""
    path = make_gemma4(tmp_path)
    edit_config(path, lambda raw: raw["text_config"]["rope_parameters"]["full_attention"].update(factor=8.0))
    assert_equals(path, transformers_model(path), prompts=2)


def test_both_forms_of_the_configuration_and_of_the_experts_are_one_model(tmp_path):
    path, again = (make_gemma4(tmp_path / str(i), experts=True, published=i == 0) for i in range(2))

    def divide(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
            gate_up, down = tensors.pop(name), tensors.pop(name.replace("gate_up", "down"))
            for i, (matrix, other) in enumerate(zip(gate_up, down, strict=True)):
                prefix = name.replace("gate_up_proj", f"{i}.")
                for kind, part in zip(("gate", "up", "down"), (*matrix.chunk(2), other), strict=True):
                    tensors[f"{prefix}{kind}_proj.weight"] = part.clone()

    edit_tensors(again, divide)
    texts = [
        LLM.from_pretrained(p, None, precision="fp32", device="cpu", max_seq_len=64).generate(
            random_ids(20, 31), GREEDY
        )
        for p in (path, again)
    ]
    assert [c.token_ids for c in texts[0]] == [c.token_ids for c in texts[1]]


@pytest.mark.parametrize("whole", [True, False])
def test_the_head_is_tied_as_the_whole_says(whole, tmp_path):
    """As transformers ties and saves it, whatever the text model's own settings say."""
    make_gemma4(tmp_path, tied=whole, tie_word_embeddings=not whole)
    assert open_pair(tmp_path).target_config.tied_embeddings is whole


def test_drafted_text_of_gemma4_equals_plain_text(tmp_path):
    assert_drafting_changes_nothing(*gemma_pair(tmp_path, experts=True))


def test_trees_of_drafts_change_nothing(tmp_path):
    target, drafter = gemma_pair(tmp_path, experts=True)
    plain, trees = (
        LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", max_seq_len=96, draft_tree=tree)
        for tree in ("off", 15)
    )
    prompts, params = random_ids(20, vocab=16), SamplingParams(max_tokens=24, ignore_eos=True)
    expected, found = plain.generate(prompts, params, draft=False)[0], trees.generate(prompts, params)[0]
    assert found.token_ids == expected.token_ids
    assert sum(found.accepted_per_step)


def test_the_drafter_s_block_has_the_target_s_scaled_embeddings(tmp_path):
    target, drafter = gemma_pair(tmp_path)
    config = open_pair(target, drafter).drafter_config
    assert config is not None
    assert config.embedding_scale == 8.0  # sqrt(64)


@pytest.mark.principal("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_tokens_of_one(ranks, tmp_path):
    assert_ranks_agree(*gemma_pair(tmp_path, experts=True), ranks)


def test_layers_with_a_window_give_pages_back(tmp_path):
    # In pages of 16: the window, the rows of steps and of prompts, and a page at either end, whatever the length.
    target, drafter = gemma_pair(tmp_path)
    prompts = random_ids(300, 290, vocab=16)
    given = {"precision": "fp32", "device": "cpu", "max_batch": 2, "max_seq_len": 400}
    linear = LLM.from_pretrained(target, drafter, **given)
    config = linear.config.model_copy(update={"page_size": 16, "chunk": 64})
    weights = read_engine_tensors(open_pair(target, drafter), config, 0)
    paged = LLM(TorchSession(config, weights, torch.device("cpu")), None)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert [c.token_ids for c in paged.generate(prompts, params)] == [
        c.token_ids for c in linear.generate(prompts, params)
    ]
    shapes = {name: tuple(cache.shape) for name, cache in paged.session.caches.items()}
    paging = paged.session.paging
    assert shapes["model.layers.0.key"] == (paging.window_pages, 2, 16, 16)
    assert shapes["model.layers.2.value"] == (paging.pages, 1, 16, 32)
    assert paging.window_pages < paging.pages


PUBLISHED: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
}


def test_the_caches_of_gemma_4_31b_are_counted_by_layer(tmp_path):
    target = read_target_config(PUBLISHED)
    assert target.full_attention is not None
    assert (target.full_attention.rope.share, target.rope.theta) == (0.25, 1e4)
    small = LLM.from_pretrained(make_gemma4(tmp_path), None, precision="fp32", device="cpu", max_seq_len=64).config
    changes = {"target": target, "precision": "bf16", "max_batch": 1, "max_seq_len": 8192, "block_size": 16}
    config = small.model_copy(update=changes)
    shapes = cache_shapes(config)
    assert shapes["model.layers.0.key"][1:] == (16, 8192 + 32, 256)
    assert shapes["model.layers.5.value"][1:] == (4, 8192 + 32, 512)
    # By token, 10 layers of 2 * 4 * 512 numbers and 50 of 2 * 16 * 256.
    assert sum(a * b * c * d * 2 for a, b, c, d in shapes.values()) == (8192 + 32) * (81920 + 819200)
    # On a GPU, layers with a window give pages back.
    paging = pages_on_gpu(config)
    paged = {shapes[:2] for shapes in cache_shapes(config, paging).values()}
    assert paged == {(paging.window_pages, 16), (paging.pages, 4)}
    assert cache_bytes(config, paging) < 0.6 * cache_bytes(config, linear_paging(config))


@pytest.mark.parametrize(
    ("change", "capability", "why"),
    [
        ({}, (10, 0), "heads of 64 and 128 on SM100, of 256 on SM90 alone"),
        ({"kv": "fp8"}, (9, 0), "fp8 caches for heads of 64 and 128, not of 256"),
        ({"precision": "fp32"}, (9, 0), "in BF16 and FP16, not in float32"),
    ],
)
def test_our_kernels_compute_gemma_on_hopper_alone(change, capability, why, tmp_path):
    small = LLM.from_pretrained(make_gemma4(tmp_path), None, precision="fp32", device="cpu", max_seq_len=64).config
    config = small.model_copy(update={"target": read_target_config(PUBLISHED), "precision": "bf16", "block_size": 16})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIBRARY_VARIABLE, str(tmp_path / "nothing.so"))
        with pytest.raises(EngineError, match="there is no such file"):
            find_kernels(config, "auto", (9, 0))
    found, said = find_kernels(config.model_copy(update=change), "auto", capability)
    assert found is None
    assert why in said


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "Gemma 4 E2B and E4B are not supported; supported: 31B, 26B-A4B"),
        ({"num_kv_shared_layers": 2}, "Gemma 4 E2B and E4B are not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported; supported: 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must say sliding_attention or full_attention for each of 6"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types says sliding_attention of the"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "per_layer_config must say the same of every full_attention"),
        ({"num_global_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
    ],
)
def test_a_gemma4_of_another_kind_is_refused(edit, message, tmp_path):
    path = make_gemma4(tmp_path / "target")
    edit_config(path, lambda raw: raw["text_config"].update(edit))
    assert message in refusal("build", "--target", path, "--output", tmp_path / "engine")
