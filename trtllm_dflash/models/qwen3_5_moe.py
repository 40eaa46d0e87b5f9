"""Qwen3.5 (and 3.6) with experts in every layer: a layer's as one tensor, as published, or each by itself."""

from typing import Any

from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.hybrid import HybridDecoder
from trtllm_dflash.models.qwen3_5 import text_config
from trtllm_dflash.models.qwen3_moe import Qwen3Moe
from trtllm_dflash.models.qwen3_next import read_moe_hybrid


class Qwen35Moe(HybridDecoder, Qwen3Moe):
    """Qwen3_5MoeForConditionalGeneration's text model, or Qwen3_5MoeForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        # Chosen experts' weights always add up to 1.
        return read_moe_hybrid("qwen3_5_moe", {**text_config(raw), "norm_topk_prob": True})
