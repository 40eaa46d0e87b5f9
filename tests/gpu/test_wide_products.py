"""Products of tens of rows, on Hopper: against float64, and each row's bits beside others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_kernels import assert_close, why_not_hopper
from trtllm_dflash import kernels

WHY_NOT = why_not_hopper("products of tens of rows")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

BF16 = torch.bfloat16
HALVES = (BF16, torch.float16)
#: Outputs and inputs of each division among clusters and blocks on 132 multiprocessors, of tiles that are not full, of
#: several tiles of a block, and of fewer lines than a cluster has blocks.
SHAPES = [(2048, 1024), (4096, 4096), (6144, 4096), (7168, 2048), (12288, 1024), (16384, 512), (24576, 4096)]
SHAPES += [(4096, 12288), (2064, 576), (80, 64), (272, 128), (40000, 320), (19008, 128)]
SHAPES += [(2880, 4096), (5120, 2880), (14336, 1024), (2896, 576), (5072, 192)]
ROWS = (1, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128)


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_repeats_itself(chain: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, replays: int) -> torch.Tensor:
    """Checks that a captured chain of products gives at each replay the bits that it gives by itself: those."""
    expected = chain(x)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(replays):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
    return expected


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As many rows as are asked for at most, and a weight."""
    return numbers(max(ROWS), shape[1], dtype=dtype), numbers(*shape, dtype=dtype) / shape[1] ** 0.5


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_equals_float64_and_a_row_s_bits_depend_on_no_other(shape, dtype):
    x, weight = operands(shape, dtype)
    whole = kernels.wide_gemm(x, weight)
    assert_close(whole, x.double() @ weight.double().t(), dtype)
    for rows in ROWS:
        assert torch.equal(kernels.wide_gemm(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(kernels.wide_gemm(x[-rows:], weight), whole[-rows:]), -rows


@pytest.mark.parametrize("rows", [5, 12, 32, 50, 128])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (6144, 512), (12288, 1024), (2080, 192), (2880, 512), (5120, 512), (14336, 256)], ids=str
)
def test_what_goes_with_a_product_equals_float64(shape, rows):
    """Bias, residual, SwiGLU and GELU; each row's bits are those of another number of rows."""
    x, weight = operands(shape, BF16)
    x, outputs = x[:rows], shape[0]
    bias, residual = numbers(outputs, dtype=BF16), numbers(rows, outputs, dtype=BF16)
    kinds: list[dict[str, Any]] = [
        {"bias": bias},
        {"residual": residual},
        {"bias": bias, "residual": residual},
        {"swiglu": True},
        {"swiglu": True, "bias": bias},
        {"swiglu": True, "gelu": True},
    ]
    for options in kinds:
        y = x.double() @ weight.double().t() + (bias.double() if "bias" in options else 0)
        if "swiglu" in options:
            gate, up = y.chunk(2, dim=-1)
            y = (F.gelu(gate, approximate="tanh") if "gelu" in options else F.silu(gate)) * up
        y = y + (residual.double() if "residual" in options else 0)
        found = kernels.wide_gemm(x, weight, **options)
        assert_close(found, y, BF16, roundings=4)
        if "residual" in options:
            options["residual"] = residual[:3]
        assert torch.equal(kernels.wide_gemm(x[:3], weight, **options), found[:3]), options


def test_an_infinity_or_nan_stays_in_its_row():
    x, weight = operands((4096, 512), BF16)
    bad = [2, 40, 69]
    expected = kernels.wide_gemm(x[:70], weight)
    spoilt = x[:70].clone()
    spoilt[bad, [40, 200, 511]] = torch.tensor([torch.inf, -torch.inf, torch.nan], device="cuda").bfloat16()
    found = kernels.wide_gemm(spoilt, weight)
    assert not found[bad].isfinite().any()
    others = [row for row in range(len(spoilt)) if row not in bad]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("rows", [20, 48, 128])
def test_a_captured_chain_of_products_repeats_itself_to_the_bit(rows):
    """As in a step: each kernel begins while the one before it still runs."""
    x, up = operands((12288, 1024), BF16)
    down = numbers(1024, 6144, dtype=BF16) / 3000
    x = x[:rows]

    def chain(x):
        for _ in range(20):
            h = kernels.wide_gemm(x, up, swiglu=True)
            x = kernels.wide_gemm(h, down, residual=x)
        return x

    expected = assert_repeats_itself(chain, x, 50)
    slow = x
    for _ in range(20):
        h = kernels.wide_gemm(slow, up, swiglu=True)
        torch.cuda.synchronize()
        slow = kernels.wide_gemm(h, down, residual=slow)
        torch.cuda.synchronize()
    assert torch.equal(slow, expected)
