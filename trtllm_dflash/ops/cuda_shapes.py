"""Penalties, masks and log-probabilities of [slots, rows] on a GPU by our kernels, which are for flat rows."""

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.choosing import MOST_LOGPROBS, Logprobs
from trtllm_dflash.ops.penalties import KeptShapes
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor


class CudaShapes(TorchOps):
    """The choice of tokens where something more is asked of it; logits are [B, R, V/tp], a logit for every row."""

    def shape(self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor) -> Tensor:
        of = self._flat(logits, shapes, token_ids, start)
        return kernels.shape_logits(*of).view(logits.shape)

    def argmax_shaped(self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor) -> Tensor:
        """Finds ids as the base does, without a copy of rows that change in nothing."""
        if self.tp > 1 or not logits.is_contiguous():
            return super().argmax_shaped(logits, shapes, token_ids, start)
        shaped = kernels.shape_changed_logits(*self._flat(logits, shapes, token_ids, start))
        return kernels.argmax(logits, shaped)[1]

    def log_probabilities(self, logits: Tensor, ids: Tensor) -> Logprobs[Tensor]:
        if self.tp > 1:
            return super().log_probabilities(logits, ids)
        count = min(MOST_LOGPROBS, logits.shape[-1])
        found = kernels.log_probabilities(logits.flatten(0, 1), ids.flatten(), count)
        return Logprobs(*(x.unflatten(0, ids.shape) for x in found))

    def _flat(
        self, logits: Tensor, shapes: KeptShapes, token_ids: Tensor, start: Tensor
    ) -> tuple[Tensor, kernels.Rows, kernels.KeptPenalties, kernels.RowMasks, int]:
        """Takes logits as flat rows, of which each slot has as many: as `kernels.shape_logits` does."""
        size = logits.shape[-1]
        layout = slot_rows(token_ids.int(), start.int())
        return logits.flatten(0, 1), layout, shapes.penalties, shapes.masks, self.rank * size


def slot_rows(token_ids: Tensor, start: Tensor) -> kernels.Rows:
    """Lays out [slots, rows] as flat rows with a logit each: token_ids [B, R] at start [B]."""
    slots, rows = token_ids.shape
    every = torch.arange(slots * rows + 1, dtype=torch.int32, device=start.device)
    slot, first = every[: slots * rows] // rows, every[: slots + 1] * rows
    segments = torch.stack([every[:slots], start, first[:slots], torch.full_like(start, rows)], dim=1)
    return kernels.Rows(
        segments=segments,
        decoding=segments,
        pieces=segments[:0],
        row_segment=slot,
        token_ids=token_ids.flatten(),
        logit_first=first,
        logit_rows=every[: slots * rows],
        logit_slot=slot,
        logit_position=(start[:, None] + every[:rows]).flatten(),
        cuts=every[:0].view(0, 4),
        logit_uniform=None,
    )
