"""Serves the shipped pair for minutes to clients that misbehave, and checks every finished text.

Clients ask with mixed prompts, lengths and sampling; some leave in the middle, some send what must be refused, some
have deadlines; now and then the server is killed and started again. The engine has fewer pages than its slots need, so
that requests are preempted, and half of the prompts share their first pages. What is counted: outcomes, texts that
differ from what the same engine gives in process alone (there must be none), preemptions, shared prefixes, slots and
pages in use and the memory of the server's processes.

    python benchmarks/soak.py --requests 2000 --minutes 30 --output benchmarks/results/soak.json
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.cost.memory import cache_bytes
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.errors import DFlashError, QueueFullError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.serving.client import TokenRequest, TritonClient
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.repository import DeploySettings
from trtllm_dflash.serving.serve import Serving, serving

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
TEXTS = [text for kind in read_prompts(4).values() for text in kind]
RULES = " ".join(TEXTS)[:900]  # what every second prompt begins with
TOKENS = (1, 4, 16, 48, 160)
SLOTS = 8
PAGE_ROWS = 64
PAGES = 20  # for four conversations here, or a few more that share their first pages
BAD: tuple[dict[str, Any], ...] = (
    {"token_ids": []},
    {"token_ids": [10**6]},
    {"token_ids": [5] * 5000},
    {"token_ids": [5], "temperature": -1.0},
    {"token_ids": [5], "temperature": float("nan")},
    {"token_ids": [5], "top_p": 7.0},
    {"token_ids": [5], "max_tokens": -3},
)


METRICS = {
    "slots": "slots_in_use",
    "pages": "pages_used",
    "preemptions": "preemptions_total",
    "prefix_hits": "prefix_hits_total",
}


class Soak:
    """The clients, and what they have seen.

    Args:
        until: when they end.
        most: requests after which they end.
    """

    def __init__(
        self,
        url: str,
        metrics_url: str,
        expected: dict[tuple[int, int, int], str],
        llm: LLM,
        until: float,
        most: float,
    ) -> None:
        self.url, self.metrics_url, self.expected, self.llm = url, metrics_url, expected, llm
        self.until, self.most = until, most
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.down = asyncio.Event()  # while the server is away, no error is held against it

    @property
    def goes_on(self) -> bool:
        """Whether there are more requests to send."""
        return time.monotonic() < self.until and self.outcomes.total() < self.most

    async def client(self, seed: int) -> None:
        """One client after another, each in its own way, on one channel."""
        chance = random.Random(seed)
        triton = TritonClient(self.url)
        try:
            while self.goes_on:
                manner = chance.choices(["reads", "leaves", "poison", "deadline"], [70, 15, 10, 5])[0]
                was_down = self.down.is_set()
                try:
                    outcome = await asyncio.wait_for(self._ask(triton, chance, manner), 60)
                except asyncio.TimeoutError:
                    outcome = "hung"
                except DFlashError as error:
                    away = was_down or self.down.is_set()
                    outcome = f"{manner}: {'server away' if away else type(error).__name__}"
                    if away or isinstance(error, QueueFullError):
                        await asyncio.sleep(chance.uniform(0.2, 0.6))
                self.outcomes[outcome] += 1
        finally:
            await triton.close()

    async def _ask(self, triton: TritonClient, chance: random.Random, manner: str) -> str:
        prompt, kind = chance.randrange(len(TEXTS)), chance.randrange(len(TOKENS))
        sampled = chance.randrange(2)
        request = TokenRequest(
            token_ids=self.llm.encode(conversation(prompt)),
            params=parameters(kind, sampled),
            draft=chance.random() < 0.8,
            priority=chance.choice([0, 0, 1, 200]),
            deadline=0.05 if manner == "deadline" else None,
        )
        if manner == "poison":
            fields = dict(chance.choice(BAD))
            ids = fields.pop("token_ids")
            params = SamplingParams.model_construct(**{**request.params.model_dump(), **fields})
            request = TokenRequest(ids, params)
        text = ""
        stream = triton.stream(request)
        async for piece in stream:
            text += piece.text
            if manner == "leaves":
                await stream.aclose()
                return "left"
        if manner == "poison":
            self.wrong.append(f"served: {request}")
        elif text != self.expected[prompt, kind, sampled]:
            self.wrong.append(f"prompt {prompt}, kind {kind}, sampled {sampled}: {text!r}")
        return "read to the end"

    def metric(self, name: str) -> float:
        """A metric without labels of its own."""
        with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name + "{") or line.startswith(name + " "):
                    return float(line.rsplit(" ", 1)[1])
        return float("nan")


def conversation(prompt: int) -> list[dict[str, str]]:
    """Makes a prompt: every second one with the rules before it."""
    rules = [{"role": "system", "content": RULES}] if prompt % 2 else []
    return [*rules, {"role": "user", "content": TEXTS[prompt]}]


def parameters(kind: int, sampled: int) -> SamplingParams:
    """One of a few ways to ask, so that the right text can be known beforehand."""
    chosen: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": kind} if sampled else {}
    return SamplingParams(max_tokens=TOKENS[kind], **chosen)


def expected_texts(llm: LLM) -> dict[tuple[int, int, int], str]:
    """What every prompt gives alone, in this process."""
    texts = {}
    for prompt in range(len(TEXTS)):
        for sampled in (0, 1):
            for kind in range(len(TOKENS)):
                (reply,) = llm.generate([conversation(prompt)], parameters(kind, sampled))
                texts[prompt, kind, sampled] = str(reply.text)
    return texts


def memory(pid: int) -> float:
    """Resident MB of a process and all below it."""
    total = 0.0
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            status = Path(f"/proc/{one}/status").read_text()
            waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except (OSError, ValueError):
            continue
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0) / 1024
    return total


async def soak_one_life(soak: Soak, running: Serving, clients: int, seed: int, record: list[dict[str, Any]]) -> None:
    """All clients until they end, noting memory and requests every few seconds."""
    tasks = [asyncio.create_task(soak.client(seed * 1000 + i)) for i in range(clients)]
    begin = time.monotonic()
    while any(not task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=5)
        if not soak.down.is_set():
            running.server.check()
        try:
            counts = {
                name: await asyncio.to_thread(soak.metric, f"dflash_{metric}") for name, metric in METRICS.items()
            }
        except OSError:
            continue
        point = {"seconds": round(time.monotonic() - begin), "requests": soak.outcomes.total()}
        record.append({**point, **counts, "megabytes": round(memory(running.server.pid))})
    await asyncio.gather(*tasks)


def build_engine(folder: Path) -> None:
    """Builds the shipped pair with a page size and memory for few pages."""
    pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
    limits = {"precision": "fp32", "max_batch": SLOTS, "max_seq_len": 768, "page_size": PAGE_ROWS}
    build(BuildSettings.model_validate({**pair, **limits}), folder)
    gigabytes = 1.01 * cache_bytes(read_config(folder), Paging(PAGES, PAGE_ROWS, width=2)) / GB
    build(BuildSettings.model_validate({**pair, **limits, "kv_memory": gigabytes}), folder, force=True)


def main() -> None:
    """Soaks, and writes the record; exits with 1 where a text was wrong, a request hung or a slot or page was lost.

    So too where no request was preempted or none shared a prefix: then it was no soak of that.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--requests", type=float, default=float("inf"), help="after which it ends, if that is earlier")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill-every", type=float, default=90, help="seconds between two kills of the server")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lives: list[list[dict[str, Any]]] = []
    at_the_end: dict[str, float] = {}
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    restarts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        build_engine(engine)
        with LLM.load(engine, "cpu") as llm:
            expected = expected_texts(llm)
            end = time.monotonic() + 60 * arguments.minutes
            while time.monotonic() < end and counts.total() < arguments.requests:
                begin = time.monotonic()
                anywhere = Endpoints(http_port=0, grpc_port=0, metrics_port=0)
                with serving(
                    engine, DeploySettings(device="cpu", max_queue=SLOTS), anywhere, log=arguments.log
                ) as running:
                    restarts.append(round(time.monotonic() - begin, 1))
                    at = running.endpoints
                    stop = min(end, time.monotonic() + arguments.kill_every)
                    kill = stop < end
                    until, most = stop + (2 if kill else 0), arguments.requests - counts.total()
                    soak = Soak(at.grpc, at.metrics, expected, llm, until, most)
                    record: list[dict[str, Any]] = []
                    asyncio.run(one_life(soak, running, arguments.clients, stop, len(lives), record, kill))
                    if not soak.down.is_set():
                        running.server.check()
                        time.sleep(3)
                        at_the_end = {name: soak.metric(f"dflash_{METRICS[name]}") for name in ("slots", "pages")}
                lives.append(record)
                counts += soak.outcomes
                wrong += soak.wrong
    totals = {name: sum(life[-1][name] for life in lives if life) for name in ("preemptions", "prefix_hits")}
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "clients": arguments.clients,
        "slots": SLOTS,
        "pages": PAGES,
        "page_rows": PAGE_ROWS,
        "max_queue": SLOTS,
        "outcomes": dict(counts.most_common()),
        "wrong_texts": len(wrong),
        **totals,
        "seconds_to_be_ready": restarts,
        "in_use_at_the_end": at_the_end,
        "lives": lives,
    }
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)
    print(*wrong[:5], sep="\n")
    sys.exit(bool(wrong or counts["hung"] or any(at_the_end.values()) or not all(totals.values())))


async def one_life(
    soak: Soak,
    running: Serving,
    clients: int,
    stop: float,
    seed: int,
    record: list[dict[str, Any]],
    kill: bool,
) -> None:
    """Serves until a time, and then kills the server under its clients, which must all notice."""
    work = asyncio.create_task(soak_one_life(soak, running, clients, seed, record))
    await asyncio.wait([work], timeout=max(0.0, stop - time.monotonic()))
    if kill and not work.done():
        soak.down.set()
        os.kill(running.server.pid, 9)
    await work


if __name__ == "__main__":
    main()
