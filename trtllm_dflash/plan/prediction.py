"""How long a decoding step will take, from what it must move and compute.

    products   memory and arithmetic, each at what was seen of it, joined smoothly: neither hides the other entirely
    attention  the caches' rows, after the products
    layers     what a layer costs beside its bytes: waits from kernel to kernel, and each row's norms and activations
    sums       of the ranks, two a layer

The constants of sums were fitted to sums alone (benchmarks/results/tensor-parallel-h200.md). The others were fitted to
captured steps of Qwen3-8B's shape on H200s, plain and drafted, at batch 1, 8 and 32, on one GPU
(step-qwen3-8b-h200.json) and on two and four: a layer's cost and its bytes' can be told apart only where ranks divide
the bytes and not the layers.
"""

from dataclasses import dataclass
from math import log2
from typing import Literal

from trtllm_dflash.bench.floor import PartWork, StepCount, Work, floor_seconds
from trtllm_dflash.bench.machine import Rates
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.ops.cuda_kernels import ALL_REDUCE_BYTES, ALL_REDUCE_RANKS
from trtllm_dflash.plan.gpus import Published
from trtllm_dflash.step import Drafting

#: Of a predicted step against a measured one, at most; tests/test_plan.py compares them.
ERROR_BOUND = 0.07

_STREAM = 0.95  # of the copy rate, that weights and caches are read at
_JOIN = 2.5  # the exponent that joins memory's and arithmetic's time: their maximum were infinity, their sum 1
_LAYER = 36e-6  # seconds a layer
_ROW = 22e-9  # seconds a layer for each row, of 4,096 numbers
_ROW_SIZE = 4096

# Sums: latency, and the share of the link's rate one way. In our kernel every rank reads all others' rows; in NCCL's
# ring each sends its rows nearly twice.
_SMALL_LATENCY, _SMALL_LATENCY_PER_RANK, _SMALL_SHARE = 5.2e-6, 0.45e-6, 0.48
_RING_LATENCY, _RING_LATENCY_PER_DOUBLING, _RING_SHARE = 7.0e-6, 2.9e-6, 0.4


Limit = Literal["memory", "arithmetic", "latency", "sums"]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to."""

    products: float
    attention: float
    layers: float
    sums: float
    floor: float  # the least: see `bench.floor`
    limit: Limit  # what takes the most

    @property
    def seconds(self) -> float:
        """All of them: nothing overlaps."""
        return self.products + self.attention + self.layers + self.sums


def predict_step(count: StepCount, gpu: Published, drafting: Drafting, batch: int, rows: int, length: int) -> StepTime:
    """The time of a step of the engine that is counted; the other arguments as `bench.floor.step_work`'s."""
    config = count.config
    rates = gpu.achieved(config.precision)
    parts = count.parts(drafting, batch, rows, length)
    stream = Rates(rates.copy * _STREAM, rates.gemm)
    products = sum(_joined(part.products, stream) for part in parts)
    attention = sum(part.attention.seconds(stream) for part in parts)
    latency = sum(part.layers * _LAYER for part in parts)
    by_rows = sum(part.layers * part.rows * part.hidden_size / _ROW_SIZE * _ROW for part in parts)
    sums = sum(part.sums * sum_seconds(sum_bytes(config, part), config.tp, gpu) for part in parts)
    work = [part.total for part in parts]
    shares: dict[Limit, float] = {
        "memory": sum(part.bytes for part in work) / stream.copy,
        "arithmetic": sum(part.flops for part in work) / stream.gemm,
        "latency": latency,
        "sums": sums,
    }
    return StepTime(
        products=products,
        attention=attention,
        layers=latency + by_rows,
        sums=sums,
        floor=floor_seconds(work, rates),
        limit=max(shares, key=lambda name: shares[name]),
    )


def sum_bytes(config: EngineConfig, part: PartWork) -> int:
    """What each rank brings to one sum."""
    return part.rows * part.hidden_size * config.dtype.itemsize


def sum_seconds(count: int, tp: int, gpu: Published) -> float:
    """Of one sum of `count` bytes over the ranks."""
    if tp == 1 or count == 0:
        return 0.0
    if gpu.nvlink and tp in ALL_REDUCE_RANKS and count <= ALL_REDUCE_BYTES:
        return _SMALL_LATENCY + _SMALL_LATENCY_PER_RANK * tp + (tp - 1) * count / (_SMALL_SHARE * gpu.link)
    latency = _RING_LATENCY + _RING_LATENCY_PER_DOUBLING * log2(tp)
    return latency + 2 * (tp - 1) / tp * count / (_RING_SHARE * gpu.link)


def _joined(work: Work, rates: Rates) -> float:
    memory, arithmetic = work.bytes / rates.copy, work.flops / rates.gemm
    return float((memory**_JOIN + arithmetic**_JOIN) ** (1 / _JOIN))
