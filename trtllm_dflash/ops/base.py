"""The vocabulary of operations that models and the step are written over.

A model is plain Python over `Ops`. `TorchOps` computes it; a compiler backend emits it as layers. Tensors are opaque
(`T`): models never look inside one. Weights, RoPE tables and caches are named, never passed.

Letters: B slots in the call, Q rows a slot, R logit rows, N any number of rows, H hidden, D head size, S cache length,
V vocabulary, Bd length of the drafted block. Integers are int32. Under tensor parallelism a rank sees its own heads,
its own FFN columns and its own slice of the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trtllm_dflash.ops.draft_tree import DraftTree
from trtllm_dflash.ops.family_ops import FamilyOps
from trtllm_dflash.ops.layers import AttentionLayer, ClampedSwiglu, DeltaLayer, LatentLayer, MoELayer

if TYPE_CHECKING:  # they import torch, and models need none
    from trtllm_dflash.ops.choosing import Logprobs, TokenMask
    from trtllm_dflash.ops.penalties import KeptShapes, Penalties

__all__ = [
    "Acceptance",
    "AttentionLayer",
    "ClampedSwiglu",
    "Context",
    "DeltaLayer",
    "LatentLayer",
    "MoELayer",
    "Ops",
    "Residual",
    "SamplingInputs",
]


T = TypeVar("T")


@dataclass(frozen=True)
class SamplingInputs(Generic[T]):
    """Sampling parameters of each slot. A temperature of 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: T  # [B] float32
    top_k: T  # [B] int32
    top_p: T  # [B] float32
    uniform: T  # [B, R] float32 in [0, 1): one number a row
    min_p: T | None = None  # [B] float32; 0 filters nothing


@dataclass(frozen=True)
class Acceptance(Generic[T]):
    """The outcome of verifying each slot's drafts."""

    accepted: T  # [B] drafts that equal the target's own choice, as do all before them
    committed: T  # [B] rows of this call whose tokens are now final
    bonus: T  # [B] the target's choice after the last of them
    next_start: T | None = None  # [B] start + committed, where a backend has it at once
    path: T | None = None  # a tree's accepted rows, as the backend has them; None: they are a run


@dataclass(frozen=True)
class Residual(Generic[T]):
    """The residual stream, and a term that is still to be added: kernels may add it where the stream is next normed."""

    x: T  # [B, N, H]
    pending: T | None = None  # [B, N, H], or what the backend's own operations make such of


@dataclass(frozen=True)
class Context(Generic[T]):
    """A drafter layer's context rows on their way into its caches: for `keep_context` and `block_attention` alone.

    The backend decides what the tensors hold: rows that are normed and rotated, or as they were projected.
    """

    tensors: tuple[T, ...]
    index: int  # of the layer, among the drafter's


class Ops(FamilyOps[T], ABC, Generic[T]):
    """The operations of a backend; see the module's docstring for the letters.

    Attributes:
        tp: number of ranks.
        rank: this rank.
    """

    tp: int
    rank: int

    # -- the network -----------------------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, name: str, ids: T) -> T:
        """Looks up ids [B, N] in the table `name.weight` [V, H] (whole on every rank): [B, N, H]."""

    @abstractmethod
    def linear(self, name: str, x: T) -> T:
        """Multiplies x [B, N, I] by `name.weight` [O, I] transposed, and adds `name.bias` [O] if any: [B, N, O]."""

    @abstractmethod
    def rms_norm(self, name: str, x: T, eps: float) -> T:
        """Computes x / sqrt(mean(x^2) + eps) * `name.weight` over the last dimension, in FP32 inside."""

    @abstractmethod
    def add(self, x: T, y: T) -> T:
        """Adds x and y, of one shape."""

    @abstractmethod
    def concat(self, xs: Sequence[T]) -> T:
        """Joins [B, N, H_i] along the last dimension."""

    @abstractmethod
    def split_heads(self, x: T, first: int, count: int, head_size: int) -> T:
        """Takes heads first..first+count-1 of x [B, N, heads*D], as [B, count, N, D]."""

    @abstractmethod
    def rope(self, name: str, x: T, positions: T) -> T:
        """Rotates x [B, heads, N, D] by positions [B, N], halves as pairs; tables `name.cos`, `name.sin` [P, D/2].

        Where the tables are [P, R/2], the first R numbers of a head are rotated, and the others stay.
        """

    @abstractmethod
    def append_kv(self, name: str, rows: T, start: T) -> T:
        """Writes rows [B, heads, N, D] into cache `name` [B, heads, S, D] at start [B], in place; returns the cache.

        Rows at or past S are dropped without a word. A cache in FP8 (E4M3) holds rows divided by the FP32 number
        `name.scale` [], rounded to nearest and saturated; what is returned is what those stand for, in the rows' type,
        of all the rows that any slot has now: a call sees its own rows as a later one will.
        """

    @abstractmethod
    def attention(
        self,
        q: T,
        keys: T,
        values: T,
        lengths: T,
        causal: bool,
        window: int | None = None,
        sinks: str | None = None,
        scale: float | None = None,
    ) -> T:
        """Computes softmax(q k^T * scale) v over lengths [B] cache rows: q [B, heads, N, D] -> [B, N, heads*D].

        The last query row is aligned with the last key: row i stands at p = lengths - N + i. Causal: it sees no key
        after p. window: it sees no key at or before p - window. sinks: the name of a tensor [heads]; each is one more
        logit of its head's softmax, not scaled, whose value is zero. scale: 1 / sqrt(D) unless it is given.
        """

    @abstractmethod
    def swiglu(self, x: T) -> T:
        """Computes silu(gate) * up [B, N, F] of x [B, N, 2F], which holds gate, then up."""

    @abstractmethod
    def moe(self, layer: MoELayer, x: T, logits: T) -> T:
        """Computes this rank's part of a mixture of experts: x [B, N, H], logits [B, N, experts] -> [B, N, H].

        A row's experts are those of its top_k largest logits (the lowest ids among equals). Their weights are the
        softmax over those top_k logits where `layer.normalized`, else the softmax over all logits; in FP32. (Softmax,
        then top k, then division by their sum is the first of the two.) With sigmoid scores they are those whose
        sigmoid(logit) + correction bias is largest, and the weights are the sigmoids without it, divided by their sum
        where `layer.normalized`. Each computes act(x gate_up^T + bias) down^T + bias; the result is the weighted sum
        over those that this rank has, to be summed over the ranks by `all_reduce`. logits are the same on all ranks.
        """

    @abstractmethod
    def all_reduce(self, x: T) -> T:
        """Sums x over the ranks."""

    # -- fused: each is what is written here; a backend that has one kernel for it overrides it ---------------------

    def add_rms_norm(self, name: str, x: T, y: T, eps: float) -> tuple[T, T]:
        """Computes x + y, and that sum normed by `name`."""
        total = self.add(x, y)
        return total, self.rms_norm(name, total, eps)

    def block_embedding(self, name: str, bonus: T, block_offsets: T, mask_id: int) -> T:
        """Embeds [bonus, MASK, ..., MASK], for bonus [B] and block_offsets [1, Bd]: [B, Bd, H]."""
        return self.embedding(name, self.masked_block(bonus, block_offsets, mask_id))

    def linears(self, names: tuple[str, ...], x: T) -> tuple[T, ...]:
        """Computes the linears `names` of x [B, N, I]: [B, N, O] each."""
        return tuple(self.linear(name, x) for name in names)

    def linear_swiglu(self, name: str, x: T) -> T:
        """Multiplies x [B, N, I] by `name`, which holds gate, then up: silu(gate) * up, [B, N, F]."""
        return self.swiglu(self.linear(name, x))

    def add_product(self, name: str, x: T, y: T) -> Residual[T]:
        """Adds the linear `name` of y [B, N, I], summed over the ranks, to the stream x [B, N, H]."""
        return Residual(x, self.all_reduce(self.linear(name, y)))

    def add_mixture(self, layer: MoELayer, stream: T, x: T, logits: T, shared_gate: T | None = None) -> Residual[T]:
        """Adds `moe` of x, with it the shared expert times sigmoid(shared_gate [B, N, 1]), to the stream [B, N, H]."""
        y = self.moe(layer, x, logits)
        if layer.has_shared:
            shared = layer.prefix + "shared_expert"
            own = self.linear(shared + ".down_proj", self.linear_swiglu(shared + ".gate_up_proj", x))
            y = self.add(y, own) if shared_gate is None else self.add_gated(y, own, shared_gate)
        return Residual(stream, self.all_reduce(y))

    def add_pending(self, x: Residual[T]) -> T:
        """Adds the pending term: returns the whole stream."""
        return x.x if x.pending is None else self.add(x.x, x.pending)

    def norm(self, name: str, x: Residual[T], eps: float) -> tuple[T, T]:
        """Returns the whole stream, and that normed by `name`."""
        if x.pending is None:
            return x.x, self.rms_norm(name, x.x, eps)
        return self.add_rms_norm(name, x.x, x.pending, eps)

    def norm_linear(self, norm: str, name: str, x: Residual[T], eps: float) -> tuple[T, T]:
        """Returns the whole stream, and the linear `name` of that normed by `norm`."""
        total, h = self.norm(norm, x, eps)
        return total, self.linear(name, h)

    def norm_linears(self, norm: str, names: tuple[str, ...], x: Residual[T], eps: float) -> tuple[T, tuple[T, ...]]:
        """Returns the whole stream, and the linears `names` of that normed by `norm`."""
        total, h = self.norm(norm, x, eps)
        return total, self.linears(names, h)

    def norm_and_linears(
        self, norm: str, names: tuple[str, ...], x: Residual[T], eps: float
    ) -> tuple[T, T, tuple[T, ...]]:
        """Returns the whole stream, that normed by `norm`, and the linears `names` of what is normed."""
        total, h = self.norm(norm, x, eps)
        return total, h, self.linears(names, h)

    def norm_linear_swiglu(self, norm: str, name: str, x: Residual[T], eps: float) -> tuple[T, T]:
        """Returns the whole stream, and `linear_swiglu` of that normed by `norm`."""
        total, h = self.norm(norm, x, eps)
        return total, self.linear_swiglu(name, h)

    def self_attention(self, layer: AttentionLayer, qkv: T, start: T) -> T:
        """Attends causally over the cache and the rows themselves, with the layer's window and sinks: [B, N, heads*D].

        qkv [B, N, (heads + 2 kv_heads)*D] holds the rows' queries, keys and values, at positions from start [B] on;
        keys and values are appended to the layer's caches.
        """
        q, k, v = self._split_qkv(layer, qkv, self.positions(start, qkv))
        keys = self.append_kv(layer.prefix + "key", k, start)
        values = self.append_kv(layer.prefix + "value", v, start)
        lengths = self.key_lengths(start, qkv)
        return self.attention(q, keys, values, lengths, True, layer.window, layer.sinks, layer.scale)

    def context_rows(self, layer: AttentionLayer, kv: T, index: int, start: T) -> Context[T]:
        """Takes the context rows of a drafter's index-th layer, from start [B] on, out of all layers' K and V in `kv`.

        kv: [B, Q, layers*2*kv_heads*D], as projected.
        """
        k = self.split_heads(kv, 2 * index * layer.kv_heads, layer.kv_heads, layer.head_size)
        v = self.split_heads(kv, (2 * index + 1) * layer.kv_heads, layer.kv_heads, layer.head_size)
        k = self.rope(layer.rope, self._norm_heads(layer, "k", k), self.positions(start, kv))
        return Context((k, v), index)

    def keep_context(self, layer: AttentionLayer, context: Context[T], start: T) -> None:
        """Writes all rows of context into the layer's caches at start [B]."""
        k, v = context.tensors
        self.append_kv(layer.prefix + "key", k, start)
        self.append_kv(layer.prefix + "value", v, start)

    def block_attention(self, layer: AttentionLayer, context: Context[T], qkv: T, start: T, committed: T) -> T:
        """Attends from a drafted block to the cache, its new context rows and itself: [B, Bd, heads*D].

        The caches get one run of rows at start [B]: the first committed [B] rows of context, then at once the block's,
        whose queries, keys and values are qkv [B, Bd, (heads + 2 kv_heads)*D].
        """
        block_start = self.block_start(start, committed)
        q, k, v = self._split_qkv(layer, qkv, self.positions(block_start, qkv))
        context_k, context_v = context.tensors
        keys = self.append_kv(layer.prefix + "key", self.splice_rows(context_k, k, committed), start)
        values = self.append_kv(layer.prefix + "value", self.splice_rows(context_v, v, committed), start)
        lengths = self.key_lengths(block_start, qkv)
        return self.attention(q, keys, values, lengths, layer.causal_block, layer.window, layer.sinks)

    def _split_qkv(self, layer: AttentionLayer, qkv: T, positions: T) -> tuple[T, T, T]:
        """Splits qkv into q [B, heads, N, D] and k [B, kv_heads, N, D], normed and rotated, and v."""
        q = self.split_heads(qkv, 0, layer.heads, layer.head_size)
        k = self.split_heads(qkv, layer.heads, layer.kv_heads, layer.head_size)
        v = k
        if not layer.keys_as_values:
            v = self.split_heads(qkv, layer.heads + layer.kv_heads, layer.kv_heads, layer.head_size)
        if layer.norms_values:
            assert layer.norm_eps is not None
            v = self.unit_norm(v, layer.norm_eps)
        q, k = self._norm_heads(layer, "q", q), self._norm_heads(layer, "k", k)
        return self.rope(layer.rope, q, positions), self.rope(layer.rope, k, positions), v

    def _norm_heads(self, layer: AttentionLayer, which: str, x: T) -> T:
        if layer.norm_eps is None:
            return x
        return self.rms_norm(f"{layer.prefix}self_attn.{which}_norm", x, layer.norm_eps)

    # -- of operations that some families alone need ----------------------------------------------------------------

    def add_gated(self, x: T, y: T, gate: T) -> T:
        """Adds to x what `gated` makes of y and its gate."""
        return self.add(x, self.gated(y, gate))

    def norm_linear_geglu(self, norm: str, name: str, x: Residual[T], eps: float) -> tuple[T, T]:
        """Returns the whole stream, and `geglu` of `name`'s product of that normed by `norm`."""
        total, h = self.norm_linear(norm, name, x, eps)
        return total, self.geglu(h)

    def add_normed(self, norm: str, x: T, y: T, eps: float, factor: str | None = None) -> T:
        """Computes x plus y normed by `norm`; times the one number `factor` [1], where there is one."""
        total = self.add(x, self.rms_norm(norm, y, eps))
        return total if factor is None else self.multiply(factor, total)

    def scaled_norm(self, norm: str, x: T, eps: float, scale: float) -> T:
        """Computes x normed by `norm`, times a number."""
        return self.scale(self.rms_norm(norm, x, eps), scale)

    # -- rows and positions ----------------------------------------------------------------------------------------

    # Every layer asks for the same three: a backend makes each of them once a step.

    @abstractmethod
    def positions(self, start: T, rows: T) -> T:
        """Counts the positions [B, N] of rows [B, N, ...] that begin at start [B]."""

    @abstractmethod
    def key_lengths(self, start: T, rows: T) -> T:
        """Counts the cache rows in use [B] once rows [B, N, ...] are written at start [B]: start + N."""

    @abstractmethod
    def block_start(self, start: T, committed: T) -> T:
        """Computes the position of a block behind committed [B] rows of context at start [B]: their sum."""

    @abstractmethod
    def gather_rows(self, x: T, rows: T) -> T:
        """Gathers x [B, N, H] at rows [B, R], slot by slot, ascending: [B, R, H]."""

    @abstractmethod
    def splice_rows(self, context: T, block: T, committed: T) -> T:
        """Joins rows of each slot: its first committed [B] rows of context, then at once all rows of block.

        context [B, heads, Q, D], block [B, heads, Bd, D] -> [B, heads, Q + Bd, D]; what follows the block is scratch.
        """

    @abstractmethod
    def drop_first_row(self, x: T) -> T:
        """Drops row 0 of x [B, N, H]: [B, N - 1, H]."""

    def for_drafts(self) -> "Ops[T]":
        """Operations for the drafter, on whose rounding no text depends: the same, or faster ones."""
        return self

    # -- trees of drafts: their rows are no run, and only one path of them is accepted -------------------------------

    def likeliest(self, logits: T) -> tuple[T, T]:
        """Finds each row's most likely id as `argmax` does, and its log-probability, FP32 [B, R]."""
        raise NotImplementedError

    def top_ids(self, logits: T, count: int) -> tuple[T, T]:
        """Finds each row's `count` most likely ids, the lowest among equals first, and their log-probabilities.

        logits [B, N, V/tp] -> FP32 [B, N, count], natural logarithms over the whole V, and ids [B, N, count].
        """
        raise NotImplementedError

    def grow_tree(self, tree: DraftTree, bonus: T, log_probs: T, ids: T) -> tuple[T, T]:
        """Grows each slot's best tree under its bonus token [B], of ids and their log-probabilities [B, Bd - 1, RANKS].

        Returns the rows' tokens [B, nodes + 1] and the row of each one's parent [B, nodes + 1], -1 for row 0's. A row
        comes after its parent, and the chain of most likely drafts, as far as the tree has it, comes first.
        """
        raise NotImplementedError

    def first_choices(self, x: T, verdict: Acceptance[T]) -> T:
        """Puts what x [B, R, ...] has of each slot's accepted rows first, by depth; what follows is scratch."""
        return x

    def announce_taps(self, taps: Sequence[T]) -> None:
        """Says, before a verdict is found, which taps `final_rows` is to join: a backend may do both at once."""

    def final_rows(self, taps: Sequence[T], verdict: Acceptance[T]) -> T:
        """Joins taps [B, Q, H] as `concat` does, of the rows whose tokens are final, by position; then scratch."""
        return self.concat(taps)

    def move_kv(self, layers: Sequence[AttentionLayer], start: T, verdict: Acceptance[T]) -> None:
        """Moves the accepted rows' K and V, in the caches of all these layers, to their positions from start [B] on."""

    # -- choosing tokens -------------------------------------------------------------------------------------------

    @abstractmethod
    def argmax(self, logits: T) -> T:
        """Finds each row's most likely id, the lowest among equals: logits [B, R, V/tp] -> [B, R] of the whole V."""

    @abstractmethod
    def sample(self, logits: T, sampling: SamplingInputs[T]) -> T:
        """Draws each row's id from its filtered distribution; rows of temperature 0 are greedy. Shapes as `argmax`.

        logits / temperature; keep those that are at least min_p as likely as the largest; of those, the top_k largest;
        of those, the smallest set of largest probabilities that reaches top_p (equals of the last one stay in); then
        the inverse CDF, in order of ids, at the row's uniform number.
        """

    def penalize(self, logits: T, penalties: "Penalties[T]") -> T:
        """Changes some rows of logits [1, R, V/tp]; returns all in FP32. A session without it refuses such requests."""
        raise NotImplementedError

    def mask(self, logits: T, mask: "TokenMask[T]") -> T:
        """Rules tokens out in some rows of logits [1, R, V/tp]; returns all in FP32. Sessions as in `penalize`."""
        raise NotImplementedError

    def shape(self, logits: T, shapes: "KeptShapes", token_ids: T, start: T) -> T:
        """Penalizes and masks logits [B, R, V/tp] of a captured step's rows; returns all in FP32. As in `penalize`.

        token_ids [B, Q] and start [B]: the step's, for each row's reply has those up to its own.
        """
        raise NotImplementedError

    def argmax_shaped(self, logits: T, shapes: "KeptShapes", token_ids: T, start: T) -> T:
        """Finds each row's most likely id of what `shape` gives."""
        return self.argmax(self.shape(logits, shapes, token_ids, start))

    def log_probabilities(self, logits: T, ids: T) -> "Logprobs[T]":
        """Computes log-probabilities of each row's token, ids [B, R], and of the most likely ones. Shapes as `argmax`.

        The log of the softmax of the logits as they are, in FP32. A session without it refuses such
        requests.
        """
        raise NotImplementedError

    @abstractmethod
    def accept(self, token_ids: T, target_ids: T, logit_rows: T, row_count: T) -> Acceptance[T]:
        """Compares each draft with the target's choice one row before it.

        token_ids [B, Q]; target_ids [B, R], the choices at logit_rows [B, R]; row_count [B]. A draft counts while it
        and all before it are equal, and only within row_count. A prefill chunk has R = 1: nothing to compare, and all
        its rows are committed.
        """

    @abstractmethod
    def lookup(self, name: str, ids: T) -> T:
        """Looks up ids [B, ...] in the int32 table `name` [n], of the same shape."""

    @abstractmethod
    def masked_block(self, bonus: T, block_offsets: T, mask_id: int) -> T:
        """Makes [bonus, MASK, ..., MASK] for bonus [B] and block_offsets [1, Bd]: [B, Bd]."""

    @abstractmethod
    def join_ids(self, bonus: T, drafts: T) -> T:
        """Puts bonus [B] before drafts [B, Bd - 1]: [B, Bd]."""

    @abstractmethod
    def column(self, ids: T) -> T:
        """Reshapes ids [B] to [B, 1]."""
