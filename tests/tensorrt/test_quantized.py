"""Networks of quantized matrices: evaluated, they are the dequantized numbers' products; and they compile for real."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoints import make_drafter, make_target
from tests.quantized import quantize_folder
from trtllm_dflash.build.planning import as_planned, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.linear_weight import QuantizedWeight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.step import Drafting, StepInputs

Tensor = torch.Tensor

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt  # noqa: E402
from tests.tensorrt.test_network import TINY_PAIR, Both, bound_inputs, ints  # noqa: E402
from trtllm_dflash.build.tensorrt_compiler import CompileSettings, Plan, compile_rank  # noqa: E402
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps  # noqa: E402

pytestmark = pytest.mark.slow

STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

# Heads of 64, two a rank on 8 ranks; blocks of 128 divide what one and two ranks hold.
SHAPE: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_size": 64, "intermediate": 512}
#: Layouts, and what a calibration found of what goes in. These activations reach about 3, FP8 448, NVFP4 2,688.
KINDS = {"tensor": 4 / 448, "channel": None, "blocks": None, "nvfp4": 4 / 2688, "nvfp4 weights": None}


def make_pair(path: Path, kind: str) -> Pair:
    target = make_target(path / "target", layers=2, hidden=256, vocab=512, **SHAPE)
    drafter = make_drafter(path / "drafter", target, layers=1, tap_layers=(0, 1), block_size=4, **SHAPE)
    for folder in (target, drafter):
        quantize_folder(folder, kind.partition(" ")[0], input_scale=KINDS[kind])
    return open_pair(target, drafter)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: make_pair(tmp_path_factory.mktemp("pair"), kind) for kind in KINDS}


def make_config(pair: Pair, tp: int = 1, **settings: Any) -> EngineConfig:
    limits: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "chunk": 24}
    config = plan_engine(pair, BuildSettings(name="test", target="", drafter="", tp=tp, **limits, **settings)).config
    return config.model_copy(update={"sampling": False})


class RoundedOps(TorchOps):
    """What goes into a matrix is rounded as a calibrated checkpoint says, by other means than TensorRT's layers."""

    def quantized_product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        if weight.input_scale is not None:
            rounded = _to_fp8 if isinstance(weight, Fp8Weight) else _to_nvfp4
            x = rounded(x.float(), weight.input_scale).to(x.dtype)
        return F.linear(x, weight.dequantize().to(x.dtype))


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


def _to_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 16))
    block_scale = ((blocks.abs().amax(dim=-1, keepdim=True) / 6 / scale).clamp(max=448).to(FP8).float()) * scale
    y = blocks / block_scale.masked_fill(block_scale == 0, 1)
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    return ((y / step).round() * step * block_scale).flatten(-2)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_linear_s_layers_are_the_product_of_what_its_numbers_stand_for(pairs: dict[str, Pair], kind: str) -> None:
    weights = read_rank_weights(pairs[kind], 1, 0, torch.float32)
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1))
    # q, k and v have scales of their own, and so have the layers of the drafter's context.
    for name in ("model.layers.1.self_attn.qkv_proj", "drafter.context_kv_proj"):
        network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(STRONGLY_TYPED)
        ops = TensorRTOps(network, weights, {})
        y = ops.linear(name, network.add_input("x", trt.float32, (-1, -1, 256)))
        network.mark_output(y)
        kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
        assert (
            kinds.count("DEQUANTIZE") == {"tensor": 2, "channel": 1, "blocks": 1, "nvfp4": 4, "nvfp4 weights": 2}[kind]
        )
        assert ("QUANTIZE" in kinds, "DYNAMIC_QUANTIZE" in kinds) == (kind == "tensor", kind == "nvfp4")
        expected = RoundedOps(weights, {}).linear(name, x)
        torch.testing.assert_close(evaluate([network], [{"x": x}])[0][y.name], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind, scale in KINDS.items() if scale is None])
@torch.inference_mode()
def test_an_evaluated_step_is_torch_ops_dequantized_one(pairs: dict[str, Pair], kind: str, tp: int) -> None:
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pairs[kind], make_config(pairs[kind], tp))
    ids = torch.randint(512, (1, 20), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    rows = torch.arange(4, dtype=torch.int32)[None]
    out = both.run(StepInputs(ids, ints(0), ints(20), ints([19]), rows))
    both.run(StepInputs(out.next_tokens, out.next_start, ints(4), rows, rows))
    assert both.compared == 2


@pytest.mark.parametrize(("kind", "scale", "tp"), [("tensor", 50 / 448, 2), ("nvfp4", 50 / 2688, 1)])
@torch.inference_mode()
def test_an_evaluated_step_of_the_shipped_pair_rounds_what_a_calibration_says(
    kind: str, scale: float, tp: int, tmp_path: Path
) -> None:
    """Where sums differ in their last digits, a rounded number may turn by a whole step, and others with it.

    Which do depends on the CPU. So most rows of the second layer, behind all products of the first, are equal; those of
    later ones are no other model's.
    """
    for role in ("target", "drafter"):
        shutil.copytree(TINY_PAIR / role, tmp_path / role)
        quantize_folder(tmp_path / role, kind, input_scale=scale)
    pair = open_pair(tmp_path / "target", tmp_path / "drafter")
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pair, make_config(pair, tp), ops=RoundedOps)
    ids = torch.randint(2048, (1, 20), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    inputs = StepInputs(ids, ints(0), ints(20), ints([19]), torch.arange(16, dtype=torch.int32)[None])
    caches = {name: cache[:1] for name, cache in both.caches.items()}
    both.step(RoundedOps(both.weights, caches), inputs, Drafting.BLOCK)
    bound = [bound_inputs(inputs) | {name: cache[:1] for name, cache in rank.items()} for rank in both.rank_caches]
    evaluate([network.network for network in both.emitted], bound)
    errors = {}
    for name, cache in caches.items():
        found, expected = (x[0, :, :20] for x in (torch.cat([rank[name] for rank in bound], dim=1), cache))
        errors[name] = (found - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))  # of each row
    print(kind, tp, max(float(of.max()) for of in errors.values()))
    for name in ("key", "value"):
        assert (errors[f"model.layers.1.{name}"] < 1e-5).sum() >= 15
    assert all(of.median() < 0.4 for of in errors.values())
    assert errors["model.layers.0.key"].max() < 1e-5


@torch.inference_mode()
def test_matrices_that_are_rounded_at_the_build_are_dequantized_too(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", layers=2, tied=True)
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target, tap_layers=(0, 1), block_size=4))
    config = make_config(pair, precision="fp8", drafter_precision="fp8")
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), as_planned(pair, config), config)
    ids, offsets = ints([5, 6, 7, 8, 9]), torch.arange(4, dtype=torch.int32)[None]
    both.run(StepInputs(ids, ints(0), ints(5), ints([4]), offsets))


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(pair: Pair, gpu: str, tp: int, **settings: Any) -> Plan:
    config = make_config(pair, tp, backend="tensorrt", gpu=gpu, **settings)
    weights = read_rank_weights(as_planned(pair, config), tp, tp - 1, config.dtype)
    return compile_rank(config, complete_weights(weights, config, tp - 1), tp - 1, CompileSettings(gpu=gpu))


@pytest.mark.principal("blocks-sm120-2")
@pytest.mark.parametrize(
    ("kind", "gpu", "tp"),
    [
        ("tensor", "sm120", 1),
        ("channel", "sm89", 8),
        ("blocks", "sm120", 2),
        ("nvfp4", "sm120", 1),
        ("nvfp4 weights", "sm120", 8),
    ],
)
def test_quantized_steps_compile(pairs: dict[str, Pair], kind: str, gpu: str, tp: int) -> None:
    assert compiled(pairs[kind], gpu, tp).data.nbytes > 0


@pytest.mark.principal("nvfp4")
@pytest.mark.parametrize(
    ("kind", "scale", "least", "most"),
    [("tensor", 4 / 448, 0.9, 1.3), ("nvfp4", 4 / 2688, 0.5, 0.8)],
    ids=["fp8", "nvfp4"],
)
def test_a_plan_keeps_matrices_in_their_few_bits(
    tmp_path: Path, kind: str, scale: float, least: float, most: float
) -> None:
    """What a larger FFN adds to a plan: a byte a number in FP8, 9/16 in NVFP4, and not the two of BF16."""
    sizes = []
    for intermediate in (256, 2048):
        path = tmp_path / str(intermediate)
        target = make_target(path / "target", layers=1, hidden=512, **SHAPE | {"intermediate": intermediate})
        quantize_folder(target, kind, input_scale=scale)
        sizes.append(compiled(open_pair(target), "sm120", 1).data.nbytes)
    per_number = (sizes[1] - sizes[0]) / (3 * 512 * (2048 - 256))
    print(kind, per_number)
    assert least < per_number < most


def test_the_target_s_precision_is_the_plan_s(pairs: dict[str, Pair]) -> None:
    config = make_config(pairs["channel"], backend="tensorrt", gpu="sm120")
    assert (config.precision, config.target.linear_precision) == ("bf16", WeightPrecision.FP8)


# -- caches ------------------------------------------------------------------------------------------------------------


class Heard(trt.ILogger):  # type: ignore[misc]
    """What TensorRT says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.lines.append(message)


def test_tensorrt_updates_no_fp8_cache_which_is_why_a_build_refuses_them() -> None:
    logger = Heard()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    cache, rows = (network.add_input(name, trt.fp8, (-1, 2, size, 64)) for name, size in (("cache", 128), ("rows", 4)))
    start = network.add_input("start", trt.int32, (-1,))
    layer = network.add_kv_cache_update(cache, rows, start, trt.KVCacheMode.LINEAR)
    network.mark_output(layer.get_output(0))
    assert builder.build_serialized_network(network, builder.create_builder_config()) is None
    assert any("cache has type FP8 but must have type Float, Half, or BFloat16" in line for line in logger.lines)


def test_a_checkpoint_that_asks_for_fp8_caches_gets_the_engine_s_in_a_plan(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", layers=1)
    summary = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (target / "hf_quant_config.json").write_text(json.dumps(summary))
    pair, settings = open_pair(target), {"name": "a", "target": "", "max_seq_len": 64}
    plan = plan_engine(pair, BuildSettings.model_validate({**settings, "backend": "tensorrt", "gpu": "sm120"}))
    assert (plan.config.kv, plan.config.cache_dtype) == (None, torch.bfloat16)
    assert plan.remarks[0] == "kv auto: the target's checkpoint asks for caches in FP8; they are in bf16"
    assert plan_engine(pair, BuildSettings.model_validate(settings)).config.kv == "fp8"
