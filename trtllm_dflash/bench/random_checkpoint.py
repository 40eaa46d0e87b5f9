"""Random checkpoints in the exact layout of a published pair: what `build` and other runtimes read, without a download.

Names, shapes, types and shards are the publisher's; the numbers are random. Whoever reads them does all the work that
the published ones need, and drafts nothing of use.
"""

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_dflash.checkpoint.drafter_config import read_drafter_config
from trtllm_dflash.checkpoint.folder import INDEX_FILE, read_json
from trtllm_dflash.cost.published import Shape
from trtllm_dflash.cost.shapes import drafter_of, find_shape
from trtllm_dflash.engine.config import Progress
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.models.weights import Content, Part, Weight
from trtllm_dflash.ops.formats import E8M0_ONE

_STD = 0.02
_POWER = E8M0_ONE - 7  # the scale that makes MXFP4's numbers, about 3 in size, about as large as the others
_SHARD = 1 << 30  # bytes, but for a tensor that is larger

#: `architectures` in config.json, which other runtimes choose their code by.
_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


def write_random_pair(
    folder: Path,
    name: str,
    layers: int | None = None,
    progress: Progress = lambda *_: None,
    device: torch.device | str = "cpu",
) -> tuple[Path, Path]:
    """Writes a target and its drafter; returns their folders.

    Args:
        name: of a published shape that we compute.
        layers: of the target, where not the shape's.
        device: where the numbers are drawn: other ones on a GPU, and sooner.

    Raises:
        SettingsError: the shape is not known, or we do not compute its family.
    """
    folders = write_configs(folder, name, layers)
    target, drafter = (read_json(part / "config.json") for part in folders)
    _write_tensors(folders[0], parts_of(build_target(read_target_config(target)).weights()), progress, device)
    _write_tensors(folders[1], parts_of(Drafter(read_drafter_config(drafter)).weights()), progress, device)
    return folders


def write_configs(folder: Path, name: str, layers: int | None = None) -> tuple[Path, Path]:
    """Writes the configurations alone, for who makes up the numbers; returns the target's folder and the drafter's.

    Args and Raises:
        As of `write_random_pair`.
    """
    shape = find_shape(name)
    raw = shape.target_of(layers or shape.facts.target_layers)
    config = read_target_config(raw)
    target = {"architectures": [_ARCHITECTURES[shape.family]], "torch_dtype": "bfloat16", **raw}
    if config.attention_bias:
        target["attention_bias"] = True
    target["rms_norm_eps"] = config.norm_eps
    folders = folder / "target", folder / "drafter"
    drafter = _drafter_config(shape, target, drafter_of(shape, config).model_dump())
    for part, settings in zip(folders, (target, drafter), strict=True):
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folders


def parts_of(weights: Iterable[Weight]) -> list[Part]:
    """Lists the checkpoint tensors of some weights, each once."""
    return list({part.key: part for weight in weights for part in weight.parts}.values())


def _drafter_config(shape: Shape, target: dict[str, Any], drafter: dict[str, Any]) -> dict[str, Any]:
    """Makes the config.json of z-lab's format."""
    copied = ("vocab_size", "hidden_size", "max_position_embeddings", "rope_theta", "rope_scaling")
    widths, text = shape.drafter, target.get("text_config", target)
    return {
        **{name: text[name] for name in copied if name in text},
        **{name: target[name] for name in ("rms_norm_eps", "torch_dtype")},
        **({"rope_theta": drafter["rope"]["theta"]} if "rope_parameters" in text else {}),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": drafter["attention_bias"],
        "head_dim": widths.head_size,
        "hidden_act": "silu",
        "intermediate_size": widths.intermediate_size,
        "layer_types": ["full_attention"] * drafter["layers"],
        "num_attention_heads": widths.heads,
        "num_hidden_layers": drafter["layers"],
        "num_key_value_heads": widths.kv_heads,
        "num_target_layers": drafter["target_layers"],
        "tie_word_embeddings": False,
        "block_size": drafter["block_size"],
        "dflash_config": {
            "mask_token_id": drafter["mask_token_id"],
            "target_layer_ids": list(drafter["tap_layers"]),
        },
    }


def _write_tensors(folder: Path, parts: list[Part], progress: Progress, device: torch.device | str) -> None:
    """Writes shards one after another, so that no more than one is in memory."""
    generator = torch.Generator(device).manual_seed(0)
    shards = list(_shards(parts))
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {part.key: _random(part, generator).cpu() for part in shard}, folder / name, metadata={"format": "pt"}
        )
        names |= dict.fromkeys((part.key for part in shard), name)
        progress(f"{folder.name}, shards", number, len(shards))
    index = {"metadata": {"total_size": sum(map(_bytes_of, parts))}, "weight_map": names}
    (folder / INDEX_FILE).write_text(json.dumps(index) + "\n")


def _shards(parts: list[Part]) -> Iterator[list[Part]]:
    shard: list[Part] = []
    size = 0
    for part in parts:
        bytes_ = _bytes_of(part)
        if shard and size + bytes_ > _SHARD:
            yield shard
            shard, size = [], 0
        shard.append(part)
        size += bytes_
    yield shard


def _bytes_of(part: Part) -> int:
    return prod(part.shape) * (2 if part.content is Content.NUMBERS else 1)


def _random(part: Part, generator: torch.Generator) -> torch.Tensor:
    if part.content is Content.E8M0:
        return torch.full(part.shape, _POWER, dtype=torch.uint8)
    if part.content is Content.E2M1_PAIRS:
        return torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8, device=generator.device)
    tensor = torch.empty(part.shape, dtype=torch.bfloat16, device=generator.device)
    if tensor.ndim > 1 or "bias" in part.key or "sinks" in part.key:
        return tensor.normal_(0, _STD, generator=generator)
    return tensor.fill_(1)  # a norm
