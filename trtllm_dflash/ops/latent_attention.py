"""Latent attention (MLA): one row of few numbers is key and value of all heads, by a matrix up for each.

Absorbed, queries go down by the matrix instead, and what they attend to is the rows themselves: few bytes, for few
queries. Not absorbed, rows go up to keys and values of every head: fewer operations, for a prompt's many queries.
"""

import torch

from trtllm_dflash.ops import cpu_products
from trtllm_dflash.ops.base import LatentLayer

Tensor = torch.Tensor

#: Rows of a slot up to which queries are absorbed.
MOST_ABSORBED = 32


def key_up(layer: LatentLayer, up: Tensor) -> Tensor:
    """The part of the matrices up that makes keys: [heads, plain size, rank]."""
    return up.view(layer.heads, -1, layer.rank)[:, : layer.plain_size]


def value_up(layer: LatentLayer, up: Tensor) -> Tensor:
    """The part of the matrices up that makes values: [heads, value size, rank]."""
    return up.view(layer.heads, -1, layer.rank)[:, layer.plain_size :]


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies x [B, heads, N, I] by each head's matrix [heads, O, I], transposed: [B, heads, N, O].

    On the CPU a row's bits depend on no other row; see `cpu_products`.
    """
    if x.is_cuda:  # each matrix read once for all slots
        slots, heads, rows, size = x.shape
        products = torch.bmm(x.transpose(0, 1).reshape(heads, slots * rows, size), matrices.mT)
        return products.view(heads, slots, rows, -1).transpose(0, 1)
    by_heads = (cpu_products.product(x[:, head], matrix) for head, matrix in enumerate(matrices))
    return torch.stack(list(by_heads), dim=1)


def absorb(layer: LatentLayer, up: Tensor, plain: Tensor, rotated: Tensor) -> Tensor:
    """Makes queries of cache rows from those of keys: [B, heads, N, rank + rotary size].

    Args:
        plain: [B, heads, N, plain size], without a position.
        rotated: [B, heads, N, rotary size].
    """
    down = key_up(layer, up).mT
    return torch.cat([by_head(plain, down if down.is_cuda else down.contiguous()), rotated], dim=-1)


def expand(layer: LatentLayer, up: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Makes every head's keys [B, heads, L, plain + rotary size] and values of cache rows [B, 1, L, rank + rotary]."""
    latent, rotated = rows.expand(-1, layer.heads, -1, -1).split([layer.rank, layer.rotary_size], dim=-1)
    keys = torch.cat([by_head(latent, key_up(layer, up)), rotated], dim=-1)
    return keys, by_head(latent, value_up(layer, up))
