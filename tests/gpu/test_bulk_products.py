"""Gated products of hundreds of rows in tiles of 256, on Hopper: against float64, and the same bits at every run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_kernels import assert_close, why_not_hopper
from tests.gpu.test_wide_products import assert_repeats_itself, numbers
from trtllm_dflash import kernels

WHY_NOT = why_not_hopper("gated products of hundreds of rows")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

BF16 = torch.bfloat16
HALVES = (BF16, torch.float16)
#: Outputs and inputs: of one tile, of tiles that are not full, of an odd number of them, of several for each cluster.
SHAPES = [(24576, 4096), (64, 64), (416, 192), (2080, 576), (12288, 1024), (40000, 320)]
ROWS = (1, 17, 64, 129, 200, 256, 257, 300, 512, 600)


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gated_product_equals_float64_and_repeats_itself_to_the_bit(shape, dtype):
    outputs, inputs = shape
    weight, bias = numbers(*shape, dtype=dtype) / inputs**0.5, numbers(outputs, dtype=dtype)
    for rows in ROWS:
        x = numbers(rows, inputs, dtype=dtype)
        product = x.double() @ weight.double().t()
        kinds: list[dict[str, Any]] = [{}, {"bias": bias}, {"gelu": True}]
        for options in kinds:
            gate, up = (product + bias.double() if "bias" in options else product).chunk(2, dim=-1)
            expected = (F.gelu(gate, approximate="tanh") if "gelu" in options else F.silu(gate)) * up
            found = kernels.bulk_gemm(x, weight, **options)
            assert_close(found, expected, dtype, roundings=4)
            assert torch.equal(kernels.bulk_gemm(x, weight, **options), found), (rows, options)


def test_an_infinity_or_nan_stays_in_its_row():
    x, weight = numbers(300, 512, dtype=BF16), numbers(4096, 512, dtype=BF16) / 512**0.5
    expected, bad = kernels.bulk_gemm(x, weight), [2, 140, 299]
    spoilt = x.clone()
    spoilt[bad, [40, 200, 511]] = torch.tensor([torch.inf, -torch.inf, torch.nan], device="cuda").bfloat16()
    found = kernels.bulk_gemm(spoilt, weight)
    assert not found[bad].isfinite().all(dim=-1).any()
    others = [row for row in range(len(spoilt)) if row not in bad]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("rows", [256, 500])
def test_a_captured_chain_of_products_repeats_itself_to_the_bit(rows):
    """As in a step: each kernel begins while the one before it still runs."""
    up, down = numbers(12288, 1024, dtype=BF16) / 32, numbers(1024, 6144, dtype=BF16) / 3000
    x = numbers(rows, 1024, dtype=BF16)

    def chain(x):
        for _ in range(20):
            x = x + F.linear(kernels.bulk_gemm(x, up), down)
        return x

    assert_repeats_itself(chain, x, 30)
