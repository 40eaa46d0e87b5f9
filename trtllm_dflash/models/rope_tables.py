"""Tables of rotary position embedding, which `Ops.rope` reads."""

import math

import torch

from trtllm_dflash.models.rope import RopeConfig


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
        frequencies = frequencies / config.factor
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
