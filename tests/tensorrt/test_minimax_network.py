"""MiniMax-M2 as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter
from tests.quantized import quantize_folder
from tests.test_minimax_m2 import make_minimax_m2
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.errors import SettingsError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config
from tests.tensorrt.test_quantized import compiled

pytestmark = pytest.mark.slow


def make_pair(folder: Path, drafter: dict[str, Any] | None = None, blocks: bool = False, **target: Any) -> Pair:
    path = make_minimax_m2(folder / "target", **target)
    if blocks:
        quantize_folder(path, "blocks")
    shape = drafter or {"heads": 8}
    return open_pair(path, make_drafter(folder / "drafter", path, block_size=BLOCK, tap_layers=(0,), **shape))


@pytest.mark.principal("2-120-True-fp32", "1-120-False-fp16")
@pytest.mark.parametrize(
    ("tp", "capability", "blocks", "precision"),
    [(1, 120, False, "fp16"), (8, 89, False, "fp32"), (2, 103, False, "fp32"), (2, 120, True, "fp32")],
)
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(
    tmp_path: Path, tp: int, capability: int, blocks: bool, precision: str
) -> None:
    """Of eight ranks, four share each key head."""
    shape: dict[str, Any] = {"num_hidden_layers": 2}
    if blocks:
        shape |= {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 16, "num_attention_heads": 16}
    pair = make_pair(tmp_path, {"heads": 16, "kv_heads": 8} if blocks else None, blocks, **shape)
    config = make_config(pair, tp, precision).model_copy(update={"sampling": False})
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pair, config, capability)
    kept = torch.float8_e4m3fn if blocks else config.dtype
    assert both.weights["model.layers.0.mlp.experts.down_proj.weight"].dtype == kept
    prompts = [5, 1] if blocks else [30, 5, 1]
    survived = compare_generation(both, prompts, steps=3)
    assert both.compared == (2 if blocks else 4) + 3 and survived > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Heads of 128, half of each rotated, as published; blocks of 128 divide what one and two ranks hold."""
    shape = {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 512, "intermediate_size": 256}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64}
    drafter = {"layers": 1, "heads": 16, "kv_heads": 8, "head_size": 64}
    return make_pair(tmp_path_factory.mktemp("minimax"), drafter, blocks=True, **shape)


@pytest.mark.principal("sm89-2-fp8")
@pytest.mark.parametrize(("gpu", "tp", "precision"), [("sm120", 8, "bf16"), ("sm89", 2, "fp8")])
def test_steps_compile(pair: Pair, gpu: str, tp: int, precision: str) -> None:
    """As they are stored, in FP8 blocks, and dequantized."""
    assert compiled(pair, gpu, tp, precision=precision, sampling=False).data.nbytes > 0


def test_a_plugin_that_rotates_whole_heads_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_dflash.build.planning.has_plugin_layers", lambda module: True)
    with pytest.raises(SettingsError, match="--plugin: it has no RoPE of a part of a head; leave it out"):
        compiled(pair, "sm120", 1, plugin="libdflash_plugin.so")
