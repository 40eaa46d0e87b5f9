"""Times the attention of a prompt's rows on this machine's GPU, of Qwen3-8B's heads in BF16: in cuts of 32 rows, as
whole items, and by torch's FlashAttention.

Every figure is a CUDA graph of launches on the same queries. Keys and values are one run of rows, for torch likewise;
"in pages" they lie in pages of 64 rows in a random order. TFLOP/s count the products of keys that a row sees, no more.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from kernels import HEAD_SIZE, HEADS, KV_HEADS, normal, seconds

from trtllm_dflash import kernels

Tensor = torch.Tensor

PAGE_ROWS = 64


def flops_of(rows: int, before: int) -> int:
    """Counts the operations of both products of rows that each see all keys before them, and their own."""
    seen = rows * before + rows * (rows + 1) // 2
    return 4 * HEADS * HEAD_SIZE * seen


def segments_of(rows: int, before: int, most: int) -> Tensor:
    """One prompt's rows as segments of at most so many."""
    cuts = [[0, before + first, first, min(most, rows - first)] for first in range(0, rows, most)]
    return torch.tensor(cuts, dtype=torch.int32, device="cuda")


def in_pages(cache: Tensor) -> tuple[Tensor, kernels.Pages]:
    """A cache [1, Hkv, S, D] as pages in a random order."""
    pages = cache[0].unflatten(1, (-1, PAGE_ROWS)).transpose(0, 1)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0)).to("cuda")
    shuffled = torch.empty_like(pages.contiguous())
    shuffled[order] = pages
    return shuffled, kernels.Pages(order.int()[None], PAGE_ROWS)


def measure(rows: int, before: int) -> dict[str, float]:
    """Microseconds of each way; all must agree."""
    length = before + rows
    q = normal(rows, HEADS, HEAD_SIZE)
    keys, values = (normal(1, KV_HEADS, length, HEAD_SIZE) for _ in range(2))
    linear = kernels.Pages(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), length)
    (page_keys, pages), (page_values, _) = in_pages(keys), in_pages(values)
    cuts, whole = segments_of(rows, before, kernels.MAX_ROWS), segments_of(rows, before, rows)
    outs = [torch.empty(rows, HEADS * HEAD_SIZE, dtype=q.dtype, device="cuda") for _ in range(3)]
    torch_q = q.transpose(0, 1)[None]

    def torchs() -> Tensor:
        """Its mask ends with the last key of the last row."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(torch_q, keys, values, 0.0, True)[0]  # type: ignore[no-any-return]

    ways: dict[str, Callable[[], Tensor]] = {
        "cuts": lambda: kernels.attend_rows(q, keys, values, linear, cuts, kernels.MAX_ROWS, outs[0], True),
        "whole": lambda: kernels.attend_prompts(q, keys, values, linear, whole, outs[1]),
        "whole, in pages": lambda: kernels.attend_prompts(q, page_keys, page_values, pages, whole, outs[2]),
        "torch": torchs,
    }
    times = {name: seconds([call]) * 1e6 for name, call in ways.items()}
    expected = torchs()[0].transpose(0, 1).flatten(1).float()
    for name, out in zip(ways, outs, strict=False):
        error = ((out.float() - expected).norm() / expected.norm()).item()
        if not error < 0.01:
            sys.exit(f"error: {name}: {rows} rows after {before} keys differ from torch's by {error:.3f}")
    return times


def main() -> None:
    """Prints a table; with --output also writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--before", type=int, nargs="+", default=[0, 2048, 8192, 32768], help="keys before the rows")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    if any(count % PAGE_ROWS for count in (*settings.rows, *settings.before)):
        parser.error(f"--rows and --before: choose multiples of {PAGE_ROWS}")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}; us (TFLOP/s)", flush=True)
    results: list[dict[str, object]] = []
    with torch.inference_mode():
        for rows in settings.rows:
            for before in settings.before:
                times = measure(rows, before)
                if not results:
                    print("| rows | keys before | " + " | ".join(times) + " |")
                    print("|---" * (2 + len(times)) + "|")
                work = flops_of(rows, before) / 1e6
                cells = [f"{time:.1f} ({work / time:.0f})" for time in times.values()]
                print(f"| {rows} | {before} | {' | '.join(cells)} |", flush=True)
                results.append({"rows": rows, "before": before, "us": times})
    if settings.output:
        command = f"python {shlex.join(sys.argv)}"
        record = {"gpu": gpu, "torch": torch.__version__, "command": command, "results": results}
        settings.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
