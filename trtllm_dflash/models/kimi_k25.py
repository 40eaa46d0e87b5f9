"""Kimi-K2.5: latent attention, sigmoid routers, an expert of all rows, experts in INT4 in all layers but the first."""

import math
from typing import Any, TypeVar

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import Decoder, DecoderConfig, LatentAttention, MoEConfig, read_decoder_config
from trtllm_dflash.models.moe import MoEDecoder, check_experts, separate_experts
from trtllm_dflash.models.rope import rope_scaling
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision, units_per_rank
from trtllm_dflash.ops.base import LatentLayer, Ops, Residual

T = TypeVar("T")

#: Settings under which it computes something else than ours does -> the only value that we compute.
_COMPUTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
}


class KimiK25(MoEDecoder):
    """KimiK25ForConditionalGeneration's text model: DeepseekV3ForCausalLM with other settings."""

    router = "mlp.gate"
    shared = "mlp.shared_experts"
    has_shared_gate = False
    without_kernels = "latent attention"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.latent_attention is not None
        self.latent: LatentAttention = config.latent_attention

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json: the text model's own, or one that holds it."""
        text = {key: value for key, value in (raw.get("text_config") or raw).items() if value is not None}
        for key, computed in _COMPUTED.items():
            if text.get(key, computed) != computed:
                raise CheckpointError(f"config.json: {key} {text[key]!r} is not supported; supported: {computed!r}")
        try:
            latent = LatentAttention(
                query_rank=text["q_lora_rank"],
                rank=text["kv_lora_rank"],
                plain_size=text["qk_nope_head_dim"],
                rotary_size=text["qk_rope_head_dim"],
                value_size=text["v_head_dim"],
                scale=_scale(text),
            )
            moe = MoEConfig(
                experts=text["n_routed_experts"],
                top_k=text["num_experts_per_tok"],
                intermediate_size=text["moe_intermediate_size"],
                normalized=True,
                scores="sigmoid",
                scale=text["routed_scaling_factor"],
                shared_size=text["n_shared_experts"] * text["moe_intermediate_size"],
                dense_layers=text["first_k_dense_replace"],
            )
        except KeyError as missing:
            raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
        base = read_decoder_config("kimi_k25", {**text, "head_dim": latent.plain_size + latent.rotary_size})
        return base.model_copy(update={"latent_attention": latent, "moe": check_experts(moe)})

    # -- weights ---------------------------------------------------------------------------------------------------

    def layer_weights(self, prefix: str) -> list[Weight]:
        c, latent = self.config, self.latent
        attention, row = prefix + "self_attn.", latent.rank + latent.rotary_size
        heads, head = c.heads, latent.plain_size + latent.rotary_size
        down = (
            Part(attention + "q_a_proj.weight", (latent.query_rank, c.hidden_size)),
            Part(attention + "kv_a_proj_with_mqa.weight", (row, c.hidden_size), alternating=latent.rotary_size),
        )
        norms = {
            prefix + "input_layernorm": c.hidden_size,
            prefix + "post_attention_layernorm": c.hidden_size,
            attention + "q_a_layernorm": latent.query_rank,
            attention + "kv_a_layernorm": latent.rank,
        }
        up = {
            "q_b_proj.weight": Part(
                attention + "q_b_proj.weight",
                (heads * head, latent.query_rank),
                Split.ROWS,
                heads,
                alternating=latent.rotary_size,
            ),
            "latent_up": Part(
                attention + "kv_b_proj.weight",
                (heads * (latent.plain_size + latent.value_size), latent.rank),
                Split.ROWS,
                heads,
            ),
            "o_proj.weight": Part(
                attention + "o_proj.weight", (c.hidden_size, heads * latent.value_size), Split.COLUMNS, heads
            ),
        }
        weights = [Weight(f"{name}.weight", (Part(f"{name}.weight", (size,)),)) for name, size in norms.items()]
        weights.append(Weight(attention + "qkv_proj.weight", down))
        weights += [Weight(attention + name, (part,)) for name, part in up.items()]
        return weights + self.feed_forward_weights(prefix)

    def feed_forward_weights(self, prefix: str) -> list[Weight]:
        if self._is_dense(prefix):
            return Decoder.feed_forward_weights(self, prefix)
        router, *experts = super().feed_forward_weights(prefix)
        bias = Part(prefix + "mlp.gate.e_score_correction_bias", (self.moe.experts,))
        return [
            # Near scores decide on experts: they are computed in FP32.
            Weight(router.name, router.parts, WeightPrecision.FP32),
            Weight(prefix + "mlp.router.correction_bias", (bias,), WeightPrecision.FP32),
            *experts,
        ]

    def expert_weights(self, prefix: str) -> list[Weight]:
        sources = {name: prefix + "mlp.experts.{}." + name + "_proj" for name in ("gate", "up", "down")}
        return separate_experts(prefix, self.moe, self.config.hidden_size, sources)

    def _is_dense(self, prefix: str) -> bool:
        return int(prefix.split(".")[2]) < self.moe.dense_layers

    # -- forward ---------------------------------------------------------------------------------------------------

    def attention(self, ops: Ops[T], i: int, qkv: T, start: T) -> T:
        """Computes the latent attention of layer i; qkv [B, N, query rank + row] goes down alone, on every rank."""
        latent, attention, eps = self.latent, f"model.layers.{i}.self_attn.", self.config.norm_eps
        q = ops.rms_norm(attention + "q_a_layernorm", ops.columns(qkv, 0, latent.query_rank), eps)
        kv = ops.columns(qkv, latent.query_rank, latent.rank + latent.rotary_size)
        return ops.latent_attention(self.latent_layer(ops.tp, i), ops.linear(attention + "q_b_proj", q), kv, start)

    def latent_layer(self, tp: int, i: int) -> LatentLayer:
        """The attention of layer i on one rank."""
        latent = self.latent
        return LatentLayer(
            prefix=f"model.layers.{i}.",
            rope="rope",
            heads=units_per_rank(self.config.heads, tp),
            rank=latent.rank,
            plain_size=latent.plain_size,
            rotary_size=latent.rotary_size,
            value_size=latent.value_size,
            norm_eps=self.config.norm_eps,
            scale=latent.scale,
        )

    def feed_forward(self, ops: Ops[T], prefix: str, x: Residual[T]) -> Residual[T]:
        if self._is_dense(prefix):
            return Decoder.feed_forward(self, ops, prefix, x)
        return super().feed_forward(ops, prefix, x)


def _scale(text: dict[str, Any]) -> float:
    """Computes the scale of scores, which YaRN's `mscale_all_dim` makes larger (as DeepSeek-V2 does)."""
    scaling = rope_scaling(text)
    is_scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"  # settings may be left of another
    factor, of_all = scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0) if is_scaled else 0
    mscale = 0.1 * of_all * math.log(factor) + 1 if of_all and factor > 1 else 1.0
    return float((text["qk_nope_head_dim"] + text["qk_rope_head_dim"]) ** -0.5 * mscale**2)
