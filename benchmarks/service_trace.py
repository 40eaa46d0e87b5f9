"""Where the time of a loaded service lies: its steps, the device's time between them, and slots that stood empty.

    python benchmarks/service_trace.py --loads draft:32,draft:64,plain:32 --output trace.json

N clients that each read a whole reply and send the next request, in process, random weights of a real shape, imposed
acceptance; clients begin one after the other, before the time that counts. Needs a GPU.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.shapes import find_shape, shape_config
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.calls import Step
from trtllm_dflash.session.outcome import Outcome, Packed
from trtllm_dflash.sweep.dataset import random_dataset
from trtllm_dflash.sweep.load import Amount, ClosedLoop, Traits, run_load
from trtllm_dflash.sweep.local_engine import random_llm
from trtllm_dflash.sweep.local_target import LocalTarget
from trtllm_dflash.sweep.summary import Round, summarize

_PROMPTS = 2048
_ROUNDED = 64  # prompt rows


@dataclass
class Ran:
    """A step that was run: host times in seconds, and events on the device."""

    call: Step
    launched: float
    host: float  # the launch itself
    begin: torch.cuda.Event
    end: torch.cuda.Event
    read: float = 0.0


class Traced:
    """A session that notes the steps that it runs; all else is the session's."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.steps: list[Ran] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, call: Step) -> Outcome:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launched = time.monotonic()
        with self._session._stream():
            begin.record()
            outcome: Outcome = self._session.run(call)
            end.record()
        ran = Ran(call, launched, time.monotonic() - launched, begin, end)
        self.steps.append(ran)
        packed = outcome.packed

        def noted() -> Packed:
            tokens: Packed = packed()
            ran.read = time.monotonic()
            return tokens

        outcome.packed = noted  # type: ignore[method-assign]
        return outcome


def main() -> None:
    """Runs each load, prints its table, and writes the record."""
    options = parse()
    loads = [(arm, int(clients)) for arm, _, clients in (load.partition(":") for load in options.loads.split(","))]
    slots, device = max(clients for _, clients in loads), torch.device("cuda")
    config = shape_config(
        options.shape,
        layers=options.layers,
        drafter_precision=options.drafter_precision,
        draft_vocab=options.draft_vocab,
        precision="bf16",
        tp=1,
        max_batch=slots,
        max_seq_len=options.prompt_tokens + options.output_tokens + find_shape(options.shape).block_size,
        chunk=512,
        sampling=False,
    )
    begun = time.monotonic()
    llm = random_llm(config, device, ImposedAcceptance(options.acceptance, config.block_size))
    traced = Traced(llm.session)
    service = Service(traced, llm.intake, ServiceSettings(max_queue=4 * slots))  # type: ignore[arg-type]
    print(f"ready in {time.monotonic() - begun:.1f} s", flush=True)
    about = {"command": shlex.join(["python", *sys.argv]), "machine": machine(device), "versions": versions()}
    found: list[dict[str, Any]] = []
    for number, (arm, clients) in enumerate(loads):
        found.append(asyncio.run(measure(llm, service, traced, arm, clients, number, options)))
        if options.output:
            options.output.write_text(json.dumps({**about, "loads": found}, indent=1) + "\n")
    service.close()
    llm.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--drafter-precision", choices=["fp8"])
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--loads", default="draft:32,draft:64,plain:32", help="plain or draft, and clients, of each")
    parser.add_argument("--acceptance", type=float, default=6.49)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--ramp", type=float, default=2.0, metavar="SECONDS", help="in which clients begin, before")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser.parse_args()


async def measure(
    llm: LLM, service: Service, traced: Traced, arm: str, clients: int, number: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs a load, and prints what its steps were."""
    dataset = random_dataset(_PROMPTS, options.prompt_tokens, llm.config.target.vocab_size, seed=number)
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True, seed=number * _PROMPTS)
    traced.steps = []
    begin = time.monotonic() + options.ramp
    target, load = LocalTarget(llm, service), ClosedLoop(clients, options.ramp)
    traffic = await run_load(target, dataset, load, Amount(seconds=options.seconds), Traits(params, arm))
    torch.cuda.synchronize()
    point = summarize([Round.of(arm, clients, 0, traffic)], 1, [""] * _PROMPTS)
    found: dict[str, Any] = {"arm": arm, "clients": clients, "tokens_per_second": point.output_tokens_per_second}
    for name, spread in (("ttft_ms", point.ttft), ("itl_ms", point.itl)):
        found[name] = [round(spread.p50 * 1e3, 1), round(spread.p99 * 1e3, 1)] if spread else None
    print(f"\n{arm}, {clients} clients: {found['tokens_per_second']:,.0f} tokens/s", end="")
    print(f"; to the first token p50, p99 {found['ttft_ms']} ms; between tokens {found['itl_ms']} ms\n")
    steps = [ran for ran in traced.steps if begin <= ran.launched <= begin + options.seconds]
    counted, table = where_time_goes(steps, clients)
    print(table, flush=True)
    return {**found, **counted}


def where_time_goes(steps: list[Ran], clients: int) -> tuple[dict[str, Any], str]:
    """Sums up steps by rows, drafts and prompt rows; returns the figures, and a table of them."""
    device = [ran.begin.elapsed_time(ran.end) for ran in steps]  # ms
    gaps = [a.end.elapsed_time(b.begin) for a, b in pairwise(steps)] + [0.0]
    kinds: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, ran in enumerate(steps):
        prompt = sum(len(piece.token_ids) for piece in ran.call.pieces)
        rows = ran.call.decode[0][1] if ran.call.decode else 0
        kinds[rows, ran.call.block - 1, -(-prompt // _ROUNDED) * _ROUNDED].append(i)
    total = sum(device) + sum(gaps)
    lines = ["| rows a slot | drafts | prompt rows | steps | share of the time | ms | slots that decode | gap us |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    record = []
    for (rows, drafts, prompt), at in sorted(kinds.items(), key=lambda kind: -sum(device[i] for i in kind[1])):
        ms = statistics.median(device[i] for i in at)
        share = sum(device[i] + gaps[i] for i in at) / total
        decoding = statistics.mean(len(steps[i].call.decode) for i in at)
        gap = statistics.mean(gaps[i] for i in at) * 1e3
        record.append(
            {"rows": rows, "drafts": drafts, "prompt_rows": prompt, "steps": len(at), "share": round(share, 4)}
            | {"ms": round(ms, 3), "decoding": round(decoding, 2), "gap_us": round(gap, 1)}
        )
        lines.append(
            f"| {rows} | {drafts} | {prompt} | {len(at)} | {share:.1%} | {ms:.2f} | {decoding:.1f} | {gap:.0f} |"
        )
    decoding = sum(len(ran.call.decode) * ms for ran, ms in zip(steps, device, strict=True)) / total
    reading = sum(len(ran.call.pieces) * ms for ran, ms in zip(steps, device, strict=True)) / total
    host = sorted(ran.host * 1e3 for ran in steps)
    # Of the time that the step in between computes: what the host has not used when it launches is left.
    taken = sorted((after.launched - ran.read) * 1e3 for ran, after in zip(steps, steps[2:], strict=False) if ran.read)
    counted = {
        "slots_decoding": round(decoding, 2),
        "slots_reading": round(reading, 2),
        "slots_empty": round(clients - decoding - reading, 2),
        "gaps_share": round(sum(gaps) / total, 5),
        "launch_ms": [round(quantile(host, q), 2) for q in (0.5, 0.99)],
        "outcome_to_launch_ms": [round(quantile(taken, q), 2) for q in (0.5, 0.99)],
    }
    lines += ["", ", ".join(f"{name} {value}" for name, value in counted.items())]
    return {**counted, "kinds": record}, "\n".join(lines)


def quantile(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)] if ascending else float("nan")


if __name__ == "__main__":
    main()
