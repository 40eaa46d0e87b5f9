"""Additions of DFlash 2 and DSpark to a drafter: mixing along the block, and a choice along the chain of drafts.

DFlash 2 (z-lab/dflash, `DFlash2DraftModel`) convolves the block's rows before and after each sublayer, and draws its
drafts one after the other from each row's 16 likeliest tokens, by a product of the token before, the row, and the
token. DSpark (arXiv 2607.05147; deepseek-ai/DeepSpec, `Qwen3DSparkModel`) adds a logit bias by the token before, of
rank 256; its gated variant weighs that by the row. The published one adds it to the whole vocabulary; ours to the 16
likeliest tokens too, which costs no acceptance (sfllm #42: 3.118 tokens a step, and 3.115).
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from trtllm_dflash.models.weights import Part, Weight
from trtllm_dflash.ops.base import Ops, Residual
from trtllm_dflash.ops.drafting import Candidates, Gate

T = TypeVar("T")

#: Candidates of a row where a checkpoint does not say: DSpark's has the whole vocabulary.
CANDIDATES = 16

#: Names of the selector's tensors in an engine, behind the drafter's prefix.
PREDECESSOR, SUCCESSOR, _GATE = "selector.predecessor", "selector.successor", "selector.gate"

#: The checkpoint's names of the selector's tensors, by its kind: predecessor and successor table, and the gate.
_SOURCES: dict[str, tuple[str, str, str | None]] = {
    "dflash2": (
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection",
    ),
    "markov": ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", None),
    "gated-markov": ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "markov_head.gate_proj"),
}


class ConvolutionConfig(BaseModel):
    """The convolutions before and after each sublayer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    taps: PositiveInt  # rows that are mixed: a row, and those before it
    group_size: PositiveInt  # channels that share the part of a kernel that is a row's own


class SelectorConfig(BaseModel):
    """The choice of each draft by the one before it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["dflash2", "markov", "gated-markov"]
    rank: PositiveInt
    candidates: PositiveInt  # likeliest tokens of a row that are chosen among
    multiplier: PositiveFloat = 1.0  # of the logits
    softcap: PositiveFloat | None = None  # their bound


#: Settings of a `DrafterConfig` that the published drafters of each kind have alike.
PUBLISHED_KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "convolution": ConvolutionConfig(taps=2, group_size=16),
        "selector": SelectorConfig(kind="dflash2", rank=256, candidates=CANDIDATES),
    },
    "dspark": {"from_anchor": True, "selector": SelectorConfig(kind="markov", rank=256, candidates=CANDIDATES)},
}


def convolution_weights(prefix: str, source: str, convolution: ConvolutionConfig, hidden: int) -> list[Weight]:
    """Lists the tensors of a layer's two convolutions. `source`: the prefix in the checkpoint."""
    taps, groups = convolution.taps, hidden // convolution.group_size
    shapes = {"base_kernel": (2, taps, hidden), "kernel_projection.weight": (2 * taps * groups, hidden)}
    return [
        Weight(f"{prefix}{place}_conv.{name}", (Part(f"{source}{place}_conv.{name}", shape),))
        for place in ("attention", "mlp")
        for name, shape in shapes.items()
    ]


def selector_weights(prefix: str, selector: SelectorConfig, hidden: int, vocab: int, draft_vocab: int) -> list[Weight]:
    """Lists the selector's tensors, whole on every rank."""
    predecessor, successor, gate = _SOURCES[selector.kind]
    rank = selector.rank
    weights = [
        Weight(prefix + PREDECESSOR, (Part(predecessor, (vocab, rank)),)),
        Weight(prefix + SUCCESSOR, (Part(successor, (draft_vocab, rank)),)),
    ]
    if gate is not None:
        width = hidden + rank if selector.kind == "gated-markov" else hidden
        weights.append(Weight(f"{prefix}{_GATE}.weight", (Part(gate + ".weight", (rank, width)),)))
    if selector.kind == "gated-markov":
        weights.append(Weight(f"{prefix}{_GATE}.bias", (Part(f"{gate}.bias", (rank,)),)))
    return weights


def is_table(name: str) -> bool:
    """Whether an engine tensor is one of the selector's tables, of which a step reads a few rows."""
    return name.endswith((PREDECESSOR, SUCCESSOR))


def convolved_layer(ops: Ops[T], prefix: str, x: Residual[T], eps: float, attend: Callable[[T], T]) -> Residual[T]:
    """Computes a layer with convolutions around its sublayers; `attend` makes its attention of qkv [B, Bd, ...]."""

    def attention(h: T) -> T:
        qkv = ops.linear(prefix + "self_attn.qkv_proj", h)
        return ops.all_reduce(ops.linear(prefix + "self_attn.o_proj", attend(qkv)))

    def feed_forward(h: T) -> T:
        inner = ops.linear_swiglu(prefix + "mlp.gate_up_proj", h)
        return ops.all_reduce(ops.linear(prefix + "mlp.down_proj", inner))

    x = _convolved(ops, prefix + "attention_conv", prefix + "input_layernorm", x, eps, attention)
    return _convolved(ops, prefix + "mlp_conv", prefix + "post_attention_layernorm", x, eps, feed_forward)


def _convolved(
    ops: Ops[T], name: str, norm: str, x: Residual[T], eps: float, sublayer: Callable[[T], T]
) -> Residual[T]:
    stream, h = ops.norm(norm, x, eps)
    # Both sides' kernels come from what goes in.
    kernels = ops.linear(name + ".kernel_projection", h)
    y = sublayer(ops.convolve_block(name + ".base_kernel", h, kernels, 0))
    return Residual(stream, ops.convolve_block(name + ".base_kernel", y, kernels, 1))


def choose(
    ops: Ops[T], prefix: str, selector: SelectorConfig, rows: T, logits: T, bonus: T, tokens_of: Callable[[T], T]
) -> T:
    """Chooses a token for each draft row, one after the other: [B, N].

    Args:
        rows: [B, N, H], normed: what the logits [B, N, V/tp] were made of.
        bonus: [B] the token before row 0.
        tokens_of: looks up the target's ids of the drafter's.
    """
    ids, scores = ops.top_candidates(logits, selector.candidates, selector.multiplier, selector.softcap)
    gate = None
    if selector.kind == "dflash2":
        gate = Gate(ops.linear(prefix + _GATE, rows))
    elif selector.kind == "gated-markov":
        gate = Gate(rows, prefix + _GATE)
    candidates = Candidates(ids, tokens_of(ids), scores)
    return ops.rerank(candidates, prefix + PREDECESSOR, prefix + SUCCESSOR, gate, bonus)
