"""Acceptance imposed on a session's steps: engines of random weights serve whole replies as if their drafts were good.

What the steps compute and cost is untouched; only how many drafts they accept is drawn, on the device, inside the step
and its captured graph. The text means nothing. What is measured so is labelled `imposed` wherever it is shown.
"""

import math

import torch

from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.kernels import MAX_ROWS
from trtllm_dflash.ops.base import Acceptance, Ops
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.torch_session import SlotAccept
from trtllm_dflash.step import Judgement, StepInputs, accept_equals

Tensor = torch.Tensor

#: Sets these numbers apart from those that tokens are sampled with.
_KEY = 0x0AC0
#: Of a hash of 64 bits: an odd factor near 2^64 / the golden ratio, as int64, and shifts.
_FACTOR, _SHIFTS = 0x9E3779B97F4A7C15 - 2**64, (31, 29)


def imposed(acceptance: ImposedAcceptance, tree: int = 0) -> SlotAccept:
    """Makes a session's `accept` that draws the number of accepted drafts, whatever was drafted, and foretells it.

    A draft survives with the curve's probability once those before it have. The number drawn depends on the request's
    seed and the position alone, as sampling's does: give each request its own seed.

    Args:
        tree: nodes of the trees that take the place of chains of the whole block: those commit as many more tokens as
            was measured; 0: there are none.
    """
    of_trees = acceptance.tree_survival(tree) if tree else None

    def of(slots: SlotTensors) -> Judgement:
        rows = min(MAX_ROWS, slots.block)  # a tree's depth is the block's
        seeds = slots.seed  # [slots], written in place: a captured graph reads what a request left there

        def accept(ops: Ops[Tensor], inputs: StepInputs[Tensor], target_ids: Tensor) -> Acceptance[Tensor]:
            assert isinstance(ops, TorchOps)
            if target_ids.numel() == len(inputs.start):  # pieces of prompts, and steps without drafts: nothing to draw
                return accept_equals(ops, inputs, target_ids)
            of = seeds[ops.slots(inputs.start)], inputs.start
            accepted = draw_accepted(*of, acceptance.survival, rows)
            if of_trees is not None:
                accepted = torch.where(inputs.row_count > tree, draw_accepted(*of, of_trees, rows), accepted)
            return ops.acceptance(accepted, target_ids, inputs.logit_rows, inputs.row_count)

        def foretell(ops: Ops[Tensor], inputs: StepInputs[Tensor], log_probs: Tensor) -> Tensor:
            return torch.full_like(log_probs, math.log(max(acceptance.survival, 1e-9)))

        return Judgement(accept, foretell)

    return of


def draw_accepted(seeds: Tensor, start: Tensor, survival: float | Tensor, rows: int) -> Tensor:
    """Draws the number of accepted drafts [B] int32, of `rows` - 1: i or more with probability survival^i.

    Args:
        seeds: [B] int64 of the requests.
        start: [B] int32, the positions of the steps' first rows.
        survival: of all, or [B] of each, between 0 and 1.
    """
    if isinstance(survival, Tensor):
        rate: float | Tensor = survival.log().reciprocal()
    elif survival <= 0:
        return torch.zeros_like(start)
    elif survival >= 1:
        return torch.full_like(start, rows - 1)
    else:
        rate = 1 / math.log(survival)
    # Few operations: each is a kernel of the steps that are measured.
    bits = (seeds ^ _KEY) * _FACTOR + start
    for shift in _SHIFTS:
        bits = (bits ^ (bits >> shift)) * _FACTOR
    numbers = ((bits >> 40) & 0xFFFFFF) * 2.0**-24 + 2.0**-25  # never 0
    return (numbers.log() * rate).int().clamp(max=rows - 1)
