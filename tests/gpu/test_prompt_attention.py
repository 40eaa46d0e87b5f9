"""Attention of many rows of prompts over caches in pages, against float64 and against attention in cuts."""

import random

import pytest
import torch

from tests.gpu.test_kernels import HALVES, assert_close, why_not
from tests.gpu.test_ragged_attention import LINEAR, Paged, Ragged, ints, random_pages, reference
from trtllm_dflash import kernels
from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.cuda_ops import CudaOps


def why_not_here() -> str:
    """Why these tests cannot run here; empty where they can."""
    return why_not() or ("" if torch.cuda.get_device_capability() == (9, 0) else "needs a Hopper GPU")


pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())

SPARE = 3  # rows behind the last segment's, which nothing reads or writes


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def random_prompts(count: int) -> list[Ragged]:
    choose = random.Random(11)
    starts = [0, 0, 1, 31, 63, 64, 96, 127, 128, 129, 500, 1983, 5000]
    return [
        Ragged(
            dtype=choose.choice(HALVES),
            segments=[
                (choose.choice(starts), choose.choice([0, 1, 16, 33, 64, 128, 129, choose.randint(33, 600)]))
                for _ in range(choose.choice([1, 2, 4, 9]))
            ],
            rows=0,
            group=choose.choice([1, 2, 4, 5, 8]),
            size=choose.choice([64, 128]),
            page_rows=choose.choice([64, 128, 192, 256, LINEAR]),
            window=choose.choice([0, 0, 1, 7, 128, 500]),
            sinks=choose.random() < 0.3,
        )
        for _ in range(count)
    ]


#: More items than blocks, alike and not; one prompt over a long cache; all of a slot's heads in one group.
LARGE = [
    Ragged(torch.bfloat16, [(0, 2048)], 0, 4, 128, 128, kv_heads=8),
    Ragged(torch.float16, [(700, 1300), (0, 900)], 0, 8, 64, 64, kv_heads=8, window=128, sinks=True),
    Ragged(torch.bfloat16, [(20000, 300), (0, 0), (37, 81)], 0, 4, 128, 64),
    Ragged(torch.bfloat16, [(3, 200)] * 40, 0, 1, 64, 128, kv_heads=4),
    Ragged(torch.float16, [(1000, 70)], 0, 128, 128, 64, kv_heads=1),
]


def inputs(case: Ragged) -> tuple[torch.Tensor, Paged, torch.Tensor, torch.Tensor | None]:
    """Makes queries that are a part of wider rows, caches, segments, sinks."""
    heads, counts = case.group * case.kv_heads, [count for _, count in case.segments]
    caches = random_pages([sum(run) for run in case.segments], case.kv_heads, case.size, case.dtype, case.page_rows)
    q = torch.randn(sum(counts) + SPARE, heads + 4, case.size, dtype=case.dtype, device="cuda")[:, 2:-2]
    sinks = torch.randn(heads, device="cuda") + 1 if case.sinks else None
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    segments = ints([[slot, start, ends[slot], count] for slot, (start, count) in enumerate(case.segments)])
    return q, caches, segments, sinks


@pytest.mark.parametrize("case", [*random_prompts(60), *LARGE], ids=str)
def test_attention_of_prompts_equals_float64(case):
    """Of a slot, pages before its first row's window are nobody's by now, and hold NaN."""
    q, caches, segments, sinks = inputs(case)
    expected = reference(case, q, caches, None, sinks, None)
    for slot, (start, _) in enumerate(case.segments):
        given_back = max(start - case.window + 1, 0) // caches.pages.rows if case.window else 0
        caches.pages.table[slot, :given_back] = 0
    out = torch.full((len(q), q.shape[1] * case.size), 7.0, dtype=case.dtype, device="cuda")
    kernels.attend_prompts(q, caches.keys, caches.values, caches.pages, segments, out, case.window, sinks)
    assert out[-SPARE:].eq(7).all()
    assert_close(out[:-SPARE], expected[:-SPARE], case.dtype)
    # Of every row, for a few wrong ones would be lost among so many.
    error = (out.double() - expected)[:-SPARE].view(-1, case.size).norm(dim=1)
    assert (error < 0.05 * expected[:-SPARE].view(-1, case.size).norm(dim=1) + 1e-3).all()


def test_one_captured_launch_serves_all_prompts():
    """Segments are written in the graph, as a step's are; none may be there at all."""
    slots, rows = 6, 600
    caches = random_pages([3000] * slots, 2, 128, torch.bfloat16, 64)
    q = torch.randn(rows, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(rows, 8 * 128, dtype=torch.bfloat16, device="cuda")
    given, segments = ints([[0, 0, 0, 0]] * slots), ints([[0, 0, 0, 0]] * slots)

    def launch():
        segments.copy_(given)
        kernels.attend_prompts(q, caches.keys, caches.values, caches.pages, segments, out)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    choose = random.Random(1)
    for most in (0, 1, 40, 100, 100, 100):
        counts = [choose.choice([0, most, choose.randint(0, most)]) for _ in range(slots)]
        case = Ragged(torch.bfloat16, [(choose.randrange(2800), count) for count in counts], 0, 4, 128, 64)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        given.copy_(ints([[slot, start, ends[slot], count] for slot, (start, count) in enumerate(case.segments)]))
        caches.pages.table.copy_(caches.pages.table[torch.randperm(slots)])
        out.fill_(float("nan"))
        graph.replay()
        used = sum(counts)
        assert out[used:].isnan().all()
        assert_close(out[:used], reference(case, q, caches, None, None, None)[:used], torch.bfloat16)


def test_a_step_attends_alike_in_cuts_and_as_a_whole(monkeypatch):
    """Decoding slots and pieces of prompts of one layout, whose rows `CudaOps` gives to one kernel or the other."""
    caches = random_pages([900] * 5, 2, 128, torch.bfloat16, 64)
    words = [0, 3, -1, 3, 1, 8, -1, 8, 2, 333, 500, 1, 3, 1, 0, 1, 4, 64, 64, 1, *[0] * 398]
    kept = ints([[0] * 8] * 5), ints([40, 700, 0, 0, 0])
    layout = kernels.begin_rows(ints(words), *kept, 5, 2, 3, rows=440, logit_rows=20, cuts=20)
    layer = AttentionLayer("l.", "rope", 8, 2, 128, 1e-6, window=300)
    ops = CudaOps({}, {"l.key": caches.keys, "l.value": caches.values}, None, caches.pages, layout, 8)
    q = torch.randn(440, 8, 128, dtype=torch.bfloat16, device="cuda")
    found = []
    for whole in (False, True):
        monkeypatch.setattr(kernels, "takes_prompts", lambda *_, whole=whole: whole)
        out = torch.zeros(440, 8 * 128, dtype=torch.bfloat16, device="cuda")
        ops._attend_prompts(layer, q, out)
        assert out[:11].eq(0).all() and out[409:].eq(0).all()
        found.append(out)
    assert_close(found[1], found[0], torch.bfloat16)


def test_work_for_most_of_the_gpu_goes_to_whole_items():
    """Of FP8 caches none does."""
    q = torch.empty(2048, 32, 128, dtype=torch.bfloat16, device="cuda")
    keys = torch.empty(2, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert kernels.takes_prompts(q, keys, 4 * processors)
    assert not kernels.takes_prompts(q, keys, 2 * processors)
    assert not kernels.takes_prompts(q, keys.to(torch.float8_e4m3fn), 4 * processors)
