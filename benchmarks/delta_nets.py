"""Times the gated delta nets of hybrids on this machine's GPU, in BF16, all nets of a step in one CUDA graph.

Each net has states of its own, so that these come from memory, as in a step. The floor counts a state's bytes once read
and once written, the pending rows', and the step's, at 4 TB/s. In steps of one row the slots take turns to absorb what
is beside their states; in the others' turns these are read alone.
"""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels import seconds

from trtllm_dflash import kernels
from trtllm_dflash.kernels.delta_net import DELTA_ROWS, DELTA_TAPS, MOST_KEPT

Tensor = torch.Tensor

SIZE = 128  # of heads
RATE = 4e12  # bytes per second


@dataclass(frozen=True)
class Shape:
    """The gated delta nets of a model."""

    nets: int
    key_heads: int
    value_heads: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * SIZE


SHAPES = {
    "qwen3.5-27b": Shape(48, 16, 48),
    "qwen3.5-35b-a3b": Shape(30, 16, 32),
    "qwen3-coder-next": Shape(36, 16, 32),
}


def random_net(shape: Shape, slots: int) -> kernels.DeltaNet:
    """A net of random weights, that forgets little, with states of so many slots."""

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda")

    keys, values = shape.key_heads, shape.value_heads
    return kernels.DeltaNet(
        conv=normal(shape.channels, 1, DELTA_TAPS).bfloat16(),
        rates=normal(values) - 4,
        dt_bias=normal(values),
        norm=normal(SIZE),
        norm_eps=1e-6,
        states=normal(slots, values, SIZE, SIZE),
        writes=normal(slots, DELTA_ROWS, values, SIZE) / 8,
        keys=torch.nn.functional.normalize(normal(slots, DELTA_ROWS, keys, SIZE), dim=-1),
        decays=torch.rand(slots, DELTA_ROWS, values, device="cuda"),
        window=normal(slots, DELTA_TAPS - 1 + DELTA_ROWS, shape.channels).bfloat16(),
    )


def bytes_of(shape: Shape, slots: int, rows: int, accepted: list[int], keeps: int) -> int:
    """Bytes that one net moves at least; accepted: rows beside each slot's state."""
    state = 4 * shape.value_heads * SIZE * SIZE
    beside = 4 * (SIZE * (shape.key_heads + shape.value_heads) + shape.value_heads)  # of a pending row
    kept = min(rows, DELTA_ROWS)
    window = 2 * shape.channels * (2 * (DELTA_TAPS - 1) + kept)
    own = 2 * rows * (shape.channels + 2 * shape.value_heads * SIZE + 2 * shape.value_heads)
    written = sum(count >= keeps for count in accepted)
    return slots * (state + kept * beside + window + own) + sum(accepted) * beside + written * state


def measure(
    shape: Shape, nets: list[kernels.DeltaNet], slots: int, rows: int, accepted: list[int], keeps: int
) -> tuple[float, float]:
    """Milliseconds of all nets of a step, and their floor."""
    width = shape.channels + shape.value_heads * SIZE
    x = torch.randn(slots * rows, width, device="cuda").bfloat16()
    gates = torch.randn(slots * rows, 2 * shape.value_heads, device="cuda").bfloat16()
    segments = [[slot, 1000, slot * rows, rows] for slot in range(slots)]
    on_gpu = torch.tensor(segments, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1000 - count for count in accepted], dtype=torch.int32, device="cuda")
    counters = torch.zeros(slots, shape.key_heads, dtype=torch.int32, device="cuda")

    def call(net: kernels.DeltaNet) -> object:
        return lambda: net(x, gates, on_gpu, lengths, counters, rows, keeps)

    taken = seconds([call(net) for net in nets]) * len(nets)  # type: ignore[misc]
    floor = len(nets) * bytes_of(shape, slots, rows, accepted, keeps) / RATE
    return taken * 1e3, floor * 1e3


def main() -> None:
    """Prints a table; with --output also writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="of each slot")
    parser.add_argument("--accepted", type=int, default=6, help="rows of the step before that states absorb")
    parser.add_argument(
        "--keeps", type=int, default=MOST_KEPT, help="rows beside a state up to which single ones join; 0: none do"
    )
    parser.add_argument("--prompt", type=int, default=512, help="rows of a piece of a prompt, in one slot")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms of all nets", flush=True)
    print("| shape | slots | rows | ms | floor, ms | times |\n|---|---|---|---|---|---|")
    results: list[dict[str, object]] = []
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            steps = [(slots, rows) for slots in settings.slots for rows in settings.rows] + [(1, settings.prompt)]
            for slots in sorted({slots for slots, _ in steps}):
                nets = [random_net(shape, slots) for _ in range(shape.nets)]
                for rows in [rows for count, rows in steps if count == slots]:
                    keeps = settings.keeps if rows == 1 else 0
                    turns = [1 + (settings.accepted - 1 + slot) % max(keeps, 1) for slot in range(slots)]
                    accepted = turns if rows == 1 else [settings.accepted] * slots
                    taken, floor = measure(shape, nets, slots, rows, accepted, keeps)
                    print(
                        f"| {name} | {slots} | {rows} | {taken:.3f} | {floor:.3f} | {taken / floor:.2f} |", flush=True
                    )
                    step = {"shape": name, "slots": slots, "rows": rows, "accepted": settings.accepted, "keeps": keeps}
                    results.append({**step, "ms": taken, "floor_ms": floor})
    if settings.output:
        command = f"python {shlex.join(sys.argv)}"
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        settings.output.write_text(json.dumps({**machine, "command": command, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
