"""`serve`: an engine behind Triton and, with an OpenAI port, the gateway, until one of them ends."""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.serving.claim import Claim
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.gate import Gate
from trtllm_dflash.serving.repository import (
    DeploySettings,
    deploy,
    is_found,
    is_repository,
    render,
    streaming_and_deadline,
)
from trtllm_dflash.serving.server import DRAIN_SECONDS, RANK_MODEL, Server
from trtllm_dflash.serving.triton import is_named

if TYPE_CHECKING:
    from fastapi import FastAPI

_PAUSE = 0.1  # seconds between two looks at what runs
# Of a reply, which the kernel keeps for a client that does not read (twice that: Linux doubles it). It would keep
# megabytes, a whole reply, and a client that has gone silent would be noticed at its end.
_UNREAD_BYTES = 64 << 10
_FLUSH_SECONDS = 2  # for clients to read the ends of their replies


class Serving:
    """A running server of one engine, with its gateway if any.

    Attributes:
        endpoints: of Triton and the gateway.
        server: Triton.
    """

    def __init__(self, server: Server, gateway: "GatewayThread | None") -> None:
        self.server = server
        self.endpoints = server.endpoints
        self._gateway = gateway

    def wait(self) -> None:
        """Watches the processes until one of them ends.

        Raises:
            EngineError: Triton, a model, a rank or the gateway has ended.
        """
        while True:
            self.server.check()
            if self._gateway is not None:
                self._gateway.check()
            time.sleep(_PAUSE)


@contextmanager
def serving(
    engine: Path,
    settings: DeploySettings,
    endpoints: Endpoints,
    *,
    repository: Path | None = None,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    log: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    drain_seconds: float = DRAIN_SECONDS,
) -> Iterator[Serving]:
    """Serves an engine from the moment when it is ready until the context is left, and leaves no process behind.

    Args:
        engine: the engine directory.
        settings: for the model repository that is made for it.
        endpoints: to listen on; with an OpenAI port the gateway runs too.
        repository: one that `deploy` made for this engine, instead of making one.
        api_key: required of the gateway's clients.
        origins: of web pages that may use the gateway; see `GatewaySettings`.
        log: a file for Triton's log.
        progress: called with the number of models that are ready.
        drain_seconds: that running requests get when the context is left, unless by an EngineError.

    Raises:
        EngineError: the engine cannot be served.
        SettingsError: a port is taken, a setting wrong.
    """
    config = read_config(engine)
    _check_temporary()
    endpoints = endpoints.chosen()
    streams, seconds = settings.decoupled, settings.deadline_seconds
    if repository is not None:
        _check_repository(repository, engine)
        streams, seconds = streaming_and_deadline(repository)
    gate = Gate()
    app = None
    if endpoints.openai_port is not None:
        if not streams:
            unary = "--unary" if repository is None else f"--repository {repository}, deployed --unary"
            raise SettingsError(f"{unary}: the OpenAI API streams, which these models do not; leave out --openai-port")
        app = _gateway_app(engine, endpoints, api_key, origins, seconds, gate)
    with ExitStack() as stack:
        claim = Claim()
        stack.callback(claim.release)
        served = claim.folder / "repository"
        if repository is None:
            place = engine if is_named(engine) else _linked(claim.folder / "engine", engine, stack)
            deploy(place, served, settings, knob="TMPDIR")
        else:
            # Its own path may be one that Triton's shell reads otherwise, as below.
            _linked(served, repository, stack)
        server = Server(served, endpoints, config.tp, log, progress, drain_seconds=drain_seconds)
        try:
            stack.enter_context(server)
        except EngineError as error:  # which names the link where it means what it leads to
            raise EngineError(str(error).replace(f"{served}/", f"{repository or served}/")) from None
        gateway = stack.enter_context(GatewayThread(app, endpoints)) if app is not None else None
        try:
            yield Serving(server, gateway)
        except EngineError:
            server.kill()  # before the gateway ends, whose clients may wait for what hangs
            raise
        finally:
            gate.close()
            try:
                server.drain()
            finally:
                gate.shut()


def _linked(link: Path, place: Path, stack: ExitStack) -> Path:
    """Makes a link to a place, which goes with the stack; returns the link."""
    link.symlink_to(place.absolute())
    stack.callback(link.unlink)
    return link


def _check_temporary() -> None:
    """Refuses temporary folders that Triton, which names its backends' to a shell without quotes, would not find."""
    place = Path(tempfile.gettempdir())
    if not is_found(place):
        raise SettingsError(f"TMPDIR {place}: Triton's shell reads it otherwise; name a folder without spaces or signs")


def _check_repository(repository: Path, engine: Path) -> None:
    if not repository.is_dir():
        raise SettingsError(f"--repository {repository}: there is no such directory; make one: trtllm-dflash deploy")
    if not any(repository.glob("*/config.pbtxt")):
        raise SettingsError(f"--repository {repository}: holds no model; make one: trtllm-dflash deploy")
    files, name = render(engine, DeploySettings()), f"{RANK_MODEL}/config.pbtxt"
    if is_repository(repository):  # of which models may be missing, but not parts of them
        for part in map(repository.joinpath, files):
            if (repository / part.relative_to(repository).parts[0]).is_dir() and not part.is_file():
                raise SettingsError(f"--repository {repository}: {part} is missing; deploy again")
    (line,) = [line for line in files[name].splitlines() if '"engine"' in line]
    # One without this model is somebody's own, and as good as they made it.
    if (repository / name).is_file() and line not in (repository / name).read_text(errors="replace").splitlines():
        raise SettingsError(
            f"--repository {repository}: it is not for --engine {engine}; deploy again, or name its engine"
        )


def _gateway_app(
    engine: Path, endpoints: Endpoints, api_key: str | None, origins: Sequence[str], timeout: float, gate: Gate
) -> "FastAPI":
    try:
        import uvicorn  # noqa: F401

        from trtllm_dflash.serving.gateway import GatewaySettings, create_app
    except ImportError as error:
        raise EngineError(f"--openai-port needs {error.name}: {pip_install('serving')}") from None
    values: dict[str, Any] = {
        "engine": engine,
        "triton_url": endpoints.grpc,
        "metrics_url": endpoints.metrics,
        "api_key": api_key,
        "origins": tuple(origins),
        "timeout": timeout,
    }
    return create_app(GatewaySettings.model_validate(values), gate)


class GatewayThread:
    """The OpenAI gateway, in a thread of this process. A context manager: entered once it listens."""

    def __init__(self, app: "FastAPI", endpoints: Endpoints) -> None:
        import uvicorn

        from trtllm_dflash.serving.front import configuration

        self._endpoints = endpoints
        self._server = uvicorn.Server(configuration(app, 2 * _FLUSH_SECONDS))
        self._thread = threading.Thread(target=self._run, name="openai-gateway", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> "GatewayThread":
        at = self._endpoints
        assert at.openai_port is not None
        try:
            self._socket = socket.create_server((at.address, at.openai_port))
        except OSError as error:
            raise SettingsError(f"--openai-port {at.openai_port}: {error.strerror}") from None
        # Each connection's, too. Tokens are sent as they come, on a connection that is kept as well.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread.start()
        try:
            while not self._server.started:
                self.check()
                time.sleep(_PAUSE / 10)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raises an EngineError once the gateway has ended."""
        if not self._thread.is_alive():
            raise EngineError(f"the OpenAI gateway has ended ({self._error or 'without an error'})")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:  # a thread's error is lost where nobody keeps it
            self._error = error

    def _stop(self) -> None:
        self._server.should_exit = True
        try:
            self._thread.join(_FLUSH_SECONDS)
            for connection in list(self._server.server_state.connections):  # of clients that do not read
                connection.loop.call_soon_threadsafe(connection.transport.abort)
            self._thread.join(_FLUSH_SECONDS)
        finally:
            self._socket.close()
