"""Rotary position embedding: the frequencies of each scaling rule, and the tables that `Ops.rope` reads."""

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from trtllm_dflash.errors import CheckpointError


class RopeConfig(BaseModel):
    """Rotary embedding of one model. `kind` is Hugging Face's `rope_type`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """The rotary settings of a Hugging Face config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`.

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
    raise CheckpointError(f"config.json: rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def rope_tables(config: RopeConfig, head_size: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, each [positions, head_size / 2] float32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / config.theta**exponents  # [D/2]
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    elif config.kind == "llama3":
        frequencies = _llama3(config, frequencies)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, and those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelength
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / config.factor
