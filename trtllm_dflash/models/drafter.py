"""The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that read the target's hidden states.

Every token has one context row: the tapped hidden states joined, through `fc` and `hidden_norm`. Each layer takes keys
and values from the context rows and from the block `[bonus, MASK, ..., MASK]`; only the block has queries. Attention in
the block is not causal, and one pass drafts it whole. Embedding and LM head are the target's; a drafter with a reduced
vocabulary brings its own head and a table from its ids to the target's.
"""

from typing import TypeVar

from pydantic import PositiveInt

from trtllm_dflash.models.decoder import (
    DecoderConfig,
    attention_weights,
    head_norm_weights,
    mlp,
    mlp_weights,
    project_qkv,
)
from trtllm_dflash.models.weights import Part, Split, Weight, units_per_rank
from trtllm_dflash.ops import Ops

T = TypeVar("T")

PREFIX = "drafter."


class DrafterConfig(DecoderConfig):
    """The shape of a drafter. `vocab_size` is the target's."""

    block_size: PositiveInt
    mask_token_id: int
    target_layers: PositiveInt
    tap_layers: tuple[int, ...]
    draft_vocab_size: PositiveInt | None = None


class Drafter:
    """A drafter over `Ops`; stateless, one for any number of ranks."""

    def __init__(self, config: DrafterConfig) -> None:
        self.config = config

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> list[Weight]:
        """Every engine tensor (named `drafter.`...) and the checkpoint tensors it is made of."""
        c = self.config
        weights = [
            _whole("fc.weight", (c.hidden_size, len(c.tap_layers) * c.hidden_size)),
            _whole("hidden_norm.weight", (c.hidden_size,)),
            _whole("norm.weight", (c.hidden_size,)),
        ]
        for i in range(c.layers):
            source = f"layers.{i}."
            prefix = PREFIX + source
            weights.append(_whole(source + "input_layernorm.weight", (c.hidden_size,)))
            weights.append(_whole(source + "post_attention_layernorm.weight", (c.hidden_size,)))
            weights += attention_weights(prefix, c, source)
            weights += head_norm_weights(prefix, c, source)
            weights += mlp_weights(prefix, c, source)
        weights += self._context_weights()
        if c.draft_vocab_size is not None:
            size = c.draft_vocab_size
            head = Part("lm_head.weight", (size, c.hidden_size), Split.ROWS, size)
            weights.append(Weight(PREFIX + "lm_head.weight", (head,)))
        return weights

    def _context_weights(self) -> list[Weight]:
        """All layers' K and V projections once more as one tensor: context rows need nothing else, so one GEMM."""
        c = self.config
        size = c.kv_heads * c.head_size
        names = [f"layers.{i}.self_attn.{n}_proj" for i in range(c.layers) for n in ("k", "v")]
        parts = tuple(Part(f"{n}.weight", (size, c.hidden_size), Split.ROWS, c.kv_heads) for n in names)
        weights = [Weight(PREFIX + "context_kv_proj.weight", parts)]
        if c.attention_bias:
            biases = tuple(Part(f"{n}.bias", (size,), Split.ROWS, c.kv_heads) for n in names)
            weights.append(Weight(PREFIX + "context_kv_proj.bias", biases))
        return weights

    # -- forward ---------------------------------------------------------------------------------------------------

    def context(self, ops: Ops[T], taps: list[T], start: T) -> list[tuple[T, T]]:
        """Each layer's K (normed, rotated) and V of the context rows [B, Hkv, Q, D]: taps [B, Q, H] at start [B]."""
        c = self.config
        kv_heads = units_per_rank(c.kv_heads, ops.tp)
        x = ops.linear(PREFIX + "fc", ops.concat(taps))
        x = ops.rms_norm(PREFIX + "hidden_norm", x, c.norm_eps)
        kv = ops.linear(PREFIX + "context_kv_proj", x)  # [B, Q, layers * 2 * Hkv * D]
        positions = ops.positions(start, ops.row_offsets(x))
        layers = []
        for i in range(c.layers):
            k = ops.split_heads(kv, 2 * i * kv_heads, kv_heads, c.head_size)
            v = ops.split_heads(kv, (2 * i + 1) * kv_heads, kv_heads, c.head_size)
            k = ops.rms_norm(f"{PREFIX}layers.{i}.self_attn.k_norm", k, c.norm_eps)
            layers.append((ops.rope(PREFIX + "rope", k, positions), v))
        return layers

    def keep_context(self, ops: Ops[T], context: list[tuple[T, T]], start: T) -> None:
        """Writes the context rows and drafts nothing, so that drafting can resume at any later step."""
        for i, (k, v) in enumerate(context):
            ops.append_kv(f"{PREFIX}layers.{i}.key", k, start)
            ops.append_kv(f"{PREFIX}layers.{i}.value", v, start)

    def draft(self, ops: Ops[T], context: list[tuple[T, T]], start: T, committed: T, bonus: T, block_offsets: T) -> T:
        """Drafts the tokens after the bonus token: [B, Bd - 1].

        Of the context rows, the first committed [B] become permanent, at start [B]. The block's own rows follow them
        at once and are scratch: the next call writes the true context rows over them.
        """
        c = self.config
        block_start = ops.add(start, committed)
        positions = ops.positions(block_start, block_offsets)  # [B, Bd]
        lengths = ops.key_lengths(block_start, block_offsets)  # [B]
        x = ops.embedding("model.embed_tokens", ops.masked_block(bonus, block_offsets, c.mask_token_id))
        for i, (context_k, context_v) in enumerate(context):
            prefix = f"{PREFIX}layers.{i}."
            h = ops.rms_norm(prefix + "input_layernorm", x, c.norm_eps)
            q, k, v = project_qkv(ops, prefix, h, c)
            q = ops.rope(PREFIX + "rope", ops.rms_norm(prefix + "self_attn.q_norm", q, c.norm_eps), positions)
            k = ops.rope(PREFIX + "rope", ops.rms_norm(prefix + "self_attn.k_norm", k, c.norm_eps), positions)
            keys = ops.append_kv(prefix + "key", ops.splice_rows(context_k, k, committed), start)
            values = ops.append_kv(prefix + "value", ops.splice_rows(context_v, v, committed), start)
            h = ops.attention(q, keys, values, lengths, causal=False)
            x = ops.add(x, ops.all_reduce(ops.linear(prefix + "self_attn.o_proj", h)))
            x = ops.add(x, mlp(ops, prefix, ops.rms_norm(prefix + "post_attention_layernorm", x, c.norm_eps)))
        # Row 0 stands at the bonus token, which is known: only the rows after it are drafts.
        x = ops.rms_norm(PREFIX + "norm", ops.drop_first_row(x), c.norm_eps)
        if c.draft_vocab_size is None:
            return ops.argmax(ops.linear("lm_head", x))
        return ops.lookup(PREFIX + "draft_to_target", ops.argmax(ops.linear(PREFIX + "lm_head", x)))


def _whole(source: str, shape: tuple[int, ...]) -> Weight:
    return Weight(PREFIX + source, (Part(source, shape),))
