"""The layers that some operations compute, described: sizes on one rank, and the names of weights and caches.

Letters as in `ops.base`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer on one rank.

    Its caches are `{prefix}key` and `{prefix}value`; the norms of its heads, where it has them,
    `{prefix}self_attn.q_norm` and `{prefix}self_attn.k_norm`; its sinks, where it has them, `{prefix}self_attn.sinks`.
    """

    prefix: str
    rope: str  # name of the RoPE tables; YaRN's attention factor is in them
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float | None  # None: heads are not normed
    window: int | None = None  # keys that a row sees, itself included; None: all
    has_sinks: bool = False
    gives_back: bool = False  # what has slid out of the window has no place in the caches
    causal_block: bool = False  # rows of a drafted block see no later one
    scale: float | None = None  # of scores; None: head_size ** -0.5
    keys_as_values: bool = False  # values are the keys as they were projected, and have no projection of their own
    norms_values: bool = False  # values are normed too, by no weight

    @property
    def sinks(self) -> str | None:
        """The name of the sinks [heads], where there are any."""
        return self.prefix + "self_attn.sinks" if self.has_sinks else None


@dataclass(frozen=True)
class LatentLayer:
    """One layer's latent attention (MLA, arXiv 2405.04434) on one rank.

    A row of its cache `{prefix}latent` [B, 1, S, rank + rotary size], the same on every rank, is key and value of all
    heads: `rank` numbers, normed by `{prefix}self_attn.kv_a_layernorm`, and a part that is rotated. Of each head,
    `{prefix}self_attn.latent_up` [heads * (plain size + value size), rank] makes a key's other part, then a value.
    """

    prefix: str
    rope: str
    heads: int
    rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    norm_eps: float
    scale: float  # of scores


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's activation of gate and up: min(gate, limit) * sigmoid(alpha * gate') * (clamp(up, -limit, limit) + 1).

    gate' is the clamped gate. A zero gate gives zero, so FFN columns that are padded with zeros add nothing.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoELayer:
    """The experts of one mixture-of-experts feed-forward on one rank.

    E: experts that this rank has; F: FFN columns that it has of each, zeros for padding included.

    | tensor | shape | type |
    |---|---|---|
    | `{prefix}experts.gate_up_proj.weight` | [E, 2F, H]: all gate rows, then all up rows | the engine's |
    | `{prefix}experts.down_proj.weight` | [E, H, F] | the engine's |
    | `{prefix}experts.gate_up_proj.bias`, where there is one | [E, 2F] | the engine's |
    | `{prefix}experts.down_proj.bias`, where there is one | [E, H]; of divided columns, on rank 0 alone | likewise |

    In MXFP4 (OCP Microscaling: E2M1 values, an E8M0 scale for 32 of them along the last dimension; see `ops.mxfp4`),
    each `.weight` [E, O, I] is instead

    | `.blocks` | [E, O, I / 32, 16]: two values a byte, the even one in the low half | uint8 |
    | `.scales` | [E, O, I / 32]: 127 + the power of two | uint8 |

    In FP8 and NVFP4 (see `ops.linear_weight`), `.weight` has its scales beside it, of every expert

    | `.weight`, `.scale` in FP8 | [E, O, I]; FP32 [E, O], or by block [E, O / 128, I / 128] | E4M3 |
    | `.weight`, `.scale`, `.global_scale` in NVFP4 | [E, O, I / 2]; E4M3 [E, O, I / 16]; FP32 [E, O] | uint8 |

    Beside our kernels and FP16 or BF16, `.tiles` stand for MXFP4's two and for NVFP4's `.weight` and `.scale`: see
    `ops.expert_tiles`, [E, O / 16, bytes of 16 rows] uint8, or beside BF16 words of them, int32.

    A router of sigmoid scores has `{prefix}router.correction_bias` FP32 [experts], whole on every rank; torch takes one
    without it too. Where there is `{prefix}router.expert_scale` [experts], an expert's weight in a row is multiplied by
    its number.

    Ranks divide either each expert's columns (all have all experts: `first` 0, `count` `experts`), or the experts.
    """

    prefix: str
    experts: int  # that the router chooses among: on all ranks together
    first: int  # the first expert that this rank has
    count: int  # how many it has
    top_k: int  # experts a row
    normalized: bool  # a row's top_k weights add up to 1
    clamp: ClampedSwiglu | None = None  # None: plain SwiGLU
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of logits; sigmoids are chosen by their sum with the bias
    activation: Literal["silu", "gelu"] = "silu"  # of gates; GELU by its form with tanh
    scale: float = 1.0  # that a row's weights are multiplied by, last
    has_shared: bool = False  # beside them every row goes through a feed-forward at `{prefix}shared_expert`


@dataclass(frozen=True)
class DeltaLayer:
    """One gated delta net on one rank: Hk key heads of Dk, Hv value heads of Dv, and Hv / Hk of these to a key head.

    | tensor | shape | type |
    |---|---|---|
    | `{prefix}conv1d.weight` | [C, 1, kernel]; C channels: all queries, all keys, all values | the engine's |
    | `{prefix}A_log`, `{prefix}dt_bias` | [Hv] | FP32 |
    | `{prefix}norm.weight` | [Dv] | FP32 |
    """

    prefix: str
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """Numbers of a row that go through the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
