"""Gemma 4 (31B, 26B-A4B): norms before and after each part, two kinds of attention, GELU, and experts beside an FFN.

Layers with a window have other heads than those without, whose values are their keys.
"""

from typing import Any, TypeVar

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import (
    Decoder,
    DecoderConfig,
    FullAttention,
    MoEConfig,
    at_rows,
    attention_weights,
    head_norm_weights,
    mlp_weights,
)
from trtllm_dflash.models.moe import check_experts, describe_experts, separate_experts, stacked_experts
from trtllm_dflash.models.rope import read_rope
from trtllm_dflash.models.weights import Part, Weight, units_per_rank
from trtllm_dflash.ops.base import AttentionLayer, Ops, Residual

T = TypeVar("T")

_FULL, _SLIDING = "full_attention", "sliding_attention"

#: Settings under which it computes something else than ours does -> the only values that we compute.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_double_wide_mlp": (False,),
    "use_bidirectional_attention": (None, "vision"),  # of images alone
}


class Gemma4(Decoder):
    """Gemma4ForConditionalGeneration's text model, or Gemma4ForCausalLM."""

    head_norms = True

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json: the text model's own, or one that holds it."""
        text = raw.get("text_config") or raw
        tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True))  # as the whole says
        # Absent, transformers takes it to be 256.
        if text.get("hidden_size_per_layer_input", 256) or text.get("num_kv_shared_layers"):
            raise CheckpointError(
                "config.json: hidden_size_per_layer_input or num_kv_shared_layers is not 0: Gemma 4 E2B and E4B are "
                "not supported; supported: 31B, 26B-A4B"
            )
        for key, computed in _COMPUTED.items():
            if text.get(key, computed[0]) not in computed:
                raise CheckpointError(f"config.json: {key} {text[key]!r} is not supported; supported: {computed[0]!r}")
        try:
            return _read({**text, "tie_word_embeddings": tied})
        except KeyError as missing:
            raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None

    # -- weights ---------------------------------------------------------------------------------------------------

    def layer_weights(self, prefix: str) -> list[Weight]:
        hidden = (self.config.hidden_size,)
        names = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        if self.config.moe is not None:
            names += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"]
        weights = [_whole(f"{prefix}{name}.weight", hidden) for name in names]
        weights.append(_whole(prefix + "layer_scalar", (1,)))
        shape = self._shape_of(prefix)
        qkv, o = attention_weights(prefix, shape)
        if self._is_full(prefix) and shape.full_attention is not None and shape.full_attention.keys_as_values:
            qkv = Weight(qkv.name, qkv.parts[:2])
        weights += [qkv, o, *head_norm_weights(prefix, shape), *mlp_weights(prefix, self.config)]
        return weights if self.config.moe is None else weights + self._expert_weights(prefix, self.config.moe)

    def _expert_weights(self, prefix: str, moe: MoEConfig) -> list[Weight]:
        hidden = self.config.hidden_size
        router = {
            "mlp.router.weight": Part(prefix + "router.proj.weight", (moe.experts, hidden)),
            "mlp.router_norm.weight": Part(prefix + "router.scale", (hidden,)),
            "mlp.router.expert_scale": Part(prefix + "router.per_expert_scale", (moe.experts,)),
        }
        if moe.stacked:
            stacks = stacked_experts(prefix, moe, hidden, prefix + "experts.")
        else:
            sources = {name: prefix + "experts.{}." + name + "_proj" for name in ("gate", "up", "down")}
            stacks = separate_experts(prefix, moe, hidden, sources)
        return [*(Weight(prefix + name, (part,)) for name, part in router.items()), *stacks]

    def _is_full(self, prefix: str) -> bool:
        return self.config.window(int(prefix.split(".")[2])) is None

    def _shape_of(self, prefix: str) -> DecoderConfig:
        """The configuration with the heads of a layer."""
        full = self.config.full_attention if self._is_full(prefix) else None
        if full is None:
            return self.config
        return self.config.model_copy(update={"kv_heads": full.kv_heads, "head_size": full.head_size})

    # -- forward ---------------------------------------------------------------------------------------------------

    def _layer(self, ops: Ops[T], i: int, x: Residual[T], start: T, rows: T | None = None) -> tuple[T, Residual[T]]:
        prefix, eps = f"model.layers.{i}.", self.config.norm_eps
        stream, qkv = ops.norm_linear(prefix + "input_layernorm", prefix + "self_attn.qkv_proj", x, eps)
        kept, h = at_rows(ops, rows, stream, self.attention(ops, i, qkv, start))
        h = ops.all_reduce(ops.linear(prefix + "self_attn.o_proj", h))
        y = ops.add_normed(prefix + "post_attention_layernorm", kept, h, eps)
        h = self._feed_forward(ops, prefix, y)
        y = ops.add_normed(prefix + "post_feedforward_layernorm", y, h, eps, prefix + "layer_scalar")
        return stream, Residual(y)

    def attention_layer(self, tp: int, i: int) -> AttentionLayer:
        c = self.config
        window = c.window(i)
        full = c.full_attention if window is None else None
        kv_heads, size = c.caches(i)["key"]
        return AttentionLayer(
            prefix=f"model.layers.{i}.",
            rope="rope" if full is None else "full_rope",
            heads=units_per_rank(c.heads, tp),
            kv_heads=units_per_rank(kv_heads, tp),
            head_size=size,
            norm_eps=c.norm_eps,
            window=window,
            gives_back=window is not None,
            scale=1.0,
            keys_as_values=full is not None and full.keys_as_values,
            norms_values=True,
        )

    def _feed_forward(self, ops: Ops[T], prefix: str, x: T) -> T:
        """Computes the feed-forward of the stream x [B, N, H], and the experts beside it where there are any."""
        eps = self.config.norm_eps
        names = prefix + "pre_feedforward_layernorm", prefix + "mlp.gate_up_proj"
        _, h = ops.norm_linear_geglu(*names, Residual(x), eps)
        y = ops.all_reduce(ops.linear(prefix + "mlp.down_proj", h))
        moe = self.config.moe
        if moe is None:
            return y
        # The router reads the stream by a norm of its own.
        h = ops.scaled_norm(prefix + "mlp.router_norm", x, eps, self.config.hidden_size**-0.5)
        logits = ops.linear(prefix + "mlp.router", h)
        layer = describe_experts(prefix, moe, ops.tp, ops.rank)
        h = ops.rms_norm(prefix + "pre_feedforward_layernorm_2", x, eps)
        experts = ops.all_reduce(ops.moe(layer, h, logits))
        y = ops.rms_norm(prefix + "post_feedforward_layernorm_1", y, eps)
        return ops.add_normed(prefix + "post_feedforward_layernorm_2", y, experts, eps)


def _read(text: dict[str, Any]) -> DecoderConfig:
    types = text["layer_types"]
    layers, heads, kv_heads = text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"]
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise CheckpointError(f"config.json: layer_types must say {_SLIDING} or {_FULL} for each of {layers} layers")
    if types[-1] != _FULL:  # whatever it says, transformers computes that
        raise CheckpointError(f"config.json: layer_types says {_SLIDING} of the last layer, which must be {_FULL}")
    full = _read_full_attention(text, types)
    for shared in (kv_heads, full.kv_heads):
        if heads % shared:
            raise CheckpointError(f"config.json: {heads} attention heads cannot share {shared} key/value heads")
    moe = None
    if text.get("enable_moe_block"):
        moe = MoEConfig(
            experts=text["num_experts"],
            top_k=text["top_k_experts"],
            intermediate_size=text["moe_intermediate_size"],
            normalized=True,
            activation="gelu",
        )
    return DecoderConfig(
        family="gemma4",
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=text["head_dim"],
        intermediate_size=text["intermediate_size"],
        norm_eps=text.get("rms_norm_eps", 1e-6),
        max_positions=text["max_position_embeddings"],
        rope=read_rope({"rope_parameters": text["rope_parameters"][_SLIDING]}),
        tied_embeddings=text["tie_word_embeddings"],
        windows=tuple(text["sliding_window"] if kind == _SLIDING else None for kind in types),
        full_attention=full,
        embedding_scale=text["hidden_size"] ** 0.5,
        logit_cap=text.get("final_logit_softcapping"),
        moe=None if moe is None else check_experts(moe),
    )


def _read_full_attention(text: dict[str, Any], types: list[str]) -> FullAttention:
    """Reads the heads of layers without a window: as published, or as transformers 5 writes them again."""
    own = {"head_dim": text.get("global_head_dim", 512)}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    by_layer = text.get("per_layer_config")
    if by_layer is not None:
        own = next(iter(by_layer.values()), {})
        if by_layer != {str(i): own for i, kind in enumerate(types) if kind == _FULL}:
            raise CheckpointError(
                f"config.json: per_layer_config must say the same of every {_FULL} layer, and no other"
            )
    return FullAttention(
        kv_heads=own.get("num_key_value_heads", text["num_key_value_heads"]),
        head_size=own.get("head_dim", text["head_dim"]),
        rope=read_rope({"rope_parameters": text["rope_parameters"][_FULL]}),
        keys_as_values=text.get("attention_k_eq_v", False),
    )


def _whole(name: str, shape: tuple[int, ...]) -> Weight:
    return Weight(name, (Part(name, shape),))
