"""The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that read the target's hidden states.

Every token has one context row: the tapped hidden states joined, through `fc` and `hidden_norm`. Each layer takes keys
and values from the context rows and from the block `[bonus, MASK, ..., MASK]`; only the block has queries. Attention in
the block is not causal (in layers with a window it may be), and one pass drafts it whole. Embedding and LM head are the
target's; a drafter with a reduced vocabulary brings its own head and a table from its ids to the target's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from trtllm_dflash.models.decoder import (
    DecoderConfig,
    attention_layer,
    attention_weights,
    embedded,
    head_norm_weights,
    mlp,
    mlp_weights,
)
from trtllm_dflash.models.dflash2 import (
    ConvolutionConfig,
    SelectorConfig,
    choose,
    convolution_weights,
    convolved_layer,
    selector_weights,
)
from trtllm_dflash.models.weights import Part, Split, Weight, in_precision
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Context, Ops, Residual
from trtllm_dflash.ops.draft_tree import RANKS, DraftTree

T = TypeVar("T")

PREFIX = "drafter."
#: Rows of a block, at most: far beyond any drafter's, and few enough for a step.
LARGEST_BLOCK = 1024
#: What a drafter with a vocabulary of its own has: the head, and the target's id of each of its ids.
HEAD, DRAFT_TO_TARGET = PREFIX + "lm_head.weight", PREFIX + "draft_to_target"


class DrafterConfig(DecoderConfig):
    """The shape of a drafter. `vocab_size` is the target's."""

    block_size: Annotated[int, Field(gt=0, le=LARGEST_BLOCK)]  # rows
    mask_token_id: int
    target_layers: PositiveInt
    tap_layers: tuple[int, ...]
    draft_vocab_size: PositiveInt | None = None
    from_anchor: bool = False  # row 0, the bonus token's, drafts too
    causal_layers: tuple[NonNegativeInt, ...] = ()  # whose block rows see no later one
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None  # None: each row's likeliest token

    @property
    def step_rows(self) -> int:
        """The bonus token and the most drafts that follow it: 1 + K."""
        return self.block_size + self.from_anchor

    @property
    def is_second(self) -> bool:
        """Whether it drafts as DFlash 2 and DSpark do: rows depend on those before them, or row 0 drafts too."""
        return self.convolution is not None or self.selector is not None or self.from_anchor


class Drafter:
    """A drafter over `Ops`; stateless, one for any number of ranks."""

    def __init__(self, config: DrafterConfig) -> None:
        self.config = config

    @property
    def without_plugin(self) -> str | None:
        """The part of it that our TensorRT plugin does not compute; None: it computes all."""
        if self.config.is_second:
            return "drafting as DFlash 2 and DSpark do"
        has_windows = self.config.windows is not None or bool(self.config.causal_layers)
        return "windows in a drafter's layers" if has_windows else None

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> list[Weight]:
        """Lists every engine tensor (named `drafter.`...) with the checkpoint tensors that it is made of."""
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
            if c.convolution is not None:
                weights += convolution_weights(prefix, source, c.convolution, c.hidden_size)
        weights += self._context_weights()
        if c.selector is not None:
            drafted = c.draft_vocab_size or c.vocab_size
            weights += selector_weights(PREFIX, c.selector, c.hidden_size, c.vocab_size, drafted)
        if c.draft_vocab_size is not None:
            size = c.draft_vocab_size
            head = Part("lm_head.weight", (size, c.hidden_size), Split.ROWS, size)
            weights.append(Weight(HEAD, (head,)))
        return in_precision(weights, c.linear_precision, c.plain_linears)

    def _context_weights(self) -> list[Weight]:
        """Lists all layers' K and V projections once more as one tensor: context rows need no others, so one GEMM."""
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

    def context(self, ops: Ops[T], taps: T, start: T) -> list[Context[T]]:
        """Computes each layer's context rows (see `Ops.context_rows`) from taps [B, Q, taps * H] at start [B]."""
        c = self.config
        x = ops.linear(PREFIX + "fc", taps)
        # [B, Q, layers * 2 * Hkv * D]
        _, kv = ops.norm_linear(PREFIX + "hidden_norm", PREFIX + "context_kv_proj", Residual(x), c.norm_eps)
        return [ops.context_rows(self._attention(ops, i), kv, i, start) for i in range(c.layers)]

    def keep_context(self, ops: Ops[T], context: list[Context[T]], start: T) -> None:
        """Writes the context rows and drafts nothing, so that drafting can resume at any later step."""
        for i, rows in enumerate(context):
            ops.keep_context(self._attention(ops, i), rows, start)

    def draft(
        self,
        ops: Ops[T],
        context: list[Context[T]],
        start: T,
        committed: T,
        bonus: T,
        block_offsets: T,
    ) -> T:
        """Drafts the tokens after the bonus token: [B, Bd - 1].

        Of the context rows, the first committed [B] become permanent, at start [B]. The block's own rows follow them
        at once and are scratch: the next call writes the true context rows over them.
        """
        c = self.config
        rows = self._draft_rows(ops, context, start, committed, bonus, block_offsets)
        if c.selector is None:
            return self._target_ids(ops, ops.argmax(self._logits(ops, rows)))
        _, normed = ops.norm(PREFIX + "norm", rows, c.norm_eps)
        logits = ops.linear(self._head, normed)
        return choose(ops, PREFIX, c.selector, normed, logits, bonus, lambda ids: self._target_ids(ops, ids))

    def draft_with_chances(
        self, ops: Ops[T], context: list[Context[T]], start: T, committed: T, bonus: T, block_offsets: T
    ) -> tuple[T, T]:
        """Drafts as `draft` does without a selector, and tells each draft's log-probability: FP32 [B, Bd - 1]."""
        rows = self._draft_rows(ops, context, start, committed, bonus, block_offsets)
        ids, log_probs = ops.likeliest(self._logits(ops, rows))
        return self._target_ids(ops, ids), log_probs

    def draft_divided(
        self, ops: Ops[T], context: list[Context[T]], start: T, next_start: T, verdict: Acceptance[T], rows: int
    ) -> tuple[T, T]:
        """Drafts blocks of different lengths, `rows` rows together, without a selector.

        Returns each row's likeliest token and its log-probability, [1, rows] each (see `Ops.keep_drafts`).
        """
        c = self.config
        ids = ops.divide_blocks(next_start, verdict.bonus, rows, c.mask_token_id)
        x = Residual(embedded(ops, ids, c))
        for i, layer_context in enumerate(context):
            ops.keep_context(self._attention(ops, i), layer_context, start)

            def attend(qkv: T, i: int = i) -> T:
                return ops.divided_attention(self._attention(ops, i), qkv)

            x = self._layer(ops, i, x, attend)
        likeliest, log_probs = ops.likeliest(self._logits(ops, Residual(ops.add_pending(x))))
        return self._target_ids(ops, likeliest), log_probs

    def draft_tree(
        self,
        ops: Ops[T],
        context: list[Context[T]],
        start: T,
        committed: T,
        bonus: T,
        block_offsets: T,
        tree: DraftTree,
    ) -> tuple[T, T]:
        """Drafts a tree, as `draft` does a chain: tokens and parents of its rows (see `Ops.grow_tree`)."""
        rows = self._draft_rows(ops, context, start, committed, bonus, block_offsets)
        log_probs, ids = ops.top_ids(self._logits(ops, rows), RANKS)
        return ops.grow_tree(tree, bonus, log_probs, self._target_ids(ops, ids))

    def _target_ids(self, ops: Ops[T], ids: T) -> T:
        return ids if self.config.draft_vocab_size is None else ops.lookup(DRAFT_TO_TARGET, ids)

    @property
    def _head(self) -> str:
        return "lm_head" if self.config.draft_vocab_size is None else PREFIX + "lm_head"

    def _logits(self, ops: Ops[T], rows: Residual[T]) -> T:
        """Computes the logits of the block's drafts, of the drafter's vocabulary: [B, Bd - 1, V/tp]."""
        return ops.norm_linear(PREFIX + "norm", self._head, rows, self.config.norm_eps)[1]

    def _draft_rows(
        self, ops: Ops[T], context: list[Context[T]], start: T, committed: T, bonus: T, block_offsets: T
    ) -> Residual[T]:
        """Computes the block's rows that draft, after the last layer: [B, Bd - 1, H]."""
        c = self.config
        rows = ops.drop_last_row(block_offsets) if c.from_anchor else block_offsets
        if c.embedding_scale is None:
            x = Residual(ops.block_embedding("model.embed_tokens", bonus, rows, c.mask_token_id))
        else:  # the target's embedding, and so its scale
            x = Residual(embedded(ops, ops.masked_block(bonus, rows, c.mask_token_id), c))
        for i, layer_context in enumerate(context):

            def attend(qkv: T, i: int = i, of_layer: Context[T] = layer_context) -> T:
                return ops.block_attention(self._attention(ops, i), of_layer, qkv, start, committed)

            x = self._layer(ops, i, x, attend)
        hidden = ops.add_pending(x)
        # Row 0 stands at the bonus token, which is known: mostly only the rows after it are drafts.
        return Residual(hidden if c.from_anchor else ops.drop_first_row(hidden))

    def _layer(self, ops: Ops[T], i: int, x: Residual[T], attend: Callable[[T], T]) -> Residual[T]:
        """Computes layer i of the block, whose rows attend so."""
        c = self.config
        prefix = f"{PREFIX}layers.{i}."
        if c.convolution is not None:
            return convolved_layer(ops, prefix, x, c.norm_eps, attend)
        stream, qkv = ops.norm_linear(prefix + "input_layernorm", prefix + "self_attn.qkv_proj", x, c.norm_eps)
        return mlp(ops, prefix, ops.add_product(prefix + "self_attn.o_proj", stream, attend(qkv)), c)

    def _attention(self, ops: Ops[T], i: int) -> AttentionLayer:
        c = self.config
        layer = attention_layer(f"{PREFIX}layers.{i}.", PREFIX + "rope", c, ops.tp, head_norms=True)
        window = c.windows[i] if c.windows else None
        return replace(layer, window=window, causal_block=i in c.causal_layers)


def _whole(source: str, shape: tuple[int, ...]) -> Weight:
    return Weight(PREFIX + source, (Part(source, shape),))
