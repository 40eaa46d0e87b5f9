"""The decoder that most families are: RMSNorm, grouped-query attention, SwiGLU, residuals. Written over `Ops`.

A family subclasses `Decoder` and says what differs. Tensor names are the checkpoint's; where several are fused, the
fused tensor is named as the layer's others are (`qkv_proj`, `gate_up_proj`).
"""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.rope import PositiveNumber, RopeConfig, read_rope, rotary_size
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision, in_precision, units_per_rank
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, ClampedSwiglu, MoELayer, Ops, Residual

T = TypeVar("T")

#: Numbers of layers and experts, far beyond any model's: a damaged config.json's would be listed without end.
Layers = Annotated[int, Field(gt=0, le=1024)]
Experts = Annotated[int, Field(gt=0, le=4096)]


class MoEConfig(BaseModel):
    """The experts that stand in place of a layer's feed-forward."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experts: Experts
    top_k: PositiveInt  # experts a token
    intermediate_size: PositiveInt  # of one expert
    normalized: bool  # see `MoELayer`
    clamp: ClampedSwiglu | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"  # see `MoELayer`
    scale: float = 1.0
    activation: Literal["silu", "gelu"] = "silu"
    mxfp4: bool = False  # how the experts' matrices are stored
    stacked: bool = False  # likewise: those of a layer as one tensor, not each by itself
    shared_size: PositiveInt | None = None  # columns of an expert that every row goes through
    dense_layers: NonNegativeInt = 0  # the first so many layers have a feed-forward and no experts
    expert_parallel: bool = False  # ranks hold whole experts, not a slice of each


class DeltaConfig(BaseModel):
    """The gated delta nets that stand in place of most layers' attention (arXiv 2412.06464)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layers: tuple[bool, ...]  # which ones they are
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_size: PositiveInt  # numbers of a head
    value_size: PositiveInt
    kernel: PositiveInt  # rows that the convolution before them sees


class FullAttention(BaseModel):
    """The layers without a window, of a model whose layers with one have other heads (Gemma 4)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kv_heads: PositiveInt
    head_size: PositiveInt
    rope: RopeConfig
    keys_as_values: bool  # see `AttentionLayer`


class LatentAttention(BaseModel):
    """Attention to one row of few numbers for all heads (MLA, arXiv 2405.04434); see `LatentLayer`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    query_rank: PositiveInt
    rank: PositiveInt
    plain_size: PositiveInt
    rotary_size: PositiveInt
    value_size: PositiveInt
    scale: float  # of scores


class DecoderConfig(BaseModel):
    """The shape of a decoder, as read from a Hugging Face config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    family: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: Layers
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    intermediate_size: PositiveInt
    norm_eps: PositiveNumber
    max_positions: Annotated[int, Field(ge=2)]  # one of a prompt and one of its reply at least
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool = False
    windows: tuple[PositiveInt | None, ...] | None = None  # keys that a row sees, by layer; None: all
    attention_sinks: bool = False
    full_attention: FullAttention | None = None  # None: all layers have the heads that are said above
    latent_attention: LatentAttention | None = None  # in all layers
    embedding_scale: float | None = None  # that embeddings are multiplied by
    logit_cap: PositiveNumber | None = None  # logits are cap * tanh(logits / cap)
    moe: MoEConfig | None = None  # None: dense
    delta: DeltaConfig | None = None  # None: every layer attends
    linear_precision: WeightPrecision | None = None  # of its matrices; None: the engine's
    plain_linears: tuple[str, ...] = ()  # but for these linears, which have the engine's

    @property
    def attention_layers(self) -> list[int]:
        """The layers that attend, and so have K/V caches."""
        return [i for i in range(self.layers) if self.delta is None or not self.delta.layers[i]]

    def window(self, i: int) -> int | None:
        """Keys that a row of layer i sees; None: all."""
        return self.windows[i] if self.windows else None

    def caches(self, i: int) -> dict[str, tuple[int, int]]:
        """Heads of layer i's caches, and their sizes, by kind."""
        if self.delta is not None and self.delta.layers[i]:
            return {}
        if self.latent_attention is not None:
            return {"latent": (1, self.latent_attention.rank + self.latent_attention.rotary_size)}
        full = self.full_attention if self.window(i) is None else None
        shape = (self.kv_heads, self.head_size) if full is None else (full.kv_heads, full.head_size)
        return {"key": shape, "value": shape}

    @property
    def head_sizes(self) -> set[int]:
        """Sizes of heads that its caches have."""
        return {size for i in range(self.layers) for _, size in self.caches(i).values()}

    @property
    def ropes(self) -> dict[str, tuple[RopeConfig, int]]:
        """Rotary embeddings by the names of their tables, each with the size of its heads."""
        latent = self.latent_attention
        ropes = {"rope": (self.rope, self.head_size if latent is None else latent.rotary_size)}
        if self.full_attention is not None:
            ropes["full_rope"] = self.full_attention.rope, self.full_attention.head_size
        return ropes


def read_decoder_config(family: str, raw: dict[str, Any], partial_rotary: bool | None = False) -> DecoderConfig:
    """Reads the settings that dense families share from config.json.

    Args:
        partial_rotary: whether the part of each head that it says is rotated; None: whole heads are, whatever it says.

    Raises:
        CheckpointError: a setting is missing, or asks for something that this decoder does not compute.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("mlp_bias"):
        raise CheckpointError("config.json: mlp_bias is not supported")
    sliding = "sliding_attention" in raw.get("layer_types", []) or raw.get("use_sliding_window")
    if sliding:
        raise CheckpointError("config.json: sliding-window attention is not supported")
    try:
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        head_size = raw.get("head_dim") or raw["hidden_size"] // heads
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
        if head_size % 2:
            raise CheckpointError(f"config.json: heads of {head_size} dimensions cannot be rotated in pairs")
        rope, part = read_rope(raw), None if partial_rotary is None else rotary_size(raw, head_size)
        if part is not None and not partial_rotary:
            raise CheckpointError(
                f"config.json: partial_rotary_factor that rotates {part} of a head's {head_size} dimensions is not "
                f"supported; {family} rotates all"
            )
        return DecoderConfig(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            intermediate_size=raw["intermediate_size"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_positions=raw["max_position_embeddings"],
            rope=rope.model_copy(update={"rotary_size": part}),
            tied_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
        )
    except KeyError as missing:
        raise CheckpointError(f"config.json: {missing.args[0]!r} is missing") from None


@dataclass(frozen=True)
class Features(Generic[T]):
    """The target's hidden states from one pass: the tapped ones for the drafter, the last for logits."""

    hidden: T  # [B, Q, H] after the last layer, before the final norm; of the rows that were asked for [B, R, H]
    taps: list[T]  # [B, Q, H] each: after the tapped layers, in their order


class Decoder:
    """A decoder over `Ops`; stateless, one for any number of ranks."""

    #: Whether each query and key head is normed before RoPE.
    head_norms = False

    #: What it has that our CUDA kernels do not compute on flat rows; None: they compute all of it.
    without_kernels: str | None = None

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> list[Weight]:
        """Lists every engine tensor with the checkpoint tensors that it is made of."""
        c = self.config
        table = (c.vocab_size, c.hidden_size)
        weights = [_whole("model.embed_tokens.weight", table)]
        for i in range(c.layers):
            weights += self.layer_weights(f"model.layers.{i}.")
        weights.append(_whole("model.norm.weight", (c.hidden_size,)))
        if not c.tied_embeddings:
            part = Part("lm_head.weight", table, Split.ROWS, c.vocab_size)
            weights.append(Weight("lm_head.weight", (part,)))
        return in_precision(weights, c.linear_precision, c.plain_linears)

    def layer_weights(self, prefix: str) -> list[Weight]:
        """Lists the tensors of one layer."""
        c = self.config
        weights = [
            _whole(prefix + "input_layernorm.weight", (c.hidden_size,)),
            _whole(prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
        ]
        return weights + attention_weights(prefix, c) + self.feed_forward_weights(prefix)

    def feed_forward_weights(self, prefix: str) -> list[Weight]:
        """Lists the tensors of a layer's feed-forward."""
        return mlp_weights(prefix, self.config)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self, ops: Ops[T], token_ids: T, start: T, tap_layers: tuple[int, ...], rows: T | None = None
    ) -> Features[T]:
        """Runs token_ids [B, Q] at positions start [B] onwards, appending their K and V to the cache.

        Args:
            rows: [B, R] whose last states are wanted, ascending: the last layer goes no further than its attention for
                the others, which are most of a prompt's. None: all.
        """
        x = Residual(embedded(ops, token_ids, self.config))
        last = self.config.layers - 1
        streams = []
        for i in range(last):
            stream, x = self._layer(ops, i, x, start)
            streams.append(stream)
        is_tapped = last in tap_layers
        stream, x = self._layer(ops, last, x, start, None if is_tapped else rows)
        streams.append(stream)
        hidden = ops.add_pending(x)
        # After layer i is before layer i + 1: Hugging Face's hidden_states[i + 1], but for the last layer's, which it
        # norms. Tapping i instead costs acceptance, never an error.
        streams.append(hidden)
        taps = [streams[i + 1] for i in tap_layers]
        return Features(ops.gather_rows(hidden, rows) if is_tapped and rows is not None else hidden, taps)

    def logits(self, ops: Ops[T], hidden: T) -> T:
        """Computes logits [B, R, V/tp] of hidden [B, R, H], which the final norm has not seen yet."""
        logits = ops.norm_linear("model.norm", "lm_head", Residual(hidden), self.config.norm_eps)[1]
        return logits if self.config.logit_cap is None else ops.cap(logits, self.config.logit_cap)

    def keep_path(self, ops: Ops[T], start: T, verdict: Acceptance[T]) -> None:
        """Moves the K and V of a tree's accepted rows to their positions."""
        if verdict.path is not None:
            layers = [self.attention_layer(ops.tp, i) for i in range(self.config.layers)]
            ops.move_kv(layers, start, verdict)

    def _layer(self, ops: Ops[T], i: int, x: Residual[T], start: T, rows: T | None = None) -> tuple[T, Residual[T]]:
        """Computes layer i: returns the whole stream before it, and the stream after it, of `rows` if given."""
        prefix, eps = f"model.layers.{i}.", self.config.norm_eps
        stream, qkv = ops.norm_linear(prefix + "input_layernorm", prefix + "self_attn.qkv_proj", x, eps)
        kept, h = at_rows(ops, rows, stream, self.attention(ops, i, qkv, start))
        return stream, self.feed_forward(ops, prefix, ops.add_product(prefix + "self_attn.o_proj", kept, h))

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Lists the linears of one input, see `Ops.norm_linears`, whose weights a session may join."""
        return []

    def expert_layers(self) -> list[MoELayer]:
        """Describes the experts of every layer that has some, as one rank alone has them."""
        return []

    def attention(self, ops: Ops[T], i: int, qkv: T, start: T) -> T:
        """Computes the attention of layer i from its projections: see `Ops.self_attention`."""
        return ops.self_attention(self.attention_layer(ops.tp, i), qkv, start)

    def attention_layer(self, tp: int, i: int) -> AttentionLayer:
        """Describes the attention of layer i on one of `tp` ranks."""
        return attention_layer(f"model.layers.{i}.", "rope", self.config, tp, self.head_norms, self.config.window(i))

    def feed_forward(self, ops: Ops[T], prefix: str, x: Residual[T]) -> Residual[T]:
        """Computes a layer's feed-forward, with its norm before and its sum over the ranks after."""
        return mlp(ops, prefix, x, self.config)


# -- pieces that targets and the drafter share -----------------------------------------------------------------------


def at_rows(ops: Ops[T], rows: T | None, stream: T, h: T) -> tuple[T, T]:
    """Takes the rows [B, R] of the stream [B, N, H] and of what is added to it next [B, N, I]; None: all."""
    return (stream, h) if rows is None else (ops.gather_rows(stream, rows), ops.gather_rows(h, rows))


def embedded(ops: Ops[T], token_ids: T, c: DecoderConfig) -> T:
    """Embeds token_ids [B, N], multiplied by the target's scale where it has one: [B, N, H]."""
    if c.embedding_scale is None:
        return ops.embedding("model.embed_tokens", token_ids)
    return ops.scaled_embedding("model.embed_tokens", token_ids, c.embedding_scale)


def attention_layer(
    prefix: str, rope: str, c: DecoderConfig, tp: int, head_norms: bool, window: int | None = None
) -> AttentionLayer:
    """Describes a layer's attention on one of `tp` ranks."""
    heads, kv_heads = units_per_rank(c.heads, tp), units_per_rank(c.kv_heads, tp)
    eps = c.norm_eps if head_norms else None
    gives_back = window is not None
    return AttentionLayer(prefix, rope, heads, kv_heads, c.head_size, eps, window, c.attention_sinks, gives_back)


def mlp(ops: Ops[T], prefix: str, x: Residual[T], c: DecoderConfig) -> Residual[T]:
    """Computes norm and SwiGLU feed-forward, summed over the ranks."""
    norm, gate_up = prefix + "post_attention_layernorm", prefix + "mlp.gate_up_proj"
    stream, h = ops.norm_linear_swiglu(norm, gate_up, x, c.norm_eps)
    return ops.add_product(prefix + "mlp.down_proj", stream, h)


def attention_weights(prefix: str, c: DecoderConfig, source: str | None = None) -> list[Weight]:
    """Lists fused qkv_proj and o_proj, with their biases if any. `source`: the prefix in the checkpoint."""
    source = prefix if source is None else source
    attention = source + "self_attn."
    q_size, kv_size = c.heads * c.head_size, c.kv_heads * c.head_size
    shapes = {"q": (q_size, c.heads), "k": (kv_size, c.kv_heads), "v": (kv_size, c.kv_heads)}
    qkv = tuple(
        Part(f"{attention}{n}_proj.weight", (size, c.hidden_size), Split.ROWS, units)
        for n, (size, units) in shapes.items()
    )
    o = Part(f"{attention}o_proj.weight", (c.hidden_size, q_size), Split.COLUMNS, c.heads)
    weights = [
        Weight(prefix + "self_attn.qkv_proj.weight", qkv),
        Weight(prefix + "self_attn.o_proj.weight", (o,)),
    ]
    if c.attention_bias:
        biases = tuple(
            Part(f"{attention}{n}_proj.bias", (size,), Split.ROWS, units) for n, (size, units) in shapes.items()
        )
        o_bias = Part(f"{attention}o_proj.bias", (c.hidden_size,), Split.FIRST_RANK)
        weights.append(Weight(prefix + "self_attn.qkv_proj.bias", biases))
        weights.append(Weight(prefix + "self_attn.o_proj.bias", (o_bias,)))
    return weights


def mlp_weights(prefix: str, c: DecoderConfig, source: str | None = None) -> list[Weight]:
    """Lists fused gate_up_proj, and down_proj."""
    source = prefix if source is None else source
    size = c.intermediate_size
    gate, up = (Part(f"{source}mlp.{n}_proj.weight", (size, c.hidden_size), Split.ROWS, size) for n in ("gate", "up"))
    down = Part(f"{source}mlp.down_proj.weight", (c.hidden_size, size), Split.COLUMNS, size)
    return [
        Weight(prefix + "mlp.gate_up_proj.weight", (gate, up)),
        Weight(prefix + "mlp.down_proj.weight", (down,)),
    ]


def head_norm_weights(prefix: str, c: DecoderConfig, source: str | None = None) -> list[Weight]:
    """Lists q_norm and k_norm, over the head size."""
    source = prefix if source is None else source
    return [
        Weight(f"{prefix}self_attn.{n}_norm.weight", (Part(f"{source}self_attn.{n}_norm.weight", (c.head_size,)),))
        for n in ("q", "k")
    ]


def _whole(name: str, shape: tuple[int, ...]) -> Weight:
    return Weight(name, (Part(name, shape),))
