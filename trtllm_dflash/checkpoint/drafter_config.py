"""A drafter's configuration, in the formats that exist.

z-lab (also NVIDIA ModelOpt's export): a Qwen3 config.json with `dflash_config`, for DFlash and DFlash 2.
speculators (vllm-project/speculators): the layers' config nested in `transformer_layer_config`, tap layers counted from
the embedding's output; DFlash, DFlash 2 and DSpark.
DeepSpec (deepseek-ai/DeepSpec): a Qwen3 config.json with everything at the top level; DSpark, and DFlash that drafts
from the bonus token's row on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import read_decoder_config
from trtllm_dflash.models.dflash2 import CANDIDATES, ConvolutionConfig, SelectorConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.rope import rope_scaling

#: Settings under which a drafter computes something else than ours does -> the only value that we compute.
#: Every one of them would cost acceptance without any error.
_COMPUTED = {
    "use_swa": False,
    "causal": False,
    "attention_sink_bias": False,
    "input_embedding_scale": 1.0,
    "is_neox_style": True,
    "projector_type": "dflash",
    "shift_label": False,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"

#: DSpark's `markov_head_type` -> our selector.
_MARKOV: dict[str, Literal["markov", "gated-markov"]] = {"vanilla": "markov", "gated": "gated-markov"}


@dataclass(frozen=True)
class _Settings:
    """Settings that the formats keep in different places."""

    layers: dict[str, Any]  # the layers' own Hugging Face config
    block_size: Any
    mask_token_id: Any
    target_layers: Any
    tap_layers: Any  # z-lab's counting: 0 is the output of the first layer; None: the default
    draft_vocab_size: Any = None
    from_anchor: Any = False
    is_causal: Any = None  # in the block; None: layers with a window are
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None


def read_drafter_config(raw: dict[str, Any], target_layers: int | None = None) -> DrafterConfig:
    """Reads a drafter's config.json.

    Args:
        target_layers: layers of the target, for speculators checkpoints, which do not record them.

    Raises:
        CheckpointError: it is no drafter's; or a setting is missing, unsupported or contradicts another.
    """
    if "speculators_model_type" in raw:
        settings = _read_speculators(raw, target_layers)
    elif is_deepspec(raw):
        settings = _read_deepspec(raw)
    elif _is_zlab(raw):
        settings = _read_zlab(raw, "DFlash2DraftModel" in _architectures(raw))
    else:
        raise CheckpointError("config.json is no DFlash drafter's: it has no dflash_config or speculators_model_type")
    config = _make_config(settings)
    _check(config)
    return config


def is_deepspec(raw: dict[str, Any]) -> bool:
    """Whether a config.json is DeepSpec's."""
    return "Qwen3DSparkModel" in _architectures(raw)


def is_drafter(raw: dict[str, Any]) -> bool:
    """Whether a config.json is a drafter's, in one of the formats."""
    return _is_zlab(raw) or is_deepspec(raw) or "speculators_model_type" in raw


def _is_zlab(raw: dict[str, Any]) -> bool:
    return "dflash_config" in raw or "DFlashDraftModel" in _architectures(raw)


def _architectures(raw: dict[str, Any]) -> Any:
    named = raw.get("architectures")
    return named if isinstance(named, list) else []


def default_tap_layers(target_layers: int, layers: int) -> list[int]:
    """Chooses z-lab's taps where a config names none: evenly from layer 1 to the last but two (`n//2` for one)."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _make_config(settings: _Settings) -> DrafterConfig:
    layers = settings.layers
    # A default would be a guess, and a wrong one costs acceptance without any error.
    if "rope_theta" not in {**layers, **rope_scaling(layers)}:
        raise CheckpointError("config.json: rope_theta is missing")
    types = layers.get("layer_types")
    # Without layer_types a window is none that a drafter was ever published with: refused as any decoder's.
    told = {} if types is None else {"layer_types": [], "use_sliding_window": False}
    # Drafters are Qwen3's layers, and those rotate whole heads in transformers, even where a share is inherited.
    shape = read_decoder_config("dflash", {**layers, **told}, partial_rotary=None)
    windows = None if types is None else _read_windows(layers, types, shape.layers)
    taps = settings.tap_layers
    if taps is None:
        taps = default_tap_layers(settings.target_layers, shape.layers)
    return DrafterConfig(
        **{**shape.model_dump(), "windows": windows},
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layers=settings.target_layers,
        tap_layers=taps,
        draft_vocab_size=None if settings.draft_vocab_size == shape.vocab_size else settings.draft_vocab_size,
        from_anchor=settings.from_anchor,
        causal_layers=_causal_layers(windows, shape.layers, settings.is_causal),
        convolution=settings.convolution,
        selector=settings.selector,
    )


def _check(config: DrafterConfig) -> None:
    """Refuses a configuration that contradicts itself."""
    block, vocab, drafted = config.block_size, config.vocab_size, config.draft_vocab_size
    if config.step_rows < 2:
        raise CheckpointError(f"config.json: block_size {block} leaves nothing to draft")
    if not 0 <= config.mask_token_id < vocab:
        raise CheckpointError(f"config.json: mask_token_id {config.mask_token_id} is outside the vocabulary of {vocab}")
    if drafted is not None and drafted > vocab:
        raise CheckpointError(f"config.json: draft_vocab_size {drafted} exceeds vocab_size {vocab}")
    for window in config.windows or ():
        if window is not None and window < block:
            raise CheckpointError(f"config.json: sliding_window {window} is smaller than the block of {block}")
    if config.convolution is not None:
        taps, group = config.convolution.taps, config.convolution.group_size
        if config.hidden_size % group:
            raise CheckpointError(f"config.json: conv_group_size {group} does not divide {config.hidden_size}")
        if taps > block:
            raise CheckpointError(f"config.json: conv_kernel_size {taps} is larger than the block of {block}")
    if config.selector is not None and config.selector.candidates > (drafted or vocab):
        raise CheckpointError(
            f"config.json: selector_top_k {config.selector.candidates} exceeds the vocabulary of {drafted or vocab}"
        )


# -- windows ---------------------------------------------------------------------------------------------------------


def _read_windows(layers: dict[str, Any], types: Any, count: int) -> tuple[int | None, ...] | None:
    """Reads each layer's window; None where no layer has one."""
    if not isinstance(types, list) or len(types) != count or not {_FULL, _SLIDING}.issuperset(types):
        raise CheckpointError(f"config.json: layer_types must say {_SLIDING} or {_FULL} for each of {count} layers")
    if _SLIDING not in types:
        return None
    window = layers.get("sliding_window")
    if type(window) is not int or window < 1:
        raise CheckpointError(f"config.json: sliding_window {window!r} is not a positive number of tokens")
    if layers.get("use_sliding_window") is False:
        raise CheckpointError(f"config.json: use_sliding_window is false, but layer_types has {_SLIDING}")
    return tuple(window if kind == _SLIDING else None for kind in types)


def _causal_layers(windows: tuple[int | None, ...] | None, count: int, is_causal: Any) -> tuple[int, ...]:
    """Lists the layers whose block rows see no later one: as the configuration says, else those with a window."""
    if is_causal is None:
        return tuple(i for i, window in enumerate(windows or ()) if window is not None)
    if not isinstance(is_causal, bool):
        raise CheckpointError(f"config.json: is_causal {is_causal!r} is not true or false")
    return tuple(range(count)) if is_causal else ()


# -- formats ---------------------------------------------------------------------------------------------------------


def _read_zlab(raw: dict[str, Any], is_second: bool) -> _Settings:
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError("config.json: dflash_config is not an object")
    _check_computed({**raw, **nested})
    _check_anchor({**raw, **nested})
    return _Settings(
        layers=raw,
        block_size=_required(raw, nested, "block_size"),
        mask_token_id=_required(raw, nested, "mask_token_id"),
        target_layers=_required(raw, nested, "num_target_layers"),
        tap_layers=_in_either(raw, nested, "target_layer_ids"),
        is_causal=_in_either(raw, nested, "is_causal"),
        convolution=_read_convolution(raw, nested) if is_second else None,
        selector=_read_selector(raw, nested) if is_second else None,
    )


def _read_speculators(raw: dict[str, Any], target_layers: int | None) -> _Settings:
    kind = raw["speculators_model_type"]
    if kind not in _SELECTORS:
        raise CheckpointError(
            f"config.json: speculators_model_type {kind!r} is not supported; supported: {', '.join(_SELECTORS)}"
        )
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
    if kind == "dflash2":
        _check_anchor(raw)
    if "layer_types" in raw:  # vLLM reads them from here too, and they win
        layers = {**layers, "layer_types": raw["layer_types"]}
    # Both have had several defaults.
    is_free, from_anchor = raw.get("sliding_window_non_causal"), raw.get("sample_from_anchor")
    if kind == "dflash2":
        is_free = _required(raw, {}, "sliding_window_non_causal")
    if kind == "dspark":
        from_anchor = _required(raw, {}, "sample_from_anchor")
    return _Settings(
        layers={key: value for key, value in layers.items() if value is not None},
        block_size=_required(raw, {}, "block_size"),
        mask_token_id=_required(raw, {}, "mask_token_id"),
        target_layers=target_layers,
        # Counted from the embedding's output, so each is z-lab's id + 1; forgetting it only costs acceptance.
        tap_layers=[tap - 1 for tap in taps],
        draft_vocab_size=raw.get("draft_vocab_size"),
        from_anchor=from_anchor or False,
        is_causal=False if is_free else None,  # layers without a window never are
        convolution=_read_convolution(raw, {}) if kind == "dflash2" else None,
        selector=_SELECTORS[kind](raw, {}),
    )


def _read_deepspec(raw: dict[str, Any]) -> _Settings:
    nested = raw.get("dflash_config") or {}
    _check_computed({**raw, **nested})
    from_anchor = _in_either(raw, nested, "sample_from_anchor")
    return _Settings(
        layers=raw,
        block_size=_required(raw, nested, "block_size"),
        mask_token_id=_required(raw, nested, "mask_token_id"),
        target_layers=_required(raw, nested, "num_target_layers"),
        tap_layers=_required(raw, nested, "target_layer_ids"),
        from_anchor=True if from_anchor is None else from_anchor,
        # Its layers see the whole block, whatever their type (deepspec/eval/dspark/draft_ops.py).
        is_causal=False,
        selector=_read_markov(raw, nested),
    )


def _read_convolution(raw: dict[str, Any], nested: dict[str, Any]) -> ConvolutionConfig:
    return ConvolutionConfig(
        taps=_required(raw, nested, "conv_kernel_size"), group_size=_required(raw, nested, "conv_group_size")
    )


def _read_selector(raw: dict[str, Any], nested: dict[str, Any]) -> SelectorConfig:
    multiplier, softcap = (_in_either(raw, nested, key) for key in ("output_multiplier", "final_logit_softcapping"))
    return SelectorConfig(
        kind="dflash2",
        rank=_required(raw, nested, "selector_rank"),
        candidates=_required(raw, nested, "selector_top_k"),
        multiplier=1.0 if multiplier is None else multiplier,
        softcap=softcap or None,  # 0 is none
    )


def _read_markov(raw: dict[str, Any], nested: dict[str, Any]) -> SelectorConfig | None:
    rank = _required(raw, nested, "markov_rank")
    if rank == 0:
        return None
    kind = _required(raw, nested, "markov_head_type")
    if kind not in _MARKOV:
        raise CheckpointError(
            f"config.json: markov_head_type {kind!r} is not supported; supported: {', '.join(_MARKOV)}"
        )
    vocabularies = [size for size in (raw.get("draft_vocab_size"), raw.get("vocab_size")) if size is not None]
    return SelectorConfig(kind=_MARKOV[kind], rank=rank, candidates=min([CANDIDATES, *vocabularies]))


#: The readers of a selector's settings, by speculators' kind of drafter.
_SELECTORS: dict[str, Callable[[dict[str, Any], dict[str, Any]], SelectorConfig | None]] = {
    "dflash": lambda *_: None,
    "dflash2": _read_selector,
    "dspark": _read_markov,
}


# -- settings --------------------------------------------------------------------------------------------------------


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


def _check_anchor(settings: dict[str, Any]) -> None:
    value = settings.get("sample_from_anchor")
    if value:
        raise CheckpointError(f"config.json: sample_from_anchor {value!r} is not supported here; supported: false")
