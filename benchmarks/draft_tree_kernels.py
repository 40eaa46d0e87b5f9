"""Times each part of a tree's step on its own at Qwen3-8B's shape, beside what a chain has in its place.

    python benchmarks/draft_tree_kernels.py --output draft-tree-kernels.json

Each number is the time of one call among many in a CUDA graph, so without the host. Random numbers; no model is loaded.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_dflash import kernels
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.draft_tree import RANKS, draft_tree

HEADS, KV_HEADS, SIZE, LAYERS, VOCABULARY, HIDDEN, TAPS = 32, 8, 128, 36, 151936, 4096, 5
PAGE_ROWS = 64
DTYPE = torch.bfloat16

Tensor = torch.Tensor


def main() -> None:
    """Prints a table and writes the times, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--length", type=int, default=1024, help="tokens that each slot holds")
    parser.add_argument("--output", type=Path, help="write the times as JSON")
    settings = parser.parse_args()
    found = []
    with torch.inference_mode():
        for batch in settings.batch:
            for name, call in parts(batch, settings.nodes, settings.length).items():
                microseconds = timed(call)
                found.append({"part": name, "batch": batch, "microseconds": microseconds})
                print(f"{batch:4d}  {name:32s} {microseconds:8.2f} us", flush=True)
    record = {"machine": machine(torch.device("cuda")), "versions": versions(), "nodes": settings.nodes}
    if settings.output:
        settings.output.write_text(json.dumps({**record, "length": settings.length, "parts": found}, indent=2) + "\n")


def timed(call: Callable[[], object], calls: int = 40, rounds: int = 7) -> float:
    """Times a call, in microseconds: the median of rounds of a graph of so many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times[1:]))


def parts(batch: int, nodes: int, length: int) -> dict[str, Callable[[], object]]:
    """Makes the calls of a batch by name."""
    rows, depths = nodes + 1, 15
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    width = (length + 2 * rows + PAGE_ROWS - 1) // PAGE_ROWS
    pages = kernels.Pages(torch.arange(batch * width, dtype=torch.int32, device="cuda").view(batch, width), PAGE_ROWS)
    shape = batch * width, KV_HEADS, PAGE_ROWS, SIZE
    caches = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2 * LAYERS)]
    logits = torch.randn(batch, depths, VOCABULARY, device="cuda").mul(4).to(DTYPE)
    ids, log_probs, _ = kernels.top_ids(logits, normalized=True)
    bonus = slots.clone()
    ops = CudaOps({}, {}, None, pages, _layout(batch, rows, length, None), rows)
    tree = draft_tree(nodes, 16)
    _, parents = ops.grow_tree(tree, bonus, log_probs, ids)
    grown, chain = (_layout(batch, rows, length, given) for given in (parents, None))
    targets = torch.zeros(batch * rows, dtype=torch.int32, device="cuda")
    q = torch.randn(batch * rows, HEADS, SIZE, dtype=DTYPE, device="cuda")
    out = torch.empty(batch * rows, HEADS * SIZE, dtype=DTYPE, device="cuda")
    taps = [torch.randn(batch * rows, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(TAPS)]
    every = kernels.PathMoves(caches, pages)
    # All rows are right: of these trees the last 7 rows are accepted, and of the others all.
    behind = [-1, *[0] * (rows - 7), *range(rows - 7, rows - 1)]
    far, near = (
        _layout(batch, rows, length, torch.tensor([each] * batch, dtype=torch.int32, device="cuda"))
        for each in (behind, list(range(-1, rows - 1)))
    )

    def attend(layout: kernels.Rows) -> None:
        more = True, 0, None, None, None, 0, layout.row_path
        kernels.attend_rows(q, caches[0], caches[1], pages, layout.segments, rows, out, *more)

    def torch_growth() -> None:
        super(CudaOps, ops).grow_tree(tree, bonus, log_probs, ids)

    return {
        "begin rows, chain": lambda: _layout(batch, rows, length, None),
        "begin rows, tree": lambda: _layout(batch, rows, length, parents),
        "attention, chain": lambda: attend(chain),
        "attention, tree": lambda: attend(grown),
        "accept, chain": lambda: kernels.accept_rows(chain, targets),
        "accept, tree": lambda: kernels.accept_paths(grown, targets),
        "join taps, chain": lambda: torch.cat(taps, dim=-1),
        "accept and join taps, tree": lambda: kernels.accept_paths(near, targets, None, taps),
        "accept, join taps, move none": lambda: kernels.accept_paths(near, targets, None, taps, every),
        "accept, join taps, move 7 rows": lambda: kernels.accept_paths(far, targets, None, taps, every),
        "argmax": lambda: kernels.argmax(logits),
        f"top {RANKS} ids": lambda: kernels.top_ids(logits, normalized=True),
        "grow tree": lambda: ops.grow_tree(tree, bonus, log_probs, ids),
        "grow tree, torch": torch_growth,
    }


def _layout(batch: int, rows: int, length: int, parents: Tensor | None) -> kernels.Rows:
    words = _WORDS.get((batch, rows, length))
    if words is None:
        listed = [number for slot in range(batch) for number in (slot, rows, -1, rows)]
        words = _WORDS[batch, rows, length] = (
            torch.tensor(listed, dtype=torch.int32, device="cuda"),
            torch.zeros(batch, rows, dtype=torch.int32, device="cuda"),
            torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        )
    return kernels.begin_rows(
        *words,
        segments=batch,
        decode_segments=batch,
        pieces=0,
        rows=batch * rows,
        logit_rows=batch * rows,
        cuts=0,
        parents=parents,
    )


_WORDS: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}


if __name__ == "__main__":
    main()
