"""`DraftVerifyStep`: verify, choose, accept and draft, as one graph over `Ops`.

    rows of tokens -> target -> choose -> accept -> [bonus, MASK, MASK, ...] -> drafter -> next rows

The host never stands between draft and verify: a step's outputs are the next one's inputs. Nothing is ever rolled
back: each K/V row lives at its token's absolute position, and the next step starts at the new committed length, so it
writes over whatever was rejected. Drafts may be a tree: then a row stands as deep behind `start` as its node, its K and
V wait where its row is, and those of the accepted path are moved to their positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar, cast

from trtllm_dflash.models.decoder import Decoder, Features
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.base import Acceptance, Ops, SamplingInputs
from trtllm_dflash.ops.choosing import Logprobs, TokenMask
from trtllm_dflash.ops.draft_tree import DraftTree
from trtllm_dflash.ops.penalties import KeptShapes, Penalties

T = TypeVar("T")


class Drafting(str, Enum):
    """The drafter's part in a step."""

    OFF = "off"  # nothing: plain decoding
    CONTEXT = "context"  # writes its context rows and drafts nothing: K = 0, drafting can resume
    BLOCK = "block"  # drafts


@dataclass(frozen=True)
class StepInputs(Generic[T]):
    """Inputs of one step; int32 unless noted.

    A decode step has the bonus token and K drafts as rows, and logit rows 0..K. A prefill step has a prompt chunk, and
    its last real row as the only logit row.
    """

    token_ids: T  # [B, Q]
    start: T  # [B] committed length: the position of row 0
    row_count: T  # [B] how many of the Q rows are real
    logit_rows: T  # [B, R] ascending
    block_offsets: T  # [1, Bd] 0..Bd-1
    sampling: SamplingInputs[T] | None = None  # None: greedy
    penalties: Penalties[T] | None = None  # of flat rows
    mask: TokenMask[T] | None = None  # of flat rows
    shapes: KeptShapes | None = None  # penalties and masks of captured steps, in place of these two
    logprobs: bool = False  # whether log-probabilities of the choices are computed
    prompt: "PromptRows[T] | None" = None  # rows of prompts whose log-probabilities are computed
    parents: T | None = None  # [B, R] for plans of trees: each logit row's parent, -1 for row 0's; None: chains
    tree: bool = False  # for the same: whether a tree is drafted


@dataclass(frozen=True)
class PromptRows(Generic[T]):
    """Rows of prompts, and the token that stands after each; int32."""

    rows: T  # [B, P] ascending
    next_ids: T  # [B, P]


@dataclass(frozen=True)
class Forward(Generic[T]):
    """The target's part of a step, before any token is chosen."""

    features: Features[T]
    logits: T  # [B, R, V/tp]


@dataclass(frozen=True)
class StepOutputs(Generic[T]):
    """Outputs of one step, int32. The tokens that became final are target_ids[b, : accepted[b] + 1]."""

    target_ids: T  # [B, R] the target's choice at each logit row; of a tree, at the accepted ones first
    accepted: T  # [B]
    next_start: T  # [B]
    next_tokens: T  # [B, Bd] bonus and drafts; [B, 1] where nothing was drafted; of a tree [B, nodes + 1]
    next_parents: T | None = None  # [B, nodes + 1] the row of each one's parent; None: the row before
    next_chances: T | None = None  # [B, Bd - 1] FP32 log-probabilities of the drafts, where they were to be told
    logprobs: Logprobs[T] | None = None  # [B, R] of target_ids
    prompt_logprobs: Logprobs[T] | None = None  # [B, P]
    next_gains: T | None = None  # [Bd - 1] FP32, of blocks that share rows: see `Ops.keep_drafts`


#: Says which drafts survive, from the operations, a step's inputs and the target's choices [B, R] at its logit rows.
Accept: TypeAlias = Callable[[Ops[Any], StepInputs[Any], Any], Acceptance[Any]]


#: Tells what is foretold of a step's drafts, from the operations, its inputs and the drafter's own log-probabilities.
Foretell: TypeAlias = Callable[[Ops[Any], StepInputs[Any], Any], Any]


@dataclass(frozen=True)
class Judgement:
    """Rules of which drafts survive, and of what is foretold of them; None: what the drafter itself says."""

    accept: Accept
    foretell: Foretell | None = None


def accept_equals(ops: Ops[T], inputs: StepInputs[T], target_ids: T) -> Acceptance[T]:
    """Accepts the drafts that equal the target's own choices: the text is the target's, to the token."""
    return ops.accept(inputs.token_ids, target_ids, inputs.logit_rows, inputs.row_count)


#: What keeps the text.
BY_EQUALITY = Judgement(accept_equals)


def _choose(ops: Ops[T], inputs: StepInputs[T], logits: T) -> T:
    """Chooses each row's token: [B, R]."""
    shaping = None if inputs.shapes is None else (inputs.shapes, inputs.token_ids, inputs.start)
    if inputs.sampling is None:
        return ops.argmax(logits) if shaping is None else ops.argmax_shaped(logits, *shaping)
    return ops.sample(logits if shaping is None else ops.shape(logits, *shaping), inputs.sampling)


class DraftVerifyStep:
    """One decoding step of a target and, unless it decodes plainly, its drafter.

    Args:
        target, drafter: stateless; None for the drafter decodes plainly.
        judgement: which drafts survive. Anything but `accept_equals` gives up the text, for the sake of a measurement.
    """

    def __init__(self, target: Decoder, drafter: Drafter | None, judgement: Judgement = BY_EQUALITY) -> None:
        self.target = target
        self.drafter = drafter
        self._judgement = judgement

    def __call__(
        self,
        ops: Ops[T],
        inputs: StepInputs[T],
        drafting: Drafting,
        tree: DraftTree | None = None,
        chances: bool = False,
    ) -> StepOutputs[T]:
        """Runs the step; the caches behind `ops` are updated in place.

        Args:
            tree: to draft, out of the block; None: a chain.
            chances: whether to tell the drafts' log-probabilities, of a chain.
        """
        forward = self.forward(ops, inputs, drafting, every_row=inputs.prompt is not None)
        return self.finish(ops, inputs, forward, drafting, tree, chances)

    def forward(self, ops: Ops[T], inputs: StepInputs[T], drafting: Drafting, every_row: bool = False) -> Forward[T]:
        """Runs the target: the part of a step that needs neither penalties nor masks.

        Args:
            every_row: whether the last states of all rows are wanted, not of those with logits alone.
        """
        taps = self.drafter.config.tap_layers if self.drafter and drafting is not Drafting.OFF else ()
        rows = None if every_row else inputs.logit_rows
        features = self.target.forward(ops, inputs.token_ids, inputs.start, taps, rows)
        hidden = ops.gather_rows(features.hidden, inputs.logit_rows) if every_row else features.hidden
        return Forward(features, self.target.logits(ops, hidden))

    def finish(
        self,
        ops: Ops[T],
        inputs: StepInputs[T],
        forward: Forward[T],
        drafting: Drafting,
        tree: DraftTree | None = None,
        chances: bool = False,
        divided: int = 0,
    ) -> StepOutputs[T]:
        """Chooses, accepts and drafts, once the target has run.

        Args: as in `__call__`, and
            divided: rows that the blocks to draft divide among them; 0: each has the block's.
        """
        drafter = None if drafting is Drafting.OFF else self.drafter
        features, logits = forward.features, forward.logits
        chosen = logits if inputs.penalties is None else ops.penalize(logits, inputs.penalties)
        chosen = chosen if inputs.mask is None else ops.mask(chosen, inputs.mask)
        target_ids = _choose(ops, inputs, chosen)
        logprobs = ops.log_probabilities(logits, target_ids) if inputs.logprobs else None
        if drafter:
            ops.announce_taps(features.taps)
        verdict = self._judgement.accept(ops, inputs, target_ids)
        next_start = verdict.next_start
        if next_start is None:
            next_start = ops.block_start(inputs.start, verdict.committed)
        target_ids = ops.first_choices(target_ids, verdict)
        if logprobs is not None:
            parts = (logprobs.chosen, logprobs.top_ids, logprobs.top)
            logprobs = Logprobs(*(ops.first_choices(x, verdict) for x in parts))
        self.target.keep_path(ops, inputs.start, verdict)
        next_tokens, next_parents, next_chances, next_gains = ops.column(verdict.bonus), None, None, None
        if drafter:
            # Before `fc`: its work is that of the rows that stay.
            taps, drafts_by = ops.final_rows(features.taps, verdict), ops.for_drafts()
            context = drafter.context(drafts_by, taps, inputs.start)
            if drafting is Drafting.BLOCK:
                block = context, inputs.start, verdict.committed, verdict.bonus, inputs.block_offsets
                if divided:
                    both = drafter.draft_divided(drafts_by, context, inputs.start, next_start, verdict, divided)
                    told = self._foretold(drafts_by, inputs, both[1])
                    next_tokens, next_gains = drafts_by.keep_drafts(verdict.accepted, both[0], told)
                elif tree is not None:
                    next_tokens, next_parents = drafter.draft_tree(drafts_by, *block, tree)
                elif chances:
                    drafts, next_chances = drafter.draft_with_chances(drafts_by, *block)
                    next_tokens = ops.join_ids(verdict.bonus, drafts)
                    next_chances = self._foretold(ops, inputs, next_chances)
                else:
                    next_tokens = ops.join_ids(verdict.bonus, drafter.draft(drafts_by, *block))
            else:
                drafter.keep_context(drafts_by, context, inputs.start)
        prompt_logprobs = None
        if inputs.prompt is not None:
            prompt_logprobs = self.prompt_logprobs(ops, features.hidden, inputs.prompt)
        return StepOutputs(
            target_ids,
            verdict.accepted,
            next_start,
            next_tokens,
            next_parents,
            next_chances,
            logprobs,
            prompt_logprobs,
            next_gains,
        )

    def _foretold(self, ops: Ops[T], inputs: StepInputs[T], log_probs: T) -> T:
        told = self._judgement.foretell
        return log_probs if told is None else cast(T, told(ops, inputs, log_probs))

    def prompt_logprobs(self, ops: Ops[T], hidden: T, prompt: PromptRows[T]) -> Logprobs[T]:
        """Computes log-probabilities of prompts' tokens, out of the target's last states [B, N, H]."""
        logits = self.target.logits(ops, ops.gather_rows(hidden, prompt.rows))
        return ops.log_probabilities(logits, prompt.next_ids)
