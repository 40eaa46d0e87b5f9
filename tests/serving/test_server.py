"""`serve`: what it starts, what it says, and that nothing of it stays, however it ends."""

import errno
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.conftest import build_tiny, refusal
from tests.processes import start
from tests.serving.conftest import ANYWHERE
from tests.serving.runs import ANY_PORTS, serve
from tests.test_engine_directory import flip_a_byte
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.serving import server as server_module
from trtllm_dflash.serving import triton as triton_module
from trtllm_dflash.serving.claim import SHARED_MEMORY
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.repository import DeploySettings, deploy
from trtllm_dflash.serving.server import RANK_MODEL, Server, find_cause
from trtllm_dflash.serving.triton import Triton, find_triton

pytestmark = pytest.mark.slow

#: Settings of an engine of few kinds of steps, each of which a server that drafts by `auto` times at its first start.
FEW_STEPS = {"max_batch": 2, "block_size": 4}


def make_repository(folder: Path, initialize: str = "pass", finalize: str = "pass") -> Path:
    """A model repository with one model, which starts much sooner than an engine's."""
    model = folder / "echo"
    (model / "1").mkdir(parents=True)
    tensors = (
        'input [{ name: "x" data_type: TYPE_INT32 dims: [1] }] output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]'
    )
    (model / "config.pbtxt").write_text(
        f'name: "echo" backend: "python" max_batch_size: 0 {tensors} instance_group [{{ kind: KIND_CPU }}]'
    )
    (model / "1" / "model.py").write_text(
        "import os, sys, time\n"
        "class TritonPythonModel:\n"
        f"    def initialize(self, args):\n        {initialize}\n"
        "    def execute(self, requests):\n        return [None for _ in requests]\n"
        f"    def finalize(self):\n        {finalize}\n"
    )
    return folder


def hang(begun: Path) -> str:
    """Code that never ends, and makes a file when it is reached."""
    return f"open({str(begun)!r}, 'w').close(); time.sleep(100_000)"


def engine_alone(engine: Path, folder: Path) -> Path:
    """The repository of an engine with its own model and none beside it: it starts sooner."""
    deploy(engine, folder, DeploySettings(device="cpu"))
    for model in folder.iterdir():
        if model.is_dir() and model.name != RANK_MODEL:
            shutil.rmtree(model)
    return folder


def get(url: str, path: str | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE)
    connection.request("GET", path or parts.path)
    reply = connection.getresponse()
    return reply.status, reply.read()


def reachable(address: str, url: str) -> bool:
    """Whether the endpoint's port answers at another address of this machine."""
    with socket.socket() as client:
        return client.connect_ex((address, urlsplit(url if "//" in url else f"//{url}").port)) == 0


def refused(*flags: object) -> str:
    """What `serve` says that does not start; its ports are any free ones, but for those among the flags."""
    return refusal("serve", *ANY_PORTS, *flags)


@pytest.fixture(scope="module")
def echo(tmp_path_factory, triton) -> Path:
    return make_repository(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def quick(served_engine, echo) -> list[object]:
    """Flags of a server that is ready in a second."""
    return ["--engine", served_engine, "--repository", echo, "--json"]


# -- the engine's own models -----------------------------------------------------------------------------------------


def test_serve_prints_its_endpoints_once_they_answer_and_a_second_ctrl_c_ends_it_amid_a_reply(triton, tmp_path):
    import tritonclient.grpc

    engine = build_tiny(tmp_path / "engine", **FEW_STEPS)
    with serve("--engine", engine, "--device", "cpu", "--openai-port", 0, "--json") as run:
        at = json.loads(run.line())
        assert get(at["http"], "/v2/health/ready")[0] == 200
        client = tritonclient.grpc.InferenceServerClient(at["grpc"])
        assert all(client.is_model_ready(name) for name in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls"))
        client.close()
        status, metrics = get(at["metrics"])
        assert status == 200
        assert re.search(rb"^dflash_slots_total\S* 2(\.0)?$", metrics, re.MULTILINE)
        assert get(at["openai"] + "/models")[0] == 200
        assert Path(at["log"]).is_file()
        chosen = r"tiny: torch on cpu: precision fp32, attention torch, products torch, experts none, exact yes .*"
        assert any(re.fullmatch(chosen, line) for line in at["loaded"])
        assert re.search(rb'^dflash_kernels_info{.*attention="torch".*} 1', metrics, re.MULTILINE)
        assert not any(reachable("127.0.0.2", at[name]) for name in ("http", "grpc", "metrics", "openai"))

        stream = http.client.HTTPConnection(urlsplit(at["http"]).netloc, timeout=PATIENCE)
        body = {"text_input": "Count.", "max_tokens": 2000, "ignore_eos": True, "draft": False, "stream": True}
        stream.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
        reply = stream.getresponse()
        assert reply.readline().startswith(b"data:")
        run.process.send_signal(signal.SIGINT)
        wait_until(lambda: get(at["openai"] + "/models")[0] == 503, "no new request is taken")
        run.process.send_signal(signal.SIGINT)
        assert run.ends() == (130, "")
        with pytest.raises(http.client.IncompleteRead):
            reply.read()
        wait_until(run.leaves_nothing, "nothing of it is left")
        assert not Path(at["log"]).parent.exists()


def test_a_repository_whose_path_a_shell_would_read_otherwise_is_served(served_engine, triton, tmp_path):
    """Triton names it to a shell without quotes."""
    repository = make_repository(tmp_path / "my $models")
    with serve("--engine", served_engine, "--repository", repository, "--json") as run:
        at = json.loads(run.line())
        assert get(at["http"], "/v2/health/ready")[0] == 200
        run.process.send_signal(signal.SIGINT)
        assert run.ends()[0] == 130
        wait_until(run.leaves_nothing, "nothing of it is left")
    assert not Path(at["log"]).parent.exists()
    assert (repository / "echo" / "config.pbtxt").is_file()


def test_an_engine_whose_path_and_name_are_not_ascii_is_served(triton, tmp_path):
    """Triton's Python models could not open it by its own path, and read files in ASCII unless told otherwise."""
    engine = build_tiny(tmp_path / "modèles" / "tiny", **FEW_STEPS)
    config = (engine / "config.json").read_text(encoding="utf-8").replace('"name": "tiny"', '"name": "modèle"')
    (engine / "config.json").write_text(config, encoding="utf-8")
    with serve("--engine", engine, "--no-draft", "--openai-port", 0, "--json") as run:
        at = json.loads(run.line())
        assert get(at["http"], "/v2/models/tensorrt_llm/ready")[0] == 200
        assert json.loads(get(at["openai"], "/v1/models")[1])["data"][0]["id"] == "modèle"
        run.process.send_signal(signal.SIGINT)
        assert run.ends()[0] == 130
        wait_until(run.leaves_nothing, "nothing of it is left")
    assert not Path(at["log"]).parent.exists()
    assert (engine / "config.json").is_file()


def test_a_temporary_folder_that_a_shell_would_read_otherwise_is_refused(served_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    assert "TMPDIR" in refused("--engine", served_engine)


def test_a_temporary_folder_that_is_full_is_named(served_engine, monkeypatch):
    def is_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", is_full)
    assert refused("--engine", served_engine).endswith("cannot be written: No space left on device (TMPDIR)")


def test_shared_memory_that_is_full_is_named_and_nothing_stays(served_engine, monkeypatch, tmp_path):
    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = f"trtllm-dflash-{os.getpid():08x}"
    monkeypatch.setattr("secrets.token_hex", lambda size=8: name.rpartition("-")[2])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("trtllm_dflash.serving.claim.Lifeline", is_full)
    assert "/dev/shm: No space left on device; a server has files there" in refused("--engine", served_engine)
    assert not list(tmp_path.iterdir())
    assert not list(SHARED_MEMORY.glob(f"{name}*"))


def test_a_truncated_engine_is_refused_before_a_server_starts(triton, served_engine, tmp_path):
    engine = shutil.copytree(served_engine, tmp_path / "engine")
    os.truncate(engine / "rank0.safetensors", 1000)
    assert refused("--engine", engine).startswith(f"error: {engine}/rank0.safetensors: ")


def test_a_damaged_engine_is_one_line_with_the_engines_own_error(triton, served_engine, tmp_path):
    engine = shutil.copytree(served_engine, tmp_path / "engine")
    flip_a_byte(engine / "rank0.safetensors")
    with serve("--engine", engine, "--repository", engine_alone(engine, tmp_path / "models")) as run:
        code, errors = run.ends()
        assert code == 1
        assert re.fullmatch(
            rf"error: {re.escape(str(engine))}/rank0.safetensors: .*build the engine again; the server's log: \S+\n",
            errors,
        )
        assert "failed to load 'tensorrt_llm'" in run.log()
        wait_until(run.leaves_nothing, "nothing of it is left")


# -- starting --------------------------------------------------------------------------------------------------------


def test_the_endpoints_are_listed_for_a_reader(quick):
    with serve(*quick[:-1]) as run:
        lines = [run.line() for _ in range(5)]
        assert lines[0].startswith("serving ")
        assert [line.split()[0] for line in lines[1:]] == ["http", "grpc", "metrics", "log"]


def test_a_port_in_use_is_named_with_its_flag(quick, served_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in ("http", "grpc", "metrics", "openai"):
            line = refused(*quick, f"--{flag}-port", port)
            assert line == f"error: port {port} is taken (--{flag}-port)"


def test_ports_and_hosts_that_cannot_be_are_refused():
    with pytest.raises(SettingsError, match=r"port 9 is given twice \(--http-port, --openai-port\)"):
        Endpoints(http_port=9, openai_port=9).chosen()
    with pytest.raises(SettingsError, match=r"--host 192\.0\.2\.1: not an address of this machine"):
        replace(ANYWHERE, host="192.0.2.1", openai_port=0).chosen()
    with pytest.raises(SettingsError, match=r"--host nowhere\.invalid: not an IPv4 address"):
        replace(ANYWHERE, host="nowhere.invalid").chosen()
    with pytest.raises(SettingsError, match=r"--host: is empty"):
        replace(ANYWHERE, host="", openai_port=0).chosen()
    with pytest.raises(SettingsError, match=r"--host 0\.0\.0\.0: nothing would listen there; give it --openai-port"):
        replace(ANYWHERE, host="0.0.0.0").chosen()
    with pytest.raises(SettingsError, match=r"--expose-triton: only this machine reaches --host 127\.0\.0\.1"):
        replace(ANYWHERE, expose_triton=True).chosen()


def test_ports_of_which_any_will_do_are_free_ones_that_no_outgoing_connection_gets(monkeypatch):
    at = ANYWHERE.chosen()
    ports = {at.http_port, at.grpc_port, at.metrics_port}
    assert len(ports) == 3 and all(20_000 <= port < 32_768 for port in ports)
    monkeypatch.setattr("trtllm_dflash.serving.endpoints._TRIES", 3)
    monkeypatch.setattr("trtllm_dflash.serving.endpoints._ANY", sorted(ports))
    for _ in range(20):  # it is chance that would choose one twice
        at = ANYWHERE.chosen()
        assert {at.http_port, at.grpc_port, at.metrics_port} == ports
    monkeypatch.setattr("trtllm_dflash.serving.endpoints._TRIES", 1)
    monkeypatch.setattr("trtllm_dflash.serving.endpoints._ANY", [at.http_port])
    with socket.create_server(("127.0.0.1", at.http_port)):
        assert replace(at, http_port=0).chosen().http_port != at.http_port


TRITONS = ("http", "grpc", "metrics")


def test_the_host_is_the_openai_apis_and_triton_stays_on_loopback(quick):
    with serve(*quick, "--host", "0.0.0.0", "--openai-port", 0) as run:
        at = json.loads(run.line())
        assert {name: reachable("127.0.0.2", at[name]) for name in (*TRITONS, "openai")} == {
            **dict.fromkeys(TRITONS, False),
            "openai": True,
        }
        assert all(reachable("127.0.0.1", at[name]) for name in TRITONS)
        run.process.terminate()
        code, errors = run.ends()
        assert (code, errors.count("\n")) == (143, 1)
        assert errors.startswith("warning: --host 0.0.0.0: the OpenAI API has no key; give it one")
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_triton_listens_at_the_host_where_it_is_exposed_with_one_line_of_the_risks(quick):
    with serve(*quick, "--host", "0.0.0.0", "--expose-triton") as run:
        at = json.loads(run.line())
        assert all(reachable("127.0.0.2", at[name]) for name in TRITONS)
        run.process.terminate()
        code, errors = run.ends()
        assert code == 143
        assert errors.startswith("warning: --expose-triton: whoever reaches 0.0.0.0 can use Triton without a key")
        assert errors.count("\n") == 1
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_what_cannot_be_served_is_refused_before_triton_starts(quick, served_engine, tmp_path):
    assert "/nowhere: not an engine directory" in refused("--engine", "/nowhere")
    assert "--repository" in refused("--engine", served_engine, "--repository", tmp_path / "none")
    assert "holds no model" in refused("--engine", served_engine, "--repository", served_engine)
    of_another = tmp_path / "repository"
    deploy(build_tiny(tmp_path / "another"), of_another)
    assert "it is not for --engine" in refused("--engine", served_engine, "--repository", of_another)
    damaged = tmp_path / "damaged"
    deploy(served_engine, damaged)
    (damaged / "preprocessing" / "1" / "model.py").unlink()
    words = refused("--engine", served_engine, "--repository", damaged)
    assert f"--repository {damaged}: {damaged}/preprocessing/1/model.py is missing; deploy again" in words
    assert "--max-queue: --repository has its own" in refused(*quick, "--max-queue", 3)
    for seconds in ("nan", "inf", "3e9", "-1"):
        assert f"--drain-seconds {float(seconds):g}: must be" in refused(*quick, "--drain-seconds", seconds)
    assert "without --openai-port" in refused(*quick, "--openai-api-key-file", tmp_path / "key")
    (tmp_path / "key").write_text("\n")
    assert "is empty" in refused(*quick, "--openai-port", 0, "--openai-api-key-file", tmp_path / "key")
    assert "--log" in refused(*quick, "--log", tmp_path / "none" / "log")
    assert "--unary: the OpenAI API" in refused("--engine", served_engine, "--unary", "--openai-port", 0)
    unary = tmp_path / "unary"
    deploy(served_engine, unary, DeploySettings(decoupled=False))
    words = refused("--engine", served_engine, "--repository", unary, "--openai-port", 0)
    assert f"--repository {unary}, deployed --unary: the OpenAI API" in words


def test_a_log_file_is_added_to_and_kept(echo, tmp_path, triton):
    log = tmp_path / "triton.log"
    log.write_text("from before\n")
    with Server(echo, ANYWHERE, log=log, patience=PATIENCE) as running:
        assert running.log == log
    assert log.read_text().startswith("from before\n")
    assert "successfully loaded 'echo'" in log.read_text()


def test_a_model_that_does_not_load_is_named_with_the_cause(tmp_path, triton):
    log = tmp_path / "triton.log"
    broken = make_repository(tmp_path / "a", initialize="raise ValueError('no \"weights\"')")
    with pytest.raises(EngineError, match='model echo does not load: ValueError: no "weights"; the server\'s log: '):
        Server(broken, ANYWHERE, log=log).__enter__()
    dies = make_repository(tmp_path / "b", initialize="os.abort()")
    with pytest.raises(EngineError, match=r"model echo does not load: Stub process .* is not healthy"):
        Server(dies, ANYWHERE, log=log).__enter__()
    slow = make_repository(tmp_path / "c", initialize="time.sleep(3600)")
    with pytest.raises(EngineError, match="Triton is not ready after 1 s"):
        Server(slow, ANYWHERE, log=log, patience=1).__enter__()


def once(marker: Path, code: str) -> str:
    """Code that a model runs when it loads for the first time."""
    return f"if not os.path.exists({str(marker)!r}): open({str(marker)!r}, 'w').close(); {code}"


#: Stops the model's process for longer than Triton takes it for alive; it goes on, and Triton waits for its end.
STALL = (
    "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {os.getpid()}']); os.kill(os.getpid(), 19)"
)
ABORT = "os.kill(os.getppid(), 6)"  # Triton's process


@pytest.mark.parametrize("code", [STALL, ABORT], ids=["stalls", "aborts"])
def test_a_model_that_triton_gives_up_while_it_loads_is_loaded_once_more(code, tmp_path, triton, caplog):
    models = make_repository(tmp_path / "models", initialize=once(tmp_path / "loaded", code))
    with Server(models, ANYWHERE, log=tmp_path / "log", patience=PATIENCE) as running:
        assert "successfully loaded 'echo'" in running.log.read_text()
    assert [record.getMessage() for record in caplog.records if record.name == server_module.__name__] == [
        "Triton gave up a model that was loading: it is started once more"
    ]
    assert ("is not healthy" in (tmp_path / "log").read_text()) == (code is STALL)


def test_a_models_process_that_ends_before_triton_looks_is_an_error(tmp_path, triton):
    """Triton waits for it for ever."""
    models = make_repository(tmp_path / "models")
    (models / "echo" / "1" / "model.py").unlink()
    with pytest.raises(EngineError, match="the process of a model has ended, and Triton waits for it; its log"):
        Server(models, ANYWHERE, log=tmp_path / "log", patience=PATIENCE).__enter__()


def test_a_triton_that_aborts_at_every_start_is_an_error(tmp_path, triton):
    starts = tmp_path / "starts"
    models = make_repository(tmp_path / "models", initialize=f"open({str(starts)!r}, 'a').write('1'); {ABORT}")
    with pytest.raises(EngineError, match=r"Triton ended while it started \(killed by SIGABRT\)"):
        Server(models, ANYWHERE, log=tmp_path / "log", patience=PATIENCE).__enter__()
    assert starts.read_text() == "111"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            r'''"failed to load 'tensorrt_llm' version 1: Internal: EngineError: /e: gone\n\nAt:\n  m.py(5): f\n"''',
            "/e: gone",
        ),
        (
            r'''"failed to load 'm' version 1: Internal: TritonModelException: errors.SettingsError: no"''',
            "no",
        ),
        (r'''"failed to load 'm' version 1: Not found: no \"x\""''', 'model m does not load: Not found: no "x"'),
        (
            """"failed to start GRPC service: Unavailable - Socket '127.0.0.1:81' already in use " """,
            "port 81 is taken (--grpc-port)",
        ),
        (""""Poll failed for model directory 'm': no config" """, "Poll failed for model directory 'm': no config"),
        (
            """"Invalid argument: ensemble e contains models that are not available or ambiguous: m" """,
            "Invalid argument: ensemble e contains models that are not available or ambiguous: m: deploy again",
        ),
        (""""CudaDriverHelper has not been initialized." """, None),
    ],
)
def test_the_cause_is_read_from_the_log(line, cause):
    log = f'I1121 13:42:54.1 20 a.cc:1] "failed to load it"\nE1121 13:42:54.1 20 server.cc:241] {line}\nE1121 broken\n'
    assert find_cause(log) == cause


# -- ending ----------------------------------------------------------------------------------------------------------


def test_a_terminal_that_closes_ends_the_server_in_order(quick):
    with serve(*quick) as run:
        run.line()
        run.process.send_signal(signal.SIGHUP)
        assert run.ends() == (128 + signal.SIGHUP, "")
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_a_server_in_a_script_s_background_hears_sigterm_alone(quick):
    with serve(*quick, ignored=[signal.SIGINT, signal.SIGHUP]) as run:
        at = json.loads(run.line())
        for number in (signal.SIGINT, signal.SIGHUP):
            run.process.send_signal(number)
        assert get(at["http"], "/v2/health/ready")[0] == 200
        run.process.terminate()
        assert run.ends() == (143, "")
        wait_until(run.leaves_nothing, "nothing of it is left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_whose_models_are_loading(number, served_engine, tmp_path, triton):
    slow = make_repository(tmp_path / "models", initialize=hang(tmp_path / "loads"))
    with serve("--engine", served_engine, "--repository", slow) as run:
        wait_until((tmp_path / "loads").exists, "the model loads")
        run.processes()
        run.process.send_signal(number)
        assert run.ends() == (128 + number, "")
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_a_second_ctrl_c_does_not_wait_for_a_model_that_hangs(tmp_path, triton):
    stuck = make_repository(tmp_path / "models", finalize=hang(tmp_path / "ends"))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trtllm_dflash.serving.endpoints import Endpoints\n"
        "from trtllm_dflash.serving.server import Server\n"
        "ports = Endpoints(http_port=0, grpc_port=0, metrics_port=0)\n"
        "with Server(Path(sys.argv[1]), ports, drain_seconds=100_000) as running:\n"
        "    print(running.pid, flush=True)\n"
        "    running.wait()\n"
    )
    process = start([sys.executable, "-c", script, stuck])
    assert process.stdout is not None
    server = Path("/proc", process.stdout.readline().strip())
    assert server.exists()
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "ends").exists, "the model ends")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert errors.endswith("KeyboardInterrupt\n")
    assert not server.exists()


def test_a_model_that_hangs_is_killed(tmp_path, triton, monkeypatch):
    ends = tmp_path / "ends"
    drain_seconds = 100_000

    def turned() -> float:
        """A clock on which the time to end is over as soon as the model hangs."""
        return time.monotonic() + 2 * drain_seconds * ends.exists()

    stuck = make_repository(tmp_path / "models", finalize=hang(ends))
    with Server(stuck, ANYWHERE, patience=PATIENCE, drain_seconds=drain_seconds) as running:
        pid = running.pid
        monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=turned, sleep=time.sleep))
    assert ends.exists()
    assert not Path("/proc", str(pid)).exists()


@pytest.mark.parametrize(
    ("victim", "said"), [("--http-port", r"Triton has ended \(killed by SIGKILL\)"), (triton_module.STUB, "model echo")]
)
def test_when_a_process_dies_serve_ends_and_can_be_started_again(victim, said, quick):
    with serve(*quick) as run:
        at = json.loads(run.line())
        pid = next(
            pid for pid, words in run.processes().items() if victim in " ".join(words) and pid != run.process.pid
        )
        os.kill(pid, signal.SIGKILL)
        code, errors = run.ends()
        assert code == 1
        assert re.fullmatch(rf"error: .*{said}.*\n", errors)
        wait_until(run.leaves_nothing, "nothing of it is left")
    ports = {
        name: urlsplit(at[name] if name != "grpc" else f"//{at[name]}").port for name in ("http", "grpc", "metrics")
    }
    with serve(*quick, *(word for name, port in ports.items() for word in (f"--{name}-port", port))) as again:
        assert json.loads(again.line())["http"] == at["http"]


def test_when_the_gateway_dies_serve_ends(triton):
    from fastapi import FastAPI

    from trtllm_dflash.serving.serve import GatewayThread

    with GatewayThread(FastAPI(), Endpoints(openai_port=0)) as gateway:
        gateway.check()
        gateway._server.should_exit = True
        gateway._thread.join(PATIENCE)
        with pytest.raises(EngineError, match="the OpenAI gateway has ended"):
            gateway.check()


def test_the_gateway_sends_what_it_has_at_once_on_every_connection():
    """Else a reply's events would wait for the client's word on those before, but for a connection's first ones."""
    from fastapi import FastAPI

    from trtllm_dflash.serving.serve import GatewayThread

    with GatewayThread(FastAPI(), Endpoints(openai_port=0)) as gateway:
        connections = gateway._server.server_state.connections
        with socket.create_connection(gateway._socket.getsockname()):
            wait_until(lambda: connections, "the connection is taken")
            (taken,) = connections
            of_it = taken.transport.get_extra_info("socket")
            assert of_it.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# -- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, triton) -> Path:
    pytest.importorskip("mpi4py", reason="tensor parallelism needs the tp extra (mpi4py and an MPI)")
    return build_tiny(tmp_path_factory.mktemp("engines") / "tp2", tp=2, **FEW_STEPS | {"max_batch": 1})


def complete(url: str, prompt: str) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE)
    body = {"text_input": prompt, "max_tokens": 16, "exclude_input_in_output": True}
    connection.request("POST", "/v2/models/tensorrt_llm_bls/generate", json.dumps(body))
    reply = connection.getresponse()
    text = reply.read().decode()
    assert reply.status == 200, text
    return str(json.loads(text)["text_output"])


def test_two_ranks_serve_the_text_of_one_and_die_together(two_ranks, tiny):
    prompts = ["Tell a short story about a fox.", "def add(a, b):"]
    expected = [reply.text for reply in tiny.generate(prompts, SamplingParams(max_tokens=16))]
    with serve("--engine", two_ranks, "--device", "cpu", "--json") as run:
        at = json.loads(run.line())
        assert [complete(at["http"], prompt) for prompt in prompts] == expected
        os.kill(run.pid_of("tensorrt_llm/1/model.py"), signal.SIGKILL)
        code, errors = run.ends()
        assert code == 1
        assert re.fullmatch(r"error: .* has ended.*\n", errors)
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_two_ranks_end_in_order(two_ranks, tmp_path):
    models = engine_alone(two_ranks, tmp_path / "models")
    with serve("--engine", two_ranks, "--repository", models, "--json") as run:
        run.line()
        run.process.send_signal(signal.SIGINT)
        assert run.ends() == (130, "")
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_a_rank_that_does_not_load_is_one_line(two_ranks, tmp_path):
    engine = shutil.copytree(two_ranks, tmp_path / "engine")
    models = engine_alone(engine, tmp_path / "models")
    flip_a_byte(engine / "rank1.safetensors")
    with serve("--engine", engine, "--repository", models) as run:
        code, errors = run.ends()
        assert code == 1
        said = "its digest is not the one in config.json; the file changed: build the engine again"
        assert re.fullmatch(rf"error: \S+rank1.safetensors: {said}; the server's log: \S+\n", errors)
        wait_until(run.leaves_nothing, "nothing of it is left")


# -- finding Triton --------------------------------------------------------------------------------------------------


def test_triton_is_looked_for_in_the_container_then_on_path_then_in_the_wheel(tmp_path, monkeypatch, triton):
    wheel = find_triton()
    for place in ("path", "container/bin"):
        program = tmp_path / place / "tritonserver"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / "backends").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    on_path = find_triton()
    assert on_path.executable == tmp_path / "path" / "tritonserver"
    assert on_path.prepare(tmp_path)[0][1:] == [f"--backend-directory={tmp_path / 'backends'}"]
    monkeypatch.setattr(triton_module, "CONTAINER", tmp_path / "container")
    assert find_triton().executable == tmp_path / "container" / "bin" / "tritonserver"
    assert wheel.executable not in (find_triton().executable, on_path.executable)


def test_without_a_triton_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_module, "CONTAINER", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=re.escape(pip_install("serving"))):
        find_triton()


@pytest.fixture
def wheel(triton) -> Triton:
    found = find_triton()
    if found.wheel is None:
        pytest.skip("this machine's Triton is not the wheel's")
    return found


def test_numpy_2_is_refused_with_the_remedy(wheel, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(EngineError, match=r"numpy 2\.1\.0: pip install 'numpy<2'"):
        wheel.prepare(tmp_path)


def test_an_environment_that_tritons_models_could_not_import_from_is_refused(wheel, monkeypatch, tmp_path):
    """Triton would wait for them for ever."""
    monkeypatch.setattr("sys.prefix", "/home/josé/.venv")
    with pytest.raises(EngineError, match=r"^/home/josé/\.venv: .* ASCII paths alone"):
        wheel.prepare(tmp_path)


@pytest.mark.parametrize(
    ("found", "place"), [("/other/trtllm_dflash/__init__.py", "/other/trtllm_dflash"), ("", "nowhere")]
)
def test_models_that_would_import_another_package_are_refused(found, place, wheel, monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, stdout=f"{found}\n")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: done)
    with pytest.raises(EngineError, match=f"Triton's models import trtllm_dflash from {place}, and this is /"):
        wheel.prepare(tmp_path)


def test_a_missing_libpython_is_refused_with_the_package(wheel, monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, stdout="\tlibpython3.11.so.1.0 => not found\n")
    monkeypatch.setattr("trtllm_dflash.serving.triton._check_installed", lambda: None)
    monkeypatch.setattr("subprocess.run", lambda *words, **options: done)
    with pytest.raises(EngineError, match=r"libpython3\.11\.so\.1\.0, .*: apt install libpython3\."):
        wheel.prepare(tmp_path)
