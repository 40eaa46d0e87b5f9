"""Attention of one slot's rows on the CPU: a row's bits are a function of that row and the keys that it sees alone.

Keys go in tiles of one size, counted from position 0, the last one padded, and the tiles' sums are added in their
order; a tile of which a row sees nothing adds nothing to it, to the bit. Rows go in fours: BLAS has other kernels for
fewer. All in FP32.
"""

import math

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
    key = torch.arange(first, first + -(-(length - first) // TILE) * TILE)
    position = torch.arange(length - rows, length + -rows % (_ROWS // math.gcd(_ROWS, group)))[:, None]
    hidden = key > (position if causal else torch.full_like(position, length - 1))
    return hidden if window is None else hidden | (key <= position - window)


def attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sinks: Tensor | None) -> Tensor:
    """Attends from q [heads, n, D] to keys and values [kv_heads, L, D]: [n, heads*D] in q's type.

    Args:
        hidden: [n, L], both rounded up; see `hidden_keys`.
        sinks: [heads]; each is one more logit of its head's softmax, whose value is zero.
    """
    heads, rows, size = q.shape
    kv_heads, padded = len(keys), len(hidden)
    wide = q.float() * size**-0.5
    if padded > rows:
        wide = F.pad(wide, (0, 0, 0, padded - rows))
    scores = _scores(wide.reshape(kv_heads, -1, size), keys).view(kv_heads, heads // kv_heads, padded, -1)
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is None:
        probs = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, padded, 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    out = _weighted_sum(probs.flatten(1, 2), values).view(heads, padded, size)
    return out[:, :rows].transpose(0, 1).flatten(1).to(q.dtype)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Multiplies q [kv_heads, n, D] by keys [kv_heads, L, D], transposed: [kv_heads, n, L rounded up to tiles]."""
    whole = keys.shape[1] // TILE * TILE
    parts = [keys[:, :whole].float()] if whole else []
    if whole < keys.shape[1]:
        parts.append(_padded(keys[:, whole:]))
    scores = [torch.bmm(q, part.mT) for part in parts]
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)


def _weighted_sum(probs: Tensor, values: Tensor) -> Tensor:
    """Multiplies probs [kv_heads, n, L rounded up to tiles] by values [kv_heads, L, D], tile after tile."""
    total: Tensor | None = None
    for part, tile in zip(probs.split(TILE, dim=-1), values.split(TILE, dim=1), strict=True):
        rows = _padded(tile)
        total = torch.bmm(part, rows) if total is None else total.baddbmm_(part, rows)
    assert total is not None
    return total


def _padded(tile: Tensor) -> Tensor:
    """Pads keys or values [kv_heads, n, D] with zeros to a whole tile, in FP32."""
    return F.pad(tile.float(), (0, 0, 0, TILE - tile.shape[1])) if tile.shape[1] < TILE else tile.float()
