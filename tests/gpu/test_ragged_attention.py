"""Attention over segments of flat rows and caches in pages, against float64."""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.gpu.test_kernels import HALVES, assert_close, attention_weights, make_scales, why_not
from trtllm_dflash import kernels
from trtllm_dflash.kernels import Pages

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

FP8 = torch.float8_e4m3fn
LINEAR = 0  # pages that hold all of a slot


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# -- caches in pages ---------------------------------------------------------------------------------------------------


@dataclass
class Paged:
    """Keys and values in random pages of slots; what no slot has is NaN, as is what lies past a slot's length."""

    keys: torch.Tensor  # [pages, Hkv, page rows, D]
    values: torch.Tensor
    pages: Pages

    def linear(self, cache: torch.Tensor, slot: int) -> torch.Tensor:
        """A slot's rows of a cache in one run, [Hkv, S, D]; of pages that it does not have, those of page 0."""
        numbers = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        return numbers[self.pages.table[slot].long()].transpose(0, 1).flatten(1, 2).view(cache.dtype)

    def written(self, runs: list[tuple[int, int, int]]) -> torch.Tensor:
        """Which rows [pages, page rows] lie in runs of a slot's positions: slot, first, past."""
        mask = torch.zeros(len(self.keys), self.pages.rows, dtype=torch.bool, device="cuda")
        for slot, first, past in runs:
            at = torch.arange(first, past, device="cuda")
            mask[self.pages.table[slot, at // self.pages.rows].long(), at % self.pages.rows] = True
        return mask


def random_pages(lengths: list[int], kv_heads: int, size: int, dtype: torch.dtype, page_rows: int) -> Paged:
    """Caches of slots with so many rows each, and room for 64 more. Page 0 and the last are nobody's."""
    rows = page_rows or max(lengths) + 71
    counts = [-(-(length + 64) // rows) for length in lengths]
    order = torch.randperm(sum(counts)).add(1).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    keys, values = (torch.randn(sum(counts) + 2, kv_heads, rows, size, device="cuda") for _ in range(2))
    used = torch.zeros(sum(counts) + 2, rows, dtype=torch.bool)
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            page = order.pop()
            table[slot, index] = page
            used[page, : max(0, length - index * rows)] = True
    for cache in (keys, values):
        cache.masked_fill_(~used.to("cuda")[:, None, :, None], float("nan"))
    return Paged(keys.to(dtype), values.to(dtype), Pages(table.to("cuda"), rows))


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass
class Ragged:
    """Attention of segments: (start, count) each, of slots in a random order."""

    dtype: torch.dtype
    segments: list[tuple[int, int]]
    rows: int
    group: int
    size: int
    page_rows: int
    causal: bool = True
    window: int = 0
    sinks: bool = False
    fp8: bool = False
    block: int = 0
    kv_heads: int = 2

    def __str__(self) -> str:
        kind = f"w{self.window}{'-sinks' if self.sinks else ''}{'-fp8' if self.fp8 else ''}"
        kind += f"-block{self.block}" if self.block else "-causal" if self.causal else "-full"
        shape = f"q{self.rows}-g{self.group}-d{self.size}-p{self.page_rows}"
        return f"{str(self.dtype)[6:]}-{shape}-{kind}-{len(self.segments)}x{self.segments[0][0]}_{self.segments[0][1]}"


def random_ragged(count: int) -> list[Ragged]:
    choose = random.Random(7)
    starts = [0, 1, 15, 47, 48, 63, 64, 65, 111, 112, 113, 127, 128, 129, 250, 700, 1983]
    cases = []
    for _ in range(count):
        rows = choose.choice([1, 2, 5, 8, 16, 16, 32])
        counts = [0, 1, rows, rows, max(1, rows - 1), choose.randint(0, rows)]
        is_block = choose.random() < 0.3
        cases.append(
            Ragged(
                dtype=choose.choice(HALVES),
                segments=[(choose.choice(starts), choose.choice(counts)) for _ in range(choose.choice([1, 2, 5, 40]))],
                rows=rows,
                group=choose.choice([1, 2, 4, 5, 8]),
                size=choose.choice([64, 128]),
                page_rows=choose.choice([64, 64, 128, 192, LINEAR]),
                causal=not is_block and choose.random() < 0.8,
                window=choose.choice([0, 0, 1, 7, 64, 128, 500]),
                sinks=choose.random() < 0.3,
                fp8=choose.random() < 0.4,
                block=rows if is_block else 0,
            )
        )
    return cases


CUTS = [
    Ragged(torch.bfloat16, [(i, min(32, 700 - i)) for i in range(0, 700, 32)], 32, 4, 128, 64, kv_heads=8),
    Ragged(torch.bfloat16, [(i, min(32, 700 - i)) for i in range(0, 700, 32)], 32, 8, 64, 128, window=100, sinks=True),
    Ragged(torch.float16, [(i, 32) for i in range(0, 32 * 200, 32)], 32, 4, 128, 128, kv_heads=1),
    Ragged(torch.bfloat16, [(i, 32) for i in range(0, 32 * 40, 32)], 32, 4, 128, 128, fp8=True),
]
LONG = [
    Ragged(torch.bfloat16, [(30000, 16), (0, 0), (5, 3), (20000, 16)], 16, 4, 128, 64),
    Ragged(torch.bfloat16, [(30000, 16), (0, 0), (5, 3), (20000, 16)], 16, 4, 128, 64, window=2**31 - 1),
    Ragged(torch.bfloat16, [(30000, 16), (0, 0), (5, 3), (20000, 16)], 16, 4, 128, 128, fp8=True),
    Ragged(torch.float16, [(31000, 1)], 1, 8, 64, 128, kv_heads=1),
    Ragged(torch.bfloat16, [(9000, 16), (100, 7)], 16, 4, 128, 128, causal=False, block=16),
    # Idle segments have a block's rows, too: of no keys, from which such a window is taken.
    *[
        Ragged(torch.bfloat16, [(9000, 16), *[(0, 0)] * idle], 16, 4, 128, 64, False, 2**31 - 1, block=16, kv_heads=8)
        for idle in (15, 31)
    ],
    Ragged(torch.bfloat16, [(37 * i, i % 5) for i in range(40)], 8, 4, 128, 64, causal=False, block=8, kv_heads=8),
]


def reference(case: Ragged, q, caches: Paged, added, sinks, scales) -> torch.Tensor:
    """[N, Hq * D] in float64, segment by segment, from the rows that count alone."""
    out = torch.zeros(q.shape[0], q.shape[1], case.size, dtype=torch.float64, device="cuda")
    first = 0
    for slot, (start, count) in enumerate(case.segments):
        rows = case.block if case.block and count else count
        length = start + (added[slot] if added else 0) + rows
        at = case.block * slot if case.block else first
        first += count
        if not rows:
            continue
        k, v = (caches.linear(cache, slot)[:, :length].double() for cache in (caches.keys, caches.values))
        if scales is not None:
            k, v = k * scales[0].double(), v * scales[1].double()
        assert k.isfinite().all() and v.isfinite().all()
        k, v = (x.repeat_interleave(case.group, 0) for x in (k, v))
        logits = q[at : at + rows].double().transpose(0, 1) @ k.transpose(1, 2) * case.size**-0.5  # [Hq, rows, length]
        position = torch.arange(length - rows, length, device="cuda")[:, None]
        key = torch.arange(length, device="cuda")
        seen = key <= position if case.causal else key >= 0
        if case.window:
            seen = seen & (key > position - case.window)
        weights = attention_weights(logits.masked_fill(~seen, -torch.inf), sinks)
        out[at : at + rows] = (weights @ v).transpose(0, 1)
    return out.flatten(1)


@pytest.mark.parametrize("case", [*random_ragged(120), *CUTS, *LONG], ids=str)
def test_attention_of_segments_over_pages_equals_float64(case):
    """Rows of no segment are left alone; those of an idle one's block are zeros."""
    heads = case.group * case.kv_heads
    added = [count // 2 if count else 0 for _, count in case.segments] if case.block else None
    behind = [add + case.block for add in added] if added else [count for _, count in case.segments]
    lengths = [start + rows for (start, _), rows in zip(case.segments, behind, strict=True)]
    scales = make_scales() if case.fp8 else None
    caches = random_pages(lengths, case.kv_heads, case.size, FP8 if case.fp8 else case.dtype, case.page_rows)
    spare = 0 if case.block else 3
    count = case.block * len(lengths) if case.block else sum(count for _, count in case.segments) + spare
    q = torch.randn(count, heads + 4, case.size, dtype=case.dtype, device="cuda")[:, 2:-2]
    sinks = torch.randn(heads, device="cuda") + 1 if case.sinks else None
    ends = torch.tensor([0, *(count for _, count in case.segments)]).cumsum(0).tolist()
    segments = ints([[slot, start, ends[slot], rows] for slot, (start, rows) in enumerate(case.segments)])
    out = torch.full((count, heads * case.size), 7.0, dtype=case.dtype, device="cuda")
    kernels.attend_rows(
        q,
        caches.keys,
        caches.values,
        caches.pages,
        segments,
        case.rows,
        out,
        case.causal,
        case.window,
        sinks,
        scales,
        ints(added) if added else None,
        case.block,
    )
    expected = reference(case, q, caches, added, sinks, scales)
    rows = count - spare
    assert out[rows:].eq(7).all()
    assert_close(out[:rows], expected[:rows], case.dtype)


@pytest.mark.parametrize("slots", [3, 40])
def test_one_captured_launch_serves_all_segments_and_tables(slots):
    """Segments are written in the graph, as a step's are; more than a warp has lanes, and fewer."""
    caches = random_pages([2000] * slots, 2, 128, torch.bfloat16, 64)
    q = torch.randn(16 * slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(16 * slots, 8 * 128, dtype=torch.bfloat16, device="cuda")
    given, segments = ints([[0, 0, 0, 0]] * slots), ints([[0, 0, 0, 0]] * slots)

    def launch():
        segments.copy_(given)
        kernels.attend_rows(q, caches.keys, caches.values, caches.pages, segments, 16, out, True)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    choose = random.Random(slots)
    for _ in range(6):
        counts = [choose.choice([0, 1, 7, 16]) for _ in range(slots)]
        case = Ragged(torch.bfloat16, [(choose.randrange(1900), count) for count in counts], 16, 4, 128, 64)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        given.copy_(ints([[slot, start, ends[slot], count] for slot, (start, count) in enumerate(case.segments)]))
        caches.pages.table.copy_(caches.pages.table[torch.randperm(slots)])
        out.fill_(float("nan"))
        graph.replay()
        rows = sum(counts)
        assert out[rows:].isnan().all()
        assert_close(out[:rows], reference(case, q, caches, None, None, None)[:rows], torch.bfloat16)
