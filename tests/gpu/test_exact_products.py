"""Products of any number of rows whose sums go in one order, on Hopper: to the bit, with no tolerance."""

from typing import Any

import pytest
import torch

from tests.gpu.test_kernels import assert_close, in_double, why_not_hopper
from tests.gpu.test_wide_products import BF16, HALVES, SHAPES, numbers
from trtllm_dflash import kernels

WHY_NOT = why_not_hopper("exact products")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: Beside those of `wide_gemm`, of fewer lines than there are chains, of as many as one half has, of one more; of so
#: many outputs that blocks have several tiles of each size, or clusters two; and of chains of an odd number of lines.
MORE = [(4096, 512), (2048, 1024), (1536, 1088), (50000, 640), (8192, 640), (4512, 1024), (36864, 576), (8464, 1024)]
MORE += [(13312, 1024), (16368, 4096), (7168, 5120), (20480, 2560), (22016, 4096)]
ROWS = (1, 2, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 300, 512, 600)


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As many rows as are asked for at most, and a weight."""
    return numbers(max(ROWS), shape[1], dtype=dtype), numbers(*shape, dtype=dtype) / shape[1] ** 0.5


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", sorted({*SHAPES, *MORE}), ids=str)
def test_a_row_of_a_product_is_what_it_is_alone(shape, dtype):
    x, weight = operands(shape, dtype)
    whole = kernels.exact_gemm(x, weight)
    assert_close(whole, x.double() @ weight.double().t(), dtype)
    for first in range(0, len(x) - 16, 48):
        few = kernels.exact_gemm(x[first : first + 16], weight)
        assert torch.equal(few, whole[first : first + 16]), first
    for rows in ROWS:
        assert torch.equal(kernels.exact_gemm(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(kernels.exact_gemm(x[-rows:], weight), whole[-rows:]), -rows


def test_sums_that_cancel_out_are_the_same_too():
    """What is left of them is rounding alone: it shows in all digits where the order of adding is another."""
    x, weight = operands((4096, 4096), BF16)
    x[:, 2048:] = x[:, :2048].roll(700, 1)  # so that no two chains cancel out
    weight[:, 2048:] = -weight[:, :2048].roll(700, 1)
    whole = kernels.exact_gemm(x, weight)
    assert (whole != 0).float().mean() > 0.8 and whole.abs().max() < 1e-4
    for rows in (1, 8, 16, 17, 40, 100, 200):
        assert torch.equal(kernels.exact_gemm(x[:rows], weight), whole[:rows]), rows


@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (6144, 512), (24576, 4096), (2080, 192), (4096, 1088), (13312, 1024), (7168, 5120), (24576, 640)],
    ids=str,
)
def test_what_goes_with_a_product_changes_no_row_s_bits(shape):
    """Norm, bias, residual, SwiGLU and GELU."""
    x, weight = operands(shape, BF16)
    x *= torch.logspace(-3, 3, len(x), dtype=BF16, device="cuda")[:, None]
    bias, residual = numbers(shape[0], dtype=BF16), numbers(len(x), shape[0], dtype=BF16)
    norm = kernels.Norm((torch.rand(shape[1], device="cuda") * 3).to(BF16), 1e-6)
    one_more = kernels.Norm(numbers(shape[1], dtype=BF16) / 3, 1e-6, adds_one=True)
    kinds: list[dict[str, Any]] = [
        {"bias": bias},
        {"residual": residual},
        {"norm": norm},
        {"norm": one_more, "bias": bias},
        {"norm": norm, "bias": bias, "residual": residual},
        {"swiglu": True},
        {"swiglu": True, "bias": bias, "norm": norm},
        {"swiglu": True, "gelu": True, "norm": one_more},
    ]
    for options in kinds:
        whole = kernels.exact_gemm(x, weight, **options)
        for rows in ROWS:
            few = options | ({"residual": residual[:rows]} if "residual" in options else {})
            assert torch.equal(kernels.exact_gemm(x[:rows], weight, **few), whole[:rows]), (rows, options.keys())
            last = options | ({"residual": residual[-rows:]} if "residual" in options else {})
            assert torch.equal(kernels.exact_gemm(x[-rows:], weight, **last), whole[-rows:]), (rows, options.keys())
    expected = in_double(x, norm) @ weight.double().t()
    for found, row in zip(kernels.exact_gemm(x, weight, norm=norm), expected, strict=True):
        assert_close(found, row, BF16)


@pytest.mark.parametrize("rows", [20, 100, 300])
def test_a_captured_chain_of_normed_products_repeats_itself_to_the_bit(rows):
    """As in a step: each kernel begins while the one before it still runs."""
    x, up = operands((36864, 1024), BF16)
    down = numbers(1024, 18432, dtype=BF16) / 3000
    norm = kernels.Norm(torch.rand(1024, device="cuda").to(BF16), 1e-6)
    x = x[:rows]

    def chain(x):
        for _ in range(10):
            h = kernels.exact_gemm(x, up, swiglu=True, norm=norm)
            x = kernels.exact_gemm(h, down, residual=x)
        return x

    expected = chain(x[:4])
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    whole = None
    for _ in range(50):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found[:4], expected)
        whole = found.clone() if whole is None else whole
        assert torch.equal(found, whole)


def test_an_infinity_or_nan_stays_in_its_row():
    x, weight = operands((4096, 4096), BF16)
    for rows in (70, 300):
        bad = [2, 40, 69]
        expected = kernels.exact_gemm(x[:rows], weight)
        spoilt = x[:rows].clone()
        spoilt[bad, [40, 200, 4095]] = torch.tensor([torch.inf, -torch.inf, torch.nan], device="cuda").bfloat16()
        found = kernels.exact_gemm(spoilt, weight)
        assert not found[bad].isfinite().any()
        others = [row for row in range(rows) if row not in bad]
        assert torch.equal(found[others], expected[others])
