"""A decoder most of whose layers are gated delta nets; the others attend, with a gate on what they give.

That is Qwen3-Next's and Qwen3.5's. A delta net keeps, instead of keys and values of every row, one matrix a value
head: see `Ops.gated_delta`. Norms multiply by one more than their checkpoint's numbers, and RoPE rotates the first
numbers of a head alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import (
    Decoder,
    DecoderConfig,
    DeltaConfig,
    at_rows,
    attention_layer,
    head_norm_weights,
    read_decoder_config,
)
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision, units_per_rank
from trtllm_dflash.ops.base import DeltaLayer, Ops, Residual

T = TypeVar("T")

_DELTA, _FULL = "linear_attention", "full_attention"
#: Every so many layers attend where `layer_types` is missing.
_INTERVAL = 4
#: What transformers takes these to be where config.json lacks them (Qwen3NextConfig, Qwen3_5TextConfig).
_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
}


def read_hybrid_config(family: str, raw: dict[str, Any]) -> DecoderConfig:
    """Reads the settings that these families share from config.json, or its `text_config`.

    Raises:
        CheckpointError: a setting is missing, or asks for something that is not computed.
    """
    raw = {**_DEFAULTS, **raw}
    if not raw.get("attn_output_gate", True):
        raise CheckpointError("config.json: attn_output_gate false is not supported")
    if raw.get("attention_bias"):
        raise CheckpointError("config.json: attention_bias is not supported with gated attention")
    base = read_decoder_config(family, {**raw, "layer_types": []}, partial_rotary=True)
    types = layer_types(raw, base.layers)
    try:
        delta = DeltaConfig(
            layers=tuple(kind == _DELTA for kind in types),
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_size=raw["linear_key_head_dim"],
            value_size=raw["linear_value_head_dim"],
            kernel=raw["linear_conv_kernel_dim"],
        )
    except KeyError as missing:
        raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"config.json: {delta.value_heads} linear value heads cannot share {delta.key_heads} key heads"
        )
    return base.model_copy(update={"delta": delta})


def layer_types(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Reads which layers are delta nets: named one by one, or by the interval of those with full attention.

    Raises:
        CheckpointError: they are not so many, or of other kinds.
    """
    every = raw.get("full_attention_interval") or _INTERVAL
    types = raw.get("layer_types") or [_DELTA if (i + 1) % every else _FULL for i in range(layers)]
    if len(types) != layers or not set(types) <= {_DELTA, _FULL}:
        raise CheckpointError(f"config.json: layer_types must say {_DELTA} or {_FULL} for each of {layers} layers")
    return list(types)


class HybridDecoder(Decoder):
    """A decoder of gated delta nets and gated attention. Ranks divide the nets by key heads, with their value heads."""

    head_norms = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.delta is not None
        self.delta: DeltaConfig = config.delta
        self._nets = {f"model.layers.{i}." for i, is_net in enumerate(self.delta.layers) if is_net}

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> list[Weight]:
        return [_one_more(weight) if _is_norm(weight) else weight for weight in super().weights()]

    def layer_weights(self, prefix: str) -> list[Weight]:
        norms = [prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"]
        weights = [Weight(name, (Part(name, (self.config.hidden_size,)),)) for name in norms]
        weights += self._net_weights(prefix) if prefix in self._nets else self._attention_weights(prefix)
        return weights + self.feed_forward_weights(prefix)

    def _attention_weights(self, prefix: str) -> list[Weight]:
        """Lists qkv_proj, whose last rows are the gates', o_proj, and the heads' norms."""
        c, attention = self.config, prefix + "self_attn."
        size, hidden = c.head_size, c.hidden_size

        def queries(run: tuple[int, int]) -> Part:
            """A head's rows are its query's, then its gate's."""
            shape = (2 * c.heads * size, hidden)
            return Part(attention + "q_proj.weight", shape, Split.ROWS, c.heads, run=run)

        shape = (c.kv_heads * size, hidden)
        keys, values = (Part(f"{attention}{n}_proj.weight", shape, Split.ROWS, c.kv_heads) for n in ("k", "v"))
        rows = queries((0, size)), keys, values, queries((size, 2 * size))
        o = Part(attention + "o_proj.weight", (hidden, c.heads * size), Split.COLUMNS, c.heads)
        projections = [Weight(attention + "qkv_proj.weight", rows), Weight(o.key, (o,))]
        return projections + head_norm_weights(prefix, c)

    def _net_weights(self, prefix: str) -> list[Weight]:
        """Lists the tensors of a gated delta net; see `DeltaLayer`."""
        d, net = self.delta, prefix + "linear_attn."
        keys, values = d.key_heads * d.key_size, d.value_heads * d.value_size
        sections = (0, keys), (keys, 2 * keys), (2 * keys, 2 * keys + values)
        channels = 2 * keys + values
        conv = tuple(
            Part(net + "conv1d.weight", (channels, 1, d.kernel), Split.ROWS, d.key_heads, section=section)
            for section in sections
        )
        out = Part(net + "out_proj.weight", (self.config.hidden_size, values), Split.COLUMNS, d.key_heads)
        heads = [Part(net + name, (d.value_heads,), Split.ROWS, d.key_heads) for name in ("A_log", "dt_bias")]
        norm = Part(net + "norm.weight", (d.value_size,))
        return [
            Weight(net + "in_proj.weight", self.input_parts(net, sections)),
            Weight(net + "gates.weight", self.gate_parts(net)),
            Weight(net + "conv1d.weight", conv),
            *(Weight(part.key, (part,), WeightPrecision.FP32) for part in (*heads, norm)),
            Weight(out.key, (out,)),
        ]

    def input_parts(self, net: str, sections: tuple[tuple[int, int], ...]) -> tuple[Part, ...]:
        """Lists what `in_proj` is joined from: all queries, all keys, all values, all output gates.

        Args:
            net: the net's prefix.
            sections: rows of queries, keys and values, where they stand so.
        """
        d, hidden = self.delta, self.config.hidden_size
        values = d.value_heads * d.value_size
        shape = (sections[-1][1], hidden)
        qkv = (
            Part(net + "in_proj_qkv.weight", shape, Split.ROWS, d.key_heads, section=section) for section in sections
        )
        return *qkv, Part(net + "in_proj_z.weight", (values, hidden), Split.ROWS, d.key_heads)

    def gate_parts(self, net: str) -> tuple[Part, ...]:
        """Lists what `gates` is joined from: of all value heads how much they write, then how much they forget."""
        d, hidden = self.delta, self.config.hidden_size
        shape = (d.value_heads, hidden)
        return tuple(Part(f"{net}in_proj_{n}.weight", shape, Split.ROWS, d.key_heads) for n in ("b", "a"))

    def joined_linears(self) -> list[tuple[str, ...]]:
        return super().joined_linears() + [_inputs(prefix) for prefix in self._nets]

    # -- forward ---------------------------------------------------------------------------------------------------

    def _layer(self, ops: Ops[T], i: int, x: Residual[T], start: T, rows: T | None = None) -> tuple[T, Residual[T]]:
        prefix, eps = f"model.layers.{i}.", self.config.norm_eps
        norm = prefix + "input_layernorm"
        if prefix in self._nets:
            net = prefix + "linear_attn."
            stream, (inputs, gates) = ops.norm_linears(norm, _inputs(prefix), x, eps)
            y, out = ops.gated_delta(self.delta_layer(net, ops.tp), inputs, gates, start), net + "out_proj"
        else:
            stream, qkv = ops.norm_linear(norm, prefix + "self_attn.qkv_proj", x, eps)
            y, out = self._attend(ops, prefix, qkv, start), prefix + "self_attn.o_proj"
        kept, y = at_rows(ops, rows, stream, y)
        return stream, self.feed_forward(ops, prefix, ops.add_product(out, kept, y))

    def _attend(self, ops: Ops[T], prefix: str, qkv: T, start: T) -> T:
        """Attends, and multiplies what each head gives by its gates, the last columns of qkv: [B, N, heads*D]."""
        layer = attention_layer(prefix, "rope", self.config, ops.tp, self.head_norms)
        size = layer.heads * layer.head_size
        gates = ops.columns(qkv, size + 2 * layer.kv_heads * layer.head_size, size)
        return ops.gated(ops.self_attention(layer, qkv, start), gates)

    def delta_layer(self, net: str, tp: int) -> DeltaLayer:
        """Describes the gated delta net with that prefix on one of `tp` ranks."""
        d = self.delta
        key_heads = units_per_rank(d.key_heads, tp)
        value_heads = key_heads * (d.value_heads // d.key_heads)
        return DeltaLayer(net, key_heads, value_heads, d.key_size, d.value_size, d.kernel, self.config.norm_eps)


def _inputs(prefix: str) -> tuple[str, str]:
    """Names the linears of a net's input, in the layer with that prefix."""
    return prefix + "linear_attn.in_proj", prefix + "linear_attn.gates"


def _is_norm(weight: Weight) -> bool:
    """Whether a norm multiplies by one more than its checkpoint's numbers: all but the nets' own do."""
    return weight.name.endswith("norm.weight") and ".linear_attn." not in weight.name


def _one_more(weight: Weight) -> Weight:
    # In FP32: 1 + w rounded to BF16 would lose most of w.
    parts = tuple(replace(part, less_one=True) for part in weight.parts)
    return replace(weight, parts=parts, precision=WeightPrecision.FP32)
