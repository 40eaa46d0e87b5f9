"""Plans of hybrids whose gated delta nets are our plugin, up to the plan; see `test_plugin_network`."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.conftest import refusal
from tests.hybrid_checkpoints import make_hybrid
from tests.tensorrt.evaluator import trt
from tests.tensorrt.plugin_network import LIBRARY, PluginBuilder, use_plugins
from tests.tensorrt.test_hybrid_network import make_hybrid_pair
from tests.tensorrt.test_network import make_config
from tests.tensorrt.test_session import CPU, EvaluatedEngine, replies
from trtllm_dflash.build.tensorrt_network import build_network
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.ops.tensorrt_plugin import load_plugin
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.session.tensorrt_session import TensorRTSession
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.session.weights import complete_weights

pytestmark = pytest.mark.slow


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a datacenter edition of these tests takes for the plugins' library."""
    use_plugins(monkeypatch)
    path = tmp_path / "libdflash_plugin.so"
    path.write_bytes(LIBRARY)
    return path


def test_a_session_gets_the_same_replies_from_a_plan_with_the_nets_as_plugins(library: Path, tmp_path: Path) -> None:
    load_plugin(library)
    pair = make_hybrid_pair(tmp_path, "qwen3_5_text", vocab=16, num_hidden_layers=2, full_attention_interval=2)
    plain = make_config(pair, max_batch=2).model_copy(update={"sampling": False})
    config = plain.model_copy(update={"backend": "tensorrt", "plugin": "0" * 64})
    weights = read_rank_weights(pair, 1, 0, config.dtype)
    builder = PluginBuilder(trt.Builder(trt.Logger(trt.Logger.ERROR)))
    step = build_network(builder, config, complete_weights(weights, config, 0), 0)
    names = [layer.name for _, layer in step.network.plugins]
    # The target attends by TensorRT's own layers: RoPE rotates a part of its heads.
    assert names[0] == "model.layers.0.linear_attn/plugin" and len(names) == 1 + 1
    session = TensorRTSession(config, EvaluatedEngine(step, aliased=False), CPU)
    held = sum(tensor.nbytes for tensor in session.states.tensors.values())
    assert held == plan_memory(config).states == plan_memory(plain).states
    prompts = [[5, 6, 7], list(range(15)) * 2, [9] * 11, [*list(range(15)) * 2, 3, 3], [4]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with torch.inference_mode():
        assert replies(session, prompts, params) == replies(TorchSession(plain, weights, CPU), prompts, params)


def test_nets_that_the_plugin_does_not_compute_are_refused(library: Path, tmp_path: Path) -> None:
    target = make_hybrid(tmp_path / "target", "qwen3_5_text", linear_key_head_dim=24, linear_value_head_dim=24)
    build = ["build", "--backend", "tensorrt", "--gpu", "sm120", "--target", target, "--plugin", library]
    said = refusal(*build, "--output", tmp_path / "engine")
    assert "--plugin: it has no gated delta nets with heads of 16, 32, 64, 128, keys as values" in said
