"""The shapes of a target and its drafter, from which a runtime's limits follow; of any family, ours or not.

They come from the two folders' config.json where these are on this machine, else from `cost.published`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import PACKAGE, resolve
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.cost.published import PUBLISHED
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models import read_target_config, target_weights
from trtllm_dflash.models.hybrid import layer_types
from trtllm_dflash.models.weights import Content

_BF16, _FP32 = 2, 4  # bytes
_FULL, _LINEAR = "full_attention", "linear_attention"
_VALUE_HEADS = "linear_num_value_heads"  # of gated delta nets
#: Layers that keep some of their rows, and where config.json says how many.
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class CacheShape:
    """The K/V rows that some layers keep alike.

    Attributes:
        kv_heads: that ranks divide; 1 where all of them keep the same latent rows.
        row: numbers of a token's row in each head, its key and its value.
        window: tokens that are kept; None: all.
    """

    layers: int
    kv_heads: int
    row: int
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that memory and limits depend on.

    Attributes:
        family: `model_type` of its config.json; of a text model that was saved alone, the whole model's.
        head_size: of its largest heads.
        weight_bytes: of the checkpoint, over all ranks.
        caches: of its layers with attention.
        state_bytes: of a sequence's recurrent state, over all ranks; 0 where no layer has one.
        key_heads: of its gated delta nets; 0 where no layer is one.
        experts: experts of a layer; 0 for a dense model.
        latent: whether its attention is multi-head latent attention (MLA), for which there are kernels of its own.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_positions: int
    weight_bytes: int
    caches: tuple[CacheShape, ...]
    state_bytes: int = 0
    key_heads: int = 0
    experts: int = 0
    latent: bool = False

    @property
    def windows(self) -> tuple[int, ...]:
        """Lists the windows of its layers, one for each kind that has one."""
        return tuple(cache.window for cache in self.caches if cache.window is not None)

    def cache_bytes(self, tokens: int, tp: int, itemsize: int = _BF16) -> int:
        """Bytes of a sequence's K and V of `tokens` on one of `tp` ranks; ranks that outnumber the heads share one."""
        kept = [(cache, tokens if cache.window is None else min(tokens, cache.window)) for cache in self.caches]
        return sum(c.layers * max(1, c.kv_heads // tp) * c.row * rows * itemsize for c, rows in kept)

    def without_windows(self) -> "ModelShape":
        """Makes the shape as a runtime has it that keeps every row of layers with a window."""
        return replace(self, caches=tuple(replace(cache, window=None) for cache in self.caches))


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter's settings that runtimes need; None where they are not known."""

    block_size: int | None
    shape: ModelShape | None = None


def published_target(name: str) -> ModelShape | None:
    """Looks up the target's shape of a catalog's pair; None where it is not known.

    What its publisher does not say of the checkpoint's size is counted: the text model's weights.
    """
    shape = PUBLISHED.get(name)
    if shape is None or shape.apart is not None:
        return None
    raw = shape.target
    return shape_of(raw, shape.checkpoint_bytes or counted_bytes(raw))


def published_drafter(name: str) -> ModelShape | None:
    """Looks up the drafter's shape of a catalog's pair; the positions that it takes are not published."""
    shape = PUBLISHED.get(name)
    if shape is None or shape.apart is not None:
        return None
    widths, layers = shape.drafter, shape.facts.drafter_layers
    hidden = _text_of(shape.widths)["hidden_size"]
    layer = 2 * hidden * (widths.heads + widths.kv_heads) * widths.head_size + 3 * hidden * widths.intermediate_size
    row = 2 * widths.head_size
    kinds = ((layers - widths.windowed_layers, None), (widths.windowed_layers, widths.window))
    return ModelShape(
        family="dflash",
        layers=layers,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_size=widths.head_size,
        max_positions=0,
        weight_bytes=(layers * layer + len(shape.tap_layers) * hidden * hidden) * _BF16,
        caches=tuple(CacheShape(count, widths.kv_heads, row, window) for count, window in kinds if count),
    )


def shape_of(raw: Mapping[str, Any], weight_bytes: int) -> ModelShape:
    """Reads the shape from a config.json, of any family.

    Raises:
        KeyError, TypeError, ValueError: it does not say what is needed.
    """
    text = _text_of(raw)
    heads = int(text["num_attention_heads"])
    latent = bool(text.get("kv_lora_rank"))
    head_size = int(text.get("v_head_dim" if latent else "head_dim") or int(text["hidden_size"]) // heads)
    return ModelShape(
        family=str(raw.get("model_type", "")).removesuffix("_text"),
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=max(head_size, int(text.get("global_head_dim") or 0)),
        max_positions=int(text.get("max_position_embeddings") or 0),
        weight_bytes=weight_bytes,
        caches=_caches(text, heads, head_size),
        state_bytes=_state_bytes(text),
        key_heads=int(text["linear_num_key_heads"]) if _LINEAR in _kinds(text) else 0,
        experts=int(text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0),
        latent=latent,
    )


def _text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Finds the text model's settings, where a publisher nests them."""
    found: Mapping[str, Any] = raw.get("text_config") or raw.get("transformer_layer_config") or raw
    return found


def _caches(text: Mapping[str, Any], heads: int, head_size: int) -> tuple[CacheShape, ...]:
    layers = int(text["num_hidden_layers"])
    if text.get("kv_lora_rank"):  # a latent row, which is key and value of all heads, and a key for positions
        return (CacheShape(layers, 1, int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])),)
    kinds = _kinds(text)
    full = sum(kind not in _WINDOWED and kind != _LINEAR for kind in kinds)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    # Gemma's full layers have heads of their own.
    full_heads = int(text.get("num_global_key_value_heads") or kv_heads)
    full_size = int(text.get("global_head_dim") or head_size)
    caches = [CacheShape(full, full_heads, 2 * full_size)] if full else []
    for kind, setting in _WINDOWED.items():
        if count := kinds.count(kind):  # without a window they keep all
            caches.append(CacheShape(count, kv_heads, 2 * head_size, int(text.get(setting) or 0) or None))
    return tuple(caches)


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """Lists the kinds of attention, one a layer."""
    layers = int(text["num_hidden_layers"])
    named = list(text.get("layer_types") or [])
    if not named and text.get(_VALUE_HEADS):
        return layer_types(text, layers)
    return (named + [_FULL] * layers)[:layers]


def _state_bytes(text: Mapping[str, Any]) -> int:
    """Bytes of a sequence's states of gated delta nets, in FP32, over all ranks."""
    layers = _kinds(text).count(_LINEAR)
    if not layers:
        return 0
    sizes = (_VALUE_HEADS, "linear_key_head_dim", "linear_value_head_dim")
    return layers * prod(int(text[size]) for size in sizes) * _FP32


def counted_bytes(raw: Mapping[str, Any]) -> int:
    """Counts the bytes of a target's checkpoint in 16 bits, but for what its family always packs."""
    weights = target_weights(read_target_config(dict(raw)))
    parts = {part.key: part for weight in weights for part in weight.parts}
    return sum(prod(part.shape) * (_BF16 if part.content is Content.NUMBERS else 1) for part in parts.values())


def names_folder(name: str) -> bool:
    """Whether a checkpoint's name is a path, on this machine or in the package, and not Hugging Face's."""
    return name.startswith((PACKAGE, ".", "~", "/")) or Path(name).exists() or name.count("/") > 1


def find_folder(name: str) -> Path | None:
    """Finds a checkpoint on this machine: a folder, the package's, or the Hugging Face cache's. Downloads nothing.

    Raises:
        CheckpointError: it is a path, or has no owner as names at Hugging Face have, and there is no such folder.
    """
    if names_folder(name):
        return Path(os.path.abspath(resolve(name)))  # without any ..
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json"], local_files_only=True))
    except Exception:  # not cached, or not a repository's name: the caller goes by its table
        if "/" not in name:
            raise CheckpointError(f"{name} does not exist; pass a checkpoint folder or OWNER/NAME") from None
        return None
    return folder if (folder / "config.json").is_file() else None


def read_shape(folder: Path) -> ModelShape:
    """Reads the shape from a folder's config.json, of any family.

    Raises:
        CheckpointError: it does not say what is needed.
    """
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    raw = read_json(folder / "config.json")
    with reading_config(folder):
        try:
            shape = shape_of(raw, weight_bytes)
        except KeyError as missing:
            raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
        sizes = [shape.layers, shape.heads, shape.kv_heads, shape.head_size, shape.max_positions + 1, *shape.windows]
        if min(sizes + [size for cache in shape.caches for size in (cache.layers, cache.kv_heads, cache.row)]) < 1:
            raise CheckpointError("config.json: layers, heads, their sizes or positions are negative, or 0")
    return shape


def read_drafter(folder: Path) -> DrafterFacts:
    """Reads a drafter's settings from its config.json, in either format.

    Raises:
        CheckpointError: it is no DFlash drafter's, or lacks them.
    """
    raw = read_json(folder / "config.json")
    with reading_config(folder):
        nested = raw.get("dflash_config") or {}
        if "dflash_config" not in raw and raw.get("speculators_model_type") != "dflash":
            raise CheckpointError("config.json is no DFlash drafter's; for an EAGLE-3 one say --method eagle3")
        if "DFlash2DraftModel" in (raw.get("architectures") or []):
            raise CheckpointError("config.json is a DFlash 2 drafter's; only DFlash drafters are launched")
        block = raw.get("block_size", nested.get("block_size"))
        if not isinstance(block, int) or block < 2:
            raise CheckpointError(f"config.json: block_size {block!r} is not a number of tokens")
    return DrafterFacts(block, read_shape(folder))
