"""`DraftingOps` emitted as TensorRT's own layers."""

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.drafting import Candidates, DraftingOps, Gate
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers

#: Rows of a block that are chosen in a chain, at most: a power of two.
MOST_DRAFTS = 64


class TensorRTDrafting(TensorRTLayers, DraftingOps[ITensor]):
    """Emits the operations of drafting."""

    tp: int
    rank: int

    def _collective(self, x: ITensor, operation: ITensor, reduction: ITensor, label: str) -> ITensor:
        layer = self.network.add_dist_collective(x, operation, reduction, -1, [])
        layer.num_ranks = self.tp
        return self._layer(layer, label)

    def _all_gather(self, x: ITensor) -> ITensor:
        """Joins x [1, ...] of every rank: [tp, ...]."""
        return self._collective(x, self.trt.CollectiveOperation.ALL_GATHER, self.trt.ReduceOperation.NONE, "all_gather")

    def drop_last_row(self, x: ITensor) -> ITensor:
        return self._slice(x, 1, 0, self._binary("SUB", self._size(x, 1), self._longs(1)))

    def convolve_block(self, base: str, x: ITensor, kernels: ITensor, side: int) -> ITensor:
        self._scope = base
        common = self.weights[base][side]  # [taps, H]
        taps, hidden = common.shape
        groups = kernels.shape[2] // (2 * taps)
        own = self._once(kernels, "kernels", lambda: self._reshape(kernels, (0, 0, 2 * taps, groups)))
        rows = self._reshape(x, (0, 0, groups, hidden // groups))
        out = None
        for offset in range(taps):
            constant = self._constant(common[offset].view(1, 1, groups, -1))
            mine = self._reshape(self._slice(own, 2, side * taps + offset, 1), (0, 0, groups, 1))
            shifted = self._shifted(rows, offset, self._fill(0.0, 4, x.dtype))
            term = self._binary("PROD", self._binary("SUM", constant, mine), shifted)
            out = term if out is None else self._binary("SUM", out, term)
        return self._reshape(out, (0, 0, hidden))

    def _shifted(self, x: ITensor, offset: int, before: ITensor) -> ITensor:
        """Moves rows of x [B, N, ...] down by so many; what comes in is `before`, one number or a row of its own."""
        if offset == 0:
            return x
        count = self._cast(self._size(x, 1), self.trt.int32)
        first = self._binary("SUB", self._range(self._size(x, 1)), self._ints(offset, 1))  # [N]
        last = self._binary("SUB", count, self._ints(1, 1))
        index = self._binary("MIN", self._binary("MAX", first, self._ints(0, 1)), last)
        is_inside = self._binary("GREATER", first, self._ints(-1, 1))
        is_inside = self._reshape(is_inside, (1, -1, *[1] * (len(x.shape) - 2)))
        return self._select(is_inside, self._gather(x, index, axis=1), before)

    def top_candidates(
        self, logits: ITensor, count: int, multiplier: float, softcap: float | None
    ) -> tuple[ITensor, ITensor]:
        self._scope = "candidates"
        vocabulary = logits.shape[2]
        best, ids = self._top(self._cast(logits, self.trt.float32), min(count, vocabulary))
        if self.tp > 1:
            best, ids = self._top_of_ranks(best, ids, count, vocabulary)
        scaled = self._binary("PROD", best, self._fill(multiplier, 3))
        if softcap is None:
            return ids, scaled
        ratio = self._binary("DIV", scaled, self._fill(softcap, 3))
        bent = self._layer(self.network.add_activation(ratio, self.trt.ActivationType.TANH), "tanh")
        return ids, self._binary("PROD", bent, self._fill(softcap, 3))

    def _top(self, x: ITensor, count: int) -> tuple[ITensor, ITensor]:
        """Finds the largest numbers of x [B, N, V], and their places: [B, N, count] each."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, count, 1 << 2)
        return self._layer(layer, "top_k"), layer.get_output(1)

    def _top_of_ranks(self, best: ITensor, ids: ITensor, count: int, vocabulary: int) -> tuple[ITensor, ITensor]:
        """Finds the largest logits of all ranks among each rank's own largest, and their ids in the whole vocabulary.

        One collective: (value, id) pairs as FP32, in which every id below 2^24 is exact.
        """
        if vocabulary * self.tp > 1 << 24:
            raise EngineError(f"{self._scope}: a vocabulary above {1 << 24} ids cannot be divided among ranks")
        each = best.shape[2]
        ids = self._cast(self._binary("SUM", ids, self._ints(self.rank * vocabulary, 3)), self.trt.float32)
        pairs = self._concat([self._reshape(x, (1, 1, -1)) for x in (best, ids)], axis=1)  # [1, 2, B * N * C]
        pairs = self._all_gather(pairs)  # [tp, 2, B * N * C]
        shape = self._concat([self._size(best, 0), self._size(best, 1), self._longs(self.tp * each)], axis=0)

        def joined(which: int) -> ITensor:
            ranks = self._reshape(self._slice(pairs, 1, which, 1), (self.tp, -1, each), then=(1, 0, 2))
            return self._reshape_to(ranks, shape)  # [B, N, tp * C]

        best, places = self._top(joined(0), count)
        return best, self._cast(self._taken(joined(1), places), self.trt.int32)

    def rerank(
        self,
        candidates: Candidates[ITensor],
        predecessor: str,
        successor: str,
        gate: Gate[ITensor] | None,
        first: ITensor,
    ) -> ITensor:
        # No loop, which could not be captured: the choice after every candidate of the row before, and then the chain.
        self._scope = "rerank"
        tokens, count = candidates.tokens, candidates.tokens.shape[2]
        one = self._reshape(first, (-1, 1, 1))
        before = self._shifted(tokens, 1, one)  # the tokens of the row before: [B, N, C]
        numbers = self._gather(self._weight(predecessor), before, axis=0)  # [B, N, C, r]
        wanted = self._cast(numbers, self.trt.float32)
        if gate is not None:
            wanted = self._binary("PROD", wanted, self._cast(self._gated(gate, numbers), self.trt.float32))
        follows = self._cast(self._gather(self._weight(successor), candidates.ids, axis=0), self.trt.float32)
        edges = self._product(wanted, follows, "edges")  # [B, N, C before, C]
        scores = self._binary("SUM", edges, self._reshape(candidates.logits, (0, 0, 1, count)))
        is_best = self._binary("EQUAL", scores, self._reduce("MAX", scores, 3))
        places = self._constant(torch.arange(count, dtype=torch.int32))
        choice = self._select(is_best, self._reshape(places, (1, 1, 1, count)), self._ints(count, 4))
        choice = self._reduce("MIN", choice, 3, keep=False)  # [B, N, C]: the place that follows each place before
        offset = 1
        while offset < MOST_DRAFTS:  # choices of one row, of two together, of four
            earlier = self._shifted(choice, offset, self._reshape(places, (1, 1, count)))
            choice = self._taken(choice, earlier)
            offset *= 2
        # All places before row 0 are the same token's.
        return self._reshape(self._taken(tokens, self._slice(choice, 2, 0, 1)), (0, 0))

    def _gated(self, gate: Gate[ITensor], numbers: ITensor) -> ITensor:
        """Emits each choice's factors: [B, N, 1 or C, r]."""
        if gate.projection is None:
            return self._reshape(gate.rows, (0, 0, 1, gate.rows.shape[2]))
        weight = linear_weight(self.weights, gate.projection)
        if not isinstance(weight, torch.Tensor):
            raise EngineError(f"{gate.projection}: a gate in few bits is not emitted; choose another precision")
        rank, hidden = weight.shape[0], gate.rows.shape[2]
        by_row = self._product(gate.rows, self._constant(weight[None, :, :hidden]), "gate")
        by_row = self._binary("SUM", by_row, self._weight(gate.projection + ".bias", (1, 1, rank)))
        by_token = self._product(numbers, self._constant(weight[None, None, :, hidden:]), "gate")
        total = self._binary("SUM", self._reshape(by_row, (0, 0, 1, rank)), by_token)
        return self._layer(self.network.add_activation(total, self.trt.ActivationType.SIGMOID), "sigmoid")

    def _taken(self, x: ITensor, places: ITensor) -> ITensor:
        """Takes numbers of x [B, N, C] by their places [B, N, n] in each row: [B, N, n]."""
        layer = self.network.add_gather_v2(x, places, self.trt.GatherMode.ELEMENT)
        layer.axis = 2
        return self._layer(layer, "taken")
