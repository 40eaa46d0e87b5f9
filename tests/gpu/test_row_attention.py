"""Append and attention of one row a slot in one launch, against both apart and float64."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from tests.gpu.test_kernels import HALVES, assert_close, why_not
from tests.gpu.test_ragged_attention import LINEAR, Ragged, ints, random_pages, reference
from trtllm_dflash import kernels
from trtllm_dflash.kernels import Append, Rows
from trtllm_dflash.kernels.library import is_hopper

_WHY_NOT = why_not() or ("" if is_hopper(torch.device("cuda", 0)) else "single rows are appended and attend on Hopper")
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


@dataclass
class Single:
    """One row of each slot that has as many cached keys; None: the slot is idle."""

    dtype: torch.dtype
    starts: list[int | None]
    kv_heads: int
    group: int
    size: int
    page_rows: int = 64
    window: int = 0
    sinks: bool = False
    rotary: int = 0  # 0: the whole head
    norms: str = "narrow"  # "wide", "none"

    def __str__(self) -> str:
        kind = f"w{self.window}{'-sinks' if self.sinks else ''}-r{self.rotary}-{self.norms}"
        shape = f"h{self.kv_heads}-g{self.group}-d{self.size}-p{self.page_rows}"
        return f"{str(self.dtype)[6:]}-{shape}-{kind}-{len(self.starts)}x{self.starts[0]}"


def random_singles(count: int) -> list[Single]:
    choose = random.Random(11)
    starts = [None, 0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 250, 700, 1024, 1983]
    cases = []
    for _ in range(count):
        size, kv_heads = choose.choice([64, 128]), choose.choice([1, 2, 4, 8])
        cases.append(
            Single(
                dtype=choose.choice(HALVES),
                starts=[
                    choose.choice(starts) for _ in range(choose.choice([1, 2, 5, 8, 16, 32 if kv_heads < 8 else 11]))
                ],
                kv_heads=kv_heads,
                group=choose.choice([1, 2, 4, 5, 6, 8]),
                size=size,
                page_rows=choose.choice([64, 64, 128, 192, LINEAR]),
                window=choose.choice([0, 0, 1, 7, 64, 128, 500]),
                sinks=choose.random() < 0.3,
                rotary=choose.choice([0, 0, max(size // 4, 32)]),
                norms=choose.choice(["narrow", "narrow", "wide", "none"]),
            )
        )
    return cases


BF16 = torch.bfloat16
LONG = [
    Single(BF16, [31000], 8, 8, 64, 128, sinks=True),
    Single(BF16, [31000], 4, 8, 128),
    Single(BF16, [20000], 1, 8, 128, 128),
    Single(BF16, [30000, 5, None, 700, 64, 1024, 3, 9000], 8, 4, 128),
    Single(BF16, [30000, 5, None, 700, 64, 1024, 3, 9000], 8, 8, 64, window=128, sinks=True),
    Single(torch.float16, [12000, *[None] * 30, 7000], 4, 4, 128, LINEAR),
    Single(BF16, [37 * i for i in range(32)], 4, 8, 128, 128),
]


class Call:
    """A call's inputs, twice: for one launch and for two."""

    def __init__(self, case: Single) -> None:
        self.case = case
        lengths = [0 if start is None else start for start in case.starts]
        self.caches = random_pages(lengths, case.kv_heads, case.size, case.dtype, case.page_rows)
        self.heads = case.group * case.kv_heads
        used = [slot for slot, start in enumerate(case.starts) if start is not None]
        rows = len(case.starts)
        self.segments = ints([[slot, 0, 0, 0] for slot in range(rows)])
        for row, slot in enumerate(used):
            self.segments[slot] = ints([slot, case.starts[slot], row, 1])
        order = [used[row] if row < len(used) else -1 for row in range(rows)]
        none = ints([0])
        self.layout = Rows(
            segments=self.segments,
            decoding=self.segments,
            pieces=none,
            row_segment=ints(order),
            token_ids=none,
            logit_first=none,
            logit_rows=none,
            logit_slot=none,
            logit_position=none,
            cuts=none,
            logit_uniform=None,
        )
        width, numbers = (case.rotary or case.size) // 2, (self.heads + 2 * case.kv_heads) * case.size
        cos, sin = (torch.randn(max(lengths) + 1, width, device="cuda").to(case.dtype) for _ in range(2))
        of_norms = {"wide": torch.float32, "narrow": case.dtype}.get(case.norms)
        q_norm, k_norm = (
            None if of_norms is None else torch.randn(case.size, device="cuda").to(of_norms) for _ in range(2)
        )
        self.append = Append(cos, sin, q_norm, k_norm, norm_eps=1e-6)
        self.qkv = torch.randn(rows, numbers + 64, device="cuda").to(case.dtype)[:, :numbers]
        self.sinks = torch.randn(self.heads, device="cuda") + 1 if case.sinks else None

    def together(self, caches, arrivals) -> torch.Tensor:
        out = torch.full((len(self.qkv), self.heads * self.case.size), 7.0, dtype=self.case.dtype, device="cuda")
        places = caches.keys, caches.values, caches.pages, self.layout, self.heads, self.qkv, out, arrivals
        return kernels.attend_single_rows(self.append, *places, self.case.window, self.sinks)

    def apart(self, caches) -> tuple[torch.Tensor, torch.Tensor]:
        """What two launches give, and the queries between them."""
        out = torch.full((len(self.qkv), self.heads * self.case.size), 7.0, dtype=self.case.dtype, device="cuda")
        q = self.append.rows(caches.keys, caches.values, caches.pages, self.layout, self.heads, self.qkv, out)
        places = caches.keys, caches.values, caches.pages, self.segments, 1, out
        return kernels.attend_rows(q, *places, True, self.case.window, self.sinks), q

    def expected(self, caches, q) -> torch.Tensor:
        case = self.case
        segments = [(start or 0, 0 if start is None else 1) for start in case.starts]
        ragged = Ragged(case.dtype, segments, 1, case.group, case.size, case.page_rows, window=case.window)
        return reference(ragged, q, caches, None, self.sinks, None)


@pytest.mark.parametrize("case", [*random_singles(150), *LONG], ids=str)
def test_one_launch_gives_what_two_do(case):
    """Caches to the bit; outputs by the same error against float64; padding is zeros; counters are left at zero."""
    call, arrivals = Call(case), kernels.row_arrivals(torch.device("cuda"))
    caches = replace(call.caches, keys=call.caches.keys.clone(), values=call.caches.values.clone())
    out = call.together(caches, arrivals)
    _, q = call.apart(call.caches)
    for found, expected in ((caches.keys, call.caches.keys), (caches.values, call.caches.values)):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    used = sum(start is not None for start in case.starts)
    assert out[used:].eq(0).all()
    assert_close(out[:used], call.expected(call.caches, q)[:used], case.dtype)
    assert arrivals.eq(0).all()


def test_a_captured_launch_serves_all_lengths():
    """Of one slot and of several, long and short ones by turns; each time what it gives alone."""
    case = Single(BF16, [9000, 30, 700, 5000], 8, 4, 128)
    call, arrivals = Call(case), kernels.row_arrivals(torch.device("cuda"))
    graph, layout = torch.cuda.CUDAGraph(), call.segments.clone()
    call.together(call.caches, arrivals)
    with torch.cuda.graph(graph):
        out = call.together(call.caches, arrivals)
    choose = random.Random(3)
    for _ in range(8):
        starts = layout[:, 1].tolist()
        call.segments[:, 1] = ints([choose.randrange(start) for start in starts])
        graph.replay()
        alone = call.together(call.caches, arrivals)
        assert torch.equal(out, alone)


@pytest.mark.parametrize("heads,size,reason", [(9, 128, "group"), (8, 256, "size")])
def test_other_rows_are_not_taken(heads, size, reason):
    cos = torch.zeros(4, size // 2, dtype=BF16, device="cuda")
    keys = torch.zeros(2, 1, 64, size, dtype=BF16, device="cuda")
    assert not kernels.takes_single_rows(Append(cos, cos), keys, heads, 1), reason


@pytest.mark.parametrize("kv_heads,slots", [(1, 32), (4, 32), (8, 16)])
def test_rows_are_taken_where_clusters_find_place_at_once(kv_heads, slots):
    cos = torch.zeros(4, 64, dtype=BF16, device="cuda")
    keys, append = torch.zeros(2, kv_heads, 64, 128, dtype=BF16, device="cuda"), Append(cos, cos)
    assert kernels.takes_single_rows(append, keys, 8 * kv_heads, slots)
    assert not kernels.takes_single_rows(append, keys, 8 * kv_heads, 33)
    assert not kernels.takes_single_rows(append, keys, 8 * kv_heads, 2 * slots)
