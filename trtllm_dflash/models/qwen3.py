"""Qwen3 (dense): the decoder with RMSNorm on each query and key head before RoPE."""

from typing import Any

from trtllm_dflash.models.decoder import Decoder, DecoderConfig, head_norm_weights, read_decoder_config
from trtllm_dflash.models.weights import Weight


class Qwen3(Decoder):
    """Qwen3ForCausalLM."""

    head_norms = True

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        return read_decoder_config("qwen3", raw)

    def layer_weights(self, prefix: str) -> list[Weight]:
        return super().layer_weights(prefix) + head_norm_weights(prefix, self.config)
