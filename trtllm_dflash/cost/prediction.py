"""The time of a decoding step, predicted from the bytes and operations that it needs.

    products   memory and arithmetic, each at what was seen of it, joined smoothly: neither hides the other entirely;
               and experts, read once for each tile of rows that chose them, with their arithmetic on top
    attention  the caches' rows, and the states of gated delta nets, after the products
    layers     what a layer costs beside its bytes: waits from kernel to kernel, and each row's norms and activations
    sums       of the ranks, two a layer

The constants were fitted to captured steps at batch 1, 8 and 32, plain and drafted, of dense models and of mixtures on
an H200 and an H100, all at once and so that the largest error is the least: `RECORDS` in tests/test_plan.py lists them.
They say what steps take, not what each kernel would alone. Later, with the others held, gated delta nets of several
rows were fitted to steps by today's kernels, and rounded rows to steps of drafters in FP8. Those of sums were fitted to
sums alone (tensor-parallel-h200.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Literal

from trtllm_dflash.cost.floor import PartWork, StepCount, Work, experts_touched, floor_seconds, is_expert
from trtllm_dflash.cost.gpus import GPUS, PublishedGPU, Rates
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import (
    ALL_REDUCE_BYTES,
    ALL_REDUCE_RANKS,
    HALVES,
    OLDEST_GPU,
    SKINNY_ROWS,
    WIDE_ROWS,
    fits_single_rows,
    takes_tiles,
)
from trtllm_dflash.models import target_weights
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.weights import WeightPrecision, units_per_rank
from trtllm_dflash.step import Drafting

#: Of a predicted step against a measured one, at most; tests/test_plan.py compares them. Of dense models and of
#: mixtures of experts, on an H200 and on an H100; with caches in FP8; and of one dense model, plain and drafted, on an
#: H200 that is faster than the others, by up to 6%.
ERROR_BOUND, MIXTURE_ERROR_BOUND = 0.05, 0.06
FP8_CACHE_ERROR_BOUND = FASTEST_GPU_ERROR_BOUND = 0.08

_STREAM = 1.018  # of a copy's rate, that weights are read at: a copy writes as much as it reads
_JOIN = 2.68  # the exponent that joins memory's and arithmetic's time: their maximum were infinity, their sum 1
# Seconds a layer: of few rows, whose products norm them and call for weights early; and of more.
_LAYER_OF_FEW, _LAYER = 15.6e-6, 26.1e-6
_ROW = 82e-9  # seconds a layer for each row, of 4,096 numbers, divided by the ranks
_ROW_SIZE = 4096

_CONTEXT = 10.9e-6  # seconds of what the drafter keeps of tokens where it does not draft
_SHARED = 1.2e-6  # seconds a layer more of mixtures with an expert that all rows go through
# Likewise less of few rows, whose experts the blocks that multiply choose, but by sigmoids. They do of up to 16 rows
# where those are computed as few: experts in tiles, mostly, and they are fitted better without it above 8.
_CHOOSING, _CHOOSING_ROWS = 2.05e-6, 8
# Likewise less of a row that is alone, of experts in tiles: both products stand side by side, and the second adds up.
_ALONE, _TILED = 4.7e-6, ("mxfp4", "nvfp4")
# Likewise less of one row a slot, which is appended and attends in one launch, beside a product's.
_SINGLE_ROWS, _HOPPER_PROCESSORS = 1.2e-6, 132
_FP8_CACHES = 13e-6  # likewise of attention over FP8 caches
_NORMED = 23.5e-6  # likewise where what attention and the feed-forward give is normed before it is added
# Seconds of a product in FP8 more where rows are rounded before: by cuBLAS, and by our kernel, which a Hopper GPU has
# for up to so many of them. With a scale a row: what scales a block take is in what layers of such experts do.
_ROUNDED, _ROUNDED_BY_OURS = 12e-6, 2.5e-6

# Gated delta nets: seconds of one, and the share of the copy rate that states are read and written at; of one row a
# slot, mostly read alone, and of more, which first absorb those of the step before. The latter's share is that of nets
# alone, from one slot to 32 (benchmarks/results/README.md).
_NET, _NET_OF_MANY = 1.62e-6, 16.8e-6
_STATES, _STATES_OF_MANY = 1.34, 0.75

# Of a slot's rows, the exponent of how many choose experts as if each did so by itself: the rows of one text are alike.
_APART = 0.959
# Of any weight's rate, what experts in 16 bits are read at; and the rows of a tile, for each of which an expert is read
# once: on Hopper, and elsewhere.
_EXPERTS_STREAM, _MANY_ROWS, _FEW_ROWS = 0.966, 64, 16
_DECODED_JOIN = 1.83  # the exponent that joins the times of reading and decoding
# Of the copy rate, that experts in NVFP4 are read and decoded at: layers alone were timed (experts-tiles-h200.json).
_NVFP4_SHARE = 0.8


@dataclass(frozen=True)
class _Experts:
    """Costs of our kernels for experts of one format, beside reading them."""

    latency: float  # of theirs and the router's in a layer, beside any layer's
    arithmetic: float  # of the time of a large product, added to that of reading
    decoded: float | None = None  # bytes a second that an H200 decodes; others in proportion to operations in FP32


_EXPERTS_IN_FP8 = _Experts(15.8e-6, 0.166, 7.43e12)
#: By the name of `stored_experts`.
_EXPERTS = {
    None: _Experts(4.2e-6, 1.5),
    "mxfp4": _Experts(11.6e-6, 0.85, 10.2e12),
    "int4": _Experts(13.2e-6, 0.744),
    "fp8": _EXPERTS_IN_FP8,
    "fp8-blocks": _EXPERTS_IN_FP8,
}

# Sums: latency, and the share of the link's rate one way. In our kernel every rank reads all others' rows; in NCCL's
# ring each sends its rows nearly twice.
_SMALL_LATENCY, _SMALL_LATENCY_PER_RANK, _SMALL_SHARE = 5.2e-6, 0.45e-6, 0.48
_RING_LATENCY, _RING_LATENCY_PER_DOUBLING, _RING_SHARE = 7.0e-6, 2.9e-6, 0.4


Limit = Literal["memory", "arithmetic", "latency", "sums"]


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step in seconds, by its parts."""

    products: float
    attention: float
    layers: float
    sums: float
    floor: float  # the least: see `cost.floor`
    limit: Limit  # what takes the most

    @property
    def seconds(self) -> float:
        """The whole step: the sum, since nothing overlaps, and the floor at least."""
        return max(self.floor, self.products + self.attention + self.layers + self.sums)


def predict_step(
    count: StepCount, gpu: PublishedGPU, drafting: Drafting, batch: int, rows: int, length: int
) -> StepTime:
    """Predicts the time of a step of the engine that `count` counts; other arguments as `cost.floor.step_work`'s."""
    return predict_parts(count.config, gpu, count.parts(drafting, batch, rows, length))


def predict_parts(config: EngineConfig, gpu: PublishedGPU, parts: Sequence[PartWork]) -> StepTime:
    """Predicts the time of a step of these parts, one after the other."""
    rates = gpu.achieved(config.precision)
    stream = Rates(rates.copy * _STREAM, rates.gemm)
    read = [_experts_read(config, gpu, part) / rates.copy for part in parts]
    multiplied = sum(part.experts.flops for part in parts) / rates.gemm * _experts(config).arithmetic
    products = sum(_joined(part.products, stream) for part in parts) + sum(read) + multiplied
    attention = sum(part.attention.seconds(stream) + _states_read(part) / rates.copy for part in parts)
    latency = sum(part.layers * _layer_latency(config, gpu, part) + _nets_latency(part) for part in parts)
    latency += sum(_CONTEXT for part in parts if part.layers == 0)
    latency += sum(_NORMED * part.normed + _rounding(config, gpu, part) for part in parts)
    by_rows = sum(part.layers * part.rows * part.hidden_size / _ROW_SIZE * _ROW for part in parts) / config.tp
    sums = sum(part.sums * sum_seconds(sum_bytes(config, part), config.tp, gpu) for part in parts)
    shares: dict[Limit, float] = {
        "memory": sum((part.total.bytes - part.experts.bytes) / stream.copy for part in parts) + sum(read),
        "arithmetic": sum(part.total.flops for part in parts) / stream.gemm,
        "latency": latency,
        "sums": sums,
    }
    return StepTime(
        products=products,
        attention=attention,
        layers=latency + by_rows,
        sums=sums,
        floor=floor_seconds([part.total for part in parts], rates),
        limit=max(shares, key=lambda name: shares[name]),
    )


def sum_bytes(config: EngineConfig, part: PartWork) -> int:
    """Bytes that each rank contributes to one all-reduce."""
    return part.rows * part.hidden_size * config.dtype.itemsize


def sum_seconds(count: int, tp: int, gpu: PublishedGPU) -> float:
    """Predicts the time of one all-reduce of `count` bytes over the ranks."""
    if tp == 1 or count == 0:
        return 0.0
    if gpu.nvlink and tp in ALL_REDUCE_RANKS and count <= ALL_REDUCE_BYTES:
        return _SMALL_LATENCY + _SMALL_LATENCY_PER_RANK * tp + (tp - 1) * count / (_SMALL_SHARE * gpu.link)
    latency = _RING_LATENCY + _RING_LATENCY_PER_DOUBLING * log2(tp)
    return latency + 2 * (tp - 1) / tp * count / (_RING_SHARE * gpu.link)


def _joined(work: Work, rates: Rates) -> float:
    memory, arithmetic = work.bytes / rates.copy, work.flops / rates.gemm
    return float((memory**_JOIN + arithmetic**_JOIN) ** (1 / _JOIN))


def _rounding(config: EngineConfig, gpu: PublishedGPU, part: PartWork) -> float:
    """Predicts what products behind rows rounded to FP8 take more."""
    is_ours = _runs_kernels(config) and gpu.hopper and config.precision == "bf16" and part.rows <= WIDE_ROWS
    return part.rounded * (_ROUNDED_BY_OURS if is_ours else _ROUNDED)


def _layer_latency(config: EngineConfig, gpu: PublishedGPU, part: PartWork) -> float:
    latency = _LAYER_OF_FEW if part.rows <= SKINNY_ROWS else _LAYER
    latency += _FP8_CACHES if config.cache_dtype.itemsize < config.dtype.itemsize else 0.0
    latency -= _SINGLE_ROWS if _has_single_rows(config, gpu, part) else 0.0
    moe = config.target.moe
    if moe is None or not part.experts.bytes:
        return latency
    latency += _experts(config).latency + (_SHARED if moe.shared_size else 0.0)
    is_alone = part.rows == 1 and gpu.hopper and _runs_kernels(config) and stored_experts(config.target) in _TILED
    latency -= _ALONE if is_alone else 0.0
    return latency - (_CHOOSING if part.rows <= _CHOOSING_ROWS and moe.scores == "softmax" else 0.0)


def _runs_kernels(config: EngineConfig) -> bool:
    """Whether an engine's steps are computed by our kernels, on a GPU that has them."""
    return config.backend == "torch" and config.dtype in HALVES


def _has_single_rows(config: EngineConfig, gpu: PublishedGPU, part: PartWork) -> bool:
    """Whether our kernel appends a slot's only row and attends in one launch."""
    target, is_plain = config.target, part.rows_of_slot == 1 and not part.nets
    is_known = _runs_kernels(config) and gpu.hopper and config.cache_dtype == config.dtype
    heads, kv_heads = (units_per_rank(count, config.tp) for count in (target.heads, target.kv_heads))
    fits = fits_single_rows(heads, kv_heads, target.head_size, part.rows, _HOPPER_PROCESSORS)
    return is_plain and is_known and fits and target.latent_attention is None


def _nets_latency(part: PartWork) -> float:
    return part.nets * (_NET if part.rows_of_slot == 1 else _NET_OF_MANY)


def _states_read(part: PartWork) -> float:
    """Bytes that a large copy would move while states are read and written."""
    return part.states.bytes / (_STATES if part.rows_of_slot == 1 else _STATES_OF_MANY)


def _experts_read(config: EngineConfig, gpu: PublishedGPU, part: PartWork) -> float:
    """Bytes that a large copy would move in the time that reading the chosen experts takes."""
    moe = config.target.moe
    if moe is None or not part.experts.bytes:
        return 0.0
    touched = experts_touched(moe, part.rows / part.rows_of_slot ** (1 - _APART))
    tile = rows_at_once(config, gpu)
    # The last tile is on average half empty, and there is one at least.
    tiles = max(1.0, part.rows * moe.top_k / touched / tile + (tile - 1) / (2 * tile))
    bytes_ = part.experts.bytes * touched / experts_touched(moe, part.rows)
    return bytes_ * tiles / (decoded_share(config, gpu) or _STREAM * _EXPERTS_STREAM)


def rows_at_once(config: EngineConfig, gpu: PublishedGPU) -> int:
    """Rows for which an expert that they chose is read once."""
    is_many = gpu.hopper and config.dtype in HALVES and config.target.linear_precision is not WeightPrecision.INT4
    return _MANY_ROWS if is_many else _FEW_ROWS


def decoded_share(config: EngineConfig, gpu: PublishedGPU) -> float | None:
    """The share of the copy rate at which our kernels read and decode experts in four or eight bits on a GPU.

    None: they are others, or our kernels do not compute them.
    """
    moe, capability = config.target.moe, divmod(gpu.capability, 10)
    if moe is None or not _runs_kernels(config) or capability < OLDEST_GPU:
        return None
    stored = stored_experts(config.target)
    if stored == "nvfp4":
        columns = moe.intermediate_size // (1 if moe.expert_parallel else config.tp)
        is_taken = takes_tiles(config.target.hidden_size, columns, capability, is_nvfp4=True)
        return _NVFP4_SHARE if is_taken else None
    most = _experts(config).decoded if stored in _EXPERTS else None
    if most is None:
        return None
    decoded = most * gpu.fp32 / GPUS["h200"].fp32 / gpu.achieved(config.precision).copy
    both = (_STREAM * _EXPERTS_STREAM) ** -_DECODED_JOIN + decoded**-_DECODED_JOIN
    return float(both ** (-1 / _DECODED_JOIN))


def _experts(config: EngineConfig) -> _Experts:
    return _EXPERTS.get(stored_experts(config.target), _EXPERTS["mxfp4"])  # likewise of other formats in four bits


@lru_cache  # a plan asks for the same again and again
def stored_experts(target: DecoderConfig) -> str | None:
    """Names the format that a target's experts are stored in; None: the engine's own type, or there are none."""
    if target.moe is not None and target.moe.mxfp4:
        return "mxfp4"
    for weight in target_weights(target):
        if is_expert(weight) and weight.precision is not WeightPrecision.ENGINE:
            return str(weight.precision.value)
    return None
