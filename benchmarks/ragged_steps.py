"""Times steps whose slots have cached unequally many tokens, as a service's have: random weights, one GPU.

`bench step` has them all alike, and so divides attention's work evenly. Two builds of the kernels are compared by runs
of this one after the other, each with its library in TRTLLM_DFLASH_KERNELS. With --whole no product is computed in
parts that the next norm adds up.
"""

import argparse
import random
import statistics
import time

import torch
from step_trace import case, step_of

from trtllm_dflash import kernels
from trtllm_dflash.bench.random_session import fill_caches
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.session.calls import Prefill, Prepare, Step
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.step import Drafting

CASES = ("32x8", "32x6", "24x8", "16x8", "8x16", "64x4", "32x1", "24x1", "64x1")


def main() -> None:
    """Prints a line for each kind of step: the medians of its rounds, ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the target, for a smaller one")
    parser.add_argument("--least", type=int, default=260, help="cached tokens of a slot")
    parser.add_argument("--spread", type=int, default=500, help="a slot has fewer than so many more")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=0.45, help="of a round, of which the first third is not counted"
    )
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cases", type=case, nargs="+", default=[case(text) for text in CASES], metavar="SLOTSxROWS")
    settings = parser.parse_args()
    if settings.whole:
        kernels.count_parts = lambda x, weight: 1
    cases = settings.cases
    limits = {"max_batch": max(slots for slots, *_ in cases), "max_seq_len": 4096, "chunk": 512}
    config = shape_config(settings.shape, layers=settings.layers, precision="bf16", tp=1, **limits)
    device = torch.device("cuda")
    session = CudaSession(config, random_weights(config, 0, device), device, Solo())
    fill_caches(session)
    session.prepare(Prepare(tuple({rows - 1 for _, rows, _ in cases if rows > 1}), sampled=False))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}; {settings.shape}, BF16, {settings.least} to {settings.least + settings.spread} cached tokens")
    choose = random.Random(1)
    context = Drafting.CONTEXT if any(rows > 1 for _, rows, _ in cases) else Drafting.OFF
    for slots, rows, tokens in cases:
        lengths = [settings.least + choose.randrange(settings.spread) for _ in range(slots)]
        step = step_of(slots, rows, tokens)
        medians = []
        for _ in range(settings.rounds):
            for slot, length in enumerate(lengths):
                session.prefill(Prefill(slot, length, [1], True, context, 1))
            medians.append(median_ms(session, step, settings.seconds))
        print(
            f"{slots}x{rows}{f'+{tokens}' if tokens else ''}: " + ", ".join(f"{ms:.3f}" for ms in medians), flush=True
        )


def median_ms(session: CudaSession, step: Step, seconds: float) -> float:
    """Runs a step over and over, each read while the next one runs; the median of the last two thirds."""
    session.run(step).read()
    last: Outcome | None = None
    times = []
    begin = before = time.perf_counter()
    while before - begin < seconds:
        outcome = session.run(step)
        if last is not None:
            last.read()
            now = time.perf_counter()
            times.append(now - before)
            before = now
        last = outcome
    assert last is not None
    last.read()
    return statistics.median(times[len(times) // 3 :]) * 1e3


if __name__ == "__main__":
    main()
