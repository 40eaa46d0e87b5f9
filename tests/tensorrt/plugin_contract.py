"""What our plugins compute, in torch, from the contracts in their headers."""

from typing import Any

import torch

from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.delta_rule import gated_delta
from trtllm_dflash.ops.delta_states import PARTS, DeltaStates, Run, part_shapes

Tensor = torch.Tensor


def plugin_layer(layer: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """`DFlashBlockAttention`, from the contract in plugins/tensorrt/block_attention_plugin.h; in FP32 besides."""
    at: dict[str, Any] = layer.plugin
    if "value_heads" in at:
        return _delta_plugin(at, inputs)
    heads, kv_heads, size = (at[name] for name in ("heads", "kv_heads", "head_size"))
    qkv, start, keys, values, cos, sin, *rest = inputs
    q_norm, k_norm = (rest.pop(0), rest.pop(0)) if at["has_norms"] else (None, None)
    sinks = rest.pop(0) if at["has_sinks"] else None
    tree = (rest.pop(0), rest.pop(0)) if at["has_tree"] else None
    context, committed = rest if at["context_index"] >= 0 else (None, None)
    slots, rows, width = qkv.shape
    length = keys.shape[2]
    if tree is not None:
        assert tree[0].shape == (slots, rows) and tree[1].shape[::2] == (slots, 2)
        assert {x.dtype for x in tree} == {torch.int32}
        tree = tree if tree[1].shape[1] == rows <= 64 else None
    assert width == (heads + 2 * kv_heads) * size and cos.shape[1] * 2 == size and start.dtype == torch.int32
    assert keys.shape == values.shape == (slots, kv_heads, length, size)
    assert len({x.dtype for x in (qkv, keys, values, cos, sin)}) == 1
    assert sinks is None or (sinks.dtype, sinks.shape) == (torch.float32, (heads,))

    def rotated(x: Tensor, weight: Tensor | None, first: int, places: Tensor | None = None) -> Tensor:
        """Of x [heads, N, D] at first and on, or at places [N]."""
        x = x.float()
        if weight is not None:
            x = x * (x.square().mean(dim=-1, keepdim=True) + at["norm_eps"]).rsqrt() * weight.float()
        place = first + torch.arange(x.shape[1]) if places is None else places
        place = place.clamp(max=len(cos) - 1)  # past it nothing is kept
        c, s = cos[place].float(), sin[place].float()
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(qkv.dtype)

    def write(slot: int, first: int, k: Tensor, v: Tensor, places: Tensor | None = None) -> None:
        room = max(0, min(len(k), length - first))  # of k and v [rows, kv_heads, D]
        keys[slot, :, first : first + room] = rotated(k.transpose(0, 1), k_norm, first, places)[:, :room]
        values[slot, :, first : first + room] = v.transpose(0, 1)[:, :room]

    out = torch.empty(slots, rows, heads, size, dtype=qkv.dtype)
    for slot in range(slots):
        first = int(start[slot])
        if context is not None and committed is not None:
            count = int(committed[slot])
            pairs = context[slot, :count].unflatten(1, (-1, 2, kv_heads, size))[:, at["context_index"]]
            write(slot, first, pairs[:, 0], pairs[:, 1])
            first += count
        q, k, v = qkv[slot].unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
        places = None if tree is None else tree[0][slot]
        write(slot, first, k, v, places)
        end = min(first + rows, length)
        position, key = (end - rows + torch.arange(rows))[:, None], torch.arange(end)
        seen = key <= position if at["causal"] else (key < end).expand(rows, -1)
        if tree is not None and places is not None:
            low, high = tree[1][slot].long().unbind(dim=1)
            bits = ((low & 0xFFFFFFFF) | high << 32)[:, None] >> torch.arange(rows) & 1
            depths = bits.sum(dim=1) - 1
            assert end == first + rows and torch.equal(depths, places.long() - first)
            assert not at["window"] or at["window"] > int(depths.max()), "a window reaches a tree's root"
            seen = torch.cat([torch.ones(rows, first, dtype=torch.bool), bits.bool()], dim=1)
            position, key = places[:, None], torch.cat([key[:first], places])
        if at["window"]:
            seen = seen & (key > position - at["window"])
        past = [x[slot, :, :end].float().repeat_interleave(heads // kv_heads, dim=0) for x in (keys, values)]
        scores = rotated(q.transpose(0, 1), q_norm, first, places).float() @ past[0].mT * size**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, rows, -1)], dim=-1)
        shares = scores.softmax(dim=-1)[..., :end]
        out[slot] = (shares @ past[1]).transpose(0, 1).to(qkv.dtype)
    return out.flatten(2), keys, values


def _delta_plugin(at: dict[str, Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """`DFlashDeltaNet`, from the contract in plugins/tensorrt/delta_net_plugin.h, by the recurrence row after row."""
    x, gates, start, row_count, length, conv, a_log, dt_bias, norm, *kept = inputs
    sizes = at["key_heads"], at["value_heads"], at["head_size"], at["head_size"]
    net = DeltaLayer("", *sizes, conv.shape[1], at["norm_eps"])
    pending = kept[1].shape[1]
    assert {part: kept[i].shape[1:] for i, part in enumerate(PARTS)} == part_shapes(net, pending)
    assert all(kept[i].dtype == torch.float32 for i in range(4)) and kept[4].dtype == x.dtype == conv.dtype
    state = kept[0].mT.contiguous()  # of each value its keys
    states = DeltaStates(dict(zip(PARTS, (state, *kept[1:]), strict=True)), pending)
    states.length, states.rows = length.tolist(), [pending] * len(length)
    slots = enumerate(zip(start.tolist(), row_count.tolist(), strict=True))
    runs = [Run(slot, first, count, entry=slot, first=0) for slot, (first, count) in slots if count]
    weights = {"conv1d.weight": conv[:, None], "A_log": a_log, "dt_bias": dt_bias, "norm.weight": norm}
    out = gated_delta(net, weights, states, runs, x, gates)
    kept[0].copy_(state.mT)
    return (out, *kept)
