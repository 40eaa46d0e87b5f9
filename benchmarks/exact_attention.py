"""Times attention whose rows depend on nothing else in the batch beside the usual one, at Qwen3-8B's shape.

    python benchmarks/exact_attention.py --slots 1 8 32 --rows 1 8 16 --length 1024
    python benchmarks/exact_attention.py --trees --rows 16 32 64

Each number is the time of one call, with what combines its parts, among many in a CUDA graph that go round caches much
larger than the L2 together. Random numbers; no model is loaded.
"""

import argparse
import random
import statistics

import torch

from trtllm_dflash import kernels

HEADS, KV_HEADS, SIZE, PAGE_ROWS = 32, 8, 128, 64
DTYPE = torch.bfloat16
#: Bytes of all caches of a graph, and the calls that it has at most.
ROUND, MOST_CALLS = 250e6, 40
#: The depth of drafts.
DEEPEST = 15

Tensor = torch.Tensor


def main() -> None:
    """Prints a table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="of each slot")
    parser.add_argument("--length", type=int, default=1024, help="tokens before the rows")
    parser.add_argument("--trees", action="store_true", help="rows are random trees, not runs")
    settings = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {settings.length} cached, {'trees' if settings.trees else 'runs'}")
    print("| slots | rows | usual | exact |\n|---|---|---|---|")
    with torch.inference_mode():
        for slots in settings.slots:
            for rows in settings.rows:
                usual, exact = (timed(slots, rows, settings.length, settings.trees, x) for x in (False, True))
                print(f"| {slots} | {rows} | {usual:.2f} | {exact:.2f} |", flush=True)


def timed(slots: int, rows: int, length: int, trees: bool, exact: bool, rounds: int = 12) -> float:
    """Times a call, in microseconds: the median of rounds of a graph."""
    width = -(-(length + PAGE_ROWS) // PAGE_ROWS)
    shape = slots * width, KV_HEADS, PAGE_ROWS, SIZE
    calls = max(2, min(MOST_CALLS, int(ROUND / (4 * slots * width * KV_HEADS * PAGE_ROWS * SIZE)) + 1))
    caches = [[torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2)] for _ in range(calls)]
    pages = kernels.Pages(torch.arange(slots * width, dtype=torch.int32, device="cuda").view(slots, width), PAGE_ROWS)
    q = torch.randn(slots * rows, HEADS, SIZE, dtype=DTYPE, device="cuda")
    places = [(slot, length, slot * rows, rows) for slot in range(slots)]
    segments = torch.tensor(places, dtype=torch.int32, device="cuda")
    out = torch.empty(slots * rows, HEADS * SIZE, dtype=DTYPE, device="cuda")
    paths = torch.tensor(random_paths(rows) * slots, device="cuda") if trees else None

    def launch() -> None:
        for keys, values in caches:
            of = q, keys, values, pages, segments, rows, out
            kernels.attend_rows(*of, causal=True, row_path=paths, exact=exact)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds + 3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times[3:]))


def random_paths(rows: int) -> list[int]:
    """Makes the paths of a random tree's rows, no deeper than drafts are: a bit for each row that one sees."""
    chance = random.Random(1)
    paths, depths = [1], [0]
    for row in range(1, rows):
        parent = chance.choice([i for i in range(row) if depths[i] < DEEPEST])
        paths.append(paths[parent] | 1 << row)
        depths.append(depths[parent] + 1)
    return [path - (path >> 63 << 64) for path in paths]


if __name__ == "__main__":
    main()
