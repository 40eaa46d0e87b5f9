"""Kimi-K2.5 as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter
from tests.test_kimi_k25 import make_kimi
from trtllm_dflash.checkpoint.pair import Pair, open_pair

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config
from tests.tensorrt.test_quantized import compiled

pytestmark = pytest.mark.slow


def make_pair(folder: Path, drafter: dict[str, Any] | None = None, **target: Any) -> Pair:
    path, _ = make_kimi(folder / "target", num_hidden_layers=2, **target)
    shape = {"block_size": BLOCK, "tap_layers": (0, 1), **(drafter or {})}
    return open_pair(path, make_drafter(folder / "drafter", path, **shape))


@pytest.mark.parametrize(("tp", "capability"), [(1, 120), (2, 103)])
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(tmp_path: Path, tp: int, capability: int) -> None:
    """One layer is dense, one of experts in INT4; a chunk's rows are absorbed here, and not in TorchOps."""
    pair = make_pair(tmp_path)
    config = make_config(pair, tp, max_seq_len=96, chunk=40).model_copy(update={"sampling": False})
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pair, config, capability)
    survived = compare_generation(both, [50, 5, 1], steps=3)
    assert both.compared == 4 + 3 and survived > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Rows of 576 numbers, as published, and two heads a rank."""
    shape = {"hidden_size": 128, "vocab_size": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    drafter = {"layers": 1, "heads": 4, "kv_heads": 2, "head_size": 64}
    return make_pair(tmp_path_factory.mktemp("kimi"), drafter, qk_rope_head_dim=64, **shape)


@pytest.mark.parametrize(("gpu", "tp"), [("sm120", 1), ("sm120", 2), ("sm89", 2)])
def test_steps_compile(pair: Pair, gpu: str, tp: int) -> None:
    assert compiled(pair, gpu, tp, sampling=False).data.nbytes > 0
