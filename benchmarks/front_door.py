"""Tokens a second that reach clients in process, over Triton's gRPC and over the OpenAI API, of one engine in one run.

    python benchmarks/front_door.py --shape qwen3-8b --acceptance 6.49 --output benchmarks/results/front-door-h200.json
    python benchmarks/front_door.py --shape qwen3-8b --acceptance 6.49 --step-ms 5 --clients 32,64  # no GPU needed
    python benchmarks/front_door.py --clients 1,4                                      # the shipped pair, on the CPU

A shape has random weights, and its acceptance is imposed; the tokenizer is made up, of as many tokens as the shape's.
With --step-ms a step computes nothing and takes that long: what is left is the host's work. Each client sends a prompt
and reads exactly --output-tokens; tokens count that arrive within --seconds. The clients of a server are processes of
their own, and so is Triton; in process they are callbacks.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from shape_engine import open_engine, write_engine

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.repository import DeploySettings, deploy
from trtllm_dflash.serving.serve import serving
from trtllm_dflash.serving.server import RANK_MODEL
from trtllm_dflash.session.threads import limit_threads
from trtllm_dflash.sweep.dataset import Dataset, Message, Sample, read_dataset
from trtllm_dflash.sweep.load import Amount, ClosedLoop, Target, Traffic, Traits, run_load
from trtllm_dflash.sweep.local_target import LocalTarget
from trtllm_dflash.sweep.summary import Point, Round, summarize

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
DOORS = ("in process", "gRPC", "OpenAI")

_LEAD = 0.5  # seconds in which every process learns when to begin
_WARM_UP = 2.0
_SAMPLES = 1 << 14
_BLOCK = 512  # samples between the first ones of two loads: no prompt comes again while its rows are in the caches

#: What Triton loads instead of the served model.
_MODEL = '''"""The served model, on an engine without a checkpoint."""

import sys

sys.path.insert(0, {folder!r})

from shape_engine import open_engine
from trtllm_dflash.serving.engine_model import EngineModel


class TritonPythonModel(EngineModel):
    def open(self, engine, device, kernels, draft_tree):
        return open_engine(engine, device, kernels)
'''


@dataclass(frozen=True)
class Plan:
    """The load: the same at every door."""

    dataset: Dataset
    params: SamplingParams
    seconds: float
    clients: tuple[int, ...]
    generators: int
    blocks: Iterator[int]  # first samples of loads


@dataclass(frozen=True)
class Load:
    """Clients that each send their next request when they have their reply.

    Attributes:
        first: index of the first sample.
    """

    dataset: Dataset
    params: SamplingParams
    clients: int
    amount: Amount
    first: int

    async def put_on(self, target: Target) -> Traffic:
        """Runs them."""
        traits = Traits(self.params, "served", self.first)
        return await run_load(target, self.dataset, ClosedLoop(self.clients), self.amount, traits)


@dataclass(frozen=True)
class Server:
    """The address of a door, and the engine whose tokenizer its clients use."""

    door: str
    url: str
    engine: Path

    def target(self) -> Target:
        """Makes the sweep's client of it."""
        if self.door == "OpenAI":
            from trtllm_dflash.sweep.openai_target import OpenAITarget

            return OpenAITarget(self.url)
        from trtllm_dflash.sweep.triton_target import TritonTarget

        return TritonTarget(self.url, "ensemble", *prompt_text(self.engine))


@cache
def prompt_text(engine: Path) -> tuple[Callable[[list[Message]], str], Callable[[str], int] | None]:
    """Loads an engine's tokenizer, once in each process."""
    from trtllm_dflash.sweep.triton_target import chat_text

    return chat_text(engine)


def main() -> None:
    """Measures every door, prints the table, and writes the record."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="front-door-") as folder:
        engine, plan = prepare(Path(folder) / "engine", arguments)
        points = measure_local(engine, plan, arguments)
        points += measure_servers(engine, Path(folder) / "repository", plan, arguments)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: str(value) for name, value in vars(arguments).items() if name != "output"},
        "points": [point.model_dump(mode="json") for point in points],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(points))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="as in `sweep`; by default the shipped pair")
    parser.add_argument("--acceptance", type=float, default=6.49, help="--shape: tokens a step to impose")
    parser.add_argument("--step-ms", type=float, help="--shape: milliseconds of a step that computes nothing")
    parser.add_argument("--clients", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32, 64))
    parser.add_argument("--doors", type=lambda text: tuple(text.split(",")), default=DOORS, help=", ".join(DOORS))
    parser.add_argument("--prompt-tokens", type=int, default=256, help="--shape")
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--draft-length", default="auto")
    parser.add_argument("--generators", type=int, default=min(8, max(1, (os.cpu_count() or 1) // 2)), help="processes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.doors) - set(DOORS)
    if unknown:
        parser.error(f"--doors: {', '.join(sorted(unknown))}; there are {', '.join(DOORS)}")
    return arguments


def prepare(engine: Path, arguments: argparse.Namespace) -> tuple[Path, Plan]:
    """Makes the engine directory and the load."""
    slots = max(arguments.clients)
    if arguments.shape is None:
        pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
        build(BuildSettings.model_validate({**pair, "max_batch": slots, "max_seq_len": 2048}), engine)
        dataset = read_dataset().shuffled(0)
    else:
        length = arguments.prompt_tokens + arguments.output_tokens + 16
        write_engine(engine, arguments.shape, arguments.acceptance, arguments.step_ms, arguments.device, slots, length)
        dataset = random_letters(arguments.prompt_tokens)
    params = SamplingParams(max_tokens=arguments.output_tokens, ignore_eos=True)
    return engine, Plan(dataset, params, arguments.seconds, arguments.clients, arguments.generators, count(step=_BLOCK))


def random_letters(tokens: int) -> Dataset:
    """Draws prompts of random letters, each of which the made-up tokenizer encodes as one token."""
    chance = random.Random(0)
    texts = ("".join(chance.choices(string.ascii_lowercase, k=tokens)) for _ in range(_SAMPLES))
    return Dataset(f"letters-{tokens}", tuple(Sample((text,)) for text in texts))


def measure_local(engine: Path, plan: Plan, arguments: argparse.Namespace) -> list[Point]:
    """Measures the engine in this process."""
    if "in process" not in arguments.doors:
        return []
    with open_local(engine, arguments) as llm:
        service = llm.service(ServiceSettings(draft_length=arguments.draft_length, max_queue=4 * max(plan.clients)))
        try:
            return [asyncio.run(local_point(llm, service, plan, clients)) for clients in plan.clients]
        finally:
            service.close()


def open_local(engine: Path, arguments: argparse.Namespace) -> LLM:
    """Opens the engine of `prepare`."""
    limit_threads(read_config(engine))  # as inside Triton
    if arguments.shape is None:
        return LLM.load(engine, arguments.device, prepare=False)
    return open_engine(engine, arguments.device)


async def local_point(llm: LLM, service: Service, plan: Plan, clients: int) -> Point:
    """Warms up and measures one number of clients."""
    target = LocalTarget(llm, service)
    parts = []
    for amount in (Amount(seconds=_WARM_UP), Amount(seconds=plan.seconds)):
        load = Load(plan.dataset, plan.params, clients, amount, next(plan.blocks))
        parts = [await load.put_on(target)]
    return summary("in process", clients, plan, parts)


def measure_servers(engine: Path, repository: Path, plan: Plan, arguments: argparse.Namespace) -> list[Point]:
    """Measures the doors of one server."""
    points = []
    with served(engine, repository, arguments) as endpoints:
        urls = {"gRPC": endpoints.grpc, "OpenAI": endpoints.openai or ""}
        with ProcessPoolExecutor(plan.generators, get_context("spawn")) as generators:
            for door in [name for name in arguments.doors if name in urls]:
                server = Server(door, urls[door], engine)
                points += [server_point(server, plan, clients, generators) for clients in plan.clients]
    return points


def server_point(server: Server, plan: Plan, clients: int, generators: ProcessPoolExecutor) -> Point:
    """Warms up and measures one number of clients, spread over the generators."""
    parts: list[Traffic] = []
    for amount in (Amount(seconds=_WARM_UP), Amount(seconds=plan.seconds)):
        begin = time.monotonic() + _LEAD
        shares = split(clients, plan.generators)
        loads = [Load(plan.dataset, plan.params, share, amount, next(plan.blocks)) for share in shares]
        parts = list(generators.map(generate, [server] * len(loads), loads, [begin] * len(loads)))
    return summary(server.door, clients, plan, parts)


@contextmanager
def served(engine: Path, repository: Path, arguments: argparse.Namespace) -> Iterator[Endpoints]:
    """Serves the engine behind Triton and the gateway, on any free ports."""
    values = {"device": arguments.device, "draft_length": arguments.draft_length}
    deploy(engine, repository, DeploySettings.model_validate(values))
    if arguments.shape is not None:
        (repository / RANK_MODEL / "1" / "model.py").write_text(_MODEL.format(folder=str(Path(__file__).parent)))
    anywhere = Endpoints(http_port=0, grpc_port=0, metrics_port=0, openai_port=0)
    with serving(engine, DeploySettings(), anywhere, repository=repository) as running:
        yield running.endpoints


def split(clients: int, processes: int) -> list[int]:
    """Shares clients out among processes; none has none."""
    shares = [clients // processes + (number < clients % processes) for number in range(processes)]
    return [share for share in shares if share]


def generate(server: Server, load: Load, begin: float) -> Traffic:
    """Puts a load on a server, from a moment of `time.monotonic` on; in a process of its own."""

    async def run() -> Traffic:
        async with server.target().opened() as target:
            await target.check(("served",), load.params)
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            return await load.put_on(target)

    return asyncio.run(run())


def summary(door: str, clients: int, plan: Plan, parts: list[Traffic]) -> Point:
    """Summarizes what all generators saw."""
    records = [record for part in parts for record in part.records]
    traffic = Traffic(parts[0].begin, records, plan.seconds)
    categories = [sample.category for sample in plan.dataset.samples]
    return summarize([Round.of(door, clients, 0, traffic)], 1, categories)


def table(points: list[Point]) -> str:
    """Makes the table: a line for each door and number of clients."""
    lines = ["| clients | door | tok/s | of in process | tok/s/user | TTFT p50, p99 ms | errors |"]
    lines.append("|---|---|---|---|---|---|---|")
    local = {point.load: point.output_tokens_per_second for point in points if point.arm == "in process"}
    for point in sorted(points, key=lambda point: (point.load, DOORS.index(point.arm))):
        rate, base = point.output_tokens_per_second, local.get(point.load)
        share = f"{rate / base:.0%}" if base else ""
        ttft = f"{point.ttft.p50 * 1e3:.0f}, {point.ttft.p99 * 1e3:.0f}" if point.ttft else ""
        user = f"{point.tokens_per_second_per_user:.0f}" if point.tokens_per_second_per_user else ""
        errors = sum(point.errors.values())
        lines.append(f"| {point.load:g} | {point.arm} | {rate:,.0f} | {share} | {user} | {ttft} | {errors} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
