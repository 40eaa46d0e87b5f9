"""Times captured steps of a shape with random weights on 1, 2, 4... GPUs, and what the sums between them cost.

Each number of GPUs is timed with NCCL's sums alone, and with our small ones where they apply. A sum's own time is that
of a CUDA graph of nothing but sums of the step's size, one after another.
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.ops.communicator import Communicator, Solo, TorchDistributed
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import Drafting

CACHE_LENGTH = 1024
SUMS = 20  # in a graph


class Group(TorchDistributed):
    """A group that outlives its sessions, with our small sums or without."""

    small = False

    def share_memory(self, device: torch.device) -> None:
        """Only where they are wanted."""
        if self.small:
            super().share_memory(device)

    def close(self) -> None:
        """Not before the process ends."""


def sum_seconds(communicator: Communicator, config: EngineConfig, rows: int, device: torch.device) -> float:
    """One sum's, of the rows of a step."""
    x = torch.zeros(rows, config.target.hidden_size, dtype=config.dtype, device=device)
    communicator.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x
        for _ in range(SUMS):
            y = communicator.all_reduce(y)
    times = []
    for _ in range(12):
        communicator.all_gather(x[:1])  # lets all begin together
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / SUMS)
    return float(statistics.median(times[2:]))


def step_seconds(session: Session, batch: int, rows: int, rounds: int, steps: int = 20) -> float:
    """A step's, launched as the scheduler does: one ahead of what is read."""
    drafting = Drafting.BLOCK if rows > 1 else Drafting.OFF
    call = Decode([rows] * batch, drafting, rows, False)
    times = []
    for _ in range(rounds + 1):
        for slot in range(batch):
            session.prefill(Prefill(slot, CACHE_LENGTH, [1], True, Drafting.CONTEXT, 1))
        session.decode(call).read()
        launched = session.decode(call)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            following = session.decode(call)
            launched.read()
            launched = following
        launched.read()
        times.append((time.perf_counter() - begin) / steps)
    return statistics.median(times[1:])


def run_rank(rank: int, tp: int, port: int, settings: argparse.Namespace, to: str) -> None:
    """One process: computes, and on rank 0 writes the table's lines."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    config = shape_config(
        settings.shape,
        backend="torch",
        precision="bf16",
        tp=tp,
        max_batch=max(settings.batch),
        max_seq_len=CACHE_LENGTH + 512,
        chunk=512,
    )
    communicator: Communicator = Solo()
    if tp > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = TCPStore("127.0.0.1", port, tp + 1, is_master=False)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=tp)
        group = dist.group.WORLD
        assert group is not None
        communicator = Group(group)
    weights = random_weights(config, rank, device)
    assert config.drafter is not None
    layers = {1: config.target.layers, settings.rows: config.target.layers + config.drafter.layers}
    lines = []
    for small in (False, True) if isinstance(communicator, Group) else (False,):
        if isinstance(communicator, Group):
            communicator.small = small
            communicator.share_memory(device)
        sums = {}
        if tp > 1:
            sums = {(b, r): sum_seconds(communicator, config, b * r, device) for b in settings.batch for r in layers}
        session = CudaSession(config, weights, device, communicator)
        if rank:
            session.follow()
            session.close()
            continue
        session.prepare(Prepare((settings.rows - 1,), sampled=False))
        for batch in settings.batch:
            for rows in layers:
                seconds = step_seconds(session, batch, rows, settings.rounds)
                cells = [tp, ("ours" if small else "NCCL") if tp > 1 else "", batch, f"{seconds * 1e3:.3f}"]
                each, count = sums.get((batch, rows), 0.0), 2 * layers[rows]
                cells[3:3] = ["plain" if rows == 1 else f"K = {rows - 1}"]
                cells += [f"{each * 1e6:.1f}", count, f"{each * count / seconds:.0%}"] if tp > 1 else ["", "", ""]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
                print(lines[-1], flush=True)
        session.close()
    if rank == 0:
        Path(to).write_text("\n".join(lines) + "\n")
    if tp > 1:
        dist.destroy_process_group()


def main() -> None:
    """Prints the table; with --output also writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}; "
        f"{settings.shape}, random weights, BF16, {CACHE_LENGTH} cached tokens, greedy.",
        "",
        f"    python {shlex.join(sys.argv)}",
        "",
        "| GPUs | sums | batch | step | ms | us a sum | sums | their share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tp in settings.tp:
        store = TCPStore("127.0.0.1", 0, tp + 1, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) / "lines"
            multiprocessing.spawn(run_rank, (tp, store.port, settings, str(to)), nprocs=tp)  # type: ignore[attr-defined]
            lines += to.read_text().splitlines()
    print("\n".join(lines))
    if settings.output:
        settings.output.write_text("\n".join(["# Tensor parallelism", "", *lines, ""]))


if __name__ == "__main__":
    main()
