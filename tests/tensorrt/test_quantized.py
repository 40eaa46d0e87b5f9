"""Networks of quantized matrices: evaluated, they are the dequantized numbers' products; and they compile for real."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoints import make_drafter, make_target
from tests.quantized import quantize_folder
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.engine.builder import BuildSettings, as_planned, plan_engine
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.weights import complete_weights, read_rank_weights
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.linear_weight import QuantizedWeight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.step import StepInputs

Tensor = torch.Tensor

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt  # noqa: E402
from tests.tensorrt.test_network import Both, ints  # noqa: E402
from trtllm_dflash.engine.tensorrt_compiler import CompileSettings, Plan, compile_rank  # noqa: E402

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
    limits: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "chunk": 24, "sampling": False}
    return plan_engine(pair, BuildSettings(name="test", target="", drafter="", tp=tp, **limits, **settings))


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


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_an_evaluated_network_is_the_dequantized_reference(pairs: dict[str, Pair], kind: str, tp: int) -> None:
    config = make_config(pairs[kind], tp, precision=None)
    assert config.precision == "fp32" and config.target.linear_precision is not None
    both = Both(trt.Builder(trt.Logger(trt.Logger.ERROR)), pairs[kind], config, RoundedOps)
    kinds = [layer.type.name for layer in map(both.emitted[0].network.get_layer, range(40))]
    assert "DEQUANTIZE" in kinds
    assert ("QUANTIZE" in kinds, "DYNAMIC_QUANTIZE" in kinds) == (kind == "tensor", kind == "nvfp4")
    ids = torch.randint(512, (1, 20), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    offsets = torch.arange(4, dtype=torch.int32)[None]
    # Both.run compares tokens, drafts and every row of the caches. Sums over ranks round otherwise than one sum, and
    # where a rounded input turns on that, it turns by a whole step: there, ranks are compared as closely as that is.
    if tp == 1 or KINDS[kind] is None:
        out = both.run(StepInputs(ids, ints(0), ints(20), ints([19]), offsets))
        rows = torch.arange(4, dtype=torch.int32)[None]
        both.run(StepInputs(out.next_tokens, out.next_start, ints(4), rows, offsets))
        assert both.compared == 2
        return
    try:
        both.run(StepInputs(ids, ints(0), ints(20), ints([19]), offsets))
    except AssertionError:
        pass
    for name, cache in both.caches.items():
        found = torch.cat([rank[name][:1, :, :20] for rank in both.rank_caches], dim=1)
        error = (found - cache[:1, :, :20]).norm() / cache[:1, :, :20].norm()
        assert error < 0.02, name


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


@pytest.mark.parametrize(
    ("kind", "gpu", "tp"),
    [
        *(("tensor", gpu, tp) for gpu in ("sm89", "sm120") for tp in (1, 8)),
        *(("channel", gpu, tp) for gpu in ("sm89", "sm120") for tp in (1, 8)),
        *(("blocks", gpu, tp) for gpu in ("sm89", "sm120") for tp in (1, 2)),
        *((kind, "sm120", tp) for kind in ("nvfp4", "nvfp4 weights") for tp in (1, 8)),
    ],
)
def test_quantized_steps_compile(pairs: dict[str, Pair], kind: str, gpu: str, tp: int) -> None:
    assert compiled(pairs[kind], gpu, tp).data.nbytes > 0


def test_a_plan_keeps_matrices_in_their_few_bits(tmp_path: Path) -> None:
    """What a larger FFN adds to a plan: a byte a number in FP8, 9/16 in NVFP4, and not the two of BF16."""
    per_number = {}
    for kind, scale in (("tensor", 4 / 448), ("nvfp4", 4 / 2688)):
        sizes = []
        for intermediate in (256, 2048):
            path = tmp_path / f"{kind}{intermediate}"
            target = make_target(path / "target", layers=2, hidden=512, **SHAPE | {"intermediate": intermediate})
            quantize_folder(target, kind, input_scale=scale)
            sizes.append(compiled(open_pair(target), "sm120", 1).data.nbytes)
        per_number[kind] = (sizes[1] - sizes[0]) / (2 * 3 * 512 * (2048 - 256))
    print(per_number)
    assert 0.9 < per_number["tensor"] < 1.3
    assert 0.5 < per_number["nvfp4"] < 0.8


def test_the_target_s_precision_is_the_plan_s(pairs: dict[str, Pair]) -> None:
    config = make_config(pairs["channel"], backend="tensorrt", gpu="sm120")
    assert (config.precision, config.target.linear_precision) == ("bf16", WeightPrecision.FP8)
