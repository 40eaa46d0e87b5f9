"""Mixtures of experts in NVFP4 on a GPU by our kernels: every number times every scale, and scales of all sizes."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import HALVES, assert_close
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.gpu.test_moe import FEW_AND_MANY, MANY, moe_in_float64
from tests.gpu.test_moe import Case as Any
from tests.test_experts import CLAMP
from trtllm_dflash import kernels
from trtllm_dflash.ops.base import ClampedSwiglu
from trtllm_dflash.ops.cuda_experts import moe_kernel, takes_experts, tile_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.mxfp4 import E2M1
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels()),
]


@dataclass
class Case(Any):
    """NVFP4 without biases; `power` of two by which gate and up are larger, and their inputs smaller."""

    packed: bool = False
    clamp: ClampedSwiglu | None = None
    bias: bool = False
    power: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()}-2^{self.power}"


QWEN3 = Case(1, experts=16, count=16, top_k=4, hidden=2048, columns=768)
CASES = [
    *(replace(QWEN3, rows=rows, dtype=dtype) for rows in (1, 8, 9, 80, 300) for dtype in HALVES),
    *(replace(QWEN3, rows=20, power=power) for power in (-100, 60)),
    *(replace(QWEN3, rows=20, power=power, dtype=torch.float16) for power in (-8, 4)),
    replace(QWEN3, rows=300, spread=0.0),  # all choose the first four
    Case(33, hidden=1056, columns=96, experts=8, first=3, count=5),  # a rank's; parts of units
    Case(40, torch.float16, hidden=2880, columns=352, experts=8, count=8, clamp=CLAMP, bias=True),
    Case(20, hidden=32, columns=32, experts=5, count=5, top_k=2),
    Case(12, hidden=5120, columns=128),
    *(Case(rows, hidden=544, columns=160, experts=8, first=3, count=5, bias=True) for rows in (15, 63, 97, 130, 512)),
    Case(200, hidden=704, columns=64, experts=16, count=16, gelu=True),
    replace(QWEN3, rows=40, normalized=False, logits_dtype=torch.float32),
    replace(QWEN3, rows=100, experts=128, count=128, top_k=8),
]


def make_inputs(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors as stored, of numbers and scales that are all as likely, x [rows, H] and logits [rows, experts]."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    weights = {}
    for name, rows, inputs, power in (
        ("gate_up_proj", 2 * case.columns, case.hidden, case.power),
        ("down_proj", case.hidden, case.columns, 0),
    ):
        key, shape = f"mlp.experts.{name}.", (case.count, rows, inputs // 2)
        weights[key + "weight"] = torch.randint(256, shape, generator=generator, device="cuda", dtype=torch.uint8)
        codes = torch.randint(127, (case.count, rows, inputs // 16), generator=generator, device="cuda")
        weights[key + "scale"] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        weights[key + "global_scale"] = torch.exp2(normal(case.count, rows) + power) * inputs**-0.5 / 384
        if case.bias:
            weights[key + "bias"] = normal(case.count, rows).to(case.dtype)
    if case.gelu:
        weights["mlp.router.expert_scale"] = (0.5 + normal(case.experts).abs()).to(case.dtype)
    x, logits = normal(case.rows, case.hidden), case.spread * normal(case.rows, case.experts)
    return weights, (x * 2.0**-case.power).to(case.dtype), logits.to(case.logits_dtype or case.dtype)


def kernel_of(case: Case, weights: dict[str, torch.Tensor], many: bool | None = None):
    """The kernels' feed-forward of what is stored."""
    ordered = {name: tensor.clone() for name, tensor in weights.items()}
    tile_experts(ordered, case.dtype, torch.cuda.get_device_capability())
    return moe_kernel(case.layer, Experts.of(ordered, case.layer), many)


@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nvfp4_experts_equal_float64(case, many, poisoned):
    weights, x, logits = make_inputs(case)
    moe = kernel_of(case, weights, many)
    assert moe.takes(x, logits)
    out, expected = moe(x, logits), moe_in_float64(case, weights, x, logits, torch.float32)
    print(f"largest error {(out - expected).abs().max():.3g} of {expected.abs().max():.3g}")
    assert_close(out, expected, case.dtype, roundings=3.0)
    assert all(moe(x, logits).equal(out) for _ in range(5))


@pytest.mark.parametrize("many", [MANY])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_and_many_rows_are_computed_to_the_same_bits(case, many):
    weights, x, logits = make_inputs(case)
    assert kernel_of(case, weights, False)(x, logits).equal(kernel_of(case, weights, many)(x, logits))


@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_times_every_scale_is_exact(dtype, many):
    """Down's row r has the number r % 16 with the scale r / 16 everywhere, and its inputs add up to 1."""
    case = Case(9, dtype, experts=1, count=1, top_k=1, hidden=2048, columns=64)
    weights, x, logits = make_inputs(case)
    row = torch.arange(2048, device="cuda")
    down = (row % 16 * 17).to(torch.uint8)
    scale = (row // 16).clamp(max=126).to(torch.uint8).view(torch.float8_e4m3fn)
    weights["mlp.experts.down_proj.weight"] = down[None, :, None].expand(1, -1, 32).contiguous()
    weights["mlp.experts.down_proj.scale"] = scale[None, :, None].expand(1, -1, 4).contiguous()
    weights["mlp.experts.down_proj.global_scale"].fill_(1.0)
    # A gate of 32 is what comes out of SiLU, and an up of 2^-11 makes it 2^-6: of the first input, which is 1.
    one = torch.zeros(1, 128, 1024, dtype=torch.uint8, device="cuda")
    one[..., 0] = E2M1.index(1.0)
    weights["mlp.experts.gate_up_proj.weight"] = one
    weights["mlp.experts.gate_up_proj.scale"] = torch.ones(1, 128, 128, device="cuda").to(torch.float8_e4m3fn)
    powers = torch.tensor([32.0, 2.0**-11], device="cuda").repeat_interleave(64)
    weights["mlp.experts.gate_up_proj.global_scale"] = powers[None]
    x[:, 0] = 1.0
    numbers = torch.tensor(E2M1, device="cuda", dtype=torch.float64)[row % 16] * scale.double()
    found = kernel_of(case, weights, many)(x, logits).double()
    assert found.equal(numbers.expand(9, -1))


@pytest.mark.parametrize("many", [None, *FEW_AND_MANY])
def test_a_rows_result_is_the_same_to_the_bit_alone_and_among_others(many):
    case = replace(QWEN3, rows=200)
    weights, x, logits = make_inputs(case)
    moe = kernel_of(case, weights, many)
    out = moe(x, logits)
    for rows in (slice(0, 1), slice(7, 15), slice(100, 177)):
        assert moe(x[rows], logits[rows]).equal(out[rows])


@pytest.mark.parametrize("many", FEW_AND_MANY)
def test_one_captured_moe_serves_any_routing(many, poisoned):
    case = replace(QWEN3, rows=80)
    weights, x, logits = make_inputs(case)
    moe = kernel_of(case, weights, many)
    moe(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, logits)
    for spread in (1.0, 0.0, 10.0):
        x.normal_()
        logits.normal_().mul_(spread)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, moe_in_float64(case, weights, x, logits, torch.float32), case.dtype, roundings=3.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_step_computes_nvfp4_experts_by_the_kernels(dtype):
    case = replace(QWEN3, rows=8, dtype=dtype)
    weights, x, logits = make_inputs(case)
    expected = kernel_of(case, weights)(x, logits)
    tile_experts(weights, dtype, torch.cuda.get_device_capability())
    assert takes_experts(case.layer, weights, case.hidden, dtype)
    assert rowless_ops(weights).moe(case.layer, x[None], logits[None])[0].equal(expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_sizes_that_the_kernels_do_not_have_are_torchs(dtype):
    case = Case(8, dtype, hidden=64, columns=48, experts=8, count=8)
    weights, x, logits = make_inputs(case)
    plain = TorchOps(dict(weights), {}).moe(case.layer, x[None], logits[None])
    tile_experts(weights, dtype, torch.cuda.get_device_capability())
    assert not takes_experts(case.layer, weights, case.hidden, dtype)
    assert rowless_ops(weights).moe(case.layer, x[None], logits[None]).equal(plain)


@pytest.mark.parametrize("is_nvfp4", [True, False], ids=["nvfp4", "mxfp4"])
def test_the_library_takes_experts_as_wide_as_is_said_before_they_are_tiles(is_nvfp4):
    routing, capability = kernels.Routing(8, 0, 1, 2, normalized=True), torch.cuda.get_device_capability()
    for wide in range(2048, 13_000, 32):
        for hidden, columns in ((wide, 32), (32, wide)):
            shapes = (2 * columns, hidden), (hidden, columns)
            gate_up, down = (_empty_matrix(*shape, is_nvfp4) for shape in shapes)
            x, logits = (torch.empty(1, size, dtype=torch.float16, device="cuda") for size in (hidden, 8))
            said = kernels.takes_tiles(hidden, columns, capability, is_nvfp4=is_nvfp4)
            assert kernels.MoE(routing, gate_up, down, many=False).takes(x, logits) == said, (hidden, columns)


def _empty_matrix(rows: int, inputs: int, is_nvfp4: bool) -> kernels.Matrix:
    """One expert's, as it is beside FP16."""
    size = rows // kernels.GRANULE, inputs // 32 * kernels.part_bytes(is_nvfp4=is_nvfp4)
    tiles = torch.empty(1, *size, dtype=torch.uint8, device="cuda")
    return kernels.Matrix(tiles, None, None, torch.empty(1, rows, device="cuda") if is_nvfp4 else None)
