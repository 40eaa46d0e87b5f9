"""Rotary position embedding: the frequencies of each scaling rule, and the tables that `Ops.rope` reads."""

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt

from trtllm_dflash.errors import CheckpointError


class RopeConfig(BaseModel):
    """Rotary embedding of one model. `kind` is Hugging Face's `rope_type`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    rotary_size: PositiveInt | None = None  # a head's first dimensions, which alone are rotated; None: all
    # YaRN's alone:
    beta_fast: float = 32.0  # turns over the original positions, from which on a frequency is kept
    beta_slow: float = 1.0  # and below which it is slowed by the whole factor
    truncate: bool = True  # the bounds between the two are whole dimensions
    attention_factor: float = 1.0  # of cos and sin, so that its square is of every score
    share: float = 1.0  # proportional's alone: of a head's pairs, the first so many turn


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Reads rotary settings from Hugging Face's config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
        CheckpointError: the scaling rule is not one we compute.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=scaling["factor"])
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_positions=scaling["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return _read_yarn(scaling, theta, raw)
    if kind == "proportional":
        return RopeConfig(kind=kind, theta=theta, share=scaling.get("partial_rotary_factor", 1.0))
    raise CheckpointError(
        f"config.json: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn, proportional"
    )


def rotary_size(raw: dict[str, Any], head_size: int) -> int | None:
    """Reads how many of a head's dimensions are rotated from Hugging Face's config.json; None: all.

    Raises:
        CheckpointError: they are not so many pairs.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    size = int(raw.get("rotary_dim") or head_size * share)
    if not 0 < size <= head_size or size % 2:
        raise CheckpointError(f"config.json: {size} of a head's {head_size} dimensions cannot be rotated in pairs")
    return None if size == head_size else size


def _read_yarn(scaling: dict[str, Any], theta: float, raw: dict[str, Any]) -> RopeConfig:
    """Reads YaRN's settings (arXiv 2309.00071), with transformers' defaults."""
    original = scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
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
        truncate=scaling.get("truncate", True),
        attention_factor=attention,
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_tables(config: RopeConfig, head_size: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes cos and sin of position * frequency, times the attention factor: FP32 [positions, rotary size / 2] each."""
    head_size = config.rotary_size or head_size
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / config.theta**exponents  # [D/2]
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    elif config.kind == "llama3":
        frequencies = _llama3(config, frequencies)
    elif config.kind == "yarn":
        frequencies = _yarn(config, frequencies, head_size)
    elif config.kind == "proportional":
        frequencies[int(config.share * head_size // 2) :] = 0
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scales frequencies by Llama 3.1's rule: long waves slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelength
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / config.factor


def _yarn(config: RopeConfig, frequencies: torch.Tensor, head_size: int) -> torch.Tensor:
    """Scales frequencies by YaRN's rule: by each one's turns over the original positions, blended along dimensions."""

    def dimension(turns: float) -> float:
        wavelength = config.original_max_positions / (turns * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = high - low if high != low else 0.001
    slow = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return frequencies / config.factor * slow + frequencies * (1 - slow)
