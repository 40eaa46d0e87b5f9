"""Published models' shapes, and the engines of them: enough to know what a step costs, without a checkpoint."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from trtllm_dflash.catalog import PairFacts, find_entry
from trtllm_dflash.checkpoint.drafter import default_tap_layers
from trtllm_dflash.checkpoint.slicing import check_tp
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import WeightPrecision, rounded_to_fp8
from trtllm_dflash.ops.fp8 import FP8_MULTIPLE

#: What a drafter never has, whatever its target is.
_TARGETS_OWN = ("windows", "attention_sinks", "moe")

#: Settings of config.json that Qwen3's models share.
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}

#: And those of gpt-oss.
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
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


@dataclass(frozen=True)
class Shape:
    """A pair's models, as published. The catalog has their layers, blocks and taps: see `facts`.

    Attributes:
        widths: the target's config.json, all but its number of layers.
        checkpoint_bytes: of the target's checkpoint, by its publisher's card; None where there is none.
        drafter_intermediate: columns of the drafter's feed-forward; None: the target's, as its other widths are.
        apart: what the catalog would say, of a pair that is not in it.
    """

    name: str
    widths: dict[str, Any]
    checkpoint_bytes: int | None = None
    drafter_intermediate: int | None = None
    apart: PairFacts | None = None

    @cached_property
    def facts(self) -> PairFacts:
        """The catalog's layers, block size and taps of the pair."""
        return self.apart or find_entry(self.name).facts

    @property
    def target(self) -> dict[str, Any]:
        """The target's config.json."""
        return {**self.widths, "num_hidden_layers": self.facts.target_layers}

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers that the drafter reads: the catalog's, else one for each of its own layers, by z-lab's rule."""
        return self.facts.tap_layers or tuple(default_tap_layers(self.facts.target_layers, self.facts.drafter_layers))

    @property
    def block_size(self) -> int:
        """Length of the blocks that the drafter was trained on."""
        return self.facts.block_size


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "qwen3-8b",
            {
                **_QWEN3,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "intermediate_size": 12288,
                "tie_word_embeddings": False,
            },
            checkpoint_bytes=2 * 8_190_000_000,
        ),
        Shape(
            "qwen3-4b",
            {**_QWEN3, "hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 9728},
            checkpoint_bytes=2 * 4_020_000_000,
        ),
        Shape(
            "qwen3-0.6b",
            {**_QWEN3, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072},
            apart=PairFacts(block_size=16, target_layers=28, drafter_layers=5),
        ),
        Shape(
            "llama-3.1-8b",
            {
                "model_type": "llama",
                "vocab_size": 128256,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 14336,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "tie_word_embeddings": False,
            },
            checkpoint_bytes=2 * 8_030_000_000,
            drafter_intermediate=12288,
        ),
        Shape(
            "gpt-oss-120b",
            {**_GPT_OSS, "num_local_experts": 128},
            checkpoint_bytes=int(60.8 * 2**30),
            drafter_intermediate=7680,
        ),
        Shape(
            "gpt-oss-20b",
            {**_GPT_OSS, "num_local_experts": 32},
            checkpoint_bytes=int(12.8 * 2**30),
            drafter_intermediate=7680,
        ),
        Shape(
            "qwen3-coder-30b-a3b",
            {
                **_QWEN3,
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
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
            checkpoint_bytes=2 * 30_500_000_000,
        ),
        Shape(  # for a try on a CPU; not the pair that ships, which is in the catalog by the same name
            "tiny",
            {
                "model_type": "qwen3",
                "vocab_size": 512,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 128,
                "max_position_embeddings": 40960,
                "rope_theta": 1e6,
                "tie_word_embeddings": False,
            },
            apart=PairFacts(block_size=8, target_layers=6, drafter_layers=2),
        ),
    )
}


def find_shape(name: str) -> Shape:
    """Looks up a shape by its name.

    Raises:
        SettingsError: there is none; lists those there are.
    """
    if name not in SHAPES:
        raise SettingsError(f"--shape {name} is not known; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def asked_precision(precision: str | None, device: torch.device) -> dict[str, Any]:
    """Turns the flag `--precision` into `shape_config`'s `precision` and `target_precision`, on a device."""
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
    """Makes the engine configuration of a shape: its target, and a drafter of the target's widths.

    Args:
        layers: of the target, where not the shape's.
        draft_vocab, drafter_precision: as the flags of `trtllm-dflash build`; target_precision: its `--precision`.
        settings: what `EngineConfig` needs besides the models: precision, tp, max_batch, max_seq_len, chunk.

    Raises:
        SettingsError: the shape is not known, or a setting does not fit it.
    """
    target, drafter = shape_models(name, layers)
    if target_precision is not None:
        target = target.model_copy(update=rounded_to_fp8(build_target(target).weights()))
    precision = None if drafter_precision is None else WeightPrecision(drafter_precision)
    lighter = {"linear_precision": precision, "draft_vocab_size": draft_vocab}
    drafter = drafter.model_copy(update=lighter)
    config = EngineConfig(name=name, block_size=drafter.block_size, target=target, drafter=drafter, **settings)
    check_tp(config.tp, target, drafter)
    unit = config.tp * FP8_MULTIPLE
    if draft_vocab is not None and (draft_vocab % unit or draft_vocab > target.vocab_size):
        most = target.vocab_size // unit * unit
        raise SettingsError(f"--draft-vocab {draft_vocab}: must be a multiple of {unit}, at most {most}")
    if config.max_seq_len > target.max_positions:
        raise SettingsError(f"--shape {name} takes {target.max_positions} positions, not {config.max_seq_len}")
    return config


def shape_models(name: str, layers: int | None = None) -> tuple[DecoderConfig, DrafterConfig]:
    """Makes the configurations of a shape's target, and of a drafter of the target's widths.

    Args:
        layers: of the target, where not the shape's.

    Raises:
        SettingsError: the shape is not known.
    """
    shape = find_shape(name)
    facts = shape.facts
    target = read_target_config({**shape.target, "num_hidden_layers": layers or facts.target_layers})
    drafter = DrafterConfig(
        **{
            **target.model_dump(exclude=set(_TARGETS_OWN)),
            "family": "dflash",
            "layers": facts.drafter_layers,
            "intermediate_size": shape.drafter_intermediate or target.intermediate_size,
            "tied_embeddings": False,
        },
        block_size=facts.block_size,
        # Any token will do where the mask is not known: which it is costs nothing.
        mask_token_id=target.vocab_size - 1 if facts.mask_token_id is None else facts.mask_token_id,
        target_layers=target.layers,
        # A target cut to a few layers has fewer than there are taps: some are tapped twice.
        tap_layers=tuple(min(max(tap, 0), target.layers - 1) for tap in shape.tap_layers),
    )
    return target, drafter
