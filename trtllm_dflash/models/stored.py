"""A checkpoint's way to store a target: the names of its tensors, and whether a layer's experts are one of them."""

from collections.abc import Collection, Iterable

from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.weights import Weight

#: What the names of a text model begin with, alone and in models of more than text; and those of its LM head.
_PREFIX, _WRAPPED = "model.", ("model.language_model.", "language_model.model.")
_HEAD, _WRAPPED_HEAD = "lm_head.weight", "language_model.lm_head.weight"
#: Families with experts in either form -> the end of the name of a layer's tensor of them.
_STACKED = {
    "qwen3_next": ".mlp.experts.gate_up_proj",
    "qwen3_5_moe": ".mlp.experts.gate_up_proj",
    "gemma4": ".experts.gate_up_proj",
}
#: Patterns of tensors that a family's checkpoints have for images and sound.
_BESIDE = {
    "gemma4": ("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*"),
    "kimi_k25": ("vision_tower.*", "mm_projector.*"),
}


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
    """Finds what a checkpoint with tensors of these names calls the tensors of a model, where the two differ."""
    prefix = next((prefix for prefix in _WRAPPED if prefix + "embed_tokens.weight" in names), _PREFIX)
    head = _WRAPPED_HEAD if _WRAPPED_HEAD in names else _HEAD
    found = {}
    for key in {part.key for weight in weights for part in weight.parts}:
        name = head if key == _HEAD else key
        if key.startswith(_PREFIX):
            name = prefix + key.removeprefix(_PREFIX)
        if name not in names and name + "_packed" in names:  # whole numbers of few bits
            name += "_packed"
        if name != key:
            found[key] = name
    return found
