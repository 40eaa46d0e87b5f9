"""A real Triton server on the shipped pair, shared by the tests of serving."""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import build_tiny
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.server import Server
from trtllm_dflash.serving.triton import find_triton

COMPLETED = 'dflash_requests_total{outcome="completed"}'
#: What a request of `settled_metrics` counts.
SETTLING = dict.fromkeys(
    (COMPLETED, "dflash_committed_tokens_total", "dflash_prompt_tokens_total", "dflash_request_seconds_count"), 1
)

#: Any free ports.
ANYWHERE = Endpoints(http_port=0, grpc_port=0, metrics_port=0)


@dataclass(frozen=True)
class Running:
    """A server, to its clients.

    Attributes:
        http_url: as "http://127.0.0.1:8000".
        grpc_url: as "127.0.0.1:8001", without a scheme.
        metrics_url: the whole address, "/metrics" included.
        engine: the engine directory that it serves.
        repository: its model repository.
        pid: the server's process.
    """

    http_url: str
    grpc_url: str
    metrics_url: str
    engine: Path
    repository: Path
    pid: int
    log: Path

    def complete(self, text: str, **inputs: object) -> str:
        """The reply of the model that answers once."""
        url = f"{self.http_url}/v2/models/tensorrt_llm_bls/generate"
        body = json.dumps({"text_input": text, **inputs}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=PATIENCE) as reply:
            return str(json.loads(reply.read())["text_output"])

    def metrics(self) -> dict[str, float]:
        """What it has published, by name and labels: 'dflash_requests_total{outcome="completed"}'."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE) as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith("dflash_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def settled_metrics(self) -> dict[str, float]:
        """The metrics, with all in them that was done so far.

        They are published in rounds, one number after another. Where a request has been counted in three rounds since,
        what was done before is in them whole. What these requests count themselves, `SETTLING`, may come later.
        """
        for _ in range(3):
            seen = self.metrics().get(COMPLETED, 0)
            self.complete("a", max_tokens=1, ignore_eos=True, draft=False)
            self._wait_for_more(COMPLETED, seen)
        return self.metrics()

    def wait_for_increase(self, before: dict[str, float], counts: dict[str, float]) -> None:
        """Returns once each of these metrics has grown by its count since they were settled; others may come later."""

        def grown(metrics: dict[str, float]) -> bool:
            more = {name: metrics.get(name, 0) - before.get(name, 0) - count for name, count in counts.items()}
            return all(more[name] in (0, SETTLING.get(name, 0), 2 * SETTLING.get(name, 0)) for name in counts)

        self.wait_for(grown, f"metrics grew by {counts}")

    def _wait_for_more(self, name: str, seen: float) -> None:
        self.wait_for(lambda metrics: metrics.get(name, 0) > seen, f"{name} is more than {seen}")

    def wait_for_gauge(self, name: str, value: float) -> None:
        """Returns once a metric has a value."""
        self.wait_for(lambda metrics: metrics.get(name) == value, f"{name} is {value}")

    def wait_for(self, condition: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
        """The metrics for which the condition holds, once it does."""
        found: dict[str, float] = {}

        def holds() -> bool:
            found.clear()
            found.update(self.metrics())
            return condition(found)

        wait_until(holds, what)
        return found


@pytest.fixture(scope="session")
def triton() -> None:
    """Skips where there is no tritonserver."""
    try:
        find_triton()
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def served_engine(tmp_path_factory) -> Path:
    """The shipped pair with 8 slots, FP32."""
    return build_tiny(tmp_path_factory.mktemp("engines") / "served", max_batch=8)


@pytest.fixture(scope="session")
def server(triton, served_engine, tmp_path_factory) -> Iterator[Running]:
    """The server, with the models that `deploy` makes of that engine, on the CPU. Replies leave out the prompt."""
    folder = tmp_path_factory.mktemp("server")
    with _running(served_engine, folder, draft_length=15, exclude_input_in_output=True) as running:
        yield running


@pytest.fixture(scope="session")
def unary_server(triton, served_engine, tmp_path_factory) -> Iterator[Running]:
    """The same engine, deployed --unary, with no place to wait."""
    folder = tmp_path_factory.mktemp("unary")
    with _running(served_engine, folder, draft_length=15, decoupled=False, max_queue=0) as running:
        yield running


@contextmanager
def _running(engine: Path, folder: Path, **settings: object) -> Iterator[Running]:
    from trtllm_dflash.serving.repository import DeploySettings, deploy

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models' processes take it from here
    deploy(engine, folder / "repository", DeploySettings.model_validate({"device": "cpu", **settings}))
    with Server(folder / "repository", ANYWHERE, log=folder / "triton.log", patience=PATIENCE) as running:
        at = running.endpoints
        yield Running(at.http, at.grpc, at.metrics, engine, running.repository, running.pid, running.log)
