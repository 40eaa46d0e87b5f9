"""MiniMax-M2.x: queries and keys normed over all heads at once, half of each head rotated, sigmoid routers."""

from typing import Any, TypeVar

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig, read_decoder_config
from trtllm_dflash.models.moe import MoEDecoder, check_experts, separate_experts
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision
from trtllm_dflash.ops.base import Ops

T = TypeVar("T")

#: Settings under which it computes something else than ours does -> the only value that we compute.
_COMPUTED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


#: What transformers takes these to be where config.json lacks them (MiniMaxM2Config); other families' are others.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5000000.0}


class MiniMaxM2(MoEDecoder):
    """MiniMaxM2ForCausalLM."""

    router = "block_sparse_moe.gate"

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        for key, computed in _COMPUTED.items():
            if raw.get(key, computed) != computed:
                raise CheckpointError(f"config.json: {key} {raw[key]!r} is not supported; supported: {computed!r}")
        if any(kind != 1 for kind in raw.get("attn_type_list", ())):
            raise CheckpointError("config.json: attn_type_list names other attention than 1, softmax's")
        raw = {**_DEFAULTS, **raw}
        if "rotary_dim" in raw:  # as published; a share that is said besides wins
            raw = {"partial_rotary_factor": raw["rotary_dim"] / raw["head_dim"], **raw}
        base = read_decoder_config("minimax_m2", raw, partial_rotary=True)
        try:
            moe = MoEConfig(
                experts=raw["num_local_experts"],
                top_k=raw["num_experts_per_tok"],
                intermediate_size=base.intermediate_size,
                normalized=True,
                scores="sigmoid",
            )
        except KeyError as missing:
            raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
        return base.model_copy(update={"moe": check_experts(moe)})

    def layer_weights(self, prefix: str) -> list[Weight]:
        c = self.config
        weights = super().layer_weights(prefix)
        for which, heads in (("q", c.heads), ("k", c.kv_heads)):
            key = f"{prefix}self_attn.{which}_norm.weight"
            weights.append(Weight(key, (Part(key, (heads * c.head_size,), Split.ROWS, heads),)))
        return weights

    def feed_forward_weights(self, prefix: str) -> list[Weight]:
        bias = Part(prefix + "block_sparse_moe.e_score_correction_bias", (self.moe.experts,))
        correction = Weight(prefix + "mlp.router.correction_bias", (bias,), WeightPrecision.FP32)
        return [*super().feed_forward_weights(prefix), correction]

    def expert_weights(self, prefix: str) -> list[Weight]:
        names = {"gate": "w1", "up": "w3", "down": "w2"}
        sources = {name: prefix + "block_sparse_moe.experts.{}." + stored for name, stored in names.items()}
        return separate_experts(prefix, self.moe, self.config.hidden_size, sources)

    def attention(self, ops: Ops[T], i: int, qkv: T, start: T) -> T:
        layer = self.attention_layer(ops.tp, i)
        return ops.self_attention(layer, ops.norm_projections(layer, qkv, self.config.norm_eps), start)
