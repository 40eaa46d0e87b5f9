"""Qwen3 (dense): the decoder with RMSNorm on each query and key head before RoPE."""

from typing import Any, TypeVar

from trtllm_dflash.models.decoder import Decoder, DecoderConfig, head_norm_weights, read_decoder_config
from trtllm_dflash.models.weights import Weight
from trtllm_dflash.ops import Ops

T = TypeVar("T")


class Qwen3(Decoder):
    """Qwen3ForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """The configuration in Hugging Face's config.json."""
        return read_decoder_config("qwen3", raw)

    def layer_weights(self, prefix: str) -> list[Weight]:
        return super().layer_weights(prefix) + head_norm_weights(prefix, self.config)

    def normalize_heads(self, ops: Ops[T], prefix: str, q: T, k: T) -> tuple[T, T]:
        eps = self.config.norm_eps
        return ops.rms_norm(prefix + "self_attn.q_norm", q, eps), ops.rms_norm(prefix + "self_attn.k_norm", k, eps)
