"""DFlash drafter checkpoints, in the two formats that exist.

z-lab (also NVIDIA ModelOpt's export): a Qwen3 config.json with `dflash_config`, and no embedding or LM head.
speculators (vllm-project/speculators): the layers' config nested in `transformer_layer_config`, tap layers counted from
the embedding's output, and perhaps a reduced vocabulary with a head of its own. Both name their tensors alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.quantized import QuantizedMatrix, check_tensors
from trtllm_dflash.checkpoint.slicing import RankReader
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import read_decoder_config
from trtllm_dflash.models.drafter import Drafter, DrafterConfig

#: Settings under which a drafter computes something else than ours does -> the only value that we compute.
#: Every one of them would cost acceptance without any error.
_COMPUTED = {
    "use_swa": False,
    "is_causal": False,
    "causal": False,
    "is_neox_style": True,
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "shift_label": False,
}

#: What a speculators checkpoint may carry besides: copies of the target's tensors, and the vocabulary maps.
_COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True, eq=False)
class DrafterCheckpoint:
    """An opened and checked drafter."""

    config: DrafterConfig
    folder: CheckpointFolder
    keys: Mapping[str, str]  # the model's tensor name -> this checkpoint's
    draft_to_target: torch.Tensor | None  # int32 [draft vocabulary]: the target's id of each draft id
    borrows_head: bool = False  # the reduced vocabulary's head is those rows of the target's
    quantized: Mapping[str, QuantizedMatrix] = field(default_factory=dict)  # of its tensors, by name

    def reader(self, tp: int, rank: int) -> RankReader:
        """Reads its tensors for `rank` of `tp`."""
        return RankReader(self.folder, tp, rank, self.keys, self.quantized)


@dataclass(frozen=True)
class _Settings:
    """Settings that the two formats keep in different places."""

    layers: dict[str, Any]  # the layers' own Hugging Face config
    block_size: Any
    mask_token_id: Any
    target_layers: Any
    tap_layers: Any  # z-lab's counting: 0 is the output of the first layer
    draft_vocab_size: Any = None


def open_drafter(path: Path, target_layers: int | None = None) -> DrafterCheckpoint:
    """Reads a drafter's configuration and vocabulary map, and checks its tensors against them.

    `target_layers`: layers of the target, for speculators checkpoints, which do not record them.

    Raises:
        CheckpointError: not a DFlash drafter, a setting that is missing, unsupported or contradicts another, or
            tensors that do not fit.
    """
    folder = CheckpointFolder.open(path)
    if (path / "mask_embedding.pt").exists():
        # Drafting with the target's row for the mask instead would cost acceptance without any error.
        raise CheckpointError(f"{path}: a mask embedding of its own (mask_embedding.pt) is not supported")
    # NVIDIA NeMo's trainer saves the drafter as a submodule.
    prefix = "model." if "fc.weight" not in folder.tensors and "model.fc.weight" in folder.tensors else ""
    with reading_config(path):
        config = _read_config(folder.config, target_layers)
        _check_taps(config, folder, prefix + "fc.weight")
    weights = Drafter(config).weights()
    keys = {part.key: prefix + part.key for weight in weights for part in weight.parts}
    quantized, precision = check_tensors(folder, weights, _ignored(folder, config), keys)
    config = config.model_copy(update=precision)
    draft_to_target = None if config.draft_vocab_size is None else _read_map(folder, config)
    return DrafterCheckpoint(config, folder, keys, draft_to_target, quantized=quantized)


def read_drafter_config(raw: dict[str, Any], target_layers: int | None = None) -> DrafterConfig:
    """Reads a drafter's shape from the content of its config.json; arguments and errors as in `open_drafter`."""
    return _read_config(raw, target_layers)


def default_tap_layers(target_layers: int, layers: int) -> list[int]:
    """Chooses z-lab's taps where a config names none: evenly from layer 1 to the last but two (`n//2` for one)."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


# -- configuration ---------------------------------------------------------------------------------------------------


def _read_config(raw: dict[str, Any], target_layers: int | None) -> DrafterConfig:
    if "speculators_model_type" in raw:
        settings = _read_speculators(raw, target_layers)
    elif "dflash_config" in raw or "DFlashDraftModel" in raw.get("architectures", []):
        settings = _read_zlab(raw)
    else:
        raise CheckpointError("config.json is no DFlash drafter's: it has no dflash_config or speculators_model_type")
    _check_layers(settings.layers)
    shape = read_decoder_config("dflash", settings.layers)
    config = DrafterConfig(
        **shape.model_dump(),
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layers=settings.target_layers,
        tap_layers=settings.tap_layers,
        draft_vocab_size=None if settings.draft_vocab_size == shape.vocab_size else settings.draft_vocab_size,
    )
    if config.block_size < 2:
        raise CheckpointError(f"config.json: block_size {config.block_size} leaves nothing to draft")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            f"config.json: mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )
    if config.draft_vocab_size is not None and config.draft_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"config.json: draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}"
        )
    return config


def _read_zlab(raw: dict[str, Any]) -> _Settings:
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError("config.json: dflash_config is not an object")
    _check_computed({**raw, **nested})
    target_layers = _required(raw, nested, "num_target_layers")
    taps = _in_either(raw, nested, "target_layer_ids")
    if taps is None:
        taps = default_tap_layers(target_layers, _required(raw, {}, "num_hidden_layers"))
    return _Settings(
        layers=raw,
        block_size=_required(raw, nested, "block_size"),
        mask_token_id=_required(raw, nested, "mask_token_id"),
        target_layers=target_layers,
        tap_layers=taps,
    )


def _read_speculators(raw: dict[str, Any], target_layers: int | None) -> _Settings:
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise CheckpointError(f"config.json: speculators_model_type {kind!r} is not supported; supported: dflash")
    _check_computed(raw)
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError("config.json: transformer_layer_config is missing")
    width, hidden = raw.get("target_hidden_size"), layers.get("hidden_size")
    if width is not None and width != hidden:
        raise CheckpointError(f"config.json: target_hidden_size {width} differs from hidden_size {hidden}")
    if target_layers is None:
        raise CheckpointError("config.json: this format does not say how many layers the target has; open it with one")
    taps = _required(raw, {}, "aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise CheckpointError(f"config.json: aux_hidden_state_layer_ids {taps!r} is not a list of layer numbers")
    if 0 in taps:
        raise CheckpointError("config.json: aux_hidden_state_layer_ids names 0, the embedding, which cannot be tapped")
    if "layer_types" in raw:  # vLLM reads them from here too, and they win
        layers = {**layers, "layer_types": raw["layer_types"]}
    return _Settings(
        layers={key: value for key, value in layers.items() if value is not None},
        block_size=_required(raw, {}, "block_size"),
        mask_token_id=_required(raw, {}, "mask_token_id"),
        target_layers=target_layers,
        # Counted from the embedding's output, so each is z-lab's id + 1; forgetting it only costs acceptance.
        tap_layers=[tap - 1 for tap in taps],
        draft_vocab_size=raw.get("draft_vocab_size"),
    )


def _in_either(raw: dict[str, Any], nested: dict[str, Any], key: str) -> Any:
    """Reads a setting at the top level or inside dflash_config; both may have it if they agree."""
    outer, inner = raw.get(key), nested.get(key)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"config.json: {key} is {outer} at the top level, but {inner} in dflash_config")
    return inner if outer is None else outer


def _required(raw: dict[str, Any], nested: dict[str, Any], key: str) -> Any:
    value = _in_either(raw, nested, key)
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    return value


def _check_computed(settings: dict[str, Any]) -> None:
    for key, computed in _COMPUTED.items():
        value = settings.get(key)
        if value is not None and value != computed:
            raise CheckpointError(f"config.json: {key} {value!r} is not supported; supported: {computed!r}")


def _check_layers(layers: dict[str, Any]) -> None:
    sliding = (layers.get("layer_types") or []).count("sliding_attention")
    if sliding:
        raise CheckpointError(
            f"config.json: {sliding} of the drafter's layers are sliding_attention, which is not supported yet; "
            "supported: full_attention"
        )
    # A default would be a guess, and a wrong one costs acceptance without any error.
    if "rope_theta" not in {**layers, **(layers.get("rope_parameters") or {})}:
        raise CheckpointError("config.json: rope_theta is missing")


def _check_taps(config: DrafterConfig, folder: CheckpointFolder, fc: str) -> None:
    taps, size = config.tap_layers, config.hidden_size
    width = folder.tensors[fc].shape[-1] if fc in folder.tensors else None
    if width is not None and width != len(taps) * size:
        raise CheckpointError(
            f"config.json: {len(taps)} tap layers of {size} make {len(taps) * size} columns, but {fc} has {width}"
        )
    outside = [tap for tap in taps if not 0 <= tap < config.target_layers]
    # Where the format does not record the target's layers, `open_pair` compares the taps with the target itself.
    if outside and "speculators_model_type" not in folder.config:
        raise CheckpointError(
            f"config.json: tap layer {outside[0]} is outside the target's {config.target_layers} layers"
        )


# -- tensors ---------------------------------------------------------------------------------------------------------


def _ignored(folder: CheckpointFolder, config: DrafterConfig) -> tuple[str, ...]:
    """Lists tensors of a speculators checkpoint that the target has too, and checks their shapes."""
    if "speculators_model_type" not in folder.config:
        return ()
    table = (config.vocab_size, config.hidden_size)
    copies = ["embed_tokens.weight"]
    if config.draft_vocab_size is None:
        copies.append("lm_head.weight")
    for name in copies:
        info = folder.tensors.get(name)
        if info is not None and info.shape != table:
            raise CheckpointError(f"{folder.path}: {name} is {list(info.shape)}, but the target's is {list(table)}")
    return (*_COPIES, *_MAPS, *copies)


def _read_map(folder: CheckpointFolder, config: DrafterConfig) -> torch.Tensor:
    """Reads target ids, int32 [draft vocabulary], from `d2t` (target id - draft id); `t2d`, a mask, must agree."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    for name, shape, dtypes in (("d2t", (size,), ("I64", "I32")), ("t2d", (vocab,), ("BOOL",))):
        info = folder.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{folder.path}: {name} is missing, but draft_vocab_size {size} needs it")
        if info.shape != shape or info.dtype not in dtypes:
            raise CheckpointError(
                f"{folder.path}: {name} is {list(info.shape)} {info.dtype} instead of {list(shape)} {dtypes[0]}"
            )
    offsets = folder.read("d2t").long()
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise CheckpointError(f"{folder.path}: d2t leads outside the vocabulary of {vocab}")
    reached = torch.zeros(vocab, dtype=torch.bool)
    reached[ids] = True
    if not torch.equal(reached, folder.read("t2d")):
        raise CheckpointError(f"{folder.path}: d2t and t2d do not name the same target ids")
    return ids.int()
