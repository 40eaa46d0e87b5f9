"""Compiles one rank's TensorRT plan of a model's shape, with random weights, and records what that took.

The plan is compiled, measured and dropped: no checkpoint is read and nothing is run.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash.checkpoint.drafter import default_tap_layers
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.tensorrt_compiler import CompileSettings, compile_rank
from trtllm_dflash.engine.weights import complete_weights
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.drafter import Drafter, DrafterConfig
from trtllm_dflash.models.weights import Split, Weight
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}

#: Targets, as their config.json says.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    },
}

# The drafter has the target's widths; the rest is that of z-lab/Qwen3-4B-DFlash-b16.
DRAFTER_LAYERS, BLOCK_SIZE, MASK_TOKEN = 5, 16, 151669


def main() -> None:
    """Compiles, and writes the record."""
    arguments = parse_arguments()
    config = shape_config(arguments)
    torch.manual_seed(0)
    weights = complete_weights(random_weights(config, arguments.rank), config, arguments.rank)
    with_weights = peak_memory()
    settings = CompileSettings(gpu=arguments.gpu)
    begin = time.perf_counter()
    plan = compile_rank(config, weights, arguments.rank, settings)
    seconds = time.perf_counter() - begin
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "config": config.model_dump(include={"precision", "tp", "max_batch", "max_seq_len", "chunk", "sampling"}),
        "shape": config.name,
        "rank": arguments.rank,
        "target_layers": config.target.layers,
        "drafter_layers": DRAFTER_LAYERS,
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


def shape_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine to compile: the shape's target, and a drafter of its widths."""
    shape = SHAPES[arguments.shape]
    target = read_target_config({**shape, "num_hidden_layers": arguments.layers or shape["num_hidden_layers"]})
    changes = {"family": "dflash", "layers": DRAFTER_LAYERS, "tied_embeddings": False}
    drafter = DrafterConfig(
        **{**target.model_dump(), **changes},
        block_size=BLOCK_SIZE,
        mask_token_id=MASK_TOKEN,
        target_layers=target.layers,
        tap_layers=tuple(default_tap_layers(target.layers, DRAFTER_LAYERS)),
    )
    return EngineConfig(
        name=arguments.shape,
        backend="tensorrt",
        precision="bf16",
        tp=arguments.tp,
        max_batch=arguments.max_batch,
        max_seq_len=arguments.max_seq_len,
        chunk=arguments.chunk,
        block_size=BLOCK_SIZE,
        target=target,
        drafter=drafter,
    )


def random_weights(config: EngineConfig, rank: int) -> dict[str, torch.Tensor]:
    """Every stored tensor of a rank, filled in place."""
    assert config.drafter is not None
    weights = build_target(config.target).weights() + Drafter(config.drafter).weights()
    shapes = {weight.name: rank_shape(weight, config.tp, rank) for weight in weights}
    return {name: torch.empty(shape, dtype=config.dtype).uniform_(-0.05, 0.05) for name, shape in shapes.items()}


def rank_shape(weight: Weight, tp: int, rank: int) -> tuple[int, ...]:
    """The shape of an engine tensor on a rank: its parts' slices, joined along the first dimension."""
    shapes = []
    for part in weight.parts:
        shape = list(part.shape)
        if part.split in (Split.ROWS, Split.COLUMNS):
            first, last = part.bounds(tp, rank)
            shape[0 if part.split is Split.ROWS else 1] = last - first
        shapes.append(shape)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def constant_bytes(weights: dict[str, torch.Tensor]) -> int:
    """Bytes of the network's weights: a tied head counts once, a rank's slice of one is a constant of its own."""
    return sum({(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in weights.values()}.values())


def peak_memory() -> int:
    """The most bytes that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def machine() -> dict[str, Any]:
    """The host, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "ram_bytes": memory,
        "gpu": gpu,
    }


def versions() -> dict[str, str]:
    """What compiled it."""
    trt = load_tensorrt()
    return {
        trt.__name__: trt.__version__,
        "trtllm-dflash": trtllm_dflash.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


if __name__ == "__main__":
    main()
