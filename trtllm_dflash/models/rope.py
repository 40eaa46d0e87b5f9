"""Rotary position embedding: its settings, by the scaling rule."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.errors import CheckpointError

#: The positions that a model had before its rotary embedding was scaled.
ORIGINAL = "original_max_position_embeddings"

#: A finite one: it is divided by, its logarithm or root is taken, or it has no meaning otherwise.
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Full turns over a model's positions: far more than any has, and whose angle is a number.
Turns = Annotated[float, Field(gt=0, le=2**31, allow_inf_nan=False)]


class RopeConfig(BaseModel):
    """Rotary embedding of one model. `kind` is Hugging Face's `rope_type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    theta: PositiveNumber
    factor: PositiveNumber = 1.0
    low_freq_factor: PositiveNumber = 1.0
    high_freq_factor: PositiveNumber = 4.0
    original_max_positions: PositiveInt = 8192
    rotary_size: PositiveInt | None = None  # a head's first dimensions, which alone are rotated; None: all
    # YaRN's alone:
    beta_fast: Turns = 32.0  # turns over the original positions, from which on a frequency is kept
    beta_slow: Turns = 1.0  # and below which it is slowed by the whole factor
    truncate: bool = True  # the bounds between the two are whole dimensions
    attention_factor: float = 1.0  # of cos and sin, so that its square is of every score
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # proportional's alone: of a head's pairs, the first so many turn


def rope_scaling(raw: dict[str, Any]) -> dict[str, Any]:
    """Reads the settings that Hugging Face's config.json groups as `rope_parameters`, formerly `rope_scaling`.

    Raises:
        CheckpointError: they are no object, differ by kinds of layers, or are there under both names and differ.
    """
    found = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    settings: dict[str, Any] = {}
    for key, scaling in found.items():
        if not isinstance(scaling, dict):
            raise CheckpointError(f"config.json: {key} {scaling!r} is not an object")
        nested = [name for name, value in scaling.items() if isinstance(value, dict)]
        if nested:
            raise CheckpointError(f"config.json: {key} of kinds of layers ({', '.join(nested)}) is not supported here")
        said = {name: value for name, value in scaling.items() if value is not None and name != "type"}
        said["rope_type"] = scaling.get("rope_type") or scaling.get("type") or "default"
        if any(settings[name] != value for name, value in said.items() if name in settings):
            raise CheckpointError(
                "config.json: rope_parameters and rope_scaling differ; put all settings into rope_parameters, and "
                "remove rope_scaling"
            )
        settings |= said
    return settings if len(found) > 1 else next(iter(found.values()), {})


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Reads rotary settings from Hugging Face's config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
        CheckpointError: the scaling rule is not one we compute, or its settings are no object.
    """
    scaling = rope_scaling(raw)
    if raw.get(ORIGINAL) is not None:  # beside them, where Phi-3's have it; transformers and vLLM take it first
        scaling = {**scaling, ORIGINAL: raw[ORIGINAL]}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=scaling["factor"])
    if kind == "llama3":
        if not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
            raise CheckpointError("config.json: rope scaling 'llama3': low_freq_factor is not below high_freq_factor")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_positions=scaling[ORIGINAL],
        )
    if kind == "yarn":
        return _read_yarn(scaling, theta, raw)
    if kind == "proportional":
        return RopeConfig(kind=kind, theta=theta, share=_share(raw, scaling), factor=scaling.get("factor", 1.0))
    raise CheckpointError(
        f"config.json: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn, proportional"
    )


def rotary_size(raw: dict[str, Any], head_size: int) -> int | None:
    """Reads how many of a head's dimensions are rotated from Hugging Face's config.json; None: all.

    Raises:
        CheckpointError: they are not so many pairs, or the share of a head is no number.
    """
    scaling = rope_scaling(raw)
    if scaling.get("rope_type", scaling.get("type")) == "proportional":  # the share is its own: see `read_rope`
        return None
    share = _share(raw, scaling)
    if not isinstance(share, int | float) or not math.isfinite(share):
        raise CheckpointError(f"config.json: partial_rotary_factor {share!r} is not a number")
    size = int(head_size * share)
    if not 0 < size <= head_size or size % 2:
        raise CheckpointError(f"config.json: {size} of a head's {head_size} dimensions cannot be rotated in pairs")
    return None if size == head_size else size


def _share(raw: dict[str, Any], scaling: dict[str, Any]) -> Any:
    """Reads the share of a head's dimensions that is rotated: among the rotary settings, or else beside them."""
    return scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))


def _read_yarn(scaling: dict[str, Any], theta: float, raw: dict[str, Any]) -> RopeConfig:
    """Reads YaRN's settings (arXiv 2309.00071), with transformers' defaults."""
    if not theta > 1:
        raise CheckpointError(f"config.json: rope_theta {theta}: rope scaling 'yarn' needs one above 1")
    original = scaling.get(ORIGINAL) or raw["max_position_embeddings"]
    factor = scaling.get("factor") or raw["max_position_embeddings"] / original
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _mscale(factor, mscale) / _mscale(factor, of_all) if mscale and of_all else _mscale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=attention,
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
