"""Times the CUDA kernels on this machine's GPU, on the shapes of Qwen3-8B in BF16, beside torch's own operations.

Every figure is a CUDA graph of launches. For attention they rotate over buffers that are several times the L2 together:
keys and values come from memory, as in a step. TB/s count them once.
"""

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.fp8 import FP8
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, FFN, VOCABULARY, DRAFTER_LAYERS = 32, 8, 128, 4096, 12288, 151936, 5
LAYER = AttentionLayer("l.", "rope", HEADS, KV_HEADS, HEAD_SIZE, 1e-6)
COLD = 400_000_000  # bytes that a round over all buffers moves at least
LAUNCHES = 24  # in a graph, at least: what its start and its end cost is shared among them


def seconds(calls: list[Callable[[], object]], rounds: int = 5) -> float:
    """Of one call: all of them are captured into one graph, which is replayed; the median."""
    for call in calls[:2]:
        call()
    calls = calls * math.ceil(LAUNCHES / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / len(calls))
    return float(statistics.median(times))


def copy_rate() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(6):  # not in a graph: there it would be another engine's copy
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        rates.append(2 * source.numel() * 4 / (first.elapsed_time(last) / 1e3))
    return float(statistics.median(rates))


def normal(*shape: int) -> Tensor:
    """Random numbers in the type of the model."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def ints(value: int, *shape: int) -> Tensor:
    """One number over and over, as the kernels take numbers."""
    return torch.full(shape, value, dtype=torch.int32, device="cuda")


def attention_row(batch: int, length: int, rows: int, caches: list[Tensor], rate: float) -> str:
    """Our attention beside torch's, which is told the length by the host, masks nothing, and reads 16-bit rows."""
    used, q = ints(length, batch), normal(batch, HEADS, rows, HEAD_SIZE)
    one = torch.ones((), device="cuda")
    scales = (one, one) if caches[0].dtype == FP8 else None

    def ours(cache: Tensor) -> Callable[[], object]:
        return lambda: kernels.attention(q, cache[0], cache[1], used, causal=True, scales=scales)

    def theirs(cache: Tensor) -> Callable[[], object]:
        keys, values = cache[0, :, :, :length], cache[1, :, :, :length]
        return lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    size = 2 * batch * KV_HEADS * length * HEAD_SIZE * caches[0].itemsize
    time = seconds([ours(cache) for cache in caches])
    torchs = "-" if scales else f"{seconds([theirs(cache) for cache in caches]) * 1e6:.1f}"
    return (
        f"| {batch} | {length} | {rows} | {time * 1e6:.1f} | {size / time / 1e12:.2f} | {size / time / rate:.0%} "
        f"| {torchs} |"
    )


def attention_table(
    rate: float, batches: list[int], lengths: list[int], rows: list[int], dtype: torch.dtype
) -> list[str]:
    """Attention over all of these, with caches of that type."""
    lines = ["| batch | cache rows | Q | us | TB/s | of copy rate | torch SDPA us |", "|---|---|---|---|---|---|---|"]
    for batch in batches:
        for length in lengths:
            size = 2 * batch * KV_HEADS * length * HEAD_SIZE * dtype.itemsize
            count = max(1, min(64, math.ceil(COLD / size)))
            caches = [normal(2, batch, KV_HEADS, length + 64, HEAD_SIZE).to(dtype) for _ in range(count)]
            lines += [attention_row(batch, length, q_rows, caches, rate) for q_rows in rows]
            del caches
    return lines


class OurAppend(CudaOps):
    """Attention is left out, on both sides: what remains is the append."""

    def _attend(self, *_: object, **__: object) -> None:
        pass


class TorchAppend(TorchOps):
    """As `OurAppend`."""

    def attention(self, q: Tensor, *_: object, **__: object) -> Tensor:
        """The queries as they are."""
        return q


def our_append(weights: dict[str, Tensor], caches: dict[str, Tensor], rows: int, length: int) -> OurAppend:
    """Our kernels over a step of slots that all have so many rows, in one page each."""
    keys = caches["l.key"]
    batch = len(keys)
    words = [x for slot in range(batch) for x in (slot, rows, -1, rows)]
    layout = kernels.begin_rows(
        torch.tensor(words, dtype=torch.int32, device="cuda"),
        ints(0, batch, rows),
        ints(length, batch),
        segments=batch,
        decode_segments=batch,
        pieces=0,
        rows=batch * rows,
        logit_rows=batch * rows,
        cuts=0,
    )
    table = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None]
    return OurAppend(weights, caches, None, kernels.Pages(table, keys.shape[2]), layout, rows)


def rows_of(ops: TorchOps, x: Tensor) -> Tensor:
    """Makes rows [B, Q, ...] flat, [1, B * Q, ...], for our kernels."""
    return x.flatten(0, 1)[None] if isinstance(ops, CudaOps) else x


def operations(batch: int, rows: int, length: int) -> dict[str, Callable[[TorchOps], object]]:
    """The other kernels, each as an operation over `Ops`."""
    start, committed, row_count = ints(length, batch), ints(6, batch), ints(rows, batch)
    offsets = torch.arange(rows, dtype=torch.int32, device="cuda")
    x, y = normal(batch, rows, HIDDEN), normal(batch, rows, HIDDEN)
    gate_up, logits = normal(batch, rows, 2 * FFN), normal(batch, rows, VOCABULARY)
    qkv = normal(batch, rows, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    kv = normal(batch, rows, DRAFTER_LAYERS * 2 * KV_HEADS * HEAD_SIZE)
    ids, logit_rows = ints(0, batch, rows), offsets.expand(batch, -1).contiguous()

    def inject(ops: TorchOps) -> object:
        context = ops.context_rows(LAYER, rows_of(ops, kv), 2, start)
        return ops.block_attention(LAYER, context, qkv, start, committed)

    return {
        "RMSNorm": lambda ops: ops.rms_norm("norm", x, 1e-6),
        "residual + RMSNorm": lambda ops: ops.add_rms_norm("norm", x, y, 1e-6),
        "SwiGLU": lambda ops: ops.swiglu(gate_up),
        "q/k norm, RoPE, append": lambda ops: ops.self_attention(LAYER, rows_of(ops, qkv), start),
        "KV injection, 6 context rows": inject,
        "argmax of 151,936": lambda ops: ops.argmax(logits),
        "acceptance": lambda ops: ops.accept(ids, rows_of(ops, ids), logit_rows, row_count),
    }


def other_table(batches: list[int], rows: int = 16, length: int = 1024) -> list[str]:
    """The other kernels beside the torch operations that they stand for."""
    lines = ["| operation | batch | Q | us | torch us |", "|---|---|---|---|---|"]
    angles = torch.rand(length + 64, HEAD_SIZE // 2, device="cuda")
    weights = {"rope.cos": angles.cos().bfloat16(), "rope.sin": angles.sin().bfloat16(), "norm.weight": normal(HIDDEN)}
    weights |= {f"l.self_attn.{name}_norm.weight": normal(HEAD_SIZE) for name in ("q", "k")}
    for batch in batches:
        caches = {f"l.{name}": normal(batch, KV_HEADS, length + 64, HEAD_SIZE) for name in ("key", "value")}
        both = our_append(weights, caches, rows, length), TorchAppend(weights, caches)
        for name, operation in operations(batch, rows, length).items():
            ours, theirs = (seconds([_bound(operation, ops)] * 20) * 1e6 for ops in both)
            lines.append(f"| {name} | {batch} | {rows} | {ours:.1f} | {theirs:.1f} |")
    return lines


def _bound(operation: Callable[[TorchOps], object], ops: TorchOps) -> Callable[[], object]:
    return lambda: operation(ops)


def main() -> None:
    """Prints the tables; with --output also writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--cache-rows", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--attention-only", action="store_true")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    with torch.inference_mode():
        rate = copy_rate()
        gpu = torch.cuda.get_device_name()
        lines = [
            f"{gpu}, torch {torch.__version__}; a large copy moves {rate / 1e12:.2f} TB/s, read and written.",
            "",
            f"    python {shlex.join(sys.argv)}",
            "",
            f"Attention, {HEADS} heads on {KV_HEADS} of {HEAD_SIZE}, BF16, causal:",
            "",
            *attention_table(rate, settings.batch, settings.cache_rows, settings.rows, torch.bfloat16),
            "",
            "The same with caches in FP8:",
            "",
            *attention_table(rate, settings.batch, settings.cache_rows, settings.rows, FP8),
        ]
        if not settings.attention_only:
            lines += ["", "The others; torch: the composition in `TorchOps`, captured too:", ""]
            lines += other_table(settings.batch)
    print("\n".join(lines))
    if settings.output:
        settings.output.write_text("\n".join(["# CUDA kernels", "", *lines, ""]))


if __name__ == "__main__":
    main()
