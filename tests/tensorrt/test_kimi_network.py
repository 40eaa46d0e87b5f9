"""Kimi-K2.5 as TensorRT networks: evaluated, they are TorchOps; compiled, they are plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter
from tests.test_kimi_k25 import make_kimi
from trtllm_dflash.build.planning import as_planned
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.ops.base import MoELayer

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation, make_config
from tests.tensorrt.test_quantized import compiled
from tests.tensorrt.test_session import assert_both_sessions_reply_alike
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps

pytestmark = pytest.mark.slow


def make_pair(folder: Path, drafter: dict[str, Any] | None = None, **target: Any) -> Pair:
    path, _ = make_kimi(folder / "target", num_hidden_layers=2, **target)
    shape = {"block_size": BLOCK, "tap_layers": (0, 1), **(drafter or {})}
    return open_pair(path, make_drafter(folder / "drafter", path, **shape))


@pytest.mark.principal("2-103-fp16")
@pytest.mark.parametrize(("tp", "capability", "precision"), [(1, 120, "fp32"), (2, 103, "fp16"), (8, 120, "fp32")])
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(tmp_path: Path, tp: int, capability: int, precision: str) -> None:
    """One layer is dense, one of experts in INT4; a chunk's rows are absorbed here, and not in TorchOps.

    Two ranks divide each expert, eight have an expert each.
    """
    heads = max(4, tp)
    pair = make_pair(tmp_path, {"heads": heads}, num_attention_heads=heads)
    limits = {"max_seq_len": 96, "chunk": 40, "ep": tp == 8}
    config = make_config(pair, tp, precision, **limits)
    # An engine of such a precision would have dequantized experts: these stay in INT4, beside it.
    stored = pair.target_config.model_dump(include={"linear_precision", "plain_linears"})
    config = config.model_copy(update={"target": config.target.model_copy(update=stored), "sampling": False})
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), as_planned(pair, config), config, capability)
    assert both.weights["model.layers.1.mlp.experts.down_proj.weight"].dtype == torch.int32
    prompts = [50, 5, 1] if tp < 8 else [5, 1]
    survived = compare_generation(both, prompts, steps=3)
    assert both.compared == (4 if tp < 8 else 2) + 3 and survived > 0


@pytest.mark.exhaustive(
    beside="tests/tensorrt/test_session.py::test_the_scheduler_gets_the_same_replies_from_both_sessions"
)
@torch.inference_mode()
def test_the_scheduler_gets_the_same_replies_from_both_sessions(tmp_path: Path) -> None:
    """One cache a layer; the last prompt starts from rows of the second."""
    assert_both_sessions_reply_alike(make_pair(tmp_path, vocab_size=32))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Rows of 576 numbers, as published, and two heads a rank."""
    shape = {"hidden_size": 128, "vocab_size": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    drafter = {"layers": 1, "heads": 4, "kv_heads": 2, "head_size": 64}
    return make_pair(tmp_path_factory.mktemp("kimi"), drafter, qk_rope_head_dim=64, n_routed_experts=4, **shape)


@pytest.mark.principal("sm89-2")
@pytest.mark.parametrize(("gpu", "tp"), [("sm120", 1), ("sm89", 2)])
def test_steps_compile(pair: Pair, gpu: str, tp: int) -> None:
    assert compiled(pair, gpu, tp, sampling=False).data.nbytes > 0


def test_a_plan_keeps_experts_in_int4() -> None:
    """What twice the experts add to a plan: half a byte a number and a scale for each 32, and not the two of BF16."""
    sizes = []
    for experts in (4, 8):
        numbers = experts * 3 * 256 * 512
        generator = torch.Generator().manual_seed(0)
        weights = {"mlp.router.correction_bias": torch.zeros(experts)}
        for name, (outputs, inputs) in {"gate_up": (1024, 256), "down": (256, 512)}.items():
            codes = torch.randint(-(2**31), 2**31 - 1, (experts, outputs, inputs // 8), generator=generator)
            weights[f"mlp.experts.{name}_proj.weight"] = codes.int()
            weights[f"mlp.experts.{name}_proj.scale"] = torch.ones(experts, outputs, inputs // 32).bfloat16()
        sizes.append(
            (numbers, len(experts_plan(MoELayer("mlp.", experts, 0, experts, 2, True, scores="sigmoid"), weights)))
        )
    (fewer, small), (more, large) = sizes
    assert 0.55 < (large - small) / (more - fewer) < 0.65


def experts_plan(layer: MoELayer, weights: dict[str, torch.Tensor]) -> memoryview:
    """Compiles a layer's experts alone, of rows [1, 4, 256], for SM120."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    ops = TensorRTOps(network, weights, {}, capability=120)
    x = network.add_input("x", trt.bfloat16, (1, 4, 256))
    network.mark_output(ops.moe(layer, x, network.add_input("logits", trt.float32, (1, 4, layer.experts))))
    options = builder.create_builder_config()
    options.num_compute_capabilities = 1
    options.set_compute_capability(trt.ComputeCapability.SM120, 0)
    return memoryview(builder.build_serialized_network(network, options))


def test_a_plugin_without_latent_attention_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_dflash.build.planning.has_plugin_layers", lambda module: True)
    with pytest.raises(SettingsError, match="--plugin: it has no latent attention; leave it out"):
        compiled(pair, "sm120", 1, plugin="libdflash_plugin.so")
