"""Mixtures of experts in INT4 on a GPU by our kernels, chosen by sigmoids as Kimi-K2.5's are."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import HALVES, assert_close
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.gpu.test_moe import Case as Softmax
from tests.gpu.test_moe import moe_in_float64
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.cuda_experts import moe_kernel, takes_experts
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels()),
]


@dataclass
class Case(Softmax):
    """INT4 without biases; a factor of the shares, and sigmoids where it is not 1."""

    packed: bool = False
    factor: float = 2.827

    @property
    def layer(self) -> MoELayer:
        return replace(super().layer, scores="softmax" if self.factor == 1 else "sigmoid", scale=self.factor)


KIMI = Case(1, experts=384, count=384, top_k=8, hidden=512, columns=256, clamp=None, bias=False)
CASES = [
    *(replace(KIMI, rows=rows, dtype=dtype) for rows in (1, 8, 9, 100) for dtype in HALVES),
    replace(KIMI, rows=5, experts=16, count=16, hidden=7168, columns=256),
    replace(KIMI, rows=33, experts=16, first=4, count=8, hidden=256, columns=2048),  # a rank's
    replace(KIMI, rows=300, spread=0.0),  # the correction alone decides
    replace(KIMI, rows=40, normalized=False, logits_dtype=torch.float32),
    replace(KIMI, rows=20, experts=16, count=16, factor=1.0),
]


def make_inputs(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors of the experts, of numbers that are all as likely, x [rows, H] and logits [rows, experts], on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    weights = {"mlp.router.correction_bias": 0.1 * normal(case.experts)}
    for name, rows, inputs in (
        ("gate_up_proj", 2 * case.columns, case.hidden),
        ("down_proj", case.hidden, case.columns),
    ):
        key, shape = f"mlp.experts.{name}.", (case.count, rows, inputs // 8)
        numbers = torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda", dtype=torch.int64)
        weights[key + "weight"] = numbers.int()
        weights[key + "scale"] = (torch.exp2(normal(case.count, rows, inputs // 32)) * inputs**-0.5 / 8).bfloat16()
    x, logits = normal(case.rows, case.hidden), case.spread * normal(case.rows, case.experts)
    return weights, x.to(case.dtype), logits.to(case.logits_dtype or case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_int4_experts_equal_float64(case, poisoned):
    """Of weights that are rounded to the rows' type, as torch rounds them."""
    weights, x, logits = make_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    assert moe.takes(x, logits)
    out = moe(x, logits)
    # The choice is that of the reference but for near ties of sigmoids, which these logits do not have.
    assert_close(out, moe_in_float64(case, weights, x, logits), case.dtype, roundings=3.0)
    assert all(moe(x, logits).equal(out) for _ in range(5))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_int4_is_what_it_is(dtype):
    """Down's row r is the number r % 16 - 8 everywhere, so that outputs are to each other as the numbers are."""
    case = Case(3, dtype, experts=1, count=1, top_k=1, hidden=256, columns=256, clamp=None, bias=False)
    weights, x, logits = make_inputs(case)
    row = torch.arange(256, device="cuda") % 16
    words = sum(row.long() << 4 * place for place in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    weights["mlp.experts.down_proj.weight"] = words[None, :, None].expand(1, 256, 32).contiguous()
    weights["mlp.experts.down_proj.scale"].fill_(0.25)
    out = moe_kernel(case.layer, Experts.of(weights, case.layer))(x, logits).double()
    ratios = out / out[:, 9:10]  # of 1
    torch.testing.assert_close(ratios, (row - 8).double().expand_as(ratios), rtol=4 * 2.0**-8, atol=0.0)


def test_a_rows_result_is_the_same_to_the_bit_alone_and_among_others():
    case = replace(KIMI, rows=200)
    weights, x, logits = make_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    out = moe(x, logits)
    for rows in (slice(0, 1), slice(7, 15), slice(100, 177)):
        assert moe(x[rows], logits[rows]).equal(out[rows])


def test_one_captured_moe_serves_any_routing(poisoned):
    case = replace(KIMI, rows=64)
    weights, x, logits = make_inputs(case)
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    moe(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, logits)
    for spread in (1.0, 0.0, 3.0):
        x.normal_()
        logits.normal_().mul_(spread)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, moe_in_float64(case, weights, x, logits), case.dtype, roundings=3.0)


def test_the_step_computes_int4_experts_by_the_kernels_where_a_row_has_whole_units():
    case = replace(KIMI, rows=8)
    weights, x, logits = make_inputs(case)
    assert takes_experts(case.layer, weights, case.hidden, case.dtype)
    out = rowless_ops(weights).moe(case.layer, x[None], logits[None])
    assert out[0].equal(moe_kernel(case.layer, Experts.of(weights, case.layer))(x, logits))
    narrow = replace(case, hidden=128)
    weights, x, logits = make_inputs(narrow)
    assert not takes_experts(narrow.layer, weights, narrow.hidden, narrow.dtype)
    out = rowless_ops(weights).moe(narrow.layer, x[None], logits[None])
    assert out.equal(TorchOps(weights, {}).moe(narrow.layer, x[None], logits[None]))
