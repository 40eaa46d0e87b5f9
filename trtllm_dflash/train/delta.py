"""Gated delta nets over a pack: every document from an empty state, many rows at a time.

Inside a chunk of rows, what each row writes is the solution of a triangular system (arXiv 2412.06464, section 3.3), so
that a chunk is a few products instead of a walk; chunks of different documents are computed together. Serving goes row
by row (`ops/delta_rule.py`): the numbers are the same but for the order of sums.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.delta_rule import DeltaRows, delta_rows, gated_output
from trtllm_dflash.train.documents import IntArray, moved

Tensor = torch.Tensor

_CHUNK = 64  # rows
_LEAST = 1e-30  # a decay that is no more than this forgets everything


class DocumentChunks:
    """Places of the rows of a pack's documents in n chunks of c rows, the same for all of a target's nets.

    Args:
        lengths: rows of each document, in their order: S in all.
        before: rows of zeros that the convolution of each document begins behind.
    """

    def __init__(self, lengths: Sequence[int], before: int, device: torch.device) -> None:
        places, counts = _places(lengths)
        first = np.cumsum(counts) - counts  # chunk of each document
        documents = np.argsort(-counts, kind="stable")  # longest first: those that go on are in front
        live = [documents[counts[documents] > number] for number in range(int(counts.max()))]
        number = np.arange(len(lengths)).repeat(lengths)
        self.documents, self.before = len(lengths), before

        def there(x: IntArray) -> Tensor:
            return moved(torch.from_numpy(x), device)

        self.spread = there(np.arange(len(number)) + before * number)  # [S]: each row, with zeros between documents
        self.rows = there(places)  # [n, c]: of each chunk; S where its document has none
        self.own = there((places < len(number)).reshape(-1).nonzero()[0])  # [S]: where each row stands in the chunks
        self.steps = [there(first[some] + step) for step, some in enumerate(live)]  # chunks that are computed together


def gated_delta_over_documents(
    layer: DeltaLayer, weights: Mapping[str, Tensor], chunks: DocumentChunks, x: Tensor, gates: Tensor
) -> Tensor:
    """Computes `Ops.gated_delta` of a pack.

    Args:
        x: [1, S, C + Hv*Dv].
        gates: [1, S, 2 Hv].
    """
    rows = _document_rows(layer, weights, chunks, x[0, :, : layer.channels], gates[0])
    # A drafter is evaluated under autocast, which would round these products to BF16.
    with torch.autocast(x.device.type, enabled=False):
        out = _Net(layer, chunks, rows).read()
    return gated_output(layer, weights, out, x[0, :, layer.channels :])[None].to(x.dtype)


def _document_rows(
    layer: DeltaLayer, weights: Mapping[str, Tensor], chunks: DocumentChunks, x: Tensor, gates: Tensor
) -> DeltaRows:
    """Computes the numbers of all rows, the convolution of each document behind rows of zeros."""
    before, at = chunks.before, chunks.spread
    inputs = x.new_zeros(len(x) + before * chunks.documents, x.shape[1])
    inputs[at + before] = x
    spread = gates.new_zeros(len(inputs) - before, gates.shape[1])
    spread[at] = gates
    rows = delta_rows(layer, weights, inputs, spread)
    return DeltaRows(*(part[at] for part in rows))


class _Net:
    """A net's rows in chunks, each of one document; those that a document lacks do nothing."""

    def __init__(self, layer: DeltaLayer, chunks: DocumentChunks, rows: DeltaRows) -> None:
        self._chunks, at = chunks, chunks.rows
        group = layer.value_heads // layer.key_heads
        # [n, Hv, c, ...]
        self._queries, self._keys = (self._cut(part, at).repeat_interleave(group, 1) for part in rows[:2])
        self._values, shares, decays = (self._cut(part, at, pad) for part, pad in zip(rows[2:], (0, 0, 1), strict=True))
        logs = decays.clamp(min=_LEAST).double().log().cumsum(dim=2)
        self._left = logs.exp().float()[..., None]  # of the state before the chunk, at each row
        self._between = (logs[..., :, None] - logs[..., None, :]).tril().exp().float().tril()  # [n, Hv, c, c]
        self._to_end = (logs[..., -1:] - logs).exp().float()[..., None]
        seen = self._between * (self._keys @ self._keys.mT) * shares[..., None]
        wanted = torch.cat([self._values, self._keys * self._left], dim=-1) * shares[..., None]
        # What rows write is `plain` - `behind` @ state.
        solved = torch.linalg.solve_triangular(seen.tril(-1), wanted, upper=False, unitriangular=True)
        self._plain, self._behind = solved.split([layer.value_size, layer.key_size], dim=-1)

    @staticmethod
    def _cut(part: Tensor, at: Tensor, pad: float = 0.0) -> Tensor:
        """Cuts numbers of rows [S, heads, ...] into chunks [n, heads, c, ...]."""
        padded = torch.cat([part, part.new_full((1, *part.shape[1:]), pad)])
        return padded[at].transpose(1, 2)

    def read(self) -> Tensor:
        """Takes each document's state through its chunks; returns what rows read out of it: [S, Hv, Dv]."""
        seen = self._between * (self._queries @ self._keys.mT)
        queries, keys = self._queries * self._left, self._keys * self._to_end
        n, heads, size, _ = self._plain.shape
        out = torch.empty_like(self._plain)
        state = self._plain.new_zeros(self._chunks.documents, heads, self._keys.shape[-1], self._plain.shape[-1])
        for at in self._chunks.steps:
            state = state[: len(at)]
            writes = self._plain[at] - self._behind[at] @ state
            out[at] = queries[at] @ state + seen[at] @ writes
            state = state * self._left[at, :, -1:] + keys[at].mT @ writes
        return out.transpose(1, 2).reshape(n * size, heads, -1)[self._chunks.own]


def _places(lengths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Lists the rows of each chunk [n, c], S where there is none, and counts each document's chunks."""
    counts = np.array([-(-length // _CHUNK) for length in lengths])
    total = sum(lengths)
    places, first = [], 0
    for length, count in zip(lengths, counts, strict=True):
        own = np.arange(count * _CHUNK)
        places.append(np.where(own < length, first + own, total))
        first += length
    return np.concatenate(places).reshape(-1, _CHUNK), counts
