"""Real models' shapes, and the engines of them: enough to know what a step costs, without a checkpoint."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from trtllm_dflash.checkpoint.drafter import default_tap_layers
from trtllm_dflash.checkpoint.slicing import check_tp
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import rounded_to_fp8
from trtllm_dflash.ops.fp8 import FP8_MULTIPLE

#: What a drafter never has, whatever its target is.
_TARGETS_OWN = ("windows", "attention_sinks", "moe")

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shape:
    """A target, as its config.json says, and what its drafter has of its own; the drafter's widths are the target's."""

    target: dict[str, Any]
    block_size: int
    mask_token_id: int
    drafter_layers: int = 5
    drafter_intermediate: int | None = None  # None: the target's
    tap_layers: tuple[int, ...] | None = None  # None: one for each of the drafter's layers, by z-lab's rule


def _gpt_oss(layers: int, experts: int, block_size: int, tap_layers: tuple[int, ...]) -> Shape:
    target = {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return Shape(
        target,
        block_size,
        mask_token_id=201087,
        drafter_layers=8,
        drafter_intermediate=7680,
        tap_layers=tap_layers,
    )


SHAPES = {
    "qwen3-8b": Shape(
        {
            **_QWEN3,
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "intermediate_size": 12288,
            "tie_word_embeddings": False,
        },
        block_size=16,
        mask_token_id=151669,
    ),
    "qwen3-4b": Shape(
        {
            **_QWEN3,
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "intermediate_size": 9728,
        },
        block_size=16,
        mask_token_id=151669,
    ),
    "qwen3-0.6b": Shape(
        {
            **_QWEN3,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 3072,
        },
        block_size=16,
        mask_token_id=151669,
    ),
    "llama-3.1-8b": Shape(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
        block_size=10,
        mask_token_id=128255,
    ),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128, block_size=10, tap_layers=(1, 9, 17, 25, 33)),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32, block_size=8, tap_layers=(1, 6, 11, 16, 21)),
    "qwen3-coder-30b-a3b": Shape(
        {
            **_QWEN3,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 262144,
            "rope_theta": 1e7,
            "tie_word_embeddings": False,
        },
        block_size=16,
        mask_token_id=151669,
        drafter_layers=8,
        tap_layers=(1, 12, 23, 34, 45),
    ),
    # For a try on a CPU.
    "tiny": Shape(
        {
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
        block_size=8,
        mask_token_id=511,
        drafter_layers=2,
    ),
}


def find_shape(name: str) -> Shape:
    """The shape of that name.

    Raises:
        SettingsError: there is none; lists those there are.
    """
    if name not in SHAPES:
        raise SettingsError(f"--shape {name} is not known; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def asked_precision(precision: str | None, device: torch.device) -> dict[str, Any]:
    """`shape_config`'s `precision` and `target_precision` for what a flag says, on a device."""
    if precision in (None, "auto", "fp8"):
        own = "bf16" if device.type == "cuda" else "fp32"
        return {"precision": own, "target_precision": "fp8" if precision == "fp8" else None}
    return {"precision": precision, "target_precision": None}


def shape_config(
    name: str,
    *,
    layers: int | None = None,
    draft_vocab: int | None = None,
    target_precision: Literal["fp8"] | None = None,
    drafter_precision: Literal["fp8"] | None = None,
    **settings: Any,
) -> EngineConfig:
    """The engine of a shape: its target, and a drafter of the target's widths.

    Args:
        layers: of the target, where not the shape's.
        draft_vocab, drafter_precision: as the flags of `trtllm-dflash build`; target_precision: its `--precision`.
        settings: what `EngineConfig` needs besides the models: precision, tp, max_batch, max_seq_len, chunk.

    Raises:
        SettingsError: the shape is not known, or a setting does not fit it.
    """
    shape = find_shape(name)
    target = read_target_config({**shape.target, "num_hidden_layers": layers or shape.target["num_hidden_layers"]})
    if target_precision is not None:
        target = target.model_copy(update=rounded_to_fp8(build_target(target).weights()))
    taps = shape.tap_layers or default_tap_layers(target.layers, shape.drafter_layers)
    drafter = DrafterConfig(
        **{
            **target.model_dump(exclude=set(_TARGETS_OWN)),
            "family": "dflash",
            "layers": shape.drafter_layers,
            "intermediate_size": shape.drafter_intermediate or target.intermediate_size,
            "tied_embeddings": False,
            "linear_precision": drafter_precision,
            "plain_linears": (),
        },
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layers=target.layers,
        # A target cut to a few layers has fewer than there are taps: some are tapped twice.
        tap_layers=tuple(min(max(tap, 0), target.layers - 1) for tap in taps),
        draft_vocab_size=draft_vocab,
    )
    config = EngineConfig(name=name, block_size=shape.block_size, target=target, drafter=drafter, **settings)
    check_tp(config.tp, target, drafter)
    unit = config.tp * FP8_MULTIPLE
    if draft_vocab is not None and (draft_vocab % unit or draft_vocab > target.vocab_size):
        most = target.vocab_size // unit * unit
        raise SettingsError(f"--draft-vocab {draft_vocab}: must be a multiple of {unit}, at most {most}")
    if config.max_seq_len > target.max_positions:
        raise SettingsError(f"--shape {name} takes {target.max_positions} positions, not {config.max_seq_len}")
    return config
