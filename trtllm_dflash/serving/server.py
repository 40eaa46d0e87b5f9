"""A running Triton server: its ranks, its models' processes, its ports; started, watched and ended together."""

import http.client
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from trtllm_dflash.errors import DFlashError, EngineError, SettingsError
from trtllm_dflash.serving import launch
from trtllm_dflash.serving.claim import Claim, remove_orphans
from trtllm_dflash.serving.drain import DrainOrder
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.log import said_at_load
from trtllm_dflash.serving.processes import Process, find_processes, kill_processes
from trtllm_dflash.serving.stalls import Stalls
from trtllm_dflash.serving.triton import find_triton, shut_off
from trtllm_dflash.session.launcher import PATIENT, find_launcher
from trtllm_dflash.signals import ENDING

RANK_MODEL = "tensorrt_llm"  # what the ranks beyond the first load
DRAIN_SECONDS = 30.0  # that running requests get when the server is told to end

_STARTS = 3  # where Triton gives up a model that loads

# Bytes of shared memory that each model's process begins with: enough for hundreds of requests. It need not grow under
# load, where Triton's Python backend is known to crash; and four models fit in Docker's default of 64 MB.
_MODEL_MEMORY = 8 << 20
_PATIENCE = 10.0  # seconds to end, beyond those, before it is killed
_PAUSE = 0.1  # seconds between two looks at a server


class Server:
    """Triton on a model repository; with tp > 1 one server process a rank, joined through MPI.

    A context manager: entering starts it and waits until it is ready, leaving ends it. None of its processes outlives
    this one; nor the thread that enters, with which the kernel ends them.

    Args:
        repository: the model repository, which must last as long as the server.
        endpoints: of rank 0.
        tp: ranks.
        log: a file for the server's log, appended to; by default a temporary one, kept only where the server failed.
        progress: told ("loading", models ready, models) while they load.
        patience: seconds until the models must be ready; None waits as long as the server lives.
        drain_seconds: that running requests get when the server is told to end.

    Raises:
        SettingsError: a port is taken.
        EngineError: there is no Triton, or a model does not load.
    """

    def __init__(
        self,
        repository: Path,
        endpoints: Endpoints,
        tp: int = 1,
        log: Path | None = None,
        progress: Callable[[str, int, int], None] = lambda *_: None,
        patience: float | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self.repository = repository.absolute()
        self.endpoints = endpoints
        self.tp = tp
        self.progress = progress
        self.patience = patience
        self.drain_seconds = drain_seconds
        self._log = log
        self._offsets: dict[Path, int] = {}  # how long each log was before
        self._claim: Claim | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[Process] = []
        self._told = False  # to end

    @property
    def pid(self) -> int:
        """The first process: Triton's, or the launcher's of its ranks. It leads the process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        """Rank 0's log. Those of other ranks, and of the launcher, are beside it."""
        if self._log is not None:
            return self._log.absolute()
        assert self._claim is not None
        return self._claim.folder / "server.log"

    @property
    def said_at_load(self) -> list[str]:
        """The lines that the engine's process logged when it was loaded: backend, kernels and precision."""
        return said_at_load(self._read_log(self.log).decode(errors="replace"))

    def __enter__(self) -> "Server":
        for left in reversed(range(_STARTS)):
            stalls = Stalls(self._pids)
            try:
                self._start()
                self._wait_until_ready(stalls)
                break
            except BaseException as error:
                again = left > 0 and isinstance(error, EngineError) and self._stalled(stalls)
                self._end(None if again else error)
                if not again:
                    raise
            logging.getLogger(__name__).warning("Triton gave up a model that was loading: it is started once more")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._process, self._members, self._told = None, [], False
        triton = find_triton()
        self.endpoints = self.endpoints.chosen()
        remove_orphans()
        claim = self._claim = Claim()
        try:
            self.log.open("ab").close()
        except OSError as error:
            raise SettingsError(f"--log {self.log}: {error.strerror}") from None
        self._offsets = {log: log.stat().st_size for log in self._logs() if log.exists()}
        words, environment = triton.prepare(claim.folder)
        environment |= claim.environment
        common = [
            *words,
            f"--model-repository={self.repository}",
            "--disable-auto-complete-config",  # it would start every model's process twice
            f"--backend-config=python,shm-region-prefix-name={claim.name}-",
            f"--backend-config=python,shm-default-byte-size={_MODEL_MEMORY}",
            f"--exit-timeout-secs={math.ceil(self.drain_seconds)}",
        ]
        at = self.endpoints
        first = [f"--http-address={at.triton_address}", f"--http-port={at.http_port}"]
        first += [f"--grpc-address={at.triton_address}", f"--grpc-port={at.grpc_port}"]
        first += [f"--metrics-address={at.triton_address}", f"--metrics-port={at.metrics_port}", *shut_off()]
        own = os.getpid() if self.tp == 1 else None  # ranks are MPI's children
        command = self._launched(self.log, [*common, *first], own)
        if self.tp > 1:
            environment = PATIENT | environment
            silent = [f"--allow-{service}=false" for service in ("http", "grpc", "metrics")]
            other = [*common, *silent, "--model-control-mode=explicit", f"--load-model={RANK_MODEL}"]
            command = ["-n", "1", *command]
            for rank in range(1, self.tp):
                command += [":", "-n", "1", *self._launched(self._log_of(f"rank{rank}"), other, None)]
            command = self._launched(self._log_of("mpiexec"), [find_launcher(self.tp), *command], os.getpid())
        # A signal waits until the process has a name here; the launcher lets signals through again.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            # A new session keeps Ctrl-C on the terminal to us, who then end the server in order.
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _launched(self, log: Path, words: list[str], parent: int | None) -> list[str]:
        return [sys.executable, "-I", "-S", launch.__file__, str(log), str(parent or 0), *words]

    def _log_of(self, part: str) -> Path:
        return self.log.with_name(f"{self.log.name}.{part}")

    def _logs(self) -> list[Path]:
        """Lists rank 0's log, then the other ranks' and the launcher's."""
        parts = [*(f"rank{rank}" for rank in range(1, self.tp)), "mpiexec"] if self.tp > 1 else []
        return [self.log, *map(self._log_of, parts)]

    def _stalled(self, stalls: Stalls) -> bool:
        if self._process is None:
            return False
        return stalls.explain(self._process.returncode, b"".join(map(self._read_log, self._logs())))

    def _pids(self) -> list[int]:
        return [] if self._claim is None else [process.pid for process in find_processes(self._claim.name)]

    def _wait_until_ready(self, stalls: Stalls) -> None:
        models = sum((folder / "config.pbtxt").is_file() for folder in self.repository.iterdir())
        begin = time.monotonic()
        assert self._claim is not None
        while not self._ready():
            if self.tp > 1:
                self._claim.note_memory()
            if self._process.poll() is not None:  # type: ignore[union-attr]
                ending = _ending(self._process.returncode)  # type: ignore[union-attr]
                raise EngineError(self._why(f"Triton ended while it started ({ending})"))
            if self.patience is not None and time.monotonic() - begin > self.patience:
                raise EngineError(f"Triton is not ready after {self.patience:g} s; its log: {self.log}")
            loaded = len(re.findall(rb'"successfully loaded \'', self._read_log(self.log)))
            self.progress("loading", loaded, models)
            if stalls.look():
                raise EngineError(self._why("the process of a model has ended, and Triton waits for it"))
            time.sleep(_PAUSE)
        self.progress("loading", models, models)
        self._members = [it for it in find_processes(self._claim.name) if it.what and it.pid != self.pid]
        self.check()

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection(self.endpoints.triton, self.endpoints.http_port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _read_log(self, log: Path) -> bytes:
        """Reads the part of a log that this run has written."""
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(self._offsets.get(log, 0))
            return file.read()
        return b""

    def _why(self, otherwise: str) -> str:
        """Says why it did not start: what a log tells, or else what was seen."""
        for log in self._logs():
            cause = find_cause(self._read_log(log).decode(errors="replace"))
            if cause is not None:
                return f"{cause}; the server's log: {log}"
        return f"{otherwise}; its log: {self.log}"

    # -- watching ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that every process runs; call it several times a second.

        Triton starts no model's process again and still calls itself ready, and a rank cannot go on without the
        others: so the end of any process is the end of all.

        Raises:
            EngineError: one of its processes has ended.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise EngineError(f"Triton has ended ({_ending(self._process.returncode)}); its log: {self.log}")
        for member in self._members:
            if not member.alive:
                raise EngineError(f"{member.what} has ended; the server's log: {self.log}")

    def wait(self) -> None:
        """Waits until a process ends; raises the EngineError of `check`."""
        while True:
            self.check()
            time.sleep(_PAUSE)

    # -- ending ------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Ends all its processes at once; whoever waits for a reply sees the connection end."""
        assert self._claim is not None
        self._told = True
        kill_processes(self._claim.name)

    def drain(self) -> None:
        """Refuses new requests, and waits until those that run have ended: for `drain_seconds`, then with an error.

        Models that are not ours are Triton's to drain, which crashes where that takes longer.
        """
        assert self._claim is not None and self._process is not None
        if self._told:
            return
        self._told = True
        order = DrainOrder(self._claim.control)
        ours = order.is_heard
        if ours:
            order.give(self.drain_seconds)
        else:
            self._process.terminate()
        end = time.monotonic() + self.drain_seconds + _PATIENCE
        while not (ours and order.is_done) and time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PAUSE)
                return
            if ours and not all(member.alive for member in self._members):
                return

    def _end(self, error: BaseException | None) -> None:
        """Ends the server: running requests get some seconds, then it is killed. A second Ctrl-C kills it at once.

        It is killed in any case: Triton takes seconds to end by itself, and has nothing to keep.
        """
        failed = isinstance(error, DFlashError)
        try:
            if self._members and not failed:
                self.drain()
        finally:
            if self._claim is not None:
                self._claim.release(keep_files=failed)
            if self._process is not None:
                self._process.wait(_PATIENCE)


def find_cause(log: str) -> str | None:
    """Finds in a log, as one line, why the server did not start; None where it does not tell."""
    messages = [_unquoted(line) for line in log.splitlines() if re.match(r"E\d{4} ", line)]
    for message in messages:
        model = re.match(r"failed to load '(.+?)' version \d+: (.*)", message, re.DOTALL)
        if model is not None:
            # The cause is "CODE: CLASS: text", and then the place in the Python source.
            cause = model[2].partition("\n\nAt:\n")[0].removeprefix("Internal: ").removeprefix("TritonModelException: ")
            kind, _, text = cause.partition(": ")
            if kind.rpartition(".")[2] in {error.__name__ for error in DFlashError.__subclasses__()}:
                return text
            return f"model {model[1]} does not load: {' '.join(cause.split())}"
    for message in messages:
        port = re.match(r"failed to start (\w+) service: .*Socket '(.+):(\d+)' already in use", message)
        if port is not None:
            return f"port {port[3]} is taken (--{port[1].lower()}-port)"
    for message in messages:
        if message.startswith(("Poll failed for model directory", "failed to start")):
            return " ".join(message.split())
    for message in messages:  # of a repository that is not whole
        lacks = re.search(r"ensemble \S+ contains models that are not available|at least one version must be", message)
        if lacks is not None:
            return f"{' '.join(message.split())}: deploy again"
    return None


def _unquoted(line: str) -> str:
    """Unquotes the message of a line of Triton's log, which is quoted as in JSON."""
    start = line.find('] "')
    with suppress(json.JSONDecodeError):
        return str(json.loads(line[start + 2 :].strip(), strict=False))
    return line[start + 2 :].strip(' "')


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
