"""A router's kernel: the norm of rows and the product of the rows normed, against float64 and among any other rows."""

import pytest
import torch

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import EPSILON, assert_close, why_not_hopper
from tests.gpu.test_kernels import why_not as why_no_kernels
from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Residual
from trtllm_dflash.ops.exact_ops import ExactOps
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import join_weights

pytestmark = pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels())

BF16 = torch.bfloat16
EPS = 1e-6
#: Of gpt-oss, Qwen3-MoE, Qwen3.5 with its gate, and of what fills neither a warp's inputs nor a cluster's outputs.
SIZES = [(2880, 32), (2880, 128), (2048, 128), (2048, 257), (4096, 513), (32, 1), (1056, 17), (3104, 40)]
#: Fewer and more than are computed at once, and as a long prompt has.
ROWS = [1, 7, 8, 9, 16, 17, 64, 1001]


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def make(rows: int, size: int, outputs: int, wide: bool = False) -> tuple[torch.Tensor, ...]:
    """Makes rows [1, N, H] and what is pending, a norm's weights, a router and its bias."""
    x, pending = (torch.randn(1, rows, size, dtype=BF16, device="cuda") * 3 for _ in range(2))
    norm = (1 + 0.3 * torch.randn(size, device="cuda")).to(torch.float32 if wide else BF16)
    weight = torch.randn(outputs, size, dtype=BF16, device="cuda") * size**-0.5
    return x, pending, norm, weight, torch.randn(outputs, dtype=BF16, device="cuda")


@pytest.mark.parametrize("wide", [False, True], ids=["", "FP32 norm"])
@pytest.mark.parametrize(("size", "outputs"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_sum_norm_and_product_equal_float64(rows, size, outputs, wide):
    if rows * outputs > kernels.ROUTER_LOGITS:
        pytest.skip("more than the kernel is for")
    x, pending, norm, weight, bias = make(rows, size, outputs, wide)
    for added in (None, pending):
        for moved in (None, bias):
            total, h, logits = kernels.router(x, added, norm, EPS, weight, moved)
            assert total.equal(x if added is None else x + added)
            exact = total.double()
            exact = exact / (exact.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
            assert_close(h, exact, BF16)
            product = exact @ weight.double().T
            expected = product if moved is None else product + moved.double()
            assert_close(logits, expected, BF16)
            # Each alone too, a small one beside large ones: its own rounding, and those of its terms as they add up.
            terms = (exact**2 @ weight.double().T ** 2).sqrt()
            assert ((logits.double() - expected).abs() <= EPSILON[BF16] * (expected.abs() + 3 * terms)).all()


@pytest.mark.parametrize(("size", "outputs"), [(2880, 128), (2048, 257)])
def test_a_row_gets_the_same_bits_among_any_others(size, outputs):
    x, pending, norm, weight, bias = make(64, size, outputs)
    whole = kernels.router(x, pending, norm, EPS, weight, bias)
    for first, past in ((0, 1), (0, 8), (3, 12), (5, 21), (63, 64)):
        part = kernels.router(
            x[:, first:past].contiguous(), pending[:, first:past].contiguous(), norm, EPS, weight, bias
        )
        for of_part, of_whole in zip(part, whole, strict=True):
            assert of_part.equal(of_whole[:, first:past])


@pytest.mark.parametrize("rows", [1, 8, 17])
def test_a_captured_chain_repeats_itself_to_the_bit(rows, monkeypatch):
    """A kernel begins while the one before it still writes what it reads: each must wait for it."""
    monkeypatch.undo()  # memory that is poisoned between two kernels would make the second wait
    x, _, norm, weight, bias = make(rows, 1824, 1824)

    def chain() -> torch.Tensor:
        stream, more = x, None
        for _ in range(12):
            stream, _, more = kernels.router(stream, more, norm, EPS, weight, bias)
        return stream

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("names", [("mlp.router",), ("mlp.router", "mlp.shared_expert_gate")])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("rows", [3, 2000])
def test_the_operation_is_what_torch_computes(rows, pending, names, monkeypatch):
    """By the kernel, of few rows; by others, of many, and where rows must be exact."""
    called, router = [], kernels.router
    monkeypatch.setattr(kernels, "router", lambda *given: called.append(given) or router(*given))
    x, y, norm, weight, bias = make(rows, 256, 24)
    weights = {"norm.weight": norm, "mlp.router.weight": weight, "mlp.shared_expert_gate.weight": weight[:1] * 2}
    weights |= {"mlp.router.bias": bias} if len(names) == 1 else {}
    joined = dict(weights)
    join_weights(joined, [names] if len(names) > 1 else [])
    stream, ours = Residual(x, y if pending else None), rowless_ops(joined)
    of_torch, of_kernels = (ops.norm_and_linears("norm", names, stream, EPS) for ops in (TorchOps(weights, {}), ours))
    assert len(called) == (rows == 3)
    assert of_kernels[0].equal(of_torch[0])
    assert_close(of_kernels[1], of_torch[1], BF16, roundings=4)
    for found, expected in zip(of_kernels[2], of_torch[2], strict=True):
        assert_close(found, expected, BF16, roundings=4)


@pytest.mark.skipif(bool(why_not_hopper("exact kernels")), reason=why_not_hopper("exact kernels"))
def test_rows_that_must_be_exact_are_multiplied_as_any_others(monkeypatch):
    monkeypatch.setattr(kernels, "router", None)
    x, pending, norm, weight, bias = make(3, 256, 32)
    weights = {"norm.weight": norm, "router.weight": weight, "router.bias": bias}
    _, h, (logits,) = rowless_ops(weights, kind=ExactOps).norm_and_linears(
        "norm", ("router",), Residual(x, pending), EPS
    )
    assert_close(logits, h.double() @ weight.double().T + bias.double(), BF16)


def test_what_it_cannot_take_is_refused_or_left_to_others():
    x, pending, norm, weight, bias = make(4, 256, 8)
    assert kernels.takes_router(x, norm, weight, bias)
    assert not kernels.takes_router(x.half(), norm, weight)
    assert not kernels.takes_router(x, norm, weight.float())
    assert not kernels.takes_router(x[..., :40].contiguous(), norm[:40], weight)
    assert not kernels.takes_router(x, norm, weight.repeat(2000, 1))
    for wrong in (
        (x, pending[:, :2], norm, EPS, weight),
        (x, None, norm[:128], EPS, weight),
        (x, None, norm, EPS, weight[:, :128].contiguous()),
        (x, None, norm, EPS, weight, bias[:4]),
    ):
        with pytest.raises(ValueError, match=r"router|pending"):
            kernels.router(*wrong)
