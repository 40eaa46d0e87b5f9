"""Rows of a TensorRT step whose drafts are trees: where each row stands, and which rows it sees.

A plan has one network for prompts and for trees, so what a call's rows are comes as data: `PARENTS` [B, R], the logit
row of each logit row's parent. A decoding step has a logit row for each of its rows: those are a tree, or a chain,
which is one. A piece of a prompt has one logit row, which is a tree of nothing; all its rows are a run.

- Row r of a tree lies r rows behind `start` in the caches, and stands as many positions behind it as it is deep.
- It sees what is before `start`, and of the tree its ancestors and itself. A matrix of 0 and 1 says which: each row's
  parent and itself, squared until the deepest node has met the root.
- The attention layer has no causal mask beside another, so one mask says it all, of every row and key, once for all
  layers: of a prompt too. Its lengths still bound the keys that are read.
"""

from collections.abc import Mapping

import torch

from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers

#: The input that says which rows are trees: [B, R] int32, the logit row of each logit row's parent, below 0 for row 0.
PARENTS = "parents"


class TensorRTTreeRows(TensorRTLayers):
    """Emits the places of a tree's rows, and what they see.

    Attributes:
        deepest: drafts on the longest path of a tree; None: drafts are chains, and rows are runs.
    """

    caches: Mapping[str, ITensor]
    deepest: int | None = None

    def _ancestors(self) -> ITensor:
        """Emits each logit row's ancestors and itself, FP32 of 0 and 1: [B, 1, R, R]."""
        return self._once(self.caches[PARENTS], "ancestors", self._closure)

    def _closure(self) -> ITensor:
        assert self.deepest is not None
        parents = self._reshape(self.caches[PARENTS], (0, 1, -1, 1))
        row, other = (self._reshape(self._logit_range(), shape) for shape in ((1, 1, -1, 1), (1, 1, 1, -1)))
        is_near = self._binary("OR", self._binary("EQUAL", parents, other), self._binary("EQUAL", row, other))
        seen = self._cast(is_near, self.trt.float32)
        none, one = self.trt.MatrixOperation.NONE, self._fill(1.0, 4)
        for _ in range((self.deepest - 1).bit_length()):
            squared = self._layer(self.network.add_matrix_multiply(seen, none, seen, none), "ancestors")
            seen = self._binary("MIN", squared, one)
        return seen

    def _depths(self) -> ITensor:
        """Emits each logit row's depth below row 0, int32 [B, R]."""

        def emit() -> ITensor:
            count = self._cast(self._reduce("SUM", self._ancestors(), 3, keep=False), self.trt.int32)
            return self._reshape(self._binary("SUB", count, self._ints(1, 3)), (0, -1))

        return self._once(self.caches[PARENTS], "depths", emit)

    def _logit_range(self) -> ITensor:
        """Emits 0..R-1, int32 [R]."""
        parents = self.caches[PARENTS]
        return self._once(parents, "range", lambda: self._range(self._size(parents, 1)))

    def _tree_offsets(self, x: ITensor) -> ITensor:
        """Counts the positions behind `start` of the target's rows: int32 [B, Q], for x [B, Q, C] or [B, heads, Q, D].

        The same for all layers of a step: emitted once.
        """

        def emit() -> ITensor:
            row = self._range(self._size(x, len(x.shape) - 2))
            depths = self._gather(self._depths(), self._logit_row(row), axis=1)
            row = self._reshape(row, (1, -1))
            return self._select(self._binary("LESS", row, self._row_count(parents, 1)), depths, row)

        parents = self.caches[PARENTS]
        return self._once(parents, "offsets", emit)

    def _tree_positions(self, start: ITensor, x: ITensor) -> ITensor:
        """Finds the positions of the target's rows, from start [B] on: int32 [B, Q], for x as above."""
        offsets = self._tree_offsets(x)
        return self._once(offsets, "positions", lambda: self._binary("SUM", self._reshape(start, (-1, 1)), offsets))

    def _tree_paths(self) -> ITensor:
        """Emits a bit for each of at most 64 rows that a logit row sees: int32 [B, R, 2], the low word first."""

        def emit() -> ITensor:
            seen = self._cast(self._ancestors(), self.trt.int32)
            words = torch.zeros(2, 64, dtype=torch.int64)
            for row in range(64):
                words[row // 32, row] = 1 << row % 32
            words = (words << 32 >> 32).int()  # bit 31 is the sign
            made = []
            for word in words:
                bits = self._gather(self._constant(word), self._logit_range(), axis=0)
                bits = self._binary("PROD", seen, self._reshape(bits, (1, 1, 1, -1)))
                made.append(self._reshape(self._reduce("SUM", bits, 3, keep=False), (0, -1, 1)))
            return self._concat(made, axis=2)

        return self._once(self.caches[PARENTS], "paths", emit)

    def _logit_row(self, row: ITensor) -> ITensor:
        """Takes each of row [n], or [B, n], for the nearest row that has logits."""
        ones = len(row.shape)
        count = self._reshape(self._row_count(self.caches[PARENTS], 1), (1,) * ones)
        last = self._binary("SUB", count, self._ints(1, ones))
        return self._binary("MIN", self._binary("MAX", row, self._ints(0, ones)), last)

    def _tree_mask(self, q: ITensor, keys: ITensor, start: ITensor, has_sink: bool) -> ITensor:
        """Emits what rows q [B, heads, N, D] from start [B] on see of a whole cache: bool [B, 1, N, S]."""
        rows = self._constant(torch.arange(keys.shape[2], dtype=torch.int32)[None] - int(has_sink))
        behind = self._binary("SUB", rows, self._reshape(start, (-1, 1)))  # [B, S]
        return self._sees(q, behind, per_slot=True)

    def _tree_window(self, q: ITensor, behind: ITensor, window: int) -> ITensor:
        """Emits what rows q [B, heads, N, D] see within a window, of keys `behind` [1, K]: bool [B, 1, N, K]."""
        offsets = self._tree_offsets(q)  # [B, N]
        # No key lies behind the last row.
        index = self._binary("MAX", self._reshape(behind, (-1,)), self._ints(0, 1))
        is_before = self._binary("LESS", behind, self._ints(0, 2))
        place = self._select(is_before, behind, self._gather(offsets, index, axis=1))  # [B, K]
        row, key = self._reshape(offsets, (0, 1, -1, 1)), self._reshape(place, (0, 1, 1, -1))
        is_near = self._binary("LESS", self._binary("SUB", row, key), self._ints(window, 4))
        return self._binary("AND", is_near, self._sees(q, behind, per_slot=False))

    def _sees(self, q: ITensor, behind: ITensor, per_slot: bool) -> ITensor:
        """Emits which keys q's rows see: bool [B, 1, N, K].

        Args:
            behind: rows of keys behind `start`, [B, K] int32, or [1, K] where they are the same for all slots; those
                before it are below 0.
        """
        count = self._reshape(self._row_count(self.caches[PARENTS], 1), (1, 1, 1, 1))
        row = self._range(self._size(q, 2))
        near = self._cast(self._ancestors(), self.trt.bool)
        near = self._gather(near, self._logit_row(row), axis=2)  # [B, 1, N, R]
        index = self._logit_row(behind if per_slot else self._reshape(behind, (-1,)))
        near = self._gather(near, index, axis=3, per_slot=per_slot)  # [B, 1, N, K]
        row, key = self._reshape(row, (1, 1, -1, 1)), self._reshape(behind, (0, 1, 1, -1))
        # Rows behind a prompt's one logit row see that one as they see any before them.
        is_other = self._binary("OR", self._binary("LESS", key, self._ints(0, 4)), self._at_least(key, count))
        return self._binary("AND", self._at_least(row, key), self._binary("OR", is_other, near))
