"""Servers that are killed while they stream: every client is told, and nothing stays for long."""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.faults.streams import GrpcStream, OpenAIStream
from tests.serving.runs import WHOLE_BLOCK, serve
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.serving import claim, processes
from trtllm_dflash.serving.lifeline import FOLDER, Lifeline
from trtllm_dflash.session.launcher import mpi_memory

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


@contextmanager
def starting_rank(name):
    """A server's process with MPI's shared memory, and the file of that."""
    memory = claim.SHARED_MEMORY / f"mpich_shm_{secrets.token_hex(8)}_0"
    memory.write_bytes(bytes(8))
    script = (
        "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); it = mmap.mmap(file.fileno(), 8); time.sleep(3600)"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, memory], env={**os.environ, processes.MARK: name})
    try:
        wait_until(lambda: mpi_memory(rank.pid), "it has shared memory")
        yield rank, memory
    finally:
        rank.kill()
        rank.wait(PATIENCE)
        memory.unlink(missing_ok=True)


def test_the_next_server_ends_a_process_that_a_killed_one_left():
    killed = claim.Claim()
    name = killed.name
    with starting_rank(name) as (left, memory):
        del killed  # and its lock with it
        claim.remove_orphans()
        assert left.wait(PATIENCE) == -signal.SIGKILL
        wait_until(lambda: not list(claim.SHARED_MEMORY.glob(f"{name}*")), "nothing is left")
        wait_until(lambda: not memory.exists(), "nor is its shared memory")


def test_the_next_server_removes_the_shared_memory_of_ranks_that_were_killed_while_they_started():
    killed = claim.Claim()
    with starting_rank("another") as (_, other), starting_rank(killed.name) as (rank, memory):
        killed.note_memory()
        rank.kill()  # as the kernel does at the server's end
        rank.wait(PATIENCE)
        assert memory.exists()
        del killed
        claim.remove_orphans()
        wait_until(lambda: not memory.exists(), "it is removed")
        assert other.exists()


def test_a_server_that_ends_while_its_ranks_start_leaves_none_of_their_shared_memory():
    ending = claim.Claim()
    with starting_rank(ending.name) as (_, memory), starting_rank("another") as (_, other):
        ending.release()
        assert not memory.exists()
        assert other.exists()


def test_what_belongs_to_a_living_server_is_left_alone():
    living = claim.Claim()
    file = claim.SHARED_MEMORY / f"{living.name}-tensors"
    file.touch()
    claim.remove_orphans()
    assert file.exists()
    assert living.folder.is_dir()
    # systemd-tmpfiles takes this lock of a folder before it removes what is old in it.
    folder = os.open(living.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    living.release()
    assert not list(claim.SHARED_MEMORY.glob(f"{living.name}*"))
    assert not living.folder.exists()


def test_the_logs_of_the_last_servers_that_failed_stay_and_older_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failed = [failed_server(age) for age in range(claim.KEPT_LOGS + 2)]
    living = claim.Claim()  # which has begun no log
    other = tmp_path / "trtllm-dflash-notes"
    other.mkdir()
    (other / "file").touch()
    claim.remove_orphans()
    assert set(tmp_path.iterdir()) == {*failed[: claim.KEPT_LOGS], living.folder, other}
    living.release()


def failed_server(age):
    """The folder of a server that failed, which its log stays in."""
    failed = claim.Claim()
    (failed.folder / "server.log").touch()
    failed.release(keep_files=True)
    os.utime(failed.folder, (1e9 - age, 1e9 - age))
    return failed.folder


def test_a_lock_that_names_a_folder_of_somebody_else_removes_nothing(tmp_path):
    lock = claim.SHARED_MEMORY / f"trtllm-dflash-{os.getpid():08x}.lock"
    lock.write_bytes(bytes(tmp_path))
    claim.remove_orphans()
    wait_until(lambda: not lock.exists(), "the lock is removed")
    assert tmp_path.is_dir()
