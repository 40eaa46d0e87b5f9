"""Times products of tens of rows by our kernel beside cuBLAS, each with the norm that goes with it in a step.

    python benchmarks/products.py --output benchmarks/results/products-h100.json
    python benchmarks/products.py --precision fp8-blocks --output benchmarks/results/products-fp8-blocks-h200.json

Of a product that a norm precedes both are timed; of one whose result is added to the stream, the sum and the next norm,
which cuBLAS leaves to the norm's kernel. In FP8 rows are rounded first: for cuBLAS by a kernel behind the norm's, for
ours by the norm's own. Distinct weights, one after the other in a CUDA graph; the floor is the weight's bytes at the
rate of a large copy.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import copy_rate, normal, seconds

from trtllm_dflash import kernels
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight, scaled_product

Tensor = torch.Tensor

COLD = 250_000_000  # bytes of a product's weights together, more than a cache holds
EPS = 1e-6


@dataclass(frozen=True)
class Product:
    """A matrix of a model."""

    name: str
    outputs: int
    inputs: int
    is_added: bool = False  # to the stream; else a norm goes before it
    has_bias: bool = False
    is_gated: bool = False  # by SwiGLU, which cuBLAS leaves to a kernel of its own
    wide_norm: bool = False  # the norm's weight is in FP32, as Qwen3.5's


PRODUCTS = (
    Product("Qwen3.5-27B, down", 5120, 17408, is_added=True, wide_norm=True),
    Product("Qwen3.5-27B, o and out", 5120, 6144, is_added=True, wide_norm=True),
    Product("Qwen3.5-27B, qkv", 14336, 5120, wide_norm=True),
    Product("Qwen3.5-27B, in_proj and gates", 16480, 5120, wide_norm=True),
    Product("gpt-oss, qkv", 5120, 2880, has_bias=True),
    Product("gpt-oss, o", 2880, 4096, is_added=True, has_bias=True),
    Product("Qwen3.5-35B-A3B, o and out", 2048, 4096, is_added=True, wide_norm=True),
    Product("Qwen3.5-35B-A3B, qkv", 9216, 2048, wide_norm=True),
    Product("Qwen3.5-35B-A3B, in_proj and gates", 12352, 2048, wide_norm=True),
    Product("Qwen3-4B, o", 2560, 4096, is_added=True),
    Product("Qwen3-4B, down", 2560, 9728, is_added=True),
    Product("Qwen3-4B, gate and up", 19456, 2560, is_gated=True),
    Product("Qwen3-14B, qkv", 7168, 5120),
    Product("Qwen3-8B, o", 4096, 4096, is_added=True),
    Product("Qwen3-8B, down", 4096, 12288, is_added=True),
)
#: More of them, of which FP8's times alone are asked for.
IN_FP8 = (
    Product("Qwen3-8B, qkv", 6144, 4096),
    Product("Qwen3-8B, gate and up", 24576, 4096, is_gated=True),
    Product("Llama-3.1-8B, gate and up", 28672, 4096, is_gated=True),
    Product("Qwen3-32B, gate and up", 51200, 5120, is_gated=True),
    Product("Qwen3.5-27B, gate and up", 34816, 5120, is_gated=True, wide_norm=True),
    Product("gpt-oss's drafter, gate and up", 15360, 2880, is_gated=True),
)


@dataclass(frozen=True)
class Line:
    """The times of a product."""

    product: str
    outputs: int
    inputs: int
    rows: int
    cublas_us: float
    ours_us: float
    floor_us: float


def ways(product: Product, rows: int) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    """Makes what cuBLAS and our kernel do of a weight [O, I]."""
    x = normal(1, rows, product.inputs)
    residual, bias = normal(1, rows, product.outputs), normal(product.outputs) if product.has_bias else None
    size = product.outputs if product.is_added else product.inputs
    norm = torch.ones(size, device="cuda", dtype=torch.float32 if product.wide_norm else torch.bfloat16)

    def by_cublas(weight: Tensor) -> object:
        if not product.is_added:
            y = F.linear(kernels.rms_norm(x, norm, EPS), weight, bias)
            return kernels.swiglu(y) if product.is_gated else y
        return kernels.add_rms_norm(residual, F.linear(x, weight, bias), norm, EPS)

    def by_ours(weight: Tensor) -> object:
        if not product.is_added:
            return kernels.wide_gemm(kernels.rms_norm(x, norm, EPS), weight, bias, product.is_gated)
        return kernels.rms_norm(kernels.wide_gemm(x, weight, bias, residual=residual), norm, EPS)

    return by_cublas, by_ours


def fp8_ways(product: Product, rows: int) -> tuple[Callable[[Fp8Weight], object], Callable[[Fp8Weight], object]]:
    """Makes what both do of an FP8 weight: see `ways`. A bias is left out."""
    x, residual = normal(rows, product.inputs), normal(rows, product.outputs)
    size = product.outputs if product.is_added else product.inputs
    weight_of_norm = torch.ones(size, device="cuda", dtype=torch.float32 if product.wide_norm else torch.bfloat16)
    norm = kernels.Norm(weight_of_norm, EPS)

    def quantize(weight: Fp8Weight) -> Callable[..., tuple[Tensor, Tensor]]:
        return kernels.quantize_blocks if weight.by_block else kernels.quantize_rows

    def by_cublas(weight: Fp8Weight) -> object:
        if not product.is_added:
            y = scaled_product(kernels.rms_norm(x[None], norm.weight, EPS)[0], weight, quantize(weight))
            return kernels.swiglu(y[None]) if product.is_gated else y
        return kernels.add_rms_norm(residual[None], scaled_product(x, weight, quantize(weight))[None], norm.weight, EPS)

    def by_ours(weight: Fp8Weight) -> object:
        of = weight.values, weight.scale
        if not product.is_added:
            return kernels.wide_gemm_fp8(*quantize(weight)(x, norm), *of, swiglu=product.is_gated)
        y = kernels.wide_gemm_fp8(*quantize(weight)(x), *of, residual=residual)
        return kernels.rms_norm(y[None], norm.weight, EPS)

    return by_cublas, by_ours


def fp8_weight(product: Product, by_block: bool) -> Fp8Weight:
    """Draws a weight in FP8."""
    values = normal(product.outputs, product.inputs).mul_(20).to(FP8)
    shape = (-(-product.outputs // 128), product.inputs // 128) if by_block else (product.outputs,)
    return Fp8Weight(values, torch.full(shape, 0.05 * product.inputs**-0.5, device="cuda"))


def _calls(product: Product, rows: int, count: int, is_fp8: bool, by_block: bool) -> list[list[Callable[[], object]]]:
    """Makes a call for each of so many weights, by cuBLAS and by ours."""
    if is_fp8:
        in_fp8 = [fp8_weight(product, by_block) for _ in range(count)]
        return [[partial(way, weight) for weight in in_fp8] for way in fp8_ways(product, rows)]
    weights = [normal(product.outputs, product.inputs) * product.inputs**-0.5 for _ in range(count)]
    return [[partial(way, weight) for weight in weights] for way in ways(product, rows)]


def main() -> None:
    """Prints a line for each product and number of rows; with --output also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--precision", choices=["bf16", "fp8", "fp8-blocks"], default="bf16")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    is_fp8, by_block = settings.precision != "bf16", settings.precision == "fp8-blocks"
    rate, lines = copy_rate(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a large copy {rate / 1e12:.2f} TB/s")
    print("| product | rows | cuBLAS, us | ours, us | ours / cuBLAS | floor, us |\n|---|---|---|---|---|---|")
    with torch.inference_mode():
        for product in (*PRODUCTS, *IN_FP8) if is_fp8 else PRODUCTS:
            if by_block and product.inputs % 512:
                continue  # cuBLAS takes four blocks at a time
            bytes_ = (1 if is_fp8 else 2) * product.outputs * product.inputs
            count = max(3, math.ceil(COLD / bytes_))
            for rows in settings.rows:
                calls = _calls(product, rows, count, is_fp8, by_block)
                cublas, ours = (1e6 * seconds(each) for each in calls)
                line = Line(product.name, product.outputs, product.inputs, rows, cublas, ours, 1e6 * bytes_ / rate)
                lines.append(line)
                ratio = f"{cublas:.1f} | {ours:.1f} | {ours / cublas:.2f} | {line.floor_us:.1f}"
                print(f"| {line.product} | {rows} | {ratio} |", flush=True)
    if settings.output:
        report = {"command": shlex.join(sys.argv), "gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
        lines_ = [asdict(line) for line in lines]
        settings.output.write_text(
            json.dumps({**report, "copy_bytes_per_second": rate, "lines": lines_}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
