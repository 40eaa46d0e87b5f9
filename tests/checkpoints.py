"""Small random checkpoints in the published formats, for all tests."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trtllm_dflash.bench.random_checkpoint import parts_of
from trtllm_dflash.models import build_target, read_target_config

FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def make_target(
    path: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    intermediate: int = 96,
    vocab: int = 128,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    attention_bias: bool = False,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    max_positions: int = 512,
) -> Path:
    """A target saved by transformers itself; its greedy text varies and its logits are well apart.

    `rope_scaling`: as in Hugging Face's config.json, e.g. `{"rope_type": "llama3", "factor": 8.0, ...}`.
    """
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        intermediate_size=intermediate,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
        rope_theta=10000.0,
        rope_scaling=dict(rope_scaling) if rope_scaling else None,  # transformers writes into it
        bos_token_id=None,
        eos_token_id=None,
    )
    fill(model_class(config), torch.Generator().manual_seed(seed)).to(dtype).save_pretrained(path)
    if shards > 1:
        split_into_shards(path, shards)
    return path


#: gpt-oss's own, for a context that a test can pass.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def make_gpt_oss(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    intermediate: int = 96,
    experts: int = 8,
    top_k: int = 4,
    window: int = 16,
    vocab: int = 128,
    rope: dict[str, Any] = YARN,
    mxfp4: bool = True,
    limit: float = 7.0,
) -> Path:
    """A gpt-oss in the published layout: experts as `*_blocks` and `*_scales`, the rest as transformers saves it.

    Without `mxfp4` the experts are as transformers saves them, too. A small `limit` clamps many activations.
    """
    config = GptOssConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        sliding_window=window,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
        swiglu_limit=limit,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    fill(GptOssForCausalLM(config), generator).save_pretrained(path)
    if not mxfp4:
        return path
    edit_config(path, lambda raw: raw.update(quantization_config={"quant_method": "mxfp4"}))

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            count, inputs, outputs = tensors.pop(name).shape
            # Random numbers of E2M1 are about 3 in size; scales differ from block to block.
            power = 127 + round(math.log2(2 / math.sqrt(inputs) / 3))
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator)
            scales = torch.randint(power - 1, power + 2, (count, outputs, inputs // 32), generator=generator)
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks.to(torch.uint8), scales.to(torch.uint8)

    return edit_tensors(path, pack)


def make_qwen3_moe(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    intermediate: int = 32,
    experts: int = 16,
    top_k: int = 8,
    normalized: bool = True,
    vocab: int = 128,
) -> Path:
    """A Qwen3-MoE as transformers saves it: each expert's matrices by themselves, as published."""
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        intermediate_size=96,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalized,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    fill(Qwen3MoeForCausalLM(config), torch.Generator().manual_seed(seed)).save_pretrained(path)
    # As the published ones say it; this release of transformers writes num_local_experts.
    return edit_config(path, lambda raw: raw.update(num_experts=raw.pop("num_local_experts", experts)))


def make_minimax_m2(path: Path, *, seed: int = 0, **values: Any) -> Path:
    """A MiniMax-M2 in the published layout but for FP8, whatever release of transformers is here.

    `values`: settings of its config.json besides.
    """
    config = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
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
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        **values,
    }
    generator = torch.Generator().manual_seed(seed)
    parts = parts_of(build_target(read_target_config(config)).weights())
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {part.key: _random(part.key, part.shape, generator) for part in parts}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_drafter(
    path: Path,
    target_path: Path,
    *,
    seed: int = 1,
    layers: int = 2,
    block_size: int = 8,
    tap_layers: tuple[int, ...] | None = (0, 2),
    mask_token_id: int | None = None,
    nested_block_size: bool = False,
    format: Literal["z-lab", "speculators"] = "z-lab",
    draft_vocab: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    intermediate: int = 96,
    attention_bias: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A drafter for a target made by `make_target`, written as its format's own tools write it.

    `tap_layers` count as z-lab does (0: the first layer's output) in both formats; None leaves them to the default.
    `mask_token_id`: the vocabulary's last id unless given. `draft_vocab`: speculators only.
    """
    target = json.loads((target_path / "config.json").read_text())
    target = target.get("text_config", target)
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    mask = vocab - 1 if mask_token_id is None else mask_token_id
    decoder = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    taps = layers if tap_layers is None else len(tap_layers)
    generator = torch.Generator().manual_seed(seed)
    shapes = _drafter_shapes(hidden, taps, layers, heads * head_size, kv_heads * head_size, head_size, intermediate)
    if attention_bias:
        sizes = {"q": heads * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size, "o": hidden}
        shapes |= {f"layers.{i}.self_attn.{n}_proj.bias": (sizes[n],) for i in range(layers) for n in sizes}
    tensors = {name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()}
    config: dict[str, Any]
    if format == "z-lab":
        dflash: dict[str, Any] = {"mask_token_id": mask}
        if tap_layers is not None:
            dflash["target_layer_ids"] = list(tap_layers)
        config = {
            "architectures": ["DFlashDraftModel"],
            **decoder,
            "rope_theta": 10000.0,
            "rope_scaling": rope_scaling,
            "num_target_layers": target["num_hidden_layers"],
            "dflash_config": dflash,
        }
        (dflash if nested_block_size else config)["block_size"] = block_size
    else:
        assert tap_layers is not None, "the speculators format has no default tap layers"
        rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope_scaling or {})}
        config = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": {**decoder, "rope_parameters": rope},
            "block_size": block_size,
            "mask_token_id": mask,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in tap_layers],
            "draft_vocab_size": draft_vocab or vocab,
            "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": str(target_path)}},
        }
        tensors["embed_tokens.weight"] = _random("embed_tokens.weight", (vocab, hidden), generator).to(dtype)
        tensors["lm_head.weight"] = _random("lm_head.weight", (draft_vocab or vocab, hidden), generator).to(dtype)
        if draft_vocab is not None:
            ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
            tensors["d2t"] = ids - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def split_into_shards(path: Path, shards: int) -> None:
    """Rewrites a folder's model.safetensors as that many shards and an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_config(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Applies `edit` to a folder's config.json, in place."""
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Applies `edit` to the tensors of a folder's model.safetensors, in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def fill(model: PreTrainedModel, generator: torch.Generator) -> PreTrainedModel:
    """Gives a model random weights whose greedy text varies, buffers that checkpoints hold included."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, tuple(parameter.shape), generator))
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.copy_(_random(name, tuple(buffer.shape), generator))
    return model


def _drafter_shapes(
    hidden: int, taps: int, layers: int, q_size: int, kv_size: int, head_size: int, intermediate: int
) -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (head_size,),
        "self_attn.k_norm": (head_size,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return shapes | {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Linear weights that double the size of what they are given, norms and biases that matter."""
    values: torch.Tensor = torch.randn(shape, generator=generator)
    if "embed_tokens" in name:
        return values * 0.3  # small, or a tied head would repeat the last token
    if len(shape) > 1:
        return values * (2 / math.sqrt(shape[1]))
    return values * 0.1 if name.endswith("bias") else 1 + values * 0.1
