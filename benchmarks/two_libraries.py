"""Times every kernel of two builds of the CUDA kernels by turns, in one process: what a change to their sources costs.

Each case is a CUDA graph of launches for either library, on the same tensors; the graphs are replayed by turns, and the
figure is the median of the rounds' ratios.

    python benchmarks/two_libraries.py --old old/libdflash_kernels.so --new plugins/build/libdflash_kernels.so
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from experts import LAYERS, SHAPES, random_experts
from kernels import FFN, HEADS, HIDDEN, KV_HEADS, LAUNCHES, VOCABULARY, ints, normal

from trtllm_dflash import kernels
from trtllm_dflash.kernels.library import LIBRARY_VARIABLE
from trtllm_dflash.ops.cuda_experts import moe_kernel
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.fp8 import FP8, quantize_rows

Tensor = torch.Tensor
Case = tuple[str, Sequence[Callable[[], object]]]  # its name, and calls that rotate over buffers

#: Outputs and inputs of the products of a layer of Qwen3-8B's shape.
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
PRODUCT_LAYERS = 16
ROUNDS = 11
COLD = 200_000_000  # bytes that a round over the buffers moves at least


def attention_cases() -> Iterator[Case]:
    """Verify and draft passes: heads of 64 and 128, 16-bit and FP8 caches, with and without a window and sinks."""
    one = torch.ones((), device="cuda")
    for size, dtype, window in ((128, torch.bfloat16, 0), (128, FP8, 0), (64, torch.bfloat16, 128), (64, FP8, 0)):
        sinks = normal(HEADS) if window else None
        for batch, length in ((1, 1040), (1, 16000), (8, 1040), (32, 1040)):
            bytes_read = 2 * batch * KV_HEADS * length * size * dtype.itemsize
            caches = [
                normal(2, batch, KV_HEADS, length, size).to(dtype)
                for _ in range(max(1, min(32, math.ceil(COLD / bytes_read))))
            ]
            lengths = ints(length, batch)
            for rows in (1, 8, 16):
                q = normal(batch, HEADS, rows, size)
                scales = (one, one) if dtype == FP8 else None
                attend = partial(kernels.attention, q, lengths=lengths, causal=True, window=window, sinks=sinks)
                calls = [partial(attend, keys=cache[0], values=cache[1], scales=scales) for cache in caches]
                kind = f"D {size}, {'FP8' if dtype == FP8 else 'BF16'}{', window and sinks' if window else ''}"
                yield f"attention, {kind}, batch {batch}, {length} rows, Q {rows}", calls


def product_cases() -> Iterator[Case]:
    """The products of Qwen3-8B's shape, BF16 and FP8, alone, normed, with SwiGLU, with a residual."""
    for fp8 in (False, True):
        for name, (outputs, inputs) in PRODUCTS.items():
            count = max(2, math.ceil(COLD / (outputs * inputs * (1 if fp8 else 2))))
            weights = [normal(outputs, inputs) * inputs**-0.5 for _ in range(count)]
            stored = [_in_fp8(weight) if fp8 else (weight, None) for weight in weights]
            norm = kernels.Norm(torch.ones(inputs, dtype=torch.bfloat16, device="cuda"), 1e-6)
            for rows in (1, 8, 16):
                x = normal(rows, inputs)
                if name in ("qkv", "gate_up"):
                    product = partial(kernels.skinny_gemm, x, swiglu=name == "gate_up", norm=norm)
                else:
                    product = partial(kernels.skinny_gemm, x, residual=normal(rows, outputs))
                calls = [partial(product, weight, scale=scale) for weight, scale in stored]
                yield f"product, {name}, {'FP8' if fp8 else 'BF16'}, {rows} rows", calls


def layer_cases() -> Iterator[Case]:
    """A layer's four products, BF16, in their order with what goes with them, and the LM head: 1 to 128 rows."""
    layers = [
        {name: normal(*shape) * shape[1] ** -0.5 for name, shape in PRODUCTS.items()} for _ in range(PRODUCT_LAYERS)
    ]
    heads = [normal(VOCABULARY, HIDDEN) for _ in range(2)]
    norm = kernels.Norm(torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda"), 1e-6)
    for rows in (1, 8, 16, 17, 32, 48, 64, 128):
        x, gated = normal(1, rows, HIDDEN), normal(1, rows, FFN)
        yield f"layer, {rows} rows", [partial(_multiply_layer, layer, norm, x, gated) for layer in layers]
        product = kernels.skinny_gemm if rows <= kernels.SKINNY_ROWS else kernels.wide_gemm
        yield f"layer, LM head alone, {rows} rows", [partial(product, x, head) for head in heads]


def _multiply_layer(layer: dict[str, Tensor], norm: kernels.Norm, x: Tensor, gated: Tensor) -> None:
    if x.shape[1] <= kernels.SKINNY_ROWS:
        kernels.skinny_gemm(x, layer["qkv"], norm=norm)
        kernels.skinny_gemm(x, layer["o"], residual=x)
        kernels.skinny_gemm(x, layer["gate_up"], swiglu=True, norm=norm)
        kernels.skinny_gemm(gated, layer["down"], residual=x)
    else:
        kernels.wide_gemm(kernels.rms_norm(x, norm.weight, norm.eps), layer["qkv"])
        kernels.wide_gemm(x, layer["o"], residual=x)
        kernels.wide_gemm(kernels.rms_norm(x, norm.weight, norm.eps), layer["gate_up"], swiglu=True)
        kernels.wide_gemm(gated, layer["down"], residual=x)


def _in_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = quantize_rows(weight.float())
    return values, scale.flatten()


def expert_cases() -> Iterator[Case]:
    """Mixtures: MXFP4 and BF16, from one row to many."""
    for name, shape in SHAPES.items():
        layers = [Experts.of(random_experts(shape), shape.layer) for _ in range(LAYERS)]
        for rows in (1, 8, 32, 80, 256):
            x, logits = normal(rows, shape.hidden), normal(rows, shape.experts)
            calls = [partial(moe_kernel(shape.layer, own), x, logits) for own in layers]
            yield f"experts, {name}, {rows} rows", calls


def graph_of(library: str, calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """The calls, captured with a library, as often as a graph should launch; and how many launches that makes."""
    os.environ[LIBRARY_VARIABLE] = library
    for call in calls[:2]:
        call()
    calls = list(calls) * math.ceil(LAUNCHES / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph, len(calls)


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def compare(old: str, new: str, calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
    """Microseconds of one launch with either library, and the median of the rounds' new / old."""
    (graph_old, count), (graph_new, _) = graph_of(old, calls), graph_of(new, calls)
    for graph in (graph_old, graph_new):
        milliseconds(graph)
    pairs = []
    for round_ in range(ROUNDS):
        turns = (graph_old, graph_new) if round_ % 2 else (graph_new, graph_old)
        times = [milliseconds(graph) for graph in turns]
        pairs.append(times if round_ % 2 else times[::-1])
    ratio = statistics.median(b / a for a, b in pairs)
    medians = [statistics.median(side) * 1e3 / count for side in zip(*pairs, strict=True)]
    return medians[0], medians[1], ratio


def main() -> None:
    """Prints a line a case, and the largest change of each kind; with --output also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", required=True)
    parser.add_argument("--new", required=True)
    parser.add_argument("--kinds", nargs="+", default=["attention", "product", "layer", "experts"])
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    sources = {"attention": attention_cases, "product": product_cases, "layer": layer_cases, "experts": expert_cases}
    found: dict[str, tuple[float, float, float]] = {}
    with torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("| case | old, us | new, us | new / old |\n|---|---|---|---|")
        for kind in settings.kinds:
            for name, calls in sources[kind]():
                old, new, ratio = found[name] = compare(settings.old, settings.new, calls)
                print(f"| {name} | {old:.2f} | {new:.2f} | {ratio:.4f} |", flush=True)
    for kind in settings.kinds:
        ratios = [ratio for name, (_, _, ratio) in found.items() if name.startswith(kind)]
        spread = f"{min(ratios):.4f} to {max(ratios):.4f}, median {statistics.median(ratios):.4f}"
        print(f"{kind}: {len(ratios)} cases, new / old {spread}")
    if settings.output:
        report = {"command": shlex.join(sys.argv), "gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
        cases = [
            dict(zip(("case", "old_us", "new_us", "ratio"), (name, *row), strict=True)) for name, row in found.items()
        ]
        settings.output.write_text(json.dumps({**report, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
