"""The shape of a drafter that is trained: as its target's layers are, in z-lab's configuration."""

from typing import Any

from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint
from trtllm_dflash.checkpoint.drafter_config import default_tap_layers
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.speculators import second_settings
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.dflash2 import PUBLISHED_KINDS
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.rope import ORIGINAL, rope_scaling
from trtllm_dflash.text.tokenizer import TextCodec
from trtllm_dflash.train.settings import DEFAULT_BLOCK, DEFAULT_LAYERS, TrainSettings

#: Where a configuration keeps its rotary embedding.
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", ORIGINAL)

#: The architecture of each head in z-lab's format.
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}

#: Most numbers of a head, and most heads of keys, whatever the target has: those of published drafters.
_HEAD_SIZE, _KV_HEADS = 128, 8

_WIDER = 3  # FFN columns of a drafter whose target has experts, by its hidden size, as published ones have


def new_config(
    settings: TrainSettings, folder: CheckpointFolder, target: DecoderConfig, codec: TextCodec | None
) -> dict[str, Any]:
    """Makes the configuration of a drafter from nothing.

    Raises:
        SettingsError: taps outside the target, no token to mask with, or no RoPE to take over.
    """
    layers, block = settings.layers or DEFAULT_LAYERS, settings.block or DEFAULT_BLOCK
    taps = list(settings.taps or default_tap_layers(target.layers, layers))
    for tap in taps:
        if not 0 <= tap < target.layers:
            raise SettingsError(f"--taps {tap}: the target has layers 0 to {target.layers - 1}")
    kind = settings.head or "dflash"
    drafting = {"mask_token_id": _mask_token(settings, target, codec), "target_layer_ids": taps}
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size if target.moe is None else _WIDER * target.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads if target.heads % _KV_HEADS else min(target.kv_heads, _KV_HEADS),
        "head_dim": min(target.head_size, _HEAD_SIZE),
        "hidden_act": "silu",
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.norm_eps,
        **_rope(folder, target),
        "attention_bias": target.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": target.tied_embeddings,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * layers,
        "dtype": "bfloat16",
        "num_target_layers": target.layers,
        "block_size": block,
        "dflash_config": {**drafting, **second_settings(**PUBLISHED_KINDS[kind])},
    }


def _rope(folder: CheckpointFolder, target: DecoderConfig) -> dict[str, Any]:
    """Takes over the target's rotary embedding; its base alone where the target rotates a part of its heads.

    Raises:
        SettingsError: there is none.
    """
    text = folder.config.get("text_config", folder.config)
    told = {**text, **rope_scaling(text)}
    whole = target.rope.rotary_size is None and target.latent_attention is None
    if "rope_theta" in told:
        return {key: text[key] for key in _ROPE if key in text} if whole else {"rope_theta": told["rope_theta"]}
    base = told.get("full_attention", {}).get("rope_theta")  # of the layers that see everything, as a drafter's do
    if base is None:
        raise SettingsError(f"--target {folder.path}: has no rope_theta that a drafter could take over; give --from")
    return {"rope_theta": base}


def config_of(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    """Makes z-lab's configuration of a drafter that is there, whatever format it has.

    Raises:
        SettingsError: it is not one that is trained further.
    """
    path, config, raw = checkpoint.folder.path, checkpoint.config, checkpoint.folder.config
    if checkpoint.quantized:
        raise SettingsError(f"--from {path}: is quantized; begin with the drafter that it was made from")
    if config.draft_vocab_size is not None:
        raise SettingsError(f"--from {path}: has a vocabulary of its own, which is not trained")
    if config.windows is not None or config.causal_layers:
        raise SettingsError(f"--from {path}: windows in a drafter's layers are not trained")
    if config.from_anchor or (config.selector is not None and config.selector.kind != "dflash2"):
        raise SettingsError(f"--from {path}: drafting as DSpark does is not trained")
    layers = raw.get("transformer_layer_config", raw)
    return {
        **{key: value for key, value in layers.items() if key not in ("auto_map", "torch_dtype")},
        "architectures": [_ARCHITECTURES[_head_of(config)]],
        "dtype": "bfloat16",
        "num_target_layers": config.target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layers),
            **second_settings(config.convolution, config.selector),
        },
    }


def _head_of(config: DrafterConfig) -> str:
    return "dflash" if config.selector is None else "dflash2"


def check_shape(settings: TrainSettings, config: DrafterConfig) -> None:
    """Refuses flags that a drafter that is there contradicts.

    Raises:
        SettingsError: names the flag.
    """
    has = {
        "layers": config.layers,
        "head": _head_of(config),
        "block": config.block_size,
        "taps": config.tap_layers,
        "mask_token": config.mask_token_id,
    }
    for name, value in has.items():
        asked = getattr(settings, name)
        if asked is not None and asked != value:
            raise SettingsError(f"--{name.replace('_', '-')}: the drafter of --from has {value}; leave it out")


def _mask_token(settings: TrainSettings, target: DecoderConfig, codec: TextCodec | None) -> int:
    """Chooses the masks' token: as asked, else a row of the embedding that no token has, else one called mask."""
    if settings.mask_token is not None:
        if settings.mask_token >= target.vocab_size:
            raise SettingsError(f"--mask-token {settings.mask_token}: the vocabulary has {target.vocab_size} tokens")
        return settings.mask_token
    tokens = {} if codec is None else codec.backend.get_vocab()
    first = 1 + max(tokens.values(), default=target.vocab_size)
    if first < target.vocab_size:
        return first
    named = [token for text, token in tokens.items() if text.strip("<|>[]").lower() == "mask"]
    if not named:
        raise SettingsError("--mask-token: every row of the embedding is some token's; name one that no text uses")
    return named[0]
