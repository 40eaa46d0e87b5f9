"""Qwen3.5 (and 3.6, 3.8), dense: gated delta nets and gated attention. Of image models, the text model alone."""

from typing import Any

from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.hybrid import HybridDecoder, read_hybrid_config


class Qwen35(HybridDecoder):
    """Qwen3_5ForConditionalGeneration's text model, or Qwen3_5ForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        return read_hybrid_config("qwen3_5", text_config(raw))


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Takes the text model's settings out of an image model's; its own win, but for its head's, which is not in it."""
    inner = {key: value for key, value in (raw.get("text_config") or {}).items() if value is not None}
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    return {**raw, **inner, **tied}
