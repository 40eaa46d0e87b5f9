"""The step compiles for real, for GPUs that need not be there; what TensorRT refuses is said in our words."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_target
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import weight_count
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.session.weights import complete_weights

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing can be compiled")

from trtllm_dflash.build.tensorrt_compiler import (
    CompileSettings,
    Plan,
    compile_rank,
    compile_target,
    load_timing_cache,
    save_timing_cache,
)
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

pytestmark = pytest.mark.slow

TINY_PAIR = Path(__file__).parents[2] / "trtllm_dflash" / "pairs" / "tiny"
SHAPE: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_size": 64, "intermediate": 256}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """One small pair of each family: 2 target layers, 1 drafter layer."""
    made = {}
    reduced: dict[str, Any] = {"format": "speculators", "draft_vocab": 256}
    for family, tied, drafter in (("qwen3", True, {}), ("llama", False, reduced)):
        path = tmp_path_factory.mktemp(family)
        target = make_target(path / "target", family, layers=2, hidden=128, vocab=512, tied=tied, **SHAPE)
        made[family] = open_pair(
            target, make_drafter(path / "drafter", target, layers=1, tap_layers=(0, 1), **SHAPE, **drafter)
        )
    return made


finish_weights = complete_weights


def make_config(pair: Pair, tp: int, precision: Any) -> EngineConfig:
    limits: dict[str, Any] = {"max_batch": 4, "max_seq_len": 256, "chunk": 64}
    return plan_engine(
        pair, BuildSettings(name="test", target="", drafter="", precision=precision, tp=tp, **limits)
    ).config


def compile_pair(
    pair: Pair, gpu: str, tp: int = 1, precision: Any = "bf16", rank: int = 0, sampled: bool = False, **settings: Any
) -> Plan:
    config = make_config(pair, tp, precision).model_copy(update={"sampling": sampled})
    weights = finish_weights(read_rank_weights(pair, tp, rank, config.dtype), config, rank)
    progress = settings.pop("progress", lambda *_: None)
    return compile_rank(config, weights, rank, CompileSettings(gpu=gpu, **settings), progress)


#: Numbers of ranks with each precision and each GPU, and families by turns.
COMBINATIONS = [
    ("qwen3", 1, "bf16", "sm120"),
    ("llama", 1, "fp16", "sm89"),
    ("llama", 2, "bf16", "sm89"),
    ("qwen3", 2, "fp16", "sm120"),
    ("qwen3", 8, "bf16", "sm89"),
    ("llama", 8, "fp16", "sm120"),
]


@pytest.mark.principal("qwen3-2-fp16-sm120")
@pytest.mark.parametrize(("family", "tp", "precision", "gpu"), COMBINATIONS)
def test_both_profiles_compile(pairs: dict[str, Pair], family: str, tp: int, precision: str, gpu: str) -> None:
    plan = compile_pair(pairs[family], gpu, tp, precision, rank=tp - 1, sampled=precision == "bf16")
    assert plan.data.nbytes > 0


@pytest.mark.exhaustive(beside="test_both_profiles_compile")
@pytest.mark.parametrize("rank", [0, 4])  # the last one is among the combinations
def test_the_first_and_a_middle_rank_compile(pairs: dict[str, Pair], rank: int) -> None:
    assert compile_pair(pairs["llama"], "sm120", tp=8, rank=rank).data.nbytes > 0


@pytest.mark.exhaustive(beside="test_both_profiles_compile")
def test_a_drafter_of_five_layers_compiles(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", layers=2, hidden=128, vocab=512, **SHAPE)
    drafter = make_drafter(tmp_path / "drafter", target, layers=5, tap_layers=(0, 1), **SHAPE)
    assert compile_pair(open_pair(target, drafter), "sm120", sampled=True).data.nbytes > 0


@pytest.mark.exhaustive(beside="tests/test_demo.py::test_json_is_all_that_json_prints_and_has_every_figure")
def test_shipped_pair_compiles() -> None:
    if not (TINY_PAIR / "drafter" / "config.json").is_file():
        pytest.skip("the pair in trtllm_dflash/pairs/tiny is not there yet")
    pair = open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter")
    assert compile_pair(pair, "sm120", sampled=True).data.nbytes > 0


@dataclass(frozen=True)
class Compiled:
    """A plan, what was said while it was compiled, and its log."""

    plan: Plan
    calls: list[tuple[str, int, int]]
    log: str


@pytest.fixture(scope="module")
def compiled(pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The pair whose head is tied, for SM120."""
    calls: list[tuple[str, int, int]] = []
    log = tmp_path_factory.mktemp("compiled") / "build.log"
    plan = compile_pair(pairs["qwen3"], "sm120", progress=lambda *call: calls.append(call), log=log)
    return Compiled(plan, calls, log.read_text())


def test_a_tied_head_is_stored_once(
    compiled: Compiled, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pairs["qwen3"].target_config.vocab_size * pairs["qwen3"].target_config.hidden_size * 2
    tied = compiled.plan.data.nbytes

    def with_a_head_of_its_own(weights: dict[str, torch.Tensor], config: EngineConfig, rank: int) -> Any:
        complete = complete_weights(weights, config, rank)
        return complete | {"lm_head.weight": complete["lm_head.weight"] + 1}

    monkeypatch.setattr(sys.modules[__name__], "finish_weights", with_a_head_of_its_own)
    untied = compile_pair(pairs["qwen3"], "sm120").data.nbytes
    assert 0.9 * table < untied - tied < 1.5 * table


def test_both_profiles_share_one_set_of_weights(compiled: Compiled, pairs: dict[str, Pair], tmp_path: Path) -> None:
    shape = SHAPE | {"intermediate": 2048}
    target = make_target(tmp_path / "target", layers=2, hidden=512, vocab=512, tied=True, **shape)
    large = open_pair(target, make_drafter(tmp_path / "drafter", target, layers=1, tap_layers=(0, 1), **shape))
    few_weights, more_weights = (weight_count(make_config(pair, 1, "bf16")) * 2 for pair in (pairs["qwen3"], large))
    grown = compile_pair(large, "sm120").data.nbytes - compiled.plan.data.nbytes
    assert 0.9 < grown / (more_weights - few_weights) < 1.2


def test_progress_and_log(compiled: Compiled) -> None:
    assert compiled.calls[0][:2] == ("engine", 0) and compiled.calls[-1][1] == compiled.calls[-1][2]
    assert "INFO: " in compiled.log


def test_timing_cache_is_kept(tmp_path: Path) -> None:
    """With a stand-in: TensorRT-RTX measures nothing, so its timing cache is always empty."""

    class Options:
        def create_timing_cache(self, known: bytes) -> bytes:
            return known

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> None:
            assert not ignore_mismatch
            self.cache = cache

        def get_timing_cache(self) -> Any:
            return SimpleNamespace(serialize=lambda: self.cache + b"measured;")

    for built in range(2):
        options = Options()
        load_timing_cache(options, tmp_path / "timing.cache")
        assert options.cache == b"measured;" * built
        save_timing_cache(options, tmp_path / "timing.cache")
    assert list(tmp_path.iterdir()) == [tmp_path / "timing.cache"]


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, however these tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_cancels(pairs: dict[str, Pair], heard: None) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compile_pair(pairs["qwen3"], "sm120", progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("gpu", ["sm90", "b300"])
def test_gpus_that_rtx_does_not_know_are_refused(gpu: str) -> None:
    trt = load_tensorrt()
    if not hasattr(trt, "ComputeCapability"):
        pytest.skip("the datacenter edition is installed: it takes the GPU present")
    with pytest.raises(SettingsError, match=f"--gpu {gpu}: TensorRT-RTX compiles for sm75, sm80, .* sm120, sm121"):
        compile_target(trt, gpu)
    with pytest.raises(SettingsError, match="--gpu is not given"):
        compile_target(trt, None)


def test_fp32_is_refused_in_our_words(pairs: dict[str, Pair]) -> None:
    with pytest.raises(EngineError, match=r"use --precision bf16 or fp16; it says: .*dedicated kernel") as refused:
        compile_pair(pairs["qwen3"], "sm120", precision="fp32")
    assert "\n" not in str(refused.value)


def test_one_query_head_a_rank_is_refused_in_our_words(pairs: dict[str, Pair]) -> None:
    with pytest.raises(EngineError, match="one query head a rank, use --tp below 16"):
        compile_pair(pairs["qwen3"], "sm120", tp=16)
