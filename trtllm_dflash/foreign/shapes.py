"""What a runtime's limits follow from: the shapes of a target and its drafter, without our having to compute them.

They come from the two folders' config.json where these are on this machine, else from the table below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import PACKAGE, resolve
from trtllm_dflash.errors import CheckpointError

_BF16 = 2  # bytes
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelShape:
    """What memory and limits depend on.

    Attributes:
        family: `model_type` of its config.json.
        windowed_layers: layers whose K/V rows end with a window of `window` tokens.
        experts: experts of a layer; 0 for a dense model.
        weight_bytes: of the checkpoint, over all ranks.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_positions: int
    weight_bytes: int
    windowed_layers: int = 0
    window: int = 0
    experts: int = 0

    def cache_bytes(self, tokens: int, tp: int, itemsize: int = _BF16) -> int:
        """K and V rows of one sequence of `tokens` on one of `tp` ranks; ranks that outnumber the heads share one."""
        row = 2 * max(1, self.kv_heads // tp) * self.head_size * itemsize
        full = (self.layers - self.windowed_layers) * tokens
        return row * (full + self.windowed_layers * min(tokens, self.window))


@dataclass(frozen=True)
class DrafterFacts:
    """What the runtimes must know of a drafter; None where nothing here says it."""

    block_size: int | None
    shape: ModelShape | None = None


def _gpt_oss(layers: int, gigabytes: float, experts: int) -> ModelShape:
    return ModelShape(
        family="gpt_oss",
        layers=layers,
        heads=64,
        kv_heads=8,
        head_size=64,
        max_positions=131072,
        weight_bytes=int(gigabytes * 2**30),
        windowed_layers=layers // 2,
        window=128,
        experts=experts,
    )


def _dense(family: str, layers: int, heads: int, positions: int, parameters: float) -> ModelShape:
    return ModelShape(family, layers, heads, 8, 128, positions, int(parameters * 1e9) * _BF16)


#: By the catalog's names. Parameters and checkpoint sizes are the publishers' own, of model cards and config.json.
TARGETS = {
    "qwen3-4b": _dense("qwen3", 36, 32, 40960, 4.02),
    "qwen3-8b": _dense("qwen3", 36, 32, 40960, 8.19),
    "llama-3.1-8b": _dense("llama", 32, 32, 131072, 8.03),
    "gpt-oss-20b": _gpt_oss(24, 12.8, 32),
    "gpt-oss-120b": _gpt_oss(36, 60.8, 128),
    "qwen3-coder-30b-a3b": replace(_dense("qwen3_moe", 48, 32, 262144, 30.5), kv_heads=4, experts=128),
}


def _drafter(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, taps: int) -> ModelShape:
    """Widths as published; where a head's size is not, 128 bounds it from above, and memory is planned for that."""
    size = 128
    layer = 2 * hidden * (heads + kv_heads) * size + 3 * hidden * ffn
    parameters = layers * layer + taps * hidden * hidden
    return ModelShape("dflash", layers, heads, kv_heads, size, 0, parameters * _BF16)


#: Their drafters: layers, hidden, FFN, query and key/value heads, tap layers.
DRAFTERS = {
    "qwen3-4b": _drafter(5, 2560, 9728, 32, 8, 5),
    "qwen3-8b": _drafter(5, 4096, 12288, 32, 8, 5),
    "llama-3.1-8b": _drafter(5, 4096, 12288, 32, 8, 5),
    "gpt-oss-20b": _drafter(8, 2880, 7680, 64, 8, 5),
    "gpt-oss-120b": _drafter(8, 2880, 7680, 64, 8, 5),
    "qwen3-coder-30b-a3b": _drafter(8, 2048, 6144, 32, 4, 5),
}


def find_folder(name: str) -> Path | None:
    """Where a checkpoint lies on this machine: a folder, the package's, or the Hugging Face cache. Downloads nothing.

    Raises:
        CheckpointError: it is a path, and there is no such folder.
    """
    if name.startswith((PACKAGE, ".", "~", "/")) or Path(name).is_dir() or name.count("/") > 1:
        return resolve(name).absolute()
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json"], local_files_only=True))
    except Exception:  # not cached, or not a repository's name: the caller goes by its table
        return None
    return folder if (folder / "config.json").is_file() else None


def read_shape(folder: Path) -> ModelShape:
    """The shape in a folder's config.json, of any family.

    Raises:
        CheckpointError: it does not say what is needed.
    """
    raw = read_json(folder / "config.json")
    text: Mapping[str, Any] = raw.get("text_config") or raw.get("transformer_layer_config") or raw
    try:
        heads = int(text["num_attention_heads"])
        kinds = [kind for kind in text.get("layer_types") or [] if kind in _WINDOWED]
        return ModelShape(
            family=str(raw.get("model_type", "")),
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_size=int(text.get("head_dim") or text["hidden_size"] // heads),
            max_positions=int(text.get("max_position_embeddings") or 0),
            weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            windowed_layers=len(kinds),
            window=int(text.get("sliding_window") or 0),
            experts=int(text.get("num_local_experts") or text.get("num_experts") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error} is missing, or not a number") from None


def read_drafter(folder: Path) -> DrafterFacts:
    """A drafter's facts in its config.json, in either format.

    Raises:
        CheckpointError: it is no DFlash drafter's, or lacks them.
    """
    raw = read_json(folder / "config.json")
    nested = raw.get("dflash_config") or {}
    if "dflash_config" not in raw and raw.get("speculators_model_type") != "dflash":
        raise CheckpointError(f"{folder}: config.json is no DFlash drafter's; for an EAGLE-3 one say --method eagle3")
    block = raw.get("block_size", nested.get("block_size"))
    if not isinstance(block, int) or block < 2:
        raise CheckpointError(f"{folder}: config.json: block_size {block!r} is not a number of tokens")
    return DrafterFacts(block, read_shape(folder))
