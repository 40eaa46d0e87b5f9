"""`TorchOps` on a GPU by our CUDA kernels, on flat rows over paged caches: the fast path in BF16 and FP16."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Context, DeltaLayer, SamplingInputs
from trtllm_dflash.ops.choosing import MOST_LOGPROBS, Logprobs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_caches import CudaCaches
from trtllm_dflash.ops.cuda_experts import CudaExperts
from trtllm_dflash.ops.cuda_products import CudaProducts
from trtllm_dflash.ops.cuda_states import CudaStates
from trtllm_dflash.ops.draft_tree import LEAST, RANKS, TOLL, DraftTree
from trtllm_dflash.ops.penalties import KeptShapes

Tensor = torch.Tensor


class CudaOps(CudaCaches, CudaExperts, CudaProducts):
    """Computes a step of flat rows: x is [1, N, H] for models, and what is per slot is [G], one for each segment.

    The layout of the rows lies on the device. A call whose inputs stay at their addresses may be captured into a CUDA
    graph.

    Args: as `TorchOps`, but
        caches: K/V caches by name, [pages, heads, page rows, D].
        pages: of every slot.
        layout: of the step's rows.
        rows: the most that a decoding slot has.
        window_pages: of every slot in layers with a window; None: the same.
        moves: of accepted paths, in all the target's caches; None: slots have no trees.
        reports: [1] int32: where it is 0 when the step runs, log-probabilities are not computed. None: they are.
        foretold: what slots keep of their drafts' chances, where they share rows.
        prompt_rows: those that are no decoding slot's, at most; None: all but `rows` for each of those.
        states: of gated delta nets; None: the model has none.
        arrivals: of `kernels.row_arrivals`; None: rows are appended before they attend.

    Raises:
        EngineError: the kernels are not built.
    """

    _is_exact = False  # whether a row's attention depends on its own keys alone

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None,
        pages: kernels.Pages,
        layout: kernels.Rows,
        rows: int,
        window_pages: kernels.Pages | None = None,
        moves: kernels.PathMoves | None = None,
        reports: Tensor | None = None,
        foretold: kernels.Foretold | None = None,
        prompt_rows: int | None = None,
        states: CudaStates | None = None,
        arrivals: Tensor | None = None,
    ) -> None:
        super().__init__(weights, caches, communicator)
        kernels.load()
        self._pages = pages
        self._window_pages = window_pages or pages
        self._layout = layout
        self._decoding = layout.decoding
        self._most = rows
        self._moves = moves
        self._reports = reports
        self._foretold = foretold
        own_rows = len(layout.row_segment) - len(layout.decoding) * rows
        self._prompt_rows = own_rows if prompt_rows is None else prompt_rows
        self._cuda_states = states
        counts = {len(x) for x in (layout.row_segment, layout.segments, layout.decoding)}
        has_single_rows = rows == 1 and len(counts) == 1 and not self._is_exact
        self._arrivals = arrivals if has_single_rows else None
        self._taps: tuple[Tensor, ...] = ()  # [N, H] of the rows, once they are known
        self._accepted: kernels.AcceptedPaths | None = None  # of trees, once they are known
        self._blocks: kernels.Blocks | None = None  # that are drafted, once they are divided

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x if rows.shape[1] == x.shape[1] else x[:, rows[0]]

    def _row_segment(self, rows: int) -> Tensor | None:
        return self._layout.row_segment if len(self._layout.row_segment) == rows else None

    # -- attention ---------------------------------------------------------------------------------------------------

    def self_attention(self, layer: AttentionLayer, qkv: Tensor, start: Tensor) -> Tensor:
        keys, values = self._caches(layer)
        out = torch.empty(qkv.shape[1], layer.heads * layer.head_size, dtype=qkv.dtype, device=qkv.device)
        append, own = self._append_of(layer), self._without_gates(layer, qkv)[0]
        if self._arrivals is not None and kernels.takes_single_rows(append, keys, layer.heads, len(self._decoding)):
            window, sinks = self._window_and_sinks(layer)
            places = keys, values, self._pages_of(layer), self._layout, layer.heads, own, out, self._arrivals
            return kernels.attend_single_rows(append, *places, window, sinks, layer.scale)[None]
        q = append.rows(keys, values, self._pages_of(layer), self._layout, layer.heads, own, out)
        if len(self._decoding):
            self._attend(layer, q, self._decoding, self._most, out, causal=True, row_path=self._layout.row_path)
        if len(self._layout.cuts):
            self._attend_prompts(layer, q, out)
        return out[None]

    def _leaves_room(self, name: str) -> bool:
        return self._arrivals is not None and ".self_attn." in name

    def _attend_prompts(self, layer: AttentionLayer, q: Tensor, out: Tensor) -> None:
        """Fills `out` with the attention of pieces of prompts: in cuts, where they are too few for whole items."""
        keys, values = self._caches(layer)
        if layer.scale is not None or not kernels.takes_prompts(q, keys, self._prompt_rows):
            self._attend(layer, q, self._layout.cuts, kernels.MAX_ROWS, out, causal=True)
            return
        window, sinks = self._window_and_sinks(layer)
        kernels.attend_prompts(q, keys, values, self._pages_of(layer), self._layout.pieces, out, window, sinks)

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        return self._projected(layer, kv, index)

    def keep_context(self, layer: AttentionLayer, context: Context[Tensor], start: Tensor) -> None:
        keys, values = self._caches(layer)
        k, v = context.tensors
        append = self._append_of(layer)
        append.context(keys, values, self._pages_of(layer), self._layout, layer.heads, (k, v))

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        keys, values = self._caches(layer)
        (segments, block, _), (k, v) = qkv.shape, context.tensors
        append = self._append_of(layer)
        q = append.block(keys, values, self._pages_of(layer), self._layout, layer.heads, qkv, (k, v), committed)
        out = torch.empty(segments * block, layer.heads * layer.head_size, dtype=qkv.dtype, device=qkv.device)
        causal = layer.causal_block
        self._attend(layer, q, self._layout.segments, block, out, causal, added=committed, block=block)
        return out.view(segments, block, -1)

    def divided_attention(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        keys, values = self._caches(layer)
        rows = self._divided.rows
        out = torch.empty(qkv.shape[1], layer.heads * layer.head_size, dtype=qkv.dtype, device=qkv.device)
        q = self._append_of(layer).rows(keys, values, self._pages_of(layer), rows, layer.heads, qkv[0], out)
        assert self._foretold is not None
        self._attend(layer, q, rows.segments, self._foretold.drafts + 1, out, layer.causal_block)
        return out[None]

    def _attend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        segments: Tensor,
        rows: int,
        out: Tensor,
        causal: bool,
        added: Tensor | None = None,
        block: int = 0,
        row_path: Tensor | None = None,
    ) -> None:
        """Fills `out` with these segments' attention to a layer's caches. Arguments as in `kernels.attend_rows`."""
        keys, values = self._caches(layer)
        window, sinks = self._window_and_sinks(layer)
        pages, scales = self._pages_of(layer), self._scales(layer)
        more = causal, window, sinks, scales, added, block, row_path, self._is_exact, layer.scale
        kernels.attend_rows(q, keys, values, pages, segments, rows, out, *more)

    def _pages_of(self, layer: AttentionLayer) -> kernels.Pages:
        return self._window_pages if layer.gives_back else self._pages

    # -- gated delta nets --------------------------------------------------------------------------------------------

    def gated_delta(self, layer: DeltaLayer, x: Tensor, gates: Tensor, start: Tensor) -> Tensor:
        assert self._cuda_states is not None
        most = min(max(self._most, self._prompt_rows), x.shape[1])
        return self._cuda_states.compute(layer, self.weights, x[0], gates[0], self._layout.segments, most)[None]

    def advance(self) -> None:
        if self._cuda_states is not None:
            self._cuda_states.advance(self._layout.segments, len(self._layout.token_ids))

    # -- choosing tokens ---------------------------------------------------------------------------------------------

    def shape(self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor) -> Tensor:
        kept, first = shapes.penalties, self.rank * logits.shape[-1]
        return kernels.shape_logits(logits[0], self._layout, kept, shapes.masks, first)[None]

    def argmax_shaped(self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor) -> Tensor:
        """Finds ids as the base does, without a copy of rows that change in nothing."""
        of = logits[0], self._layout, shapes.penalties, shapes.masks, self.rank * logits.shape[-1]
        return self._first_of_ranks(logits, *kernels.argmax(logits, kernels.shape_changed_logits(*of)))

    def log_probabilities(self, logits: Tensor, ids: Tensor) -> Logprobs[Tensor]:
        if self.tp > 1:
            return super().log_probabilities(logits, ids)
        count = min(MOST_LOGPROBS, logits.shape[-1])
        return Logprobs(*(x[None] for x in kernels.log_probabilities(logits[0], ids[0], count, self._reports)))

    def sample(self, logits: Tensor, sampling: SamplingInputs[Tensor]) -> Tensor:
        """Draws each row's id: logits [1, R, V/tp] -> [1, R]; parameters are a row's, [R], and uniform is [R, 1]."""
        return super().sample(logits.transpose(0, 1), sampling).transpose(0, 1)

    def accept(
        self, token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        if self._layout.row_path is not None:
            return self._accepted_paths(target_ids)
        return Acceptance(*kernels.accept_rows(self._layout, target_ids[0]))

    def acceptance(
        self, accepted: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        """Makes the outcome of so many accepted drafts [G]; of fewer where a segment has not so many."""
        if self._layout.row_path is not None:
            return self._accepted_paths(target_ids, accepted)
        first, counts = self._layout.logit_first, self._layout.segments[:, 3]
        logits = first[1:] - first[:-1]
        accepted = accepted.minimum((logits - 1).clamp(min=0))
        index = (first[:-1] + accepted).clamp(max=target_ids.shape[1] - 1)
        committed = torch.where(counts > 0, counts - logits + accepted + 1, 0)
        return Acceptance(accepted, committed, target_ids[0, index])

    def _accepted_paths(self, target_ids: Tensor, imposed: Tensor | None = None) -> Acceptance[Tensor]:
        rest = self._taps, self._moves
        found = self._accepted = kernels.accept_paths(self._layout, target_ids[0], imposed, *rest)
        return Acceptance(found.accepted, found.committed, found.bonus, found.next_start, found.path)

    # -- trees of drafts ---------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Tensor | None:
        """The ranks of accepted drafts, as `AcceptedPaths` has them; None where slots have no trees."""
        return None if self._accepted is None else self._accepted.ranks

    def top_ids(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if count != kernels.TOP_COUNT or self.tp > 1:
            return super().top_ids(logits, count)
        ids, log_probs, _ = kernels.top_ids(logits, normalized=True)
        return log_probs, ids

    def _top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        if count != kernels.TOP_COUNT:
            return super()._top(logits, count)
        ids, best, total = kernels.top_ids(logits)
        return total[..., None], best, ids

    def grow_tree(self, tree: DraftTree, bonus: Tensor, log_probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        lists = _tree_lists(tree, log_probs.device)
        return kernels.grow_tree(*lists, tree.nodes, LEAST, TOLL, bonus, log_probs, ids.contiguous())

    def first_choices(self, x: Tensor, verdict: Acceptance[Tensor]) -> Tensor:
        # Log-probabilities are told of slots alone that verify chains, whose accepted rows are the first ones already.
        is_choice = x.dtype == torch.int32 and x.dim() == 2
        return x if self._accepted is None or not is_choice else self._accepted.choices[None]

    def announce_taps(self, taps: Sequence[Tensor]) -> None:
        self._taps = tuple(tap[0] for tap in taps)

    def final_rows(self, taps: Sequence[Tensor], verdict: Acceptance[Tensor]) -> Tensor:
        if self._accepted is None:
            return super().final_rows(taps, verdict)
        assert self._accepted.joined is not None, "no taps were announced"
        return self._accepted.joined[None]

    def move_kv(self, layers: Sequence[AttentionLayer], start: Tensor, verdict: Acceptance[Tensor]) -> None:
        """Does nothing: the launch that accepts has moved the rows of all the target's layers."""

    def slots(self, start: Tensor) -> Tensor:
        return self._layout.segments[:, 0]

    # -- rows by survival --------------------------------------------------------------------------------------------

    @property
    def _divided(self) -> kernels.Blocks:
        assert self._blocks is not None, "no blocks were divided"
        return self._blocks

    @property
    def drafting_slots(self) -> Tensor:
        """[M] int32: whose each row of those blocks is."""
        return self._divided.rows.logit_slot

    def divide_blocks(self, next_start: Tensor, bonus: Tensor, rows: int, mask_id: int) -> Tensor:
        assert self._foretold is not None
        self._blocks = kernels.divide_blocks(self._layout, self._foretold, next_start, bonus, rows, mask_id)
        return self._blocks.rows.token_ids[None]

    def keep_drafts(self, accepted: Tensor, ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        assert self._foretold is not None
        of = self._layout, self._divided, self._foretold
        return kernels.keep_drafts(*of, accepted, ids[0], log_probs[0]), self._divided.gains

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, ids = self.top_ids(logits, RANKS)
        return ids[..., 0], log_probs[..., 0]


@lru_cache
def _tree_lists(tree: DraftTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Makes a tree's list as the kernels read it: parents, and places of tokens, [listed] int32 each."""
    both = zip(tree.depths, tree.ranks, strict=True)
    places = [(depth - 1) * RANKS + rank for depth, rank in both]
    parents, places_there = (torch.tensor(x, dtype=torch.int32, device=device) for x in (tree.parents, places))
    return parents, places_there
