"""Quantized weights: what a step takes with them, and what acceptance is left. Prints Markdown, and writes JSON.

Steps are of a real shape with random weights, the precisions by turns in one run. Acceptance is the shipped pair's, of
checkpoints that `trtllm-dflash quantize` made.

    trtllm-dflash quantize --model tiny --format fp8 --output quantized/tiny-fp8
    trtllm-dflash quantize --model tiny --format nvfp4 --output quantized/tiny-nvfp4
    python benchmarks/quantized.py --shape qwen3-8b --batch 1,8 --checkpoints quantized/tiny-fp8 quantized/tiny-nvfp4 \\
        --json quantized.json
"""

import argparse
import json
import shlex
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.step import StepBench, StepBenchSettings, open_bench
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.device import pick_device

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"

#: Precision of the target's matrices and of the drafter's.
STEPS = {"unquantized": (None, None), "target FP8": ("fp8", None), "both FP8": ("fp8", "fp8")}


@dataclass(frozen=True)
class Row:
    """A kind of step in one precision."""

    precision: str
    step: str
    batch: int
    rows: int
    seconds: list[float]  # by round
    floor: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    """Measures, prints, and writes."""
    arguments = parse_arguments()
    device = pick_device(arguments.device)
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(device),
        "versions": versions(),
    }
    if arguments.shape is not None:
        rows = time_steps(arguments)
        report["steps"] = [{**vars(row), "median_seconds": row.median} for row in rows]
        print("\n".join(steps_table(rows)), flush=True)
    if arguments.checkpoints:
        report["acceptance"] = measure_acceptance(arguments)
        print("\n".join(acceptance_table(report["acceptance"])), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="to time: qwen3-8b, tiny, ...; none: no steps")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--rows", default="16", help="of a drafted step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--cache-length", type=int, default=1024)
    parser.add_argument("--checkpoints", nargs="*", type=Path, default=[], help="folders that `quantize` wrote")
    parser.add_argument("--kv", nargs="*", default=["auto"], help="caches, as build's --kv: auto, fp8, engine")
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# -- steps -------------------------------------------------------------------------------------------------------------


def time_steps(arguments: argparse.Namespace) -> list[Row]:
    """Every precision's steps, a round of each in turn."""
    common = {"shape": arguments.shape, "batch": arguments.batch, "rows": arguments.rows, "device": arguments.device}
    common |= {"cache_length": arguments.cache_length, "steps": arguments.steps, "rounds": 1}
    with ExitStack() as stack:
        benches: dict[str, StepBench] = {}
        for name, (target, drafter) in STEPS.items():
            given = {**common, "precision": target or "auto", "drafter_precision": drafter}
            settings = StepBenchSettings.model_validate(given)
            bench = stack.enter_context(open_bench(settings))
            assert bench is not None, "one rank"
            benches[name] = bench
        for _ in range(arguments.rounds):
            for bench in benches.values():
                bench.run()
        rows: dict[tuple[str, str, int], Row] = {}
        for name, bench in benches.items():
            for line in bench.report.lines:
                key = (name, line.arm.name, line.batch)
                # Floors by one session's rates: the first's.
                floor = sum(work.seconds(benches["unquantized"].report.rates) for work in line.work)
                row = rows.setdefault(key, Row(name, line.arm.name, line.batch, line.arm.rows, [], floor))
                row.seconds.extend(line.rounds)
    return sorted(rows.values(), key=lambda row: (row.batch, row.step != "plain", list(STEPS).index(row.precision)))


def steps_table(rows: list[Row]) -> list[str]:
    """Times, and how they stand to BF16's and to plain steps of their own precision."""
    lines = [
        "| batch | step | rows | matrices | ms | unquantized / this | this / plain | floor ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_key = {(row.precision, row.step, row.batch): row for row in rows}
    for row in rows:
        base, plain = by_key["unquantized", row.step, row.batch], by_key[row.precision, "plain", row.batch]
        cells = [row.batch, row.step, row.rows, row.precision, f"{row.median * 1e3:.3f}"]
        cells += [f"{base.median / row.median:.2f}x", f"{row.median / plain.median:.2f}", f"{row.floor * 1e3:.3f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


# -- acceptance --------------------------------------------------------------------------------------------------------


def measure_acceptance(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination of the shipped checkpoints and the given ones."""
    kinds = read_prompts(arguments.prompts)
    prompts: list[Any] = [[{"role": "user", "content": text}] for texts in kinds.values() for text in texts]
    params = SamplingParams(max_tokens=arguments.max_tokens)
    found = []
    limits = {"device": arguments.device, "max_batch": 8, "max_seq_len": 2048}
    checkpoints = (PAIR, *arguments.checkpoints)
    for kv, target in product(arguments.kv, checkpoints):
        for drafter in checkpoints:
            with LLM.from_pretrained(target / "target", drafter / "drafter", kv=kv, **limits) as llm:
                drafted = llm.generate(prompts, params)
                plain = llm.generate(prompts, params, draft=False)
                models = {"target": llm.config.target, "drafter": llm.config.drafter}
                precisions = {
                    role: model.linear_precision.value if model and model.linear_precision else "as shipped"
                    for role, model in models.items()
                }
                tokens = sum(len(reply.token_ids) - 1 for reply in drafted)
                same = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
                found.append(
                    {
                        **precisions,
                        "rest": llm.config.precision,
                        "caches": llm.config.kv or llm.config.precision,
                        "acceptance_length": tokens / sum(reply.steps for reply in drafted),
                        "replies": len(drafted),
                        "replies_equal_to_plain": same,
                    }
                )
    return found


def acceptance_table(found: list[dict[str, Any]]) -> list[str]:
    """A row for each combination."""
    lines = [
        "",
        "| target | drafter | the rest | caches | acceptance length | replies equal to plain |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        equal = f"{row['replies_equal_to_plain']} of {row['replies']}"
        length = f"{row['acceptance_length']:.2f}"
        cells = row["target"], row["drafter"], row["rest"], row["caches"], length, equal
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
