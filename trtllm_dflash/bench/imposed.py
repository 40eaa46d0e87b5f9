"""Acceptance imposed on a running session: engines of random weights serve whole replies as if their drafts were good.

What the steps compute and cost is untouched; only how many drafts they accept is drawn, on the device, inside the step
and its captured graph. The text means nothing. What is measured so is labelled `imposed` wherever it is shown.
"""

import math

import torch

from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.ops.base import Acceptance, Ops
from trtllm_dflash.session.philox import uniform_numbers
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs, StepOutputs

Tensor = torch.Tensor

#: Sets these numbers apart from those that tokens are sampled with.
_KEY = 0x0AC0


def impose_acceptance(session: Session, acceptance: ImposedAcceptance) -> None:
    """From now on the session's steps accept as many drafts as the curve says, whatever was drafted.

    A draft survives with the curve's chance once those before it have. The number drawn depends on the request's seed
    and the position alone, as sampling's does: give each request its own seed.

    Raises:
        SettingsError: the session's step is compiled.
    """
    if not isinstance(session, TorchSession):
        raise SettingsError("--simulate-acceptance: a TensorRT plan accepts what it verifies; use the torch backend")
    session._step = _ImposedStep(session, acceptance)


class _ImposedStep(DraftVerifyStep):
    def __init__(self, session: TorchSession, acceptance: ImposedAcceptance) -> None:
        super().__init__(session._step.target, session._step.drafter)
        self._seeds = session._slots.seed  # [slots] in place: a captured graph reads what a request wrote there
        self._survival = acceptance.survival

    def __call__(  # type: ignore[override]
        self, ops: Ops[Tensor], inputs: StepInputs[Tensor], drafting: Drafting
    ) -> StepOutputs[Tensor]:
        def accept(token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor) -> Acceptance[Tensor]:
            """ids and rows [B, R] int32, row_count [B] int32."""
            # A chunk of a prompt is one slot's, and one row: there is nothing to draw.
            accepted = draw_accepted(self._seeds[: len(row_count)], inputs.start, self._survival, target_ids.shape[1])
            accepted = accepted.minimum((row_count - 1).clamp(min=0))
            index = accepted[:, None].long()
            bonus = target_ids.take_along_dim(index, dim=1)[:, 0]
            committed = logit_rows.take_along_dim(index, dim=1)[:, 0] + 1
            return Acceptance(accepted, committed.int(), bonus)

        if inputs.logit_rows.shape[1] > 1:
            ops.accept = accept  # type: ignore[method-assign]
        return super().__call__(ops, inputs, drafting)


def draw_accepted(seeds: Tensor, start: Tensor, survival: float, rows: int) -> Tensor:
    """Accepted drafts [B] int32 of `rows` - 1: i or more of them with the chance survival^i.

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
