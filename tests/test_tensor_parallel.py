"""Tensor parallelism on CPU: MPI processes, gloo."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests import rank_replies
from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, build_tiny
from tests.family_checks import on_ranks
from tests.near_ties import assert_only_near_ties_differ
from tests.processes import start
from tests.rank_replies import SAMPLED, TOKENS, replies
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.cost.memory import cache_bytes
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Decode
from trtllm_dflash.session.launcher import mpi_memory
from trtllm_dflash.signals import ENDING
from trtllm_dflash.step import Drafting

pytestmark = pytest.mark.slow

pytest.importorskip("mpi4py", reason="tensor parallelism needs the tp extra (mpi4py and an MPI)")

MPIEXEC = Path(sys.executable).parent / "mpiexec"
COMMAND = [sys.executable, "-m", "trtllm_dflash", "generate", "--device", "cpu"]


def run(*arguments: object, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(argument) for argument in arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [text for kind in read_prompts(1).values() for text in kind]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    for tp in (2, 4):
        build_tiny(folder / str(tp), tp=tp)
    build_tiny(folder / "fp8", tp=2, kv="fp8")
    return folder


def generated(ranks: int, prompts: list[list[int]], *engines: object) -> list[list[list[list[list[int]]]]]:
    """The `replies` of the ranks of engines, each given with its `draft_tree`, one engine after the other."""
    done = run(MPIEXEC, "-n", ranks, sys.executable, rank_replies.__file__, json.dumps(prompts), *engines)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def ids(tiny, prompts) -> list[list[int]]:
    lines = prompts.read_text().splitlines()
    return [tiny.encode([{"role": "user", "content": json.loads(line)["prompt"]}]) for line in lines]


@pytest.fixture(scope="module")
def alone(tiny, ids) -> list[list[list[list[int]]]]:
    """What one rank says."""
    return replies(tiny, ids)


@pytest.fixture(scope="module")
def of_two(engines, ids) -> dict[str, list[list[list[list[int]]]]]:
    """What two ranks say that draft chains, that draft trees, and that have FP8 caches."""
    asked = {"chains": (engines / "2", "auto"), "trees": (engines / "2", 31), "fp8": (engines / "fp8", "auto")}
    found = generated(2, ids, *(word for engine in asked.values() for word in engine))
    return dict(zip(asked, found, strict=True))


def test_ranks_give_the_tokens_of_one(of_two, alone):
    assert of_two["chains"] == alone


def test_ranks_agree_on_trees(of_two, alone):
    for trees, chains in zip(of_two["trees"], alone, strict=True):
        assert [ids for ids, _ in trees] == [ids for ids, _ in chains]
        assert sum(len(accepted) for _, accepted in trees) < sum(len(accepted) for _, accepted in chains)


def test_the_command_starts_the_ranks_and_gives_their_tokens(engines, prompts, alone):
    options = [word for name, value in SAMPLED.items() for word in (f"--{name.replace('_', '-')}", value)]
    asked = ["--prompts", prompts, "--max-tokens", TOKENS, "--json", *options]
    done = run(*COMMAND, "--engine", engines / "2", *asked)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[row["token_ids"], row["accepted_per_step"]] for row in rows] == alone[1]


@pytest.mark.principal("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_a_kv_head_where_there_are_fewer_heads_than_ranks(ranks, tmp_path):
    # A vocabulary of 16: a drafter that knows nothing is still right now and then, so blocks are accepted in part.
    target = make_target(tmp_path / "target", kv_heads=ranks // 2, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target, kv_heads=1)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10] * 3, [11, 12]]
    with LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_seq_len=64) as llm:
        expected = replies(llm, prompts)
    assert on_ranks(target, drafter, ranks, lambda llm: replies(llm, prompts)) == expected
    assert any(count for said in expected for _, accepted in said for count in accepted)


def test_a_broken_rank_file_ends_every_rank_with_one_line(engines, tmp_path):
    shutil.copytree(engines / "2", tmp_path / "engine")
    with (tmp_path / "engine" / "rank1.safetensors").open("r+b") as file:
        file.truncate(1000)
    done = run(*COMMAND, "--engine", tmp_path / "engine", "--prompt", "hello")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if "rank1.safetensors" in line]
    assert len(done.stderr.splitlines()) == 1


#: The command, whose rank 0 fails in its third step, once the other rank has been told of it.
FAILING = """
import sys
from trtllm_dflash.__main__ import start
from trtllm_dflash.session.launcher import launched_rank
from trtllm_dflash.session.torch_session import TorchSession

whole, steps = TorchSession._run_step, []

def run_step(session, call):
    steps.append(call)
    if launched_rank() == 0 and len(steps) == 3:
        raise RuntimeError("a fault")
    return whole(session, call)

TorchSession._run_step = run_step
start()
"""


def test_a_step_that_fails_on_rank_0_ends_every_rank_with_one_line(engines, tmp_path):
    """The other one waited for it in a sum, and it for the other to hear that the session is closed."""
    (tmp_path / "failing.py").write_text(FAILING)
    asked = ["generate", "--device", "cpu", "--engine", engines / "2", "--prompt", "Count.", "--max-tokens", 50]
    done = run(MPIEXEC, "-n", 2, sys.executable, tmp_path / "failing.py", *asked)
    assert (done.returncode, done.stderr.strip()) == (1, "error: a step failed: RuntimeError: a fault")
    wait_until(lambda: not ranks_of(engines / "2"), "no rank is left")


def test_a_session_whose_ranks_are_not_in_step_takes_no_more_calls_and_closes_without_one(tiny_engine, monkeypatch):
    class Two(Solo):
        size, sent = 2, 0

        def broadcast(self, x):
            self.sent += 1
            return x

    def fail(call):
        raise RuntimeError("a fault")

    with LLM.load(tiny_engine, "cpu") as llm:
        session, two = llm.session, Two()
        monkeypatch.setattr(session, "communicator", two)
        monkeypatch.setattr(session, "_compute", fail)
        call = Decode([1], Drafting.OFF, 1, sampled=False)
        with pytest.raises(RuntimeError, match="a fault"):
            session.decode(call)
        with pytest.raises(EngineError, match="start the engine again"):
            session.decode(call)
        assert two.sent == 2  # the number of words, and these
    assert two.sent == 2


def test_a_wrong_number_of_processes_is_refused(engines):
    done = run(MPIEXEC, "-n", 2, *COMMAND, "--engine", engines / "4", "--prompt", "hello")
    assert done.returncode != 0
    assert "mpiexec -n 4" in done.stderr


def ranks_of(engine):
    """The processes that run an engine."""
    return [int(pid) for pid in run("pgrep", "-f", engine).stdout.split()]


@pytest.mark.principal("SIGTERM")
@pytest.mark.parametrize("number", [pytest.param(number, id=number.name) for number in ENDING])
def test_a_signal_ends_all_ranks_with_one_line(number, engines):
    """Each waited for the others to end MPI."""
    words = [*COMMAND, "--engine", str(engines / "2"), "--prompt", "Count.", "--ignore-eos", "--max-tokens", "1900"]
    process = start(words)
    assert process.stdout is not None
    process.stdout.read(1)  # the reply has begun
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE)[1] == f"error: {ENDING[number]}\n"
    assert process.returncode == 128 + number
    wait_until(lambda: not ranks_of(engines / "2"), "no rank is left")


@pytest.mark.principal("SIGTERM")
@pytest.mark.parametrize("number", [pytest.param(number, id=number.name) for number in ENDING])
def test_a_signal_ends_ranks_that_have_not_begun_mpi(number, engines, tmp_path):
    """Their launcher would print a page, and end with a code of its own. Rank 1 comes late, and rank 0 waits in MPI."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('PMI_RANK') == '1':\n    import time\n    time.sleep(3600)\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = start([*COMMAND, "--engine", engines / "2", "--prompt", "Count."], env=environment)
    memory: set[Path] = set()

    def begun() -> bool:
        memory.update(*map(mpi_memory, ranks_of(engines / "2")))
        return bool(memory) or (version("mpich").startswith("4.") and len(ranks_of(engines / "2")) == 4)

    wait_until(begun, "rank 0 has shared memory")
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE)[1] == f"error: {ENDING[number]}\n"
    assert process.returncode == 128 + number
    assert not ranks_of(engines / "2")
    assert not any(file.exists() for file in memory)


def test_ranks_end_with_the_command_that_is_killed(engines):
    words = [*COMMAND, "--engine", str(engines / "2"), "--prompt", "Count.", "--ignore-eos", "--max-tokens", "1900"]
    process = start(words)
    assert process.stdout is not None
    process.stdout.read(1)
    process.kill()
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not ranks_of(engines / "2"), "no rank is left")


def test_ranks_with_fp8_caches_say_what_one_says(of_two, ids):
    """Sums over ranks differ in their last digits, and may turn how a row is rounded: so but for near-ties."""
    greedy, _ = of_two["fp8"]
    folders, params = (TINY / "target", TINY / "drafter"), SamplingParams(max_tokens=TOKENS)
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=4, max_seq_len=512, kv="fp8") as llm:
        alone = llm.generate(ids, params)
        texts = [token_ids for token_ids, _ in greedy], [reply.token_ids for reply in alone]
        same = assert_only_near_ties_differ(llm, ids, *texts, params, dtype=torch.bfloat16)
    assert same >= 2
    accepted = [sum(counts) / len(counts) for _, counts in greedy]
    expected = [sum(reply.accepted_per_step) / reply.steps for reply in alone]
    assert sum(accepted) > 0.8 * sum(expected)


def test_ranks_run_mixed_steps_over_pages_and_preempt_together(ids, tmp_path):
    """Pages for two of six: pages, pieces and copies reach the second rank, or its rows would be others."""
    pages = {"page_size": 64, "max_seq_len": 256, "chunk": 64}
    build_tiny(tmp_path / "all", tp=2, **pages)
    few = 1.01 * cache_bytes(read_config(tmp_path / "all"), Paging(6, 64, 5)) / GB
    asked = [*ids, *ids[:2]]
    params = [SamplingParams(max_tokens=40, temperature=0.9 * (i % 2), seed=i) for i in range(len(asked))]
    folders = TINY / "target", TINY / "drafter"
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=1, max_seq_len=256) as llm:
        alone = [llm.generate([asked[i]], params[i])[0].token_ids for i in range(len(asked))]

    def scheduled(llm):
        scheduler = Scheduler(llm.session)
        sequences = [llm.intake.sequence(asked[i], params[i], True, 100, None) for i in range(len(asked))]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        return [sequence.token_ids for sequence in sequences], scheduler.statistics

    replies, counts = on_ranks(*folders, 2, scheduled, kv_memory=few, **pages)
    assert replies == alone
    assert min(counts.steps["mixed"], counts.preemptions, counts.prefix_hits) > 0
    assert counts.pages_used == 0
