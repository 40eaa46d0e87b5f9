"""Gated delta nets by themselves: against the plain recurrence in float64, and to the bit however rows are cut."""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.test_row_exactness import ROWS
from trtllm_dflash.ops.activations import sigmoid
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.delta_rule import softplus
from trtllm_dflash.ops.delta_states import DeltaStates, Run, part_shapes
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.train.delta import DocumentChunks, gated_delta_over_documents

LAYER = DeltaLayer("net.", key_heads=2, value_heads=6, key_size=16, value_size=24, kernel=4, norm_eps=1e-6)
BLOCK = 16
COLUMNS = LAYER.channels + LAYER.value_heads * LAYER.value_size


def random_net(seed=0):
    """Weights of a net that forgets at most a tenth of its state in a row."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "net.conv1d.weight": torch.randn(LAYER.channels, 1, 4, generator=generator) / 2,
        "net.A_log": -5 + 2 * torch.rand(LAYER.value_heads, generator=generator),
        "net.dt_bias": torch.randn(LAYER.value_heads, generator=generator),
        "net.norm.weight": 1 + torch.randn(LAYER.value_size, generator=generator) / 10,
    }


def net_states(slots=1):
    shapes = part_shapes(LAYER, BLOCK)
    # What a slot's last sequence left must not matter.
    return DeltaStates({LAYER.prefix + part: torch.full((slots, *shape), 7.0) for part, shape in shapes.items()}, BLOCK)


def step(weights, states, x, gates, start, slot=0):
    """Runs rows [n, ...] of one slot: [n, Hv * Dv]."""
    runs = [Run(slot, start, len(x), entry=0, first=0)]
    y = TorchOps(weights, {}, None, states, runs).gated_delta(LAYER, x[None], gates[None], torch.tensor([start]))
    states.finish(runs)
    return y[0]


def recurrence(weights, x, gates):
    """Outputs and the last state of all rows, one after another in float64, as the paper writes it."""
    w = {name: weight.double() for name, weight in weights.items()}
    keys = LAYER.key_heads * LAYER.key_size
    mixed, z = x.double().split([LAYER.channels, COLUMNS - LAYER.channels], dim=-1)
    mixed = F.silu(F.conv1d(F.pad(mixed.T, (3, 0)), w["net.conv1d.weight"], groups=LAYER.channels).T)
    q, k, v = mixed.split([keys, keys, LAYER.channels - 2 * keys], dim=-1)
    q, k = (y.unflatten(-1, (LAYER.key_heads, -1)) for y in (q, k))
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(LAYER.value_heads // LAYER.key_heads, dim=1) for y in (q * LAYER.key_size**-0.5, k))
    v, z = (y.unflatten(-1, (LAYER.value_heads, -1)) for y in (v, z))
    b, a = gates.double().chunk(2, dim=-1)
    forget = (-w["net.A_log"].exp() * F.softplus(a + w["net.dt_bias"])).exp()
    state, out = torch.zeros(LAYER.value_heads, LAYER.key_size, LAYER.value_size, dtype=torch.double), []
    for t in range(len(x)):
        state = state * forget[t, :, None, None]
        write = torch.sigmoid(b[t])[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * write[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    y = torch.stack(out)
    y = y * (y.square().mean(-1, keepdim=True) + LAYER.norm_eps).rsqrt() * w["net.norm.weight"] * F.silu(z)
    return y.flatten(1), state


def test_after_five_hundred_blocks_accepted_in_part_the_state_is_float64s():
    weights, states, generator = random_net(), net_states(), torch.Generator().manual_seed(1)
    chance = random.Random(2)
    kept, outputs = [], []
    for _ in range(500):
        count = chance.randint(1, BLOCK)
        accepted = chance.randint(1, count)
        rows = torch.randn(count, COLUMNS + 2 * LAYER.value_heads, generator=generator)
        y = step(weights, states, rows[:, :COLUMNS], rows[:, COLUMNS:], sum(map(len, kept)))
        kept.append(rows[:accepted])
        outputs.append(y[:accepted])
    rows = torch.cat(kept)
    expected, state = recurrence(weights, rows[:, :COLUMNS], rows[:, COLUMNS:])
    step(weights, states, rows[:1, :COLUMNS], rows[:1, COLUMNS:], len(rows))  # absorbs what was accepted
    found = states.of("net.", 0).state.double()
    assert (found - state).norm() / state.norm() < 1e-5
    last = torch.cat(outputs)[-50:].double()
    assert ((last - expected[-50:]).norm() / expected[-50:].norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_state_have_the_same_bits_in_any_pieces(dtype):
    weights, generator = random_net(), torch.Generator().manual_seed(1)
    rows = torch.randn(150, COLUMNS + 2 * LAYER.value_heads, generator=generator).to(dtype)
    x, gates = rows[:, :COLUMNS], rows[:, COLUMNS:]
    states = net_states(slots=5)
    cuts = ([1] * 150, [150], [16] * 9 + [6], [17, 1, 64, 3, 16, 49], [7, 33, 5, 5, 100])
    pieces = []
    for slot, sizes in enumerate(cuts):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            step(weights, states, x[at : at + n], gates[at : at + n], at, slot)
            for at, n in zip(starts, sizes, strict=True)
        ]
        pieces.append(torch.cat(parts))
        step(weights, states, x[:1], gates[:1], 150, slot)  # absorbs what was beside the state
    for slot in range(1, len(cuts)):
        assert torch.equal(pieces[slot], pieces[0])
        assert torch.equal(states.of("net.", slot).state, states.of("net.", 0).state)


def test_a_slot_that_takes_no_part_keeps_its_state_and_a_repeated_block_changes_nothing():
    weights, states = random_net(), net_states(slots=2)
    rows = torch.randn(40, COLUMNS + 2 * LAYER.value_heads, generator=torch.Generator().manual_seed(1))
    x, gates = rows[:, :COLUMNS], rows[:, COLUMNS:]
    step(weights, states, x[:20], gates[:20], 0)
    before = {name: tensor[0].clone() for name, tensor in states.tensors.items()}
    step(weights, states, x[:20], gates[:20], 0, slot=1)
    assert all(torch.equal(states.tensors[name][0], tensor) for name, tensor in before.items())
    once = step(weights, states, x[20:30], gates[20:30], 20)
    assert torch.equal(step(weights, states, x[20:30], gates[20:30], 20), once)


def test_a_step_that_its_state_cannot_reach_is_an_error():
    weights, states = random_net(), net_states()
    x, gates = torch.zeros(3, COLUMNS), torch.zeros(3, 2 * LAYER.value_heads)
    step(weights, states, x, gates, 0)
    for start in (4, 9):
        with pytest.raises(AssertionError, match=r"slot 0: a step at \d, but its states stand at 0 with 3 rows behind"):
            step(weights, states, x, gates, start)


@pytest.mark.parametrize("function", [sigmoid, softplus])
def test_a_gate_depends_on_no_other_number(function):
    x = 4 * torch.randn(101, 333, generator=torch.Generator().manual_seed(0))
    whole = function(x)
    for rows in ROWS:
        assert torch.equal(function(x[1 : 1 + rows].clone()), whole[1 : 1 + rows])
    torch.testing.assert_close(whole, {sigmoid: torch.sigmoid, softplus: F.softplus}[function](x))


def test_in_training_every_document_of_a_pack_begins_with_an_empty_state():
    """Documents of less than a chunk, of one to the row, and of several; a net that forgets all now and then."""
    weights, lengths = random_net(), (150, 3, 64, 1, 70)
    rows = torch.randn(sum(lengths), COLUMNS + 2 * LAYER.value_heads, generator=torch.Generator().manual_seed(6))
    rows[::40, COLUMNS + LAYER.value_heads :] = 1e4
    x, gates = rows[:, :COLUMNS], rows[:, COLUMNS:]
    chunks = DocumentChunks(lengths, LAYER.kernel - 1, x.device)
    y = gated_delta_over_documents(LAYER, weights, chunks, x[None], gates[None])[0]
    alone = [recurrence(weights, *parts)[0] for parts in zip(x.split(lengths), gates.split(lengths), strict=True)]
    torch.testing.assert_close(y.double(), torch.cat(alone), atol=2e-5, rtol=1e-5)
