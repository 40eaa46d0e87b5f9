"""Heads of 256 and 512, partial RoPE, gates, norms by one more than their weight: what hybrids and Gemma ask for."""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_kernels import HALVES, SHAPES, Case, assert_close, make_inputs, product, reference, why_not
from trtllm_dflash import kernels
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.cuda_slots import CudaSlots
from trtllm_dflash.ops.torch_ops import TorchOps

SIZE = 256
SIZES = (256, 512)
NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
on_hopper = pytest.mark.skipif(NO_HOPPER, reason="attention of heads of 256 and 512 needs a Hopper GPU")


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def random_cases(count: int, size: int) -> list[Case]:
    choose = random.Random(6)
    edges = [0, 1, 2, 16, 63, 64, 65, 127, 128, 129, 193, 300, 1000, 2049]
    return [
        Case(
            dtype=choose.choice(HALVES),
            lengths=[choose.choice(edges) for _ in range(choose.choice([1, 2, 5, 33]))],
            rows=choose.choice([1, 2, 5, 8, 16, 16, 32]),
            group=choose.choice([1, 2, 6, 8]),
            size=size,
            causal=choose.random() < 0.7,
            window=choose.choice([0, 0, 7, 64, 500]),
            sinks=choose.random() < 0.2,
        )
        for _ in range(count)
    ]


CASES = [
    *random_cases(40, 256),
    *random_cases(40, 512),
    Case(torch.bfloat16, [32768], 16, 6, SIZE, causal=True, kv_heads=4),
    Case(torch.bfloat16, [32768, 0, 1, 20000, 64, 32705], 1, 6, SIZE, causal=True, kv_heads=4),
    Case(torch.float16, [37 * i for i in range(40)], 16, 8, SIZE, causal=True, kv_heads=4),
    Case(torch.bfloat16, [130] * 150 + [0, 1], 1, 4, SIZE, causal=True),
    Case(torch.bfloat16, [32768], 16, 8, 512, causal=True, kv_heads=4),
    Case(torch.bfloat16, [20000, 0, 1, 9000, 64, 12705], 1, 8, 512, causal=True, kv_heads=4),
    Case(torch.float16, [37 * i for i in range(40)], 32, 8, 512, causal=True),
    Case(torch.bfloat16, [130] * 150 + [0, 1], 1, 4, 512, causal=True),
]


@on_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_float64(case):
    q, keys, values, lengths, sinks = make_inputs(case)
    out = kernels.attention(q, keys, values, lengths, case.causal, case.window, sinks)
    assert_close(out, reference(case, q, keys, values, sinks), case.dtype)


@on_hopper
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 16])
def test_repeated_runs_are_equal_to_the_bit(rows, size):
    case = Case(torch.bfloat16, [3000, 900, 64], rows, 6, size, causal=True, kv_heads=4)
    q, keys, values, lengths, _ = make_inputs(case)
    first = kernels.attention(q, keys, values, lengths, True)
    assert all(kernels.attention(q, keys, values, lengths, True).equal(first) for _ in range(20))


@pytest.mark.parametrize("size", SIZES)
def test_fp8_caches_of_such_heads_are_refused(size):
    case = Case(torch.bfloat16, [70], 8, 4, size, causal=True)
    q, keys, values, lengths, _ = make_inputs(case)
    one = torch.ones((), device="cuda")
    caches = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    assert not kernels.takes_heads(size, q.dtype, caches[0])
    with pytest.raises(EngineError, match="dflash_attention"):
        kernels.attention(q, *caches, lengths, True, scales=(one, one))


def layer_weights(dtype, size, positions, rotary, wide) -> dict[str, torch.Tensor]:
    angles = torch.rand(positions, rotary // 2, device="cuda") * 6
    weights = {"rope.cos": angles.cos().to(dtype), "rope.sin": angles.sin().to(dtype)}
    for name in ("q", "k"):
        norm = torch.randn(size, dtype=torch.float32 if wide else dtype, device="cuda")
        weights[f"l.self_attn.{name}_norm.weight"] = norm
    return weights


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("size", "rotary"), [(512, 512), (256, 64), (256, 256), (256, 96), (128, 64), (64, 16)])
@pytest.mark.parametrize("wide", [False, True], ids=["", "FP32 norms"])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_rows_are_appended_as_torch_appends_them(dtype, size, rotary, wide, rows):
    """Partial RoPE, and norms of either type; more rows than attention takes go in cuts."""
    slots, heads, kv_heads, length = 3, 12, 2, 400
    weights = layer_weights(dtype, size, length, rotary, wide)
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6)
    start = torch.tensor([0, 17, 250], dtype=torch.int32, device="cuda")
    # As in a gated layer: gates follow the values.
    qkv = torch.randn(slots, rows, (2 * heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
    results = []
    for ops_type in (TorchOps, CudaSlots):
        torch.manual_seed(1)
        names = "l.key", "l.value"
        caches = {n: torch.randn(slots, kv_heads, length, size, dtype=dtype, device="cuda") for n in names}
        out = ops_type(weights, caches).self_attention(layer, qkv, start)
        results.append((out, *caches.values()))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert cuda_values.equal(values)
    assert_close(cuda_keys, keys, dtype, roundings=0.5)
    assert_close(cuda_out, out, dtype, roundings=4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [128, *SIZES])
@pytest.mark.parametrize("keys_as_values", [False, True], ids=["", "keys as values"])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_rows_with_normed_values_are_appended_as_torch_appends_them(dtype, size, keys_as_values, rows):
    """As Gemma has them, and attention by a scale of its own."""
    slots, heads, kv_heads, length = 3, 8, 2, 400
    weights = layer_weights(dtype, size, length, size, wide=False)
    layer = AttentionLayer(
        "l.", "rope", heads, kv_heads, size, 1e-6, scale=1 / 16, keys_as_values=keys_as_values, norms_values=True
    )
    start = torch.tensor([0, 17, 250], dtype=torch.int32, device="cuda")
    kinds = 1 if keys_as_values else 2
    qkv = torch.randn(slots, rows, (heads + kinds * kv_heads) * size, dtype=dtype, device="cuda") * 3
    results = []
    for ops_type in (TorchOps, CudaSlots):
        torch.manual_seed(1)
        caches = {
            n: torch.randn(slots, kv_heads, length, size, dtype=dtype, device="cuda") for n in ("l.key", "l.value")
        }
        out = ops_type(weights, caches).self_attention(layer, qkv, start)
        results.append((out, *caches.values()))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert_close(cuda_values, values, dtype, roundings=0.5)
    assert_close(cuda_keys, keys, dtype, roundings=0.5)
    assert_close(cuda_out, out, dtype, roundings=4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("slots", "rows", "size"), [(1, 1, 6144), (3, 16, 256), (1, 300, 2048), (8, 1, 72)])
def test_gates_equal_float64(dtype, slots, rows, size):
    x = torch.randn(slots, rows, size, dtype=dtype, device="cuda") * 3
    wide = torch.randn(slots, rows, 2 * size + 8, dtype=dtype, device="cuda")[..., size + 8 :] * 3
    single = torch.randn(slots, rows, 1, dtype=dtype, device="cuda") * 3
    for gates in (wide, single):
        assert kernels.takes_gate(x, gates)
        gated = kernels.gate(x, gates)
        assert_close(gated, x.double() * gates.double().sigmoid(), dtype)
        residual = torch.randn_like(x)
        assert kernels.gate(x, gates, residual).equal(residual + gated)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1000], ids=str)
def test_norms_by_one_more_than_their_weight_keep_its_digits(shape):
    """Weights near 0, of which 1 + w in BF16 would keep none."""
    x, weight, _, _, _ = product(shape, torch.bfloat16)
    less = (torch.randn(shape[1], device="cuda") * 0.003).bfloat16()
    norm = kernels.Norm(less, 1e-6, adds_one=True)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + less.double())
    expected = normed @ weight.double().t()
    whole = kernels.skinny_gemm(x, weight, norm=norm)
    for found, row in zip(whole, expected, strict=True):
        assert_close(found, row, torch.bfloat16)
    of_norm = kernels.rms_norm(x[None], 1 + less.float(), 1e-6)
    apart = kernels.skinny_gemm(of_norm, weight)[0]
    errors = [float((found.double() - expected).norm()) for found in (whole, apart)]
    assert errors[0] < 1.05 * errors[1]
    lost = kernels.skinny_gemm(x, weight, norm=kernels.Norm((1 + less.float()).bfloat16(), 1e-6))
    assert float((lost.double() - expected).norm()) > errors[0]
    for rows in (1, 8, 9):
        assert torch.equal(kernels.skinny_gemm(x[:rows], weight, norm=norm), whole[:rows])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "size"), [(1, 5376), (16, 2816), (300, 64), (3, 16384)])
@pytest.mark.parametrize("wide", [False, True], ids=["", "FP32 norms"])
def test_normed_rows_are_added_as_in_float64(dtype, rows, size, wide):
    x, residual = (torch.randn(1, rows, size, dtype=dtype, device="cuda") * 3 for _ in range(2))
    weight = torch.randn(size, dtype=torch.float32 if wide else dtype, device="cuda")
    factor = torch.tensor([0.37], dtype=dtype, device="cuda")
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    total = normed + residual.double()
    assert_close(kernels.add_normed(x, weight, 1e-6, residual, factor), total * factor.double(), dtype)
    assert_close(kernels.add_normed(x, weight, 1e-6, residual), total, dtype)
    assert_close(kernels.add_normed(x, weight, 1e-6, scale=0.3), normed * 0.3, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "size"), [(1, 21504), (16, 2112), (300, 704)])
def test_gates_by_gelu_equal_float64(dtype, rows, size):
    x = torch.randn(rows, 2 * size, dtype=dtype, device="cuda") * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(kernels.swiglu(x, gelu=True), F.gelu(gate, approximate="tanh") * up, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 100])
def test_products_gated_by_gelu_equal_float64(dtype, rows):
    x = torch.randn(rows, 2816, dtype=dtype, device="cuda")
    weight = (torch.randn(4224, 2816, device="cuda") * 0.04).to(dtype)
    gate, up = (x.double() @ weight.double().t()).to(dtype).double().chunk(2, dim=-1)
    multiply = kernels.skinny_gemm if rows <= kernels.SKINNY_ROWS else kernels.wide_gemm
    if rows > kernels.SKINNY_ROWS and not kernels.takes_wide(x, weight):
        pytest.skip("products of so many rows are Hopper's alone")
    found = multiply(x, weight, swiglu=True, gelu=True)
    assert_close(found, F.gelu(gate, approximate="tanh") * up, dtype, roundings=3)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_capped_logits_equal_float64(dtype):
    logits = (torch.randn(3, 4096, device="cuda") * 40).to(dtype)
    expected = (logits.double() / 30).tanh() * 30
    assert_close(kernels.cap(logits, 30.0), expected, torch.bfloat16 if dtype == torch.float32 else dtype)
