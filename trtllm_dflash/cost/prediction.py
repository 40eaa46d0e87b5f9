"""The time of a decoding step, predicted from the bytes and operations that it needs.

    products   memory and arithmetic, each at what was seen of it, joined smoothly: neither hides the other entirely;
               and experts, read once for each tile of rows that chose them, with their arithmetic on top
    attention  the caches' rows, after the products
    layers     what a layer costs beside its bytes: waits from kernel to kernel, and each row's norms and activations
    sums       of the ranks, two a layer

The constants were fitted to captured steps at batch 1, 8 and 32, plain and drafted, which are in benchmarks/results: of
Qwen3-8B's shape on one H200 (step-qwen3-8b-*-h200.json) and, more than 16 rows, on two and four
(tensor-parallel-h200.md); those of experts to gpt-oss-20b's on an H200 and an H100, and to Qwen3-Coder-30B-A3B's,
Qwen3.5-35B-A3B's, Qwen3-Coder-Next's and MiniMax-M2.5's (step-gpt-oss-20b-interleaved-h200.json,
step-qwen3-coder-30b-a3b-h200.json, router-h100, steps-h100, step-minimax-m2.5-fp8-h100.json). Those of sums were fitted
to sums alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Literal

from trtllm_dflash.cost.floor import PartWork, StepCount, Work, experts_touched, floor_seconds, is_expert
from trtllm_dflash.cost.gpus import GPUS, PublishedGPU, Rates
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import ALL_REDUCE_BYTES, ALL_REDUCE_RANKS, HALVES, OLDEST_GPU, SKINNY_ROWS, takes_nvfp4
from trtllm_dflash.models import target_weights
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.step import Drafting

#: Of a predicted step against a measured one, at most; tests/test_plan.py compares them. Of dense models on H200s and
#: on an H100, of mixtures of experts (gpt-oss on both, Qwen3-Coder on an H200), and with the drafter in FP8.
ERROR_BOUND, H100_ERROR_BOUND = 0.05, 0.07
MIXTURE_ERROR_BOUND = 0.06
FP8_DRAFTER_ERROR_BOUND = 0.08
#: Of mixtures of more experts on an H100: rows of random weights choose fewer than evenly, few rows by the most.
MANY_EXPERTS_ERROR_BOUND = 0.16
#: Likewise of steps over FP8 caches, whose attention is taken to last as long as over 16-bit ones.
FP8_CACHE_ERROR_BOUND = 0.13

_JOIN = 1.8  # the exponent that joins memory's and arithmetic's time: their maximum were infinity, their sum 1
# Seconds a layer: of few rows, whose products norm them and call for weights early; of more; and of more over ranks.
_LAYER_OF_FEW, _LAYER, _LAYER_OVER_RANKS = 12.2e-6, 25.6e-6, 36e-6
_ROW = 15.2e-9  # seconds a layer for each row, of 4,096 numbers
_ROW_SIZE = 4096

# Bytes a second of experts in MXFP4 that an H200's and an H100's multiprocessors decode; others' in proportion to their
# operations in FP32. Joined with memory's time by an exponent.
_MXFP4_DECODED, _DECODED_JOIN = 3.2e12, 6
# Of the copy rate, that experts in NVFP4 are read and decoded at: layers alone were timed (experts-nvfp4-h200.json).
_NVFP4_SHARE = 0.75
# Experts: their kernels' and the router's latency in a layer; the share of a large product's rate; what they are read
# at, of any weight's rate; and the rows of a tile, for each of which an expert is read once: on Hopper, and elsewhere.
_EXPERTS, _EXPERTS_GEMM, _EXPERTS_STREAM, _MANY_ROWS, _FEW_ROWS = 18e-6, 0.72, 0.965, 64, 16

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
        """The whole step: the sum, since nothing overlaps."""
        return self.products + self.attention + self.layers + self.sums


def predict_step(
    count: StepCount, gpu: PublishedGPU, drafting: Drafting, batch: int, rows: int, length: int
) -> StepTime:
    """Predicts the time of a step of the engine that `count` counts; other arguments as `cost.floor.step_work`'s."""
    return predict_parts(count.config, gpu, count.parts(drafting, batch, rows, length))


def predict_parts(config: EngineConfig, gpu: PublishedGPU, parts: Sequence[PartWork]) -> StepTime:
    """Predicts the time of a step of these parts, one after the other."""
    rates = gpu.achieved(config.precision)
    stream = Rates(rates.copy * gpu.stream_share, rates.gemm)
    read = [_experts_read(config, gpu, part) / rates.copy for part in parts]
    multiplied = sum(part.experts.flops for part in parts) / (rates.gemm * _EXPERTS_GEMM)
    products = sum(_joined(part.products, stream) for part in parts) + sum(read) + multiplied
    widening = config.dtype.itemsize // config.cache_dtype.itemsize  # FP8 caches save memory; time, only here and there
    attention = sum(Work(part.attention.bytes * widening, part.attention.flops).seconds(stream) for part in parts)
    latency = sum(part.layers * _layer_latency(part, config.tp) for part in parts)
    by_rows = sum(part.layers * part.rows * part.hidden_size / _ROW_SIZE * _ROW for part in parts)
    sums = sum(part.sums * sum_seconds(sum_bytes(config, part), config.tp, gpu) for part in parts)
    shares: dict[Limit, float] = {
        "memory": sum(part.products.bytes + part.attention.bytes for part in parts) / stream.copy + sum(read),
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


def _layer_latency(part: PartWork, tp: int) -> float:
    of_many = _LAYER if tp == 1 else _LAYER_OVER_RANKS
    return (_LAYER_OF_FEW if part.rows <= SKINNY_ROWS else of_many) + (_EXPERTS if part.experts.bytes else 0.0)


def _experts_read(config: EngineConfig, gpu: PublishedGPU, part: PartWork) -> float:
    """Bytes that a large copy would move in the time that reading the chosen experts takes."""
    moe = config.target.moe
    if moe is None or not part.experts.bytes:
        return 0.0
    tile = rows_at_once(config, gpu)
    rows_of_each = part.rows * moe.top_k / experts_touched(moe, part.rows)
    # The last tile is on average half empty, and there is one at least.
    tiles = max(1.0, rows_of_each / tile + (tile - 1) / (2 * tile))
    return part.experts.bytes * tiles / (decoded_share(config, gpu) or gpu.stream_share * _EXPERTS_STREAM)


def rows_at_once(config: EngineConfig, gpu: PublishedGPU) -> int:
    """Rows for which an expert that they chose is read once."""
    is_many = gpu.hopper and config.dtype in HALVES and config.target.linear_precision is not WeightPrecision.INT4
    return _MANY_ROWS if is_many else _FEW_ROWS


def decoded_share(config: EngineConfig, gpu: PublishedGPU) -> float | None:
    """The share of the copy rate at which our kernels read and decode experts in four bits on a GPU.

    None: they are others, or our kernels do not compute them.
    """
    moe, capability = config.target.moe, divmod(gpu.capability, 10)
    if config.backend != "torch" or moe is None or config.dtype not in HALVES or capability < OLDEST_GPU:
        return None
    if moe.mxfp4:
        decoded = _MXFP4_DECODED * gpu.fp32 / GPUS["h200"].fp32 / gpu.achieved(config.precision).copy
        both = (gpu.stream_share * _EXPERTS_STREAM) ** -_DECODED_JOIN + decoded**-_DECODED_JOIN
        return float(both ** (-1 / _DECODED_JOIN))
    columns = moe.intermediate_size // (1 if moe.expert_parallel else config.tp)
    is_taken = takes_nvfp4(config.target.hidden_size, columns, capability)
    return _NVFP4_SHARE if is_taken and _are_nvfp4(config.target) else None


@lru_cache  # a plan asks for the same again and again
def _are_nvfp4(target: DecoderConfig) -> bool:
    return any(is_expert(w) and w.precision is WeightPrecision.NVFP4 for w in target_weights(target))
