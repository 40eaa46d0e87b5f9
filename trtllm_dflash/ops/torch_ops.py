"""`Ops` computed by PyTorch, on CPU or CUDA, in FP32, BF16 or FP16: the numerical reference and the default backend."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from trtllm_dflash.ops import cpu_products
from trtllm_dflash.ops.activations import sigmoid, silu
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, DeltaLayer, MoELayer, SamplingInputs
from trtllm_dflash.ops.choosing import MOST_LOGPROBS, Logprobs, TokenMask, largest_ids
from trtllm_dflash.ops.communicator import Communicator, Solo
from trtllm_dflash.ops.cpu_norm import normed
from trtllm_dflash.ops.delta_rule import gated_delta
from trtllm_dflash.ops.delta_states import DeltaStates, Run
from trtllm_dflash.ops.draft_tree import LEAST, RANKS, TOLL, DraftTree
from trtllm_dflash.ops.experts import Experts, in_tiles, one_by_one
from trtllm_dflash.ops.fp8 import (
    FP8,
    Fp8Weight,
    dequantize_cache_rows,
    multiplies,
    quantize_blocks,
    quantize_cache_rows,
    quantize_rows,
    scaled_product,
)
from trtllm_dflash.ops.linear_weight import QuantizedWeight, linear_weight
from trtllm_dflash.ops.penalties import KeptShapes, Penalties, penalized, shaped
from trtllm_dflash.ops.torch_drafting import TorchDraftingOps
from trtllm_dflash.ops.torch_family_ops import TorchFamilyOps

Tensor = torch.Tensor

#: Rows of all heads for which torch's fused attention keeps a GPU busy. With heads of 256 on one NVIDIA H200 16 rows
#: of 32 slots then take a quarter of the time, of 8 slots two thirds; of one slot they would take a tenth more.
_MANY_ROWS = 2048


class TorchOps(TorchFamilyOps, TorchDraftingOps):
    """Computes each operation at once, with torch.

    Args:
        weights: a rank's engine tensors by name, with the RoPE tables, all on one device.
        caches: K/V caches by name, [B, heads, S, D]; their first rows are the call's slots.
        communicator: the other ranks; none by default.
        states: of gated delta nets, where the model has some, and `runs`: the slots' rows that the call has.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None = None,
        states: DeltaStates | None = None,
        runs: Sequence[Run] = (),
    ) -> None:
        self.weights = weights
        self.caches = caches
        self.states = states
        self.runs = runs
        self.communicator = communicator or Solo()
        self.tp = self.communicator.size
        self.rank = self.communicator.rank
        self._kept: dict[tuple[object, ...], tuple[Tensor, Any]] = {}

    def _once(self, key: tuple[object, ...], source: Tensor, make: Callable[[], Any]) -> Any:
        """Caches the result of `make` for this very tensor: every layer of a pass needs the same one."""
        kept = self._kept.get(key)
        if kept is None or kept[0] is not source:
            kept = self._kept[key] = (source, make())
        return kept[1]

    def advance(self) -> None:
        """Lets recurrent states stand where the step leaves its slots; once, behind all layers."""
        if self.states is not None:
            self.states.finish(self.runs)

    # -- the network -----------------------------------------------------------------------------------------------

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weights[name + ".weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = linear_weight(self.weights, name), self.weights.get(name + ".bias")
        if isinstance(weight, Tensor):
            x = x if x.dtype == weight.dtype else x.to(weight.dtype)  # a router's may be FP32 in any engine
            return F.linear(x, weight, bias) if x.is_cuda else cpu_products.product(x, weight, bias)
        y = self.quantized_product(x, weight)
        return y if bias is None else y + bias

    def quantized_product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Multiplies x [B, N, I] by a quantized weight [O, I], transposed: [B, N, O] in x's type.

        Where the device multiplies FP8, x is rounded to FP8 too: with a scale a row of its own, or a scale for each 128
        of a row where the weight has one a block. Else x is multiplied by the numbers that the weight stands for.
        """
        if not isinstance(weight, Fp8Weight) or not multiplies(x.device, weight, x.dtype):
            numbers = weight.dequantize().to(x.dtype)
            return F.linear(x, numbers) if x.is_cuda else cpu_products.product(x, numbers)
        quantize = self._quantize_blocks if weight.by_block else self._quantize_rows
        return scaled_product(x.flatten(0, 1), weight, quantize).view(*x.shape[:2], -1)

    def _quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x)

    def _quantize_blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_blocks(x)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        weight = self.weights[name + ".weight"]
        if not x.is_cuda:
            return normed(x.to(weight.dtype), eps).mul_(weight).to(x.dtype)
        if weight.dtype == torch.float32:  # a norm's may be, in any engine
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(xs), dim=-1)

    def split_heads(self, x: Tensor, first: int, count: int, head_size: int) -> Tensor:
        columns = x[..., first * head_size : (first + count) * head_size]
        return columns.view(*x.shape[:2], count, head_size).transpose(1, 2)

    def rope(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._once(("rope", name), positions, lambda: self._rotation(name, positions))
        if cos.shape[-1] < x.shape[-1]:  # partial: what follows stays as it is
            rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
            return torch.cat([_rotated(rotated, cos, sin), rest], dim=-1)
        return _rotated(x, cos, sin)

    def _rotation(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Looks up both halves' cos, and their sin with its sign, at positions [B, N], each [B, 1, N, D]."""
        cos, sin = (self.weights[f"{name}.{table}"][positions].unsqueeze(1) for table in ("cos", "sin"))
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _split_qkv(self, layer: AttentionLayer, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if qkv.is_cuda:
            return super()._split_qkv(layer, qkv, positions)
        both = self.split_heads(qkv, 0, layer.heads + layer.kv_heads, layer.head_size)  # queries and keys at once
        first_value = layer.heads + (0 if layer.keys_as_values else layer.kv_heads)
        v = self.split_heads(qkv, first_value, layer.kv_heads, layer.head_size)
        if layer.norms_values:
            assert layer.norm_eps is not None
            v = normed(v, layer.norm_eps)
        if layer.norm_eps is not None:
            q_norm, k_norm = (self.weights[f"{layer.prefix}self_attn.{which}_norm.weight"] for which in "qk")
            both = normed(both.to(q_norm.dtype), layer.norm_eps)
            both[:, : layer.heads].mul_(q_norm)
            both[:, layer.heads :].mul_(k_norm)
            both = both.to(qkv.dtype)
        both = self.rope(layer.rope, both, positions)
        return both[:, : layer.heads], both[:, layer.heads :], v

    def append_kv(self, name: str, rows: Tensor, start: Tensor) -> Tensor:
        cache = self.caches[name]
        if cache.dtype != FP8:
            self._write(cache, rows, start)
            return cache
        scale = self.weights[name + ".scale"]
        # Written as bytes: not every one of torch's kernels knows FP8.
        self._write(cache.view(torch.uint8), quantize_cache_rows(rows, scale).view(torch.uint8), start)
        # On CUDA all of it: reading back how far the slots go would stop the device.
        used = cache.shape[2] if cache.is_cuda else int(start.max()) + rows.shape[2]
        return dequantize_cache_rows(cache[:, :, :used], scale, rows.dtype)

    @staticmethod
    def _write(cache: Tensor, rows: Tensor, start: Tensor) -> None:
        if cache.is_cuda:
            offsets = torch.arange(rows.shape[2], device=rows.device)
            slots = torch.arange(rows.shape[0], device=rows.device)
            # The session keeps 2 * block spare rows, so that the clamp never meets a row in use.
            index = (start[:, None] + offsets).clamp(max=cache.shape[2] - 1)
            cache.transpose(1, 2).index_put_((slots[:, None], index.long()), rows.transpose(1, 2))
            return
        for slot, first in enumerate(start.tolist()):
            room = cache[slot, :, first : first + rows.shape[2]]
            room.copy_(rows[slot, :, : room.shape[1]])

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        causal: bool,
        window: int | None = None,
        sinks: str | None = None,
        scale: float | None = None,
    ) -> Tensor:
        # On CPU the longest sequence bounds the work; on CUDA reading it back would stop the device.
        bound = keys.shape[2] if keys.is_cuda else int(lengths.max())
        rows = q.shape[2]
        mask = None
        if lengths.is_cuda or len(lengths) > 1 or (causal and rows > 1) or window is not None:
            mask = self._once(
                ("mask", rows, causal, window),
                lengths,
                lambda: attention_mask(rows, lengths, bound, causal, window, q.dtype),
            )
        keys, values = keys[:, :, :bound], values[:, :, :bound]
        if sinks is not None:
            assert scale is None
            return self._attention_with_sinks(q, keys, values, mask, self.weights[sinks])
        gqa = q.shape[1] != keys.shape[1]
        if gqa and mask is not None and rows > 1 and q.is_cuda and q[..., 0].numel() >= _MANY_ROWS:
            out = self._attention_by_groups(q, keys, values, mask, lengths, scale)
        else:
            out = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(2)

    def _attention_by_groups(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, scale: float | None
    ) -> Tensor:
        """Attends with the query heads that share a key head as rows of it: [B, heads, N, D].

        With a mask, what torch has for shared heads is slow with many rows; its kernels for heads of their own are not.
        """
        group = q.shape[1] // keys.shape[1]
        both = self._once(("by groups", id(mask), group), lengths, lambda: mask.repeat(1, 1, group, 1))
        folded = q.unflatten(1, (-1, group)).flatten(2, 3)  # [B, kv_heads, group * N, D]
        out: Tensor = F.scaled_dot_product_attention(folded, keys, values, both, scale=scale)
        return out.reshape(q.shape)

    @staticmethod
    def _attention_with_sinks(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
        """Attends with one more logit a head, sinks [heads], whose value is zero; the softmax in FP32."""
        slots, heads, rows, size = q.shape
        # The query heads that share a key head, as rows of it.
        grouped = q.reshape(slots, keys.shape[1], -1, size)
        scores = (grouped @ keys.transpose(2, 3)).view(slots, heads, rows, -1).float() * size**-0.5
        if mask is not None:
            scores = scores + mask
        sink = sinks.float().view(1, -1, 1, 1).expand(slots, -1, rows, -1)
        probs = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(values.dtype)
        out = probs.reshape(slots, keys.shape[1], -1, keys.shape[2]) @ values
        return out.view(slots, heads, rows, size).transpose(1, 2).flatten(2)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        compute = in_tiles if x.is_cuda else one_by_one
        experts = Experts.of(self.weights, layer)
        return compute(layer, experts, x.flatten(0, 1), logits.flatten(0, 1)).view_as(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.communicator.all_reduce(x)

    # -- hybrids ---------------------------------------------------------------------------------------------------

    def columns(self, x: Tensor, first: int, count: int) -> Tensor:
        return x[..., first : first + count]

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return x.float().mul(sigmoid(gate.float())).to(x.dtype)

    def gated_delta(self, layer: DeltaLayer, x: Tensor, gates: Tensor, start: Tensor) -> Tensor:
        assert self.states is not None
        return gated_delta(layer, self.weights, self.states, self.runs, x, gates)

    # -- rows and positions ----------------------------------------------------------------------------------------

    def positions(self, start: Tensor, rows: Tensor) -> Tensor:
        count = rows.shape[1]
        positions: Tensor = self._once(("positions", count), start, lambda: start[:, None] + _offsets(count, start))
        return positions

    def key_lengths(self, start: Tensor, rows: Tensor) -> Tensor:
        count = rows.shape[1]
        lengths: Tensor = self._once(("lengths", count), start, lambda: start + count)
        return lengths

    def block_start(self, start: Tensor, committed: Tensor) -> Tensor:
        first: Tensor = self._once(("block start",), committed, lambda: start + committed)
        return first

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        if rows.shape[1] == x.shape[1]:
            return x  # ascending: all of them
        return x.take_along_dim(rows.long()[..., None], dim=1)

    def splice_rows(self, context: Tensor, block: Tensor, committed: Tensor) -> Tensor:
        run = torch.cat([context, block], dim=2)
        index = self._once(
            ("splice", context.shape[2]), committed, lambda: self._splice_index(context, block, committed)
        )
        return run.gather(2, index.expand_as(run))

    @staticmethod
    def _splice_index(context: Tensor, block: Tensor, committed: Tensor) -> Tensor:
        """Indexes context's and block's rows, joined, by the run that they make: [B, 1, Q + Bd, 1]."""
        rows, drafts = context.shape[2], block.shape[2]
        run = torch.arange(rows + drafts, device=committed.device)
        past = run - committed[:, None]  # rows past the context
        index = torch.where(past < 0, run, rows + past.clamp(0, drafts - 1))
        return index[:, None, :, None]

    def drop_first_row(self, x: Tensor) -> Tensor:
        return x[:, 1:]

    # -- trees of drafts -------------------------------------------------------------------------------------------

    def top_ids(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        total, best, ids = self._top(logits, count)
        if self.tp > 1:
            total, best, ids = (
                torch.cat(self.communicator.all_gather(x), dim=-1)
                for x in (total, best, ids + self.rank * logits.shape[-1])
            )
            total = total.logsumexp(dim=-1, keepdim=True)
            # Stable, and lower ranks have lower ids: the lowest among equals stays first.
            best, places = best.sort(dim=-1, descending=True, stable=True)
            best, ids = best[..., :count], ids.gather(-1, places[..., :count])
        return best - total, ids.int()

    def _top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the largest of this rank's logits in each row, and their ids, and the log-sum-exp [..., 1] of all."""
        logits = logits.float()
        ids = largest_ids(logits, count)
        return logits.logsumexp(dim=-1, keepdim=True), logits.gather(-1, ids), ids

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, ids = self.top_ids(logits, 1)
        return ids[..., 0], log_probs[..., 0]

    def grow_tree(self, tree: DraftTree, bonus: Tensor, log_probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        matrix, tolls, places, parents = _tree_tensors(tree, log_probs.shape[1], log_probs.device)
        flat = log_probs.clamp(min=LEAST).flatten(1)
        scores = (flat @ matrix.t() if flat.is_cuda else cpu_products.product(flat, matrix)) - tolls  # [B, listed]
        # Stable, so that equals are taken in the list's order; then in that order, in which parents come first.
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : tree.nodes].sort(dim=-1).values
        rows = torch.zeros(len(best), len(parents) + 1, dtype=torch.int32, device=best.device)  # the last: the root
        rows.scatter_(1, best, _offsets(tree.nodes, best).add(1).expand(len(best), -1))
        tokens = ids.flatten(1).gather(1, places[best])
        above = rows.gather(1, parents[best])
        return self.join_ids(bonus, tokens), torch.cat([torch.full_like(above[:, :1], -1), above], dim=1)

    # -- choosing tokens -------------------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        best, ids = self._best(logits)
        if self.tp > 1:
            ids = ids + self.rank * logits.shape[-1]
            best = torch.stack(self.communicator.all_gather(best))  # [tp, B, R]
            ids = torch.stack(self.communicator.all_gather(ids))
            ids = ids.take_along_dim(best.argmax(dim=0, keepdim=True), dim=0)[0]
        return ids.int()

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the largest of this rank's logits in each row, and its id: [B, R] each."""
        best, ids = logits.max(dim=-1)
        return best, ids

    def sample(self, logits: Tensor, sampling: SamplingInputs[Tensor]) -> Tensor:
        logits = torch.cat(self.communicator.all_gather(logits), dim=-1).float()  # [B, R, V]
        greedy = sampling.temperature == 0
        # From the largest down: divided by a temperature near 0, logits as they are would overflow to inf - inf.
        above = logits - logits.amax(dim=-1, keepdim=True)
        scaled = above / torch.where(greedy, 1.0, sampling.temperature)[:, None, None]
        descending, vocabulary = scaled.sort(dim=-1, descending=True).values, logits.shape[-1]

        top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocabulary).clamp(max=vocabulary)
        smallest = descending.gather(-1, (top_k.long() - 1)[:, None, None].expand(-1, logits.shape[1], 1))  # [B, R, 1]
        if sampling.min_p is not None:
            smallest = smallest.maximum(sampling.min_p.log()[:, None, None])  # the largest is 0

        sorted_probs = self.probabilities(descending.masked_fill(descending < smallest, -torch.inf))
        before = self.running_sum(sorted_probs) - sorted_probs
        # Rounding must not cut a tail that top_p 1 keeps: there the bound is beyond any sum.
        top_p = torch.where(sampling.top_p < 1, sampling.top_p, 2.0)[:, None, None]
        inside = (before < top_p) & (descending >= smallest)
        count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
        smallest = torch.maximum(smallest, descending.gather(-1, count - 1))

        probs = self.probabilities(scaled.masked_fill(scaled < smallest, -torch.inf))
        cdf = self.running_sum(probs)
        drawn = (cdf <= sampling.uniform[..., None] * cdf[..., -1:]).sum(dim=-1)
        # Rounding may put the point at the very end: the last id that was kept is meant.
        last = torch.where(probs > 0, torch.arange(vocabulary, device=logits.device), 0).amax(dim=-1)
        return torch.where(greedy[:, None], logits.argmax(dim=-1), drawn.minimum(last)).int()

    def probabilities(self, logits: Tensor) -> Tensor:  # of the last dimension, whose largest is 0
        return logits.softmax(dim=-1)

    def running_sum(self, x: Tensor) -> Tensor:  # the same
        # CUDA sums one row alone in an order that depends on timing: ranks could draw different tokens.
        is_alone = x.is_cuda and x.numel() == x.shape[-1]
        return x.expand(2, *x.shape[1:]).cumsum(dim=-1)[:1] if is_alone else x.cumsum(dim=-1)

    def penalize(self, logits: Tensor, penalties: Penalties[Tensor]) -> Tensor:
        logits, rows = logits.float(), penalties.rows
        changed = penalized(logits[0, rows], penalties, self.rank * logits.shape[-1])
        return logits.index_copy(1, rows, changed[None])

    def mask(self, logits: Tensor, mask: TokenMask[Tensor]) -> Tensor:
        logits, size = logits.float(), logits.shape[-1]
        bits = mask.words[..., None] >> torch.arange(32, device=logits.device) & 1  # [n, W, 32]
        allowed = bits.flatten(1)[:, self.rank * size : (self.rank + 1) * size].bool()
        return logits.index_copy(1, mask.rows, logits[0, mask.rows].masked_fill(~allowed, -torch.inf)[None])

    def shape(self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor) -> Tensor:
        return shaped(logits, shapes, token_ids, start, self.rank * logits.shape[-1])

    def log_probabilities(self, logits: Tensor, ids: Tensor) -> Logprobs[Tensor]:
        logits = torch.cat(self.communicator.all_gather(logits), dim=-1).float()  # [B, R, V]
        # Not by torch's sum over the vocabulary: its digits depend on how many rows there are.
        every = logits.log_softmax(dim=-1)
        # As many for everybody: which of two equals comes first is not to depend on what others ask.
        top = every.topk(min(MOST_LOGPROBS, every.shape[-1]), dim=-1)
        return Logprobs(every.take_along_dim(ids.long()[..., None], dim=-1)[..., 0], top.indices.int(), top.values)

    def accept(
        self, token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        next_rows = logit_rows[:, :-1] + 1  # [B, R - 1]: where each choice's draft stands
        drafts = token_ids.take_along_dim(next_rows.long().clamp(max=token_ids.shape[1] - 1), dim=1)
        equal = (drafts == target_ids[:, :-1]) & (next_rows < row_count[:, None])
        accepted = equal.int().cumprod(dim=1).sum(dim=1)
        return self.acceptance(accepted.int(), target_ids, logit_rows, row_count)

    def acceptance(
        self, accepted: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        """Makes the outcome of so many accepted drafts [B], or fewer where a slot has not so many."""
        accepted = accepted.minimum((row_count - 1).clamp(min=0, max=logit_rows.shape[1] - 1))
        index = accepted[:, None].long()
        bonus = target_ids.take_along_dim(index, dim=1)[:, 0]
        committed = logit_rows.take_along_dim(index, dim=1)[:, 0] + 1
        return Acceptance(accepted, committed, bonus)

    def slots(self, start: Tensor) -> Tensor:
        """Numbers the call's slots, of start [B]: [B] int64."""
        return torch.arange(len(start), device=start.device)

    def lookup(self, name: str, ids: Tensor) -> Tensor:
        return self.weights[name][ids]

    def masked_block(self, bonus: Tensor, block_offsets: Tensor, mask_id: int) -> Tensor:
        return torch.where(block_offsets == 0, bonus[:, None], mask_id)

    def join_ids(self, bonus: Tensor, drafts: Tensor) -> Tensor:
        return torch.cat([bonus[:, None], drafts], dim=1)

    def column(self, ids: Tensor) -> Tensor:
        return ids[:, None]


def attention_mask(
    rows: int, lengths: Tensor, bound: int, causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Makes the mask [B, 1, rows, bound] of the last rows of lengths [B]: 0 where a row sees a key, else -inf."""
    key = torch.arange(bound, device=lengths.device)
    position = lengths[:, None] - rows + torch.arange(rows, device=lengths.device)  # [B, rows]
    last = position if causal else lengths[:, None] - 1
    seen = key <= last[:, None, :, None]
    if window is not None:
        seen = seen & (key > position[:, None, :, None] - window)
    # Not true and false: attention would make these numbers of them in every layer.
    return (
        torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        .masked_fill_(~seen, -torch.inf)
        .expand(-1, -1, rows, -1)
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes [a * cos - b * sin, b * cos + a * sin] of x = [a, b]; the first half's signs are in the sines."""
    turned: Tensor = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    return turned.add_(x * cos)


@lru_cache
def _tree_tensors(tree: DraftTree, depths: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes the tensors of a tree's list: by what scores are computed, what is taken off them, and where nodes are.

    Returns:
        [listed, depths * RANKS] of 0 and 1; [listed] FP32; the place of each node's own token among ids
        [depths * RANKS]; and of its parent in the list, past its end for the bonus token. Both [listed] int64.
    """
    matrix = torch.zeros(len(tree.parents), depths, RANKS)
    for node, path in enumerate(tree.paths):
        matrix[node, torch.arange(len(path)), torch.tensor(path)] = 1
    depth = torch.tensor(tree.depths)
    places = (depth - 1) * RANKS + torch.tensor(tree.ranks)
    parents = torch.tensor(tree.parents)
    parents = torch.where(parents < 0, len(parents), parents)
    tensors = matrix.flatten(1), depth * TOLL, places, parents
    return tensors[0].to(device), tensors[1].to(device), tensors[2].to(device), tensors[3].to(device)


def _offsets(count: int, like: Tensor) -> Tensor:
    """Makes 0..count-1, int32, on the device of `like`."""
    return torch.arange(count, dtype=torch.int32, device=like.device)
