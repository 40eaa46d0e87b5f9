"""gpt-oss and Qwen3-MoE as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans for every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss, make_qwen3_moe
from trtllm_dflash.checkpoint.pair import Pair, open_pair

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config


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
