"""Mixtures of experts in FP8 on a GPU by our kernels: every number of E4M3, with a scale a row or a block."""

from dataclasses import replace

import pytest
import torch

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import HALVES, assert_close
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.gpu.test_moe import FEW_AND_MANY, MANY, Case, moe_in_float64
from trtllm_dflash.ops.cuda_experts import moe_kernel, takes_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels()),
]

QWEN3 = Case(1, packed=False, experts=16, count=16, top_k=4, hidden=2048, columns=768, clamp=None, bias=False)
CASES = [
    *(replace(QWEN3, rows=rows, dtype=dtype) for rows in (1, 8, 9, 80) for dtype in HALVES),
    replace(QWEN3, rows=300, spread=0.0),  # all choose the first four
    Case(33, packed=False, hidden=1040, columns=112, experts=8, first=3, count=5),  # a rank's; parts of blocks
    Case(20, packed=False, hidden=16, columns=48, experts=5, count=5, top_k=2),
    Case(12, packed=False, hidden=5120, columns=128),  # more blocks in a row than lanes
    replace(QWEN3, rows=40, normalized=False, logits_dtype=torch.float32),
]
BY_BLOCK = pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])


def make_inputs(case: Case, by_block: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors of the experts, of codes that are all as likely, x [rows, H] and logits [rows, experts], on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    weights = {}
    for name, rows, inputs in (
        ("gate_up_proj", 2 * case.columns, case.hidden),
        ("down_proj", case.hidden, case.columns),
    ):
        key = f"mlp.experts.{name}."
        codes = torch.randint(0, 127, (case.count, rows, inputs), generator=generator, device="cuda")
        codes += 128 * torch.randint(0, 2, codes.shape, generator=generator, device="cuda")
        weights[key + "weight"] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        scaled = (-(-rows // 128), -(-inputs // 128)) if by_block else (rows,)
        weights[key + "scale"] = torch.exp2(normal(case.count, *scaled)) * inputs**-0.5 / 128
        if case.bias:
            weights[key + "bias"] = normal(case.count, rows).to(case.dtype)
    x, logits = normal(case.rows, case.hidden), case.spread * normal(case.rows, case.experts)
    return weights, x.to(case.dtype), logits.to(case.logits_dtype or case.dtype)


@BY_BLOCK
@pytest.mark.parametrize("many", FEW_AND_MANY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_experts_equal_float64(case, many, by_block, poisoned):
    weights, x, logits = make_inputs(case, by_block)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer), many)
    assert moe.takes(x, logits)
    out, expected = moe(x, logits), moe_in_float64(case, weights, x, logits, torch.float32)
    print(f"largest error {(out - expected).abs().max():.3g} of {expected.abs().max():.3g}")
    assert_close(out, expected, case.dtype, roundings=3.0)
    assert all(moe(x, logits).equal(out) for _ in range(5))


@BY_BLOCK
@pytest.mark.parametrize("many", [MANY])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_and_many_rows_are_computed_to_the_same_bits(case, many, by_block):
    weights, x, logits = make_inputs(case, by_block)
    few, found = (moe_kernel(case.layer, Experts.of(weights, case.layer), kind)(x, logits) for kind in (False, many))
    assert few.equal(found)


@BY_BLOCK
@pytest.mark.parametrize("many", FEW_AND_MANY)
def test_every_number_of_e4m3_is_what_it_is_in_float64(many, by_block):
    """Down's row r is the code r everywhere, so that outputs are to each other as the numbers: codes are 1/16 apart."""
    case = Case(3, packed=False, experts=1, count=1, top_k=1, hidden=256, columns=128, clamp=None, bias=False)
    weights, x, logits = make_inputs(case, by_block)
    codes = torch.arange(256, device="cuda")
    codes[codes % 128 == 127] = 0  # not numbers
    down = codes.to(torch.uint8)[None, :, None].expand(1, 256, 128).contiguous().view(torch.float8_e4m3fn)
    weights["mlp.experts.down_proj.weight"] = down
    weights["mlp.experts.down_proj.scale"].fill_(1.0)
    out = moe_kernel(case.layer, Experts.of(weights, case.layer), many)(x, logits).double()
    ratios = out / out[:, 0x38:0x39]  # of 1
    numbers = down[0, :, 0].float().double()
    torch.testing.assert_close(ratios, numbers.expand_as(ratios), rtol=2.0**-6, atol=0.0)


@BY_BLOCK
def test_a_rows_result_is_the_same_to_the_bit_alone_and_among_others(by_block):
    weights, x, logits = make_inputs(replace(QWEN3, rows=200), by_block)
    moe = moe_kernel(QWEN3.layer, Experts.of(weights, QWEN3.layer))
    out = moe(x, logits)
    for rows in (slice(0, 1), slice(7, 15), slice(100, 177)):
        assert moe(x[rows], logits[rows]).equal(out[rows])


@BY_BLOCK
def test_one_captured_moe_serves_any_routing(by_block, poisoned):
    case = replace(QWEN3, rows=80)
    weights, x, logits = make_inputs(case, by_block)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
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


def test_the_step_computes_fp8_experts_by_the_kernels():
    weights, x, logits = make_inputs(replace(QWEN3, rows=8), True)
    assert takes_experts(QWEN3.layer, weights, QWEN3.hidden, QWEN3.dtype)
    out = rowless_ops(weights).moe(QWEN3.layer, x[None], logits[None])
    assert out[0].equal(moe_kernel(QWEN3.layer, Experts.of(weights, QWEN3.layer))(x, logits))


@pytest.mark.parametrize("other", ["sigmoids without a correction", "a factor in FP32 for each expert"])
def test_routing_that_the_kernels_do_not_have_is_torchs(other):
    weights, x, logits = make_inputs(replace(QWEN3, rows=8, columns=64, hidden=128), False)
    layer = replace(QWEN3.layer, scores="sigmoid") if other.startswith("sigmoids") else QWEN3.layer
    if other.startswith("a factor"):
        weights["mlp.router.expert_scale"] = torch.rand(QWEN3.experts, device="cuda")
    assert not takes_experts(layer, weights, 128, QWEN3.dtype)
    out = rowless_ops(weights).moe(layer, x[None], logits[None])
    assert out.equal(TorchOps(weights, {}).moe(layer, x[None], logits[None]))
