"""A build that was killed: the next one to the same place removes what it left, and nothing that somebody writes.

One that was asked to end leaves nothing.
"""

import fcntl
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_target
from tests.processes import start
from tests.waiting import PATIENCE
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.signals import ENDING

HALF_A_BUILD = """
import sys, time
import trtllm_dflash.build.builder as builder
from trtllm_dflash.cli import main
builder.read_engine_tensors = lambda *_: (print('reading', flush=True), time.sleep(3600))
main()
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "target"
    make_target(folder)
    return folder


@contextmanager
def half_a_build(target: Path, output: Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A build in a process of its own that has begun to write, and goes no further."""
    flags = ["--target", target, "--output", output]
    process = start([sys.executable, "-c", HALF_A_BUILD, "build", *flags], **{"stderr": None, **options})
    try:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_the_next_build_removes_what_a_killed_one_left(target, tmp_path):
    engine = tmp_path / "engine"
    with half_a_build(target, engine) as killed:
        assert set(tmp_path.iterdir()) == {aside(engine, killed.pid)}
    assert set(tmp_path.iterdir()) == {aside(engine, killed.pid)}
    (tmp_path / ".engine.notes.partial").mkdir()  # nobody's number
    with half_a_build(target, engine) as living:
        kept = {aside(engine, living.pid), tmp_path / ".engine.notes.partial"}
        assert set(tmp_path.iterdir()) == kept
        build(BuildSettings(name="small", target=str(target), max_seq_len=64), engine)
        assert set(tmp_path.iterdir()) == {engine, *kept}


@pytest.mark.principal("SIGHUP")
@pytest.mark.parametrize("number", [pytest.param(number, id=number.name) for number in ENDING])
def test_a_build_that_is_asked_to_end_leaves_nothing_and_says_why_it_ended(number, target, tmp_path):
    with half_a_build(target, tmp_path / "engine", stderr=subprocess.PIPE) as process:
        assert any(tmp_path.iterdir())
        process.send_signal(number)
        assert process.communicate(timeout=PATIENCE)[1] == f"error: {ENDING[number]}\n"
    assert process.returncode == 128 + number
    assert not any(tmp_path.iterdir())


def test_a_terminal_that_closes_ends_a_build(target, tmp_path):
    """Its bars, and what it says, cannot be written any more."""
    terminal, end = pty.openpty()
    flags = ["--target", target, "--output", tmp_path / "engine"]
    process = start([sys.executable, "-c", HALF_A_BUILD, "build", *flags], stdout=end, stderr=end)
    os.close(end)
    shown = b""
    while b"reading" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)  # the kernel's goes to who has it as controlling terminal
    assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    assert not any(tmp_path.iterdir())


def test_a_build_under_nohup_goes_on_when_the_terminal_closes(target, tmp_path):
    with half_a_build(target, tmp_path / "engine", ignored=[signal.SIGHUP], stderr=subprocess.PIPE) as process:
        process.send_signal(signal.SIGHUP)
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM


def test_what_a_build_in_another_container_writes_is_left_alone(target, tmp_path):
    engine = tmp_path / "engine"
    written = aside(engine, a_number_that_nobody_has())
    written.mkdir()
    lock = os.open(written, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    build(BuildSettings(name="small", target=str(target), max_seq_len=64), engine)
    assert written.is_dir()
    os.close(lock)


def aside(engine: Path, pid: int) -> Path:
    return engine.with_name(f".{engine.name}.{pid}.partial")


def a_number_that_nobody_has() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
