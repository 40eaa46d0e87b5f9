"""Fixtures: the shipped pair, built once; and the command line, run in this process.

The process that hands tests to others reads this file, and waits for no torch: what needs it imports it.
"""

import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings

import trtllm_dflash
from tests.principal_cases import mark_repeats
from trtllm_dflash.cli import main
from trtllm_dflash.serving.collector import uncollected

if TYPE_CHECKING:
    from trtllm_dflash import LLM

TINY = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
HYBRID = TINY.with_name("tiny-hybrid")

# Examples are drawn slowly beside other work: no fault of theirs.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# A job that a shell has put into its background ignores Ctrl-C, and what it starts does too: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files that take longest for the number of their tests: they go first, so that no process is left with one in the end.
LONGEST = (
    *("test_plugins.py", "test_server.py", "test_row_exactness.py", "test_demo.py", "test_train_run.py"),
    *("test_tensor_parallel.py", "test_killed_servers.py", "test_drain.py", "test_quantize.py", "test_hybrids.py"),
    *("test_tiny_hybrid.py", "test_light_drafter.py", "test_draft_tree.py", "test_build.py", "test_windows.py"),
    *("test_departures.py", "test_draft_trees.py", "test_shared_rows.py", "test_shaped_steps.py", "test_gateway.py"),
    *("test_compile.py", "test_moe_network.py", "test_hybrid_network.py", "test_gemma_network.py", "test_drafting.py"),
    *("test_kimi_network.py", "test_minimax_network.py", "test_sweep_arms.py", "test_killed_builds.py"),
)

#: Files whose tests share the servers of tests/serving/conftest.py, of ten seconds each: they stay together.
SERVED = (
    *("test_gateway.py", "test_models.py", "test_load.py", "test_contract.py", "test_tools.py", "test_examples.py"),
    *("test_openai_choices.py", "test_compare.py", "test_sweep_server.py", "test_hostile_triton.py"),
)


#: Files that import ModelOpt, which takes six seconds: they stay together too.
MODELOPT = ("test_quantize.py", "test_quantized_experts.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Has one process take all files that share a server, or an import that takes long."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            name = Path(file).name
            return "served" if name in SERVED else "modelopt" if name in MODELOPT else file

    return Files(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects with the garbage collector off: it would walk through a million objects, and all of them stay.

    Nor does it later, while the tests run.
    """
    with uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks repeats, and orders files, for they are handed out one by one: the longest, then those of most tests."""
    some = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    mark_repeats(items, whole=not some)
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -counts[item.path], str(item.path)))


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Runs `trtllm-dflash` with these arguments; an exception that would be a traceback fails the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    finally:  # a command may keep its own: its process ends with it
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(*arguments: object, stdin: str | None = None) -> str:
    """Runs a command that must succeed; returns what it prints."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refusal(*arguments: object, stdin: str | bytes | None = None) -> str:
    """Runs a command that must be refused with one line and nothing else; returns that line."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


def build_tiny(output: Path, **settings: object) -> Path:
    """Builds the shipped pair with other settings than its own."""
    from trtllm_dflash.build.builder import build
    from trtllm_dflash.build.settings import BuildSettings

    values = {"precision": "fp32", "max_seq_len": 2048, **settings}
    pair = {"name": "tiny", "target": str(TINY / "target"), "drafter": str(TINY / "drafter")}
    build(BuildSettings.model_validate({**pair, **values}), output)
    return output


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """Never more than OMP_NUM_THREADS: on busy cores, threads that wait for each other make small models 20x slower."""
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory):
    """The engine directory of the shipped pair, FP32."""
    return build_tiny(tmp_path_factory.mktemp("engines") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_engine):
    """That engine, loaded on the CPU."""
    from trtllm_dflash import LLM

    with LLM.load(tiny_engine, "cpu") as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_at():
    """The shipped pair at another block size or precision, straight from its checkpoints."""

    def load(block_size: int, precision: str = "fp32", **more: Any) -> "LLM":
        from trtllm_dflash import LLM

        folders = str(TINY / "target"), str(TINY / "drafter")
        return LLM.from_pretrained(
            *folders, precision=precision, device="cpu", max_batch=3, max_seq_len=1024, block_size=block_size, **more
        )

    return load
