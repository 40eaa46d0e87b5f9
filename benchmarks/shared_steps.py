"""Times drafted steps whose slots share their rows beside those that give each its own, in one process, on a GPU.

    python benchmarks/shared_steps.py --output shared-steps.json

Random weights of a published shape. What is accepted is imposed: of slot i each draft survives with a chance of its own
once those before it have, from --low to --high over the slots, and the drafter's probabilities are these chances. Both
ways take turns; tokens are those that the steps commit.
"""

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.bench.imposed import draw_accepted
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.random_session import check_kernels, fill_caches, random_session
from trtllm_dflash.bench.step import StepBenchSettings, make_plan
from trtllm_dflash.ops.base import Acceptance, Ops
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.session.calls import Piece, Prepare, SlotSampling, Step
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.ranks import World
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.torch_session import SlotAccept
from trtllm_dflash.step import Drafting, Judgement, StepInputs, accept_equals

Tensor = torch.Tensor


def spread(low: float, high: float) -> SlotAccept:
    """Imposes a chance of its own on each slot's drafts, from low to high, and tells it."""

    def of(slots: SlotTensors) -> Judgement:
        chances = torch.linspace(low, high, len(slots.seed), device=slots.seed.device)

        def accept(ops: Ops[Tensor], inputs: StepInputs[Tensor], target_ids: Tensor) -> Acceptance[Tensor]:
            assert isinstance(ops, CudaOps)
            if target_ids.numel() == len(inputs.start):
                return accept_equals(ops, inputs, target_ids)
            here = ops.slots(inputs.start)
            accepted = draw_accepted(slots.seed[here], inputs.start, chances[here], slots.block)
            return ops.acceptance(accepted, target_ids, inputs.logit_rows, inputs.row_count)

        def foretell(ops: Ops[Tensor], inputs: StepInputs[Tensor], log_probs: Tensor) -> Tensor:
            assert isinstance(ops, CudaOps)
            return chances[ops.drafting_slots].log()[None]

        return Judgement(accept, foretell)

    return of


def run_round(
    session: Session, batch: int, drafts: int, shares: bool, length: int, steps: int, turn: int
) -> tuple[float, int]:
    """Times so many steps: seconds of each, and the tokens that all of them commit, other ones in each turn."""
    most = session.config.block_size if shares else drafts + 1
    share = batch * (drafts + 1) if shares else 0
    begin: dict[str, Any] = {"drafting": Drafting.BLOCK, "block": drafts + 1, "sampled": False, "chances": shares}
    for slot in range(batch):
        piece = Piece(slot, length, [0], True, SlotSampling(seed=batch * turn + slot))
        outcome = session.run(Step([], [piece], **begin))
    step = Step([(slot, most) for slot in range(batch)], [], share=share, **begin)
    launched: deque[Outcome] = deque()
    read: list[float] = []
    tokens = 0
    for left in reversed(range(steps)):
        launched.append(session.run(step))
        while len(launched) > (session.ahead if left else 0):
            outcome = launched.popleft()
            committed = sum(len(ids) for ids in outcome.read()[:batch])
            tokens += committed if read else 0
            read.append(time.perf_counter())
    return (read[-1] - read[0]) / (len(read) - 1), tokens


def main() -> None:
    """Prints a line for each batch and number of drafts, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", default="32")
    parser.add_argument("--drafts", default="7", help="of each slot, or of a slot on average")
    parser.add_argument("--low", type=float, default=0.70)
    parser.add_argument("--high", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--cache-length", type=int, default=1024)
    parser.add_argument("--light", action="store_true", help="the drafter in FP8, with an LM head over 32,768 tokens")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    batches, lengths = ([int(x) for x in given.split(",")] for given in (asked.batch, asked.drafts))
    light: dict[str, Any] = {"drafter_precision": "fp8", "draft_vocab": 32768} if asked.light else {}
    settings = StepBenchSettings(shape=asked.shape, batch=asked.batch, cache_length=asked.cache_length, **light)
    device = torch.device("cuda")
    config = make_plan(settings, device).config
    config = config.model_copy(update={"max_seq_len": asked.cache_length + (asked.steps + 2) * config.block_size})
    check_kernels(config, device, "auto")
    world = World(1)
    with world.together():
        session = random_session(config, device, world, spread(asked.low, asked.high))
    fill_caches(session)
    for shares in (False, True):
        session.prepare(Prepare(tuple(lengths), sampled=False, shares=shares))
    found: list[dict[str, Any]] = []
    for batch in batches:
        for drafts in lengths:
            rounds: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
            for turn in range(1 + asked.rounds):
                for shares in (False, True) if turn % 2 else (True, False):
                    of = batch, drafts, shares, asked.cache_length, asked.steps, turn
                    rounds[shares].append(run_round(session, *of))
            ways = {}
            for shares, name in ((False, "own"), (True, "shared")):
                seconds = statistics.median(each for each, _ in rounds[shares][1:])
                tokens = sum(n for _, n in rounds[shares][1:]) / (asked.rounds * (asked.steps - 1))
                ways[name] = {"seconds": seconds, "tokens_a_step": tokens, "tokens_per_second": tokens / seconds}
            own, shared = ways["own"], ways["shared"]
            over = {key: shared[key] / own[key] for key in own}
            found.append({"batch": batch, "drafts": drafts, **ways, "shared_over_own": over})
            print(
                f"batch {batch}, {drafts} drafts: {1e3 * own['seconds']:.3f} and {1e3 * shared['seconds']:.3f} ms "
                f"({over['seconds']:.3f}), {own['tokens_a_step']:.1f} and {shared['tokens_a_step']:.1f} tokens "
                f"({over['tokens_a_step']:.3f}), {own['tokens_per_second']:,.0f} and "
                f"{shared['tokens_per_second']:,.0f} tokens/s ({over['tokens_per_second']:.3f})",
                flush=True,
            )
    record = {"machine": machine(device), "versions": versions(), "shape": asked.shape, "light_drafter": asked.light}
    record |= {"chances": [asked.low, asked.high], "cache_length": asked.cache_length, "steps": found}
    session.close()
    if asked.output:
        asked.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
