"""Products with weights in FP8 that have a scale a block of 128 by 128, as Qwen3 and Qwen3.5 are published."""

import pytest
import torch

from tests.checkpoints import make_drafter, make_target
from tests.gpu.test_cuda import tokens
from tests.gpu.test_hybrids import PARAMS, PROMPTS, load
from tests.gpu.test_kernels import HALVES, assert_close, in_double, relative_error, why_not, wide_rows
from tests.near_ties import all_logits
from tests.quantized import quantize_folder
from trtllm_dflash import kernels
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight, multiplies
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

#: Rows of a weight and inputs: shares of one to many passes, of no run, one and many; rows that are no whole blocks;
#: those of Qwen3.5-27B.
SHAPES = [(16, 128), (1040, 128), (12672, 128), (4096, 512), (192, 2176), (12672, 2048), (6144, 4096), (5120, 17408)]
SHAPES += [(14336, 512), (14336, 4096), (14336, 5120), (34816, 5120)]
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def made(shape):
    """x of 16 rows, a weight in blocks whose scales are far apart, and a bias."""
    outputs, inputs = shape
    x = torch.randn(kernels.SKINNY_ROWS, inputs, device="cuda")
    values = torch.randn(outputs, inputs, device="cuda").mul_(20).to(FP8)
    scale = torch.rand(-(-outputs // 128), inputs // 128, device="cuda").mul_(4).exp_().mul_(1e-3)
    bias = torch.randn(outputs, device="cuda")
    return x, Fp8Weight(values, scale), bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_of_few_rows_equals_float64_whatever_the_other_rows_are(dtype, shape):
    x, weight, bias = made(shape)
    x, bias = x.to(dtype), bias.to(dtype)
    of = weight.values, weight.scale
    wide = weight.dequantize().double().t()
    whole = kernels.skinny_gemm(x, *of)
    assert_close(whole, x.double() @ wide, dtype)
    for rows in (1, 3, 8, 9, 15):
        assert torch.equal(kernels.skinny_gemm(x[:rows], *of), whole[:rows])
    assert_close(kernels.skinny_gemm(x[:5], *of, bias), x[:5].double() @ wide + bias.double(), dtype)
    norm = kernels.Norm((torch.rand(shape[1], device="cuda") * 3).to(dtype), 1e-6)
    residual = torch.randn(len(x), shape[0], device="cuda").to(dtype)
    normed = kernels.skinny_gemm(x, *of, norm=norm)
    assert_close(normed, in_double(x, norm) @ wide, dtype)
    for rows in (2, 11):
        added = kernels.skinny_gemm(x[:rows], *of, norm=norm, residual=residual[:rows])
        assert torch.equal(added, normed[:rows] + residual[:rows])


@pytest.mark.parametrize("normed", [False, True])
def test_inputs_beyond_fp16_equal_float64(normed):
    _, weight, _ = made((6144, 4096))
    x = wide_rows(4096, normed)
    norm = kernels.Norm((torch.rand(4096, device="cuda") * 3).bfloat16(), 1e-6) if normed else None
    expected = (in_double(x, norm) if norm else x.double()) @ weight.dequantize().double().t()
    for found, row in zip(kernels.skinny_gemm(x, weight.values, weight.scale, norm=norm), expected, strict=True):
        assert_close(found, row, torch.bfloat16)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 32 == 0], ids=str)
def test_with_swiglu_gates_and_ups_have_the_scales_of_their_own_rows(shape):
    x, weight, bias = made(shape)
    x, bias, of = x.bfloat16(), bias.bfloat16(), (weight.values, weight.scale)
    for rows in (1, 8, 16):
        apart = kernels.swiglu(kernels.skinny_gemm(x[:rows], *of, bias))
        assert torch.equal(kernels.skinny_gemm(x[:rows], *of, bias, swiglu=True), apart)


def test_scales_of_another_shape_are_refused():
    x, weight, _ = made((4096, 512))
    for scale in (weight.scale[:, :3], weight.scale.t().contiguous(), weight.scale.half()):
        with pytest.raises(ValueError, match="scales"):
            kernels.skinny_gemm(x.bfloat16(), weight.values, scale)


@on_hopper
@pytest.mark.parametrize("rows", [1, 17, 18, 19, 24, 64, 130, 512, 2000])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_of_many_rows_is_off_by_what_rounding_them_to_fp8_takes(dtype, rows):
    """Of torch's operations, of a few rows too. Rows and their parts are of very different sizes."""
    _, weight, _ = made((6144, 4096))
    x = torch.randn(1, rows, 32, 128, device="cuda") * torch.rand(1, rows, 32, 1, device="cuda").mul_(6).exp_()
    x = x.flatten(2).to(dtype)
    x[0, rows // 2] = 0
    assert multiplies(x.device, weight, dtype)
    found = TorchOps({}, {}).quantized_product(x, weight)[0]
    assert found.dtype == dtype and found.shape == (rows, 6144)
    for row, expected in zip(found, x[0].double() @ weight.dequantize().double().t(), strict=True):
        assert relative_error(row, expected) < 0.04 if expected.any() else not row.any()


@on_hopper
def test_a_target_in_blocks_stays_so_and_its_logits_are_its_numbers(tmp_path):
    shape = {"hidden": 512, "heads": 8, "head_size": 64, "intermediate": 1024, "vocab": 16, "dtype": torch.bfloat16}
    target = make_target(tmp_path / "target", **shape)
    quantize_folder(target, "blocks")
    folders = target, make_drafter(tmp_path / "drafter", target, block_size=16)
    ids = PROMPTS[2] + PROMPTS[1]
    with load(folders, "cpu", "bf16") as rounded, load(folders, "cpu") as exact:
        expected = all_logits(exact, ids)
        of_cpu = relative_error(all_logits(rounded, ids).float(), expected)
    with load(folders, precision=None) as gpu:  # the format that the target is stored in
        linears = [f"model.layers.{i}.{name}" for i in range(4) for name in ("self_attn.qkv_proj", "mlp.down_proj")]
        assert {gpu.session.weights[name + ".weight"].dtype for name in linears} == {FP8}
        few, many = (relative_error(all_logits(gpu, ids, rows).float().cpu(), expected) for rows in (16, None))
        drafted = tokens(gpu.generate(PROMPTS, PARAMS))
    print("errors of few rows and many:", few, many, "and of the CPU:", of_cpu)
    assert few < 1.25 * of_cpu
    assert many < 0.2  # what a scale at a wrong place gives is 1
    assert all(len(text) == PARAMS.max_tokens for text in drafted)
