"""The PyTorch session on a GPU: each step is one CUDA graph, from one step's outputs to the next one's.

There is a graph for each number of slots of a few, number of rows, kind of drafting, number of prompt rows beside them,
and whether any slot samples: all of them are captured by `prepare`. One holds the whole step: random numbers, verify,
choice, acceptance, drafting, and the slots' next rows. The host fills in who takes part with which rows, launches, and
reads what was decided one step behind.

Steps with log-probabilities, penalties or masks have graphs of their own, two for each: the first ends where tokens are
to be chosen, so that masks can be made while the device computes it.
"""

import gc
import logging
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch

from trtllm_dflash import kernels
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.ladder import StepKind, most_pieces, prompt_sizes
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models import build_target
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_experts import join_shared_experts, tile_experts
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.cuda_slots import CudaSlotOps
from trtllm_dflash.ops.cuda_states import CudaStateOps, CudaStates, slot_segments
from trtllm_dflash.ops.draft_tree import draft_tree
from trtllm_dflash.ops.exact_ops import ExactOps
from trtllm_dflash.ops.penalties import KeptShapes, keep_replies
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.calls import Decode, Piece, Prefill, Prepare, SlotSampling, Step
from trtllm_dflash.session.captured_shares import CapturedShares, outcome_of
from trtllm_dflash.session.captured_trees import path_moves
from trtllm_dflash.session.choice import (
    TORCH,
    Choice,
    experts_of,
    find_kernels,
    find_parts,
    precision_of,
    slots_attention,
    torch_choice,
)
from trtllm_dflash.session.graphs import StepGraphs, decoded_rows, words_of, words_of_inputs
from trtllm_dflash.session.host_copies import HostCopies
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.report import Report
from trtllm_dflash.session.shaping import (
    Begun,
    CapturedStep,
    Ended,
    Left,
    Shaping,
    is_shaped,
    prompt_logprobs,
    report_of,
)
from trtllm_dflash.session.torch_session import SlotAccept, TorchSession
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


class CudaSession(TorchSession):
    """Runs captured steps.

    Args: as in `TorchSession`, and
        kernels: as `--kernels` takes them, see `session.kernels.Kernels`.

    Raises:
        EngineError: as `Session`; and our kernels compute such an engine and are missing, stale or not for this GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        communicator: Communicator | None = None,
        accept: SlotAccept | None = None,
        kernels: Kernels = "auto",
    ) -> None:
        of_gpu = config, kernels, torch.cuda.get_device_capability(device)
        self.library, self._why = find_kernels(*of_gpu)
        self._parts = self.library or find_parts(*of_gpu)
        is_ours, self._is_exact = self.library is not None, kernels == "exact"
        if config.kv_memory is not None and not is_ours:
            raise EngineError(f"--kv-memory: caches in pages need our CUDA kernels ({self._why}); build without it")
        if config.draft_tree and not is_ours:
            raise EngineError(f"--draft-tree: on a GPU trees need our CUDA kernels ({self._why}); leave it out")
        if self._parts is not None:
            weights = join_shared_experts(weights, build_target(config.target).expert_layers(), config.dtype, device)
        super().__init__(config, weights, device, communicator, accept, is_ours, is_ours, self._is_exact)
        if self._parts is not None:
            tile_experts(self.weights, config.dtype, of_gpu[-1])
        if self.library is not None:
            self.communicator.share_memory(device)
            if self._is_exact and not self.communicator.sums_in_order:
                raise EngineError("--kernels exact: these GPUs do not read each other's memory; leave it out")
            self._page_copies = self._copies_of_pages(windowed=False)
            self._window_copies = self._copies_of_pages(windowed=True) if self.paging.window else self._page_copies
        self._graphs = StepGraphs(config, self._capture, config.chunk if is_ours else 0)
        self._shaping: Shaping | None = None  # made when shaped steps are prepared
        self._left: Left | None = None  # by the last step, if that was shaped
        self._hidden: Tensor | None = None  # [1, N, H] the target's last states of a shaped step's flat rows
        self._pages = self._page_tables(self._tables)
        self._window_pages = self._page_tables(self._window_tables) if self.paging.window else self._pages
        of_trees = self.caches, self._windowed, self._pages, self._window_pages
        self._moves = path_moves(*of_trees) if config.draft_tree else None
        self._captured_shares = CapturedShares.of(config, device) if is_ours else None
        self._sampling = [SlotSampling()] * config.max_batch  # what the device keeps of each slot
        self._copies = HostCopies()
        self._constants: dict[tuple[int, int], Tensor] = {}
        self._arrivals = self._row_arrivals()
        self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        self._own_stream = torch.cuda.Stream(device)
        self._own_stream.wait_stream(torch.cuda.current_stream(device))

    @cached_property
    def choice(self) -> Choice:
        device = torch.cuda.get_device_name(self.device)
        if self._parts is None:
            return torch_choice(self.config, device, self._why)
        ours, is_half = str(self._parts), self.config.dtype in kernels.HALVES
        has_products = is_half and torch.cuda.get_device_capability(self.device)[0] in kernels.SKINNY_GPUS
        target, ops = self._step.target, CudaSlotOps(self.weights, self.caches, self.communicator)
        return Choice(
            backend="torch, captured",
            device=device,
            precision=precision_of(self.config),
            attention=ours if self.library is not None else slots_attention(target, ops, ours),
            products=ours if has_products else TORCH,
            experts=experts_of(self.config, self.weights, self.communicator, ours),
            why=self._why,
            library=self._parts.path,
            exact=f"{self._parts}, {device}, tp {self.config.tp}" if self._is_exact else "no",
        )

    def _stream(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._own_stream)

    def _free(self) -> None:
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        super()._free()

    def _needs(self, call: Prepare) -> bool:
        return bool(self._graphs.missing(call))

    @torch.inference_mode()
    def _prepare(self, call: Prepare, progress: Progress) -> None:
        torch.cuda.empty_cache()
        begin, before, count = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0], len(self._graphs)
        # torch collects garbage before each capture: what is there now need not be looked through every time.
        gc.collect()
        gc.freeze()
        try:
            with self._stream():
                if call.shaped and self._shaping is None:
                    self._make_shaping()
                self._graphs.prepare(call, progress)
        except torch.OutOfMemoryError:
            raise EngineError(
                "the GPU's memory ran out while steps were captured; build with a smaller --max-batch or --max-seq-len"
            ) from None
        finally:
            gc.unfreeze()
        torch.cuda.empty_cache()  # what the steps took that ran before each capture
        taken = (before - torch.cuda.mem_get_info(self.device)[0]) / GB
        seconds, captured = time.perf_counter() - begin, len(self._graphs) - count
        if self.communicator.rank == 0:
            _log.info("%s: %d steps captured in %.1f s and %.2f GB", self.config.name, captured, seconds, taken)

    def _run_decode(self, call: Decode) -> Tensor:
        kind, captured = self._graphs.find(call)
        self._replay(captured, call.row_counts + [0] * (kind.slots - len(call.row_counts)))
        return captured.decided

    def _make_shaping(self) -> None:
        """Makes the tensors that shaped steps share."""
        self._shaping = Shaping(self.config, self.device)
        if self._flat:
            config = self.config
            rows = config.max_batch * (config.slot_rows if config.drafter else 1) + prompt_sizes(config.chunk)[-1]
            self._hidden = torch.zeros(1, rows, config.target.hidden_size, dtype=config.dtype, device=self.device)

    def _replay(self, captured: CapturedStep, words: list[int]) -> None:
        if words != captured.filled:
            on_host = torch.tensor(words, dtype=torch.int32, pin_memory=True)
            captured.words[: len(words)].copy_(on_host, non_blocking=True)
            captured.filled = words
        captured.graph.replay()

    def _capture(self, kind: StepKind) -> CapturedStep:
        is_ours = self.library is not None
        count = 4 * kind.segments + kind.all_rows if is_ours else kind.slots
        words = torch.zeros(count, dtype=torch.int32, device=self.device)
        begin, end = (self._begin_flat, self._end_flat) if is_ours else (self._begin_slots, self._end_slots)
        # Once for real, with no slot taking part: libraries set themselves up, which no capture allows.
        end(begin(words, kind), kind)
        graph, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph() if kind.shaped else None
        with self._capturing(graph):
            begun = begin(words, kind)
            if rest is None:
                decided, logprobs = end(begun, kind)
        if rest is not None:
            with self._capturing(rest):  # begun's tensors are held until here, and so nobody else's
                decided, logprobs = end(begun, kind)
        return CapturedStep(graph, words, decided, rest, logprobs)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[object]:
        # Other threads may go on allocating: only this one is held to what a capture allows.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._own_stream, capture_error_mode="thread_local")

    # -- flat rows ---------------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> StepLimits:
        limits = super().limits
        # No more than the largest steps are captured for.
        if not self._flat:
            return replace(limits, shapes=True)
        pieces = min(limits.pieces, most_pieces(self.config.chunk))
        return replace(limits, pieces=pieces, divides=self._captured_shares is not None, shapes_trees=False)

    def prompt_room(self, call: Step, pieces: list[int]) -> int:
        if not self._flat:
            return super().prompt_room(call, pieces)
        try:
            kind, _ = self._graphs.find_flat(call, pieces, is_shaped(call))
        except EngineError:  # said where it is run
            return super().prompt_room(call, pieces)
        return min(kind.all_rows - decoded_rows(call), self.limits.prompt_rows)

    def _run_step(self, call: Step) -> Outcome:
        if not self._flat:
            return self._run_shaped_piece(call) if call.pieces else self._run_shaped_slots(call)
        for pages, changes in ((self._pages, call.pages), (self._window_pages, call.window_pages)):
            if changes:
                kernels.set_pages(pages.table, self._int32([list(given) for given in changes]))
        for copy, changes in ((self._page_copies, call.copies), (self._window_copies, call.window_copies)):
            for source, target, rows in changes:
                copy(source, target, rows)
        self._copy_kept_states(call)
        for piece in call.pieces:
            if self._sampling[piece.slot] != piece.sampling:
                self._slots.set_sampling(piece.slot, piece.sampling)
                self._sampling[piece.slot] = piece.sampling
        shaped = is_shaped(call)
        kind, captured = self._graphs.find_flat(call, [len(piece.token_ids) for piece in call.pieces], shaped)
        if shaped:
            self._slots.set_drafts([(guide.slot, guide.drafts) for guide in call.guides])
        if self._captured_shares is not None:
            self._captured_shares.prepare(kind)
        self._replay(captured, words_of(call, kind))
        report = self._finish_flat(captured, call) if shaped else None
        ranks = self._ranks_told(kind)
        outcome = outcome_of(captured.decided, kind, len(call.decode), len(call.pieces), report, ranks, self._copies)
        self._left = Left.of(outcome, call, kind.rows + ranks) if shaped else None
        return outcome

    def drafts(self, slots: list[int]) -> list[list[int]]:
        left = self._left
        if left is None or not left.places.keys() >= set(slots):
            return super().drafts(slots)
        return left.drafts(slots)

    def _begin_flat(self, words: Tensor, kind: StepKind) -> Begun:
        """Runs a step up to its choice of tokens, from tensors on the device alone."""
        slots, has_trees = self._slots, bool(self.config.draft_tree)
        if kind.shares:
            assert self._captured_shares is not None
            words = self._captured_shares.divided(words, kind)
        layout = kernels.begin_rows(
            words,
            slots.tokens,
            slots.start,
            segments=kind.segments,
            decode_segments=kind.slots,
            pieces=kind.pieces,
            rows=kind.all_rows,
            logit_rows=kind.logit_rows,
            cuts=-(-kind.all_rows // kernels.MAX_ROWS) + kind.pieces if kind.pieces else 0,
            seeds=slots.seed if kind.sampled else None,
            parents=slots.parents if has_trees and kind.rows > 1 else None,
        )
        uniform = layout.logit_uniform
        inputs = StepInputs(
            token_ids=layout.token_ids[None],
            start=layout.segments[:, 1],
            row_count=layout.segments[:, 3],
            logit_rows=layout.logit_rows[None],
            block_offsets=self._constant(1, min(kind.rows, self._slots.block)),
            sampling=None if uniform is None else slots.row_sampling_with(layout.logit_slot, uniform[:, None], True),
            shapes=self._shapes if kind.shaped else None,
            logprobs=kind.shaped,
        )
        ops = self._ops(layout, self._slots.block if kind.shares else kind.rows, kind.prompt_rows)
        forward = self._step.forward(ops, inputs, kind.drafting, kind.tells_prompts)
        if kind.tells_prompts:
            assert self._hidden is not None
            self._hidden[:, : kind.all_rows].copy_(forward.features.hidden)
        return Begun(ops, inputs, forward, layout)

    def _end_flat(self, begun: Begun, kind: StepKind) -> Ended:
        """Runs the rest of the step; returns [G, 1 + rows + ranks]: accepted, the target's choices, drafts' ranks."""
        layout, slots, has_trees = begun.layout, self._slots, bool(self.config.draft_tree)
        assert layout is not None and isinstance(begun.ops, CudaOps)
        begun.ops.advance()
        tree = draft_tree(kind.tree, self.config.block_size) if kind.tree else None
        divided = kind.block_rows if kind.shares else 0
        out = self._step.finish(begun.ops, begun.inputs, begun.forward, kind.drafting, tree, divided=divided)
        if kind.shaped:
            kernels.keep_replies(layout, self._shapes.penalties, out.accepted)
        outputs = kernels.end_rows(
            layout,
            slots.tokens,
            slots.start,
            self.config.max_seq_len - 1,
            out.target_ids[0],
            out.accepted,
            out.next_start,
            out.next_tokens,
            width=self._slots.block if kind.shares else kind.rows,
            next_parents=out.next_parents,
            parents=slots.parents if has_trees else None,
            ranks=begun.ops.ranks if self._ranks_told(kind) else None,
            depths=self._ranks_told(kind),
        )
        if kind.shares:
            assert self._captured_shares is not None and out.next_gains is not None
            return self._captured_shares.told(outputs, layout, out.next_gains), None
        # With the next drafts: grammars ask for them.
        return torch.cat([outputs, out.next_tokens], dim=1) if kind.shaped else outputs, out.logprobs

    def _ranks_told(self, kind: StepKind) -> int:
        """Counts the drafts of a slot whose ranks the host reads: one for each depth of a tree that may be verified."""
        return self._slots.block - 1 if self._tells_ranks and kind.rows > 1 else 0

    # -- shaped steps: with log-probabilities, penalties or masks ----------------------------------------------------

    @property
    def _shapes(self) -> KeptShapes:
        assert self._shaping is not None
        return self._shaping.shapes

    def _finish_flat(self, captured: CapturedStep, call: Step) -> Report:
        """Launches the choice of tokens, and all behind it, of a step of flat rows whose target runs."""
        assert self._shaping is not None and captured.rest is not None and self._hidden is not None
        counts = [count for _, count in call.decode] + [len(piece.token_ids) for piece in call.pieces]
        first_rows = list(accumulate(counts, initial=0))
        logits = [count for _, count in call.decode] + [1] * len(call.pieces)
        first_logits = list(accumulate(logits, initial=0))
        slots = [slot for slot, _ in call.decode] + [piece.slot for piece in call.pieces]
        ops = TorchOps(self.weights, self.caches, self.communicator)
        prompts = prompt_logprobs(self._step, ops, self._hidden, call, first_rows[len(call.decode) :])
        self._shaping.replay(captured.rest, call, dict(zip(slots, first_logits, strict=False)))
        return report_of(call, captured.logprobs, first_logits, prompts)

    def _begin_slots(self, words: Tensor, kind: StepKind) -> Begun:
        """Runs a step of [slots, rows] up to its choice of tokens, from tensors on the device alone."""
        inputs = self._decode_inputs(words, kind.rows, kind.rows, kind.sampled)
        if kind.shaped:
            inputs = replace(inputs, shapes=self._shapes.of_slots(kind.slots), logprobs=True)
        ops = self._slot_ops(inputs, 0)
        return Begun(ops, inputs, self._step.forward(ops, inputs, kind.drafting))

    def _end_slots(self, begun: Begun, kind: StepKind) -> Ended:
        inputs = begun.inputs
        out = self._step.finish(begun.ops, inputs, begun.forward, kind.drafting)
        begun.ops.advance()
        if inputs.shapes is not None:
            keep_replies(inputs.shapes.penalties, inputs.token_ids, out.accepted, inputs.row_count)
        return self._keep_decoded(inputs, out), out.logprobs

    def _run_shaped_slots(self, call: Step) -> Outcome:
        """Runs a shaped step of decoding slots on [slots, rows]."""
        assert self._shaping is not None
        self._slots.set_drafts([(guide.slot, guide.drafts) for guide in call.guides])
        kind, captured = self._graphs.find_slots(call)
        assert captured.rest is not None
        row_counts = [0] * kind.slots
        for slot, count in call.decode:
            row_counts[slot] = count
        self._replay(captured, row_counts)
        slots = [slot for slot, _ in call.decode]
        self._shaping.replay(captured.rest, call, {slot: slot * kind.rows for slot in slots})
        report = report_of(call, captured.logprobs, [slot * kind.rows for slot in slots])
        return Outcome(captured.decided, report).of(slots)

    def _run_shaped_piece(self, call: Step) -> Outcome:
        """Reads a piece of a prompt on [slots, rows], with what is asked of the reply's first token."""
        assert self._shaping is not None
        (piece,) = call.pieces
        how = call.drafting, call.block, piece.sampling
        prefill = Prefill(piece.slot, piece.start, piece.token_ids, piece.last, *how)
        out = self._run(self._shaping.piece_inputs(call, self._prefill_inputs(prefill)), call.drafting, piece.slot)
        report = report_of(call, out.logprobs, [0], out.prompt_logprobs)
        return Outcome(self._keep_prefill(prefill, out), report)

    def _copies_of_pages(self, windowed: bool) -> kernels.PageCopies:
        """Makes the copies of all caches' pages, or of those of layers with a window that have pages of their own."""
        caches = {name: cache for name, cache in self.caches.items() if (name in self._windowed) == windowed}
        return kernels.PageCopies(caches.values())

    def _page_tables(self, tables: list[list[int]]) -> kernels.Pages:
        return kernels.Pages(torch.tensor(tables, dtype=torch.int32, device=self.device), self.paging.rows)

    def _row_arrivals(self) -> Tensor | None:
        return None if self.library is None else kernels.row_arrivals(self.device)

    def _ops(self, layout: kernels.Rows, rows: int, prompt_rows: int | None = None) -> CudaOps:
        every, kind = (self.weights, self.caches, self.communicator), ExactOps if self._is_exact else CudaOps
        reports = None if self._shaping is None else self._shaping.reports
        foretold = None if self._captured_shares is None else self._captured_shares.kept
        assert self.states is None or isinstance(self.states, CudaStates)
        pages, more = (self._pages, self._window_pages), (reports, foretold, prompt_rows)
        return kind(*every, pages[0], layout, rows, pages[1], self._moves, *more, self.states, self._arrivals)

    def _constant(self, count: int, rows: int) -> Tensor:
        """Makes 0..rows-1 for each of `count` slots, [count, rows]. Made before a capture, it is not in the graph."""
        if (count, rows) not in self._constants:
            self._constants[count, rows] = self._offsets(rows).repeat(count, 1)
        return self._constants[count, rows]

    # -- [slots, rows]: as flat rows, where our kernels compute ------------------------------------------------------

    def run(self, call: Step) -> Outcome:
        if self._flat or not is_shaped(call):
            return super().run(call)
        self._copy_first(call)
        return self._launch(call)

    def _sampling_of(self, slots: slice, positions: Tensor) -> SamplingInputs[Tensor]:
        # Always: whether any slot has one is for the device to know.
        return replace(super()._sampling_of(slots, positions), min_p=self._slots.min_p[slots])

    def prefill(self, call: Prefill) -> Outcome:
        if not self._flat:
            return super().prefill(call)
        piece = Piece(call.slot, call.start, call.token_ids, call.last, call.sampling)
        return self.run(Step([], [piece], call.drafting, call.block, call.sampling.temperature > 0))

    def decode(self, call: Decode) -> Outcome:
        if not self._flat:
            return super().decode(call)
        slots = [(slot, count) for slot, count in enumerate(call.row_counts) if count]
        outcome = self.run(Step(slots, [], call.drafting, call.block, call.sampled))
        places = {slot: place for place, (slot, _) in enumerate(slots)}
        return outcome.of([places.get(slot, 0) for slot in range(len(call.row_counts))])

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        if not self._flat:
            ops = self._slot_ops(inputs, first_slot)
            out = self._step(ops, inputs, drafting)
            ops.advance()
            return out
        if inputs.sampling is not None:
            raise EngineError("a step of given inputs is greedy on flat rows")
        count, rows = inputs.token_ids.shape
        logit_rows = inputs.logit_rows.numel()
        layout = kernels.begin_rows(
            self._int32(words_of_inputs(inputs, first_slot)),
            self._slots.tokens,
            self._slots.start,
            segments=count,
            decode_segments=0,
            pieces=count,
            rows=count * rows,
            logit_rows=logit_rows,
            cuts=-(-rows // kernels.MAX_ROWS) * count,
        )
        # Where each slot's logit rows lie among all: tight, as its rows do.
        index = layout.logit_first[:-1, None] + self._constant(1, inputs.logit_rows.shape[1])
        index = index.clamp(max=logit_rows - 1)
        ids, start = layout.token_ids[None], layout.segments[:, 1]
        flat = replace(inputs, token_ids=ids, start=start, logit_rows=layout.logit_rows[None])
        ops = self._ops(layout, 1)
        out = self._step(ops, flat, drafting)
        ops.advance()
        return replace(out, target_ids=out.target_ids[0][index])

    def _slot_ops(self, inputs: StepInputs[Tensor], first_slot: int) -> TorchOps:
        """Makes the operations of a step of [slots, rows]."""
        count, rows = inputs.token_ids.shape
        shared = self.weights, self._caches_of(first_slot, count), self.communicator
        if not isinstance(self.states, CudaStates):
            return TorchOps(*shared) if self._parts is None else CudaSlotOps(*shared)
        return CudaStateOps(*shared, self.states, slot_segments(first_slot, inputs.start, inputs.row_count, rows), rows)
