"""The shapes of a target and its drafter, from which a runtime's limits follow; of any family, ours or not.

They come from the two folders' config.json where these are on this machine, else from `cost.shapes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import PACKAGE, resolve
from trtllm_dflash.cost.shapes import SHAPES
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models import read_target_config

_BF16 = 2  # bytes
_LARGEST_HEAD = 128  # numbers; bounds a drafter's heads from above
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that memory and limits depend on.

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
        """Bytes of a sequence's K and V of `tokens` on one of `tp` ranks; ranks that outnumber the heads share one."""
        row = 2 * max(1, self.kv_heads // tp) * self.head_size * itemsize
        full = (self.layers - self.windowed_layers) * tokens
        return row * (full + self.windowed_layers * min(tokens, self.window))


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter's settings that runtimes need; None where they are not known."""

    block_size: int | None
    shape: ModelShape | None = None


def published_target(name: str) -> ModelShape | None:
    """Looks up the target's shape of a catalog's pair; None where it is not known."""
    shape = SHAPES.get(name)
    if shape is None or shape.checkpoint_bytes is None:
        return None
    config = read_target_config(shape.target)
    windows = [window for window in config.windows or () if window is not None]
    return ModelShape(
        family=config.family,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        max_positions=config.max_positions,
        weight_bytes=shape.checkpoint_bytes,
        windowed_layers=len(windows),
        window=max(windows, default=0),
        experts=0 if config.moe is None else config.moe.experts,
    )


def published_drafter(name: str) -> ModelShape | None:
    """Looks up the drafter's shape of a catalog's pair, of the target's widths. Its head size is not published, and
    memory is planned for `_LARGEST_HEAD`; nor are the positions that it takes.
    """
    target = published_target(name)
    if target is None:
        return None
    shape = SHAPES[name]
    facts, hidden, columns = shape.facts, shape.widths["hidden_size"], shape.drafter.intermediate_size
    layer = 2 * hidden * (target.heads + target.kv_heads) * _LARGEST_HEAD + 3 * hidden * columns
    parameters = facts.drafter_layers * layer + len(shape.tap_layers) * hidden * hidden
    return ModelShape(
        family="dflash",
        layers=facts.drafter_layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_size=_LARGEST_HEAD,
        max_positions=0,
        weight_bytes=parameters * _BF16,
    )


def find_folder(name: str) -> Path | None:
    """Finds a checkpoint on this machine: a folder, the package's, or the Hugging Face cache's. Downloads nothing.

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
    """Reads the shape from a folder's config.json, of any family.

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
    """Reads a drafter's settings from its config.json, in either format.

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
