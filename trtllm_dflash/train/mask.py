"""The attention of drafted blocks over a pack: which keys a block's rows see, and two ways to compute it.

Keys are the S context rows of a pack, then the rows of all A blocks. A block's rows see the context rows strictly
before their anchor, of the same document, and all rows of their own block; never another block's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

from trtllm_dflash.train.documents import Pack

Tensor = torch.Tensor

_CONTEXT = -1  # the block of a context row
_SIZES = 1024  # rows and keys of `FlexAttention` come in multiples of it


class Visibility:
    """Places of the rows and keys of a pack's blocks, and the rule of which see which.

    Args:
        pack: whose context rows are the first keys.
        rows: the anchors' places [A].
        block: rows of a block.
    """

    def __init__(self, pack: Pack, rows: Tensor, block: int) -> None:
        blocks = torch.arange(len(rows), device=rows.device).repeat_interleave(block)
        self.block = blocks  # [A * block] of each row
        self.document = pack.document[rows][blocks]  # [A * block]
        self.anchor = pack.position[rows][blocks]  # [A * block] its position in the document
        self.key_block = torch.cat([torch.full_like(pack.document, _CONTEXT), blocks])  # [S + A * block]
        self.key_document = torch.cat([pack.document, self.document])
        self.key_position = torch.cat([pack.position, self.anchor])  # of a block's rows not looked at

    def sees(self, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys, by their numbers, broadcast against each other: bool."""
        in_context = self.key_block[key] == _CONTEXT
        before = (self.key_document[key] == self.document[row]) & (self.key_position[key] < self.anchor[row])
        return (in_context & before) | (self.key_block[key] == self.block[row])

    def dense(self) -> Tensor:
        """Makes the whole mask: [A * block, S + A * block] bool."""
        row = torch.arange(len(self.block), device=self.block.device)
        key = torch.arange(len(self.key_block), device=self.block.device)
        return self.sees(row[:, None], key[None])


class Attention(Protocol):
    """Attention of a pack's blocks."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attends from q [1, heads, N, D] to keys and values [1, kv_heads, S + N, D]: [1, heads, N, D]."""


class MaskedAttention:
    """Attention with the dense mask, by torch's `scaled_dot_product_attention`: on any device."""

    def __init__(self, visibility: Visibility) -> None:
        self._mask = visibility.dense()

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, self._mask, enable_gqa=grouped)


class FlexAttention:
    """Attention by torch's `flex_attention`, which skips what nobody sees. Compiled, on a GPU, it is untested.

    Rows and keys are padded to few sizes: each new size is compiled anew.

    Args:
        attend: `flex_attention`; None compiles it.
    """

    def __init__(self, visibility: Visibility, attend: Callable[..., Any] | None = None) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        self._rows, self._keys = len(visibility.block), len(visibility.key_block)
        sizes = _rounded(self._rows), _rounded(self._keys)
        last_row, last_key = self._rows - 1, self._keys - 1

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            is_there = (row <= last_row) & (key <= last_key)
            return is_there & visibility.sees(row.clamp(max=last_row), key.clamp(max=last_key))

        self._mask = create_block_mask(sees, None, None, *sizes, device=visibility.block.device)
        self._attend = attend or _compiled()

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = F.pad(q, (0, 0, 0, _rounded(self._rows) - self._rows))
        keys, values = (F.pad(x, (0, 0, 0, _rounded(self._keys) - self._keys)) for x in (keys, values))
        out: Tensor = self._attend(q, keys, values, block_mask=self._mask, enable_gqa=q.shape[1] != keys.shape[1])
        return out[:, :, : self._rows]


def attention_of(visibility: Visibility, kind: Literal["masked", "flex"]) -> Attention:
    """Makes the attention of these blocks."""
    return FlexAttention(visibility) if kind == "flex" else MaskedAttention(visibility)


def _rounded(count: int) -> int:
    return -(-count // _SIZES) * _SIZES


@cache
def _compiled() -> Callable[..., Any]:
    """Compiles `flex_attention`, once for all packs."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
