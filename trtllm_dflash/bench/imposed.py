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
from trtllm_dflash.session.philox import uniform_numbers
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.torch_session import SlotAccept
from trtllm_dflash.step import Accept, StepInputs

Tensor = torch.Tensor

#: Sets these numbers apart from those that tokens are sampled with.
_KEY = 0x0AC0


def imposed(acceptance: ImposedAcceptance) -> SlotAccept:
    """Makes a session's `accept` that draws the number of accepted drafts, whatever was drafted.

    A draft survives with the curve's probability once those before it have. The number drawn depends on the request's
    seed and the position alone, as sampling's does: give each request its own seed.
    """

    def of(slots: SlotTensors) -> Accept:
        seeds = slots.seed  # [slots], written in place: a captured graph reads what a request left there

        def accept(ops: Ops[Tensor], inputs: StepInputs[Tensor], target_ids: Tensor) -> Acceptance[Tensor]:
            assert isinstance(ops, TorchOps)
            accepted = draw_accepted(seeds[ops.slots(inputs.start)], inputs.start, acceptance.survival, MAX_ROWS)
            return ops.acceptance(accepted, target_ids, inputs.logit_rows, inputs.row_count)

        return accept

    return of


def draw_accepted(seeds: Tensor, start: Tensor, survival: float, rows: int) -> Tensor:
    """Draws the number of accepted drafts [B] int32, of `rows` - 1: i or more with probability survival^i.

    Args:
        seeds: [B] int64 of the requests.
        start: [B] int32, the positions of the steps' first rows.
    """
    if survival <= 0:
        return torch.zeros_like(start)
    if survival >= 1:
        return torch.full_like(start, rows - 1)
    numbers = uniform_numbers(seeds ^ _KEY, start[:, None])[:, 0] + 2.0**-25  # never 0
    return (numbers.log() / math.log(survival)).floor().clamp(max=rows - 1).int()
