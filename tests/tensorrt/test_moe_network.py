"""gpt-oss and Qwen3-MoE as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans for every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_tensors, make_drafter, make_gpt_oss, make_qwen3_moe
from tests.conftest import succeeds
from trtllm_dflash.build.inspection import inspect_engine
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import plan_file, read_config
from trtllm_dflash.ops.tensorrt_attention import SINK_SIZE

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config
from tests.tensorrt.test_quantized import compiled
from trtllm_dflash.build.tensorrt_compiler import Plan
from trtllm_dflash.build.tensorrt_network import build_network

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def make_moe_pair(folder: Path, family: str, **target: Any) -> Pair:
    if family == "qwen3-moe":
        path = make_qwen3_moe(folder / "target", layers=3, **target)
    else:
        path = make_gpt_oss(folder / "target", layers=3, mxfp4=family == "gpt-oss", **target)
    drafter = make_drafter(folder / "drafter", path, block_size=BLOCK, attention_bias=family != "qwen3-moe")
    return open_pair(path, drafter)


@pytest.mark.principal("gpt-oss-2-103", "qwen3-moe-1-120")
@pytest.mark.parametrize(
    ("family", "tp", "capability"),
    [
        ("gpt-oss", 1, 120),
        ("gpt-oss", 2, 89),
        ("gpt-oss", 4, 120),  # a rank with padding alone
        ("gpt-oss", 2, 103),
        ("gpt-oss in BF16's layout", 2, 120),
        ("qwen3-moe", 1, 120),
        ("qwen3-moe", 2, 103),
    ],
)
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(
    builder: Any, tmp_path: Path, family: str, tp: int, capability: int
) -> None:
    pair = make_moe_pair(tmp_path, family)
    config = make_config(pair, tp).model_copy(update={"sampling": False})
    both = Both(builder, pair, config, capability)
    # The longest prompt passes the windows and the chunk.
    survived = compare_generation(both, [58, 5, 1], steps=3)
    assert both.compared == 5 + 3 and survived > 0


SHAPE: dict[str, Any] = {"heads": 16, "kv_heads": 8}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target of two layers and its drafter of one, of each family, that eight ranks can divide."""
    made = {}
    for family in ("gpt-oss", "qwen3-moe"):
        folder = tmp_path_factory.mktemp(family)
        if family == "gpt-oss":
            sizes: dict[str, Any] = {"intermediate": 256, "head_size": 64, "window": 128}
            target = make_gpt_oss(folder / "target", layers=2, hidden=128, vocab=512, **sizes, **SHAPE)
        else:
            target = make_qwen3_moe(folder / "target", layers=2, hidden=128, vocab=512, **SHAPE)
        drafter: dict[str, Any] = {"tap_layers": (0, 1), "attention_bias": family == "gpt-oss"}
        made[family] = target, make_drafter(folder / "drafter", target, layers=1, head_size=64, **drafter, **SHAPE)
    return made


@pytest.mark.principal("qwen3-moe-['--gpu', 'sm120', '--tp', '2', '--ep', '--greedy']")
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gpt-oss", ["--gpu", "sm120", "--tp", "1"]),
        ("gpt-oss", ["--gpu", "sm89", "--tp", "1", "--precision", "fp16", "--greedy"]),
        ("qwen3-moe", ["--gpu", "sm120", "--tp", "2", "--ep", "--greedy"]),
    ],
    ids=str,
)
def test_every_ranks_plan_is_built(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, family: str, flags: list[str]
) -> None:
    target, drafter = checkpoints[family]
    engine = tmp_path / "engine"
    limits = ["--max-batch", 4, "--max-seq-len", 256, "--chunk", 64]
    pair = ["--target", target, "--drafter", drafter]
    succeeds("build", "--backend", "tensorrt", *pair, "--output", engine, *limits, *flags)
    config = read_config(engine)
    assert len(config.plans) == config.tp == int(flags[flags.index("--tp") + 1])
    assert all((engine / plan_file(rank)).stat().st_size == plan.bytes for rank, plan in enumerate(config.plans))
    if family == "gpt-oss":
        shape = inspect_engine(engine).io.inputs["model.layers.1.key"].shape
        assert shape == (-1, 8 // config.tp, config.cache_length + 1, 64 + SINK_SIZE)


@pytest.mark.exhaustive(beside="test_every_ranks_plan_is_built")
def test_the_last_of_eight_ranks_compiles(checkpoints: dict[str, tuple[Path, Path]]) -> None:
    """Of each expert it has one block of MXFP4, and one key head."""
    assert compiled(open_pair(*checkpoints["gpt-oss"]), "sm120", 8).data.nbytes > 0


@pytest.mark.parametrize("lossy", [False, True], ids=["exact", "lossy"])
def test_a_build_reports_what_the_transcode_to_nvfp4_lost(
    tmp_path: Path, builder: Any, monkeypatch: pytest.MonkeyPatch, lossy: bool
) -> None:
    """As on a GPU that has TensorRT's mixture layer: TensorRT-RTX defines that network, and cannot compile it."""

    def compiled_elsewhere(config: EngineConfig, weights: Any, rank: int, *_: Any) -> Plan:
        step = build_network(builder, config, weights, rank, 103)
        return Plan(memoryview(b"plan"), step.network.num_layers, step.weight_count, step.transcoded)

    def damp(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.down_proj_scales"][2, 5, 0] -= 40

    monkeypatch.setattr("trtllm_dflash.build.tensorrt_ranks.compile_rank", compiled_elsewhere)
    target, engine = make_gpt_oss(tmp_path / "target", layers=2), tmp_path / "engine"
    if lossy:
        edit_tensors(target, damp)
    said = succeeds(
        "build", "--backend", "tensorrt", "--gpu", "sm120", "--tp", 2, "--target", target, "--output", engine
    )
    transcoded = read_config(engine).transcoded
    assert transcoded is not None and transcoded.rounded == int(lossy)
    blocks = 2 * 8 * 3 * 64 * 128 // 32  # layers, experts, matrices, hidden, columns: 96, padded for two ranks
    assert transcoded.blocks == blocks
    line = f"{blocks:,} blocks of MXFP4 as NVFP4, " + ("1 of them rounded" if lossy else "all exact")
    assert line in said and line in succeeds("inspect", engine)
