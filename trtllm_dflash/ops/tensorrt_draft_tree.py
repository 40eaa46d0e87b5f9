"""Trees of drafts as TensorRT's own layers: grown, accepted, and their accepted rows put in order.

No choice is left to a kernel: equals come in the order of their ids, or of the list's nodes, by counting who is ahead.
(TopK may return any of equal ones; what is left to it is which of equal logits are the last of a row's likely ones.)

A cache is updated once a step (TensorRT refuses a second time), so the K and V of an accepted path are not moved by the
network: it says in `PATH` which rows they are, and the session moves them behind it, in the same captured graph.
"""

from collections.abc import Sequence

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import Acceptance, AttentionLayer
from trtllm_dflash.ops.draft_tree import LEAST, RANKS, TOLL, DraftTree
from trtllm_dflash.ops.tensorrt_drafting import TensorRTDrafting
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_tree_rows import PARENTS, TensorRTTreeRows

#: The input that says what is drafted: [1] int32; 1: the best tree, 0: one that begins with the most likely chain.
IS_TREE = "is_tree"

#: The output that says which rows were accepted: [B, R] int32, by depth; behind them each row is its own.
PATH = "path"

#: What a chain's nodes score more where it is to come first: more than any node's score is below another's.
_FIRST = 1e4


class TensorRTDraftTree(TensorRTTreeRows, TensorRTDrafting):
    """Emits the operations of trees of drafts."""

    def top_ids(self, logits: ITensor, count: int) -> tuple[ITensor, ITensor]:
        self._scope = "top_ids"
        wide, vocabulary = self._cast(logits, self.trt.float32), logits.shape[2]
        best, ids = self._top(wide, min(count, vocabulary))
        most = self._reduce("MAX", wide, 2)
        total = self._log_sum(wide, most)
        if self.tp > 1:
            if vocabulary * self.tp > 1 << 24:  # FP32 has every id below it
                raise EngineError(f"{self._scope}: a vocabulary above {1 << 24} ids cannot be divided among ranks")
            ids = self._binary("SUM", ids, self._ints(self.rank * vocabulary, 3))
            best, ids, total = self._of_ranks(best, ids, total)
        best, ids = self._in_order(best, ids, count)
        return self._binary("SUB", best, total), ids

    def _log_sum(self, x: ITensor, most: ITensor) -> ITensor:
        """Computes the log-sum-exp of x [B, N, C], whose largest numbers are most [B, N, 1]: [B, N, 1]."""
        mass = self._reduce("SUM", self._unary("EXP", self._binary("SUB", x, most)), 2)
        return self._binary("SUM", most, self._unary("LOG", mass))

    def _of_ranks(self, best: ITensor, ids: ITensor, total: ITensor) -> tuple[ITensor, ITensor, ITensor]:
        """Joins every rank's likely ids, and sums up their vocabularies; in one collective."""
        each = best.shape[2]
        joined = self._concat([best, self._cast(ids, self.trt.float32), total], axis=2)  # [B, N, 2 each + 1]
        flat = self._reshape(joined, (1, -1, 2 * each + 1))
        ranks = self._all_gather(flat)

        def of(first: int, size: int) -> ITensor:
            shape = self._concat([self._size(best, 0), self._size(best, 1), self._longs(self.tp * size)], axis=0)
            mine = self._reshape(self._slice(ranks, 2, first, size), (0, 0, 0), then=(1, 0, 2))  # [B * N, tp, size]
            return self._reshape_to(mine, shape)

        totals = of(2 * each, 1)
        total = self._log_sum(totals, self._reduce("MAX", totals, 2))
        return of(0, each), self._cast(of(each, each), self.trt.int32), total

    def _in_order(self, values: ITensor, ids: ITensor, count: int) -> tuple[ITensor, ITensor]:
        """Takes the `count` largest of values [B, N, C], the lowest ids among equals first, and these."""
        order = self._reshape(self._order(values, ids), (0, 0, 1, -1))
        places = self._constant(torch.arange(count, dtype=torch.int32).view(1, 1, count, 1))
        is_there = self._binary("EQUAL", order, places)  # [B, N, count, C]

        def taken(x: ITensor, nothing: ITensor) -> ITensor:
            return self._reduce("SUM", self._select(is_there, self._reshape(x, (0, 0, 1, -1)), nothing), 3, keep=False)

        return taken(values, self._fill(0.0, 4)), taken(ids, self._ints(0, 4))

    def _order(self, values: ITensor, ids: ITensor) -> ITensor:
        """Counts who is ahead of each of values [B, N, C]: larger, or equal with a lower id; int32 [B, N, C]."""
        (mine, theirs), (my_id, their_id) = (
            (self._reshape(x, (0, 0, -1, 1)), self._reshape(x, (0, 0, 1, -1))) for x in (values, ids)
        )
        is_first = self._binary("AND", self._binary("EQUAL", theirs, mine), self._binary("LESS", their_id, my_id))
        is_ahead = self._binary("OR", self._binary("GREATER", theirs, mine), is_first)
        return self._reduce("SUM", self._cast(is_ahead, self.trt.int32), 3, keep=False)

    def grow_tree(self, tree: DraftTree, bonus: ITensor, log_probs: ITensor, ids: ITensor) -> tuple[ITensor, ITensor]:
        """Grows trees as `Ops` says, or where `IS_TREE` is 0 such as begin with the chain of most likely drafts.

        A block may be shorter than the list is deep, but not where the best tree is wanted.
        """
        self._scope = "grow_tree"
        listed, deepest = len(tree.parents), max(tree.depths)
        log_probs, ids = self._reached(log_probs, ids, deepest)  # [B, deepest * RANKS] each
        node = self._constant(torch.arange(listed, dtype=torch.int32).view(1, 1, -1))
        order = self._order(self._scores(tree, log_probs, deepest), node)
        is_taken = self._binary("LESS", order, self._ints(tree.nodes, 3))  # [B, 1, listed]
        axis = self._constant(torch.tensor(2, dtype=torch.int32))
        taken = self._cast(is_taken, self.trt.int32)
        layer = self.network.add_cumulative(taken, axis, self.trt.CumulativeOperation.SUM, False, False)
        row = self._binary("PROD", self._layer(layer, "rows"), taken)  # from 1, in the list's order: parents come first
        rows = self._constant(torch.arange(1, tree.nodes + 1, dtype=torch.int32).view(1, -1, 1))
        is_row = self._binary("EQUAL", row, rows)  # [B, nodes, listed]
        nodes = self._reduce("SUM", self._select(is_row, node, self._ints(0, 3)), 2, keep=False)  # [B, nodes]

        depth, rank, parents = (torch.tensor(x, dtype=torch.int32) for x in (tree.depths, tree.ranks, tree.parents))
        places = self._gather(self._constant((depth - 1) * RANKS + rank), nodes, axis=0)
        root = self._reshape(bonus, (-1, 1))
        tokens = self._concat([root, self._gather(ids, places, axis=1, per_slot=True)], axis=1)
        parent = self._gather(self._constant(parents), nodes, axis=0)
        above = self._gather(
            self._reshape(row, (0, -1)), self._binary("MAX", parent, self._ints(0, 2)), axis=1, per_slot=True
        )
        above = self._select(self._binary("LESS", parent, self._ints(0, 2)), self._ints(0, 2), above)
        nobody = self._binary("MIN", root, self._ints(-1, 2))  # -1: no id is below 0
        return self._agreed(tokens, self._concat([nobody, above], axis=1), 1 + tree.nodes)

    def _reached(self, log_probs: ITensor, ids: ITensor, deepest: int) -> tuple[ITensor, ITensor]:
        """Takes [B, Bd - 1, RANKS] at each depth that the list has, the last for those behind: [B, deepest * RANKS]."""
        depth = self._constant(torch.arange(deepest, dtype=torch.int32))
        last = self._binary("SUB", self._reshape(self._row_count(log_probs, 1), (1,)), self._ints(1, 1))
        index = self._binary("MIN", depth, last)
        found = self._binary("MAX", self._gather(log_probs, index, axis=1), self._fill(LEAST, 3))
        ids = self._gather(ids, index, axis=1)
        return self._reshape(found, (0, deepest * RANKS)), self._reshape(ids, (0, deepest * RANKS))

    def _scores(self, tree: DraftTree, log_probs: ITensor, deepest: int) -> ITensor:
        """Scores every listed node: FP32 [B, 1, listed]."""
        matrix = torch.zeros(len(tree.parents), deepest, RANKS)
        for node, path in enumerate(tree.paths):
            matrix[node, torch.arange(len(path)), torch.tensor(path)] = 1
        flat = self._reshape(log_probs, (0, 1, deepest * RANKS))
        scores = self._product(flat, self._constant(matrix.flatten(1)[None]), "scores")
        tolls = self._constant((torch.tensor(tree.depths) * TOLL).view(1, 1, -1))
        scores = self._binary("SUB", scores, tolls)
        spine = torch.tensor([_FIRST * (not any(path)) for path in tree.paths]).view(1, 1, -1)
        is_tree = self._binary("GREATER", self._reshape(self.caches[IS_TREE], (1, 1, 1)), self._ints(0, 3))
        return self._select(is_tree, scores, self._binary("SUM", scores, self._constant(spine)))

    def _agreed(self, tokens: ITensor, parents: ITensor, rows: int) -> tuple[ITensor, ITensor]:
        """Takes the first rank's tree on every rank: their kernels may round a score, and so take a node, otherwise."""
        if self.tp == 1:
            return tokens, parents
        both = self._cast(self._concat([tokens, parents], axis=1), self.trt.float32)  # [B, 2 * rows]
        flat = self._reshape(both, (1, -1))
        ranks = self._all_gather(flat)
        first = self._reshape(self._slice(ranks, 0, 0, 1), (-1, 2 * rows))
        both = self._cast(first, self.trt.int32)
        return self._slice(both, 1, 0, rows), self._slice(both, 1, rows, rows)

    def _accept_tree(
        self, token_ids: ITensor, target_ids: ITensor, logit_rows: ITensor, row_count: ITensor
    ) -> Acceptance[ITensor]:
        """Accepts the deepest path on which every token is the target's choice at its parent.

        Rows that nobody drafted, which are measured but not served, may be siblings of one token, or deeper than trees
        are: of a depth's accepted rows the first counts, and none below the deepest draft.
        """
        self._scope = "accept"
        row = self._reshape(self._logit_range(), (1, -1))
        tokens = self._gather(token_ids, logit_rows, axis=1, per_slot=True)
        above = self._binary("MAX", self.caches[PARENTS], self._ints(0, 2))
        is_chosen = self._binary("EQUAL", tokens, self._gather(target_ids, above, axis=1, per_slot=True))
        is_real = self._binary("LESS", logit_rows, self._reshape(row_count, (-1, 1)))
        is_root = self._binary("EQUAL", row, self._ints(0, 2))
        is_right = self._binary("OR", is_root, self._binary("AND", is_chosen, is_real))
        misses = self._reshape(self._cast(self._not(is_right), self.trt.float32), (0, 1, 1, -1))
        missed = self._reshape(self._product(self._ancestors(), misses, "misses"), (0, -1))
        assert self.deepest is not None
        is_within = self._binary("LESS", self._depths(), self._ints(self.deepest + 1, 2))
        is_accepted = self._binary("AND", self._binary("LESS", missed, self._fill(0.5, 2)), is_within)  # [B, R]
        depths = self._select(is_accepted, self._depths(), self._ints(0, 2))
        accepted = self._reduce("MAX", depths, 1)  # [B, 1]
        path = self._path(is_accepted, accepted, row)
        last = self._gather(path, accepted, axis=1, per_slot=True)
        bonus = self._gather(target_ids, last, axis=1, per_slot=True)
        final = self._gather(logit_rows, accepted, axis=1, per_slot=True)
        committed = self._binary("SUM", final, self._ints(1, 2))
        accepted, committed, bonus = (self._reshape(x, (-1,)) for x in (accepted, committed, bonus))
        return Acceptance(accepted, committed, bonus, path=path)

    def _path(self, is_accepted: ITensor, accepted: ITensor, row: ITensor) -> ITensor:
        """Finds the first accepted row of each depth, and behind them each row itself: [B, R]."""
        depth = self._reshape(row, (1, -1, 1))
        is_here = self._binary("EQUAL", self._reshape(self._depths(), (0, 1, -1)), depth)
        is_here = self._binary("AND", is_here, self._reshape(is_accepted, (0, 1, -1)))  # [B, depths, R]
        last = self._binary("SUB", self._row_count(self.caches[PARENTS], 1), self._ints(1, 2))
        rows = self._select(is_here, self._reshape(row, (1, 1, -1)), self._reshape(last, (1, 1, 1)))
        return self._select(self._binary("GREATER", row, accepted), row, self._reduce("MIN", rows, 2, keep=False))

    def first_choices(self, x: ITensor, verdict: Acceptance[ITensor]) -> ITensor:
        return x if verdict.path is None else self._gather(x, verdict.path, axis=1, per_slot=True)

    def final_rows(self, taps: Sequence[ITensor], verdict: Acceptance[ITensor]) -> ITensor:
        joined = self._concat(taps, axis=2)
        if verdict.path is None:
            return joined
        assert self.deepest is not None
        # Of a tree as many rows as it is deep; of a prompt, which has one row with logits, all.
        logit_rows = self._size(self.caches[PARENTS], 1)
        kept = self._binary("MIN", logit_rows, self._longs(self.deepest + 1))
        count = self._binary("SUM", self._binary("SUB", self._size(joined, 1), logit_rows), kept)
        row = self._range(count)
        of_path = self._gather(verdict.path, self._logit_row(row), axis=1)  # [B, n]
        row = self._reshape(row, (1, -1))
        is_tree = self._binary("LESS", row, self._row_count(self.caches[PARENTS], 1))
        return self._gather(joined, self._select(is_tree, of_path, row), axis=1, per_slot=True)

    def move_kv(self, layers: Sequence[AttentionLayer], start: ITensor, verdict: Acceptance[ITensor]) -> None:
        """Says which rows are to be moved: see the module's docstring."""
        path = verdict.path
        assert path is not None
        path.name = PATH
        self.network.mark_output(path)
