"""Qwen3 in plain torch, with the parameter names of the published checkpoints.

Letters in shapes: B rows of a batch, S tokens, H hidden, N query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def rope_of(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """Cosines and sines [..., 1, S, D] of positions [..., S]: two equal halves, as in Qwen3."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], -1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * rope[0] + torch.cat([-b, a], -1) * rope[1]).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, c["hidden_size"], bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.size, c["rms_norm_eps"]), RMSNorm(self.size, c["rms_norm_eps"])

    def queries(self, x: Tensor, rope: Rope) -> Tensor:  # [B, S, H] -> [B, N, S, D]
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.size))).transpose(1, 2), rope)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:  # [B, S, H] -> 2 x [B, G, S, D]
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.size))).transpose(1, 2), rope)
        return k, self.v_proj(x).unflatten(-1, (self.groups, self.size)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends causally. KV heads are repeated by hand: not every kernel knows groups."""
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        rows: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return rows


class MLP(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return rows


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        attention, y = self.self_attn, self.input_layernorm(x)
        k, v = attention.keys_values(y, rope)
        x = x + attention.attend(attention.queries(y, rope), k, v)
        rows: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return rows


class Target(nn.Module):
    """Qwen3ForCausalLM with tied embeddings, without a cache: training and teacher forcing only."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> logits [B, S, V]."""
        return F.linear(self.rows(ids), self.embed_tokens.weight)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> what the head reads, [B, S, H]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        rope = rope_of(positions, self.config["head_dim"], self.config["rope_theta"])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope)
        rows: Tensor = self.norm(x)
        return rows


def initialise(model: nn.Module, layers: int) -> None:
    """Draws small normal weights; what writes to the residual stream starts smaller, by the depth."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(
                p,
                std=0.05 / (2 * layers) ** 0.5
                if "o_proj" in name or "out_proj" in name or "down_proj" in name
                else 0.02
                if "embed" in name
                else 0.05,
            )
