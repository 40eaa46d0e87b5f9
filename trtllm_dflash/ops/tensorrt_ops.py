"""`Ops` emitted as layers of a strongly typed TensorRT network.

Layers bear the name of the weight or cache they belong to, so that an engine inspector's output can be read. What has
no name of its own (residuals, SwiGLU, positions) is named after the operation before it.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Ops, SamplingInputs
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.tensorrt_attention import TensorRTAttention
from trtllm_dflash.ops.tensorrt_delta_net import TensorRTDeltaNet
from trtllm_dflash.ops.tensorrt_draft_tree import TensorRTDraftTree
from trtllm_dflash.ops.tensorrt_family_ops import TensorRTFamilyOps
from trtllm_dflash.ops.tensorrt_latent import TensorRTLatent
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_moe import TensorRTMoE


def load_tensorrt() -> Any:
    """Imports TensorRT: the datacenter edition where it is installed, else TensorRT-RTX.

    Raises:
        EngineError: neither is installed.
    """
    for name in ("tensorrt", "tensorrt_rtx"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "Builder"):  # any folder named tensorrt can be imported
            return module
    raise EngineError(f"TensorRT is not installed: {pip_install('tensorrt')}")


class TensorRTOps(
    TensorRTAttention,
    TensorRTDeltaNet,
    TensorRTMoE,
    TensorRTDraftTree,
    TensorRTFamilyOps,
    TensorRTLatent,
    Ops[ITensor],
):
    """Emits layers; nothing is computed until the network is compiled and run.

    Args:
        network: a strongly typed INetworkDefinition.
        weights: a rank's engine tensors by name, with the RoPE tables, on CPU. TensorRT reads them where they lie, so
            they must outlive the build.
        caches: K/V caches by name: network inputs [B, heads, S, D]. Each is updated once, and the result is marked as
            the network's output `NAME.present`.
        capability: of the GPU that the network is for, such as 120. It decides how a mixture's experts are emitted;
            None: as every GPU takes them.
        most_rows: of a slot in a call, where the target has gated delta nets; then `caches` has their states and the
            inputs that say which rows those absorb (see `TensorRTDeltaNet`).
        deepest: drafts on the longest path of a tree, where drafts may be trees; then `caches` has the inputs of those
            too (see `TensorRTTreeRows` and `TensorRTDraftTree`).
    """

    def __init__(
        self,
        network: Any,
        weights: Mapping[str, torch.Tensor],
        caches: Mapping[str, ITensor],
        tp: int = 1,
        rank: int = 0,
        capability: int | None = None,
        most_rows: int = 1,
        deepest: int | None = None,
    ) -> None:
        super().__init__(load_tensorrt(), network, weights)
        self.caches = caches
        self.tp = tp
        self.rank = rank
        self.capability = capability
        self.most_rows = most_rows
        self.deepest = deepest
        self._rotated: dict[str, tuple[str, ITensor, ITensor]] = {}  # table, what was rotated, by which positions

    # -- the network -----------------------------------------------------------------------------------------------

    def embedding(self, name: str, ids: ITensor) -> ITensor:
        self._scope = name
        return self._gather(self._weight(name + ".weight"), ids, axis=0)

    def linear(self, name: str, x: ITensor) -> ITensor:
        self._scope = name
        stored = linear_weight(self.weights, name)
        if isinstance(stored, torch.Tensor):
            x = self._cast(x, self._types[stored.dtype])  # a router's may be FP32 in any engine
            y = self._product(x, self._weight(name + ".weight", (1, *stored.shape)))
        else:
            y = self._quantized_product(name, x, stored)
        if name + ".bias" in self.weights:
            bias = self._weight(name + ".bias", (1, 1, self.weights[name + ".bias"].shape[0]))
            y = self._binary("SUM", y, bias, "bias")
        return y

    def rms_norm(self, name: str, x: ITensor, eps: float) -> ITensor:
        self._scope = name
        ones = (1,) * (len(x.shape) - 1)
        weight = self._weight(name + ".weight", (*ones, self.weights[name + ".weight"].shape[0]))
        # In the weight's type: a norm's may be FP32 in any engine.
        normed = self._cast(self._normed(x, eps), weight.dtype)
        return self._cast(self._binary("PROD", normed, weight, "scale"), x.dtype)

    def add(self, x: ITensor, y: ITensor) -> ITensor:
        return self._binary("SUM", x, y, "add")

    def concat(self, xs: Sequence[ITensor]) -> ITensor:
        return self._concat(xs, axis=2)

    def self_attention(self, attention: AttentionLayer, qkv: ITensor, start: ITensor) -> ITensor:
        if self.deepest is None:
            return super().self_attention(attention, qkv, start)
        q, k, v = self._split_qkv(attention, qkv, self._tree_positions(start, qkv))
        keys = self.append_kv(attention.prefix + "key", k, start)
        values = self.append_kv(attention.prefix + "value", v, start)
        seen = attention.window, attention.sinks, attention.scale
        return self._attention(q, keys, values, self.key_lengths(start, qkv), True, *seen, tree_start=start)

    def split_heads(self, x: ITensor, first: int, count: int, head_size: int) -> ITensor:
        # Columns that are sliced straight from a product make the compiler store its weights once for each profile.
        shape = (0, 0, x.shape[2] // head_size, head_size)
        heads = self._once(x, "heads", lambda: self._reshape(x, shape, then=(0, 2, 1, 3)))
        return self._slice(heads, 1, first, count)

    def rope(self, name: str, x: ITensor, positions: ITensor) -> ITensor:
        cos, sin = self._weight(name + ".cos"), self._weight(name + ".sin")
        index = self._once(positions, "int64", lambda: self._cast(positions, self.trt.int64))
        layer = self.network.add_rotary_embedding(x, cos, sin, False, 2 * cos.shape[1])
        layer.set_input(3, index)
        rotated = self._layer(layer, "rope")
        self._rotated[rotated.name] = (name, x, positions)
        return rotated

    def swiglu(self, x: ITensor) -> ITensor:
        size = x.shape[2] // 2
        halves = self._reshape(x, (0, 0, 2, size))  # see split_heads
        gate, up = (self._reshape(self._slice(halves, 2, i, 1), (0, 0, size)) for i in range(2))
        sigmoid = self._layer(self.network.add_activation(gate, self.trt.ActivationType.SIGMOID), "sigmoid")
        return self._binary("PROD", self._binary("PROD", gate, sigmoid, "silu"), up, "swiglu")

    def all_reduce(self, x: ITensor) -> ITensor:
        if self.tp == 1:  # a world of one has no communicator
            return x
        operation, sum_ = self.trt.CollectiveOperation.ALL_REDUCE, self.trt.ReduceOperation.SUM
        return self._collective(x, operation, sum_, "all_reduce")

    # -- rows and positions ----------------------------------------------------------------------------------------

    def positions(self, start: ITensor, rows: ITensor) -> ITensor:
        # By `start` alone: all rows of a step that begin there are equally many.
        return self._once(
            start, "positions", lambda: self._binary("SUM", self.column(start), self._row_offsets(rows), "positions")
        )

    def key_lengths(self, start: ITensor, rows: ITensor) -> ITensor:
        def emit() -> ITensor:
            return self._binary("SUM", start, self._cast(self._size(rows, 1), self.trt.int32), "lengths")

        return self._once(start, "lengths", emit)

    def block_start(self, start: ITensor, committed: ITensor) -> ITensor:
        return self._once(committed, "block start", lambda: self.add(start, committed))

    def _row_offsets(self, rows: ITensor) -> ITensor:
        """Emits 0..N-1 as [1, N] for rows [B, N, ...]."""
        return self._once(rows, "offsets", lambda: self._reshape(self._range(self._size(rows, 1)), (1, -1)))

    def gather_rows(self, x: ITensor, rows: ITensor) -> ITensor:
        return self._gather(x, rows, axis=1, per_slot=True)

    def splice_rows(self, context: ITensor, block: ITensor, committed: ITensor) -> ITensor:
        # The same for every cache of the drafter: emitted once.
        rows = self._once(committed, "splice", lambda: self._spliced_index(context, block, committed))
        if context.name not in self._rotated:
            return self._gather(self._concat([context, block], axis=2), rows, axis=2, per_slot=True)
        # Spliced, then rotated: the same rows, and one rotation instead of two. (TensorRT drops those two. With them,
        # the compiler of TensorRT-RTX 1.7.1 fails with "uses before defs" from three drafter layers on.)
        name, context, context_positions = self._rotated[context.name]
        _, block, block_positions = self._rotated[block.name]
        run = self._gather(self._concat([context, block], axis=2), rows, axis=2, per_slot=True)
        joined = self._once(committed, "positions", lambda: self._concat([context_positions, block_positions], axis=1))
        positions = self._once(joined, "spliced", lambda: self._gather(joined, rows, axis=1, per_slot=True))
        return self.rope(name, run, positions)

    def _spliced_index(self, context: ITensor, block: ITensor, committed: ITensor) -> ITensor:
        """Indexes context's and block's rows, joined, by the run that they make: [B, Q + Bd]."""
        rows, drafts = (self._row_count(x) for x in (context, block))  # [1, 1]
        total = self._binary("SUM", self._size(context, 2), self._size(block, 2))
        run = self._reshape(self._range(total), (1, -1))
        past = self._binary("SUB", run, self.column(committed))
        last = self._binary("SUB", drafts, self._ints(1, 2))
        in_block = self._binary("MIN", self._binary("MAX", past, self._ints(0, 2)), last)
        is_context = self._binary("LESS", past, self._ints(0, 2))
        return self._select(is_context, run, self._binary("SUM", rows, in_block))

    def drop_first_row(self, x: ITensor) -> ITensor:
        one = self._constant(torch.ones(1, dtype=torch.int64))
        return self._slice(x, 1, 1, self._binary("SUB", self._size(x, 1), one))

    # -- choosing tokens -------------------------------------------------------------------------------------------

    def argmax(self, logits: ITensor) -> ITensor:
        best, ids = self._best(logits)
        if self.tp == 1:
            return ids
        # One collective: (value, id) pairs as FP32, in which every id below 2^24 is exact.
        if logits.shape[2] * self.tp > 1 << 24:
            raise EngineError(f"{self._scope}: a vocabulary above {1 << 24} ids cannot be divided among ranks")
        offset = self._ints(self.rank * logits.shape[2], 2)
        pair = [best, self._cast(self._binary("SUM", ids, offset), self.trt.float32)]
        pairs = self._concat([self._reshape(x, (1, 1, -1)) for x in pair], axis=1)  # [1, 2, B * R]
        pairs = self._all_gather(pairs)  # [tp, 2, B * R]
        values, ids = self._slice(pairs, 1, 0, 1), self._slice(pairs, 1, 1, 1)
        is_best = self._binary("EQUAL", values, self._reduce("MAX", values, 0))
        ids = self._reduce("MIN", self._select(is_best, ids, self._fill(1 << 24, 3)), 0)  # [1, 1, B * R]
        return self._cast(self._reshape_like(ids, best), self.trt.int32)

    def _best(self, logits: ITensor) -> tuple[ITensor, ITensor]:
        """Finds the largest logit, as FP32, and its lowest id: [B, R] each. TopK may return any of equal ones."""
        best = self._reduce("MAX", logits, 2)
        ids = self._vocabulary_ids(logits)
        ids = self._select(self._binary("EQUAL", logits, best), ids, self._ints(logits.shape[2], 3))
        ids = self._reduce("MIN", ids, 2, keep=False)
        return self._cast(self._reshape(best, (0, 0)), self.trt.float32), ids

    def sample(self, logits: ITensor, sampling: SamplingInputs[ITensor]) -> ITensor:
        # No loop and no conditional layer: a step with either could not be captured into a CUDA graph.
        self._scope = "sample"
        logits = self._whole_vocabulary(logits)  # [B, R, V]
        zero, one = self._fill(0.0, 3), self._fill(1.0, 3)
        temperature, top_p = (self._reshape(x, (0, 1, 1)) for x in (sampling.temperature, sampling.top_p))
        is_greedy = self._binary("EQUAL", temperature, zero)
        wide = self._cast(logits, self.trt.float32)
        # From the largest down: divided by a temperature near 0, logits as they are would overflow to inf - inf.
        above = self._binary("SUB", wide, self._reduce("MAX", wide, 2))
        scaled = self._binary("DIV", above, self._select(is_greedy, one, temperature))
        mass = self._unary("EXP", scaled)  # not normalized: the largest is 1

        counts = self._top_k_counts(sampling.top_k, logits.shape[2])

        def beyond_top_k(bound: ITensor) -> ITensor:
            larger = self._cast(self._binary("GREATER", logits, bound), self.trt.float32)
            return self._not(self._binary("LESS", self._reduce("SUM", larger, 2), counts))

        cut = self._smallest_kept(logits, beyond_top_k)
        mass = self._select(self._at_least(logits, cut), mass, zero)
        # Rounding must not cut a tail that top_p 1 keeps: there the bound is beyond any sum.
        open_ = self._fill(2.0, 3)
        share = self._select(self._binary("LESS", top_p, one), top_p, open_)
        reach = self._binary("PROD", share, self._reduce("SUM", mass, 2))

        def beyond_top_p(bound: ITensor) -> ITensor:
            larger = self._select(self._binary("GREATER", logits, bound), mass, zero)
            return self._not(self._binary("LESS", self._reduce("SUM", larger, 2), reach))

        cut = self._binary("MIN", self._smallest_kept(logits, beyond_top_p), self._reduce("MAX", logits, 2))
        mass = self._select(self._at_least(logits, cut), mass, zero)
        uniform = sampling.uniform
        if self.deepest is not None:  # by depth, as a row's position is
            uniform = self._gather(uniform, self._depths(), axis=1, per_slot=True)
        drawn = self._inverse_cdf(mass, self._reshape(uniform, (0, 0, 1)))
        return self._select(self._reshape(is_greedy, (0, 1)), self._best(logits)[1], drawn)

    def _top_k_counts(self, top_k: ITensor, vocabulary: int) -> ITensor:
        """Number of ids that top_k keeps, as FP32 [B, 1, 1]: all where it is 0."""
        top_k = self._reshape(top_k, (0, 1, 1))
        is_set = self._binary("GREATER", top_k, self._ints(0, 3))
        return self._cast(self._select(is_set, top_k, self._ints(vocabulary, 3)), self.trt.float32)

    def _smallest_kept(self, logits: ITensor, is_beyond: Callable[[ITensor], ITensor]) -> ITensor:
        """Finds the smallest value v [B, R, 1] for which is_beyond(v) is false, as for all larger ones.

        There is no sort of a whole vocabulary, and candidates from TopK (at most 3,840) would be wrong for a nucleus
        wider than they are. So: bisection over every value that the logits' type can hold, 16 rounds for a 16-bit type,
        exact whatever the distribution is. FP32 takes 16 more, between two neighbouring BF16 values.
        """
        coarse = torch.bfloat16 if logits.dtype == self.trt.float32 else self._torch_type(logits.dtype)
        wide = torch.float32 if logits.dtype == self.trt.float32 else coarse
        table = self._constant(ordered_values(coarse).to(wide))
        place = self._ints(0, 3)  # how many of the table's values are beyond
        for bit in reversed(range(16)):
            step = 1 << bit
            bound = self._gather(table, self._binary("SUM", place, self._ints(step - 1, 3)), axis=0)
            further = self._binary("SUM", place, self._ints(step, 3))
            place = self._select(is_beyond(bound), further, place)
        upper = self._gather(table, place, axis=0)
        if wide is not torch.float32:
            return upper
        below = self._binary("MAX", self._binary("SUB", place, self._ints(1, 3)), self._ints(0, 3))
        lower = self._gather(table, below, axis=0)
        ulp = self._binary("PROD", self._binary("SUB", upper, lower), self._fill(2.0**-16, 3))
        place = self._fill(0.0, 3)
        for bit in reversed(range(16)):
            further = self._binary("SUM", place, self._fill(float(1 << bit), 3))
            bound = self._binary("SUM", lower, self._binary("PROD", ulp, further))
            place = self._select(is_beyond(bound), further, place)
        place = self._binary("SUM", place, self._fill(1.0, 3))
        return self._binary("SUM", lower, self._binary("PROD", ulp, place))

    def _inverse_cdf(self, mass: ITensor, uniform: ITensor) -> ITensor:
        """Finds the id at which the cumulative mass [B, R, V] passes uniform [B, R, 1] of the whole: [B, R]."""
        axis = self._constant(torch.tensor(2, dtype=torch.int32))
        layer = self.network.add_cumulative(mass, axis, self.trt.CumulativeOperation.SUM, False, False)
        cdf = self._layer(layer, "cdf")
        point = self._binary("PROD", uniform, self._slice(cdf, 2, mass.shape[2] - 1, 1))
        passed = self._cast(self._not(self._binary("GREATER", cdf, point)), self.trt.int32)
        drawn = self._reduce("SUM", passed, 2, keep=False)
        # Rounding may put the point at the very end: the last id that was kept is meant.
        is_kept = self._binary("GREATER", mass, self._fill(0.0, 3))
        last = self._reduce("MAX", self._select(is_kept, self._vocabulary_ids(mass), self._ints(0, 3)), 2, keep=False)
        return self._binary("MIN", drawn, last)

    def _whole_vocabulary(self, logits: ITensor) -> ITensor:
        """Joins every rank's logits [B, R, V/tp]: [B, R, V]."""
        if self.tp == 1:
            return logits
        flat = self._reshape(logits, (1, -1, logits.shape[2]))  # [1, B * R, V/tp]
        ranks = self._all_gather(flat)
        vocabulary = self.tp * logits.shape[2]
        rows = self._reshape(ranks, (-1, vocabulary), first=(1, 0, 2))  # [B * R, V]
        shape = self._concat([self._size(logits, 0), self._size(logits, 1), self._longs(vocabulary)], axis=0)
        return self._reshape_to(rows, shape)

    def accept(
        self, token_ids: ITensor, target_ids: ITensor, logit_rows: ITensor, row_count: ITensor
    ) -> Acceptance[ITensor]:
        if self.deepest is not None:
            return self._accept_tree(token_ids, target_ids, logit_rows, row_count)
        self._scope = "accept"
        one = self._ints(1, 2)
        next_rows = self._binary("SUM", logit_rows, one)  # [B, R]: where each choice's draft stands
        last = self._binary("SUB", self._row_count(token_ids, 1), one)
        drafts = self._gather(token_ids, self._binary("MIN", next_rows, last), axis=1, per_slot=True)
        # The last choice has no draft. (Dropping its column would leave prefill's R = 1 with an empty tensor.)
        has_draft = self._binary(
            "LESS", self._row_offsets(logit_rows), self._binary("SUB", self._row_count(logit_rows, 1), one)
        )
        is_real = self._binary("LESS", next_rows, self.column(row_count))
        equal = self._binary("AND", self._binary("EQUAL", drafts, target_ids), self._binary("AND", is_real, has_draft))
        misses = self._binary("SUB", one, self._cast(equal, self.trt.int32))
        axis = self._constant(torch.tensor(1, dtype=torch.int32))
        run = self._layer(
            self.network.add_cumulative(misses, axis, self.trt.CumulativeOperation.SUM, False, False), "run"
        )
        unbroken = self._cast(self._binary("EQUAL", run, self._ints(0, 2)), self.trt.int32)
        index = self._reduce("SUM", unbroken, 1)  # [B, 1]
        bonus = self._gather(target_ids, index, axis=1, per_slot=True)
        committed = self._binary("SUM", self._gather(logit_rows, index, axis=1, per_slot=True), one)
        accepted, committed, bonus = (self._reshape(x, (-1,)) for x in (index, committed, bonus))
        return Acceptance(accepted, committed, bonus)

    def lookup(self, name: str, ids: ITensor) -> ITensor:
        self._scope = name
        return self._gather(self._weight(name), ids, axis=0)

    def masked_block(self, bonus: ITensor, block_offsets: ITensor, mask_id: int) -> ITensor:
        is_first = self._binary("EQUAL", block_offsets, self._ints(0, 2))
        return self._select(is_first, self.column(bonus), self._ints(mask_id, 2))

    def join_ids(self, bonus: ITensor, drafts: ITensor) -> ITensor:
        return self._concat([self.column(bonus), drafts], axis=1)

    def column(self, ids: ITensor) -> ITensor:
        return self._once(ids, "column", lambda: self._reshape(ids, (-1, 1)))

    def _vocabulary_ids(self, logits: ITensor) -> ITensor:
        """Emits 0..V-1 as int32 [1, 1, V]."""
        size = logits.shape[2]
        key = ("vocabulary", str(size))
        if key not in self._memo:
            self._memo[key] = self._constant(torch.arange(size, dtype=torch.int32)[None, None])
        return self._memo[key]


def ordered_values(dtype: torch.dtype) -> torch.Tensor:
    """Lists every finite value of a 16-bit float type, ascending; the largest is repeated to make 65,536."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()].unique()  # also sorts, and makes one zero of two
    padding = values[-1:].expand((1 << 16) - len(values))
    return torch.cat([values, padding]).to(dtype)
