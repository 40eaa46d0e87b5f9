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

from trtllm_dflash.bench.random_session import fill_caches
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.session.calls import Piece, Prefill, Prepare, Step
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.step import Drafting

STEPS = 12


def main() -> None:
    """Prints a table for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the target, for a smaller one")
    parser.add_argument("--cache-length", type=int, default=1024)
    parser.add_argument("--kernels", choices=("auto", "exact"), default="auto")
    parser.add_argument("--lines", type=int, default=12, help="of a table")
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        default=[case(text) for text in ("1x1", "1x16", "8x1", "8x16", "32x1", "32x8")],
        metavar="SLOTSxROWS[+TOKENS]",
        help="1 row: plain decoding; TOKENS of a prompt, which take the last slot",
    )
    settings = parser.parse_args()
    length, most = settings.cache_length, max(512, *(tokens for *_, tokens in settings.cases))
    limits = {"max_batch": 32, "max_seq_len": max(length + 64 * STEPS, most), "chunk": most}
    config = shape_config(settings.shape, layers=settings.layers, precision="bf16", tp=1, **limits)
    device = torch.device("cuda")
    session = CudaSession(config, random_weights(config, 0, device), device, Solo(), kernels=settings.kernels)
    fill_caches(session)  # of zeros all slots would go on alike, and choose the same experts
    session.prepare(Prepare(tuple({rows - 1 for _, rows, _ in settings.cases if rows > 1}), sampled=False))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}; {settings.shape}, BF16, {length} cached tokens, kernels: {settings.kernels}")
    context = Drafting.CONTEXT if any(rows > 1 for _, rows, _ in settings.cases) else Drafting.OFF
    for batch, rows, tokens in settings.cases:
        for slot in range(batch):
            session.prefill(Prefill(slot, length, [1], True, context, 1))
        title = f"batch {batch}, {rows} rows" + (f", {tokens} tokens of a prompt in the last" if tokens else "")
        events = trace(session, step_of(batch, rows, tokens))
        print("\n".join(table(events, title, settings.lines)), flush=True)


def case(text: str) -> tuple[int, int, int]:
    """Slots, rows of each, and tokens of a prompt."""
    shape, _, tokens = text.partition("+")
    slots, _, rows = shape.partition("x")
    return int(slots), int(rows), int(tokens or 0)


def step_of(slots: int, rows: int, tokens: int) -> Step:
    """A greedy step of a case."""
    decode = [(slot, rows) for slot in range(slots - bool(tokens))]
    pieces = [Piece(slots - 1, 0, [0] * tokens, True)] if tokens else []
    return Step(decode, pieces, Drafting.BLOCK if rows > 1 else Drafting.OFF, rows, sampled=False)


def trace(session: CudaSession, step: Step) -> list[dict[str, Any]]:
    """The device's activities of STEPS steps in order, each read while the next one runs."""
    session.run(step).read()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        last: Outcome | None = None
        for _ in range(STEPS):
            outcome = session.run(step)
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
        between += gap if is_read else 0.0  # the first after what was decided went to the host: the next step
        is_read = "DtoH" in name or "send_kernel" in name
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
