"""Gated delta nets on the CPU: row after row, so that a row's bits are a function of the slot's rows up to it alone.

Every number is made by operations of one shape, whatever else runs: a state is the same to the bit whether its rows
came one at a time, in blocks that were accepted in part, or in pieces of a prompt.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from trtllm_dflash.ops.activations import sigmoid, silu
from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.cpu_norm import normed
from trtllm_dflash.ops.delta_states import DeltaStates, NetState, Run, absorbed_rows

Tensor = torch.Tensor

_EPS = 1e-6  # of the heads' lengths


class DeltaRows(NamedTuple):
    """Numbers of n rows, in FP32: of what they read out of a state, and what they write."""

    queries: Tensor  # [n, Hk, Dk]
    keys: Tensor  # [n, Hk, Dk]
    values: Tensor  # [n, Hv, Dv]
    shares: Tensor  # [n, Hv] how much of a row is written
    decays: Tensor  # [n, Hv] what is left of the state before it

    def until(self, count: int) -> "DeltaRows":
        """Takes the first rows."""
        return DeltaRows(*(x[:count] for x in self))

    def after(self, count: int) -> "DeltaRows":
        """Takes the rows behind those."""
        return DeltaRows(*(x[count:] for x in self))


def gated_delta(
    layer: DeltaLayer, weights: Mapping[str, Tensor], states: DeltaStates, runs: Sequence[Run], x: Tensor, gates: Tensor
) -> Tensor:
    """Computes `Ops.gated_delta` of the runs' rows of x [B, N, C + Hv*Dv] and gates [B, N, 2 Hv]; others get zeros."""
    out = x.new_zeros(*x.shape[:2], layer.value_heads * layer.value_size)
    for run in runs:
        rows = slice(run.first, run.first + run.count)
        net = states.of(layer.prefix, run.slot)
        y = _run(layer, weights, net, run, states, x[run.entry, rows], gates[run.entry, rows])
        out[run.entry, rows] = y
    return out


def _run(
    layer: DeltaLayer, weights: Mapping[str, Tensor], net: NetState, run: Run, states: DeltaStates, x: Tensor, g: Tensor
) -> Tensor:
    before = layer.kernel - 1
    if run.start == 0:
        net.state.zero_()
        net.window[:before].zero_()
    accepted = states.accepted(run)
    for key, write, decay in zip(_spread(layer, net.keys[:accepted]), net.writes, net.decays, strict=False):
        _forget(net.state, decay)
        _write(net.state, key, write)
    inputs = torch.cat([net.window[accepted : accepted + before], x[:, : layer.channels]])
    rows = delta_rows(layer, weights, inputs, g)
    first = absorbed_rows(run.count, states.pending)
    absorbed, pending = rows.until(first), rows.after(first)
    read = [_recur(layer, net.state, absorbed)[0]] if first else []
    # Rows that may yet be rejected go into a copy, and beside the state.
    out, writes = _recur(layer, net.state.clone(), pending)
    count = run.count - first
    net.writes[:count], net.keys[:count], net.decays[:count] = writes, pending.keys, pending.decays
    net.window[: before + count] = inputs[first:]
    out = torch.cat([*read, out])
    return gated_output(layer, weights, out, x[:, layer.channels :]).to(x.dtype)


def gated_output(layer: DeltaLayer, weights: Mapping[str, Tensor], out: Tensor, z: Tensor) -> Tensor:
    """Norms what rows read, [n, Hv, Dv] in FP32, and gates it by z [n, Hv*Dv]: [n, Hv*Dv]."""
    gate = silu(z.float().view_as(out))
    return normed(out, layer.norm_eps).mul_(weights[layer.prefix + "norm.weight"]).mul_(gate).flatten(1)


def delta_rows(layer: DeltaLayer, weights: Mapping[str, Tensor], inputs: Tensor, gates: Tensor) -> DeltaRows:
    """Computes what rows ask and write, from the convolution's inputs [kernel - 1 + n, C] and the gates [n, 2 Hv]."""
    wide, taps, count = inputs.float(), weights[layer.prefix + "conv1d.weight"].float(), len(gates)
    mixed = wide[:count] * taps[:, 0, 0]
    for i in range(1, layer.kernel):
        mixed.add_(wide[i : i + count] * taps[:, 0, i])
    keys = layer.key_heads * layer.key_size
    q, k, v = silu(mixed).split([keys, keys, layer.channels - 2 * keys], dim=-1)
    q, k = (_unit(heads.unflatten(-1, (layer.key_heads, -1))) for heads in (q, k))
    b, a = gates.float().chunk(2, dim=-1)
    rates = weights[layer.prefix + "A_log"].exp().neg()
    decays = (rates * softplus(a + weights[layer.prefix + "dt_bias"])).exp_()
    return DeltaRows(q * layer.key_size**-0.5, k, v.unflatten(-1, (layer.value_heads, -1)), sigmoid(b), decays)


def _recur(layer: DeltaLayer, state: Tensor, rows: DeltaRows) -> tuple[Tensor, Tensor]:
    """Takes state [Hv, Dk, Dv] through rows, in place: what each reads out of it, and writes, [n, Hv, Dv] both."""
    queries, keys, shares = _spread(layer, rows.queries), _spread(layer, rows.keys), rows.shares[:, :, None]
    out, writes = [], []
    for query, key, value, share, decay in zip(queries, keys, rows.values, shares, rows.decays, strict=True):
        _forget(state, decay)
        write = (value - _read(state, key)) * share
        _write(state, key, write)
        out.append(_read(state, query))
        writes.append(write)
    return torch.stack(out), torch.stack(writes)


# One multiplication or addition at a time: a state has the same bits however its rows are cut into steps.


def _forget(state: Tensor, decay: Tensor) -> None:
    state.mul_(decay[:, None, None])


def _write(state: Tensor, key: Tensor, write: Tensor) -> None:
    state.add_(key * write[:, None, :])


def _read(state: Tensor, key: Tensor) -> Tensor:
    return (state * key).sum(dim=1)


def _spread(layer: DeltaLayer, heads: Tensor) -> Tensor:
    """Gives each value head its key head's numbers: [n, Hk, Dk] -> [n, Hv, Dk, 1]."""
    return heads.repeat_interleave(layer.value_heads // layer.key_heads, dim=1)[..., None]


def _unit(x: Tensor) -> Tensor:
    """Divides heads by their lengths, along the last dimension."""
    return x * (x * x).sum(dim=-1, keepdim=True).add_(_EPS).rsqrt_()


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x)), which for a large x is x."""
    return x.clamp(min=0) + x.abs().neg_().exp_().log1p_()
