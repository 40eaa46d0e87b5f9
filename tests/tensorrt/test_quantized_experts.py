"""Networks of experts in FP8 and NVFP4: evaluated, they are TorchOps; compiled, they are plans for every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_qwen3_moe
from tests.quantized import quantize_folder
from trtllm_dflash.build.planning import as_planned
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import complete_weights

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from tests.tensorrt.test_network import BLOCK, Both, compare_generation
from tests.tensorrt.test_quantized import STRONGLY_TYPED, _to_fp8, _to_nvfp4, make_config
from trtllm_dflash.build.tensorrt_compiler import CompileSettings, compile_rank
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

LAYOUTS = ("tensor", "channel", "blocks", "nvfp4")
EXPERTS = 4
# Blocks of 128 divide what one and two ranks hold.
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 8, "head_size": 64, "kv_heads": 4, "intermediate": 256}


def make_pair(path: Path, layout: str) -> Pair:
    target = make_qwen3_moe(path / "target", experts=EXPERTS, top_k=2, **SHAPE)
    quantize_folder(target, layout)
    return open_pair(
        target,
        make_drafter(path / "drafter", target, tap_layers=(0, 1), block_size=BLOCK, layers=1, heads=8, kv_heads=8),
    )


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {layout: make_pair(tmp_path_factory.mktemp(layout), layout) for layout in LAYOUTS}


@pytest.mark.principal("nvfp4-2-120", "blocks-1-120", "tensor-1-103", "channel-1-120")
@pytest.mark.parametrize(("tp", "capability"), [(1, 120), (2, 120), (1, 103)])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_network_computes_what_torch_ops_computes(
    builder: Any, pairs: dict[str, Pair], layout: str, tp: int, capability: int
) -> None:
    both = Both(builder, pairs[layout], make_config(pairs[layout], tp), capability)
    compare_generation(both, [20, 3], steps=2)
    assert both.compared == 2 + 2


@pytest.mark.parametrize(("layout", "rounded", "scale"), [("tensor", _to_fp8, 0.01), ("nvfp4", _to_nvfp4, 0.002)])
@torch.inference_mode()
def test_what_goes_into_gate_and_up_is_rounded_as_a_calibration_says(
    builder: Any, pairs: dict[str, Pair], layout: str, rounded: Any, scale: float
) -> None:
    prefix = "model.layers.0.mlp."
    layer = MoELayer(prefix, EXPERTS, 0, EXPERTS, 2, True)
    read = read_rank_weights(pairs[layout], 1, 0, torch.float32)
    weights = {name: x for name, x in read.items() if name.startswith(prefix + "experts.")}
    input_scale = torch.tensor(scale)
    calibrated = weights | {f"{prefix}experts.{name}_proj.input_scale": input_scale for name in ("gate_up", "down")}
    network = builder.create_network(STRONGLY_TYPED)
    ops = TensorRTOps(network, calibrated, {}, capability=120)
    given = [network.add_input(name, trt.float32, (-1, -1, size)) for name, size in (("x", 128), ("l", EXPERTS))]
    y = ops.moe(layer, *given)
    network.mark_output(y)
    x, logits = (torch.randn(2, 5, size, generator=torch.Generator().manual_seed(1)) for size in (128, EXPERTS))
    (found,) = evaluate([network], [{"x": x, "l": logits}])
    expected = TorchOps(weights, {}).moe(layer, rounded(x, input_scale), logits)
    torch.testing.assert_close(found[y.name], expected, atol=1e-4, rtol=1e-4)


def test_each_expert_of_a_layer_has_a_scale_of_its_own(pairs: dict[str, Pair]) -> None:
    """Without that, the two above would say less than they seem to."""
    for layout in ("tensor", "nvfp4"):
        weights = read_rank_weights(pairs[layout], 1, 0, torch.float32)
        stored = linear_weight(weights, "model.layers.0.mlp.experts.down_proj")
        scale = getattr(stored, "global_scale" if layout == "nvfp4" else "scale")
        assert len(scale.unique()) == EXPERTS


def compiled_bytes(target: Path, gpu: str, tp: int = 1, ep: bool = False) -> int:
    pair = open_pair(target)
    config = make_config(pair, tp, ep=ep, backend="tensorrt", gpu=gpu)
    weights = read_rank_weights(as_planned(pair, config), tp, tp - 1, config.dtype)
    complete = complete_weights(weights, config, tp - 1)
    return compile_rank(config, complete, tp - 1, CompileSettings(gpu=gpu)).data.nbytes


@pytest.mark.principal("nvfp4-sm120-2-False")
@pytest.mark.parametrize(
    ("layout", "gpu", "tp", "ep"),
    [
        ("tensor", "sm120", 1, False),
        ("tensor", "sm120", 2, False),
        ("tensor", "sm89", 2, True),
        ("blocks", "sm120", 2, False),
        ("nvfp4", "sm120", 1, False),
        ("nvfp4", "sm120", 2, False),
    ],
)
def test_steps_compile(pairs: dict[str, Pair], layout: str, gpu: str, tp: int, ep: bool) -> None:
    assert compiled_bytes(pairs[layout].target_folder.path, gpu, tp, ep) > 0


@pytest.mark.principal("nvfp4-4.5")
@pytest.mark.parametrize(("layout", "bits"), [("blocks", 8), ("nvfp4", 4.5)])
def test_a_plan_keeps_experts_in_their_few_bits(tmp_path: Path, layout: str, bits: float) -> None:
    """What wider experts add to a plan."""
    sizes = []
    for columns in (256, 2048):
        shape = {**SHAPE, "layers": 1, "hidden": 256, "intermediate": columns}
        target = make_qwen3_moe(tmp_path / str(columns), experts=EXPERTS, top_k=2, **shape)
        quantize_folder(target, layout)
        sizes.append(compiled_bytes(target, "sm120"))
    found = 8 * (sizes[1] - sizes[0]) / (EXPERTS * 3 * 256 * (2048 - 256))
    print(layout, found)
    assert bits - 0.5 < found < 1.2 * bits
