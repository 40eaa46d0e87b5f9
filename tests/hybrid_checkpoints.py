"""Small random checkpoints of hybrids (gated delta nets and gated attention), in the published layouts."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints import edit_config, edit_tensors, fill

transformers = pytest.importorskip("transformers", "5.10.1", reason="transformers computes Qwen3.5 so since 5.10.1")

LAYOUTS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe, stacked")

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def make_hybrid(path: Path, layout: str, *, vocab: int = 128, seed: int = 0, **shape: int) -> Path:
    """A hybrid saved by transformers in one of `LAYOUTS`, whose nets remember hundreds of rows.

    `shape`: settings of the text model's configuration besides.
    """
    model = _model(layout, {"vocab_size": vocab, **shape})
    generator = torch.Generator().manual_seed(seed)
    fill(model, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(-5 + 4 * torch.rand(parameter.shape, generator=generator))
            if name.endswith("conv1d.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    model.save_pretrained(path)
    if layout == "qwen3_5_moe, stacked":
        edit_tensors(path, _stack)
    if layout == "qwen3_5":  # what it predicts further tokens with, in its published checkpoints
        edit_tensors(path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(4, 8)}))
    if layout.startswith("qwen3_5_moe"):
        edit_config(path, lambda raw: raw["text_config"].pop("intermediate_size", None))
    return path


def _model(layout: str, changes: dict[str, int]) -> PreTrainedModel:
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6 if layout == "qwen3_5_text" else 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25}
    if layout == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(**{**_EXPERTS, **shape}, intermediate_size=96, rope_parameters=rope)
        )
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if layout == "qwen3_5_text":
        text = transformers.Qwen3_5TextConfig(
            **shape, intermediate_size=96, rope_parameters=rope, tie_word_embeddings=True
        )
        return transformers.Qwen3_5ForCausalLM(text)
    ids = {f"{kind}_token_id": i for i, kind in enumerate(("image", "video", "vision_start", "vision_end"))}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": shape["hidden_size"],
    }
    text_config = {**shape, "rope_parameters": rope}
    if layout == "qwen3_5":
        config = transformers.Qwen3_5Config(
            text_config={**text_config, "intermediate_size": 96}, vision_config=vision, **ids
        )
        return transformers.Qwen3_5ForConditionalGeneration(config)
    config = transformers.Qwen3_5MoeConfig(text_config={**_EXPERTS, **text_config}, vision_config=vision, **ids)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def _stack(tensors: dict[str, torch.Tensor]) -> None:
    """Joins the experts of each layer, as the published checkpoints in BF16 have them."""
    first = [name for name in tensors if name.endswith("mlp.experts.0.gate_proj.weight")]
    for name in first:
        prefix = name.removesuffix("0.gate_proj.weight")
        each: dict[str, list[torch.Tensor]] = {
            kind: [tensors.pop(f"{prefix}{i}.{kind}_proj.weight") for i in range(_EXPERTS["num_experts"])]
            for kind in ("gate", "up", "down")
        }
        pairs = zip(each["gate"], each["up"], strict=True)
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[prefix + "down_proj"] = torch.stack(each["down"])
