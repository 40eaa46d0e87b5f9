"""The PyTorch session: `DraftVerifyStep` over torch's operations, on CPU or CUDA, alone or as one rank of several."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import torch

from trtllm_dflash.cost.memory import plan_pages, windowed_caches
from trtllm_dflash.cost.states import checkpoint_count
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import PIECES
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.choosing import TokenMask
from trtllm_dflash.ops.communicator import Communicator, Solo
from trtllm_dflash.ops.cuda_states import CudaStates
from trtllm_dflash.ops.delta_states import DeltaStates, Run
from trtllm_dflash.ops.draft_tree import draft_tree
from trtllm_dflash.ops.penalties import Penalties
from trtllm_dflash.ops.ragged_ops import Layout, RaggedOps, Segment
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.calls import CopyStates, Place, Step, masks_of
from trtllm_dflash.session.choice import Choice, torch_choice
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.penalties import PenaltyTensors
from trtllm_dflash.session.report import Report
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.shares import Shares
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.states import allocate_states
from trtllm_dflash.session.weights import (
    add_norms_less_one,
    complete_weights,
    join_weights,
    multiplied_weights,
    packed_weights,
    why_rows_differ,
)
from trtllm_dflash.step import BY_EQUALITY, Drafting, DraftVerifyStep, Judgement, PromptRows, StepInputs, StepOutputs

Tensor = torch.Tensor

#: Makes the rule of which drafts survive from what the device keeps of every slot.
SlotAccept: TypeAlias = Callable[[SlotTensors], Judgement]


class TorchSession(Session):
    """Computes each step with torch's own operations. On the CPU its rows are flat, and its caches may be pages.

    Args: as in `Session`, and
        weights: the rank's stored tensors, on CPU.
        accept: makes the rule of acceptance from the slots' tensors (see `DraftVerifyStep`); None: drafts survive that
        equal the target's choices.
        flat: whether steps take flat rows, of decoding slots and pieces of prompts together.
        paged: whether pages are short unless the engine says otherwise.
        exact: whether a row gets the same bits whatever else is in the batch, on a GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        communicator: Communicator | None = None,
        accept: SlotAccept | None = None,
        flat: bool = True,
        paged: bool = False,
        exact: bool = False,
    ) -> None:
        paging = plan_pages(config, paged) if flat else None
        super().__init__(config, device, communicator or Solo(), paging)
        self._flat = flat
        moved = multiplied_weights(weights, config.dtype, device, exact)
        complete = complete_weights(moved, config, self.communicator.rank)
        self.weights = packed_weights(complete) if device.type == "cpu" else complete
        self._inexact = why_rows_differ(self.weights) if device.type == "cpu" else None
        drafter = Drafter(config.drafter) if config.drafter else None
        judgement = BY_EQUALITY if accept is None else accept(self._slots)
        # Paths that are imposed are nobody's.
        self._tells_ranks = bool(config.draft_tree) and accept is None
        self._step = DraftVerifyStep(build_target(config.target), drafter, judgement)
        self.states = _allocate_states(config, device)
        if isinstance(self.states, CudaStates):
            join_weights(self.weights, self._step.target.joined_linears())
            add_norms_less_one(self.weights)
        self._penalties: PenaltyTensors | None = None  # made when a request first has any
        self._shares = Shares(config.max_batch, max(config.block_size - 1, 1), device)
        self._are_told = True  # whether the last step told the chances of its drafts
        self._windowed = windowed_caches(config, self.paging)
        # Of each slot, by position. Whoever gives pages says so with the steps; until then each has its share of all.
        slots, width = range(config.max_batch), self.paging.width
        self._tables = [[(slot * width + i) % self.paging.pages for i in range(width)] for slot in slots]
        own = self.paging.window_pages // config.max_batch
        self._window_tables = [[slot * own + i % own for i in range(width)] for slot in slots] if own else self._tables

    @property
    def choice(self) -> Choice:
        return torch_choice(self.config, self.device.type, "our CUDA kernels need a GPU", self._inexact)

    @property
    def limits(self) -> StepLimits:
        # Rows of K/V caches alone do not go on: a state has to stand behind them.
        checkpoints = None if self.states is None else checkpoint_count(self.config)
        if not self._flat:
            return replace(super().limits, checkpoints=checkpoints)
        drafter = self.config.drafter
        divides = checkpoints is None and drafter is not None and drafter.selector is None
        return StepLimits(PIECES, self.config.chunk, mixes=True, shapes=True, divides=divides, checkpoints=checkpoints)

    def run(self, call: Step) -> Outcome:
        return self._launch(call) if self._flat else super().run(call)

    @torch.inference_mode()
    def _place(self, call: Place) -> None:
        if self.states is not None:
            with self._stream():
                self.states.place(call.slot, call.position, call.beside)

    @torch.inference_mode()
    def _copy_states(self, call: CopyStates) -> None:
        assert self.states is not None
        with self._stream():
            self.states.copy(call.source, call.target)

    def _free(self) -> None:
        self.weights = {}
        self.states = None

    # -- flat rows ---------------------------------------------------------------------------------------------------

    def _run_step(self, call: Step) -> Outcome:
        for tables, changes in ((self._tables, call.pages), (self._window_tables, call.window_pages)):
            for slot, index, page in changes:
                tables[slot][index] = page
        self._copy_pages(call)
        self._copy_kept_states(call)
        for piece in call.pieces:
            self._slots.set_sampling(piece.slot, piece.sampling)
        if call.guides:
            self._slots.set_drafts([(guide.slot, guide.drafts) for guide in call.guides])
        decode, shared = call.decode, None
        if call.share:
            if not self._are_told:
                self._shares.forget()
            shared = self._divide(call)
            decode = [(slot, rows) for (slot, _), rows in zip(decode, shared.tolist(), strict=True)]
        layout = Layout(list(self._segments(call, decode)), self.paging.rows)
        ids = [self._slots.tokens[slot, :count] for slot, count in decode]
        ids += [self._int32(piece.token_ids) for piece in call.pieces]
        token_ids = torch.cat(ids)
        inputs = StepInputs(
            token_ids=token_ids[None],
            start=self._int32([segment.start for segment in layout.segments]),
            row_count=layout.counts,
            logit_rows=layout.logit_rows,
            block_offsets=self._offsets(self.config.block_size if call.chances else call.block),
            sampling=self._row_sampling(layout) if call.sampled else None,
            penalties=self._penalties_of(call, layout, token_ids),
            mask=self._mask_of(call, layout),
            logprobs=call.logprobs,
            prompt=self._prompt_rows(call, layout),
        )
        ops = RaggedOps(self.weights, self.caches, self.communicator, layout, self.states)
        tree = draft_tree(call.tree, self.config.block_size) if call.tree else None
        out = self._step(ops, inputs, call.drafting, tree, call.chances)
        if self.states is not None:
            self.states.finish(layout.runs)
        self._slots.start.index_copy_(0, layout.slots, out.next_start.clamp(max=self.config.max_seq_len - 1))
        rows = out.next_tokens.shape[1]
        self._slots.tokens[:, :rows].index_copy_(0, layout.slots, out.next_tokens)
        if self.config.draft_tree:
            run = torch.arange(-1, rows - 1, dtype=torch.int32).expand(len(layout.segments), -1)
            parents = run if out.next_parents is None else out.next_parents
            self._slots.parents[:, :rows].index_copy_(0, layout.slots, parents)
        if inputs.penalties is not None:
            self._note_replies(call, layout, inputs.penalties, ops.bonus_rows)
        decided = torch.cat([out.accepted[:, None], layout.by_segment(out.target_ids)], dim=1)
        if shared is not None:
            slots = layout.slots[: len(decode)]
            self._shares.learn(slots, shared, out.accepted[: len(decode)])
        gains = None
        if out.next_chances is not None:
            gains = self._note_chances(call, layout, out.next_chances)
        self._are_told = gains is not None
        first_prompts = list(accumulate(_next_counts(call), initial=0))
        starts = [segment.start for segment in layout.segments]
        report = Report(out.logprobs, layout.first_logits, out.prompt_logprobs, first_prompts, starts)
        return Outcome(decided, report, shared, gains, ops.ranks if self._tells_ranks else None)

    def _divide(self, call: Step) -> Tensor:
        """Divides the rows that a step's decoding slots share by the chances of their drafts: rows of each."""
        slots, most = torch.tensor(call.decode).unbind(dim=1)
        return self._shares.divide(slots, most, call.share)

    def _note_chances(self, call: Step, layout: Layout, log_probs: Tensor) -> Tensor:
        """Notes the log-probabilities of the drafts that a step has made; sums those of slots that use them."""
        self._shares.note(layout.slots, log_probs)
        drafting = [slot for slot, rows in call.decode if rows > 1] + [p.slot for p in call.pieces if p.last]
        block = torch.full((len(drafting),), self.config.block_size)
        return self._shares.gains(torch.tensor(drafting, dtype=torch.int64), block)

    def _penalties_of(self, call: Step, layout: Layout, token_ids: Tensor) -> Penalties[Tensor] | None:
        """Makes the penalties of a step with token_ids [N]; None where nobody has any."""
        if not call.penalized:
            return None
        if self._penalties is None:
            self._penalties = PenaltyTensors(self.config, self.device)
        for piece in call.pieces:
            if piece.penalties is not None:
                self._penalties.set(piece.slot, piece.penalties)
        rows = [first + i for segment, first in _penalized(call, layout) for i in range(segment.logits)]
        index = torch.tensor(rows)
        positions = layout.positions[0][layout.logit_rows[0][index]]
        follows = layout.follows(rows, len(call.decode))
        return self._penalties.of_rows(index, layout.logit_slots[index], positions, token_ids, follows)

    def _mask_of(self, call: Step, layout: Layout) -> TokenMask[Tensor] | None:
        """Makes the mask of the rows that choose by a grammar; None where there are none."""
        if not call.guides:
            return None
        first = {segment.slot: row for segment, row in zip(layout.segments, layout.first_logits, strict=False)}
        rows = [first[guide.slot] + i for guide in call.guides for i in range(guide.rows)]
        return TokenMask(torch.tensor(rows), masks_of(call))

    def _note_replies(
        self, call: Step, layout: Layout, penalties: Penalties[Tensor], bonus_rows: Sequence[int]
    ) -> None:
        """Notes the tokens that became final, once these logit rows have chosen each segment's bonus token."""
        assert self._penalties is not None
        places = {row: place for place, row in enumerate(penalties.rows.tolist())}
        both = zip(layout.segments, bonus_rows, strict=True)
        noted = [(segment.slot, places[row]) for segment, row in both if segment.slot in call.penalized]
        slots, rows = torch.tensor(noted).unbind(1)
        self._penalties.advance(slots, penalties, rows)

    def _prompt_rows(self, call: Step, layout: Layout) -> PromptRows[Tensor] | None:
        """Finds the rows of prompts whose log-probabilities are to be computed: the first ones of their pieces."""
        counts = _next_counts(call)
        rows = [first + i for first, count in zip(layout.first_rows, counts, strict=False) for i in range(count)]
        if not rows:
            return None
        ids = [token for piece in call.pieces for token in piece.next_ids]
        return PromptRows(self._int32([rows]), self._int32([ids]))

    def _copy_pages(self, call: Step) -> None:
        """Copies pages' first rows in the caches whose pages they are."""
        for name, cache in self.caches.items():
            for source, target, rows in call.window_copies if name in self._windowed else call.copies:
                cache[target, :, :rows] = cache[source, :, :rows]

    def _copy_kept_states(self, call: Step) -> None:
        for source, target in call.state_copies:
            assert self.states is not None
            self.states.copy(source, target)

    def _segments(self, call: Step, decode: list[tuple[int, int]]) -> Iterator[Segment]:
        starts = self._slots.start.tolist()
        runs = [(slot, starts[slot], count, count) for slot, count in decode]
        runs += [(piece.slot, piece.start, len(piece.token_ids), 1) for piece in call.pieces]
        chains = {guide.slot for guide in call.guides}
        trees = {slot for slot, _ in decode if slot not in chains} if self.config.draft_tree else set()
        for slot, start, count, logits in runs:
            parents = self._slots.parents[slot, :count].tolist() if slot in trees else None
            yield Segment(slot, start, count, logits, self._tables[slot], self._window_tables[slot], parents)

    def _row_sampling(self, layout: Layout) -> SamplingInputs[Tensor]:
        """Makes the sampling inputs of each logit row: [R], and its number [R, 1]."""
        sampling = self._slots.row_sampling(layout.logit_slots, layout.positions[0][layout.logit_rows[0]])
        min_p = self._slots.min_p[layout.logit_slots]
        return replace(sampling, min_p=min_p) if min_p.any() else sampling

    # -- [slots, rows] -----------------------------------------------------------------------------------------------

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        caches = self._caches_of(first_slot, len(inputs.token_ids))
        if self.states is None:
            return self._step(TorchOps(self.weights, caches, self.communicator), inputs, drafting)
        slots = enumerate(zip(inputs.start.tolist(), inputs.row_count.tolist(), strict=True))
        runs = [Run(first_slot + i, start, count, entry=i, first=0) for i, (start, count) in slots if count]
        ops = TorchOps(self.weights, caches, self.communicator, self.states, runs)
        out = self._step(ops, inputs, drafting)
        ops.advance()
        return out

    def _caches_of(self, first_slot: int, count: int) -> dict[str, Tensor]:
        """Takes the caches of `count` slots."""
        return {name: cache[first_slot : first_slot + count] for name, cache in self.caches.items()}


def _next_counts(call: Step) -> list[int]:
    """Counts the tokens of prompts whose log-probabilities each segment of a step gives."""
    return [0] * len(call.decode) + [len(piece.next_ids) for piece in call.pieces]


def _penalized(call: Step, layout: Layout) -> list[tuple[Segment, int]]:
    """Lists the segments of a step whose logits are penalized, and where each one's logit rows begin."""
    both = zip(layout.segments, layout.first_logits, strict=False)
    return [(segment, first) for segment, first in both if segment.slot in call.penalized]


def _allocate_states(config: EngineConfig, device: torch.device) -> DeltaStates | None:
    """Allocates what every slot keeps of gated delta nets; None where there are none.

    Raises:
        EngineError: there is no memory for it.
    """
    states = allocate_states(config, device)
    if not states:
        return None
    return (CudaStates if device.type == "cuda" else DeltaStates)(states, config.block_size)
