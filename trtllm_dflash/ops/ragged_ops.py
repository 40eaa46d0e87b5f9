"""`TorchOps` on flat rows over paged caches: the rows of many slots, each with as many as it likes, in one step.

Rows are tight, segment after segment: a segment is one slot's run of rows, of a decoding slot or a piece of a prompt.
Models see them as one slot's: x is [1, N, H]; what is per slot, `start` say, is [G], one for each of G segments. What a
row becomes depends on nothing else in the step, to the bit: see `cpu_products` and `cpu_attention`.

Drafts may be a tree: a row's K and V lie as many places behind `start` as its number is, its position is as many as its
node is deep. A chain is the tree in which both are the same: the rows up to the first that is not its predecessor's
child are one run, and only those behind it need more than a run does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Context, LatentLayer, SamplingInputs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cpu_attention import BLOCK, TILE, attend, attend_paths, hidden_from_paths, hidden_keys
from trtllm_dflash.ops.delta_states import DeltaStates, Run
from trtllm_dflash.ops.draft_tree import ranks_of
from trtllm_dflash.ops.fp8 import FP8, dequantize_cache_rows, quantize_cache_rows
from trtllm_dflash.ops.latent_attention import absorb
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor


@dataclass(frozen=True)
class Segment:
    """One slot's run of rows in a step, which the host knows."""

    slot: int
    start: int  # position of its first row
    count: int  # rows
    logits: int  # of its last rows: all of a decoding slot's, one of a piece's
    pages: Sequence[int]  # the slot's, by position
    window_pages: Sequence[int]  # of layers with a window
    parents: Sequence[int] | None = None  # the row of each row's parent, -1 for row 0's; None: the row before

    @cached_property
    def run(self) -> int:
        """The number of rows in front, each of which is the child of the one before."""
        parents = self.parents or ()
        return next((row for row, parent in enumerate(parents) if parent != row - 1), self.count)

    @cached_property
    def paths(self) -> list[list[int]]:
        """The rows from row 0 to each row behind the run, itself included."""
        paths = {row: list(range(row + 1)) for row in range(self.run)}
        for row in range(self.run, self.count):
            assert self.parents is not None
            paths[row] = [*paths[self.parents[row]], row]
        return [paths[row] for row in range(self.run, self.count)]

    def path(self, row: int) -> list[int]:
        """The rows from row 0 to this one, itself included."""
        return list(range(row + 1)) if row < self.run else self.paths[row - self.run]

    @cached_property
    def positions(self) -> list[int]:
        """The position of each row."""
        behind = (self.start + len(path) - 1 for path in self.paths)
        return [*range(self.start, self.start + self.run), *behind]

    def accepted(self, tokens: list[int], chosen: list[int]) -> list[int]:
        """Finds the rows, of those with logits, whose tokens the target chose at their parents: one path, from row 0.

        Args:
            tokens, chosen: of the rows with logits.
        """
        path, parents = [0], self.parents or range(-1, self.logits - 1)
        for row in range(1, self.logits):  # a row's children come after it
            if parents[row] == path[-1] and tokens[row] == chosen[path[-1]]:
                path.append(row)
        return path

    def imposed(self, accepted: int) -> list[int]:
        """Makes up a path of so many accepted rows, or of as many as there are; behind a run, its last one moves."""
        accepted = min(accepted, self.logits - 1)
        return [*range(accepted), accepted if accepted < self.run else self.logits - 1]

    def pages_of(self, layer: AttentionLayer) -> Sequence[int]:
        """The slot's pages in a layer's caches."""
        return self.window_pages if layer.gives_back else self.pages


@dataclass(frozen=True)
class Layout:
    """Places of a step's flat rows: whose each is, and where it stands.

    Args:
        segments: in the order of their rows.
        page_rows: rows of a page.
    """

    segments: list[Segment]
    page_rows: int

    @cached_property
    def first_rows(self) -> list[int]:
        """Each segment's first row, and the number of rows."""
        return list(accumulate((segment.count for segment in self.segments), initial=0))

    @cached_property
    def first_logits(self) -> list[int]:
        """Each segment's first logit row, and the number of logit rows."""
        return list(accumulate((segment.logits for segment in self.segments), initial=0))

    @property
    def runs(self) -> list[Run]:
        """The segments, as gated delta nets see them."""
        pairs = zip(self.segments, self.first_rows, strict=False)
        return [Run(s.slot, s.start, s.count, entry=0, first=first) for s, first in pairs]

    @cached_property
    def positions(self) -> Tensor:
        """Each row's position: [1, N]."""
        return _int32([at for s in self.segments for at in s.positions])[None]

    @cached_property
    def logit_rows(self) -> Tensor:
        """The rows that need logits: [1, R]."""
        ends = zip(self.segments, self.first_rows[1:], strict=True)
        return _int32([row for s, end in ends for row in range(end - s.logits, end)])[None]

    @cached_property
    def logit_slots(self) -> Tensor:
        """The slot of each logit row: [R] int64."""
        return torch.tensor([s.slot for s in self.segments for _ in range(s.logits)])

    def follows(self, logit_rows: list[int], decoding: int) -> Tensor:
        """Marks the rows whose tokens a reply has before the token that each of these logit rows chooses: [n, N].

        They are a decoding slot's rows on the path to its own. A prompt's tokens are no part of a reply.

        Args:
            decoding: segments that decode; they come first.
        """
        marks = torch.zeros(self.first_logits[-1], self.first_rows[-1], dtype=torch.bool)
        for segment, first, logits in zip(self.segments[:decoding], self.first_rows, self.first_logits, strict=False):
            for row in range(segment.logits):
                marks[logits + row, [first + before for before in segment.path(row)]] = True
        return marks[logit_rows]

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each segment: [G] int64."""
        return torch.tensor([s.slot for s in self.segments])

    @cached_property
    def counts(self) -> Tensor:
        """Rows of each segment: [G]."""
        return _int32([s.count for s in self.segments])

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Splits x [1, heads, N, D] by segment."""
        return x.split([segment.count for segment in self.segments], dim=2) if len(self.segments) > 1 else (x,)

    def by_segment(self, values: Tensor) -> Tensor:
        """Gathers values [1, R] of logit rows by segment: [G, most of any]; what follows its own is scratch."""
        most = max(segment.logits for segment in self.segments)
        if most * len(self.segments) == values.shape[1]:
            return values.view(-1, most)
        index = _int32(self.first_logits[:-1])[:, None] + torch.arange(most)
        return values[0][index.clamp(max=values.shape[1] - 1)]


class RaggedOps(TorchOps):
    """Computes a step of flat rows, which the host knows, on the CPU.

    Args: as `TorchOps`, but
        caches: K/V caches by name, [pages, heads, page rows, D].
        layout: of the step's rows.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None,
        layout: Layout,
        states: DeltaStates | None = None,
    ) -> None:
        super().__init__(weights, caches, communicator, states, layout.runs)
        self._layout = layout
        self._masks: dict[tuple[Any, ...], Any] = {}  # of this step's attention, the same in every layer
        self._paths: list[list[int]] = []  # each segment's accepted rows, of those with logits, once they are known

    # -- attention ---------------------------------------------------------------------------------------------------

    def self_attention(self, layer: AttentionLayer, qkv: Tensor, start: Tensor) -> Tensor:
        parts = (self._layout.split(x) for x in self._split_qkv(layer, qkv, self._layout.positions))
        out = []
        for segment, q, k, v in zip(self._layout.segments, *parts, strict=True):
            self._append(layer, segment, segment.start, k, v)
            out.append(self._attend(layer, segment, q[:, :, : segment.run], segment.start + segment.run, causal=True))
            if segment.run < segment.count:
                out.append(self._attend_paths(layer, segment, q[:, :, segment.run :]))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def latent_attention(self, layer: LatentLayer, q: Tensor, kv: Tensor, start: Tensor) -> Tensor:
        """Attends as `TorchOps` does, absorbed whatever the number of rows.

        A prompt's rows would cost less otherwise, and have other digits in their last places: then a sequence that is
        computed again, or shares what another one generated, might not have the same text.
        """
        plain, rotated, rows = self._latent_rows(layer, q, kv, self._layout.positions)
        queries = absorb(layer, self.weights[layer.prefix + "self_attn.latent_up"], plain, rotated)
        name, out = layer.prefix + "latent", []
        for segment, own, new in zip(
            self._layout.segments, self._layout.split(queries), self._layout.split(rows), strict=True
        ):
            self._write_rows(name, segment.pages, segment.start, new[0])
            length = segment.start + segment.count
            keys = self._rows(name, segment.pages, length, q.dtype)
            out.append(self._attend_rows(own[0], keys, keys[..., : layer.rank], length, True, scale=layer.scale))
        return self._risen(layer, torch.cat(out)[None])

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        k = self.split_heads(kv, 2 * index * layer.kv_heads, layer.kv_heads, layer.head_size)
        v = self.split_heads(kv, (2 * index + 1) * layer.kv_heads, layer.kv_heads, layer.head_size)
        return Context((self.rope(layer.rope, self._norm_heads(layer, "k", k), self._final.positions), v), index)

    def keep_context(self, layer: AttentionLayer, context: Context[Tensor], start: Tensor) -> None:
        parts = (self._final.split(x) for x in context.tensors)
        for segment, k, v in zip(self._final.segments, *parts, strict=True):
            self._append(layer, segment, segment.start, k, v)

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        block = self._split_qkv(layer, qkv, self.positions(self.block_start(start, committed), qkv))
        blocks = (x.split(1) for x in block)
        contexts = (self._final.split(x) for x in context.tensors)
        out = []
        for segment, q, k, v, *rows in zip(self._final.segments, *blocks, *contexts, strict=True):
            before = segment.start + segment.count
            self._append(layer, segment, segment.start, *rows)
            self._append(layer, segment, before, k, v)
            out.append(self._attend(layer, segment, q, before + qkv.shape[1], layer.causal_block))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _append(self, layer: AttentionLayer, segment: Segment, start: int, k: Tensor, v: Tensor) -> None:
        """Writes k and v [1, heads, n, D] into a slot's pages, from position start on."""
        for kind, rows in (("key", k[0]), ("value", v[0])):
            self._write_rows(layer.prefix + kind, segment.pages_of(layer), start, rows)

    def _write_rows(self, name: str, pages: Sequence[int], start: int, rows: Tensor) -> None:
        """Writes rows [heads, n, D] into a cache's pages, from position start on."""
        size, count, cache = self._layout.page_rows, rows.shape[1], self.caches[name]
        if cache.dtype == FP8:
            # Written as bytes: not every one of torch's kernels knows FP8.
            rows, cache = (
                quantize_cache_rows(rows, self.weights[name + ".scale"]).view(torch.uint8),
                cache.view(torch.uint8),
            )
        at = start
        while at < start + count:
            page, first = divmod(at, size)
            end = min(size, first + start + count - at)
            part = rows if end - first == count else rows[:, at - start : at - start + end - first]
            cache[pages[page], :, first:end] = part
            at += end - first

    def _attend(self, layer: AttentionLayer, segment: Segment, q: Tensor, length: int, causal: bool) -> Tensor:
        """Attends from q [1, heads, n, D], a slot's last rows, to its first `length` rows: [1, n, heads*D]."""
        pages = segment.pages_of(layer)
        keys, values = (self._rows(layer.prefix + kind, pages, length, q.dtype) for kind in ("key", "value"))
        sinks = None if layer.sinks is None else self.weights[layer.sinks]
        return self._attend_rows(q[0], keys, values, length, causal, layer.window, sinks, layer.scale)[None]

    def _attend_rows(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        length: int,
        causal: bool,
        window: int | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attends from q [heads, n, D], a slot's last rows, to its `length` rows of [kv_heads, L, D]: [n, heads*D]."""
        group, rows = q.shape[0] // keys.shape[0], q.shape[1]
        out: list[Tensor] = []
        end = length - rows if causal else length
        for part in q.split(BLOCK, dim=1) if causal and rows > BLOCK else (q,):
            end += part.shape[1] if causal else 0
            # Nobody sees the tiles before the window of the first row.
            first = 0 if window is None else max(0, end - part.shape[1] + 1 - window) // TILE * TILE
            hidden = self._hidden(first, end, part.shape[1], group, causal, window)
            seen = keys[:, first:] if first else keys
            out.append(attend(part, seen, values[:, first:end], hidden, sinks, scale))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend_paths(self, layer: AttentionLayer, segment: Segment, q: Tensor) -> Tensor:
        """Attends from q [1, heads, n, D], the rows behind a tree's run, each along its own path: [1, n, heads*D]."""
        window, start = layer.window, segment.start
        first = 0 if window is None else min(start, max(0, start + 2 - window)) // TILE * TILE
        pages, length = segment.pages_of(layer), start + segment.count
        keys, values = (self._rows(layer.prefix + kind, pages, length, q.dtype) for kind in ("key", "value"))
        key = "paths", segment.slot, layer.heads // layer.kv_heads, window
        if key not in self._masks:
            hidden = hidden_from_paths(first, segment.positions[segment.run :], key[2], window)
            self._masks[key] = _path_rows(segment, first), hidden
        paths, hidden = self._masks[key]
        sinks = None if layer.sinks is None else self.weights[layer.sinks]
        seen = keys[:, first:], values[:, first:], start - first, paths, hidden
        return attend_paths(q[0], *seen, sinks, layer.scale)[None]

    def _hidden(self, *key: Any) -> Tensor:
        """Makes the mask of `hidden_keys`, once for all layers."""
        hidden: Tensor | None = self._masks.get(key)
        if hidden is None:
            hidden = self._masks[key] = hidden_keys(*key)
        return hidden

    def _rows(self, name: str, pages: Sequence[int], length: int, dtype: torch.dtype) -> Tensor:
        """Takes a slot's first `length` rows of a cache: [heads, L, D]; scratch behind them, and before a window."""
        cache = self.caches[name]
        if length <= self._layout.page_rows:
            rows = cache[pages[0]]
        else:
            rows = torch.cat([cache[page] for page in pages[: -(-length // self._layout.page_rows)]], dim=1)
        if cache.dtype != FP8:
            return rows
        return dequantize_cache_rows(rows[:, :length], self.weights[name + ".scale"], dtype)

    # -- choosing tokens ---------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, sampling: SamplingInputs[Tensor]) -> Tensor:
        """Draws each row's id: logits [1, R, V/tp] -> [1, R]; parameters are a row's, [R], and uniform is [R, 1]."""
        return super().sample(logits.transpose(0, 1), sampling).transpose(0, 1)

    def accept(
        self, token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        tokens, chosen = token_ids[0].tolist(), target_ids[0].tolist()
        layout = self._layout
        spans = zip(layout.segments, layout.first_rows[1:], layout.first_logits, strict=False)
        paths = [s.accepted(tokens[end - s.logits : end], chosen[first : first + s.logits]) for s, end, first in spans]
        return self._verdict(paths, chosen)

    def acceptance(
        self, accepted: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        """Makes the outcome of so many accepted drafts [G]; of fewer where a segment has not so many."""
        paths = [s.imposed(count) for s, count in zip(self._layout.segments, accepted.tolist(), strict=True)]
        return self._verdict(paths, target_ids[0].tolist())

    def _verdict(self, paths: list[list[int]], chosen: list[int]) -> Acceptance[Tensor]:
        """Makes the outcome of each segment's accepted rows, of those with logits, and the choices at logit rows."""
        layout = self._layout
        numbers = [
            (len(path) - 1, segment.count - segment.logits + len(path), chosen[first + path[-1]])
            for segment, path, first in zip(layout.segments, paths, layout.first_logits, strict=False)
        ]
        accepted, committed, bonus = _int32(list(zip(*numbers, strict=True))).unbind()
        most = max(map(len, paths))
        is_run = all(path[-1] == len(path) - 1 for path in paths)
        path = None if is_run else _int32([(*path, *[0] * (most - len(path))) for path in paths])
        self._paths = paths
        return Acceptance(accepted, committed, bonus, path=path)

    @property
    def bonus_rows(self) -> list[int]:
        """The logit row that chose each segment's bonus token, once it is known what was accepted."""
        return [first + path[-1] for first, path in zip(self._layout.first_logits, self._paths, strict=False)]

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks, from 1, of each segment's accepted drafts where they are a tree's, once it is known which are."""
        both = zip(self._layout.segments, self._paths, strict=True)
        return [[] if segment.parents is None else ranks_of(segment.parents, path) for segment, path in both]

    @cached_property
    def _final(self) -> Layout:
        """Places of the rows that are final: those of prompts, and accepted ones."""
        layout = self._layout
        counts = [s.count - s.logits + len(path) for s, path in zip(layout.segments, self._paths, strict=True)]
        final = [replace(s, count=count, parents=None) for s, count in zip(layout.segments, counts, strict=True)]
        return Layout(final, layout.page_rows)

    # -- trees of drafts ---------------------------------------------------------------------------------------------

    def first_choices(self, x: Tensor, verdict: Acceptance[Tensor]) -> Tensor:
        if verdict.path is None:
            return x
        layout = self._layout
        rows = [
            first + row
            for segment, path, first in zip(layout.segments, self._paths, layout.first_logits, strict=False)
            for row in (*path, *[0] * (segment.logits - len(path)))
        ]
        return x[:, rows]

    def final_rows(self, taps: Sequence[Tensor], verdict: Acceptance[Tensor]) -> Tensor:
        rows = self._final_rows
        return self.concat([tap[:, rows] if len(rows) < tap.shape[1] else tap for tap in taps])

    @cached_property
    def _final_rows(self) -> Tensor:
        """The rows whose tokens are final: [n] int64."""
        layout = self._layout
        rows: list[int] = []
        for segment, path, first in zip(layout.segments, self._paths, layout.first_rows, strict=False):
            prompt = segment.count - segment.logits
            rows += [*range(first, first + prompt), *(first + prompt + row for row in path)]
        return torch.tensor(rows)

    def move_kv(self, layers: Sequence[AttentionLayer], start: Tensor, verdict: Acceptance[Tensor]) -> None:
        moves: dict[bool, tuple[Tensor, ...]] = {}  # by whether layers have a window, and so perhaps other pages
        for layer in layers:
            windowed = layer.gives_back
            if windowed not in moves:
                moves[windowed] = self._moves(layer)
            page, row, new_page, new_row = moves[windowed]
            for kind in ("key", "value"):
                cache = self.caches[layer.prefix + kind]
                cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
                cache[new_page, :, new_row] = cache[page, :, row]  # all are read, then all written

    def _moves(self, layer: AttentionLayer) -> tuple[Tensor, ...]:
        """Finds the accepted rows that are not at their positions: pages and rows of theirs, and where they belong."""
        size = self._layout.page_rows
        places = []
        for segment, path in zip(self._layout.segments, self._paths, strict=True):
            pages = segment.pages_of(layer)
            for depth, row in enumerate(path):
                if row != depth:
                    at, to = segment.start + row, segment.start + depth
                    places.append((pages[at // size], at % size, pages[to // size], to % size))
        return torch.tensor(places).unbind(dim=1)

    def slots(self, start: Tensor) -> Tensor:
        return self._layout.slots


def _path_rows(segment: Segment, first: int) -> Tensor:
    """Finds the places behind position `first` of each path's rows: [n, depth]; then row 0's, to be hidden."""
    longest = max(map(len, segment.paths))
    return torch.tensor([[*path, *[0] * (longest - len(path))] for path in segment.paths]) + (segment.start - first)


def _int32(values: list[int] | list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
