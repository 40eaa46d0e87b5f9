"""Does `--draft-length auto` find the best draft length? Fixed lengths and the adaptive one, on a GPU, batch by batch.

Random weights of a real shape accept nothing, so acceptance is imposed: each draft survives with one probability while
those before it did. Every arm runs real steps, and counts the tokens that these would have committed. The adaptive
length starts as it does in a server, from step times that are measured at load; it sees the drafts that were drawn.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.random_weights import random_weights
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.engine.ladder import draft_lengths
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.runtime.draft_length import AdaptiveDraftLength
from trtllm_dflash.runtime.step_times import measure
from trtllm_dflash.session.calls import Decode, Prefill
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.step import Drafting

STEPS = 24  # in a round, each starting from the same lengths
SETTLING = 200  # steps whose draws the adaptive length sees before it is timed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", default="1,2,4,8,16,32,64")
    parser.add_argument("--cache-length", type=int, default=1024)
    parser.add_argument("--simulate-acceptance", type=float, default=6.49, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser.parse_args()


class Bench:
    """One session, and the acceptance that is imposed on it."""

    def __init__(self, options: argparse.Namespace, batches: list[int]) -> None:
        spare = 2 * STEPS + 16
        self.length = options.cache_length
        self.config = shape_config(
            options.shape,
            precision="bf16",
            tp=1,
            max_batch=max(batches),
            max_seq_len=self.length + spare,
            chunk=spare,
        )
        device = torch.device("cuda")
        self.session = CudaSession(self.config, random_weights(self.config, 0, device), device, Solo())
        with torch.inference_mode():
            for cache in self.session.caches.values():
                cache.normal_()
        torch.cuda.synchronize()
        self.acceptance = ImposedAcceptance(options.simulate_acceptance, self.config.block_size)

    def rate(self, batch: int, choose: Callable[[], int | None]) -> tuple[float, list[int | None]]:
        """Tokens a second of a round, and the drafts of its steps; None: plain decoding."""
        session = self.session
        for slot in range(batch):
            outcome = session.prefill(Prefill(slot, self.length - 1, [0], True, Drafting.CONTEXT, 1))
        outcome.read()
        tokens, chosen = 0.0, []
        begin = time.perf_counter()
        before = None
        for _ in range(STEPS):
            drafts = choose()
            chosen.append(drafts)
            rows = 1 if drafts is None else drafts + 1
            drafting = Drafting.OFF if drafts is None else Drafting.BLOCK if drafts else Drafting.CONTEXT
            outcome = session.decode(Decode([rows] * batch, drafting, rows, False))
            if before is not None:
                before.read()
            before = outcome
            tokens += batch * self.acceptance.at(rows)
        outcome.read()
        return tokens / (time.perf_counter() - begin), chosen

    def adaptive(self, batch: int, times: dict[tuple[int, int], float]) -> Callable[[], int]:
        """A settled adaptive length, which goes on seeing what is drawn."""
        length, draw, survival = AdaptiveDraftLength(times), random.Random(0), self.acceptance.survival

        def choose() -> int:
            drafts = length.choose(batch)
            accepted = [0] * batch
            for slot in range(batch):
                while accepted[slot] < drafts and draw.random() < survival:
                    accepted[slot] += 1
            length.observe([drafts] * batch, accepted)
            return drafts

        for _ in range(SETTLING):
            choose()
        return choose


def always(drafts: int | None) -> Callable[[], int | None]:
    return lambda: drafts


def main() -> None:
    options = arguments()
    batches = [int(part) for part in options.batch.split(",")]
    bench = Bench(options, batches)
    times = measure(bench.session, draft_lengths(bench.config.block_size))
    lengths = draft_lengths(bench.config.block_size)
    print(
        f"{torch.cuda.get_device_name()}, {options.shape}, {bench.length} cached tokens, acceptance imposed: "
        f"{options.simulate_acceptance:g} tokens a step at K = {lengths[-1]}, "
        f"each draft survives with {bench.acceptance.survival:.4f}"
    )
    print("| batch | plain | " + " | ".join(f"K = {drafts}" for drafts in lengths) + " | auto | of the best | chose |")
    print("|---" * (len(lengths) + 5) + "|")
    rows = []
    for batch in batches:
        arms: dict[str, Callable[[], int | None]] = {"plain": always(None)}
        arms |= {str(drafts): always(drafts) for drafts in lengths}
        arms["auto"] = bench.adaptive(batch, times)
        rates: dict[str, list[float]] = {name: [] for name in arms}
        chosen: list[int | None] = []
        for turn in range(1 + options.rounds):  # the first one may capture
            for name, choose in arms.items():
                rate, drafts = bench.rate(batch, choose)
                if turn:
                    rates[name].append(rate)
                    chosen += drafts if name == "auto" else []
        median = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in median.items() if name != "auto")
        usual = statistics.mode(chosen)
        share = median["auto"] / best
        rows.append(
            {"batch": batch, "tokens_per_second": median, "rounds": rates, "auto_over_best": share, "auto_chose": usual}
        )
        cells = [f"{median[name]:,.0f}" for name in arms]
        print(f"| {batch} | " + " | ".join(cells) + f" | {share:.1%} | {usual} |", flush=True)
    if options.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(bench.session.device),
            "versions": versions(),
            "shape": options.shape,
            "cache_length": bench.length,
            "imposed_tokens_per_step": options.simulate_acceptance,
            "survival": bench.acceptance.survival,
            "step_seconds": [[slots, drafts, seconds] for (slots, drafts), seconds in times.items()],
            "batches": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
