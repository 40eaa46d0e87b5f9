"""Attention of one slot's rows on the CPU: a row's bits are a function of that row and the keys that it sees alone.

Keys go in tiles of one size, counted from position 0, the last one padded, and the tiles' sums are added in their
order; a tile of which a row sees nothing adds nothing to it, to the bit. Rows go in fours: BLAS has other kernels for
fewer. All in FP32. So it is for a row of a tree of drafts too: it sees the keys of its own path, each in the place of
its position, wherever they lie.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

#: Keys of a tile.
TILE = 128

#: Rows of a key head, those of all its query heads, come in multiples of these.
_ROWS = 4

#: Rows that are looked at together: so many times as many scores are in memory as there are keys and heads.
BLOCK = 64


def hidden_keys(first: int, length: int, rows: int, group: int, causal: bool, window: int | None) -> Tensor:
    """Makes the mask [rows, keys], both rounded up, true where a row does not see a key.

    Args:
        first: position of the first key, where a tile begins.
        rows: the last of `length`.
        group: query heads of a key head.
    """
    position = torch.arange(length - rows, length + _spare_rows(rows, group))[:, None]
    return _hidden(first, length, position, position if causal else torch.full_like(position, length - 1), window)


def hidden_from_paths(first: int, positions: list[int], group: int, window: int | None) -> Tensor:
    """Makes the mask of `attend_paths` [rows, keys], both rounded up; `first` and `group` as in `hidden_keys`.

    Args:
        positions: of the rows.
    """
    position = torch.tensor(positions + positions[-1:] * _spare_rows(len(positions), group))[:, None]
    return _hidden(first, max(positions) + 1, position, position, window)


def _hidden(first: int, length: int, position: Tensor, last: Tensor, window: int | None) -> Tensor:
    key = torch.arange(first, first + -(-(length - first) // TILE) * TILE)
    hidden = key > last
    return hidden if window is None else hidden | (key <= position - window)


def _spare_rows(rows: int, group: int) -> int:
    """Counts the rows that are added, so that those of a key head are a multiple of four."""
    return -rows % (_ROWS // math.gcd(_ROWS, group))


def attend(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sinks: Tensor | None, scale: float | None = None
) -> Tensor:
    """Attends from q [heads, n, D] to keys and values [kv_heads, L, D]: [n, heads*D] in q's type.

    Args:
        keys: may have more rows than those L, whatever they hold.
        hidden: [n, L], both rounded up; see `hidden_keys`.
        sinks: [heads]; each is one more logit of its head's softmax, whose value is zero.
        scale: of scores; None: 1 / sqrt(D).
    """
    heads, rows, size = q.shape
    kv_heads, (padded, length) = keys.shape[0], hidden.shape
    wide = q.float() * (size**-0.5 if scale is None else scale)
    if rows == 1:
        wide = wide.expand(-1, padded, -1)
    elif padded > rows:
        wide = torch.cat([wide, wide[:, -1:].expand(-1, padded - rows, -1)], dim=1)
    scores = _scores(wide.reshape(kv_heads, -1, size), keys, length).view(kv_heads, -1, padded, length)
    probs = _probabilities(scores, hidden, sinks).view(kv_heads, -1, length)
    out = _weighted_sum(probs, values).view(heads, padded, -1)
    return out[:, :rows].transpose(0, 1).flatten(1).to(q.dtype)


def attend_paths(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    paths: Tensor,
    hidden: Tensor,
    sinks: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attends as `attend` does, from rows of a tree: each sees the first `start` keys, and those of its own path.

    Args:
        paths: [n, depth] int64: of each row, the places in keys of its path, by position; then any, which are hidden.
        hidden: [n, start + depth], both rounded up; see `hidden_from_paths`.
    """
    heads, rows, size = q.shape
    kv_heads, padded = len(keys), len(hidden)
    shape, shared = (kv_heads, heads // kv_heads, padded), start // TILE * TILE
    wide = q.float() * (size**-0.5 if scale is None else scale)
    wide = F.pad(wide, (0, 0, 0, padded - rows)).view(*shape, size)
    own_keys, own_values = (_own_tiles(x, shared, start, paths) for x in (keys, values))
    scores = _together(_scores(_apart(wide, rows), own_keys, own_keys.shape[1]), *shape)
    if shared:
        front = _scores(wide.flatten(1, 2), keys, shared).view(*shape, shared)
        scores = torch.cat([front, scores], dim=-1)
    probs = _probabilities(scores, hidden, sinks)
    total = None
    if shared:
        total = _weighted_sum(probs[..., :shared].flatten(1, 2), values[:, :shared]).view(*shape, size)
        total = _apart(total, rows)
    out = _together(_weighted_sum(_apart(probs[..., shared:], rows), own_values, total), *shape)
    return out.flatten(0, 1)[:, :rows].transpose(0, 1).flatten(1).to(q.dtype)


def _own_tiles(x: Tensor, shared: int, start: int, paths: Tensor) -> Tensor:
    """Joins the keys or values x [kv_heads, L, D] from `shared` on that each path sees: [kv_heads * n, tiles, D]."""
    rows, depth = paths.shape
    spare = -(start + depth) % TILE
    parts = [x[:, None, shared:start].expand(-1, rows, -1, -1), x[:, paths]]
    parts.append(x.new_zeros(()).expand(len(x), rows, spare, x.shape[2]))
    return torch.cat(parts, dim=2).flatten(0, 1)


def _apart(x: Tensor, rows: int) -> Tensor:
    """Makes a head of each key head and row: x [kv_heads, group, n rounded up, X] -> [kv_heads * n, fours, X]."""
    apart = x[:, :, :rows].transpose(1, 2).flatten(0, 1)
    return F.pad(apart, (0, 0, 0, -apart.shape[1] % _ROWS))


def _together(x: Tensor, kv_heads: int, group: int, padded: int) -> Tensor:
    """Undoes `_apart`: x [kv_heads * n, fours, X] -> [kv_heads, group, n rounded up, X]."""
    together = x[:, :group].unflatten(0, (kv_heads, -1)).transpose(1, 2)
    return F.pad(together, (0, 0, 0, padded - together.shape[2]))


def _probabilities(scores: Tensor, hidden: Tensor, sinks: Tensor | None) -> Tensor:
    """Computes the softmax of scores [kv_heads, group, n, L], which it overwrites, with sinks [heads] if any."""
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float().view(len(scores), -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _scores(q: Tensor, keys: Tensor, length: int) -> Tensor:
    """Multiplies q [kv_heads, n, D] by the first keys [kv_heads, L, D], transposed: [kv_heads, n, length], in tiles."""
    if keys.shape[1] >= length:
        return torch.bmm(q, keys[:, :length].float().mT)
    whole = keys.shape[1] // TILE * TILE
    parts = [keys[:, :whole].float()] if whole else []
    scores = [torch.bmm(q, part.mT) for part in (*parts, _padded(keys[:, whole:]))]
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)


def _weighted_sum(probs: Tensor, values: Tensor, total: Tensor | None = None) -> Tensor:
    """Multiplies probs [kv_heads, n, L rounded up to tiles] by values [kv_heads, L, D], tile after tile.

    `total`: the sum of the tiles before, which is overwritten.
    """
    length = probs.shape[-1]
    for first in range(0, length, TILE):
        part = probs if length == TILE else probs[..., first : first + TILE]
        rows = _padded(values[:, first : first + TILE])
        total = torch.bmm(part, rows) if total is None else total.baddbmm_(part, rows)
    assert total is not None
    return total


def _padded(tile: Tensor) -> Tensor:
    """Pads keys or values [kv_heads, n, D] with zeros to a whole tile, in FP32."""
    heads, count, size = tile.shape
    return torch.cat([tile.float(), _zeros(heads, size)[:, count:]], dim=1) if count < TILE else tile.float()


@cache
def _zeros(heads: int, size: int) -> Tensor:
    """Zeros [heads, TILE, size], which nobody writes."""
    return torch.zeros(heads, TILE, size)
