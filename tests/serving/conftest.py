"""A real Triton server on the shipped pair, shared by the tests of serving."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import build_tiny
from trtllm_dflash.errors import EngineError
from trtllm_dflash.serving.server import Endpoints, Server
from trtllm_dflash.serving.triton import find_triton

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
    """The server, with the models that `deploy` makes of that engine, on the CPU."""
    from trtllm_dflash.serving.repository import DeploySettings, deploy

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models' processes take it from here
    folder = tmp_path_factory.mktemp("server")
    deploy(served_engine, folder / "repository", DeploySettings(device="cpu", draft_length=15))
    with Server(folder / "repository", ANYWHERE, log=folder / "triton.log", patience=60) as running:
        at = running.endpoints
        yield Running(at.http, at.grpc, at.metrics, served_engine, running.repository, running.pid, running.log)
