"""Published models' shapes: what config.json says of the catalog's targets, and the widths of their drafters.

Each shape is written here once, and read by the planner, by `bench step` and by the other runtimes' scripts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trtllm_dflash.catalog import PairFacts, find_entry
from trtllm_dflash.checkpoint.drafter_config import default_tap_layers
from trtllm_dflash.errors import SettingsError

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class DrafterWidths:
    """A DFlash drafter's own widths; hidden size and vocabulary are its target's.

    Attributes:
        intermediate_size: columns of its feed-forward.
        window: tokens that its first `windowed_layers` see; the others see all.
    """

    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    windowed_layers: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Shape:
    """A pair's models, as published. The catalog has their layers, blocks and taps: see `facts`.

    Attributes:
        widths: the target's config.json, all but its number of layers and their kinds.
        kinds: of its layers, over and over until there are enough; none: all attend alike.
        checkpoint_bytes: of the target's checkpoint, by its publisher's card; None where there is none.
        apart: what the catalog would say, of a pair that is not in it.
    """

    name: str
    widths: dict[str, Any]
    drafter: DrafterWidths
    kinds: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    apart: PairFacts | None = None

    @cached_property
    def facts(self) -> PairFacts:
        """The catalog's layers, block size and taps of the pair."""
        return self.apart or find_entry(self.name).facts

    @property
    def family(self) -> str:
        """The target's `model_type`."""
        return str(self.widths["model_type"])

    @property
    def target(self) -> dict[str, Any]:
        """The target's config.json."""
        return self.target_of(self.facts.target_layers)

    def target_of(self, layers: int) -> dict[str, Any]:
        """Makes the target's config.json for that many layers, nested as its publisher nests it."""
        counted: dict[str, Any] = {"num_hidden_layers": layers}
        if self.kinds:
            counted["layer_types"] = [self.kinds[i % len(self.kinds)] for i in range(layers)]
            if self.family == "gemma4":  # of few layers, too, the last one has no window
                counted["layer_types"][-1] = self.kinds[-1]
        if "text_config" in self.widths:
            return {**self.widths, "text_config": {**self.widths["text_config"], **counted}}
        return {**self.widths, **counted}

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers that the drafter reads: the catalog's, else one for each of its own layers, by z-lab's rule."""
        return self.facts.tap_layers or tuple(default_tap_layers(self.facts.target_layers, self.facts.drafter_layers))

    @property
    def block_size(self) -> int:
        """Length of the blocks that the drafter was trained on."""
        return self.facts.block_size


# -- families --------------------------------------------------------------------------------------------------------

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}

_QWEN3_4B = {**_QWEN3, "hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 9728}

_QWEN3_8B = {
    **_QWEN3,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}

_QWEN3_14B = {**_QWEN3_8B, "hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 17408}

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
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"truncate": False, "original_max_position_embeddings": 4096},
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
#: As many as the drafters' 0.8 billion parameters allow.
_GPT_OSS_DRAFTER = DrafterWidths(64, 8, 64, 7680)

#: What Qwen3.5's, Qwen3.6's and Qwen3-Next's models share: three layers with a gated delta net, then one that attends.
_GATED_DELTA_NETS: dict[str, Any] = {
    "head_dim": 256,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_GATED_DELTA_NETS_KINDS = (_LINEAR, _LINEAR, _LINEAR, _FULL)


def _qwen3_5(family: str, /, **widths: Any) -> dict[str, Any]:
    """Makes the config.json of a Qwen3.5 or Qwen3.6, whose text model is nested in it."""
    text = {
        **_GATED_DELTA_NETS,
        "model_type": f"{family}_text",
        "vocab_size": 248320,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        **widths,
    }
    return {"model_type": family, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}


_QWEN3_5_27B = _qwen3_5(
    "qwen3_5",
    hidden_size=5120,
    num_attention_heads=24,
    num_key_value_heads=4,
    intermediate_size=17408,
    linear_num_value_heads=48,
)
_QWEN3_5_35B = _qwen3_5(
    "qwen3_5_moe",
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    linear_num_value_heads=32,
)
_QWEN3_5_35B_DRAFTER = DrafterWidths(32, 8, 128, 6144, 5, 4096)


def _gemma4(**widths: Any) -> dict[str, Any]:
    """Makes the config.json of a Gemma 4, whose text model is nested in it."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        **widths,
    }
    return {"model_type": "gemma4", "tie_word_embeddings": True, "text_config": text}


_GEMMA4_KINDS = (_SLIDING, _SLIDING, _SLIDING, _SLIDING, _SLIDING, _FULL)

_MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
# Deduced: with five layers and six taps these have the sizes of z-lab's gated files, 1.04 and (with a head) 3.33 GiB.
_MINIMAX_M2_DRAFTER = DrafterWidths(48, 8, 128, 6144, 4, 2048)

_KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        },
    },
}


# -- pairs -----------------------------------------------------------------------------------------------------------

#: Every pair of the catalog, and a few that are not in it.
PUBLISHED = {
    shape.name: shape
    for shape in (
        Shape("qwen3-8b", _QWEN3_8B, DrafterWidths(32, 8, 128, 12288), checkpoint_bytes=2 * 8_190_000_000),
        Shape("qwen3-8b-dspark", _QWEN3_8B, DrafterWidths(32, 8, 128, 12288), checkpoint_bytes=2 * 8_190_000_000),
        Shape("qwen3-4b", _QWEN3_4B, DrafterWidths(32, 8, 128, 9728), checkpoint_bytes=2 * 4_020_000_000),
        Shape("qwen3-4b-dspark", _QWEN3_4B, DrafterWidths(32, 8, 128, 9728), checkpoint_bytes=2 * 4_020_000_000),
        Shape("qwen3-14b-dspark", _QWEN3_14B, DrafterWidths(40, 8, 128, 17408), checkpoint_bytes=2 * 14_770_000_000),
        Shape(
            "qwen3-0.6b",
            {**_QWEN3, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072},
            DrafterWidths(16, 8, 128, 3072),
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
            DrafterWidths(32, 8, 128, 12288),
            checkpoint_bytes=2 * 8_030_000_000,
        ),
        Shape(
            "gpt-oss-120b",
            {**_GPT_OSS, "num_local_experts": 128},
            _GPT_OSS_DRAFTER,
            kinds=(_SLIDING, _FULL),
            checkpoint_bytes=int(60.8 * 2**30),
        ),
        Shape(
            "gpt-oss-20b",
            {**_GPT_OSS, "num_local_experts": 32},
            _GPT_OSS_DRAFTER,
            kinds=(_SLIDING, _FULL),
            checkpoint_bytes=int(12.8 * 2**30),
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
            DrafterWidths(32, 4, 128, 6144),
            checkpoint_bytes=2 * 30_500_000_000,
        ),
        Shape(
            "qwen3-coder-next",
            {
                **_GATED_DELTA_NETS,
                "model_type": "qwen3_next",
                "vocab_size": 151936,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "intermediate_size": 5120,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
                "linear_num_value_heads": 32,
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
            DrafterWidths(32, 4, 128, 6144),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "qwen3.5-4b",
            _qwen3_5(
                "qwen3_5",
                hidden_size=2560,
                num_attention_heads=16,
                num_key_value_heads=4,
                intermediate_size=9216,
                linear_num_value_heads=32,
                tie_word_embeddings=True,
            ),
            DrafterWidths(32, 8, 128, 9216, 5, 4096),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "qwen3.5-9b",
            _qwen3_5(
                "qwen3_5",
                hidden_size=4096,
                num_attention_heads=16,
                num_key_value_heads=4,
                intermediate_size=12288,
                linear_num_value_heads=32,
            ),
            DrafterWidths(32, 8, 128, 12288, 5, 4096),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "qwen3.5-27b",
            _QWEN3_5_27B,
            DrafterWidths(32, 8, 128, 17408, 5, 4096),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "qwen3.6-27b",
            _QWEN3_5_27B,
            DrafterWidths(32, 8, 128, 17408, 4, 2048),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "qwen3.8-27b",
            _QWEN3_5_27B,
            DrafterWidths(32, 8, 128, 17408, 5, 2048),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape("qwen3.5-35b-a3b", _QWEN3_5_35B, _QWEN3_5_35B_DRAFTER, kinds=_GATED_DELTA_NETS_KINDS),
        Shape("qwen3.6-35b-a3b", _QWEN3_5_35B, _QWEN3_5_35B_DRAFTER, kinds=_GATED_DELTA_NETS_KINDS),
        Shape(
            "qwen3.5-122b-a10b",
            _qwen3_5(
                "qwen3_5_moe",
                hidden_size=3072,
                num_attention_heads=32,
                num_key_value_heads=2,
                num_experts=256,
                num_experts_per_tok=8,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
                linear_num_value_heads=64,
            ),
            DrafterWidths(32, 8, 128, 9216, 5, 4096),
            kinds=_GATED_DELTA_NETS_KINDS,
        ),
        Shape(
            "gemma-4-31b",
            _gemma4(
                hidden_size=5376,
                num_attention_heads=32,
                num_key_value_heads=16,
                num_global_key_value_heads=4,
                intermediate_size=21504,
            ),
            DrafterWidths(64, 8, 128, 10752, 4, 2048),
            kinds=_GEMMA4_KINDS,
        ),
        Shape(
            "gemma-4-26b-a4b",
            _gemma4(
                hidden_size=2816,
                num_attention_heads=16,
                num_key_value_heads=8,
                num_global_key_value_heads=2,
                intermediate_size=2112,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
            ),
            DrafterWidths(32, 8, 128, 5632, 4, 2048),
            kinds=_GEMMA4_KINDS,
        ),
        Shape("minimax-m2.5", _MINIMAX_M2, _MINIMAX_M2_DRAFTER, checkpoint_bytes=230_200_000_000),
        Shape("minimax-m2.7", _MINIMAX_M2, _MINIMAX_M2_DRAFTER, checkpoint_bytes=230_200_000_000),
        Shape("kimi-k2.5", _KIMI, DrafterWidths(64, 8, 128, 18432), checkpoint_bytes=554 * 2**30),
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
            DrafterWidths(4, 2, 16, 128),
            apart=PairFacts(block_size=8, target_layers=6, drafter_layers=2),
        ),
    )
}


def published_shape(name: str) -> Shape:
    """Looks up a published shape by its pair's name.

    Raises:
        SettingsError: there is none; lists those there are.
    """
    if name not in PUBLISHED:
        raise SettingsError(f"the shape of {name} is not known without its checkpoint; known: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
