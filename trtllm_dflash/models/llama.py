"""Llama 3.x: the plain decoder; 3.1 adds its RoPE scaling, which `models.rope` reads."""

from typing import Any

from trtllm_dflash.models.decoder import Decoder, DecoderConfig, read_decoder_config


class Llama(Decoder):
    """LlamaForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        return read_decoder_config("llama", raw)
