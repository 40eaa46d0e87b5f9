"""Engines of published shapes: enough to know what a step costs, without a checkpoint."""

from functools import lru_cache
from typing import Any, Literal

import torch

from trtllm_dflash.checkpoint.ranks import check_tp
from trtllm_dflash.cost.published import PUBLISHED, Shape, published_shape
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import FAMILIES, read_target_config, target_weights
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.dflash2 import PUBLISHED_KINDS
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import Weight, WeightPrecision, rounded_to_fp8
from trtllm_dflash.ops.formats import FP8_MULTIPLE

#: What a drafter has of its target.
_TARGETS = ("vocab_size", "hidden_size", "norm_eps", "max_positions", "attention_bias")

#: The published shapes that we compute.
SHAPES = {name: shape for name, shape in PUBLISHED.items() if shape.family in FAMILIES}


def find_shape(name: str) -> Shape:
    """Looks up a shape by its name.

    Raises:
        SettingsError: there is none, or we do not compute its family.
    """
    if name in PUBLISHED and name not in SHAPES:
        raise SettingsError(f"--shape {name}: family {PUBLISHED[name].family} is not computed yet")
    if name not in SHAPES:
        raise SettingsError(f"--shape {name} is not known; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def asked_precision(precision: str | None, device: torch.device) -> dict[str, Any]:
    """Turns the flag `--precision` into `shape_config`'s `precision` and `target_precision`, on a device."""
    target_precision = precision if precision in ("fp8", "fp8-blocks") else None
    if target_precision is not None or precision in (None, "auto"):
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"precision": precision, "target_precision": target_precision}


def shape_config(
    name: str,
    *,
    layers: int | None = None,
    draft_vocab: int | None = None,
    target_precision: Literal["fp8", "fp8-blocks"] | None = None,
    drafter_precision: Literal["fp8"] | None = None,
    **settings: Any,
) -> EngineConfig:
    """Makes the engine configuration of a shape: its target, and a drafter of the target's widths.

    Args:
        layers: of the target, where not the shape's.
        draft_vocab, drafter_precision: as the flags of `trtllm-dflash build`.
        target_precision: fp8: as `build --precision fp8` rounds it; fp8-blocks: as FP8 checkpoints are published.
        settings: what `EngineConfig` needs besides the models: precision, tp, max_batch, max_seq_len, chunk.

    Raises:
        SettingsError: the shape is not known, or a setting does not fit it.
    """
    target, drafter = shape_models(name, layers)
    if target_precision == "fp8":
        target = target.model_copy(update=rounded_to_fp8(target_weights(target)))
    elif target_precision == "fp8-blocks":
        target = _in_blocks(name, target)
    precision = None if drafter_precision is None else WeightPrecision(drafter_precision)
    lighter = {"linear_precision": precision, "draft_vocab_size": draft_vocab}
    drafter = drafter.model_copy(update=lighter)
    config = EngineConfig(name=name, block_size=drafter.step_rows, target=target, drafter=drafter, **settings)
    check_tp(config.tp, target, drafter)
    unit = config.tp * FP8_MULTIPLE
    if draft_vocab is not None and (draft_vocab % unit or draft_vocab > target.vocab_size):
        most = target.vocab_size // unit * unit
        raise SettingsError(f"--draft-vocab {draft_vocab}: must be a multiple of {unit}, at most {most}")
    if config.max_seq_len > target.max_positions:
        raise SettingsError(f"--shape {name} takes {target.max_positions} positions, not {config.max_seq_len}")
    return config


@lru_cache  # a comparison of GPUs asks for one shape again and again
def shape_models(name: str, layers: int | None = None) -> tuple[DecoderConfig, DrafterConfig]:
    """Makes the configurations of a shape's target, and of a drafter of the target's widths.

    Args:
        layers: of the target, where not the shape's.

    Raises:
        SettingsError: the shape is not known, or has fewer layers.
    """
    shape = find_shape(name)
    if layers is not None and layers > shape.facts.target_layers:
        raise SettingsError(f"--layers {layers}: {name} has {shape.facts.target_layers}")
    raw = shape.target_of(layers or shape.facts.target_layers)
    target = _as_stored(raw, read_target_config(raw))
    return target, drafter_of(shape, target)


def _as_stored(raw: dict[str, Any], target: DecoderConfig) -> DecoderConfig:
    """Gives a target the precision of its published checkpoint, where that is not the engine's own."""
    if "config_groups" in (raw.get("text_config") or {}).get("quantization_config", {}):  # Kimi-K2.5's experts
        plain = tuple(weight.linear for weight in _matrices(target) if weight.stack is None)
        return target.model_copy(update={"linear_precision": WeightPrecision.INT4, "plain_linears": plain})
    if "weight_block_size" in raw.get("quantization_config", {}):  # MiniMax-M2.x
        return _with_blocks(target)
    return target


def _in_blocks(name: str, target: DecoderConfig) -> DecoderConfig:
    """Gives a target the precision of a published FP8 checkpoint.

    Raises:
        SettingsError: its own checkpoint has other few bits.
    """
    if target.linear_precision not in (None, WeightPrecision.FP8_BLOCKS) or (target.moe and target.moe.mxfp4):
        raise SettingsError(f"--precision fp8-blocks: {name} is published in other few bits; leave it out")
    return _with_blocks(target)


def _with_blocks(target: DecoderConfig) -> DecoderConfig:
    """Has all projections of a target, experts' too, in FP8 with a scale for each 128 by 128."""
    plain = tuple(weight.linear for weight in _matrices(target) if not weight.linear.endswith("_proj"))
    return target.model_copy(update={"linear_precision": WeightPrecision.FP8_BLOCKS, "plain_linears": plain})


def _matrices(target: DecoderConfig) -> list[Weight]:
    return [weight for weight in target_weights(target) if weight.is_matrix]


@lru_cache  # likewise
def planned_models(name: str) -> tuple[DecoderConfig, DrafterConfig]:
    """Makes the configurations of a published pair, to plan for it.

    Raises:
        SettingsError: the pair's shape is not known.
    """
    shape = published_shape(name)
    target = _as_stored(shape.target, read_target_config(shape.target))
    return target, drafter_of(shape, target)


def drafter_of(shape: Shape, target: DecoderConfig) -> DrafterConfig:
    """Makes the configuration of a shape's drafter for a target, which may be cut to a few layers. Its windows, which
    some of its layers have, are not in it: plans count all that the layers could see.
    """
    facts, widths = shape.facts, shape.drafter
    return DrafterConfig(
        **target.model_dump(include=set(_TARGETS)),
        rope=target.rope.model_copy(update={"rotary_size": None}),  # it rotates whole heads
        family="dflash",
        layers=facts.drafter_layers,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_size=widths.head_size,
        intermediate_size=widths.intermediate_size,
        tied_embeddings=False,
        block_size=facts.block_size,
        # Any token will do where the mask is not known: which it is costs nothing.
        mask_token_id=target.vocab_size - 1 if facts.mask_token_id is None else facts.mask_token_id,
        target_layers=target.layers,
        # A target cut to a few layers has fewer than there are taps: some are tapped twice.
        tap_layers=tuple(min(max(tap, 0), target.layers - 1) for tap in shape.tap_layers),
        **PUBLISHED_KINDS[facts.kind],
    )
