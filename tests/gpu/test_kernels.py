"""The CUDA kernels against float64 and against the operations they stand for."""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import TINY
from tests.flat_ops import decoding_ops, piece_ops, rowless_ops
from tests.near_ties import first_difference, is_near_tie, rounding_gap
from trtllm_dflash import kernels
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.base import AttentionLayer, Residual
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.cuda_slots import CudaSlots
from trtllm_dflash.ops.fp8 import dequantize_rows, quantize_rows
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs
from trtllm_dflash.text.tokenizer import TextCodec


def why_not() -> str:
    """Why these tests cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    try:
        kernels.load()
    except EngineError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

HALVES = [torch.bfloat16, torch.float16]
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def why_not_hopper(what: str) -> str:
    """Reason why tests of what Hopper alone has cannot run; empty: they can."""
    if not why_not() and torch.cuda.get_device_capability() != (9, 0):
        return f"{what} are Hopper's alone"
    return why_not()


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, roundings: float = 2.0) -> None:
    """Direction, scale and the largest error, each within a few roundings of the type: cosine alone sees no scale."""
    found, expected = found.double().flatten(), expected.double().flatten()
    epsilon = roundings * EPSILON[dtype]
    assert found.isfinite().all()
    if expected.norm() == 0:
        assert found.norm() == 0
        return
    assert (found @ expected) / (found.norm() * expected.norm()) > 1 - epsilon**2
    assert abs(found.norm() / expected.norm() - 1) < epsilon / 2
    assert (found - expected).norm() / expected.norm() < epsilon
    assert (found - expected).abs().max() < 4 * epsilon * expected.abs().max()


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    dtype: torch.dtype
    lengths: list[int]
    rows: int
    group: int
    size: int
    causal: bool
    window: int = 0
    sinks: bool = False
    kv_heads: int = 2

    def __str__(self) -> str:
        kind = f"{'causal' if self.causal else 'full'}-w{self.window}{'-sinks' if self.sinks else ''}"
        lengths = "_".join(map(str, self.lengths))
        return f"{str(self.dtype)[6:]}-q{self.rows}-g{self.group}-d{self.size}-{kind}-{lengths}"


def random_cases(count: int) -> list[Case]:
    choose = random.Random(5)
    edges = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 1000, 2049]
    cases = []
    for _ in range(count):
        rows = choose.choice([1, 2, 3, 5, 8, 10, 15, 16, 16, 32])
        cases.append(
            Case(
                dtype=choose.choice(HALVES),
                lengths=[choose.choice(edges) for _ in range(choose.choice([1, 2, 5, 33]))],
                rows=rows,
                group=choose.choice([1, 2, 4, 5, 8]),
                size=choose.choice([64, 128]),
                causal=choose.random() < 0.5,
                window=choose.choice([0, 0, 1, 7, 64, 128, 500]),
                sinks=choose.random() < 0.3,
            )
        )
    return cases


LONG = [
    Case(torch.bfloat16, [32768], 16, 4, 128, causal=True, kv_heads=8),
    Case(torch.bfloat16, [32768, 0, 1, 20000, 64, 32705], 16, 4, 128, causal=False),
    Case(torch.float16, [32767, 32768, 5], 1, 8, 64, causal=True),
    Case(torch.bfloat16, [32700, 100], 16, 8, 128, causal=True, window=128, sinks=True),
]
#: Of more slots and heads than an H200 has blocks of attention: dealt out whole, or divided.
MANY = [
    Case(torch.bfloat16, [37 * i for i in range(40)], 8, 4, 128, causal=True, kv_heads=8),
    Case(torch.float16, [37 * i for i in range(40)], 16, 8, 64, causal=True, sinks=True, kv_heads=8),
    Case(torch.bfloat16, [130] * 150 + [0, 1], 1, 4, 128, causal=True),
    Case(torch.bfloat16, [260 + 53 * i % 500 for i in range(17)], 16, 4, 128, causal=False, kv_heads=8),
    Case(torch.float16, [i % 3 * (64 + 97 * i % 1000) for i in range(32)], 1, 8, 64, causal=True, kv_heads=16),
    Case(torch.bfloat16, [260 + 53 * i % 500 for i in range(64)], 5, 4, 128, causal=True, window=300, kv_heads=8),
    Case(torch.bfloat16, [5000, *[260 + 53 * i % 500 for i in range(32)]], 8, 4, 128, causal=True, kv_heads=8),
]


def attention_weights(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of logits [Hq, ..., keys] over keys, beside which each head may have one logit more, its sink."""
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.double().view(-1, *[1] * (logits.dim() - 1)).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]


def reference(case: Case, q, keys, values, sinks) -> torch.Tensor:
    """[B, Q, Hq * D] in float64, slot by slot, from the rows that count alone."""
    out = torch.zeros(len(case.lengths), case.rows, q.shape[1] * case.size, dtype=torch.float64, device=q.device)
    for slot, length in enumerate(case.lengths):
        if length == 0:
            continue
        k = keys[slot, :, :length].double().repeat_interleave(case.group, 0)
        v = values[slot, :, :length].double().repeat_interleave(case.group, 0)
        logits = q[slot].double() @ k.transpose(1, 2) * case.size**-0.5  # [Hq, Q, length]
        position = torch.arange(length - case.rows, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        seen = key <= position if case.causal else key >= 0
        if case.window:
            seen = seen & (key > position - case.window)
        weights = attention_weights(logits.masked_fill(~seen, -torch.inf), sinks)
        if sinks is None:
            weights = weights.nan_to_num(0.0)  # of a row that sees nothing
        out[slot] = (weights @ v).transpose(0, 1).flatten(1)
    return out


def make_inputs(case: Case, spare: int = 40):
    """q as a slice of projected rows, caches as slots between others; rows past the length are NaN."""
    slots, length = len(case.lengths), max(case.lengths) + spare
    heads = case.group * case.kv_heads
    options: Any = {"dtype": case.dtype, "device": "cuda"}
    projected = torch.randn(slots, case.rows, (heads + 2 * case.kv_heads) * case.size, **options)
    q = projected[..., : heads * case.size].view(slots, case.rows, heads, case.size).transpose(1, 2)
    keys, values = (torch.randn(slots + 2, case.kv_heads, length, case.size, **options)[1:-1] for _ in range(2))
    for slot, used in enumerate(case.lengths):
        keys[slot, :, used:] = float("nan")
        values[slot, :, used:] = float("nan")
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    sinks = torch.randn(heads, device="cuda") + 1 if case.sinks else None
    return q, keys, values, lengths, sinks


@pytest.mark.parametrize("case", [*random_cases(80), *LONG, *MANY], ids=str)
def test_attention_equals_float64(case):
    q, keys, values, lengths, sinks = make_inputs(case)
    out = kernels.attention(q, keys, values, lengths, case.causal, case.window, sinks)
    assert_close(out, reference(case, q, keys, values, sinks), case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_may_be_of_the_models_type(dtype):
    case = Case(torch.bfloat16, [70, 9], 8, 4, 64, causal=True, sinks=True)
    q, keys, values, lengths, sinks = make_inputs(case)
    sinks = sinks.to(dtype)
    out = kernels.attention(q, keys, values, lengths, True, 0, sinks)
    assert_close(out, reference(case, q, keys, values, sinks), case.dtype)


def test_large_logits_do_not_overflow():
    case = Case(torch.bfloat16, [200, 65], 16, 4, 128, causal=True)
    q, keys, values, lengths, _ = make_inputs(case)
    q = q * 100
    out = kernels.attention(q, keys, values, lengths, True)
    assert_close(out, reference(case, q, keys, values, None), case.dtype)


def test_one_captured_launch_serves_all_lengths():
    case = Case(torch.bfloat16, [500, 0, 2000], 16, 4, 128, causal=True)
    q, keys, values, lengths, _ = make_inputs(case)
    keys.nan_to_num_(0.5), values.nan_to_num_(-0.5)
    kernels.attention(q, keys, values, lengths, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(q, keys, values, lengths, True)
    for case.lengths in ([500, 0, 2000], [1, 2039, 64], [0, 0, 0], [700, 701, 702]):
        lengths.copy_(torch.tensor(case.lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, reference(case, q, keys, values, None), case.dtype)


@pytest.mark.parametrize("case", [Case(torch.bfloat16, [3000, 900, 64], 16, 4, 128, causal=True), MANY[0]], ids=str)
def test_repeated_runs_are_equal_to_the_bit(case):
    q, keys, values, lengths, _ = make_inputs(case)
    first = kernels.attention(q, keys, values, lengths, True)
    assert all(kernels.attention(q, keys, values, lengths, True).equal(first) for _ in range(20))


# -- FP8 caches --------------------------------------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn
SCALES = (0.031, 0.017)  # of keys, and of values


def make_scales() -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (torch.tensor(scale, device="cuda") for scale in SCALES)
    return key, value


@pytest.mark.parametrize("case", [*random_cases(80), *LONG, *MANY], ids=str)
def test_attention_over_fp8_caches_equals_float64_over_what_they_stand_for(case):
    q, keys, values, lengths, sinks = make_inputs(case)
    scales = make_scales()
    rounded = [(cache / scale).to(FP8) for cache, scale in zip((keys, values), scales, strict=True)]
    stands_for = [cache.double() * scale.double() for cache, scale in zip(rounded, scales, strict=True)]
    assert rounded[0][-1, 0, -1].isnan().all()  # past the length
    out = kernels.attention(q, *rounded, lengths, case.causal, case.window, sinks, scales=scales)
    assert_close(out, reference(case, q, *stands_for, sinks), case.dtype)


def test_every_number_of_an_fp8_cache_is_read_as_it_is():
    """One key a slot: its weight is 1, and what comes out is its value."""
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8)
    numbers = numbers[numbers.float().isfinite()]  # 254
    values = torch.cat([numbers, numbers[:2]]).view(2, 1, 1, 128).expand(2, 2, 1, 128).contiguous()
    q = torch.randn(2, 4, 1, 128, dtype=torch.bfloat16, device="cuda")
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    key_scale, value_scale = torch.tensor(3.0, device="cuda"), torch.tensor(0.25, device="cuda")
    out = kernels.attention(q, values, values, lengths, True, scales=(key_scale, value_scale))
    expected = (values[:, :, 0].bfloat16() * 0.25).repeat_interleave(2, dim=1)  # [slots, heads, D]
    assert out.view(2, 4, 128).equal(expected)


def fp8_steps(x: torch.Tensor) -> torch.Tensor:
    """Each number's place among all E4M3 numbers: neighbours differ by 1."""
    code = x.view(torch.uint8).int()
    return torch.where(code >= 128, 128 - code, code)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_rows_are_appended_in_fp8_as_torch_appends_them(dtype, size, rows):
    """Values to the bit; of keys, a rare last bit of the norm may turn the rounding to the neighbouring number."""
    slots, heads, kv_heads, length = 3, 8, 2, 400
    weights = layer_weights(dtype, size, length, normed=True)
    weights |= {f"l.{name}.scale": scale for name, scale in zip(("key", "value"), make_scales(), strict=True)}
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6)
    start = torch.tensor([0, 17, 250], dtype=torch.int32, device="cuda")
    qkv = torch.randn(slots, rows, (heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
    qkv[:, 0, -size:] = torch.linspace(-20, 20, size, device="cuda")  # some saturate: 448 * 0.017 is 7.6
    results = []
    for ops_type in (TorchOps, CudaSlots):
        torch.manual_seed(1)
        caches = {f"l.{n}": torch.randn(slots, kv_heads, length, size, device="cuda").to(FP8) for n in ("key", "value")}
        out = ops_type(weights, caches).self_attention(layer, qkv, start)
        results.append((out, caches["l.key"], caches["l.value"]))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert cuda_values.view(torch.uint8).equal(values.view(torch.uint8))
    assert cuda_values.float().abs().max() == 448
    turned = (fp8_steps(cuda_keys) - fp8_steps(keys)).abs()
    assert turned.max() <= 1 and turned.float().mean() < 0.01
    assert_close(cuda_out, out, dtype, roundings=6)


def test_context_and_block_are_written_in_fp8_in_one_run():
    slots, heads, kv_heads, length, size, dtype = 3, 8, 2, 600, 128, torch.bfloat16
    weights = layer_weights(dtype, size, length, normed=True)
    weights |= {f"l.{name}.scale": scale for name, scale in zip(("key", "value"), make_scales(), strict=True)}
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6)
    start = torch.tensor([0, 33, 300], dtype=torch.int32, device="cuda")
    committed = torch.tensor([1, 8, 16], dtype=torch.int32, device="cuda")
    kv = torch.randn(slots, 16, 3 * 2 * kv_heads * size, dtype=dtype, device="cuda")
    qkv = torch.randn(slots, 16, (heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
    lengths = start + committed + 16
    results = []
    for ops_type in (TorchOps, CudaSlots):
        caches = {f"l.{n}": torch.zeros(slots, kv_heads, length, size, device="cuda").to(FP8) for n in ("key", "value")}
        ops = ops_type(weights, caches)
        context = ops.context_rows(layer, kv, 1, start)
        out = ops.block_attention(layer, context, qkv, start, committed)
        used = (torch.arange(length, device="cuda")[None, :] < lengths[:, None])[:, None, :, None]
        results.append((out, *(cache.float() * used for cache in caches.values())))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert cuda_values.equal(values)
    turned = (fp8_steps(cuda_keys.to(FP8)) - fp8_steps(keys.to(FP8))).abs()
    assert turned.max() <= 1 and turned.float().mean() < 0.01
    assert_close(cuda_out, out, dtype, roundings=6)


# -- append ------------------------------------------------------------------------------------------------------------


def layer_weights(dtype, size, positions, normed):
    angles = torch.rand(positions, size // 2, device="cuda") * 6
    weights = {"rope.cos": angles.cos().to(dtype), "rope.sin": angles.sin().to(dtype)}
    if normed:
        for name in ("q", "k"):
            weights[f"l.self_attn.{name}_norm.weight"] = torch.randn(size, dtype=dtype, device="cuda")
    return weights


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 100, 300, 700])
def test_self_attention_appends_what_torch_appends(dtype, size, normed, rows):
    """Caches equal but for rare last-bit differences in the norm; attention's output close."""
    slots, length = 3, max(400, rows + 300)
    heads, kv_heads = (8, 2) if rows <= 100 else (9, 3)  # of many rows, the same threads take several heads each
    weights = layer_weights(dtype, size, length, normed)
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6 if normed else None)
    start = torch.tensor([0, 17, 250], dtype=torch.int32, device="cuda")
    qkv = torch.randn(slots, rows, (heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
    results = []
    for ops_type in (TorchOps, CudaSlots):
        torch.manual_seed(1)
        caches = {
            f"l.{name}": torch.randn(slots, kv_heads, length, size, dtype=dtype, device="cuda")
            for name in ("key", "value")
        }
        ops = ops_type(weights, caches)
        out = ops.self_attention(layer, qkv, start)
        results.append((out, caches["l.key"], caches["l.value"]))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert cuda_values.equal(values)
    assert_close(cuda_keys, keys, dtype, roundings=0.5)
    assert_close(cuda_out, out, dtype, roundings=4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("context_rows", "block"), [(16, 16), (1, 16), (16, 8), (200, 16), (7, 2)])
def test_block_attention_writes_committed_context_and_block_in_one_run(dtype, size, context_rows, block):
    slots, heads, kv_heads, length, layers, index = 3, 8, 2, 600, 3, 1
    weights = layer_weights(dtype, size, length, normed=True)
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6)
    start = torch.tensor([0, 33, 300], dtype=torch.int32, device="cuda")
    committed = torch.tensor([1, (context_rows + 1) // 2, context_rows], dtype=torch.int32, device="cuda")
    kv = torch.randn(slots, context_rows, layers * 2 * kv_heads * size, dtype=dtype, device="cuda")
    qkv = torch.randn(slots, block, (heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
    results = []
    for ops_type in (TorchOps, CudaSlots):
        torch.manual_seed(1)
        caches = {
            f"l.{name}": torch.randn(slots, kv_heads, length, size, dtype=dtype, device="cuda")
            for name in ("key", "value")
        }
        ops = ops_type(weights, caches)
        context = ops.context_rows(layer, kv, index, start)
        lengths = start + committed + block
        out = ops.block_attention(layer, context, qkv, start, committed)
        used = torch.arange(length, device="cuda")[None, :] < lengths[:, None]
        caches = {name: cache * used[:, None, :, None] for name, cache in caches.items()}  # what follows is scratch
        results.append((out, caches["l.key"], caches["l.value"]))
    (out, keys, values), (cuda_out, cuda_keys, cuda_values) = results
    assert cuda_values.equal(values)
    assert_close(cuda_keys, keys, dtype, roundings=0.5)
    assert_close(cuda_out, out, dtype, roundings=4)


@pytest.mark.parametrize("start", [-16, -3, 90, 100, 1000])
def test_rows_outside_of_the_cache_are_dropped(start):
    slots, kv_heads, length, size, rows = 2, 2, 100, 64, 16
    weights = layer_weights(torch.bfloat16, size, length, normed=True)
    shape = (slots + 2, kv_heads, length, size)
    whole = torch.randn(2, *shape, dtype=torch.bfloat16, device="cuda")
    before = whole.clone()
    caches = {"l.key": whole[0, 1:-1], "l.value": whole[1, 1:-1]}
    layer = AttentionLayer("l.", "rope", 4, kv_heads, size, 1e-6)
    qkv = torch.randn(slots, rows, 8 * size, dtype=torch.bfloat16, device="cuda")
    at = torch.full((slots,), start, dtype=torch.int32, device="cuda")
    out = CudaSlots(weights, caches).self_attention(layer, qkv, at)
    assert out.isfinite().all()
    if start == -16:
        assert out.eq(0).all()
    inside = [row for row in range(start, start + rows) if 0 <= row < length]
    outside = [row for row in range(length) if row not in inside]
    assert whole[:, 1:-1, :, outside].equal(before[:, 1:-1, :, outside])
    assert whole[:, [0, -1]].equal(before[:, [0, -1]])
    values = qkv[..., 6 * size :].view(slots, rows, kv_heads, size).transpose(1, 2)
    assert caches["l.value"][:, :, inside].equal(values[:, :, [row - start for row in inside]])


def test_context_alone_is_kept_whole():
    slots, kv_heads, length, size, rows = 2, 2, 100, 128, 16
    weights = layer_weights(torch.bfloat16, size, length, normed=True)
    layer = AttentionLayer("l.", "rope", 4, kv_heads, size, 1e-6)
    kv = torch.randn(slots, rows, 2 * 2 * kv_heads * size, dtype=torch.bfloat16, device="cuda")
    start = torch.tensor([3, 70], dtype=torch.int32, device="cuda")
    kept = []
    for ops_type in (TorchOps, CudaSlots):
        caches = {
            f"l.{n}": torch.zeros(slots, kv_heads, length, size, dtype=torch.bfloat16, device="cuda")
            for n in ("key", "value")
        }
        ops = ops_type(weights, caches)
        ops.keep_context(layer, ops.context_rows(layer, kv, 1, start), start)
        kept.append(caches)
    assert kept[1]["l.value"].equal(kept[0]["l.value"])
    assert_close(kept[1]["l.key"], kept[0]["l.key"], torch.bfloat16, roundings=0.5)


# -- norms, SwiGLU, choosing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 64, 256, 1000, 2880, 4096, 7168, 8192, 16384, 32768])
@pytest.mark.parametrize("wide", [False, True], ids=["", "FP32 weight"])
def test_norms_equal_float64(dtype, size, wide):
    x, y = (torch.randn(3, 5, size, dtype=dtype, device="cuda") * 3 for _ in range(2))
    weight = torch.randn(size, dtype=torch.float32 if wide else dtype, device="cuda")

    def normed(x):
        x = x.double()
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    assert_close(kernels.rms_norm(x, weight, 1e-6), normed(x), dtype)
    assert_close(kernels.rms_norm(x[:, 1:], weight, 1e-6), normed(x[:, 1:]), dtype)
    total, out = kernels.add_rms_norm(x, y, weight, 1e-6)
    assert total.equal(x + y)
    assert_close(out, normed(x + y), dtype)
    for count in (1, 2, 3, 4):
        parts = torch.randn(count, 3, 5, size, device="cuda") * 3
        total, out = kernels.add_parts_norm(x, parts, weight, 1e-6)
        assert total.equal(x + parts.double().sum(0).float().to(dtype)) or count > 2  # FP32 rounds the sums of more
        assert_close(total, x.double() + parts.double().sum(0), dtype)
        assert_close(out, normed(total), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 768, 1000, 12288])
def test_swiglu_equals_float64(dtype, size):
    x = torch.randn(2, 5, 2 * size, dtype=dtype, device="cuda") * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(kernels.swiglu(x), F.silu(gate) * up, dtype)


# -- matrix products of few rows ---------------------------------------------------------------------------------------

#: Rows of a weight and inputs: shares of one to many passes, runs of inputs that are not a multiple of the warps.
SHAPES = [
    *((16, 64), (48, 192), (1040, 128), (2880, 2880), (4096, 512), (6144, 4096), (4096, 12288)),
    *((14336, 1024), (14336, 4096), (14336, 5120), (16480, 1024), (24576, 4096)),
]


def product(shape: tuple[int, int], dtype: torch.dtype, fp8: bool = False) -> tuple[Any, ...]:
    """x of as many rows as there may be, a weight, its scale, a bias, and their product in float64."""
    if fp8 and shape[1] % 128:
        pytest.skip("a row of FP8 weights is a multiple of 128 bytes")
    outputs, inputs = shape
    x = torch.randn(kernels.SKINNY_ROWS, inputs, dtype=dtype, device="cuda")
    weight = torch.randn(outputs, inputs, dtype=dtype, device="cuda") * 0.05
    bias = torch.randn(outputs, dtype=dtype, device="cuda")
    scale = None
    if fp8:
        weight, scale = quantize_rows(weight)
        scale = scale.flatten()
    wide = weight.double() * (1 if scale is None else scale.double()[:, None])
    return x, weight, scale, bias, x.double() @ wide.t()


@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_skinny_product_equals_float64_whatever_the_other_rows_are(dtype, shape, fp8):
    x, weight, scale, bias, expected = product(shape, dtype, fp8)
    whole = kernels.skinny_gemm(x, weight, scale)
    assert_close(whole, expected, dtype)
    for rows in (1, 3, 8, 9, 15):
        assert torch.equal(kernels.skinny_gemm(x[:rows], weight, scale), whole[:rows])
    biased = kernels.skinny_gemm(x[:5], weight, scale, bias)
    assert_close(biased, expected[:5] + bias.double(), dtype)


@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 32 == 0], ids=str)
def test_a_product_with_swiglu_is_the_product_then_swiglu(shape, fp8):
    x, weight, scale, bias, _ = product(shape, torch.bfloat16, fp8)
    for rows in (1, 8, 16):
        apart = kernels.swiglu(kernels.skinny_gemm(x[:rows], weight, scale, bias))
        assert torch.equal(kernels.skinny_gemm(x[:rows], weight, scale, bias, swiglu=True), apart)


def in_double(x: torch.Tensor, norm: kernels.Norm) -> torch.Tensor:
    """x normed in float64."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_of_normed_rows_is_closer_to_float64_than_the_norm_then_the_product(dtype, shape, fp8):
    x, weight, scale, bias, _ = product(shape, dtype, fp8)
    x *= torch.logspace(-3, 3, len(x), dtype=dtype, device="cuda")[:, None]  # rows of all sizes beside each other
    norm = kernels.Norm((torch.rand(shape[1], device="cuda") * 3).to(dtype), 1e-6)
    wide = weight.double() * (1 if scale is None else scale.double()[:, None])
    expected = in_double(x, norm) @ wide.t()
    whole = kernels.skinny_gemm(x, weight, scale, norm=norm)
    for found, row in zip(whole, expected, strict=True):
        assert_close(found, row, dtype)
    apart = kernels.skinny_gemm(kernels.rms_norm(x[None], norm.weight, norm.eps), weight, scale)
    assert relative_error(whole, expected) < 1.02 * relative_error(apart[0], expected)
    for rows in (1, 3, 8, 9, 15):
        assert torch.equal(kernels.skinny_gemm(x[:rows], weight, scale, norm=norm), whole[:rows])
        assert torch.equal(kernels.skinny_gemm(x[-rows:], weight, scale, norm=norm), whole[-rows:])
    biased = kernels.skinny_gemm(x[:5], weight, scale, bias, norm=norm)
    assert_close(biased, expected[:5] + bias.double(), dtype)
    if shape[0] % 32 == 0:
        for rows in (1, 8, 16):
            apart = kernels.swiglu(kernels.skinny_gemm(x[:rows], weight, scale, bias, norm=norm))
            assert torch.equal(kernels.skinny_gemm(x[:rows], weight, scale, bias, True, norm), apart)


@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_residual_is_added_as_it_would_be_afterwards(dtype, shape, fp8):
    x, weight, scale, bias, _ = product(shape, dtype, fp8)
    norm = kernels.Norm(torch.rand(shape[1], device="cuda").to(dtype), 1e-6)
    residual = torch.randn(len(x), shape[0], dtype=dtype, device="cuda")
    for rows in (1, 7, 8, 9, 16):
        for options in ({}, {"bias": bias}, {"norm": norm}, {"bias": bias, "norm": norm}):
            apart = kernels.skinny_gemm(x[:rows], weight, scale, **options) + residual[:rows]
            found = kernels.skinny_gemm(x[:rows], weight, scale, residual=residual[:rows], **options)
            assert torch.equal(found, apart)


def test_in_fp16_inputs_times_large_norm_weights_do_not_overflow():
    norm = kernels.Norm(torch.rand(4096, device="cuda").half() * 200, 1e-6)
    norm.weight[::7] = 0.002
    x, weight, *_ = product((6144, 4096), torch.float16)
    x *= 10000
    x.clamp_(-60000, 60000)
    assert (x * norm.weight).isinf().any()
    expected = in_double(x, norm) @ weight.double().t()
    assert_close(kernels.skinny_gemm(x, weight, norm=norm), expected, torch.float16)


def test_a_row_of_zeros_is_normed_to_zeros():
    x, weight, *_ = product((4096, 512), torch.bfloat16)
    x[3] = 0
    norm = kernels.Norm(torch.rand(512, device="cuda").bfloat16(), 1e-6)
    found = kernels.skinny_gemm(x, weight, norm=norm)
    assert found.isfinite().all() and found[3].eq(0).all() and found[2].ne(0).any()


def wide_rows(inputs: int, normed: bool) -> torch.Tensor:
    """BF16 rows of very different sizes, and rows with very different inputs. Squares of normed ones fit FP32."""
    x = torch.randn(kernels.SKINNY_ROWS, inputs, device="cuda").bfloat16()
    x *= torch.logspace(-30, 30, len(x), base=2, device="cuda").bfloat16()[:, None]
    x[5] = 0
    x[6] = torch.randn(inputs, device="cuda").bfloat16()
    x[6, 17] = 2.0**60
    x[7, :128] *= 2.0**-25
    x[7, -128:] *= 2.0**25
    x[8] = torch.randn(inputs, device="cuda").bfloat16() * 2.0**-119
    if not normed:
        x[9] = torch.randn(inputs, device="cuda").bfloat16() * 2.0**110
    x[10, ::2] *= 2.0**-30
    return x


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 128 == 0], ids=str)
def test_fp8_weights_times_inputs_beyond_fp16_equal_float64(shape, normed):
    _, weight, scale, *_ = product(shape, torch.bfloat16, fp8=True)
    x = wide_rows(shape[1], normed)
    norm = kernels.Norm((torch.rand(shape[1], device="cuda") * 3).bfloat16(), 1e-6) if normed else None
    expected = (in_double(x, norm) if norm else x.double()) @ (weight.double() * scale.double()[:, None]).t()
    whole = kernels.skinny_gemm(x, weight, scale, norm=norm)
    for found, row in zip(whole, expected, strict=True):
        assert_close(found, row, torch.bfloat16)
    for rows in (1, 7, 8, 9, 12):
        assert torch.equal(kernels.skinny_gemm(x[:rows], weight, scale, norm=norm), whole[:rows])
        assert torch.equal(kernels.skinny_gemm(x[-rows:], weight, scale, norm=norm), whole[-rows:])


@pytest.mark.parametrize("normed", [False, True])
def test_with_fp8_weights_an_infinity_or_nan_stays_in_its_row(normed):
    _, weight, scale, *_ = product((4096, 512), torch.bfloat16, fp8=True)
    x = wide_rows(512, normed)
    norm = kernels.Norm(torch.rand(512, device="cuda").bfloat16(), 1e-6) if normed else None
    expected = kernels.skinny_gemm(x, weight, scale, norm=norm)
    bad = [2, 3, 11]
    x[bad, [40, 200, 511]] = torch.tensor([torch.inf, -torch.inf, torch.nan], device="cuda").bfloat16()
    found = kernels.skinny_gemm(x, weight, scale, norm=norm)
    assert not found[bad].isfinite().any()
    others = [row for row in range(len(x)) if row not in bad]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("exponent", [-90, -30, -1, 30, 100])
def test_with_fp8_weights_a_power_of_two_goes_through_a_product_to_the_bit(exponent):
    x, weight, scale, *_ = product((6144, 4096), torch.bfloat16, fp8=True)
    expected = kernels.skinny_gemm(x, weight, scale) * 2.0**exponent
    assert torch.equal(kernels.skinny_gemm(x * 2.0**exponent, weight, scale), expected)


def test_a_captured_chain_of_normed_products_repeats_itself_to_the_bit():
    """As in a step: each kernel begins while the one before it still runs."""
    x, up, *_ = product((12288, 1024), torch.bfloat16)
    down = product((1024, 6144), torch.bfloat16)[1]
    norm = kernels.Norm(torch.rand(1024, device="cuda").bfloat16(), 1e-6)

    def chain(x):
        for _ in range(20):
            h = kernels.skinny_gemm(x, up, norm=norm, swiglu=True)
            x = kernels.skinny_gemm(h, down, residual=x)
        return x

    expected = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(50):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
    slow = x
    for _ in range(20):
        h = kernels.swiglu(kernels.skinny_gemm(slow, up, norm=norm))
        torch.cuda.synchronize()
        slow = kernels.skinny_gemm(h, down) + slow
        torch.cuda.synchronize()
    assert torch.equal(slow, expected)


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_residual_streams_operations_are_what_torch_computes(dtype, pending, rows):
    weights = {
        "up.weight": torch.randn(1024, 256, dtype=dtype, device="cuda") * 0.05,
        "down.weight": torch.randn(256, 512, dtype=dtype, device="cuda") * 0.05,
        "norm.weight": torch.rand(256, device="cuda").to(dtype),
    }
    x, y = (torch.randn(1, rows, 256, dtype=dtype, device="cuda") for _ in range(2))
    stream = Residual(x, y if pending else None)
    results = []
    for ops in (TorchOps(weights, {}), rowless_ops(weights)):
        before, h = ops.norm_linear_swiglu("norm", "up", stream, 1e-6)
        _, plain = ops.norm_linear("norm", "up", stream, 1e-6)
        after = ops.add_product("down", before, h)
        results.append((before, h, plain, ops.add_pending(after), *ops.norm("norm", after, 1e-6)))
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected, dtype, roundings=4)
    assert torch.equal(results[0][0], results[1][0])


def test_every_fp8_number_is_multiplied_as_it_is():
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()][:240]
    weight = torch.zeros(240, 256, dtype=torch.float8_e4m3fn, device="cuda")
    weight[range(240), range(240)] = numbers
    for dtype in HALVES:
        one = torch.eye(256, dtype=dtype, device="cuda")
        scale = torch.ones(240, device="cuda")
        for first in range(0, 240, 16):
            found = kernels.skinny_gemm(one[first : first + 16], weight, scale)
            assert torch.equal(found[:, first : first + 16].diagonal().float(), numbers[first : first + 16].float())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 8, 2048, 4097, 32000, 151936])
def test_argmax_is_the_lowest_id_among_equals(dtype, size):
    logits = torch.randn(2, 17, size, device="cuda").to(dtype)
    best = logits.amax(-1)
    expected = torch.where(logits == best[..., None], torch.arange(size, device="cuda"), size).amin(-1)
    found, ids = kernels.argmax(logits)
    assert ids.equal(expected.int())
    assert found.equal(best.float())
    few = torch.randint(-2, 2, (4, 3, size), device="cuda").to(dtype)  # with many equals, and zeros of both signs
    few = torch.where(torch.rand_like(few, dtype=torch.float32) < 0.5, few, -few)
    best = few.amax(-1)
    expected = torch.where(few == best[..., None], torch.arange(size, device="cuda"), size).amin(-1)
    assert kernels.argmax(few)[1].equal(expected.int())
    assert kernels.argmax(torch.full((1, 1, size), -torch.inf, device="cuda"))[1].item() == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 1000, 2880, 4096, 12288, 32768])
def test_rows_are_quantized_as_torch_quantizes_them(dtype, size):
    x = torch.randn(33, size, dtype=dtype, device="cuda") * torch.logspace(-4, 3, 33, device="cuda")[:, None].to(dtype)
    x[5] = 0
    rows, scale = kernels.quantize_rows(x)
    expected, expected_scale = quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # A scale's last bit may move a number that lies between two.
    near = (dequantize_rows(rows, scale) - dequantize_rows(expected, expected_scale)).abs()
    assert (near <= 2**-3 * x.float().abs() + 2**-9 * scale).all()
    assert (near > 1e-6 * x.float().abs()).float().mean() < 1e-2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [128, 2944, 5120, 12288, 32768])
@pytest.mark.parametrize("is_wide", [False, True], ids=["a norm in 16 bits", "a norm in FP32"])
def test_normed_rows_are_quantized_as_those_that_a_norm_stored(dtype, size, is_wide, poisoned):
    x = torch.randn(33, size, dtype=dtype, device="cuda") * torch.logspace(-4, 3, 33, device="cuda")[:, None].to(dtype)
    x[5] = 0
    weight = torch.rand(size, device="cuda").mul_(6).exp_().to(torch.float32 if is_wide else dtype)
    stored, norm = kernels.rms_norm(x[None], weight, 1e-6)[0], kernels.Norm(weight, 1e-6)
    for quantize in (kernels.quantize_rows, kernels.quantize_blocks):
        for found, expected in zip(quantize(x, norm), quantize(stored), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows,size", [(1, 128), (4, 2944), (33, 5120), (516, 17408)])
def test_blocks_of_rows_are_quantized_as_rows_are(dtype, rows, size):
    x = torch.randn(rows, size, dtype=dtype, device="cuda") * torch.rand(size, device="cuda").mul_(6).exp_().to(dtype)
    x[rows // 2, :128] = 0
    values, scale = kernels.quantize_blocks(x)
    expected, expected_scale = kernels.quantize_rows(x.view(-1, 128))
    assert torch.equal(scale.t().flatten(), expected_scale.flatten())
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8).view(rows, size))


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 2880, 4096])
def test_embeddings_are_rows_of_the_table(dtype, size):
    table = torch.randn(50, size, dtype=dtype, device="cuda")
    ids = torch.randint(0, 50, (3, 7), dtype=torch.int32, device="cuda")
    assert kernels.embed(table, ids).equal(table[ids])
    block = kernels.embed(table, ids[:, 0].contiguous(), 16, 49)
    assert block.shape == (3, 16, size)
    assert block[:, 0].equal(table[ids[:, 0]])
    assert block[:, 1:].equal(table[49].expand(3, 15, -1))
    assert not kernels.embed(table, ints([[50, -1]])).any()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_the_kernels_cannot_take_is_refused():
    case = Case(torch.bfloat16, [10], 4, 2, 64, causal=True)
    q, keys, values, lengths, _ = make_inputs(case)
    with pytest.raises(ValueError, match="float32"):
        kernels.attention(q.float(), keys, values, lengths, True)
    with pytest.raises(ValueError, match="33 rows"):
        kernels.attention(torch.zeros(1, 4, 33, 64, dtype=q.dtype, device="cuda"), keys, values, lengths, True)
    with pytest.raises(ValueError, match="lengths must be int32"):
        kernels.attention(q, keys, values, lengths.long(), True)
    with pytest.raises(ValueError, match="head size"):
        kernels.attention(q[..., :32], keys[..., :32], values[..., :32], lengths, True)


# -- the whole step, on the shipped pair -------------------------------------------------------------------------------


@dataclass
class Tiny:
    """The shipped pair in one 16-bit type on the GPU, and what its tokenizer makes of some prompts."""

    dtype: torch.dtype

    def __post_init__(self):
        pair = open_pair(TINY / "target", TINY / "drafter")
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        settings = BuildSettings(
            name="tiny", target="", drafter="", precision=precision, max_batch=8, max_seq_len=512, chunk=256
        )
        self.config = plan_engine(pair, settings).config
        weights = {name: x.cuda() for name, x in read_rank_weights(pair, 1, 0, self.dtype).items()}
        self.weights = complete_weights(weights, self.config, 0)
        self.step = DraftVerifyStep(build_target(self.config.target), Drafter(self.config.drafter))
        codec = TextCodec.load(TINY / "target", self.config.chat_arguments)
        texts = [text for kind in read_prompts(2).values() for text in kind][:8]
        self.prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]

    def caches(self) -> dict[str, torch.Tensor]:
        shapes = cache_shapes(self.config)
        return {name: torch.zeros(shape, dtype=self.dtype, device="cuda") for name, shape in shapes.items()}

    def prefill(self, ops_type, caches):
        """Each prompt into its own slot, in one chunk: the first block and the committed lengths."""
        blocks, starts = [], []
        for slot, prompt in enumerate(self.prompts):
            if ops_type is CudaOps:
                ops, layout = piece_ops(self.weights, caches, slot, 0, prompt)
                inputs = self.flat_inputs(layout)
            else:
                last = ints([[len(prompt) - 1]])
                inputs = StepInputs(ints([prompt]), ints([0]), last[:, 0] + 1, last, self.offsets)
                ops = ops_type(self.weights, {name: cache[slot : slot + 1] for name, cache in caches.items()})
            out = self.step(ops, inputs, Drafting.BLOCK)
            blocks.append(out.next_tokens)
            starts.append(out.next_start)
        return torch.cat(blocks), torch.cat(starts)

    @cached_property
    def offsets(self) -> torch.Tensor:  # made before a capture, which allows no copy from the host
        return ints([list(range(self.config.block_size))])

    def decode_inputs(self, tokens, start, drafting):
        slots, rows = tokens.shape
        each = ints([list(range(rows))]).expand(slots, -1)
        return StepInputs(tokens, start, ints([rows] * slots), each.contiguous(), self.offsets)

    def flat_inputs(self, layout: kernels.Rows) -> StepInputs:
        segments = layout.segments
        return StepInputs(layout.token_ids[None], segments[:, 1], segments[:, 3], layout.logit_rows[None], self.offsets)

    def decode(self, ops_type, caches, tokens, start, drafting):
        """A step of the slots' rows tokens [B, Q]."""
        if ops_type is not CudaOps:
            return self.step(ops_type(self.weights, caches), self.decode_inputs(tokens, start, drafting), drafting)
        ops, layout = decoding_ops(self.weights, caches, tokens, start)
        out = self.step(ops, self.flat_inputs(layout), drafting)
        return replace(out, target_ids=out.target_ids.view(tokens.shape))

    @torch.inference_mode()
    def texts(self, ops_type, drafting, count=96):
        """The first count tokens after each prompt, and tokens a step."""
        caches = self.caches()
        tokens, start = self.prefill(ops_type, caches)
        texts = [[bonus] for bonus in tokens[:, 0].tolist()]
        steps = 0
        while min(map(len, texts)) < count:
            tokens = tokens if drafting is Drafting.BLOCK else tokens[:, :1]
            out = self.decode(ops_type, caches, tokens.contiguous(), start, drafting)
            for text, ids, accepted in zip(texts, out.target_ids.tolist(), out.accepted.tolist(), strict=True):
                if len(text) < count:
                    text += ids[: accepted + 1]
                    steps += 1
            tokens, start = out.next_tokens, out.next_start.clamp(max=480)
        return [text[:count] for text in texts], sum(len(text) - 1 for text in texts) / steps

    @torch.inference_mode()
    def assert_only_near_ties_differ(self, texts, others):
        """Each text equals the other one, or first differs from it where torch's logits nearly tie."""
        for prompt, text, other in zip(self.prompts, texts, others, strict=True):
            first = first_difference(text, other)
            if first is None:
                continue
            ids = ints([prompt + text[:first]])
            ops = TorchOps(self.weights, {name: cache[:1] for name, cache in self.caches().items()})
            target = self.step.target
            logits = target.logits(ops, target.forward(ops, ids, ints([0]), ()).hidden)[0, -1]
            for token in (text[first], other[first]):
                assert is_near_tie(logits, token, rounding_gap(2, logits, self.dtype)), (first, text, other)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.fixture(scope="module", params=HALVES, ids=str)
def tiny(request):
    return Tiny(request.param)


def test_the_shipped_pair_says_with_kernels_what_it_says_without(tiny):
    torch_text, torch_rate = tiny.texts(TorchOps, Drafting.BLOCK)
    text, rate = tiny.texts(CudaOps, Drafting.BLOCK)
    plain, _ = tiny.texts(CudaOps, Drafting.OFF)
    assert rate == pytest.approx(torch_rate, rel=0.05)
    assert rate > 5
    tiny.assert_only_near_ties_differ(text, torch_text)
    tiny.assert_only_near_ties_differ(text, plain)


def test_drafting_resumes_after_steps_that_only_kept_context(tiny):
    """A step of one row keeps one context row: were it lost or unrotated, acceptance would fall."""
    with torch.inference_mode():
        caches = tiny.caches()
        tokens, start = tiny.prefill(CudaOps, caches)
        for _ in range(12):
            out = tiny.decode(CudaOps, caches, tokens[:, :1].contiguous(), start, Drafting.CONTEXT)
            tokens, start = out.next_tokens, out.next_start
        committed = 0
        tokens = tokens.expand(-1, tiny.config.block_size).contiguous()  # no drafts yet: the first step makes some
        for step in range(6):
            out = tiny.decode(CudaOps, caches, tokens, start, Drafting.BLOCK)
            tokens, start = out.next_tokens, out.next_start
            committed += int((out.accepted + 1).sum()) if step else 0
    assert committed / 5 / len(tiny.prompts) > 3


def test_a_captured_step_replays_what_runs_eagerly(tiny):
    with torch.inference_mode():
        caches = tiny.caches()
        tokens, start = tiny.prefill(CudaOps, caches)
        tokens, start = tokens.clone(), start.clone()
        eager_caches = {name: cache.clone() for name, cache in caches.items()}
        warm_caches = {name: cache.clone() for name, cache in caches.items()}
        tiny.decode(CudaOps, warm_caches, tokens, start, Drafting.BLOCK)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tiny.decode(CudaOps, caches, tokens, start, Drafting.BLOCK)
        for _ in range(4):
            eager = tiny.decode(CudaOps, eager_caches, tokens.clone(), start.clone(), Drafting.BLOCK)
            graph.replay()
            for name in ("target_ids", "accepted", "next_start", "next_tokens"):
                assert getattr(captured, name).equal(getattr(eager, name)), name
            for slot, used in enumerate(captured.next_start.tolist()):
                for name, cache in caches.items():
                    assert cache[slot, :, :used].equal(eager_caches[name][slot, :, :used]), name
            tokens.copy_(captured.next_tokens)
            start.copy_(captured.next_start)
