"""A checkpoint's way to store a target: the names of its tensors, and whether a layer's experts are one of them."""

from collections.abc import Collection, Iterable

from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.weights import Weight

_PREFIX, _WRAPPED = "model.", "model.language_model."
#: Families with experts in either form -> the end of the name of a layer's tensor of them.
_STACKED = {
    "qwen3_next": ".mlp.experts.gate_up_proj",
    "qwen3_5_moe": ".mlp.experts.gate_up_proj",
    "gemma4": ".experts.gate_up_proj",
}
#: Patterns of tensors that a family's checkpoints have for images and sound.
_BESIDE = {"gemma4": ("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*")}


def as_stored(config: DecoderConfig, names: Iterable[str]) -> DecoderConfig:
    """Notes in a configuration, where a family has several forms, in which the tensors of these names are."""
    moe = config.moe
    if moe is None or config.family not in _STACKED:
        return config
    stacked = any(name.endswith(_STACKED[config.family]) for name in names)
    return config.model_copy(update={"moe": moe.model_copy(update={"stacked": stacked})})


def beside_text(config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of tensors that a family's checkpoints have for more than text, and for drafts of their own."""
    return _BESIDE.get(config.family, () if config.delta is None else ("model.visual.*", "mtp.*"))


def checkpoint_names(weights: Iterable[Weight], names: Collection[str]) -> dict[str, str]:
    """Finds what a checkpoint with tensors of these names calls the tensors of a model; nothing where they agree."""
    if not any(name.startswith(_WRAPPED) for name in names):
        return {}
    keys = {part.key for weight in weights for part in weight.parts if part.key.startswith(_PREFIX)}
    return {key: _WRAPPED + key.removeprefix(_PREFIX) for key in keys}
