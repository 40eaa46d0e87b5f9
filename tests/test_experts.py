"""Mixtures of experts: routing, and the ways of computing them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dflash.ops.base import ClampedSwiglu, MoELayer
from trtllm_dflash.ops.experts import Experts, in_tiles, one_by_one, route
from trtllm_dflash.ops.mxfp4 import dequantize
from trtllm_dflash.ops.torch_ops import TorchOps

CLAMP = ClampedSwiglu(1.702, 7.0)


def make(count: int, layer: MoELayer, hidden: int = 32, columns: int = 32, packed: bool = False, seed: int = 0):
    """Random tensors of `count` experts."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, rows, inputs in (("gate_up_proj", 2 * columns, hidden), ("down_proj", hidden, columns)):
        key = f"{layer.prefix}experts.{name}."
        weights[key + "bias"] = torch.randn(count, rows, generator=generator)
        if packed:
            shape = count, rows, inputs // 32
            weights[key + "blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            weights[key + "scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        else:
            weights[key + "weight"] = torch.randn(count, rows, inputs, generator=generator) * inputs**-0.5
    return weights


def by_hand(layer: MoELayer, weights: dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`Ops.moe` as it is defined, row by row, in FP64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row, scores in enumerate(logits.double()):
        chosen = sorted(range(layer.experts), key=lambda i: (-scores[i], i))[: layer.top_k]
        shares = scores[chosen].softmax(0) if layer.normalized else scores.softmax(0)[chosen]
        for expert, share in zip(chosen, shares, strict=True):
            if layer.first <= expert < layer.first + layer.count:
                gate_up, down = (
                    {
                        kind: weights[f"{layer.prefix}experts.{name}.{kind}"][expert - layer.first].double()
                        for kind in ("weight", "bias")
                    }
                    for name in ("gate_up_proj", "down_proj")
                )
                h = gate_up["weight"] @ x[row].double() + gate_up["bias"]
                gate, up = h.chunk(2)
                if layer.clamp is None:
                    act = gate * gate.sigmoid() * up
                else:
                    gate, up = gate.clamp(max=layer.clamp.limit), up.clamp(-layer.clamp.limit, layer.clamp.limit)
                    act = gate * (gate * layer.clamp.alpha).sigmoid() * (up + 1)
                out[row] += share * (down["weight"] @ act + down["bias"])
    return out


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_both_ways_of_computing_experts_equal_the_definition(data):
    experts = data.draw(st.integers(1, 9))
    first = data.draw(st.integers(0, experts - 1))
    layer = MoELayer(
        prefix="mlp.",
        experts=experts,
        first=first,
        count=data.draw(st.integers(1, experts - first)),
        top_k=data.draw(st.integers(1, experts)),
        normalized=data.draw(st.booleans()),
        clamp=data.draw(st.sampled_from([None, CLAMP, ClampedSwiglu(0.5, 0.3)])),
    )
    rows = data.draw(st.integers(1, 24))
    weights = make(layer.count, layer, columns=8, hidden=6)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator)
    # Whole numbers: many logits are equal.
    logits = torch.randint(-2, 3, (rows, experts), generator=generator).float()
    expected = by_hand(layer, weights, x, logits).float()
    for compute in (one_by_one, in_tiles):
        actual = compute(layer, Experts.of(weights, layer), x, logits)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compute", [one_by_one, in_tiles])
def test_packed_experts_are_their_numbers(compute):
    layer = MoELayer("mlp.", 8, 0, 8, 4, True, CLAMP)
    packed = make(8, layer, packed=True)
    plain = {name: tensor for name, tensor in packed.items() if name.endswith("bias")}
    for name in ("gate_up_proj", "down_proj"):
        key = f"mlp.experts.{name}."
        plain[key + "weight"] = dequantize(packed[key + "blocks"], packed[key + "scales"], torch.float32)
    x, logits = torch.randn(5, 32), torch.randn(5, 8)
    assert torch.equal(
        compute(layer, Experts.of(packed, layer), x, logits), compute(layer, Experts.of(plain, layer), x, logits)
    )


def test_all_rows_may_choose_one_expert():
    layer = MoELayer("mlp.", 16, 0, 16, 1, True)
    experts = Experts.of(make(16, layer), layer)
    x, logits = torch.randn(40, 32), torch.zeros(40, 16).index_fill_(1, torch.tensor([11]), 5.0)
    torch.testing.assert_close(in_tiles(layer, experts, x, logits), one_by_one(layer, experts, x, logits))


def test_of_equal_logits_the_lowest_ids_win_and_shares_are_of_all_or_of_those_chosen():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    ids, shares = route(MoELayer("", 4, 0, 4, 2, normalized=True), logits)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(shares, torch.tensor([[0.5, 0.5]]))
    _, shares = route(MoELayer("", 4, 0, 4, 2, normalized=False), logits)
    torch.testing.assert_close(shares, logits.softmax(-1)[:, 1:3])


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_sigmoids_are_compared_with_a_correction_or_without_and_are_the_shares(corrects, normalized):
    """By the formula, one row after another; a correction turns some rows' choice over."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 9, generator=generator)
    correction = torch.randn(9, generator=generator) if corrects else None
    layer = MoELayer("", 9, 0, 9, 3, normalized, scores="sigmoid")
    ids, shares = route(layer, logits, correction)
    chosen_by_scores = []
    for row, of_row, its_shares in zip(logits.double().tolist(), ids.tolist(), shares.tolist(), strict=True):
        scores = [1 / (1 + math.exp(-x)) for x in row]
        compared = [score + (correction[i].item() if corrects else 0) for i, score in enumerate(scores)]
        best = sorted(range(9), key=lambda i: -compared[i])[:3]
        assert of_row == best
        total = sum(scores[i] for i in best) if normalized else 1
        assert its_shares == pytest.approx([scores[i] / total for i in best], rel=1e-5)
        chosen_by_scores.append(best == sorted(range(9), key=lambda i: -scores[i])[:3])
    assert all(chosen_by_scores) is not corrects


def test_in_bf16_shares_and_sums_are_in_fp32():
    layer = MoELayer("mlp.", 8, 0, 8, 4, True, CLAMP)
    weights = make(8, layer)
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    x, logits = torch.randn(2, 3, 32).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    wide = {name: tensor.float() for name, tensor in halves.items()}
    actual = TorchOps(halves, {}).moe(layer, x, logits)
    expected = TorchOps(wide, {}).moe(layer, x.float(), logits.float())
    assert actual.dtype is torch.bfloat16
    assert actual.shape == x.shape
    torch.testing.assert_close(actual.float(), expected, rtol=0.03, atol=0.03)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_attention_with_a_window_and_sinks_is_its_definition(data):
    slots, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(rows, 12), min_size=slots, max_size=slots))
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 2, 5, 20]))
    sinks = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(slots, 4, rows, 8, generator=generator)
    k, v = (torch.randn(slots, 2, 14, 8, generator=generator) for _ in range(2))
    logits = torch.randn(4, generator=generator)
    ops = TorchOps({"sinks": logits}, {})
    name = "sinks" if sinks else None
    out = ops.attention(q, k, v, torch.tensor(lengths, dtype=torch.int32), causal, window, name)
    for slot in range(slots):
        for row in range(rows):
            position = lengths[slot] - rows + row
            last = position if causal else lengths[slot] - 1
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(4):
                scores = q[slot, head, row] @ k[slot, head // 2, first : last + 1].T / 8**0.5
                if sinks:
                    scores = torch.cat([scores, logits[head : head + 1]])
                expected = scores.softmax(-1)[: last + 1 - first] @ v[slot, head // 2, first : last + 1]
                torch.testing.assert_close(out[slot, row, head * 8 : head * 8 + 8], expected, rtol=1e-4, atol=1e-5)
