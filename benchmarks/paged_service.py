"""How a service fares with long prompts, long limits and shared beginnings: in process, random weights of a real shape.

Three loads, each with clients that send a request, read the reply to its end and send the next:

- `prompts`: long prompts and short replies. Prompt tokens a second, as a share of what the GPU's GEMM rate allows for
  prompts alone; and the time between two pieces of a reply, 99th percentile over median.
- `capacity`: conversations at once in so many GB of caches, though the engine takes far longer ones.
- `prefix`: prompts that begin alike: time to the first token.

Figures are of what comes after a warm-up, in which each client has sent its first request.

Acceptance is imposed: how many drafts survive is drawn, not measured.
"""

import argparse
import json
import math
import random
import shlex
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.imposed import imposed
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.random_session import random_session
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.rates import measure_rates
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.runtime.request import Update
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.ranks import World


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--loads", default="prompts,capacity,prefix")
    parser.add_argument("--simulate-acceptance", type=float, default=6.49, metavar="TOKENS")
    parser.add_argument("--draft-length", type=int, default=7, help="of capacity")
    parser.add_argument("--chunk", type=int, default=2048, help="of prompts")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=3.0, metavar="SECONDS", help="before: they all begin at once")
    parser.add_argument("--kv-memory", type=float, default=60.0, help="GB, of capacity")
    parser.add_argument("--clients", default="16,96,64", help="of the three loads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser.parse_args()


@dataclass
class Client:
    """Sends requests one after the other until time is up."""

    load: "Load"
    begun: float = 0.0
    times: list[float] = field(default_factory=list)  # of the reply's updates

    def send(self) -> None:
        load = self.load
        load.sent += 1
        self.begun, self.times = time.perf_counter(), []
        params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True, seed=load.sent)
        load.service.submit(load.prompt(), params, self.update)

    def update(self, update: Update) -> None:
        now = time.perf_counter()
        load = self.load
        if update.error is not None:
            load.errors.append(str(update.error))
            load.leave()
            return
        self.times.append(now)
        counts = load.begin <= now <= load.end
        if counts:
            load.tokens += len(update.token_ids)
        if len(self.times) == 1 and self.begun >= load.begin:
            load.first.append(now - self.begun)
        if update.completion is None:
            return
        load.gaps += [b - a for a, b in zip(self.times, self.times[1:], strict=False) if a >= load.begin]
        load.replies += counts
        if now < load.end:
            self.send()
        else:
            load.leave()


class Load:
    """A closed loop of clients on a service."""

    def __init__(self, service: Service, vocabulary: int, prompt_tokens: int, output_tokens: int, shared: int) -> None:
        self.service, self.output_tokens = service, output_tokens
        self._rng, self._vocabulary = random.Random(1), vocabulary
        self._own, self._shared = prompt_tokens - shared, self._random(shared)
        self.sent = self.tokens = self.replies = 0
        self.first: list[float] = []  # seconds to the first token
        self.gaps: list[float] = []
        self.errors: list[str] = []

    def prompt(self) -> list[int]:
        return self._shared + self._random(self._own)

    def _random(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]

    def leave(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    def run(self, clients: int, warm_up: float, seconds: float) -> dict[str, Any]:
        """Runs the loop, the last so many seconds of which count, and to the end of what was begun."""
        self._left, self._done = clients, threading.Event()
        self.begin = time.perf_counter() + warm_up
        self.end = self.begin + seconds
        most = 0
        for _ in range(clients):
            Client(self).send()
        while not self._done.wait(0.02):
            most = max(most, self.service.statistics().running)
        if self.errors:
            raise SystemExit(f"error: a request failed: {self.errors[0]}")
        firsts = sorted(self.first)
        return {
            "clients": clients,
            "most_running": most,
            "requests": self.replies,
            "tokens_per_second": round(self.tokens / seconds, 1),
            "ttft_ms": [round(quantile(firsts, q) * 1e3, 1) for q in (0.5, 0.99)],
            "itl_ms": [round(quantile(sorted(self.gaps), q) * 1e3, 2) for q in (0.5, 0.99)],
        }


def multiplied(config: EngineConfig) -> int:
    """Counts the weights that each row of a prompt is multiplied by: the target's, without embedding and head."""
    shapes = [weight.shape(1, 0) for weight in build_target(config.target).weights() if ".layers." in weight.name]
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def quantile(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)] if ascending else math.nan


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.rates = measure_rates(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)

    def run(
        self, clients: int, prompt: int, output: int, shared: int = 0, draft_length: Any = "auto", **limits: Any
    ) -> dict[str, Any]:
        """Opens an engine with these limits, and runs a load on it."""
        config = shape_config(
            self.options.shape,
            layers=self.options.layers,
            precision="bf16" if self.device.type == "cuda" else "fp32",
            tp=1,
            **{"max_batch": clients, "max_seq_len": prompt + output + 64, "chunk": 512, **limits},
        )
        acceptance = ImposedAcceptance(self.options.simulate_acceptance, config.block_size)
        llm = LLM(random_session(config, self.device, World(1), imposed(acceptance)), None)
        service = llm.service(ServiceSettings(draft_length=draft_length, max_queue=4 * clients))
        try:
            load = Load(service, config.target.vocab_size, prompt, output, shared)
            found = load.run(clients, self.options.warm_up, self.options.seconds)
            counted = service.statistics()
            found |= {
                "operations_a_row": 2 * multiplied(config),
                "pages": llm.session.paging.pages,
                "page_rows": llm.session.paging.rows,
                "preemptions": counted.preemptions,
                "prefix_hits": counted.prefix_hits,
            }
        finally:
            service.close()
            llm.close()
        return found

    def prompts(self, clients: int) -> dict[str, Any]:
        found = self.run(clients, 4096, 256, chunk=self.options.chunk)
        allowed = self.rates.gemm / found["operations_a_row"]
        read = found["requests"] * 4096 / self.options.seconds
        p50, p99 = found["itl_ms"]
        return {
            **found,
            "prompt_tokens_per_second": round(read),
            "gemm_rate_allows": round(allowed),
            "share": round(read / allowed, 3),
            "itl_p99_over_p50": round(p99 / p50, 2),
        }

    def capacity(self, clients: int) -> dict[str, Any]:
        """The same load with a long limit and with a short one."""
        k, memory = self.options.draft_length, int(self.options.kv_memory * 1e9)
        long = {"max_seq_len": 32768, "kv_memory": memory}
        return {
            str(limits["max_seq_len"]): self.run(clients, 1536, 512, draft_length=k, **limits)
            for limits in ({"max_seq_len": 4096}, long)
        }

    def prefix(self, clients: int) -> dict[str, Any]:
        """Prompts of 2,032 tokens that share 2,000."""
        return self.run(clients, 2032, 256, shared=2000)


def main() -> None:
    options = arguments()
    clients = dict(zip(("prompts", "capacity", "prefix"), map(int, options.clients.split(",")), strict=True))
    bench = Bench(options)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(bench.device),
        "versions": versions(),
        "gemm_tflops": round(bench.rates.gemm / 1e12, 1),
    }
    for load in options.loads.split(","):
        record[load] = getattr(bench, load)(clients[load])
        print(load, json.dumps(record[load]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
