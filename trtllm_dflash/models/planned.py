"""Targets that are planned for as if our kernels computed them: the matrices that they hold, and the rows they keep.

Kimi-K2.5. `build --plan` counts with these, and the other runtimes' scripts do. Vectors (norms but for the two of a
layer, biases) are left out: they weigh nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig
from trtllm_dflash.models.rope import RopeConfig
from trtllm_dflash.models.weights import Content, Part, Split, Weight, WeightPrecision, in_precision

_PACKED = 32  # numbers of INT4 that share a scale


@dataclass(frozen=True)
class Attends:
    """A layer's attention, and the rows that it keeps.

    Attributes:
        latent: a row is key and value of all heads, and every rank keeps it (MLA, absorbed).
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    latent: bool = False

    @property
    def row(self) -> int:
        """Numbers of a token that are kept of each key/value head."""
        return self.key_size if self.latent else self.key_size + self.value_size


@dataclass(frozen=True)
class DeltaNet:
    """A layer's gated delta net, and the state that it keeps of a sequence. A rank has whole key heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int  # rows of its convolution

    @property
    def channels(self) -> int:
        """Numbers of a row that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


@dataclass(frozen=True)
class Matrix:
    """A matrix, or a stack of experts' [experts, rows, columns], by the name of its linear and as ranks divide it."""

    name: str
    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    units: int = 1
    packed: bool = False  # INT4, a scale in 16 bits for each 32 of a row


class PlannedConfig(DecoderConfig):
    """The shape of a target that is planned for; the fields of `DecoderConfig` that are not counted hold anything."""

    mixers: tuple[Attends | DeltaNet, ...]  # by layer
    matrices: tuple[Matrix, ...]  # without the embedding and the head


class Planned:
    """The matrices of a target that is planned for; computes nothing."""

    def __init__(self, config: PlannedConfig) -> None:
        self.config = config

    def weights(self) -> list[Weight]:
        """Lists every matrix of an engine, with its part of a checkpoint."""
        c = self.config
        table = (c.vocab_size, c.hidden_size)
        weights = [_whole("model.embed_tokens.weight", table)]
        for i in range(c.layers):
            names = ("input_layernorm", "post_attention_layernorm")
            weights += [_whole(f"model.layers.{i}.{name}.weight", (c.hidden_size,)) for name in names]
        weights += [weight for matrix in c.matrices for weight in self._weights_of(matrix)]
        weights.append(_whole("model.norm.weight", (c.hidden_size,)))
        if not c.tied_embeddings:
            weights.append(Weight("lm_head.weight", (Part("lm_head.weight", table, Split.ROWS, c.vocab_size),)))
        return in_precision(weights, c.linear_precision, c.plain_linears)

    def _weights_of(self, matrix: Matrix) -> list[Weight]:
        split, units = matrix.split, matrix.units
        if len(matrix.shape) == 3 and self.config.moe is not None and self.config.moe.expert_parallel:
            split, units = Split.ROWS, matrix.shape[0]
        if not matrix.packed:
            return [Weight(matrix.name + ".weight", (Part(matrix.name + ".weight", matrix.shape, split, units),))]
        *stack, columns = matrix.shape
        bytes_, scales = (*stack, columns // 2), (*stack, columns // _PACKED)
        name, packed = matrix.name + ".blocks", Content.E2M1_PAIRS
        part = Part(matrix.name + ".scales", scales, split, units)
        return [
            Weight(name, (Part(name, bytes_, split, units, packed),), WeightPrecision.BYTES),
            Weight(part.key, (part,)),
        ]


def mixers_of(config: DecoderConfig) -> tuple[Attends | DeltaNet, ...]:
    """Lists what mixes tokens in each layer of any target or drafter."""
    if isinstance(config, PlannedConfig):
        return config.mixers
    return tuple(_mixer_of(config, i) for i in range(config.layers))


def _mixer_of(config: DecoderConfig, i: int) -> Attends | DeltaNet:
    delta = config.delta
    if delta is not None and delta.layers[i]:
        return DeltaNet(delta.key_heads, delta.value_heads, delta.key_size, delta.value_size, delta.kernel)
    latent = config.latent_attention
    if latent is not None:
        return Attends(config.heads, 1, latent.rank + latent.rotary_size, latent.rank, latent=True)
    kv_heads, size = config.caches(i)["key"]
    return Attends(config.heads, kv_heads, size, size, config.window(i))


# -- families --------------------------------------------------------------------------------------------------------


def _read_kimi(raw: dict[str, Any]) -> PlannedConfig:
    """Reads Kimi-K2.5: latent attention, absorbed, and experts in INT4 in all layers but the first."""
    text = raw["text_config"]
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    latent, query = text["kv_lora_rank"], text["q_lora_rank"]
    mixers = (Attends(heads, 1, latent + rope, latent, latent=True),) * text["num_hidden_layers"]
    shared = text["n_shared_experts"] * text["moe_intermediate_size"]
    matrices: list[Matrix] = []
    for i in range(len(mixers)):
        layer = f"model.layers.{i}."
        matrices += [
            Matrix(layer + "self_attn.q_a_proj", (query, hidden)),
            _rows(layer + "self_attn.q_b_proj", heads * (nope + rope), query, heads),
            Matrix(layer + "self_attn.kv_a_proj", (latent + rope, hidden)),
            _rows(layer + "self_attn.kv_b_proj", heads * (nope + value), latent, heads),
            _columns(layer + "self_attn.o_proj", hidden, heads * value, heads),
        ]
        if i < text["first_k_dense_replace"]:
            matrices += _feed_forward(layer + "mlp.", hidden, text["intermediate_size"])
            continue
        size = text["moe_intermediate_size"]
        matrices += _experts(layer, hidden, text["n_routed_experts"], size, packed=True)
        matrices += _feed_forward(layer + "mlp.shared_expert.", hidden, shared)
    return _planned(raw, text, mixers, matrices, "n_routed_experts", "num_experts_per_tok")


#: `model_type` in config.json -> the reader of what is planned for.
PLANNED: dict[str, Callable[[dict[str, Any]], PlannedConfig]] = {
    "kimi_k25": _read_kimi,
}


def _planned(
    raw: dict[str, Any],
    text: dict[str, Any],
    mixers: tuple[Attends | DeltaNet, ...],
    matrices: list[Matrix],
    experts: str,
    top_k: str,
) -> PlannedConfig:
    """Makes the configuration. `experts`, `top_k`: the names of those settings in this family."""
    attends = [mixer for mixer in mixers if isinstance(mixer, Attends)]
    if len(mixers) != text["num_hidden_layers"] or not attends:
        raise CheckpointError("config.json: layer_types must say a kind for each layer, of which some attend")
    moe = None
    if text.get(experts):
        size = text["moe_intermediate_size"]
        moe = MoEConfig(experts=text[experts], top_k=text[top_k], intermediate_size=size, normalized=True)
    windows = tuple(mixer.window if isinstance(mixer, Attends) else None for mixer in mixers)
    return PlannedConfig(
        family=raw["model_type"],
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        layers=len(mixers),
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_size=max(mixer.value_size for mixer in attends),
        intermediate_size=text.get("intermediate_size") or text["shared_expert_intermediate_size"],
        norm_eps=text["rms_norm_eps"],
        max_positions=text["max_position_embeddings"],
        rope=RopeConfig(theta=10000.0),
        tied_embeddings=text["tie_word_embeddings"],
        windows=windows if any(windows) else None,
        moe=moe,
        mixers=mixers,
        matrices=tuple(matrices),
    )


def _feed_forward(prefix: str, hidden: int, size: int) -> list[Matrix]:
    return [
        _rows(prefix + "gate_up_proj", 2 * size, hidden, size),
        _columns(prefix + "down_proj", hidden, size, size),
    ]


def _experts(layer: str, hidden: int, experts: int, size: int, packed: bool = False) -> list[Matrix]:
    unit = size // _PACKED if packed else size  # ranks divide whole blocks
    return [
        Matrix(layer + "mlp.router", (experts, hidden)),
        Matrix(layer + "mlp.experts.gate_up_proj", (experts, 2 * size, hidden), Split.COLUMNS, size, packed),
        Matrix(layer + "mlp.experts.down_proj", (experts, hidden, size), Split.THIRD, unit, packed),
    ]


def _rows(name: str, rows: int, columns: int, units: int) -> Matrix:
    return Matrix(name, (rows, columns), Split.ROWS, units)


def _columns(name: str, rows: int, columns: int, units: int) -> Matrix:
    return Matrix(name, (rows, columns), Split.COLUMNS, units)


def _whole(name: str, shape: tuple[int, ...]) -> Weight:
    return Weight(name, (Part(name, shape),))
