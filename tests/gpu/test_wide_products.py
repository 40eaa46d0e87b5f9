"""Products of tens of rows, on Hopper: against float64, and each row's bits beside others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.flat_ops import rowless_ops
from tests.gpu.test_kernels import assert_close, why_not_hopper
from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Residual
from trtllm_dflash.ops.fp8 import Fp8Weight, quantize_blocks, quantize_rows
from trtllm_dflash.ops.linear_weight import stored_tensors
from trtllm_dflash.ops.torch_ops import TorchOps

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


# -- E4M3 by E4M3 ------------------------------------------------------------------------------------------------------

FP8_SHAPES = [*SHAPES, (23040, 2880), (2880, 7680), (32768, 2880), (4096, 80), (5120, 16)]


@dataclass(frozen=True)
class Fp8Operands:
    """Rows and a weight in E4M3, with a scale a row or by block."""

    x: torch.Tensor
    factors: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What both stand for."""
        x = self.x.double().view(len(self.x), -1, self.x.shape[1] if self.scale.ndim == 1 else 128)
        by = self.factors if self.scale.ndim == 1 else self.factors.t()
        return (x * by[..., None]).flatten(1), Fp8Weight(self.weight, self.scale).dequantize().double()

    def product(self, rows: slice = slice(None), **options: Any) -> torch.Tensor:
        of = self.factors[rows] if self.scale.ndim == 1 else self.factors[:, rows].contiguous()
        return kernels.wide_gemm_fp8(self.x[rows], of, self.weight, self.scale, **options)


def fp8_operands(shape: tuple[int, int], by_block: bool) -> Fp8Operands:
    outputs, inputs = shape
    if not by_block:
        x, weight = operands(shape, BF16)
        values, scale = quantize_rows(weight)
        return Fp8Operands(*quantize_rows(x), values, scale.flatten())
    # Parts of rows, and blocks of the weight, are of very different sizes.
    x = torch.randn(max(ROWS), inputs // 128, 128, device="cuda")
    x *= torch.rand(max(ROWS), inputs // 128, 1, device="cuda").mul_(6).exp_()
    weight = torch.randn(outputs, inputs, device="cuda").mul_(20).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-outputs // 128), inputs // 128, device="cuda").mul_(4).exp_().mul_(1e-3)
    return Fp8Operands(*quantize_blocks(x.flatten(1).bfloat16()), weight, scale)


def assert_near_products(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor | float
) -> None:
    """Sums are BF16's, of what tensor cores keep of products: 13 bits of the largest."""
    expected = x @ weight.t() + rest
    error = (found.double() - expected).abs()
    assert (error <= expected.abs() / 2**7 + x.abs() @ weight.abs().t() / 2**12).all(), error.max()
    assert_close(found, expected, BF16)


FP8_CASES = [(shape, False) for shape in FP8_SHAPES]
FP8_CASES += [(shape, True) for shape in (*FP8_SHAPES, (34816, 5120), (5120, 17408)) if shape[1] % 128 == 0]


@pytest.mark.parametrize(("shape", "by_block"), FP8_CASES, ids=str)
def test_an_fp8_product_equals_float64_and_a_row_s_bits_depend_on_no_other(shape, by_block):
    of = fp8_operands(shape, by_block)
    # Of more than 64 rows by block tiles may be others.
    wholes = {rows: of.product(slice(None, rows)) for rows in (64, 128)}
    assert wholes[128].dtype == BF16
    assert_near_products(wholes[128], *of.numbers, 0.0)
    for rows in () if by_block else (129, 200, 256):  # in halves, side by side
        many = replace(of, x=of.x.repeat(2, 1), factors=of.factors.repeat(2, 1)).product(slice(None, rows))
        assert torch.equal(many[128:], many[: rows - 128])
        assert_close(many[:128], wholes[128], BF16)
    for rows in ROWS:
        whole = wholes[64 if by_block and rows <= 64 else 128]
        assert torch.equal(of.product(slice(None, rows)), whole[:rows]), rows
        if len(whole) == 128 or rows > 64:
            assert torch.equal(of.product(slice(-rows, None)), wholes[128][-rows:]), -rows


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [5, 12, 32, 50, 100, 128])
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 1024), (2880, 4096), (24576, 2048), (5120, 512)], ids=str)
def test_what_goes_with_an_fp8_product_equals_float64(shape, rows, by_block):
    of, outputs = fp8_operands(shape, by_block), shape[0]
    bias, residual = numbers(outputs, dtype=BF16), numbers(rows, outputs, dtype=BF16)
    kinds: list[dict[str, Any]] = [{"bias": bias, "residual": residual}, {"swiglu": True, "bias": bias}]
    kinds += [{"swiglu": True, "gelu": True}]
    x, weight = of.numbers
    for options in kinds:
        y = x[:rows] @ weight.t()
        y = y + options.get("bias", y.new_zeros(()))
        if "swiglu" in options:
            gate, up = y.chunk(2, dim=-1)
            y = (F.gelu(gate, approximate="tanh") if "gelu" in options else F.silu(gate)) * up
        y = y + options.get("residual", y.new_zeros(()))
        assert_close(of.product(slice(None, rows), **options), y, BF16, roundings=4)


def test_what_wide_gemm_fp8_does_not_take_is_refused():
    of = fp8_operands((4096, 512), by_block=False)
    for factors, scale in ((of.factors[1:], of.scale), (of.factors, of.scale[1:]), (of.factors.half(), of.scale)):
        with pytest.raises(ValueError, match="scales"):
            kernels.wide_gemm_fp8(of.x, factors, of.weight, scale)
    rows, blocks = of.x.float().bfloat16(), of.scale.view(32, 128)[:, :4]
    for scale in (of.scale, blocks):
        assert kernels.suits_wide_fp8(rows, of.weight, scale, False)
        assert not kernels.suits_wide_fp8(rows.half(), of.weight, scale, False)
        assert not kernels.suits_wide_fp8(rows.repeat(3, 1), of.weight, scale, False)
    with pytest.raises(ValueError, match="scales"):
        kernels.wide_gemm_fp8(of.x, of.factors, of.weight, blocks.contiguous())
    with pytest.raises(ValueError, match="and a weight of"):
        kernels.wide_gemm_fp8(rows, of.factors, of.weight, of.scale)
    with pytest.raises(ValueError, match="8 bytes"):
        kernels.wide_gemm_fp8(of.x, of.factors, of.weight, torch.ones(4097, device="cuda")[1:])


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [17, 64, 128, 200, 256, 300])
@pytest.mark.parametrize("wide_norm", [False, True], ids=["a norm in BF16", "a norm in FP32"])
def test_normed_rows_are_rounded_and_multiplied_by_whatever_suits_them(rows, by_block, wide_norm):
    """By our kernel, or by cuBLAS behind the one that norms and rounds: as a norm, rounding and a product apart."""
    of = fp8_operands((2048, 1024), by_block)
    weights = {**stored_tensors("a", Fp8Weight(of.weight, of.scale)), "a.bias": numbers(2048, dtype=BF16)}
    norm = (torch.rand(1024, device="cuda") + 0.5).to(torch.float32 if wide_norm else BF16)
    weights["n.weight"] = norm
    x = numbers(1, rows, 1024, dtype=BF16)
    ops, by_torch = rowless_ops(weights), TorchOps(weights, {})
    h = kernels.rms_norm(x, norm, 1e-6)
    expected = by_torch.linear("a", h)[0]
    assert_close(ops.norm_linear("n", "a", Residual(x), 1e-6)[1][0], expected, BF16, roundings=4)
    gated = kernels.swiglu(expected)
    assert_close(ops.norm_linear_swiglu("n", "a", Residual(x), 1e-6)[1][0], gated, BF16, roundings=4)
    added = ops.add_pending(ops.add_product("a", numbers(1, rows, 2048, dtype=BF16).zero_(), h))
    assert_close(added[0], expected, BF16, roundings=4)


@pytest.mark.parametrize("rows", [129, 192, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_in_parts_that_the_norm_adds_up_equals_float64(rows, dtype):
    weight, x = operands((4096, 1024), dtype)[1], numbers(1, rows, 1024, dtype=dtype)
    norm = (torch.rand(4096, device="cuda") + 0.5).to(dtype)
    ops = rowless_ops({"a.weight": weight, "n.weight": norm})
    stream = numbers(1, rows, 4096, dtype=dtype)
    found = ops.add_product("a", stream, x)
    assert found.pending is not None and found.pending.shape == (2, 1, rows, 4096)
    expected = stream.double() + x.double() @ weight.double().t()
    assert_close(ops.add_pending(found), expected, dtype)
    total, h = ops.norm("n", found, 1e-6)
    assert_close(total, expected, dtype)
    assert_close(h, F.rms_norm(expected, (4096,), norm.double(), 1e-6), dtype)
    whole = TorchOps({"a.weight": weight}, {}).add_product("a", stream, x)
    assert_close(total, ops.add_pending(whole), dtype)


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [20, 64, 128])
def test_a_captured_chain_of_fp8_products_repeats_itself_to_the_bit(rows, by_block):
    """Rows' scales are what the kernel before makes, which still runs when a product begins."""
    up, down = fp8_operands((4096, 1024), by_block), fp8_operands((1024, 2048), by_block)
    quantize = kernels.quantize_blocks if by_block else kernels.quantize_rows
    norm = kernels.Norm(torch.ones(1024, device="cuda"), 1e-6)
    x = numbers(rows, 1024, dtype=BF16)

    def chain(x, wait=lambda: None):
        for _ in range(20):
            given = quantize(x, norm)
            wait()
            h = kernels.wide_gemm_fp8(*given, up.weight, up.scale, swiglu=True)
            wait()
            given = quantize(h)
            wait()
            x = kernels.wide_gemm_fp8(*given, down.weight, down.scale, residual=x)
            wait()
        return x

    expected = assert_repeats_itself(chain, x, 50)
    assert torch.equal(chain(x, torch.cuda.synchronize), expected)
