"""Rows that depend on nothing else in the batch, on a GPU: to the bit, with no tolerance."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from tests.gpu.test_kernels import assert_close, attention_weights, make_scales, why_not_hopper
from tests.gpu.test_ragged_attention import FP8, ints, random_pages
from trtllm_dflash import LLM, SamplingParams, kernels
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.draft_tree import TREE_SIZES
from trtllm_dflash.ops.exact_ops import ExactOps
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts

WHY_NOT = why_not_hopper("exact rows")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def first_other(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Says where two tensors differ first, and in how many places."""
    others = (found != expected).nonzero()
    worst = float((found.double() - expected.double()).abs().max())
    return f"{len(others)} of {found.numel()} differ, first at {others[0].tolist()}, by at most {worst}"


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert torch.equal(found, expected), f"{what}: {first_other(found, expected)}"


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The heads of a layer, the keys that it sees, and whether its caches are FP8 and its heads have sinks."""

    heads: int
    kv_heads: int
    size: int
    window: int = 0
    fp8: bool = False
    has_sinks: bool = False

    def __str__(self) -> str:
        kind = "-fp8" * self.fp8 + "-sinks" * self.has_sinks
        return f"{self.heads}x{self.kv_heads}x{self.size}-w{self.window}{kind}"

    def sinks(self):
        return torch.randn(self.heads, device="cuda") + 1 if self.has_sinks else None

    def caches(self, lengths, dtype):
        """Random ones in pages, and their scales."""
        kind = FP8 if self.fp8 else dtype
        return random_pages(lengths, self.kv_heads, self.size, kind, 64), make_scales() if self.fp8 else None


GROUPS_OF_4 = Shape(32, 8, 128)
SHAPES = [GROUPS_OF_4, Shape(14, 2, 64), Shape(40, 4, 128)]
FEWER_KEYS = [
    Shape(32, 8, 128, 16),
    Shape(14, 2, 64, 600),
    Shape(64, 8, 64, 128, has_sinks=True),
    Shape(32, 8, 128, 1100),
]
FEWER_BITS = [Shape(32, 8, 128, fp8=True), Shape(64, 8, 64, 128, fp8=True), Shape(14, 2, 64, fp8=True)]


class Rows:
    """Queries at all positions of slots, and the attention of runs of them by the kernel."""

    def __init__(self, lengths, shape, dtype=BF16):
        self.lengths, self.shape = lengths, shape
        self.paged, self.scales = shape.caches(lengths, dtype)
        self.sinks = shape.sinks()
        self.q = [torch.randn(length, shape.heads, shape.size, device="cuda").to(dtype) for length in lengths]

    def mirror(self, slot, length):
        """Gives the second half of a slot's first keys the first half's, and large values negated: they cancel out."""
        half, rows = length // 2, self.paged.pages.rows
        at = torch.arange(2 * half, device="cuda")
        pages, places = self.paged.pages.table[slot, at // rows].long(), at % rows
        self.paged.values.mul_(1024)  # what rounding leaves of their sums is then no subnormal number
        for cache, sign in ((self.paged.keys, 1), (self.paged.values, -1)):
            cache[pages[half:], :, places[half:]] = sign * cache[pages[:half], :, places[:half]]

    def attend(self, runs, exact=True, most=None):
        """Attention of runs (slot, first position, rows), as segments of one call: [rows, Hq*D] each."""
        segments, first = [], 0
        for slot, start, count in runs:
            segments.append((slot, start, first, count))
            first += count
        q = torch.cat([self.q[slot][start : start + count] for slot, start, count in runs])
        out = torch.full((first, self.shape.heads * self.shape.size), torch.nan, dtype=q.dtype, device="cuda")
        paged, most = self.paged, most or max(count for *_, count in runs)
        of = q, paged.keys, paged.values, paged.pages, ints(segments), most, out
        more = {"window": self.shape.window, "scales": self.scales, "sinks": self.sinks}
        kernels.attend_rows(*of, causal=True, exact=exact, **more)
        return out.split([count for *_, count in runs])

    def expected(self, slot, start, count):
        """In float64."""
        keys, values = (
            self.paged.linear(x, slot)[:, : start + count].double() for x in (self.paged.keys, self.paged.values)
        )
        q = self.q[slot][start : start + count].double().transpose(0, 1)
        keys, values = (x * scale for x, scale in zip((keys, values), self.scales or (1, 1), strict=True))
        keys, values = (x.repeat_interleave(self.shape.heads // len(x), dim=0) for x in (keys, values))
        logits = q @ keys.transpose(1, 2) / self.shape.size**0.5
        at, own = torch.arange(start + count, device="cuda"), torch.arange(start, start + count, device="cuda")[:, None]
        hidden = (at > own) | (at <= own - (self.shape.window or len(at)))
        weights = attention_weights(logits.masked_fill(hidden, -torch.inf), self.sinks)
        return (weights @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("shape", [*SHAPES, Shape(8, 8, 128), *FEWER_KEYS, *FEWER_BITS], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 100, 256, 257, 511, 512, 513, 769, 1000, 4097, 8000])
def test_a_row_s_attention_is_the_same_alone_in_a_block_and_in_a_batch(length, shape):
    """Also where the rows behind it reach another tile, or another part of the cache."""
    rows = Rows([length + 40, 700, length + 40, 3, 1500], shape)
    start = length - 1
    (one,) = rows.attend([(0, start, 1)])
    assert_close(one, rows.expected(0, start, 1), BF16)
    for count in (2, 8, 16, 17, 32):
        (block,) = rows.attend([(0, start, count)])
        assert_close(block, rows.expected(0, start, count), BF16)
        assert_same(block[:1], one, f"in a block of {count}")
        batch = rows.attend([(1, 600, count), (3, 0, 3), (0, start, count), (4, 1400, 1), (2, start, count)])
        assert_same(batch[2], block, f"in a batch of blocks of {count}")
        last = rows.attend([(0, start + count - 1, 1)])[0]
        assert_same(block[-1:], last, f"the last of a block of {count}")
    # Blocks take cuts, or all of a slot's head, as there are fewer or more of them than processors.
    for count in (1, 4, 8, 16, 150):
        many = rows.attend([(0, start, 1)] * count + [(4, 1400, 1)], most=32)
        for i in (0, count // 2, count - 1):
            assert_same(many[i], one, f"one of {count}, {i}")


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [576, 1088, 4096, 4160, 8000])
def test_nothing_of_a_row_is_rounded_for_keys_that_it_does_not_see(length, shape, dtype):
    """Where values cancel out, an output is what rounding leaves of them: its last bit shows in all of its digits."""
    rows = Rows([length + 40], shape, dtype)
    rows.mirror(0, length)
    (whole,) = rows.attend([(0, length - 1, 1)])
    assert (whole != 0).float().mean() > 0.8 and whole.abs().max() < 1  # of values of 1,024, as large as 16 else
    for start in (length - 1, length - 20):
        (one,) = rows.attend([(0, start, 1)])
        for count in (2, 17, 32):
            (block,) = rows.attend([(0, start, count)])
            assert_same(block[:1], one, f"{start} in a block of {count}")
            last = rows.attend([(0, start + count - 1, 1)])[0]
            assert_same(block[-1:], last, f"{start}, the last of a block of {count}")


def test_what_held_before_attention_whose_cuts_follow_the_batch_is_not_exact():
    """So the tests above can fail: without `exact` the cuts of a cache follow what else there is to do."""
    rows = Rows([8000, 700, 1500], GROUPS_OF_4)
    (one,) = rows.attend([(0, 7900, 1)], exact=False)
    batch = rows.attend([(1, 600, 16), (0, 7900, 16), (2, 1400, 16)], exact=False)
    assert not torch.equal(batch[1][:1], one)


def test_exact_attention_with_a_window_shorter_than_a_tail_is_refused():
    from trtllm_dflash.errors import EngineError

    rows = Rows([100], Shape(8, 2, 64))
    paged, out = rows.paged, torch.empty(1, 8 * 64, dtype=BF16, device="cuda")
    rest = paged.keys, paged.values, paged.pages, ints([(0, 50, 0, 1)]), 1, out
    with pytest.raises(EngineError, match="not supported"):
        kernels.attend_rows(rows.q[0][50:51], *rest, causal=True, window=15, exact=True)


# -- attention of trees ------------------------------------------------------------------------------------------------


def shallow_parents(rows: int, chance: random.Random) -> list[int]:
    """A tree's parents, at most as deep as blocks are: sometimes a run as long as they are, and branches."""
    parents, depths = [-1], [0]
    run = chance.choice([1, 5, 16])
    for row in range(1, rows):
        parent = row - 1 if row < run else chance.choice([i for i in range(row) if depths[i] < 15])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def path_of(parents: list[int], row: int) -> list[int]:
    return [*(path_of(parents, parents[row]) if row else []), row]


class Trees:
    """Trees of drafts behind slots' tokens, and the texts of some of their paths, each in a slot of its own.

    Args:
        cancels: of each tree's first path the last 16 values, which are large, are found again, negated, beside the
            same keys at the slot's begin, and the others are small: its row is what rounding leaves of them.
    """

    def __init__(self, bases, rows, shape, dtype, cancels=False):
        chance = random.Random(rows)
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.size
        self.bases, self.rows, self.shape = bases, rows, shape
        trees = [shallow_parents(rows, chance) for _ in bases]
        self.paths = [[path_of(parents, row) for row in range(rows)] for parents in trees]
        self.checked = [(tree, row) for tree in range(len(bases)) for row in chance.sample(range(rows), 4)]
        lengths = [base + rows for base in bases]
        lengths += [bases[tree] + len(self.paths[tree][row]) for tree, row in self.checked]
        self.paged, self.scales = shape.caches(lengths, dtype)
        self.sinks = shape.sinks()
        self.q = [torch.randn(rows, heads, size, device="cuda").to(dtype) for _ in bases]
        for tree, base in enumerate(bases):
            keys, values = (torch.randn(base + rows, kv_heads, size, device="cuda") for _ in range(2))
            texts = [i for i, (its, _) in enumerate(self.checked) if its == tree]
            last = self.places(*self.checked[texts[0]])[-16:]
            if cancels:
                keys *= 0.5
                keys[last] *= 4  # of the largest logits: weights are relative to the same one
                values *= 2**-13
                values[last] *= 2**23
                keys[:16], values[:16] = keys[last], -values[last]
            self.put(tree, keys, values)
            for i in texts:
                places = self.places(*self.checked[i])
                self.put(len(bases) + i, keys[places], values[places])

    def places(self, tree, row):
        """Where the keys of a row's text lie in its tree's slot."""
        base = self.bases[tree]
        return [*range(base), *(base + at for at in self.paths[tree][row])]

    def put(self, slot, keys, values):
        at, rows = torch.arange(len(keys), device="cuda"), self.paged.pages.rows
        pages = self.paged.pages.table[slot, at // rows].long()
        for cache, x in ((self.paged.keys, keys), (self.paged.values, values)):
            kind = torch.uint8 if cache.dtype == FP8 else cache.dtype  # torch writes no FP8 by index
            cache.view(kind)[pages, :, at % rows] = x.to(cache.dtype).view(kind)

    def attend(self, q, segments, most, paths=None):
        out = torch.full((len(q), self.shape.heads * self.shape.size), torch.nan, dtype=q.dtype, device="cuda")
        if paths is not None:
            bits = [sum(1 << at for at in path) for path in paths]
            paths = torch.tensor([x - (x >> 63 << 64) for x in bits], device="cuda")
        of = self.paged.keys, self.paged.values, self.paged.pages, ints(segments), most, out
        more = {"window": self.shape.window, "scales": self.scales, "sinks": self.sinks, "row_path": paths}
        return kernels.attend_rows(q, *of, causal=True, exact=True, **more)

    def drafted(self, trees):
        """The rows of some trees, all in one call: [rows, Hq*D] each."""
        segments = [(tree, self.bases[tree], i * self.rows, self.rows) for i, tree in enumerate(trees)]
        paths = [path for tree in trees for path in self.paths[tree]]
        return self.attend(torch.cat([self.q[tree] for tree in trees]), segments, self.rows, paths).split(self.rows)

    def plain(self, checked):
        """The rows that are checked, each as the last of its text."""
        places = [(len(self.bases) + i, *self.checked[i]) for i in checked]
        segments = [(slot, len(self.places(tree, row)) - 1, i, 1) for i, (slot, tree, row) in enumerate(places)]
        return self.attend(torch.stack([self.q[tree][row] for _, tree, row in places]), segments, 1)

    def chain(self, i):
        """The row that is checked, the last of a chain of all its path."""
        tree, row = self.checked[i]
        path = self.paths[tree][row]
        segment = (len(self.bases) + i, self.bases[tree], 0, len(path))
        return self.attend(self.q[tree][path], [segment], len(path))[-1]

    def expected(self, i):
        """In float64."""
        tree, row = self.checked[i]
        length = len(self.places(tree, row))
        seen = slice(max(length - self.shape.window, 0) if self.shape.window else 0, length)
        group, scales = self.shape.heads // self.shape.kv_heads, self.scales or (1, 1)
        keys, values = (
            self.paged.linear(x, len(self.bases) + i)[:, seen].double().repeat_interleave(group, 0) * scale
            for x, scale in zip((self.paged.keys, self.paged.values), scales, strict=True)
        )
        logits = (keys @ self.q[tree][row].double()[:, :, None])[..., 0] / self.shape.size**0.5
        return (attention_weights(logits, self.sinks)[:, None] @ values).flatten()


BASES = [0, 1, 14, 15, 16, 17, 40, 49, 63, 64, 65, 79, 80, 127, 300, 496, 511, 512, 513, 527, 528, 1008, 1024, 1500]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *FEWER_KEYS, *FEWER_BITS], ids=str)
@pytest.mark.parametrize("nodes", TREE_SIZES)
def test_a_row_of_a_tree_is_what_it_is_in_its_text(nodes, shape, dtype):
    """Alone, among other trees, and beside the same row decoded plainly and in a chain."""
    chance = random.Random(nodes)
    trees = Trees([*BASES, *(chance.randrange(2100) for _ in range(8))], nodes + 1, shape, dtype)
    drafted = trees.drafted(range(len(trees.bases)))
    plain = trees.plain(range(len(trees.checked)))
    for i, (tree, row) in enumerate(trees.checked):
        where = f"row {row} of {trees.paths[tree][row]} behind {trees.bases[tree]}"
        assert_close(plain[i], trees.expected(i), dtype)
        assert_same(drafted[tree][row], plain[i], where)
    for i in range(0, len(trees.checked), 5):
        tree, row = trees.checked[i]
        where = f"row {row} of {trees.paths[tree][row]} behind {trees.bases[tree]}"
        assert_same(trees.plain([i])[0], plain[i], f"{where}, plain alone")
        assert_same(trees.drafted([tree])[0][row], plain[i], f"{where}, alone")
        assert_same(trees.chain(i), plain[i], f"{where}, in a chain")


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nodes", TREE_SIZES)
def test_nothing_of_a_tree_s_row_is_rounded_otherwise_than_in_its_text(nodes, shape, dtype):
    """Where values cancel out, the last bit of their sums shows in all digits."""
    chance = random.Random(nodes)
    bases = [48, 64, 500, 530, 1010, *(chance.randrange(48, 2100) for _ in range(19))]
    trees = Trees(bases, nodes + 1, shape, dtype, cancels=True)
    drafted = trees.drafted(range(len(trees.bases)))
    plain = trees.plain(range(len(trees.checked)))
    first = [i for i in range(len(plain)) if i % 4 == 0]
    assert (plain[first] != 0).float().mean() > 0.6 and plain[first].abs().median() < 0.01
    for i, (tree, row) in enumerate(trees.checked):
        assert_same(drafted[tree][row], plain[i], f"row {row} of {trees.paths[tree][row]} behind {trees.bases[tree]}")
        assert_same(trees.chain(i), plain[i], "in a chain")


# -- norms, and choosing -----------------------------------------------------------------------------------------------


def test_a_norm_of_a_row_is_what_it_is_alone():
    x, y = torch.randn(2, 512, 4096, device="cuda").bfloat16().unbind()
    weight = torch.rand(4096, device="cuda").bfloat16()
    whole, (total, added) = (
        kernels.rms_norm(x[None], weight, 1e-6)[0],
        kernels.add_rms_norm(x[None], y[None], weight, 1e-6),
    )
    for i in (0, 100, 511):
        assert_same(kernels.rms_norm(x[None, i : i + 1], weight, 1e-6)[0, 0], whole[i], i)
        one = kernels.add_rms_norm(x[None, i : i + 1], y[None, i : i + 1], weight, 1e-6)
        assert_same(one[0][0, 0], total[0, i], i)
        assert_same(one[1][0, 0], added[0, i], i)


def chooser(ops_class):
    """Operations that have no more than choosing tokens needs."""
    ops = object.__new__(ops_class)
    ops.communicator = TorchOps({}, {}).communicator
    return ops


def drawn(ops_class, logits, uniform):
    """Each row's token, [R], as `sample` draws it."""
    rows = len(logits)
    fill = [torch.full((rows,), value, device="cuda") for value in (0.8, 0.95)]
    top_k = torch.full((rows,), 0, dtype=torch.int32, device="cuda")
    sampling = SamplingInputs(temperature=fill[0], top_k=top_k, top_p=fill[1], uniform=uniform[:, None])
    return TorchOps.sample(chooser(ops_class), logits[:, None], sampling)[:, 0]


def test_probabilities_of_a_row_are_what_they_are_alone():
    """Also where rows do not all begin at a whole vector, whose sums torch's softmax then divides otherwise."""
    for vocabulary in (151936, 151669, 2048):
        logits = 2 * torch.randn(17, vocabulary, device="cuda")
        logits -= logits.amax(dim=-1, keepdim=True)
        together = chooser(ExactOps).probabilities(logits)
        for i in range(len(logits)):
            assert_same(chooser(ExactOps).probabilities(logits[i : i + 1].clone())[0], together[i], (vocabulary, i))
        torch.testing.assert_close(together, logits.softmax(dim=-1))


@pytest.mark.parametrize("vocabulary", [151936, 151669])
def test_a_token_is_drawn_as_it_is_alone(vocabulary):
    logits = (2 * torch.randn(96, vocabulary, device="cuda")).bfloat16()
    uniform = torch.rand(96, device="cuda")
    together = drawn(ExactOps, logits, uniform)
    for i in range(0, 96, 5):
        assert_same(drawn(ExactOps, logits[i : i + 1], uniform[i : i + 1])[0], together[i], i)
    as_ever = drawn(TorchOps, logits, uniform)
    assert (together == as_ever).sum() >= 90  # one distribution, and numbers that seldom fall on a boundary


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bf16", "fp8", "bf16 with fp8 caches"])
def tiny_exact(request):
    """The shipped pair, with a target in BF16, or in FP8, whose matrices are dequantized; or with caches in FP8."""
    folders = str(TINY / "target"), str(TINY / "drafter")
    precision, _, caches = request.param.partition(" with ")
    options = {"precision": precision, "device": "cuda", "kernels": "exact", "draft_tree": "off"}
    options |= {"kv": "fp8"} if caches else {}
    return LLM.from_pretrained(*folders, max_seq_len=1024, max_batch=8, **options)


@pytest.fixture(scope="module", params=TREE_SIZES)
def tiny_trees(request):
    folders = str(TINY / "target"), str(TINY / "drafter")
    options = {"precision": "bf16", "device": "cuda", "kernels": "exact", "draft_tree": request.param}
    return LLM.from_pretrained(*folders, max_seq_len=1024, max_batch=8, **options)


LONG = [i * 7 % 2000 + 3 for i in range(700)]  # of several pieces, and parts of a cache
CHATS = [[{"role": "user", "content": text}] for kind in read_prompts(4).values() for text in kind]
PROMPTS: list[list[int] | list[dict[str, Any]]] = [LONG, *CHATS[:15]]


def texts(llm: LLM, temperature: float, first: int = 0, count: int = len(PROMPTS), draft: bool = True):
    """Tokens of some of the prompts' replies, each prompt with a seed of its own."""
    seeds = range(first, first + count)
    params = [SamplingParams(max_tokens=96, ignore_eos=True, temperature=temperature, seed=seed) for seed in seeds]
    replies = llm.generate(PROMPTS[first : first + count], params, draft=draft)
    return [reply.token_ids for reply in replies]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_texts_are_the_same_drafted_or_not_alone_or_in_a_batch(tiny_exact, temperature):
    plain = texts(tiny_exact, temperature, draft=False)
    assert texts(tiny_exact, temperature) == plain
    for i in range(6):
        assert texts(tiny_exact, temperature, i, 1) == plain[i : i + 1], f"drafted alone, {i}"
        assert texts(tiny_exact, temperature, i, 1, draft=False) == plain[i : i + 1], f"plain alone, {i}"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_texts_drafted_in_trees_are_plain_ones(tiny_trees, temperature):
    plain = texts(tiny_trees, temperature, draft=False)
    assert texts(tiny_trees, temperature) == plain
    for i in range(3):
        assert texts(tiny_trees, temperature, i, 1) == plain[i : i + 1], f"alone, {i}"
