"""A step's flat rows: their layout, acceptance, append to pages and attention, against torch over linear caches."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.gpu.test_kernels import assert_close, fp8_steps, layer_weights, make_scales, why_not
from tests.gpu.test_ragged_attention import FP8, LINEAR, Paged, ints, random_pages
from trtllm_dflash import kernels
from trtllm_dflash.kernels import Rows
from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.host_copies import HostCopies
from trtllm_dflash.session.philox import uniform_numbers

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(autouse=True)
def begun(poisoned):
    """Every test here begins with poisoned memory and the same random numbers."""
    torch.manual_seed(0)


# -- the layout of a step ----------------------------------------------------------------------------------------------


@dataclass
class Decode:
    """A slot that decodes: its rows are the first of its kept tokens, all with logits."""

    slot: int
    count: int


@dataclass
class Piece:
    """A run of a prompt's tokens, the last with a logit."""

    slot: int
    start: int
    tokens: list[int]


@dataclass
class Layout:
    """A step of decode segments and pieces, with room for more, in lists."""

    decodes: list[Decode]
    pieces: list[Piece] = field(default_factory=list)
    block: int = 16
    slots: int = 0
    spare: int = 0  # rows, logits and cuts of padding
    idle: int = 0  # decode segments and pieces that are idle, behind the others
    apart: bool = True  # whether places of decode segments are nobody else's; False: pieces may lie in them

    def __post_init__(self) -> None:
        used = [part.slot for part in self.decodes] + [part.slot for part in self.pieces]
        self.slots = max([self.slots, *(slot + 1 for slot in used)])
        choose = random.Random(3)
        self.tokens = [[choose.randrange(1000) for _ in range(self.block)] for _ in range(self.slots)]
        self.kept_start = [choose.randrange(900) for _ in range(self.slots)]

    def expected(self) -> dict[str, list]:
        """What `begin_rows` is to give, by the names of its result."""
        logit_first = [0]
        segments: list = []
        row_segment: list = []
        token_ids: list = []
        logits: list = []
        cuts: list = []
        for part in self.parts():
            first = len(row_segment)
            if isinstance(part, Decode):
                start, tokens = self.kept_start[part.slot] if part.count else -1, self.tokens[part.slot][: part.count]
                count = with_logits = part.count
            else:
                start, tokens, count, with_logits = part.start, part.tokens, len(part.tokens), min(len(part.tokens), 1)
                cuts += [
                    [part.slot, start + i, first + i, min(kernels.MAX_ROWS, count - i)]
                    for i in range(0, count, kernels.MAX_ROWS)
                ]
            row_segment += [len(segments)] * count
            segments.append([part.slot, start, first, count])
            token_ids += tokens
            logits += [(first + i, part.slot, start + i) for i in range(count - with_logits, count)]
            logit_first.append(len(logits))
        parts = self.parts()
        first = next((i for i, part in enumerate(parts) if isinstance(part, Piece) and part.tokens), len(parts))
        decoding, pieces = self.places()
        nobody = [0, 0, 0, 0]
        pad = self.spare
        rows, slots, positions = (list(column) for column in zip(*logits, *[(0, 0, 0)] * pad, strict=True))
        return {
            "segments": segments,
            "decoding": [segment if i < first else nobody for i, segment in enumerate(segments[:decoding])],
            "pieces": (segments[first:] + [nobody] * pieces)[:pieces],
            "row_segment": row_segment + [-1] * pad,
            "token_ids": token_ids + [0] * pad,
            "logit_first": logit_first,
            "logit_rows": rows,
            "logit_slot": slots,
            "logit_position": positions,
            "cuts": cuts + [nobody] * pad,
        }

    def places(self) -> tuple[int, int]:
        """Counts the places in the lists of decode segments, and of pieces."""
        decoding = len(self.decodes) + self.idle if self.apart else len(self.parts())
        return decoding, len(self.pieces) + self.idle

    def parts(self) -> list[Decode | Piece]:
        idle_decodes = [Decode(0, 0)] * self.idle
        return [*self.decodes, *idle_decodes, *self.pieces, *[Piece(0, -1, [])] * self.idle]

    def words(self) -> list[int]:
        """What the host writes of the step."""
        words, tokens = [], []
        for part in self.parts():
            if isinstance(part, Decode):
                words += [part.slot, part.count, -1, part.count]
            else:
                words += [part.slot, len(part.tokens), part.start, min(len(part.tokens), 1)]
                tokens += part.tokens
        return words + tokens

    def begin(self, seeds: torch.Tensor | None = None) -> Rows:
        expected, (decoding, pieces) = self.expected(), self.places()
        return kernels.begin_rows(
            ints(self.words()),
            ints(self.tokens),
            ints(self.kept_start),
            segments=len(expected["segments"]),
            decode_segments=decoding,
            pieces=pieces,
            rows=len(expected["row_segment"]),
            logit_rows=len(expected["logit_rows"]),
            cuts=len(expected["cuts"]),
            seeds=seeds,
        )


def prompt(slot: int, start: int, count: int) -> Piece:
    return Piece(slot, start, [(7 * i + slot) % 1000 for i in range(count)])


LAYOUTS = {
    "one": Layout([Decode(0, 1)]),
    "decode": Layout([Decode(3, 16), Decode(0, 5), Decode(1, 1)], slots=5, spare=3),
    "idle": Layout([Decode(1, 4), Decode(0, 0), Decode(2, 2)], spare=2, idle=3),
    "piece": Layout([], [prompt(2, 100, 700)], spare=1),
    "mixed": Layout(
        [Decode(i, 1 + i % 16) for i in range(20)],
        [prompt(20, 0, 31), prompt(21, 64, 32), prompt(22, 5, 1), prompt(23, 0, 700), prompt(24, 9, 33)],
        spare=40,
        idle=2,
    ),
    "together": Layout(
        [Decode(i, 1 + i % 8) for i in range(6)],
        [prompt(7, 40, 256), prompt(6, 3, 2)],
        block=8,
        spare=9,
        idle=1,
        apart=False,
    ),
    "many": Layout(
        [Decode(i, i % 17) for i in range(600)], [prompt(600 + i, i, 150 + i) for i in range(40)], spare=7, idle=200
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_are_laid_out_as_the_host_says(layout):
    found = layout.begin()
    for name, expected in layout.expected().items():
        assert getattr(found, name).tolist() == expected, name
    assert found.logit_uniform is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_logits_number_is_that_of_its_seed_and_the_position_after_its_row(layout):
    seeds = torch.randint(-(2**63), 2**63 - 1, (layout.slots,), device="cuda")
    seeds[0] = 2**32 - 1  # a word that is full beside an empty one
    rows = layout.begin(seeds)
    expected = uniform_numbers(seeds[rows.logit_slot.long()], rows.logit_position[:, None] + 1)
    assert rows.logit_uniform.equal(expected[:, 0])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_drafts_are_accepted_while_they_equal_the_targets_choices(layout):
    rows, said = layout.begin(), layout.expected()
    choose = random.Random(1)
    targets = []
    for row in said["logit_rows"]:
        following = said["token_ids"][row + 1] if row + 1 < len(said["token_ids"]) else 0
        targets.append(following if choose.random() < 0.8 else 1000)
    found = kernels.accept_rows(rows, ints(targets))
    assert torch.stack(found, dim=1).tolist() == expected_acceptance(said, targets)


@pytest.mark.parametrize("most", [1, 2, 16, 31, 32, 33, 64])
def test_runs_of_every_length_are_accepted(most):
    choose = random.Random(most)
    layout = Layout([Decode(slot, most) for slot in range(2 * most)], block=most)
    targets: list[int] = []
    for slot, tokens in enumerate(layout.tokens):
        run = slot % most
        targets += tokens[1 : run + 1] + [choose.randrange(1000) for _ in range(most - run)]
    found = kernels.accept_rows(layout.begin(), ints(targets))
    assert torch.stack(found, dim=1).tolist() == expected_acceptance(layout.expected(), targets)


def expected_acceptance(said: dict[str, list], targets: list[int]) -> list[list[int]]:
    """Computes accepted, committed, bonus and next start of each segment."""
    expected = []
    for index, (_, start, first, count) in enumerate(said["segments"]):
        own = targets[said["logit_first"][index] : said["logit_first"][index + 1]]
        if count == 0:
            expected.append([0, 0, 0, 0])
            continue
        drafts = said["token_ids"][first + count - len(own) + 1 : first + count]
        accepted = next((i for i, draft in enumerate(drafts) if draft != own[i]), len(drafts))
        committed = count - len(own) + accepted + 1
        expected.append([accepted, committed, own[accepted], start + committed])
    return expected


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_slots_that_had_rows_keep_the_next_ones(layout):
    rows, said = layout.begin(), layout.expected()
    count, width, last_start = len(said["segments"]), 16, 600
    targets = ints(range(len(said["logit_rows"])))
    accepted, next_start = ints(range(count)), ints([500 + i for i in range(count)])
    kept = min(9, layout.block)
    next_tokens = ints(range(count * kept)).view(count, kept)
    tokens, kept_start = ints(layout.tokens), ints(layout.kept_start)
    decided = kernels.end_rows(rows, tokens, kept_start, last_start, targets, accepted, next_start, next_tokens, width)
    expected_tokens, expected_start = [list(row) for row in layout.tokens], list(layout.kept_start)
    expected = []
    for index, (slot, _, _, rows_of_it) in enumerate(said["segments"]):
        own = list(range(said["logit_first"][index], said["logit_first"][index + 1]))
        expected.append([index, *own, *[0] * (width - len(own))])
        if rows_of_it:
            expected_tokens[slot][:kept] = range(index * kept, (index + 1) * kept)
            expected_start[slot] = min(500 + index, last_start)
    assert decided.tolist() == expected
    assert tokens.tolist() == expected_tokens
    assert kept_start.tolist() == expected_start


def test_pages_are_set_by_slot_and_index():
    table = ints(range(60)).view(6, 10)[:, :7]
    updates = [[5, 6, 100], [0, 0, 101], [2, 3, 102], *([1, i, 200 + i] for i in range(7))]
    expected = table.clone()
    for slot, index, page in updates:
        expected[slot, index] = page
    kernels.set_pages(table, ints(updates))
    assert table.equal(expected)
    many = torch.zeros(40, 50, dtype=torch.int32, device="cuda")
    entries = [[i // 50, i % 50, i] for i in range(2000)]
    kernels.set_pages(many, ints(entries))
    assert many.flatten().tolist() == list(range(2000))
    kernels.set_pages(many, ints(entries[:0]).view(0, 3))


@pytest.mark.parametrize("rows", [0, 1, 100, 192])
def test_a_pages_first_rows_are_copied_in_all_caches(rows):
    """Of any heads, sizes and types; nothing else changes. The copies of a step follow each other."""
    shapes = [(8, 128, torch.bfloat16), (2, 64, torch.float16), (3, 64, FP8), (64, 128, FP8)]
    caches = [torch.randn(5, heads, 192, size, device="cuda").to(dtype) for heads, size, dtype in shapes]
    expected = [cache.view(torch.uint8).clone() for cache in caches]
    copy = kernels.PageCopies(caches)
    for source, target in ((4, 0), (0, 2), (3, 3)):
        copy(source, target, rows)
        for cache in expected:
            cache[target, :, :rows] = cache[source, :, :rows].clone()
    for cache, numbers in zip(caches, expected, strict=True):
        assert cache.view(torch.uint8).equal(numbers)


def test_pages_that_are_not_there_are_not_copied():
    copy = kernels.PageCopies([torch.zeros(5, 2, 64, 128, dtype=torch.bfloat16, device="cuda")])
    for refused in ((5, 0, 1), (0, -1, 1), (0, 1, 65)):
        with pytest.raises(ValueError, match="of 5 of 64 rows"):
            copy(*refused)


@pytest.mark.parametrize("shape", [(1, 2), (32, 9), (64, 16), (64, 17), (5, 1000)], ids=str)
def test_what_is_sent_is_there_once_the_event_is_past(shape):
    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
    host, event = HostCopies()(numbers)
    event.synchronize()
    assert host.is_pinned() and host.equal(numbers.cpu())


def test_memory_is_nobody_elses_before_it_has_been_sent_to():
    """Outcomes that nobody keeps, of steps that are yet to run: the allocator would give their memory to others."""
    copies, numbers = HostCopies(), torch.arange(100, dtype=torch.int32, device="cuda")
    free = [torch.empty(100, dtype=torch.int32, pin_memory=True) for _ in range(64)]
    del free  # which may wait for the device where it is not there
    torch.cuda._sleep(200_000_000)
    for _ in range(20):
        _, event = copies(numbers)
    others = [torch.zeros(100, dtype=torch.int32, pin_memory=True) for _ in range(40)]
    assert not event.query()
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)


def test_what_is_no_int32_is_not_sent():
    with pytest.raises(ValueError, match="are not"):
        kernels.send(torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match="are not"):
        kernels.send(torch.zeros(4, device="cuda"), torch.zeros(4))
    with pytest.raises(ValueError, match="pinned"):
        kernels.send(torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32))


# -- append, then attention --------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A layer's shape and what its caches are; `weights` as the operations read them."""

    dtype: torch.dtype
    size: int
    page_rows: int
    fp8: bool = False
    window: int | None = None
    sinks: bool = False
    heads: int = 8
    kv_heads: int = 2

    def __str__(self) -> str:
        kind = (
            f"{'-fp8' if self.fp8 else ''}{f'-w{self.window}' if self.window else ''}{'-sinks' if self.sinks else ''}"
        )
        return f"{str(self.dtype)[6:]}-d{self.size}-p{self.page_rows}{kind}"

    def layer(self) -> AttentionLayer:
        return AttentionLayer("l.", "rope", self.heads, self.kv_heads, self.size, 1e-6, self.window, self.sinks)

    def weights(self, positions: int = 2000) -> dict[str, torch.Tensor]:
        weights = layer_weights(self.dtype, self.size, positions, normed=True)
        if self.fp8:
            weights |= {f"l.{name}.scale": x for name, x in zip(("key", "value"), make_scales(), strict=True)}
        if self.sinks:
            weights["l.self_attn.sinks"] = torch.randn(self.heads, device="cuda").to(self.dtype)
        return weights

    def scales(self, weights) -> kernels.Scales:
        return (weights["l.key.scale"], weights["l.value.scale"]) if self.fp8 else None

    def append(self, weights) -> kernels.Append:
        q_norm, k_norm = (weights[f"l.self_attn.{name}_norm.weight"] for name in ("q", "k"))
        return kernels.Append(weights["rope.cos"], weights["rope.sin"], q_norm, k_norm, 1e-6, self.scales(weights))

    def torch_ops(self, weights, caches: Paged, slot: int) -> TorchOps:
        """torch's operations over a slot's rows alone, in linear caches whose other rows are zeros."""

        def linear(cache: torch.Tensor) -> torch.Tensor:
            return caches.linear(cache, slot)[None].float().nan_to_num(0).to(cache.dtype)

        return TorchOps(weights, {"l.key": linear(caches.keys), "l.value": linear(caches.values)})


MODELS = [
    Model(torch.bfloat16, 128, 64),
    Model(torch.float16, 64, 128),
    Model(torch.bfloat16, 64, LINEAR),
    Model(torch.bfloat16, 128, 128, fp8=True),
    Model(torch.float16, 64, 64, fp8=True),
    Model(torch.bfloat16, 64, 64, window=100, sinks=True),
]
STEPS = {name: LAYOUTS[name] for name in ("idle", "piece", "mixed", "together")}


@dataclass
class Ready:
    """A step that is laid out, and caches that hold what came before its rows and room behind them."""

    model: Model
    layout: Layout

    def __post_init__(self) -> None:
        self.weights = self.model.weights()
        self.append = self.model.append(self.weights)
        self.said = self.layout.expected()
        self.active = [(g, *row) for g, row in enumerate(self.said["segments"]) if row[3]]
        lengths = [0] * self.layout.slots
        for _, slot, start, _, count in self.active:
            lengths[slot] = start + count
        shape = self.model.kv_heads, self.model.size
        self.caches = random_pages(lengths, *shape, FP8 if self.model.fp8 else self.model.dtype, self.model.page_rows)
        self.before = self.caches.keys.clone(), self.caches.values.clone()
        self.rows = self.layout.begin()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.model.dtype, device="cuda")

    def random_flat(self, width: int) -> torch.Tensor:
        """Random rows [1, N, width], those of no segment NaN."""
        x = self.random(1, len(self.said["row_segment"]), width)
        x[0, [segment < 0 for segment in self.said["row_segment"]]] = float("nan")
        return x

    def assert_caches(self, slot: int, past: int, ops: TorchOps) -> None:
        """A slot's rows are torch's: values to the bit, keys but for rare last bits of the norm."""
        keys, values = (self.caches.linear(cache, slot)[:, :past] for cache in (self.caches.keys, self.caches.values))
        torch_keys, torch_values = ops.caches["l.key"][0, :, :past], ops.caches["l.value"][0, :, :past]
        assert values.float().equal(torch_values.float())
        if self.model.fp8:
            turned = (fp8_steps(keys.contiguous()) - fp8_steps(torch_keys.contiguous())).abs()
            assert turned.max() <= 1 and turned.float().mean() < 0.01
        else:
            assert_close(keys, torch_keys, self.model.dtype, roundings=0.5)

    def assert_nothing_written_but(self, runs: list[tuple[int, int, int]]) -> None:
        """All bytes of the caches but those of such runs of slots' positions are as they were."""
        kept = ~self.caches.written(runs)[:, None, :].expand(-1, self.model.kv_heads, -1)
        for cache, before in zip((self.caches.keys, self.caches.values), self.before, strict=True):
            assert cache.view(torch.uint8)[kept].equal(before.view(torch.uint8)[kept])


@pytest.mark.parametrize("layout", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_flat_rows_are_appended_and_attend_as_torchs_do(model, layout):
    """Decode rows, and a prompt's in cuts, in two launches into one result; padding becomes zeros."""
    ready = Ready(model, layout)
    caches, rows, layer = ready.caches, ready.rows, model.layer()
    qkv = ready.random_flat((model.heads + 2 * model.kv_heads) * model.size)
    out = torch.empty(1, qkv.shape[1], model.heads * model.size, dtype=model.dtype, device="cuda")
    q = ready.append.rows(caches.keys, caches.values, caches.pages, rows, model.heads, qkv, out)
    sinks, window = ready.weights.get("l.self_attn.sinks"), model.window or 0
    for segments, most in ((rows.decoding, layout.block), (rows.cuts, kernels.MAX_ROWS)):
        kernels.attend_rows(
            q,
            caches.keys,
            caches.values,
            caches.pages,
            segments,
            most,
            out,
            True,
            window,
            sinks,
            model.scales(ready.weights),
        )
    count = len(ready.said["row_segment"]) - layout.spare
    assert q[count:].eq(0).all() and out[0, count:].eq(0).all()
    ready.assert_nothing_written_but([(slot, start, start + n) for _, slot, start, _, n in ready.active])
    before = Paged(*ready.before, caches.pages)
    for _, slot, start, first, n in ready.active:
        ops = model.torch_ops(ready.weights, before, slot)
        expected = ops.self_attention(layer, qkv[:, first : first + n], ints([start]))
        assert_close(out[:, first : first + n], expected, model.dtype, roundings=6)
        ready.assert_caches(slot, start + n, ops)


@pytest.mark.parametrize(("block", "causal"), [(16, False), (5, False), (16, True)])
@pytest.mark.parametrize("layout", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_committed_context_and_a_block_behind_it_attend_as_torchs_do(model, layout, block, causal):
    """The block is written over the rows that were not committed; of an idle segment none is, its result is zeros."""
    ready = Ready(model, layout)
    caches, rows, layer = ready.caches, ready.rows, replace(model.layer(), causal_block=causal)
    choose = random.Random(2)
    segments = ready.said["segments"]
    committed = [choose.randint(1, n) if n else 0 for *_, n in segments]
    width = model.kv_heads * model.size
    kv = ready.random_flat(3 * 2 * width)  # of three layers, and this is the second
    context = kv[..., 2 * width : 3 * width], kv[..., 3 * width : 4 * width]
    qkv = ready.random(len(segments), block, (model.heads + 2 * model.kv_heads) * model.size)
    qkv[[n == 0 for *_, n in segments]] = float("nan")
    q = ready.append.block(caches.keys, caches.values, caches.pages, rows, model.heads, qkv, context, ints(committed))
    out = torch.empty(len(segments), block, model.heads * model.size, dtype=model.dtype, device="cuda")
    kernels.attend_rows(
        q,
        caches.keys,
        caches.values,
        caches.pages,
        rows.segments,
        block,
        out,
        causal,
        model.window or 0,
        ready.weights.get("l.self_attn.sinks"),
        model.scales(ready.weights),
        ints(committed),
        block,
    )
    assert out[[n == 0 for *_, n in segments]].eq(0).all()
    ready.assert_nothing_written_but(
        [(slot, start, start + committed[g] + block) for g, slot, start, *_ in ready.active]
    )
    before = Paged(*ready.before, caches.pages)
    for g, slot, start, first, n in ready.active:
        ops, at = model.torch_ops(ready.weights, before, slot), ints([start])
        own = ops.context_rows(layer, kv[:, first : first + n], 1, at)
        expected = ops.block_attention(layer, own, qkv[g : g + 1], at, ints([committed[g]]))
        assert_close(out[g], expected, model.dtype, roundings=6)
        ready.assert_caches(slot, start + committed[g] + block, ops)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_context_alone_is_written_as_torch_does(model, is_whole):
    ready = Ready(model, LAYOUTS["mixed"])
    caches, layer = ready.caches, model.layer()
    committed = [n if is_whole else (n + 1) // 2 for *_, n in ready.said["segments"]]
    width = model.kv_heads * model.size
    kv = ready.random_flat(2 * width)
    context = kv[..., :width], kv[..., width:]
    counts = None if is_whole else ints(committed)
    ready.append.context(caches.keys, caches.values, caches.pages, ready.rows, model.heads, context, counts)
    ready.assert_nothing_written_but([(slot, start, start + committed[g]) for g, slot, start, *_ in ready.active])
    before = Paged(*ready.before, caches.pages)
    for g, slot, start, first, _ in ready.active:
        ops, at = model.torch_ops(ready.weights, before, slot), ints([start])
        ops.keep_context(layer, ops.context_rows(layer, kv[:, first : first + committed[g]], 0, at), at)
        ready.assert_caches(slot, start + committed[g], ops)
