"""Gated delta nets by our kernel: against the plain recurrence in float64, row after row."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_kernels import EPSILON, why_not
from trtllm_dflash import kernels
from trtllm_dflash.kernels.delta_net import DELTA_ROWS, MOST_KEPT
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.cuda_states import CudaStates, delta_net
from trtllm_dflash.ops.delta_states import part_shapes

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LAYER = DeltaLayer("net.", key_heads=2, value_heads=6, key_size=128, value_size=128, kernel=4, norm_eps=1e-6)
#: With two slots so many value heads that their rows are prepared once for all of a key head's.
MANY = replace(LAYER, key_heads=16, value_heads=48)
#: Heads as in Qwen3.5-27B (3 values a key), 35B-A3B (2), 2B (1) and 122B-A10B (4), few and many, and small ones.
LAYERS = [
    LAYER,
    replace(LAYER, value_heads=4),
    replace(LAYER, value_heads=2),
    replace(LAYER, value_heads=8),
    replace(LAYER, key_heads=6, value_heads=24),
    replace(LAYER, key_size=64, value_size=64),
    replace(LAYER, key_heads=3, value_heads=3, key_size=32, value_size=32),
    replace(LAYER, key_size=16, value_size=16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_net(layer, dtype, forgets=(-5.0, -2.0)):
    """Weights of a net; forgets: the range of A_log."""
    generator = torch.Generator().manual_seed(0)
    low, high = forgets
    return {
        "net.conv1d.weight": (torch.randn(layer.channels, 1, 4, generator=generator) / 2).to(dtype),
        "net.A_log": low + (high - low) * torch.rand(layer.value_heads, generator=generator),
        "net.dt_bias": torch.randn(layer.value_heads, generator=generator),
        "net.norm.weight": 1 + torch.randn(layer.value_size, generator=generator) / 10,
    }


class Recurrence:
    """One slot's net in float64, one row after another as the paper writes it."""

    def __init__(self, layer, weights):
        self.layer = layer
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.state = torch.zeros(layer.value_heads, layer.key_size, layer.value_size, dtype=torch.double)
        self.before = torch.zeros(3, layer.channels, dtype=torch.double)
        self.states, self.inputs = [], self.before

    def run(self, x, gates):
        """Outputs of rows; how many of them stay is said by `keep`."""
        layer, w = self.layer, self.weights
        x, gates = x.double(), gates.double()
        self.inputs = torch.cat([self.before, x[:, : layer.channels]])
        taps = w["net.conv1d.weight"][:, 0]
        mixed = F.silu(sum(self.inputs[i : i + len(x)] * taps[:, i] for i in range(4)))
        keys = layer.key_heads * layer.key_size
        q, k, v = mixed.split([keys, keys, layer.channels - 2 * keys], dim=-1)
        q, k = (y.unflatten(-1, (layer.key_heads, -1)) for y in (q, k))
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        group = layer.value_heads // layer.key_heads
        q, k = (y.repeat_interleave(group, dim=1) for y in (q * layer.key_size**-0.5, k))
        v, z = (y.unflatten(-1, (layer.value_heads, -1)) for y in (v, x[:, layer.channels :]))
        b, a = gates.chunk(2, dim=-1)
        forget = (-w["net.A_log"].exp() * F.softplus(a + w["net.dt_bias"])).exp()
        state, self.states, out = self.state, [self.state], []
        for t in range(len(x)):
            state = state * forget[t, :, None, None]
            write = torch.sigmoid(b[t])[:, None] * (v[t] - (state * k[t][:, :, None]).sum(1))
            state = state + k[t][:, :, None] * write[:, None, :]
            out.append((state * q[t][:, :, None]).sum(1))
            self.states.append(state)
        y = torch.stack(out)
        y = y * (y.square().mean(-1, keepdim=True) + layer.norm_eps).rsqrt() * w["net.norm.weight"] * F.silu(z)
        return y.flatten(1)

    def keep(self, count):
        self.state, self.before = self.states[count], self.inputs[count : count + 3]


class Slots:
    """Slots of one net on the GPU, each beside its `Recurrence`."""

    def __init__(self, layer, dtype, count, pending=DELTA_ROWS, **net):
        self.layer, self.dtype = layer, dtype
        self.weights = random_net(layer, dtype, **net)
        shapes = part_shapes(layer, pending)
        # What a slot's last sequence left must not matter.
        tensors = {
            layer.prefix + part: torch.full(
                (count, *shape), 7.0, dtype=dtype if part == "window" else torch.float32, device="cuda"
            )
            for part, shape in shapes.items()
        }
        self.states = CudaStates(tensors, pending)
        self.states.lengths.fill_(5)
        moved = {name: weight.cuda() for name, weight in self.weights.items()}
        self.net = delta_net(layer, moved, self.states)
        self.own = [Recurrence(layer, self.weights) for _ in range(count)]
        self.starts = [0] * count
        width = layer.channels + layer.value_heads * layer.value_size
        generator = torch.Generator().manual_seed(1)
        self.bank = [torch.randn(2000, n, generator=generator).to(dtype) for n in (width, 2 * layer.value_heads)]
        self.banked = [x.cuda() for x in self.bank]
        self.taken = 0

    def begin(self, slot):
        self.own[slot], self.starts[slot] = Recurrence(self.layer, self.weights), 0

    def rows(self, count):
        """The first of so many rows, of those that lie ready on both devices."""
        first = 0 if self.taken + count > len(self.bank[0]) else self.taken
        self.taken = first + count
        return slice(first, first + count)

    def step(self, counts, padding=0):
        """Runs so many rows of each slot, 0: none, with rows of nobody behind them; returns outputs and float64's."""
        rows = self.rows(sum(counts) + padding)
        firsts = [sum(counts[:slot]) for slot in range(len(counts))]
        segments = [
            [slot, self.starts[slot], first, count]
            for slot, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        found = self.launch(rows, segments, advances=True)
        x, gates = (values[rows] for values in self.bank)
        expected = [
            self.own[slot].run(x[first : first + count], gates[first : first + count])
            for slot, _, first, count in segments
            if count
        ]
        assert not found[sum(counts) :].any(), "rows of nobody"
        return found[: sum(counts)], torch.cat(expected)

    def launch(self, rows, segments, advances=False, absorbs=False):
        """Runs a step; absorbs: what was accepted, whatever steps of single rows do."""
        on_gpu = torch.tensor(segments, dtype=torch.int32).cuda()
        x, gates = (values[rows] for values in self.banked)
        most, keeps = max(words[3] for words in segments), 0 if absorbs else self.states.keeps(len(x), on_gpu)
        out = self.net(x, gates, on_gpu, self.states.lengths, self.states.counters, most, keeps)
        if advances:
            self.states.advance(on_gpu, len(x))
        return out.cpu().double()

    def keep(self, slot, count):
        self.own[slot].keep(count)
        self.starts[slot] += count

    def state_error(self, slot):
        """How far a slot's state is from float64's, once what was accepted is absorbed."""
        self.launch(self.rows(1), [[slot, self.starts[slot], 0, 1]], absorbs=True)
        assert not self.states.counters.any()
        found = self.states.tensors["net.state"][slot].cpu().double().transpose(1, 2)
        return relative(found, self.own[slot].state)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def assert_rows_close(found, expected, dtype, bound=1e-5):
    """Every row by itself: a wrong one must not hide among many."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    bound = bound if dtype == torch.float32 else EPSILON[dtype]
    assert errors.max() < bound, f"{errors.max():.2e} at row {int(errors.argmax())} of {len(errors)}; all: {errors}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.key_heads}-{layer.value_heads}x{layer.key_size}")
def test_blocks_and_prompts_equal_float64(layer, dtype):
    """First blocks, ones behind rows that were accepted in part, prompts in one and several pieces, a new sequence."""
    slots = Slots(layer, dtype, 3)
    for counts, kept in (
        ([16, 1, 40], [3, 1, 40]),
        ([5, 0, 1], [5, 0, 1]),
        ([16, 16, 17], [16, 9, 17]),
        ([1, 8, 70], [1, 8, 70]),
        ([9, 3, 16], [2, 1, 1]),
    ):
        found, expected = slots.step(counts, padding=3)
        assert_rows_close(found, expected, dtype)
        for slot, (count, accepted) in enumerate(zip(counts, kept, strict=True)):
            if count:
                slots.keep(slot, accepted)
    slots.begin(1)
    found, expected = slots.step([2, 33, 2])
    assert_rows_close(found, expected, dtype)
    for slot, accepted in enumerate([2, 33, 1]):
        slots.keep(slot, accepted)
    bound = 1e-5
    errors = [slots.state_error(slot) for slot in range(3)]
    assert max(errors) < bound, errors


@pytest.mark.parametrize("pending", [1, 8, 16])
def test_after_five_hundred_steps_the_state_is_float64s(pending):
    """Of blocks accepted in part, pieces of prompts, slots that take no part, and ones that begin again."""
    chance = random.Random(2)
    slots = Slots(replace(LAYER, key_heads=1, value_heads=3, key_size=64, value_size=64), torch.float32, 4, pending)
    worst = 0.0
    for step in range(500):
        counts = [chance.choice((0, 1, chance.randint(1, pending))) for _ in range(4)]
        if step % 25 == 0:
            counts[chance.randrange(4)] = chance.randint(1, 70)
        if step in (100, 200, 300):
            slots.begin(chance.randrange(1, 4))  # slot 0 goes on
        if not any(counts):
            continue
        found, expected = slots.step(counts, padding=chance.randint(0, 3))
        worst = max(worst, float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()))
        for slot, count in enumerate(counts):
            if count:
                least = max(1, count - pending)  # a state stands no earlier
                slots.keep(slot, chance.randint(least, count))
    errors = [slots.state_error(slot) for slot in range(4)]
    print(f"worst row {worst:.2e}, states {errors}, {slots.starts} rows")
    assert worst < 1e-4  # a row whose output is all but nothing is normed
    assert max(errors) < 1e-5


@pytest.mark.parametrize("forgets", [(-12.0, -9.0), (1.0, 4.0)], ids=["remembers all", "forgets all"])
def test_extreme_decays_equal_float64(forgets):
    slots = Slots(LAYER, torch.float32, 1, forgets=forgets)
    for count, accepted in ((16, 7), (16, 16), (100, 100), (16, 1), (1, 1)):
        found, expected = slots.step([count])
        assert_rows_close(found, expected, torch.float32, bound=1e-4)
        slots.keep(0, accepted)
    assert torch.isfinite(slots.states.tensors["net.state"]).all()


@pytest.mark.parametrize("forgets", [(-5.0, -2.0), (0.0, 1.0)], ids=["remembers", "forgets"])
@pytest.mark.parametrize("counts", [[16, 9], [60, 45]], ids=["blocks", "prompts"])
@pytest.mark.parametrize("layer", [LAYER, MANY], ids=["few", "many"])
def test_states_of_any_size_equal_float64(layer, counts, forgets):
    """FP16, in which what rows read of them is multiplied, has a narrow range."""
    slots = Slots(layer, torch.float32, 2, forgets=forgets)
    slots.step([40, 40])
    sizes = torch.tensor([2.0**-90, 2.0**-30, 1.0, 2.0**12, 2.0**50, 0.0]).repeat(layer.value_heads // 6).double()
    for slot in range(2):
        slots.keep(slot, 40)
        own = slots.own[slot]
        own.state = (own.state * sizes[:, None, None]).float().double()
        slots.states.tensors["net.state"][slot] = own.state.transpose(1, 2).float()
        slots.states.tensors["net.writes"][slot] = 0  # of the rows beside it
        slots.states.tensors["net.decays"][slot] = 1
    found, expected = (rows.unflatten(1, (layer.value_heads, -1)) for rows in slots.step(counts))
    assert_rows_close(found, expected, torch.float32, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "heads"), [(16, 6), (34, 24)])
def test_steps_of_many_slots_equal_float64(count, heads, dtype):
    """Blocks of the kernel have more values of a head where there are more heads."""
    slots = Slots(replace(LAYER, key_heads=1, value_heads=heads), dtype, count)
    for step, counts in enumerate(([16] * count, [4, 16] * (count // 2), [35, 18] * (count // 2))):
        found, expected = slots.step(counts)
        assert_rows_close(found, expected, dtype, bound=1e-4)
        for slot, rows in enumerate(counts):
            slots.keep(slot, rows if rows > DELTA_ROWS else max(1, rows - 3 * step))
    errors = [slots.state_error(slot) for slot in range(count)]
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS[:4], ids=lambda layer: f"{layer.key_heads}-{layer.value_heads}")
def test_steps_of_single_rows_equal_float64(layer, dtype):
    """Behind blocks and prompts, of some of the slots, and as many rows as segments that are all one slot's."""
    chance = random.Random(3)
    slots = Slots(layer, dtype, 20)
    found, expected = slots.step([16, 1, 40, 3] * 5)
    for slot in range(20):
        slots.keep(slot, (chance.randint(1, 16), 1, 40, 2)[slot % 4])
    for step in range(40):
        counts = [int(chance.random() < 0.8) for _ in range(20)]
        if step == 3:
            slots.begin(0)
        if step in (4, 8):
            counts = [0] * 20
            counts[step] = 20 if step == 4 else 7
        if step == 6:
            counts = [2, 0, 3, 0] * 4 + [0, 1, 0, 0]
        found, expected = slots.step(counts)
        assert_rows_close(found, expected, dtype, bound=1e-4)
        assert not slots.states.counters.any()
        for slot, count in enumerate(counts):
            if count:
                slots.keep(slot, chance.randint(max(1, count - DELTA_ROWS), count))
    errors = [slots.state_error(slot) for slot in range(20)]
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_rows_join_those_beside_a_state_until_they_are_many(dtype):
    """The state stays as it is to the bit, and so does where it stands; what rows give is float64's all the same."""
    slots = Slots(LAYER, dtype, 3)
    slots.step([40, 9, 1])
    for slot, accepted in enumerate((40, 5, 1)):
        slots.keep(slot, accepted)
    # A state's rows beside it, those of the step above that were accepted; 16 of the first's 40.
    beside, state = [16, 5, 1], slots.states.tensors["net.state"]
    for _ in range(3 * MOST_KEPT):
        before, stood = state.clone(), slots.states.lengths.tolist()
        found, expected = slots.step([1, 1, 1])
        assert_rows_close(found, expected, dtype, bound=1e-4)
        for slot in range(3):
            joins = beside[slot] < MOST_KEPT
            assert torch.equal(state[slot], before[slot]) == joins, (slot, beside)
            assert slots.states.lengths[slot] == (stood[slot] if joins else slots.starts[slot])
            beside[slot] = beside[slot] + 1 if joins else 1
            slots.keep(slot, 1)
    found, expected = slots.step([16, 1, 33])  # absorb what they find
    assert_rows_close(found, expected, dtype, bound=1e-4)
    for slot, accepted in enumerate((9, 1, 33)):
        slots.keep(slot, accepted)
    errors = [slots.state_error(slot) for slot in range(3)]
    assert max(errors) < 1e-5, errors


def test_single_rows_that_join_can_be_repeated():
    slots = Slots(LAYER, torch.bfloat16, 2)
    slots.step([16, 9])
    slots.keep(0, 7)
    slots.keep(1, 1)
    rows, segments = slots.rows(2), [[0, 7, 0, 1], [1, 1, 1, 1]]
    assert torch.equal(slots.launch(rows, segments), slots.launch(rows, segments))


@pytest.mark.parametrize("heads", [(1, 5), (2, 2), (2, 8), (4, 16)], ids=str)
def test_long_prompts_equal_float64(heads):
    """Of more chunks than are taken together, beside other prompts and blocks; then further pieces of them."""
    key_heads, value_heads = heads
    slots = Slots(replace(LAYER, key_heads=key_heads, value_heads=value_heads), torch.bfloat16, 5)
    for counts, kept in (([1203, 0, 16, 17, 412], [1203, 0, 5, 17, 400]), ([18, 300, 19, 1, 1170], None)):
        found, expected = slots.step(counts, padding=2)
        assert_rows_close(found, expected, torch.bfloat16)
        for slot, count in enumerate(kept or counts):
            if count:
                slots.keep(slot, count)
    errors = [slots.state_error(slot) for slot in range(5)]
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("counts", [[100, 300], [1990, 0]], ids=str)
def test_captured_prompts_give_the_same_bits_in_turns(counts):
    """Few heads, so that kernels of one range of chunks begin beside those of another."""
    slots = Slots(replace(LAYER, key_heads=1, value_heads=3), torch.bfloat16, 2)
    rows = sum(counts)
    segments = torch.tensor([[0, 0, 0, counts[0]], [1, 0, counts[0], counts[1]]], dtype=torch.int32, device="cuda")
    given = [torch.empty_like(bank[:rows]) for bank in slots.banked]
    state = slots.states.tensors["net.state"]

    def run():
        return slots.net(*given, segments, slots.states.lengths, slots.states.counters, max(counts))

    def fill(first):
        for to, bank in zip(given, slots.banked, strict=True):
            to.copy_(bank.roll(-first, 0)[:rows])

    expected = []
    for first in (0, 7):
        fill(first)
        expected.append((run().clone(), state.clone()))
    assert not torch.equal(*(each[0] for each in expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for turn in range(20):
        fill((0, 7)[turn % 2])
        graph.replay()
        assert torch.equal(out, expected[turn % 2][0]) and torch.equal(state, expected[turn % 2][1]), turn


@pytest.mark.parametrize("layer", [LAYER, MANY], ids=["few", "many"])
def test_a_step_that_is_repeated_gives_the_same_bits(layer):
    slots = Slots(layer, torch.bfloat16, 2)
    slots.step([16, 40])
    slots.keep(0, 11)
    slots.keep(1, 40)
    rows, segments = slots.rows(20), [[0, 11, 0, 12], [1, 40, 12, 8]]
    once = slots.launch(rows, segments, advances=True)
    assert torch.equal(slots.launch(rows, segments), once)


@pytest.mark.parametrize("layer", [LAYER, MANY], ids=["few", "many"])
def test_a_net_sees_what_moved_its_states_just_before_it(layer):
    """Captured, it begins beside that kernel, and may have read where they stood before."""
    slots = Slots(layer, torch.bfloat16, 2)
    slots.step([40, 40])
    states = slots.states
    moving, following = (
        torch.tensor(segments, dtype=torch.int32, device="cuda")
        for segments in ([[0, 40, 0, 30], [1, 40, 30, 30]], [[0, 60, 0, 12], [1, 58, 12, 9]])
    )
    given = [bank[:21] for bank in slots.banked]
    kept = {tensor: tensor.clone() for tensor in (*states.tensors.values(), states.lengths)}

    def restore():
        for tensor, before in kept.items():
            tensor.copy_(before)

    def follow():
        return slots.net(*given, following, states.lengths, states.counters, 12)

    states.advance(moving, 60)
    torch.cuda.synchronize()
    out = follow().clone()
    expected = [tensor.clone() for tensor in kept]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states.advance(moving, 60)
        captured = follow()
    for turn in range(10):
        restore()
        graph.replay()
        assert torch.equal(captured, out), turn
        assert all(torch.equal(tensor, after) for tensor, after in zip(kept, expected, strict=True)), turn


@pytest.mark.parametrize("layer", [LAYER, MANY], ids=["few", "many"])
def test_slots_that_take_no_part_keep_every_bit(layer):
    slots = Slots(layer, torch.bfloat16, 2)
    slots.step([30, 16])
    before = {name: tensor[1].clone() for name, tensor in slots.states.tensors.items()}
    slots.keep(0, 30)
    slots.keep(1, 16)
    slots.step([16, 0])
    assert all(torch.equal(slots.states.tensors[name][1], tensor) for name, tensor in before.items())
    assert slots.states.lengths.tolist() == [30, 0]


def test_nets_that_are_not_computed_are_refused():
    assert "heads of 16, 32, 64, 128, keys as values, not of 16 and 24" in kernels.why_no_delta_net(16, 24, 4, 16)
    assert "over 4 rows, not over 3" in kernels.why_no_delta_net(128, 128, 3, 16)
    assert "at most 16 rows, not of 64" in kernels.why_no_delta_net(128, 128, 4, 64)
    slots = Slots(LAYER, torch.bfloat16, 1)
    slots.banked[1] = slots.banked[1].float()
    with pytest.raises(ValueError, match="gates"):
        slots.launch(slots.rows(4), [[0, 0, 0, 4]])
