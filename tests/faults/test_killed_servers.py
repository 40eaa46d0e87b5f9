"""Servers that are killed while they stream: every client is told, and nothing stays for long."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.streams import GrpcStream, OpenAIStream
from tests.serving.runs import WHOLE_BLOCK, serve
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.serving import claim, processes
from trtllm_dflash.serving.lifeline import FOLDER, Lifeline

MOST_SECONDS = 5  # in which a client of a killed server is told


@pytest.mark.slow
def test_a_killed_serve_takes_triton_and_its_models_with_it_and_no_stream_hangs(triton, served_engine):
    with serve("--engine", served_engine, *WHOLE_BLOCK, "--openai-port", 0, "--json") as run:
        at = json.loads(run.line())
        clients = [GrpcStream(at["grpc"]) for _ in range(12)] + [OpenAIStream(at["openai"]) for _ in range(4)]
        # Any four: there are fewer slots than clients, and who waits for one waits for a whole reply.
        wait_until(lambda: sum(client.begun.is_set() for client in clients) >= 4, "four clients stream")
        assert len(run.processes()) == 6  # serve, Triton, four models
        run.process.kill()
        killed = time.monotonic()
        for client in clients:
            assert client.joined().ended - killed < MOST_SECONDS
        said = [client.said for client in clients[:12]]
        assert all("UNAVAILABLE" in words for words in said), said
        assert not any("[DONE]" in client.said for client in clients[12:])
        wait_until(lambda: not run.processes(), "all its processes have ended")
        assert run.shared_memory()
        assert list(run.folder.iterdir())
        claim.remove_orphans()  # as the next server does
        # Another test's server may have begun just now, and be removing them instead.
        wait_until(lambda: run.leaves_nothing() and not list(run.folder.iterdir()), "nothing is left")


@pytest.mark.slow
def test_when_the_engines_process_is_killed_its_clients_are_told_and_serve_ends(triton, served_engine):
    with serve("--engine", served_engine, *WHOLE_BLOCK, "--openai-port", 0, "--json") as run:
        at = json.loads(run.line())
        clients = [GrpcStream(at["grpc"]), OpenAIStream(at["openai"])]
        for client in clients:
            assert client.begun.wait(PATIENCE)
        os.kill(run.pid_of("tensorrt_llm/1/model.py"), signal.SIGKILL)
        killed = time.monotonic()
        for client in clients:
            assert client.joined().ended - killed < MOST_SECONDS
        *_, event, done = clients[1].events
        assert json.loads(event)["error"]["code"] in ("unavailable", "shutdown")  # whichever is seen first
        assert done == "[DONE]"
        code, errors = run.ends()
        assert code == 1
        assert errors.count("\n") == 1
        wait_until(run.leaves_nothing, "nothing of it is left")


def test_a_process_that_holds_pythons_lock_for_ever_ends_with_its_server(tmp_path):
    script = (
        "import ctypes\n"
        "from trtllm_dflash.serving.lifeline import hold_lifeline\n"
        "hold_lifeline()\n"
        "print('held', flush=True)\n"
        "ctypes.PyDLL(None).sleep(3600)\n"
    )
    server = Lifeline(tmp_path)
    words = [sys.executable, "-c", script]
    child = subprocess.Popen(words, env={**os.environ, FOLDER: str(tmp_path)}, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    assert child.poll() is None
    server.close()  # as the kernel does at this process's end
    assert child.wait(PATIENCE) == -signal.SIGKILL
    child.stdout.close()


def test_the_next_server_ends_a_process_that_a_killed_one_left(tmp_path):
    of_mpi = claim.SHARED_MEMORY / f"mpich_shm_{tmp_path.parent.name}"
    of_mpi.touch()
    killed = claim.Claim()
    killed.add_memory([of_mpi])
    name = killed.name
    del killed  # and its lock with it
    words = [sys.executable, "-c", "import time; time.sleep(3600)"]
    left = subprocess.Popen(words, env={**os.environ, processes.MARK: name})
    wait_until(lambda: processes.find_processes(name), "it runs")
    claim.remove_orphans()
    assert left.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not of_mpi.exists() and not list(claim.SHARED_MEMORY.glob(f"{name}*")), "nothing is left")


def test_what_belongs_to_a_living_server_is_left_alone():
    living = claim.Claim()
    file = claim.SHARED_MEMORY / f"{living.name}-tensors"
    file.touch()
    of_mpi = claim.SHARED_MEMORY / f"mpich_shm_{living.name}"
    of_mpi.touch()
    living.add_memory([of_mpi])
    claim.remove_orphans()
    assert file.exists()
    assert of_mpi.exists()
    assert living.folder.is_dir()
    # systemd-tmpfiles takes this lock of a folder before it removes what is old in it.
    folder = os.open(living.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    living.release()
    assert not of_mpi.exists()
    assert not list(claim.SHARED_MEMORY.glob(f"{living.name}*"))
    assert not living.folder.exists()


def test_a_lock_that_names_a_folder_of_somebody_else_removes_nothing(tmp_path):
    lock = claim.SHARED_MEMORY / f"trtllm-dflash-{os.getpid():08x}.lock"
    lock.write_bytes(bytes(tmp_path))
    claim.remove_orphans()
    wait_until(lambda: not lock.exists(), "the lock is removed")
    assert tmp_path.is_dir()
