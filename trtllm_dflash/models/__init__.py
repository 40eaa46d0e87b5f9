"""Model families, written once over `Ops`. Adding a family is adding a file and its line here."""

from functools import lru_cache
from typing import Any, Protocol

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import Decoder, DecoderConfig
from trtllm_dflash.models.drafter import Drafter, DrafterConfig
from trtllm_dflash.models.gemma4 import Gemma4
from trtllm_dflash.models.gpt_oss import GptOss
from trtllm_dflash.models.kimi_k25 import KimiK25
from trtllm_dflash.models.llama import Llama
from trtllm_dflash.models.minimax_m2 import MiniMaxM2
from trtllm_dflash.models.qwen3 import Qwen3
from trtllm_dflash.models.qwen3_5 import Qwen35
from trtllm_dflash.models.qwen3_5_moe import Qwen35Moe
from trtllm_dflash.models.qwen3_moe import Qwen3Moe
from trtllm_dflash.models.qwen3_next import Qwen3Next
from trtllm_dflash.models.weights import Weight


class Family(Protocol):
    """A class of decoders, with a reader of its checkpoints' configuration."""

    def __call__(self, config: DecoderConfig) -> Decoder:
        """Makes the decoder of a configuration."""

    def read_config(self, raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json.

        Raises:
            CheckpointError: a setting is missing, or asks for something that is not computed.
        """


#: `model_type` in config.json -> the family that computes it.
FAMILIES: dict[str, Family] = {
    "qwen3": Qwen3,
    "llama": Llama,
    "gpt_oss": GptOss,
    "qwen3_moe": Qwen3Moe,
    "minimax_m2": MiniMaxM2,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35Moe,
    "gemma4": Gemma4,
    "kimi_k25": KimiK25,
}
#: `model_type` of a text model that was saved by itself -> its family.
_TEXT_MODELS = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma4_text": "gemma4",
    "kimi_k2": "kimi_k25",
}


def read_target_config(raw: dict[str, Any]) -> DecoderConfig:
    """Reads a target's configuration from its config.json, by the family's rules.

    Raises:
        CheckpointError: the family is not one we build, or a setting is not supported.
    """
    said = raw.get("model_type")
    kind = _TEXT_MODELS.get(str(said), said)
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    inner = raw.get("text_config")
    if any(settings.get("is_causal") is False for settings in (raw, inner) if isinstance(settings, dict)):
        raise CheckpointError("config.json: is_causal false is not supported: its rows see later ones")
    return FAMILIES[kind].read_config(raw)


def build_target(config: DecoderConfig) -> Decoder:
    """Makes the decoder of a configuration."""
    return FAMILIES[config.family](config)


def without_kernels(config: DecoderConfig) -> str | None:
    """Names what our CUDA kernels lack of a target so far; None: they compute all of it."""
    return build_target(config).without_kernels


def target_weights(target: DecoderConfig) -> list[Weight]:
    """Lists the weights of a target."""
    return list(_target_weights(target))


# A plan asks for them eight times, and those of a mixture of experts have 70,000 parts.
@lru_cache(maxsize=1)
def _target_weights(target: DecoderConfig) -> tuple[Weight, ...]:
    return tuple(build_target(target).weights())


def pair_weights(target: DecoderConfig, drafter: DrafterConfig | None) -> list[Weight]:
    """Lists the weights of a target, then of its drafter where there is one."""
    weights = target_weights(target)
    return weights if drafter is None else weights + Drafter(drafter).weights()
