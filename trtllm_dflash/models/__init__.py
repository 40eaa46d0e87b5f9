"""Model families, written once over `Ops`. Adding a family is adding a file and its line here."""

from typing import Any, Protocol

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import Decoder, DecoderConfig
from trtllm_dflash.models.drafter import Drafter, DrafterConfig
from trtllm_dflash.models.gpt_oss import GptOss
from trtllm_dflash.models.llama import Llama
from trtllm_dflash.models.minimax_m2 import MiniMaxM2
from trtllm_dflash.models.planned import PLANNED, Planned, PlannedConfig
from trtllm_dflash.models.qwen3 import Qwen3
from trtllm_dflash.models.qwen3_moe import Qwen3Moe
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
}


def read_target_config(raw: dict[str, Any]) -> DecoderConfig:
    """Reads a target's configuration from its config.json, by the family's rules.

    Raises:
        CheckpointError: the family is not one we build, or a setting is not supported.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[kind].read_config(raw)


def read_planned_config(raw: dict[str, Any]) -> DecoderConfig:
    """Reads a target's configuration from its config.json, to plan for it: of families that we compute, and of others.

    Raises:
        CheckpointError: as `read_target_config`.
    """
    kind = raw.get("model_type")
    return read_target_config(raw) if kind not in PLANNED else PLANNED[kind](raw)


def build_target(config: DecoderConfig) -> Decoder:
    """Makes the decoder of a configuration."""
    return FAMILIES[config.family](config)


def target_weights(target: DecoderConfig) -> list[Weight]:
    """Lists the weights of a target, one that is planned for too."""
    return Planned(target).weights() if isinstance(target, PlannedConfig) else build_target(target).weights()


def pair_weights(target: DecoderConfig, drafter: DrafterConfig | None) -> list[Weight]:
    """Lists the weights of a target, then of its drafter where there is one."""
    weights = target_weights(target)
    return weights if drafter is None else weights + Drafter(drafter).weights()
