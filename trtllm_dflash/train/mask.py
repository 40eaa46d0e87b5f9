"""Attention over a pack: which keys a row sees, and two ways to compute it.

In the target's pass, a token sees those of its document up to itself. In the drafter's, the keys are the S context rows
of a pack, then the rows of all A blocks; a block's rows see the context rows strictly before their anchor, of the same
document, and all rows of their own block; never another block's.

What rows next to each other see are few runs of keys next to each other, which the host knows: both ways skip the rest.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trtllm_dflash.train.documents import IntArray, Pack, moved

Tensor = torch.Tensor

#: Keys first..last-1.
Run = tuple[int, int]

#: Whether rows see keys, by their numbers, broadcast against each other: bool.
Rule = Callable[[Tensor, Tensor], Tensor]

_CHUNK = 1024  # rows that `MaskedAttention` takes at once, about
#: Kernels for it. cuDNN's, which torch would take on a GPU, plans for each number of keys anew, which takes seconds.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_TILE = 128  # rows, and keys, of a tile of `FlexAttention`


class Visibility(ABC):
    """The rule of which rows see which keys.

    Attributes:
        rows, keys: how many there are.
        step: rows that belong together: what sees the same keys is not divided.
    """

    rows: int
    keys: int
    step = 1

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """Tells whether rows see keys; holds tensors and numbers alone, for what is compiled is compiled for these."""

    @abstractmethod
    def runs(self, first: int, last: int) -> list[Run]:
        """Lists runs of keys, in order, outside of which the rows first..last-1 see none."""

    def dense(self) -> Tensor:
        """Makes the whole mask: [rows, keys] bool."""
        row, key = (torch.arange(count, device=self.device) for count in (self.rows, self.keys))
        return self.rule(row[:, None], key[None])

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that masks are made on."""


class CausalVisibility(Visibility):
    """Tokens of a pack that see their document up to themselves.

    Args:
        window: keys that a row sees, itself included; None: all.
        tokens: as many as to pretend to; None: as there are. Padding sees itself alone.
    """

    def __init__(self, pack: Pack, window: int | None = None, tokens: int | None = None) -> None:
        self._pack, self._window = pack, window
        self.rows = self.keys = tokens or len(pack.token_ids)
        here = torch.arange(self.rows, dtype=torch.int32, device=self.device)
        first = here - F.pad(pack.position, (0, self.rows - len(pack.token_ids)))
        self._first = (first if window is None else first.maximum(here - window + 1)).int()  # [rows]: keys from here on

    @property
    def device(self) -> torch.device:
        return self._pack.position.device

    @property
    def rule(self) -> Rule:
        first = self._first
        return lambda row, key: (key >= first[row]) & (key <= row)

    def runs(self, first: int, last: int) -> list[Run]:
        begin = int(self._pack.begin(np.asarray(first)))
        return [(begin if self._window is None else max(begin, first - self._window + 1), last)]


class BlockVisibility(Visibility):
    """Rows of blocks behind anchors of a pack.

    Args:
        pack: whose context rows are the first keys.
        anchors: their places [A], in order, on the host.
        block: rows of a block.
        tokens, blocks: as many context rows and blocks as to pretend to; None: as there are. Padding sees itself alone.
    """

    def __init__(
        self, pack: Pack, anchors: Tensor, block: int, tokens: int | None = None, blocks: int | None = None
    ) -> None:
        self.step = block
        self.tokens = len(pack.token_ids) if tokens is None else tokens
        count = len(anchors) if blocks is None else blocks
        self.rows, self.keys = count * block, self.tokens + count * block
        self._there = len(anchors)
        self._bounds = np.zeros((2, count), np.int32)  # the context rows that each block sees: from here, up to there
        self._bounds[:, : self._there] = pack.begin(anchors.numpy()), anchors.numpy()
        self.bounds = moved(torch.from_numpy(self._bounds.repeat(block, axis=1)), pack.position.device)  # [2, rows]

    @property
    def device(self) -> torch.device:
        return self.bounds.device

    @property
    def rule(self) -> Rule:
        (begin, end), tokens, block = self.bounds, self.tokens, self.step

        def sees(row: Tensor, key: Tensor) -> Tensor:
            own = tokens + row // block * block
            seen: Tensor = ((key >= begin[row]) & (key < end[row])) | ((key >= own) & (key < own + block))
            return seen

        return sees

    def runs(self, first: int, last: int) -> list[Run]:
        begin, end = first // self.step, -(-last // self.step)
        own = self.tokens + begin * self.step, self.tokens + end * self.step
        there = self._bounds[:, begin : min(end, self._there)]
        context = [(int(there[0, 0]), int(there[1, -1]))] if there.size else []
        return [run for run in (*context, own) if run[0] < run[1]]


class Attention(Protocol):
    """Attention of the rows of a `Visibility`."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attends from q [1, heads, rows, D] to keys and values [1, kv_heads, keys, D]: [1, heads, rows, D]."""


class MaskedAttention:
    """Attention with dense masks, some rows at a time, by torch's `scaled_dot_product_attention`: on any device."""

    def __init__(self, visibility: Visibility) -> None:
        self._visibility = visibility
        size = max(1, _CHUNK // visibility.step) * visibility.step
        self._chunks = [(first, min(first + size, visibility.rows)) for first in range(0, visibility.rows, size)]

    @cached_property
    def masks(self) -> list[tuple[slice, list[Run], Tensor]]:
        """The rows of each chunk, the keys that they may see, and the mask [rows, keys] of these: bool."""
        see, found = self._visibility, []
        for first, last in self._chunks:
            runs = see.runs(first, last)
            key = torch.cat([torch.arange(*run, device=see.device) for run in runs])
            row = torch.arange(first, last, device=see.device)
            found.append((slice(first, last), runs, see.rule(row[:, None], key[None])))
        return found

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends as `Attention` does.

        Args:
            scale: of scores; None: 1 / sqrt(D).
            sinks: [heads]: one more logit of each head's softmax, whose value is zero.
        """
        shared = q.shape[1] // keys.shape[1]
        if shared > 1:  # by hand: on a GPU, no fast kernel has both a mask and heads that share keys
            keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
        parts = []
        attend = F.scaled_dot_product_attention if sinks is None else partial(_with_sinks, sinks)
        with sdpa_kernel(_KERNELS):
            for rows, runs, mask in self.masks:
                k, v = (chosen(x, runs) for x in (keys, values))
                parts.append(attend(q[:, :, rows], k, v, mask, scale=scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class FlexAttention:
    """Attention by torch's `flex_attention`, which skips the tiles of keys that no row of a tile sees.

    Rows and keys are padded to one size, for which it is compiled once.

    Args:
        visibility: padded, its rows to whole tiles.
        rows: that there are.
        keys: how many there are of each part of the keys, and how many with padding.
        attend: `flex_attention`; None compiles it.

    Attributes:
        tiles: the tiles that are looked at, and the mask inside them.
    """

    def __init__(
        self, visibility: Visibility, rows: int, keys: list[tuple[int, int]], attend: Callable[..., Any] | None = None
    ) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        self._rows, self._more = rows, visibility.rows - rows
        self._parts, self._padding = [there for there, _ in keys], [padded - there for there, padded in keys]
        counts, tiles = (moved(torch.from_numpy(x), visibility.device) for x in _tiles(visibility))
        rule = visibility.rule

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return rule(row, key)

        self.tiles = BlockMask.from_kv_blocks(
            counts[None, None],
            tiles[None, None],
            BLOCK_SIZE=_TILE,
            mask_mod=sees,
            seq_lengths=(visibility.rows, visibility.keys),
        )
        self._attend = attend or _compiled()

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        grouped = q.shape[1] != keys.shape[1]
        keys, values = self._padded(keys), self._padded(values)
        out: Tensor = self._attend(_longer(q, self._more), keys, values, block_mask=self.tiles, enable_gqa=grouped)
        return out[:, :, : self._rows]

    def _padded(self, x: Tensor) -> Tensor:
        parts = [_longer(part, more) for part, more in zip(x.split(self._parts, dim=2), self._padding, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _with_sinks(
    sinks: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Attends with one more logit a head, the softmax in FP32."""
    scores = (q @ keys.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probs = torch.cat([scores.masked_fill(~mask, -torch.inf), sink], dim=-1).softmax(dim=-1)[..., :-1]
    return probs.to(values.dtype) @ values


@dataclass(frozen=True)
class Masked:
    """Makes attention with dense masks: the target's over a pack, and that of blocks."""

    def causal(self, pack: Pack, window: int | None) -> Attention:
        """Makes the attention of tokens over their documents."""
        return MaskedAttention(CausalVisibility(pack, window))

    def blocks(self, pack: Pack, anchors: Tensor, block: int) -> Attention:
        """Makes the attention of blocks behind anchors at places [A]."""
        return MaskedAttention(BlockVisibility(pack, anchors, block))


MASKED = Masked()


@dataclass(frozen=True)
class Flexible(Masked):
    """Makes attention by `flex_attention`.

    Attributes:
        tokens, anchors: of a pack, at most: what all packs are padded to.
        attend: see `FlexAttention`.
    """

    tokens: int
    anchors: int
    attend: Callable[..., Any] | None = None

    def causal(self, pack: Pack, window: int | None) -> Attention:
        tokens, there = _rounded(self.tokens, _TILE), len(pack.token_ids)
        return FlexAttention(CausalVisibility(pack, window, tokens), there, [(there, tokens)], self.attend)

    def blocks(self, pack: Pack, anchors: Tensor, block: int) -> Attention:
        whole = _TILE // math.gcd(_TILE, block)  # blocks of whole tiles
        tokens, count = _rounded(self.tokens, _TILE), _rounded(self.anchors, whole)
        visibility = BlockVisibility(pack, anchors, block, tokens, count)
        rows = len(anchors) * block
        keys = [(len(pack.token_ids), tokens), (rows, count * block)]
        return FlexAttention(visibility, rows, keys, self.attend)


def chosen(x: Tensor, runs: list[Run]) -> Tensor:
    """Takes runs of keys out of x [1, heads, keys, D]."""
    parts = [x[:, :, first:last] for first, last in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _tiles(visibility: Visibility) -> tuple[IntArray, IntArray]:
    """Lists the tiles of keys that each tile of rows may see: how many [n], and which [n, tiles of keys]; int32."""
    count, keys = visibility.rows // _TILE, -(-visibility.keys // _TILE)
    runs = [visibility.runs(tile * _TILE, (tile + 1) * _TILE) for tile in range(count)]
    # Of each tile two runs, the first perhaps of none.
    bounds = np.array([(each if len(each) == 2 else [(0, 0), *each]) for each in runs])  # [n, 2, 2]
    first, last = bounds[:, :, 0] // _TILE, -(-bounds[:, :, 1] // _TILE)
    seen = last - first
    place = np.arange(keys)
    own = place >= seen[:, :1]
    tiles = np.where(own, first[:, 1:] + place - seen[:, :1], first[:, :1] + place)
    counts = seen.sum(axis=1)
    return counts.astype(np.int32), np.where(place < counts[:, None], tiles, 0).astype(np.int32)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _longer(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows)) if rows else x


@cache
def _compiled() -> Callable[..., Any]:
    """Compiles `flex_attention`, once for all packs."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
