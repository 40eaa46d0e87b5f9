"""Latent attention on Hopper: our kernel against float64, and that captured steps of Kimi's layers use it."""

from dataclasses import dataclass

import pytest
import torch

from tests.gpu.test_kernels import HALVES, assert_close, why_not_hopper
from trtllm_dflash import kernels
from trtllm_dflash.kernels.latent_attention import LATENT_RANK, LATENT_ROW
from trtllm_dflash.ops.base import LatentLayer
from trtllm_dflash.ops.cuda_slots import CudaSlotOps
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(
    bool(why_not_hopper("latent attention's kernel")), reason=why_not_hopper("latent attention's kernel")
)

SCALE = 0.06


@dataclass
class Case:
    """Slots' lengths, with their own rows; a cache ends where `cache_rows` says."""

    heads: int
    rows: int
    lengths: list[int]
    cache_rows: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        lengths = "_".join(map(str, self.lengths[:4]))
        return f"{str(self.dtype)[6:]}-h{self.heads}-q{self.rows}-{len(self.lengths)}x{lengths}-of{self.cache_rows}"


CASES = [
    *(
        Case(heads, rows, lengths, cache_rows, dtype)
        for dtype in HALVES
        for heads, rows in ((8, 1), (8, 8), (8, 16), (64, 1), (64, 16), (5, 7), (1, 1), (16, 32))
        for lengths, cache_rows in (([300], 300), ([rows, 65, 0, 129], 140), ([4096], 4100))
    ),
    Case(8, 8, [37 * i % 500 + 8 for i in range(40)], 512),
    Case(64, 8, [9000, 8000, 17], 9000),  # more than a range a slot, and more than a slot a range
    Case(8, 4, [130] * 300, 130),  # more slots than ranges
]


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, a cache that is NaN past each slot's length, and the lengths."""
    torch.manual_seed(0)
    q = torch.randn(len(case.lengths), case.heads, case.rows, LATENT_ROW, device="cuda").to(case.dtype)
    cache = torch.randn(len(case.lengths), 1, case.cache_rows, LATENT_ROW, device="cuda").to(case.dtype)
    lengths = torch.tensor([min(length, case.cache_rows) for length in case.lengths], dtype=torch.int32, device="cuda")
    for rows, length in zip(cache, lengths.tolist(), strict=True):
        rows[:, length:] = float("nan")
    return q, cache, lengths


def in_float64(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[B, Q, H * 512], slot by slot."""
    slots, heads, rows, _ = q.shape
    out = torch.zeros(slots, rows, heads * LATENT_RANK, dtype=torch.float64, device=q.device)
    for slot, length in enumerate(lengths.tolist()):
        if length:
            keys = cache[slot, 0, :length].double()
            position = torch.arange(length - rows, length, device=q.device)
            unseen = torch.arange(length, device=q.device) > position[:, None]
            scores = (q[slot].double() @ keys.T * SCALE).masked_fill(unseen, -torch.inf)
            out[slot] = (scores.softmax(dim=-1) @ keys[:, :LATENT_RANK]).transpose(0, 1).flatten(1)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_attention_equals_float64(case, poisoned):
    q, cache, lengths = make_inputs(case)
    assert kernels.takes_latent(cache, LATENT_RANK, LATENT_ROW - LATENT_RANK)
    out = kernels.attend_latent(q, cache, lengths, SCALE)
    assert_close(out, in_float64(q, cache, lengths), case.dtype)
    assert all(kernels.attend_latent(q, cache, lengths, SCALE).equal(out) for _ in range(3))


def test_one_captured_call_serves_any_lengths_and_strides(poisoned):
    q, cache, lengths = make_inputs(Case(8, 8, [1024] * 3, 1024))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # a row's heads are neighbours
    kernels.attend_latent(q, cache, lengths, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attend_latent(q, cache, lengths, SCALE)
    for now in ([1024, 9, 500], [8, 8, 8], [700, 0, 64]):
        lengths.copy_(torch.tensor(now))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, in_float64(q, cache, lengths), q.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("slots", "rows", "heads", "plain"), [(1, 1, 8, 128), (3, 8, 5, 128), (2, 32, 64, 16)])
def test_rows_are_normed_rotated_and_appended_as_in_float64(slots, rows, heads, plain, dtype, poisoned):
    """Rows before the cache's first and behind its last are dropped; others of it stay."""
    torch.manual_seed(0)
    q = torch.randn(slots, rows, heads * (plain + 64), device="cuda").to(dtype)
    kv = torch.randn(slots, rows, 640, device="cuda").to(dtype)[..., :LATENT_ROW]
    norm, angles = torch.randn(LATENT_RANK, device="cuda").to(dtype), 6 * torch.rand(128, 32, device="cuda")
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    start = torch.tensor([7, 95, -2][:slots], dtype=torch.int32, device="cuda")
    cache = torch.full((slots, 1, 100, LATENT_ROW), 9.0, dtype=dtype, device="cuda")
    queries = kernels.LatentAppend(norm, cos, sin, 1e-5)(q, kv, start, heads, cache)

    position = start[:, None] + torch.arange(rows, device="cuda")
    tables = [table.double()[position.clamp(0, 127).long()] for table in (cos, sin)]
    latent, rotary = kv.double().split([LATENT_RANK, 64], dim=-1)
    latent = latent * (latent.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    expected, new = torch.full(cache.shape, 9.0, dtype=torch.float64, device="cuda"), (latent, _turned(rotary, *tables))
    inside = (position >= 0) & (position < 100)
    slot = torch.arange(slots, device="cuda")[:, None].expand_as(position)
    expected[slot[inside], 0, position[inside].long()] = torch.cat(new, dim=-1)[inside]
    assert_close(cache, expected, dtype)
    assert cache[expected == 9].eq(9).all()
    turned = _turned(q.double().view(slots, rows, heads, -1)[..., plain:], *(table[:, :, None] for table in tables))
    assert_close(queries[..., LATENT_RANK:], turned, dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_layer_by_our_kernels_is_torchs(dtype):
    """Of few rows, as they are decoded, and of a prompt's many, which are torch's in any case."""
    torch.manual_seed(0)
    layer = LatentLayer("l.", "rope", 8, LATENT_RANK, 128, 64, 96, 1e-5, scale=0.1)
    angles = 6 * torch.rand(128, 32, device="cuda")
    weights = {
        "rope.cos": angles.cos().to(dtype),
        "rope.sin": angles.sin().to(dtype),
        "l.self_attn.kv_a_layernorm.weight": torch.rand(LATENT_RANK, device="cuda").to(dtype),
        "l.self_attn.latent_up": (torch.randn(8 * 224, LATENT_RANK, device="cuda") * 0.05).to(dtype),
    }
    caches = [{"l.latent": torch.zeros(2, 1, 128, LATENT_ROW, dtype=dtype, device="cuda")} for _ in range(2)]
    start = torch.zeros(2, dtype=torch.int32, device="cuda")
    for rows in (40, 1, 16, 32):
        q, kv = (torch.randn(2, rows, size, device="cuda").to(dtype) for size in (8 * 192, LATENT_ROW))
        ours, theirs = (
            ops(weights, cache).latent_attention(layer, q, kv, start)
            for ops, cache in zip((CudaSlotOps, TorchOps), caches, strict=True)
        )
        assert_close(ours, theirs, dtype, roundings=4.0)
        start = start + rows
    assert CudaSlotOps(weights, caches[0]).attends_latent(layer)
