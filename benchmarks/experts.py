"""Times the kernels of mixtures of experts on this machine's GPU, at the widths of published models' layers.

Every figure is a CUDA graph of calls, each with routing of its own, that rotate over layers which together are larger
than the L2. Each choice of experts is equally likely, but with --uneven. TB/s count the bytes of the experts that were
chosen, once.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from kernels import copy_rate, normal, seconds

from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.cuda_experts import moe_kernel
from trtllm_dflash.ops.expert_tiles import ExpertTiles
from trtllm_dflash.ops.experts import Experts, in_tiles

Tensor = torch.Tensor

LAYERS, CALLS = 4, 12
CLAMP = ClampedSwiglu(1.702, 7.0)


@dataclass(frozen=True)
class Shape:
    """A layer of experts, as one rank has it."""

    experts: int
    top_k: int
    hidden: int
    columns: int
    weight: Literal["bf16", "mxfp4", "nvfp4", "int4", "fp8", "fp8 blocks"]  # FP8: a scale a row, or a block of 128
    clamp: ClampedSwiglu | None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_shared: bool = False  # one more, that all rows go through

    @property
    def layer(self) -> MoELayer:
        """With no more to its name."""
        told = self.top_k, True, self.clamp, self.scores
        return MoELayer("", self.experts, 0, self.experts, *told, has_shared=self.has_shared)

    @property
    def stack(self) -> int:
        """Experts that lie together, the shared one last."""
        return self.experts + self.has_shared


SHAPES = {
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, "mxfp4", CLAMP),
    "gpt-oss-120b, a rank of 4": Shape(128, 4, 2880, 736, "mxfp4", CLAMP),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "mxfp4", CLAMP),
    "qwen3-coder-30b-a3b": Shape(128, 8, 2048, 768, "bf16", None),
    "kimi-k2.5, a rank of 8": Shape(384, 8, 7168, 256, "int4", None, "sigmoid"),
    "qwen3-coder-30b-a3b, FP8 by row": Shape(128, 8, 2048, 768, "fp8", None),
    "qwen3-coder-30b-a3b, FP8 by block": Shape(128, 8, 2048, 768, "fp8 blocks", None),
    "qwen3-coder-30b-a3b, NVFP4": Shape(128, 8, 2048, 768, "nvfp4", None),
    "qwen3.5-35b-a3b": Shape(256, 8, 2048, 512, "bf16", None, has_shared=True),
    "qwen3-coder-next": Shape(512, 10, 2048, 512, "bf16", None, has_shared=True),
    "qwen3-coder-next, FP8 by block": Shape(512, 10, 2048, 512, "fp8 blocks", None, has_shared=True),
    "minimax-m2.5, FP8 by block": Shape(256, 8, 3072, 1536, "fp8 blocks", None, "sigmoid"),
}


def random_experts(shape: Shape) -> dict[str, Tensor]:
    """A layer's tensors. Scales differ; biases are gpt-oss's alone."""
    tensors = {"router.correction_bias": torch.zeros(shape.experts, device="cuda")} if shape.scores == "sigmoid" else {}
    for name, rows, inputs in (
        ("gate_up_proj", 2 * shape.columns, shape.hidden),
        ("down_proj", shape.hidden, shape.columns),
    ):
        key = f"experts.{name}."
        if shape.clamp:
            tensors[key + "bias"] = normal(shape.stack, rows)
        if shape.weight in ("mxfp4", "nvfp4"):
            tensors |= random_tiles(shape, key, rows, inputs)
        elif shape.weight == "int4":
            words = torch.randint(2**31, (shape.stack, rows, inputs // 8), dtype=torch.int32, device="cuda")
            tensors[key + "weight"] = words
            tensors[key + "scale"] = normal(shape.stack, rows, inputs // 32) * inputs**-0.5 / 4
        elif shape.weight == "bf16":
            tensors[key + "weight"] = normal(shape.stack, rows, inputs) * inputs**-0.5
        else:
            tensors[key + "weight"] = normal(shape.stack, rows, inputs).to(torch.float8_e4m3fn)
            scaled = (rows // 128, inputs // 128) if shape.weight == "fp8 blocks" else (rows,)
            tensors[key + "scale"] = (0.5 + torch.rand(shape.stack, *scaled, device="cuda")) * inputs**-0.5
    return tensors


def random_tiles(shape: Shape, key: str, rows: int, inputs: int) -> dict[str, Tensor]:
    """A matrix of E2M1 numbers in the kernels' order, and what scales its rows in NVFP4."""
    blocks = torch.randint(0, 256, (shape.stack, rows, inputs // 32, 16), dtype=torch.uint8, device="cuda")
    told = "gate_up" in key, True
    if shape.weight == "mxfp4":
        scales = torch.randint(117, 121, blocks.shape[:3], dtype=torch.uint8, device="cuda")
        return {key + "tiles": ExpertTiles.of(blocks, scales, *told).tiles}
    scale = (0.5 + torch.rand(shape.stack, rows, inputs // 16, device="cuda")).to(torch.float8_e4m3fn)
    of_rows = torch.full((shape.stack, rows), inputs**-0.5 / 4, device="cuda")
    tiles = ExpertTiles.of(blocks, scale, *told, of_rows).tiles
    return {key + "tiles": tiles, key + "global_scale": of_rows}


def measure(
    shape: Shape, layers: list[dict[str, Tensor]], rows: int, rate: float, torchs: bool, uneven: float
) -> dict[str, Any]:
    """Of one number of rows: our kernels' seconds, by choice, for few rows and for many, beside the bytes that the
    routing takes, and torch's where they are asked for."""
    experts = [Experts.of(tensors, shape.layer) for tensors in layers]
    liked = [uneven * normal(shape.experts) for _ in range(LAYERS)]
    inputs = [(normal(rows, shape.hidden), normal(rows, shape.experts) + liked[i % LAYERS]) for i in range(CALLS)]
    touched = sum(len(experts[0].route(shape.layer, logits)[0].unique()) for _, logits in inputs) / CALLS
    moved = (touched + shape.has_shared) * sum(tensor.nbytes for tensor in layers[0].values()) / shape.stack

    def calls(compute: Callable[[Experts, Tensor, Tensor], object]) -> list[Callable[[], object]]:
        return [partial(compute, experts[i % LAYERS], *inputs[i]) for i in range(CALLS)]

    def ours(many: bool | None) -> float:
        return seconds(calls(lambda own, x, logits: moe_kernel(shape.layer, own, many)(x, logits)))

    takes_many = moe_kernel(shape.layer, experts[0], many=True).takes(*inputs[0])
    kinds = {"few": False, "many": True} if takes_many else {"few": False}
    times: dict[str, list[float]] = {kind: [] for kind in ("ours", *kinds)}
    for _ in range(3):  # by turns
        times["ours"].append(ours(None))
        for kind, many in kinds.items():
            times[kind].append(ours(many))
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    time = medians["ours"]
    theirs = None
    if torchs and not shape.has_shared:  # torch computes a shared one beside the others
        theirs = seconds([partial(in_tiles, shape.layer, experts[i], *inputs[i]) for i in range(2)], rounds=3)
    return {
        "rows": rows,
        "experts": touched,
        "bytes": moved,
        "seconds": time,
        "few_seconds": medians["few"],
        "many_seconds": medians.get("many"),
        "bytes_per_second": moved / time,
        "share_of_copy_rate": moved / time / rate,
        "torch_seconds": theirs,
    }


def main() -> None:
    """Prints the table; with --output also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 10, 80, 256])
    parser.add_argument("--uneven", type=float, default=0, help="deviation of what an expert's logits have in all rows")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch's times out")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    with torch.inference_mode():
        rate, results = copy_rate(), {}
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a large copy moves {rate / 1e12:.2f} TB/s")
        print("\n| layer | rows | experts chosen | us | few us | many us | TB/s | of copy rate | torch us |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in settings.shapes:
            layers = [random_experts(SHAPES[name]) for _ in range(LAYERS)]
            how = rate, settings.torch, settings.uneven
            results[name] = [measure(SHAPES[name], layers, rows, *how) for rows in settings.rows]
            for row in results[name]:
                us = {key: "-" if row[key] is None else f"{row[key] * 1e6:.1f}" for key in row if "seconds" in key}
                print(
                    f"| {name} | {row['rows']} | {row['experts']:.1f} | {us['seconds']} | {us['few_seconds']} "
                    f"| {us['many_seconds']} | {row['bytes_per_second'] / 1e12:.2f} "
                    f"| {row['share_of_copy_rate']:.0%} | {us['torch_seconds']} |",
                    flush=True,
                )
    if settings.output:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        report = {"command": shlex.join(sys.argv), "gpu": torch.cuda.get_device_name(), "versions": versions}
        settings.output.write_text(json.dumps({**report, "copy_bytes_per_second": rate, "layers": results}, indent=1))


if __name__ == "__main__":
    main()
