"""The floor of a decoding step: the bytes that it must move and the operations that it must do, counted.

Counted are weights, embedding rows, K/V rows and states read and written; of experts those that the rows are expected
to choose, of layers with a window the rows that it shows. Not counted is what can stay on the chip: activations,
logits, the few integers; nor norms, RoPE and softmax among the operations, nor what ranks send each other.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from trtllm_dflash.cost.gpus import GPU, Rates
from trtllm_dflash.cost.memory import computes_all_experts, is_multiplied_in_fp8, plan_adds, stored_bytes
from trtllm_dflash.cost.states import net_state_bytes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels.delta_net import DELTA_SIZES, MOST_KEPT
from trtllm_dflash.kernels.products import fits_skinny
from trtllm_dflash.models import target_weights
from trtllm_dflash.models.decoder import DecoderConfig, MoEConfig
from trtllm_dflash.models.dflash2 import is_table
from trtllm_dflash.models.drafter import HEAD, PREFIX, Drafter, DrafterConfig
from trtllm_dflash.models.mixers import Attends, DeltaNet, mixers_of
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision, units_per_rank
from trtllm_dflash.step import Drafting

#: What the drafter reads for its context rows; of each layer's tensors, only the norm of its keys.
_CONTEXT = (PREFIX + "fc.", PREFIX + "hidden_norm.", PREFIX + "context_kv_proj.")
_KEY_NORM = ".k_norm.weight"
_OUTPUT_NORM = ".post_feedforward_layernorm.weight"


@dataclass(frozen=True)
class Work:
    """The bytes and operations of one part of a step on one rank."""

    bytes: int
    flops: int  # in the engine's type; one with an FP8 matrix is half of one, as the hardware does twice as many

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, rates: Rates) -> float:
        """Computes the least time: memory and arithmetic at their measured best, at the same time."""
        return max(self.bytes / rates.copy, self.flops / rates.gemm)


@dataclass(frozen=True)
class PartWork:
    """The target's or the drafter's work in a step on one rank, by kind."""

    products: Work  # of matrices, with the embedding's rows; without the experts'
    experts: Work  # of a mixture, those that the rows are expected to choose
    attention: Work  # over the caches, with the rows that are written
    layers: int  # that the rows go through, one after another
    rows: int
    hidden_size: int
    states: Work = Work(0, 0)  # of gated delta nets
    nets: int = 0  # of the layers, those that have one
    rows_of_slot: int = 1  # of the rows
    normed: int = 0  # of the layers, those whose parts' outputs are normed before they are added
    rounded: int = 0  # products in FP8 whose rows are rounded before

    @property
    def total(self) -> Work:
        """The sum of all kinds."""
        return self.products + self.experts + self.attention + self.states

    @property
    def sums(self) -> int:
        """Number of all-reduces, each of `rows` rows of `hidden_size`: after attention, and after the feed-forward."""
        return 2 * self.layers


def step_work(
    config: EngineConfig,
    drafting: Drafting,
    batch: int,
    rows: int,
    length: int,
    gpu: GPU | None = None,
    block: int | None = None,
) -> list[Work]:
    """Counts the target's work in a decoding step and, if it drafts, the drafter's; on the first rank.

    Args:
        batch: slots in the step.
        rows: rows a slot that are verified.
        length: committed tokens of each slot: cache rows that a row reads besides this step's own.
        gpu: see `StepCount`.
        block: rows a slot that are drafted; None: as many as are verified.
    """
    return [part.total for part in StepCount(config, gpu).parts(drafting, batch, rows, length, block)]


def floor_seconds(work: list[Work], rates: Rates) -> float:
    """Adds up the least time of a step, whose parts run one after the other."""
    return sum(part.seconds(rates) for part in work)


def experts_touched(moe: MoEConfig, rows: int) -> float:
    """Counts a layer's experts that so many rows are expected to choose, were every choice of `top_k` equally likely.

    E * (1 - (1 - k/E)^rows). Real routing is less even, and touches fewer.
    """
    return float(moe.experts * (1 - (1 - moe.top_k / moe.experts) ** rows))


class StepCount:
    """Counts bytes and operations in the steps of one engine.

    Args:
        gpu: which decides on the types that weights are multiplied in; see `cost.memory.stored_as`.
    """

    def __init__(self, config: EngineConfig, gpu: GPU | None = None) -> None:
        self.config = config
        target = config.target
        elsewhere = ("model.embed_tokens.weight", "lm_head.weight")
        weights = [weight for weight in target_weights(target) if weight.name not in elsewhere]
        self._target = _Matrices.of([*weights, _head(target)], config, gpu)
        self._mixers = Counter(mixers_of(target))
        self._normed = sum(weight.name.endswith(_OUTPUT_NORM) for weight in weights)
        if config.drafter is not None:
            weights = Drafter(config.drafter).weights()
            # Without one of its own the target's head, read once more.
            heads = [weight for weight in weights if weight.name == HEAD] or [_head(config.drafter)]
            self._head = _Matrices.of(heads, config, gpu)
            # Of the selector's tables a step reads a few rows.
            apart = [weight for weight in weights if weight.name != HEAD and not is_table(weight.name)]
            self._drafter = _Matrices.of(apart, config, gpu)
            context = [weight for weight in weights if _for_context(weight)]
            self._context = _Matrices.of(context, config, gpu)

    def parts(self, drafting: Drafting, batch: int, rows: int, length: int, block: int | None = None) -> list[PartWork]:
        """Counts the target's work in a step and, if it drafts, the drafter's; arguments as `step_work`'s."""
        parts = [self._target_work(batch, rows, length)]
        if self.config.drafter is not None and drafting is Drafting.CONTEXT:
            parts.append(self._context_work(self.config.drafter, batch, rows))
        if self.config.drafter is not None and drafting is Drafting.BLOCK:
            parts.append(self._draft_work(self.config.drafter, batch, block or rows, length))
        return parts

    def _target_work(self, batch: int, rows: int, length: int) -> PartWork:
        target, tokens = self.config.target, batch * rows
        attention, states, nets = Work(0, 0), Work(0, 0), 0
        for mixer, layers in self._mixers.items():
            if isinstance(mixer, DeltaNet):
                states += self._states(mixer, layers * batch, rows)
                nets += layers
                continue
            window = mixer.window
            # Row i of a slot sees the committed rows, those before it in this step, and itself; or the last of these.
            seen = [length + i + 1 if window is None else min(window, length + i + 1) for i in range(rows)]
            attention += self._attention(mixer, layers * batch * (seen[0] + rows - 1), layers * batch * sum(seen))
        products = self._target.dense_work(tokens) + self._embedding_rows(tokens)
        experts = self._target.expert_work(tokens)
        sizes = target.layers, tokens, target.hidden_size
        rounded = self._target.rounded(tokens)
        return PartWork(products, experts, attention, *sizes, states, nets, rows, self._normed, rounded)

    def _context_work(self, drafter: DrafterConfig, batch: int, rows: int) -> PartWork:
        """Counts the drafter's K and V of committed tokens, one a slot at least; they skip its other matrices."""
        written = self._attention(_attends(drafter), batch * drafter.layers, 0)
        products, rounded = self._context.dense_work(batch * rows), self._context.rounded(batch * rows)
        return PartWork(products, Work(0, 0), written, 0, batch * rows, drafter.hidden_size, rounded=rounded)

    def _draft_work(self, drafter: DrafterConfig, batch: int, rows: int, length: int) -> PartWork:
        """Counts drafting a block: it and the committed tokens, one a slot at least, are written to the caches.
        Context and block have equally many rows."""
        windows = drafter.windows or (None,) * drafter.layers
        seen = [length + 1 if window is None else min(window, length + 1) for window in windows]
        tokens, cached = batch * rows, sum(seen) + drafter.layers * rows
        known = batch  # bonus tokens, which need no logits
        products = self._drafter.dense_work(tokens) + self._embedding_rows(tokens)
        products += self._head.dense_work(tokens - known)
        attention = self._attention(_attends(drafter), batch * cached, tokens * cached)
        rounded = self._drafter.rounded(tokens) + self._head.rounded(tokens - known)
        return PartWork(products, Work(0, 0), attention, drafter.layers, tokens, drafter.hidden_size, rounded=rounded)

    def _embedding_rows(self, tokens: int) -> Work:
        return Work(tokens * self.config.target.hidden_size * self.config.dtype.itemsize, 0)

    def _attention(self, mixer: Attends, cached: int, pairs: int) -> Work:
        """Counts attention over `cached` K/V rows and `pairs` of a query and a key, of all layers together."""
        tp = self.config.tp
        numbers = cached * units_per_rank(mixer.kv_heads, tp) * mixer.row
        # Scores, and weighted values.
        flops = 2 * pairs * units_per_rank(mixer.heads, tp) * (mixer.key_size + mixer.value_size)
        return Work(numbers * self.config.cache_dtype.itemsize, flops)

    def _states(self, net: DeltaNet, states: int, rows: int) -> Work:
        """Counts so many states of gated delta nets, read once, and each row's three products with one.

        Written once, too; by steps of single rows that our kernels take, in one of so many as rows fit beside a state.
        """
        heads = units_per_rank(net.value_heads, self.config.tp)
        flops = 6 * states * rows * heads * net.key_size * net.value_size
        block, tp = self.config.block_size, self.config.tp
        if rows > 1 or net.key_size != DELTA_SIZES[-1]:
            return Work(2 * states * net_state_bytes(net, block, tp), flops)
        turns = min(MOST_KEPT, block)
        return Work(states * (net_state_bytes(net, turns // 2, tp) + net_state_bytes(net, 0, tp) // turns), flops)


@dataclass(frozen=True)
class _Matrices:
    """Totals of some of a rank's weights: bytes to read them, and operations of one row through all of them."""

    dense: Work
    experts: Work
    moe: MoEConfig | None  # None: each row goes through all that there is
    in_fp8: tuple[tuple[int, ...], ...] = ()  # sizes of those that rows in FP8 are multiplied by, with a scale a row

    @classmethod
    def of(cls, weights: list[Weight], config: EngineConfig, gpu: GPU | None) -> "_Matrices":
        works = {True: Work(0, 0), False: Work(0, 0)}
        for weight in weights:
            works[is_expert(weight)] += Work(stored_bytes(config, weight, gpu), _flops(config, weight, gpu))
        if works[True].bytes:
            works[True] += Work(plan_adds(config), 0)
        by_row = [weight for weight in weights if weight.precision is WeightPrecision.FP8]
        in_fp8 = tuple(weight.shape(config.tp, 0) for weight in by_row if is_multiplied_in_fp8(config, weight, gpu))
        if computes_all_experts(config):
            return cls(works[False] + works[True], Work(0, 0), None, in_fp8)
        return cls(works[False], works[True], config.target.moe, in_fp8)

    def dense_work(self, rows: int) -> Work:
        """Counts so many rows through the matrices that every row is multiplied by."""
        return Work(self.dense.bytes, rows * self.dense.flops)

    def rounded(self, rows: int) -> int:
        """Counts products whose rows are rounded to FP8 before: those that our kernel of few rows does not take."""
        return sum(not fits_skinny(rows, outputs, inputs, item=1) for outputs, inputs in self.in_fp8)

    def expert_work(self, rows: int) -> Work:
        """Counts rows through the experts: each goes through `top_k`, and experts that none chose are not read."""
        if self.moe is None:
            return Work(0, 0)
        touched = experts_touched(self.moe, rows) / self.moe.experts
        return Work(round(touched * self.experts.bytes), rows * self.experts.flops * self.moe.top_k // self.moe.experts)


def _attends(drafter: DrafterConfig) -> Attends:
    """Describes the attention of a drafter's layers, which are all alike."""
    size = drafter.head_size
    return Attends(drafter.heads, drafter.kv_heads, size, size)


def is_expert(weight: Weight) -> bool:
    """Whether a weight holds a layer's experts."""
    return ".experts." in weight.name


def _for_context(weight: Weight) -> bool:
    return weight.name.startswith(_CONTEXT) or weight.name.endswith(_KEY_NORM)


def _head(model: DecoderConfig) -> Weight:
    """The target's LM head, or its embedding read as one."""
    part = Part("lm_head.weight", (model.vocab_size, model.hidden_size), Split.ROWS, model.vocab_size)
    return Weight("lm_head.weight", (part,))


def _flops(config: EngineConfig, weight: Weight, gpu: GPU | None) -> int:
    """Operations of one row through a matrix, or through a whole stack; 0 for a weight that is added or scales."""
    shape = weight.shape(config.tp, 0)
    numbers = prod(shape)
    if weight.name.endswith(".blocks"):
        return 4 * numbers  # two of MXFP4's numbers a byte
    if not weight.name.endswith(".weight") or len(shape) == 1:
        return 0
    return (1 if is_multiplied_in_fp8(config, weight, gpu) else 2) * numbers
