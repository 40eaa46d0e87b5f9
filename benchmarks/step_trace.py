"""What the GPU does in a captured step, and what it waits for between two: the profiler's trace of steps, as Markdown.

Kernels overlap: each may begin while the one before it ends. So a kernel's time is from the end of the last of those
before it to its own end, and the times add up to the step. Random weights of a real shape.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.session import Outcome
from trtllm_dflash.step import Drafting

STEPS = 12
#: (batch, rows); one row: plain decoding.
CASES = (1, 1), (1, 16), (8, 1), (8, 16), (32, 1), (32, 8)


def main() -> None:
    """Prints a table for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--cache-length", type=int, default=1024)
    parser.add_argument("--kernels", type=int, default=12, help="rows of a table")
    settings = parser.parse_args()
    length = settings.cache_length
    config = shape_config(
        settings.shape, precision="bf16", tp=1, max_batch=32, max_seq_len=length + 64 * STEPS, chunk=512
    )
    device = torch.device("cuda")
    session = CudaSession(config, random_weights(config, 0, device), device, Solo())
    session.prepare(Prepare(tuple({rows - 1 for _, rows in CASES if rows > 1}), sampled=False))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {settings.shape}, BF16, {length} cached tokens")
    for batch, rows in CASES:
        for slot in range(batch):
            session.prefill(Prefill(slot, length, [1], True, Drafting.CONTEXT, 1))
        events = trace(session, Decode([rows] * batch, Drafting.BLOCK if rows > 1 else Drafting.OFF, rows, False))
        print("\n".join(table(events, f"batch {batch}, {rows} rows", settings.kernels)), flush=True)


def trace(session: CudaSession, call: Decode) -> list[dict[str, Any]]:
    """The device's activities of STEPS steps in order, each read while the next one runs."""
    session.decode(call).read()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        last: Outcome | None = None
        for _ in range(STEPS):
            outcome = session.decode(call)
            if last is not None:
                last.read()
            last = outcome
        assert last is not None
        last.read()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = "kernel", "gpu_memcpy", "gpu_memset"
    return sorted((event for event in events if event.get("cat") in kinds), key=lambda event: float(event["ts"]))


def table(events: list[dict[str, Any]], title: str, most: int) -> list[str]:
    """Kernels by their time on the path, and the time in which the device did nothing."""
    path: Counter[str] = Counter()
    count: Counter[str] = Counter()
    begin = end = float(events[0]["ts"])
    idle = between = 0.0
    is_read = False
    for event in events:
        start, name = float(event["ts"]), event["name"]
        gap = max(0.0, start - end)
        idle += gap
        between += gap if is_read else 0.0  # the first after the copy to the host: the next step
        is_read = "DtoH" in name
        stop = start + float(event["dur"])
        path[name] += max(0.0, stop - end)  # type: ignore[assignment]
        count[name] += 1
        end = max(end, stop)
    step = (end - begin) / STEPS
    lines = ["", f"{title}: {step:.0f} us a step, {len(events) / STEPS:.0f} launches; the device idles for "]
    lines[-1] += (
        f"{idle / STEPS:.1f} us of them ({idle / STEPS / step:.2%}), {between / (STEPS - 1):.1f} between steps."
    )
    lines += ["", "| us a step | launches | us each | kernel |", "|---|---|---|---|"]
    for name, time in path.most_common(most):
        shown = name.replace("void ", "").replace("(anonymous namespace)::", "").replace("dflash::", "")
        each = time / count[name]
        lines.append(f"| {time / STEPS:.1f} | {count[name] / STEPS:.0f} | {each:.2f} | `{shown.split('(')[0][:70]}` |")
    return lines


if __name__ == "__main__":
    main()
