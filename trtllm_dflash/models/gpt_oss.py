"""gpt-oss: experts in MXFP4, attention with biases and sinks, every other layer with a window, YaRN.

The published checkpoints hold the experts as `*_blocks` and `*_scales`; fine-tuned ones, in BF16, hold each matrix
transposed. In both, gate and up rows alternate.
"""

from math import inf
from typing import Any

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig, read_decoder_config
from trtllm_dflash.models.moe import MoEDecoder, check_experts
from trtllm_dflash.models.rope import rope_scaling
from trtllm_dflash.models.weights import Content, Part, Split, Weight, WeightPrecision
from trtllm_dflash.ops.base import ClampedSwiglu
from trtllm_dflash.ops.formats import MXFP4_BLOCK, MXFP4_BLOCK_BYTES

#: What transformers takes these to be where config.json lacks them (GptOssConfig); other families' are others.
_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"


class GptOss(MoEDecoder):
    """GptOssForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any]) -> DecoderConfig:
        """Reads the configuration from Hugging Face's config.json."""
        # transformers has defaults for it too, but YaRN above all must be said.
        if not rope_scaling(raw):
            raise CheckpointError("config.json: rope_scaling is missing")
        base = read_decoder_config("gpt_oss", {**_DEFAULTS, **raw, "layer_types": []})
        try:
            moe = MoEConfig(
                experts=raw["num_local_experts"],
                top_k=raw["num_experts_per_tok"],
                intermediate_size=base.intermediate_size,
                normalized=True,
                clamp=_read_clamp(raw),
                mxfp4=_is_mxfp4(raw),
            )
        except KeyError as missing:
            raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
        if moe.mxfp4 and (base.hidden_size % MXFP4_BLOCK or moe.intermediate_size % MXFP4_BLOCK):
            sizes = f"hidden_size {base.hidden_size} and intermediate_size {moe.intermediate_size}"
            raise CheckpointError(f"config.json: {sizes} must be multiples of {MXFP4_BLOCK}, MXFP4's block")
        windows = _windows(raw, base.layers)
        return base.model_copy(update={"moe": check_experts(moe), "windows": windows, "attention_sinks": True})

    def layer_weights(self, prefix: str) -> list[Weight]:
        heads = self.config.heads
        sinks = Part(prefix + "self_attn.sinks", (heads,), Split.ROWS, heads)
        return [*super().layer_weights(prefix), Weight(sinks.key, (sinks,))]

    def feed_forward_weights(self, prefix: str) -> list[Weight]:
        bias = Part(prefix + "mlp.router.bias", (self.moe.experts,))
        return [*super().feed_forward_weights(prefix), Weight(bias.key, (bias,))]

    def expert_weights(self, prefix: str) -> list[Weight]:
        moe, hidden = self.moe, self.config.hidden_size
        count, size = moe.experts, moe.intermediate_size
        experts = prefix + "mlp.experts."

        def weight(name: str, kind: str, *shape: int, content: Content = Content.NUMBERS) -> Weight:
            """A tensor of gate_up_proj or down_proj; `kind`: "bias", "weight", or one of MXFP4's two."""
            key = f"{experts}{name}" + ("" if kind == "weight" else f"_{kind}")
            interleaved, transposed = name == "gate_up_proj", kind == "weight"
            split, units = self._split(interleaved, transposed, kind == "bias")
            padded = moe.mxfp4 and split in (Split.COLUMNS, Split.THIRD)
            part = Part(key, (count, *shape), split, units, content, padded, interleaved, transposed)
            precision = WeightPrecision.ENGINE if content is Content.NUMBERS else WeightPrecision.BYTES
            return Weight(f"{experts}{name}.{kind}", (part,), precision)

        biases = [weight("gate_up_proj", "bias", 2 * size), weight("down_proj", "bias", hidden)]
        if not moe.mxfp4:
            return [
                weight("gate_up_proj", "weight", hidden, 2 * size),
                weight("down_proj", "weight", size, hidden),
                *biases,
            ]
        matrices = []
        for name, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
            shape = rows, columns // MXFP4_BLOCK
            matrices.append(weight(name, "blocks", *shape, MXFP4_BLOCK_BYTES, content=Content.E2M1_PAIRS))
            matrices.append(weight(name, "scales", *shape, content=Content.E8M0))
        return matrices + biases

    def _split(self, gate_up: bool, transposed: bool, bias: bool) -> tuple[Split, int]:
        """Chooses how ranks divide a stored tensor of the experts, and the number of units.

        MXFP4's blocks lie along the input of `down_proj`: its columns are divided by whole blocks.
        """
        moe = self.moe
        if moe.expert_parallel:
            return Split.ROWS, moe.experts
        if bias and not gate_up:
            return Split.FIRST_RANK, 1
        units = moe.intermediate_size // MXFP4_BLOCK if moe.mxfp4 else moe.intermediate_size
        return (Split.COLUMNS if gate_up != transposed or bias else Split.THIRD), units


def _read_clamp(raw: dict[str, Any]) -> ClampedSwiglu:
    alpha, limit = float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0))
    if not (0 < alpha < inf and 0 < limit < inf):
        raise CheckpointError(
            f"config.json: swiglu_alpha {alpha} and swiglu_limit {limit} are not two positive numbers"
        )
    return ClampedSwiglu(alpha, limit)


def _is_mxfp4(raw: dict[str, Any]) -> bool:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return False
    method = quantization.get("quant_method")
    if method != "mxfp4":
        raise CheckpointError(f"config.json: quant_method {method!r} is not supported; supported: mxfp4")
    return True


def _windows(raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Reads each layer's window; without `layer_types`, as transformers does: every other layer, from the first on."""
    types = raw.get("layer_types") or [(_SLIDING, _FULL)[i % 2] for i in range(layers)]
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise CheckpointError(f"config.json: layer_types must say {_SLIDING} or {_FULL} for each of {layers} layers")
    window = raw.get("sliding_window", 128)
    if type(window) is not int or window < 1:
        raise CheckpointError(f"config.json: sliding_window {window!r} is not a positive number of tokens")
    return tuple(window if kind == _SLIDING else None for kind in types)
