"""Qwen3.5's text model in plain torch, with the parameter names of the published checkpoints.

Three layers of four are gated delta nets, the fourth attends with a gate and rotates a part of each head.
Letters in shapes: B rows of a batch, S tokens, H hidden, K key heads, N value heads, D head size, V vocabulary, and of
a delta net n chunks of c tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from qwen3 import MLP, RMSNorm, Rope, rope_of, rotate
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
CHUNK = 64  # tokens
LENGTH_EPS = 1e-6  # of the delta nets' queries and keys


class CenteredNorm(RMSNorm):
    """Multiplies by one more than its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return ((1 + self.weight) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class GatedAttention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.size, bias=False)  # of each head its query, then its gate
        self.k_proj = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.q_norm, self.k_norm = CenteredNorm(self.size, eps), CenteredNorm(self.size, eps)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:  # [B, S, H]
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.size)).chunk(2, -1)
        k, v = (linear(x).unflatten(-1, (self.groups, self.size)) for linear in (self.k_proj, self.v_proj))
        q, k = (self.turned(norm(y).transpose(1, 2), rope) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v.transpose(1, 2)))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        rows: Tensor = self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())
        return rows

    @staticmethod
    def turned(x: Tensor, rope: Rope) -> Tensor:
        """Rotates the first numbers of each head, as many as the tables have."""
        size = rope[0].shape[-1]
        return torch.cat([rotate(x[..., :size], rope), x[..., size:]], -1)


class DeltaNet(nn.Module):
    """A gated delta net (arXiv 2412.06464): a matrix a value head instead of keys and values of every token."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.keys, self.values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.size, hidden = c["linear_key_head_dim"], c["hidden_size"]
        channels = (2 * self.keys + self.values) * self.size
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values * self.size, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.values, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, c["linear_conv_kernel_dim"], groups=channels, bias=False)
        # From heads that remember a thousand tokens to heads that remember five.
        rates = torch.logspace(-3, -0.7, self.values)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(self.values)), nn.Parameter(rates.expm1().log())
        self.norm = RMSNorm(self.size, c["rms_norm_eps"])
        self.out_proj = nn.Linear(self.values * self.size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        inputs, z, b, a = (p(x) for p in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a))
        with torch.autocast(x.device.type, enabled=False):
            heads = self.mixed(inputs.float()).unflatten(-1, (-1, self.size)).transpose(1, 2)
            q, k, v = heads.split([self.keys, self.keys, self.values], 1)  # [B, heads, S, D]
            q, k = (
                (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + LENGTH_EPS)).repeat_interleave(
                    self.values // self.keys, 1
                )
                for y in (q, k)
            )
            logs = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
            out = gated_delta(q * self.size**-0.5, k, v, b.float().sigmoid().mT, logs.mT)
            out = self.norm(out.transpose(1, 2)) * F.silu(z.float()).unflatten(-1, (self.values, self.size))
        rows: Tensor = self.out_proj(out.flatten(2))
        return rows

    def mixed(self, x: Tensor) -> Tensor:
        """Convolves each channel over the last few tokens, zeros before the first: [B, S, C]."""
        taps = self.conv1d.weight[:, 0]  # [C, 4]
        count = taps.shape[1]
        padded = F.pad(x, (0, 0, count - 1, 0))
        mixed = x * taps[:, -1]
        for i in range(count - 1):
            mixed = mixed + padded[:, i : i + x.shape[1]] * taps[:, i]
        return F.silu(mixed)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, shares: Tensor, logs: Tensor) -> Tensor:
    """Reads q out of the states that k and v are written into: [B, N, S, D], from empty states.

    All tokens of a chunk together, and the chunks' states by doubling: log n products instead of a walk.

    Args:
        q, k, v: [B, N, S, D] FP32; lengths of q and k divided out.
        shares: [B, N, S] how much of a token is written.
        logs: [B, N, S] logarithm of what is left of the state before it.
    """
    length = q.shape[2]
    spare = -length % CHUNK
    if spare:  # tokens that neither write nor forget
        q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
        shares, logs = F.pad(shares, (0, spare)), F.pad(logs, (0, spare))
    q, k, v, shares, logs = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, shares, logs))  # [B, N, n, c, ...]
    past = logs.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (past[..., :, None] - past[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    left, to_end = past.exp()[..., None], (past[..., -1:] - past).exp()[..., None]
    mixing = unit_inverse((between * (k @ k.mT) * shares[..., None]).tril(-1))
    written = mixing @ (v * shares[..., None])  # if the state before the chunk were empty
    behind = mixing @ (k * left * shares[..., None])  # what such a state takes away from it
    keys = (k * to_end).mT
    whole = torch.eye(k.shape[-1], device=q.device) * left[..., -1:, :]
    states = before_chunks(whole - keys @ behind, keys @ written)
    out = (q * left) @ states + (between * (q @ k.mT)) @ (written - behind @ states)
    return out.flatten(2, 3)[:, :, :length]


def before_chunks(change: Tensor, add: Tensor) -> Tensor:
    """Computes the state before each chunk, where a chunk makes `change` @ state + `add` of it: [B, N, n, D, D]."""
    step = 1
    while step < change.shape[2]:
        later = change[:, :, step:]
        add = torch.cat([add[:, :, :step], later @ add[:, :, :-step] + add[:, :, step:]], 2)
        change = torch.cat([change[:, :, :step], later @ change[:, :, :-step]], 2)
        step *= 2
    return F.pad(add[:, :, :-1], (0, 0, 0, 0, 1, 0))


def unit_inverse(a: Tensor) -> Tensor:
    """Inverts I + a, a strictly lower triangular: [..., c, c]. Blocks of 8 by powers, then two blocks at a time."""
    found = inverse_of_blocks(a.detach())
    return found - found @ (a - a.detach()) @ found  # the second part is zero, and has the derivative


@torch.no_grad()
def inverse_of_blocks(a: Tensor) -> Tensor:
    size = 8  # powers of larger blocks grow where keys are alike
    diagonal = torch.stack([a[..., i : i + size, i : i + size] for i in range(0, CHUNK, size)], -3)
    square = diagonal @ diagonal
    x = torch.eye(size, device=a.device) - diagonal
    x = x + x @ square
    x = x + x @ (square @ square)
    while size < CHUNK:
        top, bottom = x[..., 0::2, :, :], x[..., 1::2, :, :]
        beside = torch.stack([a[..., i + size : i + 2 * size, i : i + size] for i in range(0, CHUNK, 2 * size)], -3)
        low = -bottom @ beside @ top
        x = torch.cat([torch.cat([top, torch.zeros_like(top)], -1), torch.cat([low, bottom], -1)], -2)
        size *= 2
    return x[..., 0, :, :]


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = GatedAttention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.is_net, self.mlp = kind != "full_attention", MLP(c)
        self.input_layernorm = CenteredNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = CenteredNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.linear_attn(y) if self.is_net else self.self_attn(y, rope))
        rows: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return rows


class Target(nn.Module):
    """Qwen3_5ForCausalLM with tied embeddings, without a cache: training and teacher forcing only."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = CenteredNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> logits [B, S, V]."""
        return F.linear(self.rows(ids), self.embed_tokens.weight)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> what the head reads, [B, S, H]."""
        positions, rope = torch.arange(ids.shape[1], device=ids.device), self.config["rope_parameters"]
        size = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        tables = rope_of(positions, size, rope["rope_theta"])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, tables)
        rows: Tensor = self.norm(x)
        return rows
