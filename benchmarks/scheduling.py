"""Times the host's work for a step: launching it and settling its outcome, on a session that answers at once.

python benchmarks/scheduling.py --slots 64 --output benchmarks/results/scheduling.json
"""

import argparse
import gc
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.draft_length import AdaptiveDraftLength
from trtllm_dflash.runtime.request import SamplingParams, Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Prepare, Step
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.session import Session

LENGTH, PAGE_ROWS, NODES, END = 4096, 64, 15, 151645  # Qwen3's end token
ACCEPTED = (0, 1, 3, 5, 7, 9, 15)


class Answers:
    """A session whose outcomes are there before it is asked: any tokens, of any number."""

    def __init__(self, slots: int, tree: int) -> None:
        asked: dict[str, Any] = {"precision": "bf16", "tp": 1, "max_batch": slots, "max_seq_len": LENGTH, "chunk": 512}
        self.config = shape_config("qwen3-8b", **asked).model_copy(update={"draft_tree": tree})
        width = -(-self.config.cache_length // PAGE_ROWS)
        self.limits = StepLimits(pieces=8, prompt_rows=8192, mixes=True)
        self.paging = Paging(slots * width, PAGE_ROWS, width)
        self.choice = SimpleNamespace(labels={})
        self.ahead = 1
        chance = random.Random(0)
        self._accepted = [[chance.choice(ACCEPTED) for _ in range(slots)] for _ in range(50)]
        self._count = 0

    def prepare(self, call: Prepare) -> None:
        """Does nothing."""

    def prompt_room(self, step: Step, pieces: list[int]) -> int:
        return sum(pieces)

    def run(self, step: Step) -> Outcome:
        """Answers with as many tokens as a step may give; of trees with ranks, as a captured step does."""
        self._count += 1
        most = max((rows for _, rows in step.decode), default=1)
        drawn = self._accepted[self._count % len(self._accepted)]
        accepted = [min(count, rows - 1) for count, (_, rows) in zip(drawn, step.decode, strict=False)]
        ranks = most - 1 if self.config.draft_tree else 0
        told = [(count, min(count, ranks)) for count in accepted + [0] * len(step.pieces)]
        decided = [[count] + [7] * most + [1] * some + [0] * (ranks - some) for count, some in told]
        return Outcome(torch.tensor(decided, dtype=torch.int32), first_rank=1 + most if ranks else 0)


def times(slots: int, draft: bool, tree: int, rounds: int) -> list[float]:
    """Seconds of this thread in each step of so many running sequences, without the session's own."""
    chance = random.Random(1)
    session = Answers(slots, tree)
    known = {(count, drafts): 1.0 for count in (1, slots) for drafts in (0, session.config.block_size - 1)}
    scheduler = Scheduler(cast(Session, session), draft, AdaptiveDraftLength(known))
    for _ in range(slots):
        prompt = [chance.randrange(1000) for _ in range(256)]
        params = SamplingParams(max_tokens=3500, ignore_eos=True)
        scheduler.submit(Sequence(prompt, params, 3500, frozenset([END])))
    while any(stay.rows < stay.prompt for stay in scheduler._slots) or len(scheduler._slots) < slots:
        scheduler.step()
    found = []
    run = session.run
    inside = 0.0

    def timed(step: Step) -> Outcome:
        nonlocal inside
        begin = time.thread_time()
        outcome = run(step)
        inside = time.thread_time() - begin
        return outcome

    session.run = timed  # type: ignore[method-assign]
    for _ in range(rounds):
        begin = time.thread_time()
        for sequence in scheduler.step():
            del sequence
        found.append(time.thread_time() - begin - inside)
    assert len(scheduler._slots) == slots, "some have ended: fewer rounds"
    return found


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as `EngineModel` does: else one step in some hundred looks through all of torch for garbage
    rows = []
    for slots in arguments.slots:
        for way, draft, tree in (("chain", True, 0), ("tree", True, NODES), ("plain", False, 0)):
            seconds = times(slots, draft, tree, arguments.rounds)
            median, mean = statistics.median(seconds), statistics.fmean(seconds)
            row = {
                "slots": slots,
                "way": way,
                "median_us": round(1e6 * median, 1),
                "mean_us": round(1e6 * mean, 1),
            }
            rows.append(row)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "steps": rows,
    }
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
