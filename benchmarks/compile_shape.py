"""Compiles one rank's TensorRT plan of a model's shape, with random weights, and records what that took.

The plan is compiled, measured and dropped: no checkpoint is read and nothing is run.
"""

import argparse
import json
import resource
import shlex
import sys
import time
from pathlib import Path

import torch

from trtllm_dflash.bench import machine
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.build.tensorrt_compiler import CompileSettings, compile_rank
from trtllm_dflash.cost.shapes import SHAPES, shape_config
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.session.weights import complete_weights


def main() -> None:
    """Compiles, and writes the record."""
    arguments = parse_arguments()
    config = shape_config(
        arguments.shape,
        layers=arguments.layers,
        backend="tensorrt",
        precision="bf16",
        tp=arguments.tp,
        max_batch=arguments.max_batch,
        max_seq_len=arguments.max_seq_len,
        chunk=arguments.chunk,
    )
    assert config.drafter is not None
    weights = random_weights(config, arguments.rank, torch.device("cpu"))
    weights = complete_weights(weights, config, arguments.rank)
    with_weights = peak_memory()
    settings = CompileSettings(gpu=arguments.gpu)
    begin = time.perf_counter()
    plan = compile_rank(config, weights, arguments.rank, settings)
    seconds = time.perf_counter() - begin
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine.machine(),
        "versions": versions(),
        "config": config.model_dump(include={"precision", "tp", "max_batch", "max_seq_len", "chunk", "sampling"}),
        "shape": config.name,
        "rank": arguments.rank,
        "target_layers": config.target.layers,
        "drafter_layers": config.drafter.layers,
        "weights_bytes": constant_bytes(weights),
        "network_layers": plan.layers,
        "seconds": round(seconds, 1),
        "peak_rss_bytes": peak_memory(),
        "peak_rss_before_compiling_bytes": with_weights,  # the random weights, and the libraries
        "plan_bytes": plan.data.nbytes,
        "compiled": True,
        "run": False,
    }
    print(json.dumps(record, indent=2))
    if arguments.output is not None:
        earlier = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
        arguments.output.write_text(json.dumps([*earlier, record], indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--layers", type=int, help="of the target, where not the shape's: to see how memory grows")
    parser.add_argument("--gpu", default="sm120", help="what to compile for; need not be present with TensorRT-RTX")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--rank", type=int, default=0, help="the rank to compile")
    parser.add_argument("--max-batch", type=int, default=8, help="slots")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="tokens")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens in one prefill step")
    parser.add_argument("--output", type=Path, help="a JSON list that the record is added to; it is printed too")
    arguments = parser.parse_args()
    if not 0 <= arguments.rank < arguments.tp:
        parser.error(f"--rank {arguments.rank}: must be below --tp {arguments.tp}")
    return arguments


def constant_bytes(weights: dict[str, torch.Tensor]) -> int:
    """Bytes of the network's weights: a tied head counts once, a rank's slice of one is a constant of its own."""
    return sum({(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in weights.values()}.values())


def peak_memory() -> int:
    """The most bytes that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def versions() -> dict[str, str]:
    """What compiled it."""
    trt = load_tensorrt()
    return {trt.__name__: trt.__version__, **machine.versions()}


if __name__ == "__main__":
    main()
