"""`build --backend tensorrt` and `inspect` as a user meets them: a small pair, compiled for an absent GPU."""

import json
import os
import shutil
import signal
import sys

import pytest

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, refusal, succeeds
from tests.processes import is_killed, start
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.build.tensorrt_ranks import check_host_memory, compile_ranks, host_memory
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.session.tensorrt_session import check_version
from trtllm_dflash.signals import ENDING

pytestmark = pytest.mark.slow

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing can be compiled")

BUILD = ["build", "--model", "tiny", "--backend", "tensorrt"]
SMALL = ["--max-batch", "2", "--max-seq-len", "256", "--chunk", "64", "--optimization-level", "0"]


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """Flags of a pair with the shipped one's tokenizer, of which a rank is compiled in two seconds or so."""
    folder = tmp_path_factory.mktemp("small")
    shape = {"heads": 16, "kv_heads": 8, "head_size": 64}
    target = make_target(folder / "target", layers=2, hidden=128, vocab=2048, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, target)
    drafter = make_drafter(folder / "drafter", target, layers=1, tap_layers=(0, 1), **shape)
    return ["--target", target, "--drafter", drafter, "--max-seq-len", 256]


@pytest.fixture(scope="module")
def engine_flags(small_pair):
    """The small pair for SM120, two ranks."""
    return ["build", "--backend", "tensorrt", *small_pair, *SMALL, "--gpu", "rtx-5090", "--tp", 2]


@pytest.fixture(scope="module")
def engine(engine_flags, tmp_path_factory):
    """That engine, compiled two ranks at a time."""
    path = tmp_path_factory.mktemp("tensorrt") / "small"
    assert succeeds(*engine_flags, "--workers", 2, "--output", path).endswith(f"{path}: built\n")
    return path


def test_an_engine_directory_holds_a_plan_and_a_log_a_rank(engine):
    config = read_config(engine)
    logs = {"build-rank0.log", "build-rank1.log"}  # which nothing that is loaded depends on
    assert {"rank0.engine", "rank1.engine", "tokenizer.json"} <= set(config.files)
    assert set(config.files) == {file.name for file in engine.iterdir()} - {"config.json"} - logs
    assert all((engine / log).is_file() for log in logs)
    assert (config.backend, config.precision, config.gpu, config.tp) == ("tensorrt", "bf16", "rtx-5090", 2)
    assert [plan.bytes for plan in config.plans] == [(engine / f"rank{i}.engine").stat().st_size for i in (0, 1)]
    assert "tensorrt_rtx" in config.versions
    assert "INFO" in (engine / "build-rank1.log").read_text()


def test_the_same_build_again_reuses_the_engine_and_another_is_refused(engine, engine_flags):
    asked = [*engine_flags, "--output", engine]
    before = (engine / "rank0.engine").stat().st_mtime_ns
    assert "up to date" in succeeds(*asked)
    assert (engine / "rank0.engine").stat().st_mtime_ns == before
    assert "--force" in refusal(*asked, "--max-batch", 3)


def test_inspect_says_what_is_inside(engine):
    text = succeeds("inspect", engine)
    for word in (
        "rtx-5090",
        "bf16",
        "2 slots, 256 tokens",
        "rank1.engine",
        "token_ids [?, ?] int32",
        "updated in place",
    ):
        assert word in text
    found = json.loads(succeeds("inspect", engine, "--json"))
    assert found["inputs"]["model.layers.0.key"] == {"shape": [-1, 4, 272, 64], "dtype": "bfloat16"}
    assert found["outputs"]["next_tokens"]["shape"] == [-1, -1]
    memory = found["memory_per_gpu"]
    assert memory["total"] == sum(size for part, size in memory.items() if part != "total")
    assert memory["target_cache"] == 2 * 2 * (2 * 4 * 272 * 64) * 2  # layers, K and V, [slots, heads, S, D], bytes
    assert all(plan["layers"] > 100 for plan in found["plans"])


@pytest.mark.parametrize("command", ["inspect", "deploy"])
def test_a_plan_that_is_cut_short_is_named(command, engine, tmp_path):
    cut = shutil.copytree(engine, tmp_path / "engine")
    plan = cut / "rank1.engine"
    size = plan.stat().st_size
    os.truncate(plan, size // 2)
    flags = {"inspect": (cut,), "deploy": ("--engine", cut, "--output", tmp_path / "repository")}[command]
    said = f"error: {plan}: has {size // 2} bytes, and {size} were built; build the engine again"
    assert refusal(command, *flags) == said


def test_inspect_reads_a_torch_engine_too(tiny_engine):
    text = succeeds("inspect", tiny_engine)
    assert "tiny (torch)" in text and "rank0.safetensors" in text


def test_a_plan_needs_its_gpu_to_generate(engine, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")  # as under a launcher: no ranks are started
    assert "mpiexec -n 2" in refusal("generate", "--engine", engine, "-p", "hello")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--precision", "fp32", "--gpu", "sm120"], "--precision fp32"),
        ([], "--gpu is not given"),
        (["--gpu", "h200"], "--gpu h200: TensorRT-RTX compiles for sm75"),
        (["--gpu", "abacus"], "--gpu abacus is not known"),
        (["--gpu", "RTX-4090", "--max-batch", "30000"], "more than RTX-4090 has"),
        (["--gpu", "b300", "--max-batch", "600000"], "more than b300 has"),
        (["--gpu", "sm120", "--optimization-level", "6"], "--optimization-level 6"),
        (["--gpu", "sm120", "--workers", "0"], "--workers 0"),
        (["--gpu", "rtx-4090", "--max-batch", "30000"], "more than rtx-4090 has: use --max-batch"),
        (["--gpu", "sm120", "--tp", "8", *SMALL], "one query head a rank, use --tp below 8"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_knob(arguments, said, tmp_path):
    assert said in refusal(*BUILD, "--output", tmp_path / "engine", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [["--greedy"], ["--workspace", "64"], ["--workers", "2"]])
def test_tensorrt_settings_are_refused_for_the_torch_backend(flag, tmp_path):
    line = refusal("build", "--model", "tiny", "--backend", "torch", "--output", tmp_path / "e", *flag)
    assert f"{flag[0]} is a setting of --backend tensorrt" in line


def test_more_workers_than_this_host_has_memory_for_are_refused(tiny):
    config: EngineConfig = tiny.config.model_copy(update={"tp": 4})
    assert host_memory(config) > 2e9
    check_host_memory(config, 1)
    with pytest.raises(SettingsError, match=r"--workers 100000: .* use --workers \d+"):
        check_host_memory(config, 100000)


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT), (2, signal.SIGHUP)])
def test_a_signal_ends_a_build_and_leaves_no_half_engine(small_pair, workers, number, tmp_path):
    words = ["build", "--backend", "tensorrt", *small_pair, "--gpu", "sm120", "--tp", 4, "--workers", workers]
    command = [sys.executable, "-m", "trtllm_dflash", *words, "--output", tmp_path / "engine"]
    process = start(command, stdout=None, start_new_session=True)
    wait_until(lambda: list(tmp_path.glob(".*/build-rank0.log")) or process.poll() is not None, "rank 0 is compiled")
    # Ctrl-C, and a terminal that closes, reach the workers too; a polite kill the command alone.
    (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, errors
    assert f"error: {ENDING[number]}\n" in errors
    if number != signal.SIGHUP:  # which ends Python's tracker of processes too: that warns, where nobody reads any more
        assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_torch_engine_of_the_same_pair_is_another_engine(engine, small_pair, tmp_path):
    succeeds("build", "--backend", "torch", *small_pair, "--output", tmp_path / "engine")
    assert read_config(tmp_path / "engine").backend != read_config(engine).backend


def test_a_plan_of_another_tensorrt_is_refused(engine):
    config = read_config(engine)
    check_version(config, "tensorrt_rtx", config.versions["tensorrt_rtx"])
    for name, version in (("tensorrt_rtx", "9.9"), ("tensorrt", config.versions["tensorrt_rtx"])):
        with pytest.raises(EngineError, match=f"compiled by tensorrt_rtx .* but {name} {version} is installed"):
            check_version(config, name, version)


def test_a_killed_worker_is_said_to_be_one(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.build.tensorrt_ranks._compile", is_killed)
    config = read_config(engine)
    with pytest.raises(EngineError, match="use fewer --workers"):
        compile_ranks(None, config, tmp_path, tmp_path, 2, lambda *_: None)  # type: ignore[arg-type]
