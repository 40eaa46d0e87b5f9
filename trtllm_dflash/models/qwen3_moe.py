"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B): Qwen3 with experts in every layer."""

from typing import Any

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig, head_norm_weights, read_decoder_config
from trtllm_dflash.models.moe import MoEDecoder, check_experts, separate_experts, stacked_experts
from trtllm_dflash.models.weights import Weight


class Qwen3Moe(MoEDecoder):
    """Qwen3MoeForCausalLM."""

    head_norms = True
    router = "mlp.gate"

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        base = read_decoder_config("qwen3_moe", raw)
        return base.model_copy(update={"moe": read_experts(raw)})

    def layer_weights(self, prefix: str) -> list[Weight]:
        return super().layer_weights(prefix) + head_norm_weights(prefix, self.config)

    def expert_weights(self, prefix: str) -> list[Weight]:
        if self.moe.stacked:
            return stacked_experts(prefix, self.moe, self.config.hidden_size, prefix + "mlp.experts.")
        sources = {name: prefix + "mlp.experts.{}." + name + "_proj" for name in ("gate", "up", "down")}
        return separate_experts(prefix, self.moe, self.config.hidden_size, sources)


def read_experts(raw: dict[str, Any]) -> MoEConfig:
    """Reads the experts' settings, which are those of every layer.

    Raises:
        CheckpointError: one is missing, or some layers have none.
    """
    for key, computed in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if raw.get(key, computed) != computed:
            raise CheckpointError(f"config.json: {key} {raw[key]!r} is not supported: every layer must have experts")
    try:
        moe = MoEConfig(
            experts=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
            top_k=raw["num_experts_per_tok"],
            intermediate_size=raw["moe_intermediate_size"],
            normalized=raw.get("norm_topk_prob", False),
        )
    except KeyError as missing:
        raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
    return check_experts(moe)
