"""Log-probabilities, penalties and masks of captured steps: tensors that the host writes and the device reads."""

from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TypeAlias

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import PIECES
from trtllm_dflash.kernels import RowMasks, Rows
from trtllm_dflash.ops.base import Ops
from trtllm_dflash.ops.choosing import Logprobs, TokenMask
from trtllm_dflash.ops.penalties import KeptShapes
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.calls import Step, masks_of
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.penalties import PenaltyTensors
from trtllm_dflash.session.report import Report
from trtllm_dflash.step import DraftVerifyStep, Forward, PromptRows, StepInputs

Tensor = torch.Tensor

#: Rows of prompts whose log-probabilities are computed at a time: their logits are many.
_PROMPT_ROWS = 64

_LOGPROBS = [part.name for part in fields(Logprobs)]


@dataclass
class CapturedStep:
    """A step as graphs, with the tensors that the host writes and reads."""

    graph: torch.cuda.CUDAGraph
    words: Tensor  # read by each replay: see `words_of`, or [B] row counts where rows are not flat
    decided: Tensor  # [G, 1 + rows + ranks] written by each replay; of a shaped step with the next tokens behind them
    rest: torch.cuda.CUDAGraph | None = None  # of a shaped step: all from the choice of tokens on
    logprobs: Logprobs[Tensor] | None = None  # of its choices, [1, R] or [B, R]
    filled: list[int] = field(default_factory=list)  # what words hold, once they were filled in


@dataclass
class Begun:
    """A step whose target has run."""

    ops: TorchOps
    inputs: StepInputs[Tensor]
    forward: Forward[Tensor]
    layout: Rows | None = None  # of flat rows


#: What the host reads of a step, and log-probabilities of its choices where it is shaped.
Ended: TypeAlias = tuple[Tensor, Logprobs[Tensor] | None]


def is_shaped(call: Step) -> bool:
    """Whether a step has log-probabilities, penalties or masks."""
    return bool(call.reports or call.penalized or call.guides)


class _Copies:
    """Copies of masks while the target computes: on a stream of their own, behind the step that read the last ones."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.read, self.copied = torch.cuda.Event(), torch.cuda.Event()


class Shaping:
    """Penalties of slots, and masks of rows, where captured steps read them.

    The host writes them ahead of a step, and waits for nothing.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        rows = config.max_batch * (config.slot_rows if config.drafter else 1) + PIECES
        words = -(-config.target.vocab_size // 32)
        self.penalties = PenaltyTensors(config, device)
        self._masks = RowMasks(
            words=torch.full((rows, words), -1, dtype=torch.int32, device=device),
            rows=torch.full((rows,), -1, dtype=torch.int32, device=device),
        )
        self.reports = torch.zeros(1, dtype=torch.int32, device=device)  # 0: nobody asks for log-probabilities
        self._reports = False  # likewise, as the host knows it
        self._penalized: list[int] = []  # slots
        # Made once: to take pinned memory may wait until the device is idle.
        self._words = torch.empty(rows, words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows = torch.full((rows,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._marks: dict[int, tuple[int, int]] = {}  # the first mask and the number of them, by first row
        self._copies = _Copies(device) if device.type == "cuda" else None

    @property
    def shapes(self) -> KeptShapes:
        """The tensors, as captured steps read them."""
        return KeptShapes(self.penalties.kept, self._masks)

    def penalize(self, call: Step) -> None:
        """Lets the slots of a step be penalized that are to be, and no others."""
        for piece in call.pieces:
            if piece.penalties is not None:
                self.penalties.set(piece.slot, piece.penalties)
        if call.penalized != self._penalized:
            self.penalties.choose(call.penalized)
            self._penalized = list(call.penalized)

    def report(self, call: Step) -> None:
        """Lets log-probabilities be computed where a step is asked for them."""
        if call.logprobs != self._reports:
            self.reports.fill_(call.logprobs)
            self._reports = call.logprobs

    def mask(self, call: Step, first_rows: dict[int, int]) -> None:
        """Gives the rows of a step their masks.

        Args:
            first_rows: each slot's first logit row.
        """
        counts = [guide.rows for guide in call.guides]
        runs = zip(accumulate(counts, initial=0), counts, strict=False)
        marks = {first_rows[guide.slot]: run for guide, run in zip(call.guides, runs, strict=True)}
        if not marks and not self._marks:
            return
        if self._copies is None:
            self._copy_masks(call, marks)
            return
        self._copies.copied.synchronize()  # it was long ago
        self._copies.stream.wait_event(self._copies.read)
        with torch.cuda.stream(self._copies.stream):
            self._copy_masks(call, marks)
            self._copies.copied.record()
        torch.cuda.current_stream().wait_stream(self._copies.stream)

    def replay(self, rest: torch.cuda.CUDAGraph, call: Step, first_rows: dict[int, int]) -> None:
        """Launches the choice of tokens, and all behind it, of a step whose target runs. Arguments as in `mask`."""
        self.penalize(call)
        self.report(call)
        self.mask(call, first_rows)
        rest.replay()
        if self._copies is not None:
            self._copies.read.record()

    def _copy_masks(self, call: Step, marks: dict[int, tuple[int, int]]) -> None:
        """Copies a step's masks to the device, and which of them each row has, where that has changed."""
        if marks:
            words = masks_of(call, self._words)
            self._masks.words[: len(words)].copy_(words, non_blocking=True)
        if marks != self._marks:
            self._rows.fill_(-1)
            for row, (first, count) in marks.items():
                self._rows[row : row + count] = torch.arange(first, first + count, dtype=torch.int32)
            self._masks.rows.copy_(self._rows, non_blocking=True)
            self._marks = marks

    def piece_inputs(self, call: Step, inputs: StepInputs[Tensor]) -> StepInputs[Tensor]:
        """Completes the inputs of a step that has one piece of a prompt alone, and is not captured."""
        (piece,) = call.pieces
        device, count = inputs.start.device, len(piece.token_ids)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        inputs = replace(inputs, logprobs=call.logprobs)
        if call.penalized:
            self.penalize(call)
            follows = torch.zeros(1, count, dtype=torch.bool, device=device)  # a prompt is no part of a reply
            rows = first, first + piece.slot, inputs.start + count - 1
            penalties = self.penalties.of_rows(*rows, inputs.token_ids[0], follows)
            inputs = replace(inputs, penalties=penalties)
        if call.guides:
            words = masks_of(call)
            inputs = replace(inputs, mask=TokenMask(first, _send(words, torch.empty_like(words, device=device))))
        if piece.next_ids:
            rows_, ids = (_ints(numbers, device) for numbers in (range(len(piece.next_ids)), piece.next_ids))
            inputs = replace(inputs, prompt=PromptRows(rows_, ids))
        return inputs


@dataclass(frozen=True)
class Left:
    """Drafts that a step has left, which its outcome brings."""

    outcome: Outcome
    places: dict[int, int]  # of its slots, in the outcome
    first: int  # column

    @classmethod
    def of(cls, outcome: Outcome, call: Step, columns: int) -> "Left":
        """Finds the drafts of a step whose outcome has so many columns between `accepted` and the next tokens."""
        every = [slot for slot, _ in call.decode] + [piece.slot for piece in call.pieces]
        return cls(outcome, {slot: place for place, slot in enumerate(every)}, first=columns + 2)

    def drafts(self, slots: list[int]) -> list[list[int]]:
        """Reads the drafts of some of its slots."""
        rows = self.outcome.read_whole()
        return [rows[self.places[slot]][self.first :] for slot in slots]


def prompt_logprobs(
    step: DraftVerifyStep, ops: Ops[Tensor], hidden: Tensor, call: Step, first_rows: list[int]
) -> Logprobs[Tensor] | None:
    """Computes log-probabilities [1, P] of the prompts of a step of flat rows; None where none are asked for.

    Args:
        hidden: [1, N, H] the last states that the step's target leaves.
        first_rows: of each piece.
    """
    both = list(zip(call.pieces, first_rows, strict=False))
    rows = [first + i for piece, first in both for i in range(len(piece.next_ids))]
    ids = [token for piece in call.pieces for token in piece.next_ids]
    parts = []
    for begin in range(0, len(rows), _PROMPT_ROWS):
        some = (_ints(numbers[begin : begin + _PROMPT_ROWS], hidden.device) for numbers in (rows, ids))
        parts.append(step.prompt_logprobs(ops, hidden, PromptRows(*some)))
    if not parts:
        return None
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in _LOGPROBS))


def report_of(
    call: Step, choices: Logprobs[Tensor] | None, first_choices: list[int], prompts: Logprobs[Tensor] | None = None
) -> Report:
    """Starts to copy the log-probabilities that a step is asked for to the host; they come with its outcome.

    Args:
        choices, prompts: of all rows, [1, R] or [B, R].
        first_choices: where each segment's rows begin among those of `choices`.
    """
    counts = [0] * len(call.decode) + [len(piece.next_ids) for piece in call.pieces]
    return Report(
        choices=_on_host(choices) if call.logprobs else None,
        first_choices=first_choices,
        prompts=_on_host(prompts),
        first_prompts=list(accumulate(counts, initial=0)),
        starts=[0] * len(call.decode) + [piece.start for piece in call.pieces],
    )


def _on_host(logprobs: Logprobs[Tensor] | None) -> Logprobs[Tensor] | None:
    if logprobs is None:
        return None
    copies = []
    for name in _LOGPROBS:
        x = getattr(logprobs, name).flatten(0, 1)[None]
        copies.append(torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True))
    return Logprobs(*copies)


def _ints(numbers: list[int] | range, device: torch.device) -> Tensor:
    """Makes [1, n] int32 of numbers."""
    on_host = torch.tensor([list(numbers)], dtype=torch.int32)
    return _send(on_host, torch.empty_like(on_host, device=device))


def _send(x: Tensor, to: Tensor) -> Tensor:
    """Copies x from the host, which does not wait for it."""
    return to.copy_(x.pin_memory() if to.is_cuda else x, non_blocking=True)
