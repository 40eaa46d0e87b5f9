"""The floor of a decoding step: the bytes that it must move and the operations that it must do, counted.

Counted are weights, embedding rows, and K/V rows read and written. Not counted is what can stay on the chip:
activations, logits, the few integers; nor norms, RoPE and softmax among the operations, nor what ranks send each other.
"""

from dataclasses import dataclass
from math import prod

from trtllm_dflash.bench.machine import Rates
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.memory import multiplied_precision
from trtllm_dflash.models import build_target
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import HEAD, PREFIX, Drafter, DrafterConfig
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision, units_per_rank
from trtllm_dflash.step import Drafting

#: What the drafter reads for its context rows; of each layer's tensors, only the norm of its keys.
_CONTEXT = (PREFIX + "fc.", PREFIX + "hidden_norm.", PREFIX + "context_kv_proj.")
_KEY_NORM = ".k_norm.weight"


@dataclass(frozen=True)
class Work:
    """What a part of a step must do on one rank."""

    bytes: int
    flops: int  # in the engine's type; one with an FP8 matrix is half of one, as the hardware does twice as many

    def seconds(self, rates: Rates) -> float:
        """At least this long: memory and arithmetic at their measured best, at the same time."""
        return max(self.bytes / rates.copy, self.flops / rates.gemm)


def step_work(config: EngineConfig, drafting: Drafting, batch: int, rows: int, length: int) -> list[Work]:
    """The target's work in a decoding step and, where there is any, the drafter's; on the first rank.

    Args:
        batch: slots that take part.
        rows: rows a slot that are verified, and of the block that is drafted.
        length: committed tokens of each slot: cache rows that a row reads besides this step's own.
    """
    parts = [_target_work(config, batch, rows, length)]
    if config.drafter is not None and drafting is Drafting.CONTEXT:
        parts.append(_context_work(config, config.drafter, batch, rows))
    if config.drafter is not None and drafting is Drafting.BLOCK:
        parts.append(_draft_work(config, config.drafter, batch, rows, length))
    return parts


def floor_seconds(work: list[Work], rates: Rates) -> float:
    """The parts come one after the other."""
    return sum(part.seconds(rates) for part in work)


def _target_work(config: EngineConfig, batch: int, rows: int, length: int) -> Work:
    target, tokens = config.target, batch * rows
    weights = [
        w for w in build_target(target).weights() if w.name not in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    weights.append(_head(target))
    # Row i of a slot sees the committed rows, those before it in this step, and itself.
    pairs = batch * (rows * length + rows * (rows + 1) // 2)
    numbers = tokens * target.hidden_size + _cache_numbers(target, config.tp, batch * (length + rows))
    return Work(
        _bytes(weights, config) + numbers * config.dtype.itemsize,
        tokens * _flops(weights, config.tp) + _attention_flops(target, config.tp, pairs),
    )


def _context_work(config: EngineConfig, drafter: DrafterConfig, batch: int, rows: int) -> Work:
    """One row a slot is committed, the least, and written."""
    weights = [weight for weight in Drafter(drafter).weights() if _for_context(weight)]
    numbers = _cache_numbers(drafter, config.tp, batch)
    return Work(
        _bytes(weights, config) + numbers * config.dtype.itemsize,
        batch * rows * _flops(weights, config.tp),
    )


def _draft_work(config: EngineConfig, drafter: DrafterConfig, batch: int, rows: int, length: int) -> Work:
    """One row a slot is committed, the least: it and the block are written."""
    weights, tokens = Drafter(drafter).weights(), batch * rows
    heads = [weight for weight in weights if weight.name == HEAD] or [_head(drafter)]  # the target's, read once more
    rest = [weight for weight in weights if weight.name != HEAD]
    numbers = tokens * drafter.hidden_size + _cache_numbers(drafter, config.tp, batch * (length + 1 + rows))
    pairs = tokens * (length + 1 + rows)
    return Work(
        _bytes([*rest, *heads], config) + numbers * config.dtype.itemsize,
        tokens * _flops(rest, config.tp)  # context and block have as many rows
        + batch * (rows - 1) * _flops(heads, config.tp)  # the bonus token is known
        + _attention_flops(drafter, config.tp, pairs),
    )


def _for_context(weight: Weight) -> bool:
    return weight.name.startswith(_CONTEXT) or weight.name.endswith(_KEY_NORM)


def _head(model: DecoderConfig) -> Weight:
    """The target's LM head, or its embedding read as one."""
    part = Part("lm_head.weight", (model.vocab_size, model.hidden_size), Split.ROWS, model.vocab_size)
    return Weight("lm_head.weight", (part,))


def _bytes(weights: list[Weight], config: EngineConfig) -> int:
    stored = [(multiplied_precision(config, weight), weight.shape(config.tp, 0)) for weight in weights]
    return sum(precision.stored_bytes(shape, config.dtype.itemsize) for precision, shape in stored)


def _flops(weights: list[Weight], tp: int) -> int:
    """Of one row through all of their matrices."""
    shapes = [(weight.shape(tp, 0), weight.precision) for weight in weights]
    return sum(prod(shape) * (1 if kind is WeightPrecision.FP8 else 2) for shape, kind in shapes if len(shape) == 2)


def _cache_numbers(model: DecoderConfig, tp: int, rows: int) -> int:
    """K and V of cache rows, in all layers."""
    return 2 * rows * model.layers * units_per_rank(model.kv_heads, tp) * model.head_size


def _attention_flops(model: DecoderConfig, tp: int, pairs: int) -> int:
    """Scores and weighted values of so many pairs of a row and a cache row, in all layers."""
    return 4 * pairs * model.layers * units_per_rank(model.heads, tp) * model.head_size
