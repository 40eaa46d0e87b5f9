"""Times latent attention, absorbed, on this machine's GPU, of Kimi-K2.5's heads in BF16: our kernel, and torch's way.

Every figure is a CUDA graph of launches that rotate over caches which together are larger than the L2. The floor is
the cache rows' bytes at the rate of a large copy, or the operations of both products of all queries and rows at the
rate of a large product, whichever take longer.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import normal, seconds

from trtllm_dflash import kernels
from trtllm_dflash.cost.gpus import Rates
from trtllm_dflash.cost.rates import measure_rates
from trtllm_dflash.kernels.latent_attention import LATENT_RANK, LATENT_ROW
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

CACHES = 6
SCALE = 0.06
#: Heads of one rank of 8, and of one alone.
HEADS = (8, 64)


def measure(heads: int, rows: int, batch: int, length: int, rates: Rates, torchs: bool) -> dict[str, Any]:
    """Of one shape: our kernel's seconds beside their floors, and torch's where they are asked for."""
    caches = [normal(batch, 1, length, LATENT_ROW) for _ in range(max(2, CACHES // batch))]
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    q = normal(batch, heads, rows, LATENT_ROW)

    def calls(compute: Callable[[Tensor], object]) -> list[Callable[[], object]]:
        return [partial(compute, cache) for cache in caches]

    def by_torch(cache: Tensor) -> object:
        return TorchOps({}, {}).attention(q, cache, cache[..., :LATENT_RANK], lengths, True, scale=SCALE)

    time = seconds(calls(lambda cache: kernels.attend_latent(q, cache, lengths, SCALE)))
    moved = 2 * batch * length * LATENT_ROW
    done = 2 * batch * heads * rows * length * (LATENT_ROW + LATENT_RANK)
    floors = {"bytes": moved / rates.copy, "operations": done / rates.gemm}
    bound = max(floors, key=lambda name: floors[name])
    return {
        "heads": heads,
        "rows": rows,
        "batch": batch,
        "length": length,
        "seconds": time,
        "bound": bound,
        "floor_seconds": floors[bound],
        "bytes_per_second": moved / time,
        "flops_per_second": done / time,
        "share_of_copy_rate": floors["bytes"] / time,
        "share_of_gemm_rate": floors["operations"] / time,
        "torch_seconds": seconds(calls(by_torch)[:2], rounds=1) if torchs else None,
    }


def main() -> None:
    """Prints the table; with --output also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--torch", action="store_true", help="time torch's way too, of batch 1")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    with torch.inference_mode():
        rates, results = measure_rates(torch.device("cuda"), torch.bfloat16), []
        gpu = torch.cuda.get_device_name()
        print(
            f"{gpu}: a large copy moves {rates.copy / 1e12:.2f} TB/s, a large product {rates.gemm / 1e12:.0f} TFLOP/s"
        )
        print("\n| heads | rows | batch | length | us | floor us | bound by | of copy rate | of GEMM rate | torch us |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for length in settings.lengths:
            for batch in settings.batch:
                for heads in HEADS:
                    for rows in settings.rows:
                        row = measure(heads, rows, batch, length, rates, settings.torch and batch == 1)
                        theirs = "-" if row["torch_seconds"] is None else f"{row['torch_seconds'] * 1e6:.0f}"
                        print(
                            f"| {heads} | {rows} | {batch} | {length:,} | {row['seconds'] * 1e6:.1f} "
                            f"| {row['floor_seconds'] * 1e6:.1f} | {row['bound']} | {row['share_of_copy_rate']:.0%} "
                            f"| {row['share_of_gemm_rate']:.0%} | {theirs} |",
                            flush=True,
                        )
                        results.append(row)
    if settings.output:
        report: dict[str, Any] = {"command": shlex.join(sys.argv), "gpu": gpu, "torch": torch.__version__}
        report.update(copy_bytes_per_second=rates.copy, gemm_flops_per_second=rates.gemm, rows=results)
        settings.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
