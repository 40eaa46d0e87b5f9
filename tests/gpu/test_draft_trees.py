"""Trees of drafts by the CUDA kernels: each against torch or the host, then whole replies of captured steps."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from tests.conftest import TINY
from tests.gpu.test_cuda import NEAR_TIE, SAMPLED, acceptance, shipped_prompts, tokens
from tests.gpu.test_kernels import assert_close, attention_weights, make_scales, why_not
from tests.gpu.test_ragged_attention import FP8, LINEAR, Paged, ints, random_pages
from tests.gpu.test_rows import MODELS, Layout, Model, Piece, prompt
from tests.gpu.test_rows import Decode as DecodeRows
from tests.near_ties import assert_only_near_ties_differ
from tests.test_draft_trees import HOSTILE
from trtllm_dflash import LLM, SamplingParams, kernels
from trtllm_dflash.ops.draft_tree import LEAST, RANKS, TOLL, TREE_SIZES, chain_tree, draft_tree, ranks_of
from trtllm_dflash.ops.ragged_ops import Segment
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.philox import uniform_numbers

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def begun(poisoned):
    """Poisoned memory and the same random numbers."""
    torch.manual_seed(0)


def random_parents(count: int, chance: random.Random) -> list[int]:
    """A tree's parents: sometimes a run, mostly a run and branches."""
    run = chance.choice([1, count // 2 + 1, count])
    return [-1, *(row - 1 if row < run else chance.randrange(row) for row in range(1, count))]


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass
class Trees:
    """A step of decode segments that are trees, pieces of prompts behind them, and padding."""

    counts: list[int]  # rows of each decode segment
    pieces: list[Piece]
    block: int
    seed: int = 0

    def __post_init__(self) -> None:
        slots = list(range(len(self.counts)))
        random.Random(self.seed).shuffle(slots)
        decodes = [DecodeRows(slot, count) for slot, count in zip(slots, self.counts, strict=True)]
        self.layout = Layout(decodes, self.pieces, block=self.block, spare=5, idle=2)
        chance = random.Random(self.seed + 1)
        self.parents = [random_parents(self.block, chance) for _ in range(self.layout.slots)]
        self.said = self.layout.expected()

    def __str__(self) -> str:
        return f"{'_'.join(map(str, self.counts))}-of-{self.block}"

    def segments(self) -> list[Segment | None]:
        """The host's segments, in order; None: it is idle."""
        found: list[Segment | None] = []
        firsts = self.said["logit_first"]
        for index, (slot, start, _, count) in enumerate(self.said["segments"]):
            parents = self.parents[slot][:count] if index < len(self.counts) else None
            logits = firsts[index + 1] - firsts[index]
            found.append(Segment(slot, start, count, logits, [], [], parents) if count else None)
        return found

    def begin(self, seeds: torch.Tensor | None = None) -> kernels.Rows:
        expected = self.said
        return kernels.begin_rows(
            ints(self.layout.words()),
            ints(self.layout.tokens),
            ints(self.layout.kept_start),
            segments=len(expected["segments"]),
            decode_segments=len(self.counts) + self.layout.idle,
            pieces=len(self.pieces) + self.layout.idle,
            rows=len(expected["row_segment"]),
            logit_rows=len(expected["logit_rows"]),
            cuts=len(expected["cuts"]),
            seeds=seeds,
            parents=ints(self.parents),
        )


STEPS = [
    Trees([16], [], 16),
    Trees([16, 5, 1, 16, 9], [], 16),
    Trees([32, 7, 32], [prompt(3, 50, 70), prompt(4, 0, 33)], 32),
    Trees([64, 64, 33, 1], [prompt(4, 9, 40)], 64),
    Trees([16] * 40, [prompt(40, 0, 100)], 16, seed=3),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_tree_s_rows_stand_as_deep_as_the_host_says(step, begun):
    rows = step.begin()
    positions, paths = rows.row_position.tolist(), rows.row_path.tolist()
    for index, segment in enumerate(step.segments()):
        first = step.said["segments"][index][2]
        for row in range(segment.count if segment else 0):
            assert positions[first + row] == segment.positions[row], (index, row)
            bits = sum(1 << i for i in segment.path(row)) if index < len(step.counts) else 0
            assert paths[first + row] % 2**64 == bits, (index, row)
    for name in ("segments", "row_segment", "token_ids", "logit_first", "logit_rows", "logit_slot", "cuts"):
        assert getattr(rows, name).tolist() == step.said[name], name
    logits = len(step.said["logit_rows"]) - step.layout.spare
    assert rows.logit_position[:logits].tolist() == [positions[row] for row in step.said["logit_rows"][:logits]]


def test_siblings_share_the_number_of_their_position(begun):
    step = STEPS[2]
    seeds = torch.randint(-(2**63), 2**63 - 1, (step.layout.slots,), device="cuda")
    rows = step.begin(seeds)
    expected = uniform_numbers(seeds[rows.logit_slot.long()], rows.logit_position[:, None] + 1)
    assert rows.logit_uniform.equal(expected[:, 0])


def test_the_parents_of_the_next_rows_are_kept(begun):
    step = STEPS[1]
    rows, said = step.begin(), step.said
    count, tokens_kept, starts = len(said["segments"]), ints(step.layout.tokens), ints(step.layout.kept_start)
    outputs = ints(range(len(said["logit_rows"]))), ints(range(count)), ints(range(count))
    next_tokens = ints(range(count * 12)).view(count, 12)
    next_parents = ints([random_parents(12, random.Random(i)) for i in range(count)])
    for given in (next_parents, None):
        kept = ints(step.parents)
        kernels.end_rows(rows, tokens_kept, starts, 900, *outputs, next_tokens, 16, given, kept)
        for index, (slot, _, _, rows_of_it) in enumerate(said["segments"]):
            expected = step.parents[slot]
            if rows_of_it:
                expected = [*(next_parents[index].tolist() if given is not None else range(-1, 11)), *expected[12:]]
            if rows_of_it or slot not in [row[0] for row in said["segments"] if row[3]]:
                assert kept[slot].tolist() == expected, index


# -- acceptance --------------------------------------------------------------------------------------------------------


def choices(step: Trees, share: float) -> list[int]:
    """The target's choices at logit rows: a share of them some child's token."""
    chance = random.Random(step.seed + 7)
    chosen = []
    for index, segment in enumerate(step.segments()):
        if segment is None:
            continue
        first, count, logits = step.said["segments"][index][2], segment.count, segment.logits
        own = step.said["token_ids"][first + count - logits : first + count]
        parents = segment.parents or range(-1, logits - 1)
        for row in range(logits):
            children = [own[child] for child in range(1, logits) if parents[child] == row]
            chosen.append(chance.choice(children) if children and chance.random() < share else 2000 + row)
    return chosen + [0] * step.layout.spare


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("is_imposed", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_path_that_is_accepted_is_the_host_s(step, is_imposed, share, begun):
    """Tokens are distinct in a segment: siblings are."""
    for slot in range(step.layout.slots):
        step.layout.tokens[slot] = random.Random(slot).sample(range(1000), step.block)
    step.said = step.layout.expected()
    rows, chosen = step.begin(), choices(step, share)
    counts = [3 * i % 17 for i in range(len(step.said["segments"]))]
    count = len(step.said["row_segment"])
    found = kernels.accept_paths(rows, ints(chosen), ints(counts) if is_imposed else None, [row_numbers(count)])
    final = found.joined[:, 0].int()
    for index, segment in enumerate(step.segments()):
        numbers = [x[index].item() for x in (found.accepted, found.committed, found.bonus, found.next_start)]
        if segment is None:
            assert numbers == [0] * 4 and found.path[index] == 0
            continue
        _, start, first, count = step.said["segments"][index]
        before, logit = count - segment.logits, step.said["logit_first"][index]
        own, targets = step.said["token_ids"][first + before : first + count], chosen[logit : logit + segment.logits]
        path = segment.imposed(counts[index]) if is_imposed else segment.accepted(own, targets)
        committed = before + len(path)
        assert numbers == [len(path) - 1, committed, targets[path[-1]], start + committed], (index, path)
        assert found.path[index].item() % 2**64 == sum(1 << row for row in path), index
        order = final[first : first + count].tolist()
        assert order[:committed] == [*range(first, first + before), *(first + before + row for row in path)], index
        assert all(first <= row < first + count for row in order)
        assert found.choices[logit : logit + len(path)].tolist() == [targets[row] for row in path], index
        if is_imposed:
            assert found.ranks is None, "nobody drafted such a path"
            continue
        ranks = ranks_of(segment.parents, path) if len(path) > 1 else []
        told = found.ranks[logit : logit + segment.logits].tolist()
        assert told == [0, *ranks, *[0] * (segment.logits - len(path))], index
    assert ((final >= 0) & (final < len(final))).all()


def row_numbers(rows: int) -> torch.Tensor:
    """A tap that tells each row's number."""
    assert rows <= 2048, "FP16 tells larger numbers not apart"
    return torch.arange(rows, device="cuda").half()[:, None].expand(-1, 8).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "size"), [(5, 4096), (1, 8), (8, 136)])
@pytest.mark.parametrize("step", STEPS[1:], ids=str)
def test_the_taps_of_final_rows_are_joined(step, parts, size, dtype, begun):
    rows, chosen, count = step.begin(), ints(choices(step, 0.8)), len(step.said["row_segment"])
    taps = [torch.randn(count, size, dtype=dtype, device="cuda") for _ in range(parts)]
    order = kernels.accept_paths(rows, chosen, taps=[row_numbers(count)]).joined[:, 0].long()
    assert not order.equal(torch.arange(count, device="cuda")), "some rows have other places"
    expected = torch.cat([tap[order] for tap in taps], dim=-1)
    assert kernels.accept_paths(rows, chosen, taps=taps).joined.equal(expected)


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Attention of trees over pages."""

    dtype: torch.dtype
    segments: list[tuple[int, int]]  # start and rows
    rows: int
    group: int
    size: int
    page_rows: int
    window: int = 0
    sinks: bool = False
    fp8: bool = False

    def __str__(self) -> str:
        kind = f"{'-fp8' if self.fp8 else ''}-w{self.window}{'-sinks' if self.sinks else ''}-p{self.page_rows}"
        segments = "_".join(f"{start}+{count}" for start, count in self.segments[:5])
        return f"{str(self.dtype)[6:]}-q{self.rows}-g{self.group}-d{self.size}{kind}-{segments}-{len(self.segments)}"


def random_cases(count: int) -> list[Case]:
    chance = random.Random(5)
    starts = [0, 1, 40, 48, 49, 60, 63, 64, 65, 112, 127, 128, 250, 700, 1983]
    cases = []
    for _ in range(count):
        rows = chance.choice([16, 16, 16, 32, 64])
        counts = [rows, rows, rows, max(1, rows - 1), 1, 0]
        cases.append(
            Case(
                dtype=chance.choice([torch.bfloat16, torch.float16]),
                segments=[(chance.choice(starts), chance.choice(counts)) for _ in range(chance.choice([1, 3, 40]))],
                rows=rows,
                group=chance.choice([1, 2, 4, 5, 8]),
                size=chance.choice([64, 128]),
                page_rows=chance.choice([64, 128, 192, LINEAR]),
                window=chance.choice([0, 0, 64, 128, 500]),
                sinks=chance.random() < 0.3,
                fp8=chance.random() < 0.4,
            )
        )
    return cases


@pytest.mark.parametrize("case", random_cases(40), ids=str)
def test_attention_of_trees_equals_float64(case, begun):
    chance = random.Random(2)
    lengths = [start + count for start, count in case.segments]
    parents = [random_parents(max(count, 1), chance) for _, count in case.segments]
    scales = make_scales() if case.fp8 else None
    caches = random_pages(lengths, 2, case.size, FP8 if case.fp8 else case.dtype, case.page_rows)
    heads, count = 2 * case.group, sum(rows for _, rows in case.segments)
    if count == 0:
        return
    q = torch.randn(count, heads, case.size, dtype=case.dtype, device="cuda")
    sinks = torch.randn(heads, device="cuda") + 1 if case.sinks else None
    paths: list[int] = []
    expected = torch.zeros(count, heads, case.size, dtype=torch.float64, device="cuda")
    segments = []
    for slot, (start, rows) in enumerate(case.segments):
        first = len(paths)
        segments.append([slot, start, first, rows])
        k, v = (caches.linear(cache, slot)[:, : start + rows].double() for cache in (caches.keys, caches.values))
        if scales is not None:
            k, v = k * scales[0].double(), v * scales[1].double()
        k, v = (x.repeat_interleave(case.group, 0) for x in (k, v))
        tree = Segment(slot, start, rows, rows, [], [], parents[slot])
        if rows == 0:
            continue
        seen = torch.zeros(rows, start + rows, dtype=torch.bool)
        for row in range(rows):
            path = tree.path(row)
            paths.append(sum(1 << at for at in path))
            every = [*range(start), *(start + at for at in path)]
            seen[row, every[-case.window :] if case.window else every] = True
        logits = q[first : first + rows].double().transpose(0, 1) @ k.transpose(1, 2) * case.size**-0.5
        weights = attention_weights(logits.masked_fill(~seen.cuda(), -torch.inf), sinks)
        expected[first : first + rows] = (weights @ v).transpose(0, 1)
    row_path = torch.tensor([path - 2**64 if path >= 2**63 else path for path in paths], device="cuda")
    out = torch.empty(count, heads * case.size, dtype=case.dtype, device="cuda")
    kernels.attend_rows(
        q,
        caches.keys,
        caches.values,
        caches.pages,
        ints(segments),
        case.rows,
        out,
        True,
        case.window,
        sinks,
        scales,
        row_path=row_path,
    )
    assert_close(out, expected.flatten(1), case.dtype)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("step", STEPS[1:3], ids=str)
def test_a_tree_s_rows_are_appended_and_attend_as_their_paths_would_as_runs(model: Model, step: Trees, begun):
    """K by depth where the row lies by number: each path is a run of torch's own operations."""
    layout, said = step.layout, step.said
    weights, rows = model.weights(), step.begin()
    lengths = [0] * layout.slots
    for slot, start, _, count in said["segments"]:
        if count:
            lengths[slot] = start + count
    dtype = FP8 if model.fp8 else model.dtype
    caches = random_pages(lengths, model.kv_heads, model.size, dtype, model.page_rows)
    before = Paged(caches.keys.clone(), caches.values.clone(), caches.pages)
    width = (model.heads + 2 * model.kv_heads) * model.size
    qkv = torch.randn(1, len(said["row_segment"]), width, dtype=model.dtype, device="cuda")
    out = torch.empty(1, qkv.shape[1], model.heads * model.size, dtype=model.dtype, device="cuda")
    append = model.append(weights)
    q = append.rows(caches.keys, caches.values, caches.pages, rows, model.heads, qkv, out)
    kernels.attend_rows(
        q,
        caches.keys,
        caches.values,
        caches.pages,
        rows.segments[: len(step.counts)],
        step.block,
        out,
        True,
        model.window or 0,
        weights.get("l.self_attn.sinks"),
        model.scales(weights),
        row_path=rows.row_path,
    )
    for index, segment in enumerate(step.segments()[: len(step.counts)]):
        assert segment is not None
        slot, start, first, count = said["segments"][index]
        for row in {count // 2, count - 1}:
            path = segment.path(row)
            ops = model.torch_ops(weights, before, slot)
            run = qkv[:, [first + at for at in path]]
            expected = ops.self_attention(model.layer(), run, ints([start]))
            assert_close(out[:, first + row], expected[:, -1], model.dtype, roundings=6)
            key, value = (caches.linear(x, slot)[:, start + row].float() for x in (caches.keys, caches.values))
            depth = start + len(path) - 1
            assert value.equal(ops.caches["l.value"][0, :, depth].float())
            near = ops.caches["l.key"][0, :, depth].float()
            assert (key - near).norm() < (0.02 if model.fp8 else 0.005) * near.norm(), (index, row)


# -- keys and values of the accepted path ------------------------------------------------------------------------------


def rows_that_accept(starts: list[int], paths: list[list[int]]) -> tuple[kernels.Rows, torch.Tensor]:
    """Rows of 64 for each slot, and the target's choices, by which these paths are accepted; then an idle slot."""
    parents, targets = [], []
    for slot, path in enumerate(paths):
        above = {row: parent for parent, row in pairwise(path)}
        parents.append([-1, *(above.get(row, 0) for row in range(1, 64))])
        below = dict(pairwise(path))
        targets += [64 * slot + below[row] if row in below else 9999 for row in range(64)]
    words = [number for slot in range(len(paths)) for number in (slot, 64, -1, 64)]
    tokens = ints(range(64 * len(paths))).view(-1, 64)
    rows = kernels.begin_rows(
        ints([*words, 0, 0, -1, 0]),
        tokens,
        ints(starts),
        segments=len(paths) + 1,
        decode_segments=len(paths) + 1,
        pieces=0,
        rows=len(targets),
        logit_rows=len(targets),
        cuts=0,
        parents=ints(parents),
    )
    return rows, ints(targets)


@pytest.mark.parametrize("windowed", [0, 2])
@pytest.mark.parametrize("page_rows", [64, 128, LINEAR])
def test_accepted_rows_are_moved_to_their_positions_in_all_caches(page_rows, windowed, begun):
    """As if all had been read and then written; nothing else changes, to the byte. Some caches have other pages."""
    chance = random.Random(4)
    starts = [0, 5, 60, 63, 64, 120, 300, 301]
    shapes = [(8, 128, torch.bfloat16), (2, 64, torch.float16), (3, 64, FP8), (8, 128, FP8)]
    found = [random_pages([start + 64 for start in starts], *shape, page_rows) for shape in shapes]
    own = len(found) - windowed
    pages = [found[0].pages] * own + [found[-1].pages] * windowed
    caches = [paged.keys for paged in found]
    paths: list[list[int]] = [[0], list(range(16)), [0, 63], [*range(8), 20, 21, 40, 63]]
    paths += [[0, *sorted(chance.sample(range(1, 64), 15))] for _ in range(4)]
    expected = [cache.view(torch.uint8).clone() for cache in caches]
    for cache, of_cache in zip(expected, pages, strict=True):
        for slot, (start, path) in enumerate(zip(starts, paths, strict=True)):
            table = of_cache.table[slot].tolist()
            places = [divmod(start + row, of_cache.rows) for row in (*path, *range(len(path)))]
            spots = [(table[page], row) for page, row in places]
            rows = [cache[page, :, row].clone() for page, row in spots[: len(path)]]
            for (page, row), moved in zip(spots[len(path) :], rows, strict=True):
                cache[page, :, row] = moved
    moves = kernels.PathMoves(caches[:own], pages[0], caches[own:], pages[-1])
    accepted = kernels.accept_paths(*rows_that_accept(starts, paths), moves=moves)
    assert [bits % 2**64 for bits in accepted.path.tolist()] == [*(sum(1 << r for r in p) for p in paths), 0]
    for number, (cache, wanted) in enumerate(zip(caches, expected, strict=True)):
        differ = (cache.view(torch.uint8) != wanted).nonzero()
        assert len(differ) == 0, (number, differ[:3].tolist())


# -- growth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [151936, 32000, 4096, 1003, 16, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_likeliest_ids_are_torch_s(vocabulary, dtype, begun):
    rows = 15 if vocabulary < 100000 else 7
    logits = torch.randn(2, rows, vocabulary, device="cuda").mul(4)
    logits[0, 0] = 3.0  # all equal
    logits[0, 1] = -torch.inf
    logits[0, 1, vocabulary // 2] = -200.0  # far below the place of no logits
    logits[0, 2] = logits[0, 2].round() + 0.0  # many are equal; torch's operations order -0 before 0
    logits[0, 3] -= 500
    logits = logits.to(dtype)
    ids, best, total = kernels.top_ids(logits)
    wanted_total, wanted_best, wanted = TorchOps({}, {})._top(logits, RANKS)
    assert (ids == wanted).all(), (ids != wanted).nonzero()[:4].tolist()
    assert best.equal(wanted_best)
    torch.testing.assert_close(total, wanted_total[..., 0], rtol=2e-6, atol=2e-5)
    same, log_probs, _ = kernels.top_ids(logits, normalized=True)
    assert same.equal(ids)
    assert log_probs.equal(best - total[..., None])


@pytest.mark.parametrize("nodes", [*TREE_SIZES, 7])
def test_trees_are_torch_s(nodes, begun):
    """Of hostile marginals too. Where two nodes are as good, to rounding, either may be in it."""
    tree = chain_tree(nodes) if nodes == 7 else draft_tree(nodes, 16)
    peaks = [0.5, 2.0, 6.0, 20.0]
    marginals = [(peak * torch.randn(15, RANKS)).log_softmax(-1).sort(-1, descending=True).values for peak in peaks]
    log_probs = torch.stack([*marginals, *HOSTILE.values()]).cuda()
    ids = torch.arange(log_probs.numel(), dtype=torch.int32, device="cuda").view(log_probs.shape)
    bonus = ints(range(7000, 7000 + len(log_probs)))
    parents = ints(tree.parents)
    places = ints([(depth - 1) * RANKS + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)])
    found = kernels.grow_tree(parents, places, nodes, LEAST, TOLL, bonus, log_probs, ids)
    wanted = TorchOps({}, {}).grow_tree(tree, bonus.cpu(), log_probs.cpu(), ids.cpu())
    sums = log_probs.cpu().double().clamp(min=LEAST).flatten(1)
    for slot in range(len(log_probs)):
        rows, above = found[0][slot].tolist(), found[1][slot].tolist()
        assert rows[0] == 7000 + slot and above[0] == -1
        assert all(0 <= parent < row for row, parent in enumerate(above) if row), above
        assert len(set(zip(rows, above, strict=True))) == len(rows), "siblings are distinct"

        def worth(row: int, rows=rows, above=above, slot=slot) -> float:
            total = 0.0
            while row > 0:
                total += sums[slot, rows[row] - slot * 15 * RANKS].item() - TOLL
                row = above[row]
            return total

        mine = sorted(worth(row) for row in range(1, nodes + 1))
        theirs = sorted(worth(row, wanted[0][slot].tolist(), wanted[1][slot].tolist()) for row in range(1, nodes + 1))
        assert mine == pytest.approx(theirs, abs=2e-4), slot
        if slot < len(peaks):
            assert rows == wanted[0][slot].tolist() and above == wanted[1][slot].tolist(), slot


# -- whole replies -----------------------------------------------------------------------------------------------------


def load_trees(nodes: int | str, precision: str = "bf16", **changes) -> LLM:
    folders = str(TINY / "target"), str(TINY / "drafter")
    limits = {"max_batch": 4, "max_seq_len": 512} | changes
    return LLM.from_pretrained(*folders, precision=precision, device="cuda", draft_tree=nodes, **limits)


@pytest.fixture(scope="module")
def chain() -> float:
    """Tokens a step of chains."""
    return acceptance(load_trees("off").generate(shipped_prompts(8), SamplingParams(max_tokens=96)))


@pytest.mark.parametrize(("nodes", "precision", "gain"), [(15, "bf16", 1.06), (31, "fp16", 1.1), (63, "bf16", 1.13)])
def test_a_tree_commits_more_a_step_and_any_difference_of_text_is_a_near_tie(nodes, precision, gain, chain):
    llm = load_trees(nodes, precision)
    prompts = [llm.encode(text) for text in shipped_prompts(8)]
    params = SamplingParams(max_tokens=96)
    drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
    print(nodes, precision, "tokens a step:", acceptance(drafted), "chain:", chain)
    texts = tokens(drafted), tokens(plain)
    same = assert_only_near_ties_differ(llm, prompts, *texts, params, dtype=llm.config.dtype, count=NEAR_TIE)
    assert same >= len(prompts) // 2
    assert acceptance(drafted) > gain * chain


@pytest.mark.parametrize("nodes", [15, 63])
def test_sampled_replies_of_trees_are_those_of_plain_steps(nodes):
    """But for numbers that roundings put on another side of a bound: in less than a third of the replies."""
    llm = load_trees(nodes)
    prompts, params = shipped_prompts(6), SamplingParams(max_tokens=48, **SAMPLED)
    drafted, plain = tokens(llm.generate(prompts, params)), tokens(llm.generate(prompts, params, draft=False))
    same = sum(a == b for a, b in zip(drafted, plain, strict=True))
    print(nodes, "sampled replies that are the same:", same, "of", len(prompts))
    assert same >= len(prompts) * 2 // 3


@pytest.mark.parametrize("nodes", [15, 31])
def test_trees_over_fp8_caches_in_pages(nodes):
    """As drafted as over wide caches, near enough; near-ties may turn."""
    prompts, params = shipped_prompts(6), SamplingParams(max_tokens=96)
    with load_trees(nodes, kv="fp8") as llm:
        drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
    with load_trees("off", kv="fp8") as llm:
        chains = llm.generate(prompts, params)
    same = sum(a == b for a, b in zip(tokens(drafted), tokens(plain), strict=True))
    print(nodes, "FP8: tokens a step", acceptance(drafted), "chain", acceptance(chains), "same", same, len(prompts))
    assert acceptance(drafted) > 1.04 * acceptance(chains)
    assert same >= len(prompts) // 2


@pytest.mark.parametrize("nodes", ["auto", 31])
def test_requests_that_shape_their_choices_run_beside_trees(nodes):
    """All slots draft chains while such requests run; the steps that they join verify trees of the others."""
    llm = load_trees(nodes)
    assert llm.config.draft_tree == (15 if nodes == "auto" else nodes)
    prompts = [llm.encode(text) for text in shipped_prompts(6)]
    params, short = SamplingParams(max_tokens=96), {"max_tokens": 24, "ignore_eos": True}
    kinds = [
        params,
        SamplingParams(**short, logprobs=1),
        params,
        SamplingParams(**short, presence_penalty=0.5, logprobs=0),
    ]
    asked = [kinds[i % 4] for i in range(len(prompts))]
    drafted, plain = llm.generate(prompts, asked), llm.generate(prompts, asked, draft=False)
    free = [i for i, each in enumerate(asked) if each is params]
    texts = [tokens([replies[i] for i in free]) for replies in (drafted, plain)]
    where = [prompts[i] for i in free]
    assert_only_near_ties_differ(llm, where, *texts, params, dtype=llm.config.dtype, count=NEAR_TIE)
    same = sum(a == b for a, b in zip(tokens(drafted), tokens(plain), strict=True))
    assert same >= len(prompts) // 2, "others have near-ties"
    for each, reply in zip(asked, drafted, strict=True):
        if each.logprobs:
            assert [its.top_logprobs[0][0] for its in reply.logprobs] == reply.token_ids, (
                "greedy: told of their own rows"
            )
    assert acceptance(drafted) > 1.5
